"""The loop of the trainer's main thread, without what it computes."""

import collections
from typing import Protocol, runtime_checkable

from jaxrl_async import types
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.training import batch_loader
from simulation import case as case_lib
from simulation import evaluations
from simulation import event_loop
from simulation import invariants as invariants_lib

_LOOK_S = 0.1

Batch = tuple[int, list[types.RolloutGroup]]


@runtime_checkable
class Steps(Protocol):
  """What the loop does in each train step, besides training."""

  def publish(self, version: int) -> None:
    """Publish a version."""
    ...

  def record(self, step: int, groups: list[types.RolloutGroup]) -> None:
    """Write down that groups were trained."""
    ...

  def save(self, version: int) -> None:
    """Take a checkpoint."""
    ...

  @property
  def questions(self) -> questions_lib.Questions:
    """Those of the coordinator."""
    ...

  def completed(self, version: int) -> None:
    """Be told that a train step is done, with all that follows it."""
    ...


class ModelledTrainer:
  """Trains for a random time, in the order of `loop.Loop`.

  Attributes:
    process: takes the turns.
    num_completed: train steps that are done, with all that follows them.
  """

  def __init__(
    self,
    loop: event_loop.Loop,
    case: case_lib.Case,
    steps: Steps,
    loader: batch_loader.BatchLoader[Batch],
    invariants: invariants_lib.Invariants,
    *,
    first_step: int,
    seen: collections.Counter[str],
  ):
    """Begin after so many train steps.

    Args:
      loop: the clock.
      case: how long everything takes.
      steps: what else a train step does.
      loader: of the batches.
      invariants: check the answers of evaluations.
      first_step: completed train steps.
      seen: counts the evaluations.
    """
    self.process = event_loop.Process(loop, self._turn)
    self.num_completed = first_step
    self._loop = loop
    self._case = case
    self._steps = steps
    self._loader = loader
    self._invariants = invariants
    self._seen = seen
    self._training: Batch | None = None
    self._evaluation: evaluations.Evaluation | None = None

  @property
  def is_between_steps(self) -> bool:
    """Whether all that was trained is published and written down."""
    return self._training is None

  def end(self) -> None:
    """End the loop."""
    self.process.end()

  def _turn(self) -> float | None:
    """Publish what was trained, complete its step, and take the next batch."""
    if self._training is not None:
      version = self._training[0] + 1
      if self._is_evaluated(version):
        if not self._look_at_evaluation():
          return _LOOK_S  # one evaluation at a time
        self._evaluation = evaluations.Evaluation(
          self._steps.questions, version, case_lib.MAX_TOKENS
        )
      self._steps.publish(version)
      self._complete(*self._training)
      self._training = None
    loaded = self._loader.next(0.0)
    if loaded is None:
      return None
    self._check(*loaded.batch)
    self._training = loaded.batch
    rng = self._loop.rng
    return self._case.train_s * rng.random() * rng.choice((0.1, 1.0))

  def _check(self, step: int, groups: list[types.RolloutGroup]) -> None:
    """Check a batch, and count what is of interest in it."""
    invariants, seen = self._invariants, self._seen
    invariants.check_batch(step, groups)
    for group in groups:
      versions = group.written_versions()
      bound = invariants.bound_of(group)
      seen["several versions"] += bool(versions.max() > versions.min())
      seen["at the bound"] += bool(step - versions.min() == bound > 0)
      writers = {name for t in group.trajectories for name, _ in t.writers}
      seen["several writers"] += len(writers) > 1
      seen["a member without a score"] += bool(group.dropped)
      seen["across a cut"] += invariants.goes_across_a_cut(group)

  def _is_evaluated(self, step: int) -> bool:
    every = self._case.eval_every
    return bool(every) and step % every == 0 and step < self._case.num_steps

  def _complete(self, step: int, groups: list[types.RolloutGroup]) -> None:
    """End a train step: its lines, and perhaps a checkpoint."""
    version = step + 1
    self._steps.record(step, groups)
    self._look_at_evaluation()
    if version % self._case.checkpoint_every == 0:
      self._steps.save(version)
    self.num_completed = version
    self._steps.completed(version)

  def _look_at_evaluation(self) -> bool:
    """Count an evaluation that has ended; return whether none is under way."""
    evaluation = self._evaluation
    if evaluation is None:
      return True
    if not evaluation.has_ended(self._invariants.check_answer):
      return False
    self._seen["an evaluation"] += 1
    self._evaluation = None
    return True
