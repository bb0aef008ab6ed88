"""An environment of verifiers that needs what is not installed."""

import no_such_package  # type: ignore  # noqa: F401
