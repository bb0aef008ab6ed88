"""Replicas that write random tokens at once, many of them in one process."""

import pathlib
import random

import numpy as np

from jaxrl_async import types
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import remote

SLOTS = 640
HEARTBEAT_S = 0.25


class FakeReplica:
  """Writes random tokens as soon as it gets a turn.

  Threads: as `remote.RemoteLink`; its own thread is the caller of `collect`.
  """

  def __init__(self, name: str, version_file: pathlib.Path, mean_tokens: int):
    """Create a replica that finds the newest version's number in a file."""
    self.link = remote.RemoteLink(name)
    self._version_file = version_file
    self._rng = random.Random(0)
    # What is written is cut out of these, which costs next to nothing: the
    # fakes share the machine's cores with the coordinator.
    longest = 2 * mean_tokens
    self._tokens = np.arange(2 * longest, dtype=np.int32) % 99
    self._ones = np.ones(longest, bool)
    self._zeros = np.zeros(longest, np.float32)
    self._versions = np.full(longest, -1, np.int32)
    self._mean_tokens = mean_tokens
    self._version = -1
    self._ending: list[tuple[messages.Turn, int]] = []
    self._arrived: tuple[messages.Turn, ...] = ()  # as an answer to a report

  def collect(self) -> remote.Said:
    """Write what was asked for, and return what the link has to say."""
    version = int(self._version_file.read_text() or -1)
    if version > self._version:
      self._version = version
      self._versions = np.full_like(self._versions, version)
      self.link.adopted(
        messages.Adopted(replica=self.link.name, version=version)
      )
    if self._version >= 0:
      work = self.link.admit(
        messages.Ask(
          replica=self.link.name,
          version=self._version,
          room=max(0, SLOTS - len(self._ending) - len(self._arrived)),
        )
      )
      self._write((*self._arrived, *work.turns))
    told, ask, received = self.link.collect(HEARTBEAT_S)
    return remote.Said(
      name=self.link.name,
      told=told,
      ask=ask,
      received=received,
      version=self._version,
      totals={},
      busy_s=0.0,
    )

  def _write(self, turns: tuple[messages.Turn, ...]) -> None:
    """Finish the turns begun before, and write half of the new ones."""
    self._arrived = ()
    finished = [
      self._part(turn, half, types.FinishReason.EOS)
      for turn, half in self._ending
    ]
    halves = [self._rng.randrange(1, self._mean_tokens) for _ in turns]
    begun = [
      self._part(turn, 0, None, half)
      for turn, half in zip(turns, halves, strict=True)
    ]
    self._ending = list(zip(turns, halves, strict=True))
    if finished or begun:
      self._arrived = self.link.report(
        messages.Report(replica=self.link.name, written=(*finished, *begun))
      ).turns

  def _part(
    self,
    turn: messages.Turn,
    known: int,
    reason: types.FinishReason | None,
    count: int = 0,
  ) -> messages.Written:
    count = count or self._rng.randrange(1, self._mean_tokens)
    first = self._rng.randrange(len(self._ones))
    return messages.Written(
      group=turn.admission.index,
      begin=len(turn.trajectory.tokens) + known,
      trajectory=types.Trajectory(
        member=turn.trajectory.member,
        tokens=self._tokens[first : first + count],
        loss_mask=self._ones[:count],
        behavior_logprobs=self._zeros[:count],
        policy_versions=self._versions[:count],
        finish_reason=reason,
      ),
    )


class Host:
  """A process with some of the replicas, which are told apart by a number."""

  def __init__(self, directory: str, mean_tokens: int):
    """Create a host without replicas."""
    self._directory = pathlib.Path(directory)
    self._mean_tokens = mean_tokens
    self._replicas: dict[int, FakeReplica] = {}

  def attach(self, number: int, name: str) -> None:
    """Create a replica, or replace the one that had this number."""
    self._replicas[number] = FakeReplica(
      name, self._directory / "version", self._mean_tokens
    )

  def collect(self, number: int) -> remote.Said:
    """Return what a replica says."""
    return self._replicas[number].collect()

  def deliver(self, number: int, delivery: remote.Delivery) -> None:
    """Give a replica work."""
    self._replicas[number].link.deliver(delivery)
