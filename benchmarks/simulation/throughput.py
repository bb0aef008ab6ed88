"""Predicts how many tokens a second a cluster trains.

Buffer, schedule and batch loader are the real ones, on the virtual clock. What
devices do is a rate: a decode step takes time for the weights, for each cached
token and for itself, and a train step takes time for each token. Lengths are
drawn, so that groups wait for their longest member, and steps for their groups.

A replica decodes some tokens of all its slots in one turn. A group is given to
the replica with the most room, as by the fleet.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import random
from typing import NamedTuple

import numpy as np

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.training import batch_loader
from simulation import event_loop

UNBOUNDED = 1_000
_MAX_EVENTS = 20_000_000
_PROMPT = types.Prompt(prompt_id="", tokens=np.zeros(1, np.int32), item={})


class Mode(enum.StrEnum):
  """How generation and training share the devices.

  SYNCHRONOUS: all devices generate a batch, and then all of them train on it.
  OVERLAPPED: a part of the devices generates the next batch while the others
    train, and takes new weights when its sequences have ended.
  ASYNCHRONOUS: the same, but sequences continue under new weights.
  """

  SYNCHRONOUS = "synchronous"
  OVERLAPPED = "overlapped"
  ASYNCHRONOUS = "asynchronous"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
  """Completions of lognormal length, cut off at the limit.

  Attributes:
    median: tokens.
    sigma: standard deviation of the logarithm.
    limit: the most tokens.
  """

  median: float
  sigma: float
  limit: int

  def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return the lengths of completions."""
    drawn = rng.lognormal(np.log(self.median), self.sigma, count)
    return np.clip(np.rint(drawn), 1, self.limit).astype(np.int64)

  def mean(self) -> float:
    """Return the mean tokens of a completion."""
    return float(self._sample().mean())

  def mean_cached(self) -> float:
    """Return the mean tokens of a running completion so far."""
    drawn = self._sample()
    return float((drawn**2).mean() / (2 * drawn.mean()))

  def _sample(self) -> np.ndarray:
    return self.draw(np.random.default_rng(0), 20_000).astype(float)


