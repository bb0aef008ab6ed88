"""The choice of an attention implementation: the first that works and agrees.

Each kernel is run once, on one device and with few tokens. Its results are
compared with those of plain XLA in float32, computed from the same inputs. A
kernel agrees if none of its arrays is further away than three times the error
that plain XLA makes in the dtype of the run. In bfloat16 that is about 0.7 % of
the array's norm: rounding alone costs 0.2 to 0.5 %, and a kernel that is wrong
by 1 % is refused.

A kernel that agrees is then compiled at the sizes of the run, which may be too
large for it. A kernel that cannot be imported, lowered, compiled or run is
skipped. An error that is neither the compiler's nor one that kernels raise for
shapes they do not take is a bug and is raised.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import sys
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import topology
from jaxrl_async.models.attention import kernel_names

# Errors are the norm of the difference, relative to the norm of what is right.
_TIMES_XLA = 3.0
# Of float32, where XLA itself may be exact: two orders of summation.
_LEAST = 1e-5

# One array or several.
Results = Any
Implementation = Callable[..., Results]


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


# Errors of Pallas, which have neither a public name nor a common base class.
_PALLAS_ERRORS = {
  "jax._src.pallas.mosaic.error_handling": "MosaicError",
  "jax._src.pallas.mosaic.lowering": "LoweringException",
  "jax._src.pallas.mosaic_gpu.lowering": "LoweringError",
  "jax._src.pallas.triton.lowering": "LoweringError",
}


def refusals() -> tuple[type[Exception], ...]:
  """Return the errors that mean that a kernel does not fit a device.

  RuntimeError includes JaxRuntimeError (errors of the compiler and the device),
  NotImplementedError and a missing cuDNN. An error of a module that nobody has
  imported has not been raised.
  """
  loaded = (
    getattr(sys.modules.get(module), name, None)
    for module, name in _PALLAS_ERRORS.items()
  )
  return (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    ImportError,
    *(error for error in loaded if error is not None),
  )


def _distances(found: Results, expected: Results) -> np.ndarray:
  """Return the distance of each array from the right one, relative to its norm.

  An array of zeros is compared absolutely.
  """

  def distance(x: Any, right: Any) -> np.floating[Any]:
    wide, right = (np.asarray(a, np.float32) for a in (x, right))
    return np.linalg.norm(wide - right) / (np.linalg.norm(right) or 1.0)

  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  return np.array([distance(*pair) for pair in pairs])


@dataclasses.dataclass(frozen=True)
class Reference:
  """What a kernel is compared with.

  Attributes:
    results: of plain XLA in float32; None if no device can run programs.
    allowed: the largest distance from each of them.
  """

  results: Results
  allowed: np.ndarray

  @classmethod
  def of(cls, attend: Implementation, trial: Trial) -> "Reference":
    """Compute the results of plain XLA, and how exact they are in the dtype.

    Args:
      attend: plain XLA.
      trial: its inputs.
    """
    if not trial.arguments:
      return cls(None, np.zeros(()))
    with jax.default_matmul_precision("highest"):
      results = jax.jit(attend)(*jax.tree.map(_widened, trial.arguments))
    own = _distances(jax.jit(attend)(*trial.arguments), results)
    return cls(results, np.maximum(_TIMES_XLA * own, _LEAST))

  def errors(self, attend: Implementation, trial: Trial) -> np.ndarray:
    """Return how far each result of an implementation is from the right one."""
    return _distances(jax.jit(attend)(*trial.arguments), self.results)


def _widened(array: Any) -> Any:
  """Return an array of floats as the same numbers in float32."""
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return array.astype(jnp.float32) if is_float else array


def refusal(attend: Implementation, trial: Trial, expected: Reference) -> str:
  """Return why an implementation cannot be used, or "" if it agrees.

  Args:
    attend: the implementation.
    trial: what it is run and compiled with.
    expected: what it is compared with. Where nothing can run, a kernel that
      compiles is assumed to be right.
  """
  try:
    if trial.arguments:
      errors = expected.errors(attend, trial)
      # NaN is no error that is small enough.
      if not (is_close := errors <= expected.allowed).all():
        worst = errors[~is_close].max()
        return f"it is off by {worst:.2g} of the norm"
    jax.jit(attend).lower(*trial.shapes).compile()
  except refusals() as error:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
  return ""


def first_right(
  names: Sequence[str],
  implementations: Mapping[str, Implementation],
  trial: Trial,
) -> tuple[str, dict[str, str]]:
  """Return the first name whose implementation agrees with "xla".

  Args:
    names: in the order in which they are tried.
    implementations: by name, "xla" among them.
    trial: what they are run and compiled with.

  Returns:
    The name, which is "xla" if no other works, and the reason why each name
    before it was not chosen.
  """
  expected = Reference.of(implementations["xla"], trial)
  refused = {}
  for name in names:
    reason = refusal(implementations[name], trial, expected)
    if not reason:
      return name, refused
    refused[name] = reason
  return "xla", refused


def pick(
  field: str,
  wanted: str,
  candidates: Mapping[str, tuple[str, ...]],
  implementations: Mapping[str, Implementation],
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
  name, refused = first_right(names, implementations, trial)
  if wanted in refused:
    raise sections.ConfigError(
      f"{field}: {wanted} does not work here ({refused[wanted]});"
      f" use {kernel_names.AUTO} or xla"
    )
  return name, refused
