"""The evaluations of a training run.

An evaluation begins when the version of its step is published. Its questions
are ordinary sequences beside those of the groups (`rollout.questions`), and
its result is a line of its own in the metrics. Training and new groups wait for
it at the first and the last step, in a synchronous run, and in one with
`run.exact_resume`. All other evaluations go on while the run does. Newer
weights are then adopted in their midst, and their line says which versions
wrote it.
"""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import queue

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.evaluation import evaluated_sets
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import summary as summary_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import session as session_lib
from jaxrl_async.training import trainer as trainer_lib
from jaxrl_async.weights import weight_transfer

_LOOK_S = 0.2
_END_S = 5.0


@dataclasses.dataclass(kw_only=True)
class _Now:
  """An evaluation that is under way.

  Attributes:
    step: completed train steps, and the version that begins to answer.
    begun_s: when it began, by the clock of the run.
    num_wanted: number of answers.
    written: gets the answers.
    is_alone: whether the run waits for it.
    answers: those that are scored.
    done: ends with the last of them.
    is_dropped: whether it is to end.
  """

  step: int
  begun_s: float
  num_wanted: int
  written: "queue.SimpleQueue[questions_lib.Answer]"
  is_alone: bool
  answers: list[questions_lib.Answer] = dataclasses.field(default_factory=list)
  done: "futures.Future[None]" = dataclasses.field(
    default_factory=futures.Future
  )
  is_dropped: bool = False