def lognormal(mean: float, deviation: float, *, limit: int) -> Lengths:
  """Return lengths with this mean and standard deviation, before the cut."""
  variance = float(np.log1p((deviation / mean) ** 2))
  return Lengths(
    median=mean * float(np.exp(-variance / 2)),
    sigma=variance**0.5,
    limit=limit,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """Devices, and what they need for the work of a run.

  Attributes:
    num_devices: in all.
    rollout_frac: share of them that generates, unless synchronous.
    devices_per_replica: that share the weights of one engine.
    groups_per_step: of a train step.
    group_size: completions of a group.
    lengths: of completions.
    slots: of each replica.
    step_s: seconds of a decode step without any sequence.
    slot_s: further seconds for each sequence.
    cached_s: further seconds for each cached token.
    recompute_s: seconds in which a replica caches a token again.
    adopt_s: seconds in which a replica decodes nothing for new weights, besides
      `recompute_s`.
    train_device_s: seconds of a device for a trained token.
    call_tokens: tokens of a sequence in a call, after which slots are filled.
    switch_s: seconds in which devices that do both change from generating to
      training and back.
  """

  num_devices: int
  rollout_frac: float = 0.75
  devices_per_replica: int = 1
  groups_per_step: int = 512
  group_size: int = 16
  lengths: Lengths
  slots: int
  step_s: float
  slot_s: float = 0.0
  cached_s: float
  recompute_s: float = 0.0
  adopt_s: float = 1.0
  train_device_s: float
  call_tokens: int = 256
  switch_s: float = 0.0

  def num_replicas(self, mode: Mode) -> int:
    """Return the number of engines."""
    devices = self.num_devices
    if mode is not Mode.SYNCHRONOUS:
      devices = round(devices * self.rollout_frac)
    return max(1, devices // self.devices_per_replica)

  def num_training(self, mode: Mode) -> int:
    """Return the number of devices that train."""
    if mode is Mode.SYNCHRONOUS:
      return self.num_devices
    return max(
      1, self.num_devices - round(self.num_devices * self.rollout_frac)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """What a cluster does, without its first steps.

  Attributes:
    tokens_per_s: trained tokens a second.
    generated_per_s: generated tokens a second.
    step_s: seconds of a train step, with its waits.
    train_busy: share of the time in which training devices train.
    staleness: mean age of the oldest token of a group, in versions.
  """

  tokens_per_s: float
  generated_per_s: float
  step_s: float
  train_busy: float
  staleness: float


class Span(NamedTuple):
  """Seconds in which a device worked, and the share of it that was used."""

  start_s: float
  end_s: float
  share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
  """What a cluster did when.

  Attributes:
    generating: turns of all replicas, with the share of their slots in use.
    training: train steps.
  """

  generating: list[Span]
  training: list[Span]


class _Replica:
  """An engine: the sequences in its slots, and those that wait for one."""

  def __init__(self, run: "_Run"):
    self.process = event_loop.Process(run.loop, self._turn)
    self.version = -1
    self.waiting: collections.deque[tuple[int, int]] = collections.deque()
    self.num_tokens = 0
    self._run = run
    self._left = np.zeros(0, np.int64)
    self._written = np.zeros(0, np.int64)
    self._groups = np.zeros(0, np.int64)

  @property
  def room(self) -> int:
    if self._is_emptying:
      return 0
    return self._run.cluster.slots - len(self._left) - len(self.waiting)

  @property
  def _is_emptying(self) -> bool:
    run = self._run
    return not run.interrupts and 0 <= self.version < run.version

  def give(self, group: int, lengths: np.ndarray) -> None:
    self.waiting += [(group, length) for length in lengths.tolist()]
    self.process.wake()

  def _turn(self) -> float | None:
    run, cluster = self._run, self._run.cluster
    spent_s = 0.0
    is_idle = not (len(self._left) or self.waiting)
    if self.version < run.version and (run.interrupts or is_idle):
      self.version = run.version
      spent_s = cluster.adopt_s
      spent_s += cluster.recompute_s * float(self._written.sum())
      run.dispatcher.wake()
    self._enter()
    if not len(self._left):
      return spent_s or None
    used = len(self._left) / cluster.slots
    count = min(cluster.call_tokens, int(self._left.max()))
    cached = float(self._written.sum()) + len(self._left) * count / 2
    step_s = cluster.step_s + cluster.slot_s * len(self._left)
    spent_s += count * (step_s + cluster.cached_s * cached)
    now_s = run.loop.now
    run.lanes.generating.append(Span(now_s, now_s + spent_s, used))
    self.num_tokens += int(np.minimum(self._left, count).sum())
    self._left -= count
    self._written += count
    has_ended = self._left <= 0
    if has_ended.any():
      run.loop.after(spent_s, run.end, self._groups[has_ended].tolist())
      keep = ~has_ended
      self._left, self._written = self._left[keep], self._written[keep]
      self._groups = self._groups[keep]
      run.loop.after(spent_s, run.dispatcher.wake)
    return spent_s

  def _enter(self) -> None:
    count = min(self._run.cluster.slots - len(self._left), len(self.waiting))
    if count <= 0:
      return
    new = [self.waiting.popleft() for _ in range(count)]
    groups, lengths = np.array(new, np.int64).T
    self._groups = np.concatenate([self._groups, groups])
    self._left = np.concatenate([self._left, lengths])
    zeros = np.zeros(count, np.int64)
    self._written = np.concatenate([self._written, zeros])


class _Run:
  """One run of a cluster."""

  def __init__(
    self,
    cluster: Cluster,
    mode: Mode,
    max_staleness: int,
    *,
    num_steps: int,
    seed: int,
    interrupts: bool,
  ):
    self.cluster, self.mode, self.interrupts = cluster, mode, interrupts
    self.loop = loop = event_loop.Loop(random.Random(seed))
    self._rng = np.random.default_rng(seed)
    self.version = 0
    self._num_steps = num_steps
    self._members: dict[int, int] = {}  # members that are not finished
    self._tokens: dict[int, int] = {}
    self._admissions: dict[int, types.Admission] = {}
    self._training: tuple[int, int] | None = None
    self.dispatcher = event_loop.Process(loop, self._dispatch)
    self.trainer = event_loop.Process(loop, self._train)
    self._loader_process = event_loop.Process(loop, self._load)
    self.buffer = buffer_lib.Buffer(
      cluster.groups_per_step,
      max_staleness,
      clock=loop.seconds,
      new_condition=loop.condition,
    )
    steps = itertools.count(0)
    self._loader: batch_loader.BatchLoader[
      tuple[int, list[types.RolloutGroup]]
    ] = batch_loader.BatchLoader(
      self.buffer,
      lambda groups: (next(steps), groups),
      first_step=0,
      end_step=num_steps,
      new_condition=loop.condition,
    )
    self._loading = self._loader.waits()
    self.replicas = [_Replica(self) for _ in range(cluster.num_replicas(mode))]
    self.ended: list[tuple[float, int, int, float]] = []  # of each step
    self.lanes = Lanes(generating=[], training=[])
    self._staleness = 0.0

  def run(self) -> list[tuple[float, int, int, float]]:
    """Return of each step: its end, its tokens, all tokens, its staleness."""
    self.buffer.set_policy_version(0)
    for process in (self.trainer, self._loader_process):
      process.wake()
    for replica in self.replicas:
      replica.process.wake()
    while len(self.ended) < self._num_steps:
      if not self.loop.step() or self.loop.num_events > _MAX_EVENTS:
        raise RuntimeError(f"no end: {self.loop.num_events} events")
    return self.ended

  def _dispatch(self) -> None:
    """Give each group to the replica with the most room."""
    ready = [r for r in self.replicas if r.version >= 0]
    newest = max((r.version for r in ready), default=-1)
    if newest < 0 or not self.buffer.wait_for_admission(newest, UNBOUNDED, 0.0):
      return
    rooms = {place: replica.room for place, replica in enumerate(ready)}
    fleet_lib.share_out(rooms, functools.partial(self._give, ready))
    # Parks until a place is free, if that is what was missing.
    self.buffer.wait_for_admission(newest, UNBOUNDED, 0.0)

  def _give(self, ready: list[_Replica], place: int) -> int:
    """Give a group to a replica, and return its size; 0 if there is none."""
    admission = self.buffer.try_admit(ready[place].version)
    if admission is None:
      return 0
    self._begin(ready[place], admission)
    return self.cluster.group_size

  def _begin(self, replica: _Replica, admission: types.Admission) -> None:
    size = self.cluster.group_size
    lengths = self.cluster.lengths.draw(self._rng, size)
    self._members[admission.index] = size
    self._tokens[admission.index] = int(lengths.sum())
    self._admissions[admission.index] = admission
    replica.give(admission.index, lengths)

  def end(self, groups: list[int]) -> None:
    """Take members that have ended, and hand in groups that are complete."""
    for index in groups:
      self._members[index] -= 1
      if not self._members[index]:
        del self._members[index]
        admission = self._admissions.pop(index)
        self.buffer.put(_group(admission, self.version))

  def _load(self) -> None:
    next(self._loading, None)

  def _train(self) -> float | None:
    if self._training is not None:
      step, num_tokens = self._training
      self._training = None
      self.version = step + 1
      generated = sum(r.num_tokens for r in self.replicas)
      self.ended.append((self.loop.now, num_tokens, generated, self._staleness))
      self.buffer.set_policy_version(self.version)
      for replica in self.replicas:
        replica.process.wake()
      self.dispatcher.wake()
    loaded = self._loader.next(0.0)
    if loaded is None:
      return None
    step, groups = loaded.batch
    num_tokens = sum(self._tokens.pop(group.index) for group in groups)
    births = [group.admission.birth for group in groups]
    self._staleness = step - sum(births) / len(births)
    self._training = step, num_tokens
    cluster, devices = self.cluster, self.cluster.num_training(self.mode)
    train_s = num_tokens * cluster.train_device_s / devices
    if self.mode is Mode.SYNCHRONOUS:
      train_s += cluster.switch_s
    now_s = self.loop.now
    self.lanes.training.append(Span(now_s, now_s + train_s, 1.0))
    return train_s


def _group(admission: types.Admission, version: int) -> types.RolloutGroup:
  """Return a finished group that stands for its tokens."""
  versions = np.array([-1, admission.birth, version], np.int32)
  trajectory = types.Trajectory(
    member=0,
    tokens=np.zeros_like(versions),
    loss_mask=versions >= 0,
    behavior_logprobs=np.zeros(versions.shape, np.float32),
    policy_versions=versions,
    finish_reason=types.FinishReason.EOS,
  )
  return types.RolloutGroup(
    admission=admission, prompt=_PROMPT, trajectories=[trajectory]
  )


def lanes(
  cluster: Cluster, max_staleness: int, *, num_steps: int, seed: int = 0
) -> Lanes:
  """Return when a cluster of two slices generates and trains.

  Args:
    cluster: devices and rates.
    max_staleness: 0 makes the slices take turns.
    num_steps: train steps to simulate.
    seed: of the lengths.
  """
  run = _Run(
    cluster,
    Mode.ASYNCHRONOUS,
    max_staleness,
    num_steps=num_steps,
    seed=seed,
    interrupts=True,
  )
  run.run()
  return run.lanes


def predict(
  cluster: Cluster,
  mode: Mode,
  max_staleness: int = 0,
  *,
  num_steps: int = 24,
  skip: int = 8,
  seed: int = 0,
  interrupts: bool | None = None,
) -> Prediction:
  """Return what a cluster does.

  Args:
    cluster: devices and rates.
    mode: how they are shared.
    max_staleness: for ASYNCHRONOUS; it is 0 and 1 in the other modes.
    num_steps: train steps to simulate.
    skip: how many of them are left out, because they begin with empty slots.
    seed: of the lengths.
    interrupts: whether sequences continue under new weights; None leaves it to
      the mode.
  """
  if mode is not Mode.ASYNCHRONOUS:
    max_staleness = 0 if mode is Mode.SYNCHRONOUS else 1
  if interrupts is None:
    interrupts = mode is not Mode.OVERLAPPED
  ended = _Run(
    cluster,
    mode,
    max_staleness,
    num_steps=num_steps,
    seed=seed,
    interrupts=interrupts,
  ).run()
  start_s, _, before, _ = ended[skip - 1]
  end_s, _, after, _ = ended[-1]
  counted = ended[skip:]
  num_tokens = sum(tokens for _, tokens, _, _ in counted)
  wall_s = end_s - start_s
  train_s = num_tokens * cluster.train_device_s / cluster.num_training(mode)
  return Prediction(
    tokens_per_s=num_tokens / wall_s,
    generated_per_s=(after - before) / wall_s,
    step_s=wall_s / len(counted),
    train_busy=train_s / wall_s,
    staleness=sum(one[3] for one in counted) / len(counted),
  )
