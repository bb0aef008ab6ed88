"""One line for a device without enough memory, whatever program asked for it.

XLA says how many bytes it could not allocate. Which program needed them is read
from where the error was raised, so that nothing is added to the calls.

This module must not import JAX, because the launch scripts import it first.
"""

from collections.abc import Iterator
import pathlib

_PACKAGE = pathlib.Path(__file__).parents[1]
_EXHAUSTED = "RESOURCE_EXHAUSTED"
_LONGEST = 200  # characters of XLA's own sentence

_TRAINING = (
  "train.rows_per_microbatch, train.vocab_chunk or train.tokens_per_row,"
  " set model.remat=full or train.optimizer.offload, or raise mesh.train_fsdp"
)
_CACHE = (
  "rollout.num_slots or rollout.cache_tokens, or bound the cache by"
  " rollout.num_pages"
)
_PREFILL = (
  "rollout.prefill_rows, rollout.prefill_buckets or rollout.prefill_chunk"
)
_WEIGHTS = (
  "rollout.num_slots, set rollout.weights=int8, or raise mesh.rollout_tensor"
)
# Function, the program that it runs, and what to lower or set. The innermost
# function in which the error was raised decides.
PROGRAMS: dict[tuple[str, str], tuple[str, str]] = {
  ("engine/engine.py", "prefill"): ("prefill", _PREFILL),
  ("engine/engine.py", "extend_prefix"): ("prefill", _PREFILL),
  ("engine/engine.py", "open_prefix"): ("prefill", _PREFILL),
  ("engine/engine.py", "fill_pages"): ("the insertion of a prompt", _CACHE),
  ("engine/engine.py", "insert"): ("the insertion of a prompt", _CACHE),
  ("engine/engine.py", "init_decode_state"): ("the cache", _CACHE),
  ("engine/engine.py", "generate"): ("decoding", _CACHE),
  ("engine/engine.py", "read"): ("decoding", _CACHE),
  ("engine/engine.py", "load_params"): ("a version of the weights", _WEIGHTS),
  ("engine/scheduler.py", "adopt"): ("caches for new weights", _PREFILL),
  ("training/sft.py", "step"): (
    "an update of the warm start",
    f"warm_start.rows_per_batch, {_TRAINING}",
  ),
  ("training/trainer.py", "start"): ("the train state", _TRAINING),
  ("training/trainer.py", "published"): ("the published weights", _TRAINING),
  ("coordination/weight_transfer.py", "_hand_over"): (
    "the published weights",
    _TRAINING,
  ),
  ("training/trainer.py", "step"): ("a train step", _TRAINING),
  ("training/trainer.py", "run_programs"): ("a train step", _TRAINING),
  ("training/trainer.py", "logprobs_of"): ("a forward pass", _TRAINING),
}


def explained(error: BaseException) -> str:
  """Return one line about a device without memory, or "" for another error.

  Args:
    error: as it reached the caller. It may have been raised again by a thread
      that supervises the one in which it happened.

  Returns:
    The program, how much it needed, and the fields to change.
  """
  for cause in _chain(error):
    if type(cause).__name__ != "JaxRuntimeError":
      continue
    lines = [x for x in str(cause).splitlines() if _EXHAUSTED in x]
    if lines:
      said = lines[0].partition(f"{_EXHAUSTED}: ")[2].strip() or lines[0]
      program, fields = _program(cause)
      return (
        f"out of device memory in {program}: {said[:_LONGEST]}; lower {fields}"
      )
  return ""


def _program(error: BaseException) -> tuple[str, str]:
  """Return the program of the innermost known function, and its fields."""
  found = "a device program", f"{_PREFILL}, {_CACHE}, {_TRAINING}"
  where = error.__traceback__
  while where is not None:
    code = where.tb_frame.f_code
    path = pathlib.Path(code.co_filename)
    if path.is_relative_to(_PACKAGE):
      name = path.relative_to(_PACKAGE).as_posix()
      found = PROGRAMS.get((name, code.co_name), found)
    where = where.tb_next
  return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  """Yield the error and its causes, the outermost first."""
  seen: set[int] = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    yield error
    error = error.__cause__ or error.__context__
