"""One line for a device without enough memory, whatever program asked for it.

XLA says how many bytes it could not allocate. Whether training or generation
needed them is read from where the error was raised.

This module must not import JAX, because the launch scripts import it first.
"""

from collections.abc import Iterator
import pathlib
import traceback

_PACKAGE = pathlib.Path(__file__).parents[1]
_EXHAUSTED = "RESOURCE_EXHAUSTED"
_LONGEST = 200  # characters of XLA's own sentence

_TRAINING = (
  "train.rows_per_microbatch, train.vocab_chunk or train.tokens_per_row,"
  " set model.remat=full or train.optimizer.offload, or raise mesh.train_fsdp"
)
_ROLLOUT = (
  "rollout.num_slots, rollout.cache_tokens or rollout.prefill_rows, bound the"
  " cache by rollout.num_pages, set rollout.weights=int8, or raise"
  " mesh.rollout_tensor"
)
# By the folder of the innermost file in which the error was raised: the phase,
# and what to lower or set.
_PHASES = {
  "engine": ("generation", _ROLLOUT),
  "training": ("training", _TRAINING),
}


def explained(error: BaseException) -> str:
  """Return one line about a device without memory, or "" for another error.

  Args:
    error: as it reached the caller. It may have been raised again by a thread
      that supervises the one in which it happened.

  Returns:
    The phase, how much it needed, and the fields to change.
  """
  for cause in _chain(error):
    if type(cause).__name__ != "JaxRuntimeError":
      continue
    lines = [x for x in str(cause).splitlines() if _EXHAUSTED in x]
    if lines:
      said = lines[0].partition(f"{_EXHAUSTED}: ")[2].strip() or lines[0]
      phase, fields = _phase(cause)
      return (
        f"out of device memory in {phase}: {said[:_LONGEST]}; lower {fields}"
      )
  return ""


def _phase(error: BaseException) -> tuple[str, str]:
  """Return the phase of the innermost known file, and its fields."""
  found = "a device program", f"{_TRAINING}, or {_ROLLOUT}"
  for frame, _ in traceback.walk_tb(error.__traceback__):
    path = pathlib.Path(frame.f_code.co_filename)
    if path.is_relative_to(_PACKAGE):
      found = _PHASES.get(path.relative_to(_PACKAGE).parts[0], found)
  return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  """Yield the error and its causes, the outermost first."""
  seen: set[int] = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    yield error
    error = error.__cause__ or error.__context__
