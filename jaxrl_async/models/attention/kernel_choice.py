"""The choice of an attention implementation: the first that works and agrees.

Each kernel is run once, on one device and with few tokens, and compared with
plain XLA at full precision. It is then compiled at the sizes of the run, which
may be too large for it. A kernel that cannot be imported, lowered, compiled or
run is skipped, for a stated set of errors. Any other error is a bug and is
raised.
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
  """Inputs for trying an implementation.

  Attributes:
    arguments: few tokens; empty for a device that is only described.
    shapes: shapes of the largest call of the run.
  """

  arguments: tuple[Any, ...]
  shapes: tuple[Any, ...]


def tried_window(window: int | None, num_tokens: int) -> int | None:
  """Return the window for a call of this length, which may be a trial's.

  A trial may have fewer tokens than the window. It then gets a window of half
  its length, so that the window is tried at all.
  """
  if window is None or window < num_tokens:
    return window
  return num_tokens // 2


def refusals() -> tuple[type[Exception], ...]:
  """Return the errors that mean that a kernel does not fit a device.

  RuntimeError includes JaxRuntimeError (errors of the compiler and the device),
  NotImplementedError and a missing cuDNN.
  """
  # Of Pallas's errors only one has a public name, and they share no base class.
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
  """Return why an implementation cannot be used, or "" if it agrees.

  Args:
    attend: the implementation.
    trial: what it is run and compiled with.
    expected: result of the reference for the trial's arguments.
    tolerance: absolute and relative.
  """
  compiled = jax.jit(attend)
  try:
    if trial.arguments:
      found = np.asarray(compiled(*trial.arguments), np.float32)
    else:
      found = expected  # assume that a kernel that compiles is correct
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
  """Return the first name whose implementation agrees with "xla".

  Args:
    names: in the order in which they are tried.
    implementations: by name, "xla" among them.
    trial: what they are run and compiled with.
    tolerance: absolute and relative.

  Returns:
    The name, which is "xla" if no other works, and the reason why each name
    before it was not chosen.
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
  """Choose an implementation for a device, as `first_right` does.

  If only "xla" is left, nothing is compiled.

  Args:
    field: of the config, for messages.
    wanted: "auto", or a name that must then work. A name that is not among
      these implementations leaves "xla".
    candidates: names that "auto" tries, by platform.
    implementations: by name.
    make_trial: returns the inputs of the trial.
    device: one of the devices of the run. On a described device, which cannot
      run programs, a kernel is chosen if it compiles.

  Raises:
    ConfigError: the wanted implementation does not work.
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
