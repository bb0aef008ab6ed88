"""The last checkpoint of a run that fails, if there is a step to save.

A run can be saved between two train steps. It can also be saved when a step has
changed the weights and is not written down yet: then the step is completed
first, without its version being published.
"""

from jaxrl_async.run import checkpointing
from jaxrl_async.run import start_up
from jaxrl_async.training import step_metrics

# Of the deadline of one part of the end: to write the step down, to pause the
# rollout side, and to copy the run.
_PARTS = 3


class LastCheckpoint:
  """Knows at any moment what could be saved, and saves it after a failure.

  Threads: belongs to the main thread, which waits while `take` uses another
  one.

  Attributes:
    is_ending: whether the run ends with a failure. What waits for other threads
      then has less patience, and does not look whether one of them has failed.
  """

  def __init__(
    self, parts: start_up.Parts, checkpoints: checkpointing.Checkpointing
  ):
    """Begin without anything that could be saved."""
    self.is_ending = False
    self._config = parts.setup.config
    self._parts = parts
    self._checkpoints = checkpoints
    self._whole_step: int | None = None
    self._trained: step_metrics.Pending | None = None

  def is_between(self, step: int) -> None:
    """Note that this step is completed, and the next one has not begun."""
    self._whole_step, self._trained = step, None

  def is_training(self) -> None:
    """Note that the weights are about to change."""
    self._whole_step = self._trained = None

  def has_trained(self, done: step_metrics.Pending) -> None:
    """Note that a step has changed the weights, and is not written down yet."""
    self._trained = done

  def take(self) -> None:
    """Take a checkpoint if possible, as something has failed or nothing moves.

    Several processes that train take it together. If one of them was lost, this
    process ends at once, whatever it does.
    """
    done = self._trained
    step = self._whole_step if done is None else done.step + 1
    if step is None:
      return
    self.is_ending = True
    self._checkpoints.rescue(
      step, _PARTS * self._config.run.join_timeout_s, before=self._complete
    )

  def wait_for_recorder(self) -> None:
    """Wait until the last step is written down, whatever else has failed.

    Raises:
      TimeoutError: it is not in time.
    """
    recorder = self._parts.recorder
    if not recorder.wait(self._config.run.join_timeout_s):
      raise TimeoutError(recorder.status())

  def _complete(self) -> None:
    """Complete a step that has changed the weights."""
    parts, done = self._parts, self._trained
    if done is None:
      return
    step = done.step + 1
    totals = parts.recorder.totals()
    self.wait_for_recorder()
    # Its groups are trained, so the buffer must not keep them any more.
    parts.buffer.set_policy_version(step)
    is_evaluated = step == self._config.train.num_steps or bool(
      self._config.eval.every and step % self._config.eval.every == 0
    )
    parts.recorder.begin(
      done,
      totals,
      {},
      # Behind an evaluation that is under way it stays without one.
      is_evaluated=is_evaluated and parts.writer.held_step is None,
    )
    self.is_between(step)
