"""Traces of single train steps, for TensorBoard's profiler or Perfetto."""

from collections.abc import Iterator, Sequence
import contextlib
import pathlib

import jax

from jaxrl_async.reporting import side_outputs as side_outputs_lib

_NAME = "profile/"


class Profiler:
  """Traces the whole process while one of some train steps is made.

  JAX starts no further trace in a process that could not write one.

  Threads: belongs to the main thread. The trace has all threads.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    steps: Sequence[int],
    side_outputs: side_outputs_lib.SideOutputs,
  ):
    """Prepare the traces.

    Args:
      workdir: of the run; the trace of step 10 is in its `profile/step_10`.
      steps: the steps to trace, counted as in the metrics, from 1.
      side_outputs: guards the traces.
    """
    self._directory = workdir / "profile"
    self._steps = frozenset(steps)
    self._side_outputs = side_outputs

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Trace what happens inside the block, if the step is to be traced."""
    is_tracing = False
    if step in self._steps:
      with self._side_outputs.attempt(_NAME), _disk_errors():
        jax.profiler.start_trace(self._directory / f"step_{step}")
        is_tracing = True
    try:
      yield
    finally:
      if is_tracing:
        with self._side_outputs.attempt(_NAME), _disk_errors():
          jax.profiler.stop_trace()


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
  """Raise JAX's error about a file as an OSError."""
  try:
    yield
  except RuntimeError as error:
    raise OSError(" ".join(str(error).split())) from error
