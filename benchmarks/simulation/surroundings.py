"""What the controller works with: questions, rewards and weights."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_async import types
from jaxrl_async.coordination import weight_channel
from jaxrl_async.data import prompts
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import weight_fetch
from simulation import event_loop
from simulation import script as script_lib

_MOST_AGAIN_S = 2.0  # from a refusal to the next copy of the version


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

  def record(self, prompt_id: str, *, teaches: bool) -> None:
    """Do nothing: no question rests."""

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
    outcome: list[types.Reward] | service_lib.RewardFailure,
  ):
    self._loop = loop
    self._done_s = done_s
    self._scored = outcome

  def done(self) -> bool:
    return self._loop.now >= self._done_s

  def result(self) -> list[types.Reward] | service_lib.RewardFailure:
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
    rewards = self._script.rewards(item["number"], len(trajectories))
    outcome: list[types.Reward] | service_lib.RewardFailure
    if rewards is None:
      outcome = service_lib.RewardFailure("error: it is simulated")
    else:
      outcome = rewards
    return _Score(self._loop, self._loop.now + delay_s, outcome)


class Channel:
  """Publishes versions without weights, some of which are damaged on their way.

  A copy of a version is what was written of it at once. Where a version is
  written again, that is another copy.

  Attributes:
    num_torn: copies that were damaged.
  """

  def __init__(
    self,
    loop: event_loop.Loop,
    torn_frac: float = 0.0,
    *,
    is_written_again: bool = True,
  ):
    """Create a channel without versions.

    Args:
      loop: the clock.
      torn_frac: how often a copy is damaged.
      is_written_again: whether a version that was refused is written again.
    """
    self.is_written_again = is_written_again
    self.num_torn = 0
    self._loop = loop
    self._torn_frac = torn_frac
    self._newest = _NO_COPY
    self._torn: set[Copy] = set()
    self.changed = loop.condition()

  def newest(self) -> "Copy":
    """Return the newest copy; its version is -1 before the first."""
    return self._newest

  def publish(self, version: int) -> None:
    """Let replicas adopt a version from now on."""
    # A replica without weights does not go on from a damaged version that
    # nobody writes again.
    is_first = self._newest is _NO_COPY
    self._announce(
      Copy(version, 1), is_safe=is_first and not self.is_written_again
    )

  def _announce(self, copy: "Copy", *, is_safe: bool = False) -> None:
    self._newest = copy
    may_be_torn = self._torn_frac > 0 and not is_safe
    if may_be_torn and self._loop.rng.random() < self._torn_frac:
      self._torn.add(copy)
      self.num_torn += 1
    self.changed.notify_all()

  def is_torn(self, copy: "Copy") -> bool:
    """Return whether a copy is damaged."""
    return copy in self._torn

  def refuse(self, copy: "Copy") -> None:
    """Be told of a copy that a replica has refused."""
    if self.is_written_again:
      delay_s = _MOST_AGAIN_S * self._loop.rng.random()
      self._loop.after(delay_s, self._write_again, copy)

  def _write_again(self, copy: "Copy") -> None:
    if copy == self._newest:
      self._announce(Copy(copy.version, copy.number + 1))


class Copy(NamedTuple):
  """One copy of a version, by number from 1."""

  version: int
  number: int


_NO_COPY = Copy(-1, 0)


class Refusal(weight_channel.WeightTransferError):
  """A version that a replica has refused.

  Attributes:
    version: its number.
    copy: which copy of it.
  """

  def __init__(self, copy: Copy):
    """Create the refusal of a copy."""
    super().__init__(f"version {copy.version} is damaged")
    self.version, self.copy = copy.version, copy


class Reader:
  """What one replica uses of a channel.

  Attributes:
    num_refused: copies that it has refused.
    refusal: of the last of them.
    is_written_again: as in `Channel`.
  """

  def __init__(self, channel: Channel):
    """Read a channel."""
    self.num_refused = 0
    self.refusal: Refusal | None = None
    self.is_written_again = channel.is_written_again
    self._channel = channel
    self._kept = -1  # by the replica, when it refused a version

  def newest(self) -> Copy:
    """Return the newest copy."""
    return self._channel.newest()

  def newest_version(self) -> int:
    """Return the newest version that was not refused; -1 before the first."""
    copy = self._channel.newest()
    if self.refusal is not None and copy == self.refusal.copy:
      return self._kept
    return copy.version

  def wait_for_version(self, newer_than: int, timeout_s: float) -> bool:
    """Wait for a version that is newer."""
    return self._channel.changed.wait_for(
      lambda: self.newest_version() > newer_than, timeout_s
    )

  def take(self, copy: Copy, newer_than: int) -> bool:
    """Return whether a copy is whole; it is refused otherwise."""
    if not self._channel.is_torn(copy):
      return True
    self.num_refused += 1
    self.refusal, self._kept = Refusal(copy), newer_than
    self._channel.refuse(copy)
    return False


class Fetch(weight_fetch.WeightFetch):
  """A version on its way, which takes a random time."""

  def __init__(
    self, loop: event_loop.Loop, most_s: float, reader: Reader, newer_than: int
  ):
    """Begin to fetch the newest version."""
    delay_s = most_s * loop.rng.random()
    self._loop = loop
    self._done_s = loop.now + delay_s
    self._reader = reader
    self._newer_than = newer_than
    self._copy = reader.newest()
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
    """Return the version that was the newest at the start, if it is whole."""
    copy = self._copy
    if not self._reader.take(copy, self._newer_than):
      return None
    params = decode_state_lib.EngineParams(weights=None, version=copy.version)
    return params, copy.version
