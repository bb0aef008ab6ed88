"""Compiles the programs of a run in a thread, before the run needs them.

Compiling takes tens of seconds for a small model and minutes for a large one.
XLA does it without Python's lock, so that the other work of a start (worked
examples, a warm start, reading weights) goes on meanwhile. A program that was
compiled for a jitted function is found when the function is called with
arguments of the same shapes, types and shardings.
"""

from collections.abc import Callable, Iterable, Iterator
import logging
import threading

from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.planning import aot
from jaxrl_async.training import sft
from jaxrl_async.training import trainer as trainer_lib

_POLL_S = 0.1


class Pending:
  """Programs that are being compiled, or will be."""

  def __init__(self, programs: Callable[[], Iterable[aot.Program]]):
    """Remember what to compile; see `CompileAhead.add`."""
    self.programs = programs
    self.done = threading.Event()

  def wait(self, is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait until the programs are compiled, or until `is_over` returns True.

    To call one of them earlier would compile it twice, at the same time.
    """
    while not self.done.wait(_POLL_S) and not is_over():
      pass


class CompileAhead:
  """A thread that compiles one program after the other.

  Threads: belongs to the main thread.
  """

  def __init__(self):
    """Start without programs, and without a thread."""
    self._lock = threading.Lock()
    self._queue: list[Pending] = []
    self._thread: threading.Thread | None = None
    self._is_closed = False

  def add(self, programs: Callable[[], Iterable[aot.Program]]) -> Pending:
    """Compile programs after those that were added before.

    Whatever goes wrong is left to the call of the program, which fails in the
    same way.

    Args:
      programs: returns them. It is called in the thread, because the shapes of
        a large model take time as well.
    """
    pending = Pending(programs)
    with self._lock:
      if self._is_closed:
        pending.done.set()
        return pending
      self._queue.append(pending)
      if self._thread is None:
        # Not a daemon: XLA would come back to an interpreter that has ended,
        # which aborts the process.
        self._thread = threading.Thread(target=self._run, name="compile ahead")
        self._thread.start()
    return pending

  def close(self, timeout_s: float) -> None:
    """Compile no further program, and wait for the one on its way.

    Args:
      timeout_s: how long to wait. XLA cannot be interrupted.
    """
    with self._lock:
      self._is_closed = True
      thread = self._thread
    if thread is not None:
      thread.join(timeout_s)

  def _next(self) -> Pending | None:
    with self._lock:
      if self._queue:
        return self._queue.pop(0)
      self._thread = None
      return None

  def _run(self) -> None:
    while (pending := self._next()) is not None:
      try:
        self._compile(pending)
      # A loss of the user's own may raise anything. The call of the program
      # raises it again where it is handled.
      except Exception as error:
        logging.debug("not compiled ahead: %s", error)
      finally:
        pending.done.set()

  def _compile(self, pending: Pending) -> None:
    if self._is_closed:
      return
    for program in pending.programs():
      if self._is_closed:
        return
      program.function.lower(*program.arguments, **program.settings).compile()


class RunPrograms:
  """Compiles the programs of a run, in the order in which a start needs them.

  The programs of the two slices are compiled in two threads, so that a train
  step is ready when the first batch is.

  Attributes:
    rollout: the programs of the first evaluation.
    train: those of a train step.
    later: those of longer and of interrupted sequences.
  """

  def __init__(
    self,
    trainer: trainer_lib.Trainer,
    engine: engine_lib.Engine | None,
    *,
    is_alone: bool,
  ):
    """Compile nothing yet.

    Args:
      trainer: of the run.
      engine: None if it is in other processes.
      is_alone: whether one process trains. Several have to compile in the
        order of their calls, so that nothing is compiled ahead there.
    """
    self._trainer = trainer
    self._engine = engine
    self._of_training, self._of_rollout = CompileAhead(), CompileAhead()
    if not is_alone:
      self.close(0.0)
    self._warm_start: Pending | None = None
    self._is_begun = False

  def compile_warm_start(self, trainer: sft.SupervisedTrainer) -> Pending:
    """Compile the program of a warm start, and then those of the loop.

    Returns:
      The program of the warm start.
    """
    self._warm_start = self._of_training.add(trainer.programs)
    self.compile()
    return self._warm_start

  def compile(self) -> None:
    """Compile the programs of the loop, if that has not begun yet."""
    if self._is_begun:
      return
    self._is_begun = True
    self.rollout = self._of_rollout.add(self._rollout_programs)
    self.train = self._of_training.add(self._trainer.step_programs)
    self.later = self._of_rollout.add(self._later_programs)

  def close(self, timeout_s: float) -> None:
    """End; see `CompileAhead.close`."""
    threads = self._of_training, self._of_rollout
    for thread in threads:
      thread.close(0.0)
    for thread in threads:
      thread.close(timeout_s)

  def _rollout_programs(self) -> Iterator[aot.Program]:
    if self._warm_start is not None:
      self._warm_start.wait()  # it is needed first
    yield self._trainer.publish_program()
    if self._engine is not None:
      yield from self._engine.first_programs(self._trainer.engine_shapes())

  def _later_programs(self) -> list[aot.Program]:
    if self._engine is None:
      return []
    return self._engine.later_programs(self._trainer.engine_shapes())
