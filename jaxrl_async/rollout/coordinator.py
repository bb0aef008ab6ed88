"""The coordinator: admits groups, plays their episodes, keeps the books.

It never touches an engine. Replicas ask it for turns and report what they wrote
(`messages` has the verbs), and all that it answers can be sent to another
process. What a replica reported last is all that the coordinator knows of it,
and enough for another replica to go on.
"""

from collections.abc import Iterable
import dataclasses
import traceback as traceback_lib

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import ledger as ledger_lib
from jaxrl_async.data import prompts
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.text import tokenizer as tokenizer_lib


class RewardError(RuntimeError):
  """Too many groups in a row failed, or none had rewards to learn from.

  Of failures the message holds the first traceback.
  """


@dataclasses.dataclass(kw_only=True, slots=True)
class CoordinatorSettings:
  """What a coordinator needs of the configuration.

  Attributes:
    max_tokens: of a trajectory; the cache of every replica holds as many.
    max_filtered_groups: in a row, after which the run ends: nobody waits for
      the one group in so many that is not filtered.
  """

  group_size: int
  max_completion_tokens: int
  max_tokens: int
  temperature: float
  filter_zero_std: bool
  max_failed_groups: int
  max_filtered_groups: int = 1_000


@dataclasses.dataclass(kw_only=True, slots=True)
class _Failure:
  """Why a group has failed, for the ledger and for whoever looks for it."""

  reason: str
  traceback: str


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
  """A group that has not reached the buffer.

  Attributes:
    episodes: by member.
    trajectories: by member, as they were reported last.
    unfinished: members whose episodes go on.
    replica: which writes the unfinished members; None while they wait for one.
    score: once all members are finished.
    failure: set when the group has failed, but its replica was not heard yet.
  """

  admission: types.Admission
  prompt: types.Prompt
  times_s: dict[str, float]
  episodes: dict[int, episode_lib.Turns] = dataclasses.field(
    default_factory=dict
  )
  trajectories: dict[int, types.Trajectory] = dataclasses.field(
    default_factory=dict
  )
  unfinished: set[int] = dataclasses.field(default_factory=set)
  replica: str | None = None
  score: service_lib.ScoreHandle | None = None
  failure: _Failure | None = None

  def group(self) -> types.RolloutGroup:
    """What is known of it, members in order, partial ones included."""
    return types.RolloutGroup(
      admission=self.admission,
      prompt=self.prompt,
      trajectories=[self.trajectories[m] for m in sorted(self.trajectories)],
      times_s=dict(self.times_s),
    )

  def abort(self, members: Iterable[int]) -> None:
    """Nothing more is written of these members."""
    for member in members:
      self.trajectories[member] = dataclasses.replace(
        self.trajectories[member], finish_reason=types.FinishReason.ABORTED
      )
      self.unfinished.remove(member)


