"""A replica: one engine that generates turns for the coordinator.

A replica owns a scheduler. It fetches new weights beside decoding, and adopts
them between two decode calls. It can serve client requests beside its turns. It
knows of groups and episodes only what the messages contain.
"""

from collections.abc import Callable
import time

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.rollout import client_requests
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import weight_fetch
from jaxrl_async.text import guides as guides_lib
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.weights import weight_transfer

_LAST_FETCH_S = 10.0
_GROUP = "group"  # the owner kind of the coordinator's sequences
_NOBODY = sequence_lib.Owner("nobody", 0)

_Key = tuple[sequence_lib.Owner, int]  # with the member


class Replica:
  """Generates turns with one scheduler.

  Invariant: an accepted turn stays in `_writing` until it is reported as ended
  or aborted. Until then its sequence is in the scheduler, or it has ended and
  the next `step` of the scheduler returns it. `_num_known` has the same keys,
  and counts the tokens that the coordinator knows of.

  Threads: all methods belong to the thread that drives the replica. Another
  thread may call them while that one is paused. Any thread may read the
  counters.

  Attributes:
    name: the replica's name. No two replicas of a run ever share a name.
    adopt_s: seconds in which nothing was decoded because weights were adopted.
    served_tokens: tokens generated for client requests, as of the last step.
    group_tokens: tokens generated for rollout groups, as of the last step.
  """

  def __init__(
    self,
    name: str,
    link: messages.CoordinatorLink,
    scheduler: scheduler_lib.Scheduler,
    *,
    channel: weight_transfer.WeightChannel,
    tokenizer: tokenizer_lib.Tokenizer,
    requests: client_requests.ClientRequests | None = None,
    fetch: Callable[..., weight_fetch.WeightFetch] = weight_fetch.WeightFetch,
  ):
    """Create a replica.

    Args:
      link: the coordinator that gives it turns.
      scheduler: belongs to the replica from now on.
      channel: brings new weights.
      tokenizer: finds the texts that end turns.
      requests: are served beside the turns.
      fetch: begins to fetch a version.
    """
    self.name = name
    self.scheduler = scheduler
    self.adopt_s = 0.0
    self.served_tokens = 0
    self.group_tokens = 0
    self._link = link
    self._channel = channel
    self._tokenizer = tokenizer
    self._requests = requests
    self._begin_fetch = fetch
    self._fetch: weight_fetch.WeightFetch | None = None
    self._writing: dict[_Key, sequence_lib.Sequence] = {}
    self._num_known: dict[_Key, int] = {}

  @property
  def version(self) -> int:
    """The policy version of the weights; -1 before the first."""
    return self.scheduler.version

  @property
  def can_step(self) -> bool:
    """Whether there is something to generate and weights to do it with."""
    return self.version >= 0 and not self.scheduler.is_idle

  @property
  def serves_clients(self) -> bool:
    """Whether client requests may arrive at any time."""
    return self._requests is not None

  def has_newer_weights(self) -> bool:
    """Return whether newer weights were fetched, so that `adopt` is quick.

    It begins to fetch them as soon as they are published.
    """
    if self._fetch is None and self._channel.newest_version() > self.version:
      self._fetch = self._begin_fetch(
        self._channel, self.scheduler.engine, self.version
      )
    return self._fetch is not None and self._fetch.is_done

  def wait_for_weights(self, timeout_s: float) -> None:
    """Wait up to `timeout_s` seconds for newer weights."""
    if self._fetch is None:
      self._channel.wait_for_version(self.version, timeout_s)
    else:
      self._fetch.wait(timeout_s)

  def may_adopt(self) -> bool:
    """Return whether newer weights were fetched and may be adopted now.

    With kv_on_adopt WAIT they may be when all sequences have ended. Until then
    `feed` asks for no others. They are fetched only then, because there may be
    still newer ones by then.
    """
    if self._is_emptying and not self.scheduler.is_idle:
      return False
    return self.has_newer_weights()

  @property
  def _is_emptying(self) -> bool:
    """Whether newer weights wait for the running sequences to end."""
    waits = self.scheduler.kv_on_adopt is sections.KvOnAdopt.WAIT
    return waits and 0 <= self.version < self._channel.newest_version()

  def adopt(self) -> None:
    """Adopt newer weights, if any were published, after they are fetched.

    Raises:
      WeightTransferError: they differ from what was published, or could not be
        published.
    """
    start_s = time.perf_counter()
    self.has_newer_weights()
    if self._fetch is None:
      return
    fetched, self._fetch = self._fetch.result(), None
    if fetched is None:
      return
    params, version = fetched
    self.scheduler.adopt(params, version)
    self._link.adopted(messages.Adopted(replica=self.name, version=version))
    self.adopt_s += time.perf_counter() - start_s

  def feed(self) -> None:
    """Take client requests, and ask for turns to fill the remaining room."""
    is_emptying = self._is_emptying
    if self._requests is not None:
      # Requests get at most half of the slots, so that training continues
      # however many clients there are.
      most = max(1, self.scheduler.engine.sizes.num_slots // 2)
      self._requests.feed(self.scheduler, 0 if is_emptying else most)
    if self.version >= 0:
      # Without room nothing is asked for, but something may have arrived.
      room = 0 if is_emptying else max(0, self.scheduler.room)
      ask = messages.Ask(replica=self.name, version=self.version, room=room)
      self.take(self._link.admit(ask))

  def step(self) -> None:
    """Run one step of the scheduler and report the turns that ended."""
    ended = self.scheduler.step()
    if self._requests is not None:
      self._requests.deliver(ended)
      self.served_tokens = self._requests.num_written()
    self.group_tokens = (
      self.scheduler.stats.generated_tokens - self.served_tokens
    )
    # Other sequences belong to clients, were cancelled, or were reported
    # before.
    self._report([s for s in ended if self._writing.get(_key(s)) is s])

  def report_all(self) -> None:
    """Report all trajectories with the tokens read from the device so far."""
    self._report(list(self._writing.values()))

  def give_back(self) -> None:
    """Report all trajectories and drop them; the replica can have others."""
    self.report_all()
    for owner in {owner for owner, _ in self._writing}:
      self.scheduler.cancel(owner)
    self._writing.clear()
    self._num_known.clear()

  def close(
    self, *, has_failed: bool, fetch_timeout_s: float = _LAST_FETCH_S
  ) -> None:
    """End client requests, and wait for what is fetched.

    A version that is still being fetched needs the memory of a version.
    """
    if self._requests is not None:
      self._requests.close(has_failed=has_failed)
    # The channel may be closed only when nothing is read from it any more.
    if self._fetch is not None:
      self._fetch.wait(fetch_timeout_s)

  def _report(self, sequences: list[sequence_lib.Sequence]) -> None:
    """Report what is new of sequences, and forget those that have ended."""
    written = []
    for sequence in sequences:
      key = _key(sequence)
      begin = self._num_known[key]
      if begin == sequence.length and sequence.finish_reason is None:
        continue
      written.append(
        messages.Written(
          group=key[0].number,
          begin=begin,
          trajectory=sequence.trajectory(begin),
          num_cached=sequence.num_cached or 0,
        )
      )
      self._num_known[key] = sequence.length
      if sequence.finish_reason is not None:
        del self._writing[key], self._num_known[key]
    if not written:
      return
    report = messages.Report(replica=self.name, written=tuple(written))
    self.take(self._link.report(report))

  def take(self, work: messages.Work) -> None:
    """Begin the turns of the coordinator's answer, and cancel its groups."""
    # Turns come before cancellations, because the same answer can hold a turn
    # of a group and cancel the group.
    for turn in work.turns:
      sequence = sequence_of(turn, self._tokenizer)
      self._writing[_key(sequence)] = sequence
      self._num_known[_key(sequence)] = sequence.length
      self.scheduler.submit(sequence)
    cancelled = {sequence_lib.Owner(_GROUP, group) for group in work.cancelled}
    for owner in cancelled:
      self.scheduler.cancel(owner)
    aborted = [s for s in self._writing.values() if s.owner in cancelled]
    for sequence in aborted:
      sequence.finish_reason = types.FinishReason.ABORTED
    self._report(aborted)


def sequence_of(
  turn: messages.Turn, tokenizer: tokenizer_lib.Tokenizer
) -> sequence_lib.Sequence:
  """Return the sequence with which the scheduler generates a turn."""
  trajectory, admission = turn.trajectory, turn.admission
  is_of_group = turn.question is None
  sequence = sequence_lib.Sequence(
    trajectory.tokens,
    limit=turn.limit,
    stream=sampling.Stream.TRAIN if is_of_group else sampling.Stream.EVAL,
    group=admission.index if turn.question is None else turn.question,
    member=trajectory.member,
    settings=sampling.SamplingSettings(
      temperature=turn.temperature, end_tokens=turn.stop_token_ids
    ),
    deadline=admission.deadline,
    owner=sequence_lib.Owner(_GROUP, admission.index),
  )
  sequence.resume(trajectory)
  # A turn that was begun elsewhere may end with part of a stop text.
  begun = sequence.written()[sequence.turn_start :]
  sequence.stop = stop_strings.check_of(tokenizer, turn.stop, begun)
  if turn.guide:
    guide = guides_lib.of(tokenizer).guide(turn.guide)
    guide.take(begun)
    sequence.guide = guide
  return sequence


def _key(sequence: sequence_lib.Sequence) -> _Key:
  return sequence.owner or _NOBODY, sequence.member
