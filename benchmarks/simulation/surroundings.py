"""What the controller works with: questions, rewards and weights."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_async import types
from jaxrl_async.data import prompts
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import weight_fetch
from simulation import event_loop
from simulation import script as script_lib


class Prompts(prompts.PromptStream):
  """Questions of one length, the next of which is sometimes not ready.

  Attributes:
    count: the number of the next question.
  """

  def __init__(
    self,
    loop: event_loop.Loop,
    first: int,
    no_prompt_frac: float,
    wake: Callable[[], None],
  ):
    """Create a stream from a question on.

    Args:
      loop: the clock.
      first: the number of the next question.
      no_prompt_frac: how often the next question takes time.
      wake: is called when a question is ready.
    """
    self.count = first
    self._loop = loop
    self._no_prompt_frac = no_prompt_frac
    self._wake = wake
    self._ready_s = 0.0
    self._changed = loop.condition()

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether the next question is ready."""
    is_ready = self._loop.now >= self._ready_s
    if not is_ready and timeout_s:
      self._changed.wait()  # `wake` ends it
    return is_ready

  def next(self) -> types.Prompt:
    """Return the next question."""
    number, self.count = self.count, self.count + 1
    if self._loop.rng.random() < self._no_prompt_frac:
      delay_s = self._loop.rng.random()
      self._ready_s = self._loop.now + delay_s
      self._loop.after(delay_s, self._wake)
    return types.Prompt(
      prompt_id=f"simulation/train/{number}",
      tokens=script_lib.PROMPT,
      item={"number": number},
    )


class _Score(service_lib.ScoreHandle):
  def __init__(
    self,
    loop: event_loop.Loop,
    done_s: float,
    outcome: service_lib.Outcome,
  ):
    self._loop = loop
    self._done_s = done_s
    self._scored = outcome

  def done(self) -> bool:
    return self._loop.now >= self._done_s

  def result(self) -> service_lib.Outcome:
    return self._scored


class Rewards(service_lib.RewardService):
  """Rewards of the script, after a random time."""

  def __init__(
    self,
    loop: event_loop.Loop,
    script: script_lib.Script,
    most_s: float,
    wake: Callable[[], None],
  ):
    """Create a service; `wake` is called when a group has been scored."""
    self._loop = loop
    self._script = script
    self._most_s = most_s
    self._wake = wake

  def submit(
    self, item: dict[str, Any], trajectories: Sequence[types.Trajectory]
  ) -> service_lib.ScoreHandle:
    """Score a group."""
    delay_s = self._most_s * self._loop.rng.random()
    self._loop.after(delay_s, self._wake)
    outcome = self._script.rewards(item["number"], len(trajectories))
    return _Score(self._loop, self._loop.now + delay_s, outcome)


class Channel:
  """Publishes versions without weights.

  Attributes:
    unreadable: as in `weight_transfer.WeightChannel`; all can be read here.
  """

  unreadable = -1

  def __init__(self, loop: event_loop.Loop):
    """Create a channel without versions."""
    self._newest = -1
    self.changed = loop.condition()

  def publish(self, version: int) -> None:
    """Let replicas adopt a version from now on."""
    self._newest = version
    self.changed.notify_all()

  def newest_version(self) -> int:
    """Return the newest version; -1 before the first."""
    return self._newest

  def wait_for_version(self, newer_than: int, timeout_s: float) -> bool:
    """Wait for a version that is newer."""
    return self.changed.wait_for(lambda: self._newest > newer_than, timeout_s)


class Fetch(weight_fetch.WeightFetch):
  """A version on its way, which takes a random time."""

  def __init__(self, loop: event_loop.Loop, most_s: float, channel: Channel):
    """Begin to fetch the newest version."""
    delay_s = most_s * loop.rng.random()
    self._loop = loop
    self._done_s = loop.now + delay_s
    self._version = channel.newest_version()
    self._changed = loop.condition()
    loop.after(delay_s, self._changed.notify_all)

  @property
  def is_done(self) -> bool:
    """Whether `result` returns at once."""
    return self._loop.now >= self._done_s

  def wait(self, timeout_s: float) -> bool:
    """Wait until the version is there."""
    return self._changed.wait_for(lambda: self.is_done, timeout_s)

  def result(self) -> tuple[Any, int] | None:
    """Return the version that was the newest at the start."""
    params = decode_state_lib.EngineParams(weights=None, version=self._version)
    return params, self._version
