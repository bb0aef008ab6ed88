"""A replica: one engine that writes turns for the coordinator.

It owns a scheduler, adopts new weights between two calls, and writes requests
of clients beside its turns. Of groups and episodes it knows only what messages
say.
"""

import time

from jaxrl_async import types
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.rollout import client_requests
from jaxrl_async.rollout import messages

_GROUP = "group"  # kind of the owners of its sequences


class Replica:
  """Writes turns with one scheduler.

  Invariant: a turn that was taken is in `_writing` until it is reported as
  ended or aborted. Meanwhile its sequence is in the scheduler, or has ended and
  is returned by the next `step`.

  Threads: all methods belong to the thread that drives it. While that thread
  stands still, another one may call them. The counters may be read by any.

  Attributes:
    name: no other replica has or had it.
    adopt_s: seconds spent adopting weights.
    served_tokens: of those that the scheduler wrote, those of requests.
    group_tokens: and the others, as of the last step.
  """

  def __init__(
    self,
    name: str,
    link: messages.CoordinatorLink,
    scheduler: scheduler_lib.Scheduler,
    *,
    channel: weight_transfer.WeightChannel,
    requests: client_requests.ClientRequests | None = None,
  ):
    self.name = name
    self.scheduler = scheduler
    self.adopt_s = 0.0
    self.served_tokens = 0
    self.group_tokens = 0
    self._link = link
    self._channel = channel
    self._requests = requests
    self._writing: dict[tuple[int, int], sequence_lib.Sequence] = {}

  @property
  def version(self) -> int:
    """Policy version of its weights; -1 before the first."""
    return self.scheduler.version

  @property
  def can_step(self) -> bool:
    """Whether it has something to write, and weights to write it with."""
    return self.version >= 0 and not self.scheduler.is_idle

  @property
  def serves_clients(self) -> bool:
    """Whether requests may come in at any time."""
    return self._requests is not None

  def has_newer_weights(self) -> bool:
    """Whether `adopt` would find some."""
    return self._channel.newest_version() > self.version

  def wait_for_weights(self, timeout_s: float) -> None:
    """Waits until there are newer weights, at most so long."""
    self._channel.wait_for_version(self.version, timeout_s)

  def adopt(self) -> None:
    """Takes up the newest weights, if they can be had."""
    start_s = time.perf_counter()
    adopted = self._channel.adopt(self.version)
    if adopted is None:
      return
    weights, version = adopted
    params = self.scheduler.engine.load_params(weights, version)
    self.scheduler.adopt(params, version)
    self.adopt_s += time.perf_counter() - start_s
    self._link.adopted(messages.Adopted(replica=self.name, version=version))

  def feed(self) -> None:
    """Takes up requests of clients, and work for the room that is left."""
    if self._requests is not None:
      # At most half of the slots: however many clients there are, training
      # goes on.
      num_slots = self.scheduler.engine.sizes.num_slots
      self._requests.feed(self.scheduler, max(1, num_slots // 2))
    room = self.scheduler.room
    if self.version >= 0 and room > 0:
      ask = messages.Ask(replica=self.name, version=self.version, room=room)
      self._take(self._link.admit(ask))

  def step(self) -> None:
    """Writes on, and reports the turns that ended."""
    ended = self.scheduler.step()
    if self._requests is not None:
      self._requests.deliver(ended)
      self.served_tokens = self._requests.num_written()
    self.group_tokens = (
      self.scheduler.stats.generated_tokens - self.served_tokens
    )
    # Others are a client's, or were cancelled, or reported meanwhile.
    self._report([s for s in ended if self._writing.get(_key(s)) is s])

  def report_all(self) -> None:
    """Reports all that it has, as far as it was read."""
    self._report(list(self._writing.values()))

  def drain(self) -> None:
    """Reports what it has, and lets go of it: another replica goes on."""
    self.report_all()
    for group in {group for group, _ in self._writing}:
      self.scheduler.cancel(sequence_lib.Owner(_GROUP, group))
    self._writing.clear()
    self._link.drained(messages.Drained(replica=self.name))

  def close(self, *, has_failed: bool) -> None:
    """Tells clients that nothing is written any more."""
    if self._requests is not None:
      self._requests.close(has_failed=has_failed)

  def _report(self, sequences: list[sequence_lib.Sequence]) -> None:
    """Reports sequences, and lets go of those that have ended."""
    if not sequences:
      return
    written = []
    for sequence in sequences:
      if sequence.finish_reason is not None:
        del self._writing[_key(sequence)]
      written.append(
        messages.Written(group=sequence.group, trajectory=sequence.trajectory())
      )
    report = messages.Report(replica=self.name, written=tuple(written))
    self._take(self._link.report(report))

  def _take(self, work: messages.Work) -> None:
    # Turns first: a group may have failed after one of its members went on.
    for turn in work.turns:
      sequence = _sequence(turn)
      self._writing[_key(sequence)] = sequence
      self.scheduler.submit(sequence)
    for group in work.cancelled:
      self.scheduler.cancel(sequence_lib.Owner(_GROUP, group))
    aborted = [s for s in self._writing.values() if s.group in work.cancelled]
    for sequence in aborted:
      sequence.finish_reason = types.FinishReason.ABORTED
    self._report(aborted)


def _sequence(turn: messages.Turn) -> sequence_lib.Sequence:
  """What the scheduler writes a turn as."""
  trajectory, admission = turn.trajectory, turn.admission
  sequence = sequence_lib.Sequence(
    trajectory.tokens,
    limit=turn.limit,
    stream=sampling.Stream.TRAIN,
    group=admission.index,
    member=trajectory.member,
    settings=sampling.SamplingSettings(temperature=turn.temperature),
    deadline=admission.deadline,
    owner=sequence_lib.Owner(_GROUP, admission.index),
  )
  sequence.resume(trajectory)
  return sequence


def _key(sequence: sequence_lib.Sequence) -> tuple[int, int]:
  return sequence.group, sequence.member
