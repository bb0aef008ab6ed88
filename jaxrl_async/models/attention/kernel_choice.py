"""Which implementation a run takes: the first of the platform's that agrees.

A kernel is tried once, on one device, with few tokens, and compared with plain
XLA at full precision; then it is compiled at the sizes of the run, which may be
too large for it. One that cannot be imported, lowered, compiled or run is
passed over, for a stated set of errors; any other error is a bug, and raised.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import topology
from jaxrl_async.models.attention import kernel_names

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """What an implementation is tried on.

  Attributes:
    arguments: few tokens; none for a device that is not there.
    shapes: of the engine's largest call.
  """

  arguments: tuple[Any, ...]
  shapes: tuple[Any, ...]


def refusals() -> tuple[type[Exception], ...]:
  """What a kernel that does not fit raises somewhere on its way to a device.

  RuntimeError covers JaxRuntimeError (a compiler's and a device's errors),
  NotImplementedError and a cuDNN that is not there.
  """
  # Those of Pallas have no public name but one, and no base of their own.
  from jax._src.pallas.mosaic import error_handling
  from jax._src.pallas.triton import lowering
  from jax.experimental.pallas import tpu

  return (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    ImportError,
    error_handling.MosaicError,
    lowering.LoweringError,
    tpu.LoweringException,
  )


def refusal(
  attend: Callable[..., jax.Array],
  trial: Trial,
  expected: np.ndarray,
  tolerance: float,
) -> str:
  """Why an implementation is not to be taken; "" when it is right."""
  compiled = jax.jit(attend)
  try:
    if trial.arguments:
      found = np.asarray(compiled(*trial.arguments), np.float32)
    else:
      found = expected  # what compiles is assumed to be right
    compiled.lower(*trial.shapes).compile()
  except refusals() as error:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
  if np.allclose(found, expected, rtol=tolerance, atol=tolerance):
    return ""
  return f"it is off by {np.abs(found - expected).max():.2g}"


def first_right(
  names: Sequence[str],
  implementations: Mapping[str, Callable[..., jax.Array]],
  trial: Trial,
  tolerance: float,
) -> tuple[str, dict[str, str]]:
  """The first name whose implementation agrees with "xla", which is the last.

  Returns:
    It, and why each one before it was not taken.
  """
  expected = np.zeros(())
  if trial.arguments:
    with jax.default_matmul_precision("highest"):
      expected = jax.jit(implementations["xla"])(*trial.arguments)
    expected = np.asarray(expected, np.float32)
  refused = {}
  for name in names:
    reason = refusal(implementations[name], trial, expected, tolerance)
    if not reason:
      return name, refused
    refused[name] = reason
  return "xla", refused


def pick(
  field: str,
  wanted: str,
  candidates: Mapping[str, tuple[str, ...]],
  implementations: Mapping[str, Callable[..., jax.Array]],
  make_trial: Callable[[], Trial],
  device: Any,
) -> tuple[str, dict[str, str]]:
  """As `first_right`; where only "xla" is left, nothing is compiled.

  Args:
    field: of the config.
    wanted: "auto", or a name that then has to work; of a name that is not of
      these implementations "xla" is left.
    candidates: of "auto", by platform.
    implementations: by name.
    make_trial: gives what they are tried on.
    device: one of those that will run it. What it is that cannot run here is
      taken when it compiles.

  Raises:
    ConfigError: what is wanted does not work.
  """
  if wanted == kernel_names.AUTO:
    names = candidates.get(device.platform, ())
  else:
    names = tuple({wanted} & implementations.keys() - {"xla"})
  if not names:
    return "xla", {}
  trial = make_trial()
  on_device = SingleDeviceSharding(device)
  is_there = not topology.is_described(device)
  trial = Trial(
    arguments=jax.device_put(trial.arguments, on_device) if is_there else (),
    shapes=jax.tree.map(lambda x: x.update(sharding=on_device), trial.shapes),
  )
  tolerance = TOLERANCES[jax.tree.leaves(trial.shapes)[0].dtype.name]
  name, refused = first_right(names, implementations, trial, tolerance)
  if wanted in refused:
    raise sections.ConfigError(
      f"{field}: {wanted} does not work here ({refused[wanted]});"
      f" use {kernel_names.AUTO} or xla"
    )
  return name, refused
