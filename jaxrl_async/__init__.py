"""Fully asynchronous reinforcement learning of language models, on JAX.

`load`, `train` and `replay` are the interface for scripts; see `api`.
"""

import typing

if typing.TYPE_CHECKING:
  from jaxrl_async.api import load
  from jaxrl_async.api import replay
  from jaxrl_async.api import train

__all__ = ["load", "replay", "train"]


def __getattr__(name: str) -> typing.Any:
  """Import `api` on first use: JAX takes seconds to import."""
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from jaxrl_async import api

  return getattr(api, name)
