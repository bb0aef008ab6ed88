"""What the controller works with: questions, rewards, weights and a file."""

from collections.abc import Callable, Sequence
import random
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.data import prompts
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import weight_fetch
from jaxrl_async.simulation import event_loop
from jaxrl_async.simulation import modelled_engine
from jaxrl_async.storage import disk


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

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether the next question is ready."""
    return self._loop.now >= self._ready_s

  def record(self, prompt_id: str, *, teaches: bool) -> None:
    """Do nothing: no question rests."""

  def next(self) -> types.Prompt:
    """Return the next question."""
    number, self.count = self.count, self.count + 1
    if self._loop.rng.random() < self._no_prompt_frac:
      delay_s = self._loop.rng.random()
      self._ready_s = self._loop.now + delay_s
      self._loop.at(delay_s, self._wake)
    return types.Prompt(
      prompt_id=f"simulation/train/{number}",
      tokens=np.arange(2, 2 + modelled_engine.PROMPT_TOKENS, dtype=np.int32),
      item={"number": number},
    )


class _Score(service_lib.ScoreHandle):
  def __init__(
    self,
    loop: event_loop.Loop,
    done_s: float,
    outcome: list[types.Reward] | service_lib.RewardFailure,
  ):
    self._loop = loop
    self._done_s = done_s
    self._outcome = outcome

  def done(self) -> bool:
    return self._loop.now >= self._done_s

  def result(self) -> list[types.Reward] | service_lib.RewardFailure:
    return self._outcome


class Rewards(service_lib.RewardService):
  """Rewards that are a function of the question, after a random time."""

  def __init__(
    self,
    loop: event_loop.Loop,
    *,
    seed: int,
    most_s: float,
    filter_frac: float,
    fail_frac: float,
    wake: Callable[[], None],
  ):
    """Create a service; `wake` is called when a group has been scored."""
    self._loop = loop
    self._seed = seed
    self._most_s = most_s
    self._fracs = filter_frac, fail_frac
    self._wake = wake

  def submit(
    self, item: dict[str, Any], trajectories: Sequence[types.Trajectory]
  ) -> service_lib.ScoreHandle:
    """Score a group: it fails, has equal rewards, or different ones."""
    delay_s = self._most_s * self._loop.rng.random()
    self._loop.at(delay_s, self._wake)
    drawn = random.Random(self._seed * 1_000_003 + item["number"]).random()
    filter_frac, fail_frac = self._fracs
    count = len(trajectories)
    outcome: list[types.Reward] | service_lib.RewardFailure
    if drawn < fail_frac:
      outcome = service_lib.RewardFailure("error: a fault of the simulation")
    elif drawn < fail_frac + filter_frac:
      outcome = [types.Reward(score=1.0)] * count
    else:
      outcome = [types.Reward(score=float(i)) for i in range(count)]
    return _Score(self._loop, self._loop.now + delay_s, outcome)


class Channel:
  """Versions without weights, with what a replica uses of a channel."""

  def __init__(self, loop: event_loop.Loop):
    """Create a channel without versions."""
    self._newest = -1
    self._changed = loop.condition()

  def newest_version(self) -> int:
    """Return the newest version; -1 before the first."""
    return self._newest

  def publish(self, version: int) -> None:
    """Let replicas adopt a version from now on."""
    self._newest = version
    self._changed.notify_all()

  def wait_for_version(self, newer_than: int, timeout_s: float) -> bool:
    """Wait for a version that is newer."""
    return self._changed.wait_for(lambda: self._newest > newer_than, timeout_s)


class Fetch(weight_fetch.WeightFetch):
  """A version on its way, which takes a random time."""

  def __init__(
    self,
    loop: event_loop.Loop,
    most_s: float,
    process: event_loop.Process,
    channel: Channel,
  ):
    """Begin to fetch the newest version; then wake the replica's process."""
    delay_s = most_s * loop.rng.random()
    self._loop = loop
    self._done_s = loop.now + delay_s
    self._version = channel.newest_version()
    loop.at(delay_s, process.wake)

  @property
  def is_done(self) -> bool:
    """Whether `result` returns at once."""
    return self._loop.now >= self._done_s

  def wait(self, timeout_s: float) -> bool:
    """Return whether the version is there; its process is woken then."""
    return self.is_done

  def result(self) -> tuple[Any, int] | None:
    """Return the version that was the newest at the start."""
    params = decode_state_lib.EngineParams(weights=None, version=self._version)
    return params, self._version


class MemoryFile(disk.AppendFile):
  """The file of a ledger in memory."""

  def __init__(self, content: bytearray, num_bytes: int):
    """Cut what an earlier start has written to `num_bytes`."""
    assert num_bytes <= len(content)
    del content[num_bytes:]
    self._content = content
    self.num_bytes = num_bytes

  def append(self, record: bytes) -> None:
    """Write a record."""
    self._content += record
    self.num_bytes += len(record)

  def sync(self) -> None:
    """Do nothing."""

  def close(self) -> None:
    """Do nothing."""