class Coordinator:
  """One side of a rollout, of which the replicas are the other.

  Invariant: a group that was admitted is in exactly one place: in `_running`,
  or handed to the buffer, or ended in the ledger. One in `_running` has
  unfinished members or awaits a score. All its unfinished members are with the
  same replica, or they wait for one, and then the group is in `_waiting` too.

  Threads: one at a time, which is the one that drives the only replica, as long
  as there is one. Others may call `status`.

  Attributes:
    stream: where prompts come from.
  """

  def __init__(
    self,
    settings: CoordinatorSettings,
    *,
    stream: prompts.PromptStream,
    buffer: buffer_lib.Buffer,
    rewards: service_lib.RewardService,
    ledger: ledger_lib.Ledger,
    tokenizer: tokenizer_lib.Tokenizer,
    busy: metrics_lib.BusyClock,
    episode: episode_lib.Episode = episode_lib.single_turn,
  ):
    self.settings = settings
    self.stream = stream
    self._buffer = buffer
    self._rewards = rewards
    self._ledger = ledger
    self._tokenizer = tokenizer
    self._busy = busy
    self._episode = episode
    self._running: dict[int, _Running] = {}
    self._waiting: dict[int, _Running] = {}
    self._versions: dict[str, int] = {}  # by replica
    self._failures: list[str] = []  # of the last groups in a row
    self._num_filtered = 0  # since the last group for the buffer

  # -- what replicas say ----------------------------------------------------

  def admit(self, ask: messages.Ask) -> messages.Work:
    """Returns turns for a replica that has room: whole groups, while it has.

    Groups that wait are first, then new ones as far as the buffer allows.
    """
    turns: list[messages.Turn] = []
    while len(turns) < ask.room:
      running = self._next_group(ask.version)
      if running is None:
        break
      running.replica = ask.replica
      turns += [self._turn(running, m) for m in sorted(running.unfinished)]
    return messages.Work(turns=tuple(turns))

  def report(self, report: messages.Report) -> messages.Work:
    """Takes note of what was written; returns how it goes on.

    What is reported of a group that has ended, or that another replica writes
    meanwhile, is not wanted any more.
    """
    turns, failed, unwanted = [], {}, {}
    for written in report.written:
      running = self._running.get(written.group)
      trajectory = written.trajectory
      member, reason = trajectory.member, trajectory.finish_reason
      if running is None or running.replica != report.replica:
        if reason is None:
          unwanted[written.group] = None
        continue
      running.trajectories[member] = trajectory
      if reason is None:
        continue
      if running.failure is None:
        if reason is types.FinishReason.ABORTED:
          raise ValueError(f"group {written.group} was aborted by its replica")
        try:
          turns += self._advance(running, member)
        except episode_lib.EpisodeError as error:
          running.failure = _failure_of(error)
      if running.failure is not None:
        running.abort([member])
        failed[written.group] = running
    # The ledger counts what their other members wrote, so those come first.
    for running in failed.values():
      if not running.unfinished:
        self._end_failed(running)
    cancelled = [i for i, running in failed.items() if running.unfinished]
    return messages.Work(turns=tuple(turns), cancelled=(*cancelled, *unwanted))

  def adopted(self, adopted: messages.Adopted) -> None:
    """Takes note of a replica's version."""
    self._versions[adopted.replica] = adopted.version

  def drained(self, drained: messages.Drained) -> None:
    """Keeps the groups of a replica that is gone for another one."""
    self._versions.pop(drained.replica, None)
    lost = [r for r in self._running.values() if r.replica == drained.replica]
    for running in lost:
      running.replica = None
      if running.failure is not None:
        running.abort(list(running.unfinished))
        self._end_failed(running)
      elif running.unfinished:
        self._waiting[running.admission.index] = running

  # -- what its owner asks --------------------------------------------------

  @property
  def policy_version(self) -> int:
    """Newest version that replicas may adopt; -1 before the first."""
    return self._buffer.policy_version

  @property
  def is_scoring(self) -> bool:
    """Whether `collect_scores` will have something to do."""
    return any(r.score is not None for r in self._running.values())

  def has_prompt(self, timeout_s: float = 0.0) -> bool:
    """Whether there is a prompt for a new group; waits at most so long."""
    return self.stream.is_ready(timeout_s=timeout_s)

  def wait_for_admission(
    self, version: int, seen_version: int, timeout_s: float
  ) -> None:
    """As `Buffer.wait_for_admission`."""
    self._buffer.wait_for_admission(version, seen_version, timeout_s)

  def status(self) -> str:
    """How many groups there are, and what their replicas hold."""
    held = [f"{name} holding version {v}" for name, v in self._versions.items()]
    return ", ".join([*held, f"{len(self._running)} groups running"])

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Groups being written or scored, by index, as they were reported last."""
    return {index: r.group() for index, r in self._running.items()}

  def restore(self, groups: list[types.RolloutGroup]) -> None:
    """Takes up groups of a checkpoint, partial trajectories included.

    Call it before any replica asks.
    """
    for group in groups:
      running = _Running(
        admission=group.admission,
        prompt=group.prompt,
        times_s=dict(group.times_s),
      )
      self._running[group.index] = running
      try:
        for trajectory in group.trajectories:
          self._restore_member(running, trajectory)
      except episode_lib.EpisodeError as error:
        for trajectory in group.trajectories:  # the ledger counts all tokens
          running.trajectories.setdefault(trajectory.member, trajectory)
        self._fail(running, _failure_of(error))
        continue
      if running.unfinished:
        self._waiting[group.index] = running
      self._score_if_done(running)

  def collect_scores(self) -> None:
    """Hands over or ends every group whose score is there."""
    scored = [
      r
      for r in self._running.values()
      if r.score is not None and r.score.done()
    ]
    for running in scored:
      self._finish(running)

  # -- groups and members ---------------------------------------------------

  def _next_group(self, version: int) -> _Running | None:
    """A group for a replica of that version; None if there is none now."""
    # A token of an older version than its group's birth would be too stale.
    waiting = [
      r for r in self._waiting.values() if r.admission.birth <= version
    ]
    if waiting:
      first = min(
        waiting, key=lambda r: (r.admission.deadline, r.admission.index)
      )
      return self._waiting.pop(first.admission.index)
    while self.stream.is_ready():
      admission = self._buffer.try_admit(version)
      if admission is None:
        return None
      running = self._start(admission, self.stream.next())
      if running is not None:
        return running
    return None

  def _start(
    self, admission: types.Admission, prompt: types.Prompt
  ) -> _Running | None:
    """Begins the episodes of a new group; None if one of them failed."""
    running = _Running(
      admission=admission,
      prompt=prompt,
      times_s={"admitted": self._busy.now()},
    )
    self._running[admission.index] = running
    try:
      for member in range(self.settings.group_size):
        self._start_member(running, member)
    except episode_lib.EpisodeError as error:
      self._fail(running, _failure_of(error))
      return None
    return running

  def _start_member(self, running: _Running, member: int) -> None:
    turns = self._episode(running.prompt)
    running.episodes[member] = turns
    tokens = episode_lib.advance(turns, None)
    assert tokens is not None
    limit = self._limit(running)
    if len(tokens) >= limit:
      raise episode_lib.EpisodeError(
        f"its first turn of {len(tokens)} tokens leaves nothing of {limit}"
      )
    running.trajectories[member] = episode_lib.begin(member, tokens)
    running.unfinished.add(member)

  def _restore_member(
    self, running: _Running, trajectory: types.Trajectory
  ) -> None:
    """Takes up one member: finished, in the middle, or between two turns."""
    member = trajectory.member
    turns = self._episode(running.prompt)
    running.episodes[member] = turns
    pending = episode_lib.replay(turns, trajectory)
    trajectory = dataclasses.replace(trajectory, reward=None)
    if pending is None:
      pass
    elif len(trajectory.tokens) + len(pending) < self._limit(running):
      trajectory = episode_lib.extend(trajectory, pending)
      running.unfinished.add(member)
    else:
      # As in `_advance`. The limit may have been a higher one before.
      trajectory = dataclasses.replace(
        trajectory, finish_reason=types.FinishReason.LENGTH
      )
    running.trajectories[member] = trajectory

  def _limit(self, running: _Running) -> int:
    limit = len(running.prompt.tokens) + self.settings.max_completion_tokens
    return min(limit, self.settings.max_tokens)

  def _turn(self, running: _Running, member: int) -> messages.Turn:
    return messages.Turn(
      admission=running.admission,
      trajectory=running.trajectories[member],
      limit=self._limit(running),
      temperature=self.settings.temperature,
    )

  def _advance(self, running: _Running, member: int) -> list[messages.Turn]:
    """A turn has ended: tells the episode; returns its next turn, if any.

    Raises:
      EpisodeError: of the episode.
    """
    trajectory = running.trajectories[member]
    more = episode_lib.advance(
      running.episodes[member], episode_lib.last_completion(trajectory)
    )
    if more is not None:
      if len(trajectory.tokens) + len(more) < self._limit(running):
        running.trajectories[member] = episode_lib.extend(trajectory, more)
        return [self._turn(running, member)]
      running.trajectories[member] = dataclasses.replace(
        trajectory, finish_reason=types.FinishReason.LENGTH
      )
    running.unfinished.remove(member)
    self._score_if_done(running)
    return []

  # -- scores and failures --------------------------------------------------

  def _score_if_done(self, running: _Running) -> None:
    if running.unfinished or running.score is not None:
      return
    running.times_s["generated"] = self._busy.now()
    completions = [
      completion_lib.of_trajectory(trajectory, self._tokenizer)
      for trajectory in running.group().trajectories
    ]
    running.score = self._rewards.submit(running.prompt.item, completions)

  def _finish(self, running: _Running) -> None:
    assert running.score is not None
    outcome = running.score.result()
    if isinstance(outcome, service_lib.RewardFailure):
      self._fail(
        running, _Failure(reason=outcome.reason, traceback=outcome.traceback)
      )
      return
    self._failures.clear()
    running.times_s["scored"] = self._busy.now()
    group = running.group()
    for trajectory, reward in zip(group.trajectories, outcome, strict=True):
      trajectory.reward = reward
    index = running.admission.index
    del self._running[index]
    if self.settings.filter_zero_std and types.teach_nothing(outcome):
      self._ledger.add_filtered(group)
      self._buffer.drop(index)
      self._num_filtered += 1
      if self._num_filtered >= self.settings.max_filtered_groups:
        raise RewardError(
          f"{self._num_filtered} groups in a row had equal rewards and were"
          " left out (algorithm.filter_zero_std); the last reward was"
          f" {outcome[0].score:g}: the questions are too easy or too hard"
        )
    else:
      self._num_filtered = 0
      self._buffer.put(group)

  def _fail(self, running: _Running, failure: _Failure) -> None:
    """Ends a group of which no replica writes anything."""
    running.failure = failure
    running.abort(list(running.unfinished))
    self._end_failed(running)

  def _end_failed(self, running: _Running) -> None:
    """Writes down a failed group once everything that was written is known."""
    assert running.failure is not None and not running.unfinished
    reason, index = running.failure.reason, running.admission.index
    del self._running[index]
    self._ledger.add_failed(running.group(), reason)
    self._buffer.drop(index)
    self._failures.append(
      f"group {index}: {reason}\n{running.failure.traceback}".rstrip()
    )
    if len(self._failures) >= self.settings.max_failed_groups:
      raise RewardError(
        f"{len(self._failures)} groups in a row failed"
        f" (task.max_failed_groups); the first: {self._failures[0]}"
      )


def _failure_of(error: episode_lib.EpisodeError) -> _Failure:
  """The failure of a group that one of its episodes failed with."""
  lines = traceback_lib.format_exception(error.__cause__ or error)
  return _Failure(reason=f"episode: {error}", traceback="".join(lines))
