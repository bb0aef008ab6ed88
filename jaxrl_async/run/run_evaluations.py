"""The evaluations of a training run: in a pause, or beside training.

At the start and at the end of a run both slices wait for an evaluation. One in
the middle runs beside training (`eval.beside`): the rollout side holds the
version of its step, and makes calls for questions and for groups in turn. The
metrics line of the step is held back meanwhile, and so are later lines.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
import dataclasses
import functools
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import held_version
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import device_checks
from jaxrl_async.run import evaluate
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.run import session as session_lib
from jaxrl_async.run import version_publisher
from jaxrl_async.training import trainer as trainer_lib

_LOOK_S = 0.2
_END_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
  """Evaluations of one version: of the held-out questions, and of the sets."""

  sampled: evaluate.Evaluation
  greedy: evaluate.Evaluation | None
  sets: dict[str, evaluate.Evaluation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Beside:
  """An evaluation that runs beside training."""

  step: int
  held: rollout_side.Held
  result: "futures.Future[_Result]"


class RunEvaluations:
  """Evaluates the policy of a run, and writes the metrics lines of its steps.

  Invariant: at most one evaluation runs beside training. The metrics writer
  holds the line of its step.

  Threads: the main thread. It calls the methods while the recorder writes
  nothing, except for `begin`, `is_held` and `close`. The answers of an
  evaluation beside training are awaited in a thread of its own.
  """

  def __init__(
    self,
    config: sections.Config,
    session: session_lib.Session,
    evaluator: evaluate.Evaluator,
    set_evaluators: dict[str, evaluate.Evaluator],
    *,
    publisher: version_publisher.VersionPublisher,
    thread: rollout_thread.RolloutThread,
    rollout: rollout_side.RolloutSide,
    buffer: buffer_lib.Buffer,
    trainer: trainer_lib.Trainer,
    recorder: recorder_lib.Recorder,
    writer: metrics_lib.MetricsWriter,
    sampler: sampler_lib.Sampler,
  ):
    """Prepare evaluations.

    Args:
      config: of the run.
      session: of this start.
      evaluator: of the held-out questions.
      set_evaluators: those of `eval.sets`, by name.
      publisher: of the versions that are evaluated.
      thread: of the rollout side.
      rollout: answers the questions.
      buffer: says in a stall what is awaited.
      trainer: computes the logprobs of answers.
      recorder: keeps the results, and leaves the time of pauses out.
      writer: of the metrics.
      sampler: writes some of the answers.
    """
    self._config = config
    self._evaluator = evaluator
    self._set_evaluators = set_evaluators
    self._publisher = publisher
    self._thread = thread
    self._rollout = rollout
    self._buffer = buffer
    self._trainer = trainer
    self._recorder = recorder
    self._writer = writer
    self._sampler = sampler
    self._stop = session.stop
    self._note = session.progress.note
    self._supervisor = session.shutdown.supervisor
    self._now: _Beside | None = None
    self._num_answers = 0  # of evaluations beside training

  # -- in a pause -----------------------------------------------------------

  def in_a_pause(self, step: int) -> dict[str, float]:
    """Evaluate the current weights and return the metrics.

    Both slices are idle meanwhile. The engines adopt the step's version, which
    was published, so that they need not hold a further copy of the weights.

    Raises:
      Interrupted: the run was asked to end before all questions were answered.
      EvaluationError: no answer could be scored.
    """
    config = self._config

    def check() -> None:
      self._stop.check("stopped in an evaluation")
      self._publisher.catch_up(is_urgent=True)

    more: dict[str, float] = {}
    is_end = step == 0 or step >= config.train.num_steps
    with self._recorder.evaluating(), self._thread.paused():
      write = functools.partial(
        self._rollout.answers,
        version=step,
        timeout_s=self._thread.stall_timeout_s,
      )
      result = self._evaluated(write, is_greedy=is_end, check=check)
      if config.eval.temperature == config.rollout.temperature:
        kl = evaluate.mismatch_kl(
          result.sampled.trajectories, self._trainer.logprobs
        )
        more["eval/mismatch_kl"] = kl
    return self._recorded(step, result) | more

  # -- beside training ------------------------------------------------------

  def is_beside(self, step: int) -> bool:
    """Return whether the evaluation of a step is one beside training."""
    return (
      device_checks.evaluates_beside(self._config)
      and 0 < step < self._config.train.num_steps
      and self._thread.is_started
    )

  def begin(self, step: int) -> None:
    """Begin the evaluation of a step whose version was published last."""
    assert self._now is None
    with self._thread.paused():
      held = self._rollout.hold(step)
    result: futures.Future[_Result] = futures.Future()

    def answers(*asked: Any, **settings: Any) -> Iterator[Any]:
      for written in held.answers(*asked, **settings):
        self._num_answers += len(written)
        yield written

    def evaluate_all() -> None:
      result.set_result(self._evaluated(answers, is_greedy=False))

    supervisor_lib.start_thread(
      "evaluation", evaluate_all, result.set_exception
    )
    self._now = _Beside(step=step, held=held, result=result)

  def is_held(self) -> bool:
    """Return whether a newer version may be published.

    It would replace the one that is evaluated before the rollout side has it.
    """
    if self._now is None:
      return True
    try:
      return self._now.held.is_held()
    except held_version.NotHeld:
      return True  # `finish` says so

  def finish(self, step: int, *, is_awaited: bool) -> None:
    """Write the lines of an evaluation if it is done, or when it is.

    Args:
      step: completed train steps.
      is_awaited: whether to wait for it. A request to stop ends the wait, and
        with it the evaluation.

    Raises:
      EvaluationError: no answer could be scored.
      ThreadFailed, ConfigError, StorageError: a thread has failed.
      StallError: nothing has moved for `run.stall_timeout_s`.
    """
    if (now := self._now) is None:
      return
    watch = self._thread.watch()
    while not now.result.done():
      if not is_awaited:
        return
      if self._stop.is_set:
        self.drop(step)
        return
      self._supervisor.check()
      self._publisher.catch_up(is_urgent=True)  # it may wait for a version
      self._thread.check(
        watch,
        self._num_answers,
        lambda: [
          f"training waits for the evaluation of step {now.step} since"
          f" {watch.age_s:.1f} s",
          self._rollout.status(),
          *self._buffer.waiting(),
        ],
      )
      futures.wait([now.result], _LOOK_S)
    self._supervisor.check()  # it may be why there are no answers
    self._now = None
    now.held.release()
    try:
      metrics = self._recorded(now.step, now.result.result())
    except held_version.NotHeld as error:
      self._leave_out(now.step, str(error))
    else:
      self._writer.write(now.step, metrics)

  def drop(self, step: int) -> None:
    """Give up an evaluation that is not done, because the run is to stop.

    Args:
      step: completed train steps. If the evaluation is of this step, its line
        stays held, and the run goes on with the evaluation.
    """
    self.finish(step, is_awaited=False)
    if (now := self._now) is None:
      return
    self._now = None
    now.held.release()
    if now.step < step:
      self._leave_out(now.step, "the run was asked to stop")

  def catch_up(self, step: int) -> bool:
    """Return whether a continued run has to evaluate the step it begins at.

    The weights of an earlier step, whose evaluation was under way when the
    checkpoint was written, are gone.
    """
    held = self._writer.held_step
    if held is None or held == step:
      return held is not None
    self._leave_out(held, f"the checkpoint is of step {step}")
    return False

  def close(self) -> None:
    """End an evaluation that is under way."""
    if self._now is not None:
      self._now.held.release()
      futures.wait([self._now.result], _END_S)

  # -- both -----------------------------------------------------------------

  def _leave_out(self, step: int, why: str) -> None:
    self._note(f"step {step} has no evaluation: {why}")
    self._writer.write(step, {})

  def _evaluated(
    self,
    write: evaluate.Write,
    *,
    is_greedy: bool,
    check: Callable[[], None] = lambda: None,
  ) -> _Result:
    sampled = self._evaluator.evaluate(write, check=check)
    greedy = None
    if is_greedy:
      greedy = self._evaluator.evaluate(write, is_greedy=True, check=check)
    sets = {
      name: evaluator.evaluate(write, check=check)
      for name, evaluator in self._set_evaluators.items()
    }
    return _Result(sampled=sampled, greedy=greedy, sets=sets)

  def _recorded(self, step: int, result: _Result) -> dict[str, float]:
    """Add an evaluation to samples and progress, and return its metrics."""
    of_all = result.sampled, result.greedy, result.sets
    self._sampler.write_evaluation(
      step, self._evaluator.prompts, result.sampled
    )
    self._note(f"step {step}: {evaluate.describe(*of_all)}")
    return evaluate.metrics_of(*of_all)
