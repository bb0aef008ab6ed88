"""Opens the timing record of a run, with what each start has to record."""

from collections.abc import Callable
import pathlib
from typing import Any

import jax
import jaxlib.version

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import given as given_lib
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.devices import xla_flags
from jaxrl_async.engine import row_check
from jaxrl_async.replay import timing_record
from jaxrl_async.storage import config_json

KEY = "timing"  # of the host state: the length of the file
# What a caller may give to a run in place of what the config names. The names
# are those of the arguments of `jaxrl_async.replay`.
GIVEN = ("loss", "episode", "dataset")
INITIAL_PARAMS = "initial_params"  # the same, as True or False


def environment(
  given: given_lib.Given, data: source_lib.Source
) -> dict[str, Any]:
  """Return what the bits of a result depend on besides the configuration."""
  return {
    "jax": jax.__version__,
    "jaxlib": jaxlib.version.__version__,
    "device": jax.devices()[0].device_kind,
    "num_devices": jax.device_count(),
    "xla_flags": given.xla_flags or xla_flags.current(),
    "loss": None if given.loss is None else _name(given.loss),
    "episode": None if given.episode is None else _name(given.episode),
    "dataset": None if given.source is None else given.source.name,
    "data": dict(data.versions),
  }


def _check_rows(
  setup: setup_lib.Setup, flags: str, note: Callable[[str], None]
) -> None:
  """Say so if products on this processor depend on the row of a sequence."""
  config = setup.config
  if not row_check.depends_on_row(
    setup.model,
    assembly.engine_sizes(config),
    config.rollout.dtype,
    num_parts=config.mesh.rollout_data,
  ):
    return
  wanted = xla_flags.of_same_bits()
  if jax.devices()[0].platform != "cpu":
    advice = "logprobs may differ in last digits, and with them tokens"
  elif wanted not in flags:
    advice = f"set {wanted} in XLA_FLAGS before JAX looks for devices"
  elif not wanted and xla_flags.OWN_PRODUCTS in flags:
    advice = f"leave {xla_flags.OWN_PRODUCTS} out of XLA_FLAGS"
  else:
    advice = "its tokens are the same, and their logprobs differ in last digits"
  note(
    "run.exact_resume: not exact on this processor, where the bits of a matrix"
    f" product depend on the row of the sequence; {advice}"
  )


def _name(given: Any) -> str:
  """Return the name of a function or class, with that of its module."""
  kind = given if hasattr(given, "__qualname__") else type(given)
  return f"{kind.__module__}:{kind.__qualname__}"


def open_record(
  setup: setup_lib.Setup,
  workdir: pathlib.Path,
  given: given_lib.Given,
  stored: dict[str, Any],
  first_step: int,
  note: Callable[[str], None],
) -> timing_record.TimingRecord:
  """Open `timing.jsonl` of a run, and record this start.

  Args:
    setup: of this start.
    workdir: of the run.
    given: what the caller of the run provides.
    stored: host state of the checkpoint from which the run goes on.
    first_step: its completed train steps.
    note: is called with lines for the user.
  """
  about = environment(given, setup.source)
  about[INITIAL_PARAMS] = given.initial_params is not None
  if setup.config.run.exact_resume:
    _check_rows(setup, about["xla_flags"], note)
  return timing_record.TimingRecord(
    workdir,
    stored.get(KEY, 0),
    record_steps=setup.config.run.record_timing,
    first_step=first_step,
    environment=about,
    config=config_json.to_stored(setup.config),
    note=note,
  )