@dataclasses.dataclass(kw_only=True)
class RunEvaluations:
  """Evaluates the policy of a run, and writes the lines of its evaluations.

  Invariant: at most one evaluation is under way.

  Threads: the main thread, while the recorder writes nothing, except for
  `begin_first`, `waits_for` and `close`. A thread of each evaluation has its
  answers scored.

  Attributes:
    questions: of each evaluation, by the name of their set.
    channel: says which versions cannot be read.
    buffer: says in a stall what is awaited.
    trainer: computes the logprobs of answers.
    recorder: writes their lines, and leaves the time of pauses out.
  """

  setup: setup_lib.Setup
  session: session_lib.Session
  questions: dict[str, list[questions_lib.Question]]
  thread: rollout_thread.RolloutThread
  rollout: rollout_side.RolloutSide
  channel: weight_transfer.WeightChannel
  buffer: buffer_lib.Buffer
  trainer: trainer_lib.Trainer
  recorder: recorder_lib.Recorder
  _now: _Now | None = None

  def is_due(self, step: int) -> bool:
    """Return whether the policy is evaluated after so many train steps."""
    every = self.setup.config.eval.every
    return self._is_end(step) or bool(every and step % every == 0)

  def _is_end(self, step: int) -> bool:
    return step == 0 or step >= self.setup.config.train.num_steps

  def waits_for(self, step: int) -> bool:
    """Return whether the evaluation of a step is a pause."""
    config = self.setup.config
    is_synchronous = config.algorithm.max_staleness == 0
    return self.is_due(step) and (
      self._is_end(step) or is_synchronous or config.run.exact_resume
    )

  def begin_first(self, step: int) -> bool:
    """Begin the evaluation of the step at which this start of a run begins.

    It is missing in a new run, and where the run was stopped in it. That of an
    earlier step cannot be made any more, because its weights are gone.

    Returns:
      Whether there is one, for which the run has to wait.
    """
    try:
      past = summary_lib.read(self.session.workdir).evaluations
    except FileNotFoundError:
      past = []
    done = {one.step: one for one in past}
    if self.is_due(step):
      # Without greedy answers at the end, `train.num_steps` was lowered.
      is_done = step in done and (
        done[step].greedy is not None or not self._is_end(step)
      )
      if not is_done:
        self._begin(step, is_alone=True)
      return not is_done
    every = self.setup.config.eval.every
    if every and max(done, default=-1) < (lost := step // every * every):
      self.session.progress.note(f"step {lost} has no evaluation")
    return False

  def begin(self, step: int) -> bool:
    """Write an evaluation that is done, and perhaps begin one.

    It is that of a step whose version is published next. It waits for the
    evaluation that is under way, if there is one.

    Returns:
      Whether one has begun.

    Raises:
      The same as `finish`.
    """
    if not self.is_due(step):
      self.look()
    elif self.finish():
      self._begin(step, is_alone=self.waits_for(step))
      return True
    return False

  def _begin(self, step: int, *, is_alone: bool) -> None:
    questions = [one for s in self.questions.values() for one in s]
    if self._is_end(step):
      questions += [
        one._replace(
          of=evaluated_sets.GREEDY,
          settings=dataclasses.replace(
            one.settings, samples=1, temperature=0.0
          ),
        )
        for one in self.questions[evaluated_sets.HELD_OUT]
        if one.sample == 0
      ]
    now = self._now = _Now(
      step=step,
      begun_s=self.recorder.writer.totals()["run/wall_s"],
      num_wanted=len(questions),
      written=self.rollout.coordinator.questions.ask(
        questions, step, is_alone=is_alone
      ),
      is_alone=is_alone,
    )
    supervisor_lib.start_thread(
      "evaluation", lambda: self._score(now), now.done.set_exception
    )

  def _score(self, now: _Now) -> None:
    """Have the answers scored as they arrive; a thread of its own does it."""

    def check() -> None:
      if now.is_dropped:
        raise supervisor_lib.Interrupted

    with contextlib.suppress(supervisor_lib.Interrupted):
      for answer in answers_lib.scored(
        _written(now),
        rewards=self.recorder.rewards,
        num_slots=self.setup.config.rollout.num_slots,
        check=check,
      ):
        now.answers.append(answer)
    now.done.set_result(None)

  def look(self) -> None:
    """Write the line of an evaluation that is done.

    Raises:
      EvaluationError: no answer to one of its sets could be scored.
    """
    if self._now is not None and self._now.done.done():
      self._end(self._now)

  def finish(self) -> bool:
    """Wait for the evaluation that is under way, and write its line.

    Returns:
      False if the run was asked to stop, which drops the evaluation.

    Raises:
      EvaluationError: no answer to one of its sets could be scored.
      ThreadFailed, ConfigError, StorageError: a thread has failed.
      UnreadableVersionError: its version cannot be read.
      StallError: nothing has moved for `run.stall_timeout_s`.
    """
    if (now := self._now) is None:
      return not self.session.stop.is_set
    watch = self.thread.watch()
    while not now.done.done():
      if self.session.stop.is_set:
        self.close()
        return False
      self.session.shutdown.supervisor.check()
      # Beside training, the next version answers too.
      if now.is_alone and self.channel.unreadable >= now.step:
        raise weight_transfer.UnreadableVersionError(
          f"version {now.step} of the weights cannot be read; start again, to"
          " go on from the last checkpoint"
        )
      self.thread.check(
        watch,
        len(now.answers),
        lambda: [
          f"training waits for the evaluation of step {now.step} since"
          f" {watch.age_s:.1f} s",
          self.rollout.status(),
          *self.buffer.waiting(),
        ],
      )
      futures.wait([now.done], _LOOK_S)
    self._end(now)
    return True

  def in_a_pause(self) -> bool:
    """Wait as `finish` does, and leave the time out of that of training."""
    with self.recorder.evaluating():
      return self.finish()

  def close(self) -> None:
    """Drop an evaluation that is under way."""
    now, self._now = self._now, None
    self.rollout.coordinator.questions.forget()
    if now is not None:
      now.is_dropped = True
      futures.wait([now.done], _END_S)

  def _end(self, now: _Now) -> None:
    """Write an evaluation to the samples and the metrics."""
    self._now = None
    now.done.result()
    found = evaluated_sets.measured(
      now.answers, self.setup.config.task.solved_score
    )
    versions = questions_lib.versions_of(a.trajectory for a in now.answers)
    self.recorder.sampler.write_evaluation(
      now.step, found[evaluated_sets.HELD_OUT]
    )
    self.session.progress.note(
      f"step {now.step}: {evaluated_sets.describe(found)}"
    )
    self.recorder.writer.write_evaluation(
      now.step,
      {
        "eval/begun_s": now.begun_s,
        "eval/version_min": versions[0],
        "eval/version_max": versions[1],
        **evaluated_sets.metrics_of(found),
        **self._mismatch(now.step, versions, found),
      },
    )
    self.rollout.coordinator.questions.forget()

  def _mismatch(
    self,
    step: int,
    versions: tuple[int, int],
    found: dict[str, evaluated_sets.Evaluation],
  ) -> dict[str, float]:
    """Compare engine and trainer, if they have the same weights."""
    config = self.setup.config
    is_comparable = config.eval.temperature == config.rollout.temperature
    is_same = self.waits_for(step) and versions == (step, step)
    if not (is_comparable and is_same):
      return {}
    kl = evaluated_sets.mismatch_kl(
      [t for x in found[evaluated_sets.HELD_OUT].first for t in x.branches],
      self.trainer.logprobs,
    )
    return {"eval/mismatch_kl": kl}


def _written(now: _Now) -> Iterator[list[questions_lib.Answer]]:
  """Yield the answers as they arrive, and nothing if none does for a while."""
  num_missing = now.num_wanted
  while num_missing:
    found = []  # even then, the scores of others may have arrived
    with contextlib.suppress(queue.Empty):
      found.append(now.written.get(timeout=_LOOK_S))
    num_missing -= len(found)
    yield found
