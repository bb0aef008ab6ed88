"""The coordinator: admits groups, runs their episodes and records the outcome.

The coordinator never touches an engine. Replicas ask it for turns and report
the tokens that they generated, with the calls defined in `messages`. Every
answer can be sent to another process. The coordinator knows of a trajectory
only what was reported last, and that is enough for another replica to continue
it.
"""

from collections.abc import Callable, Collection, Sequence
import dataclasses
import heapq

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.data import prompts
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import cut_scores
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import running_group

_START_S = 0.1  # for which room is kept for a conversation that has no prompt


class RewardError(RuntimeError):
  """Too many groups in a row failed or had only equal rewards.

  If groups failed, the message contains the traceback of the first failure.
  """


class Coordinator:
  """Admits groups, hands their turns to replicas and has them scored.

  Invariant: an admitted group is in exactly one place. It is in `_running`, or
  it was handed to the buffer, or the ledger records that it ended. A group in
  `_running` has unfinished members or awaits its score. An unfinished member is
  *pending* as long as its episode has to answer. Either one replica has all
  other unfinished members, or they wait for a replica and the group is in
  `_waiting` as well.

  Threads: only one thread at a time may call the methods. With a single
  replica, it is the thread that drives this replica. `status` may be called
  from any thread.

  Attributes:
    stream: the source of prompts for new groups.
    questions: of evaluations, which are answered beside the groups.
    recorded_tokens: tokens that replicas reported, without those below.
    refused_tokens: tokens that replicas reported of groups that had ended, or
      that another replica had taken over.
    num_answers: answers of episodes that came later.
  """

  def __init__(
    self,
    settings: coordinator_settings_lib.CoordinatorSettings,
    *,
    stream: prompts.PromptStream,
    buffer: buffer_lib.Buffer,
    rewards: service_lib.RewardService,
    ledger: ledger_lib.Ledger,
    busy: metrics_lib.BusyClock,
    environment: environment_lib.Environment | None = None,
    new_deadline: Callable[[float], supervisor_lib.Deadline] = (
      supervisor_lib.Deadline
    ),
  ):
    """Create a coordinator that has no groups yet.

    `environment` has the episodes; without it they are of a single turn.
    """
    self.settings = settings
    self.stream = stream
    self._buffer = buffer
    self._rewards = rewards
    self._ledger = ledger
    self._busy = busy
    self._environment = environment or environment_lib.Environment()
    self._new_deadline = new_deadline
    self.questions = questions_lib.Questions(
      max_tokens=settings.max_tokens,
      num_slots=settings.num_slots,
      environment=self._environment,
    )
    self._running: dict[int, running_group.RunningGroup] = {}
    self._waiting: list[tuple[int, int]] = []  # a heap of (deadline, index)
    self._starting: set[int] = set()  # groups, of which some may have started
    self._versions: dict[str, int] = {}  # by replica that may get groups
    self._oldest_version = 0  # of a replica that gets groups
    self.recorded_tokens = 0
    self.refused_tokens = 0
    self.num_answers = 0
    self._failures: list[str] = []  # of consecutive groups, oldest first
    self._num_filtered = 0  # since the last group for the buffer

  # -- calls from replicas --------------------------------------------------

  def admit(self, ask: messages.Ask) -> messages.Work:
    """Return turns of whole groups until the replica's room is used up.

    Questions of an evaluation come first, and then groups that wait for a
    replica. New groups follow as long as the
    buffer admits them. A replica gets nothing before it has adopted weights,
    and after it was drained.
    """
    room = ask.room - self.num_starting(ask.replica)
    turns, _ = self.hand_out(ask, room)
    return messages.Work(turns=tuple(turns))

  def hand_out(
    self, ask: messages.Ask, room: int
  ) -> tuple[list[messages.Turn], int]:
    """Return turns of whole groups until so much room is used up.

    Returns:
      The turns, and how many trajectories of their groups have to wait for
      their episodes.
    """
    if ask.replica not in self._versions:
      return [], 0
    turns, num_pending = self.questions.admit(ask), 0
    while len(turns) + num_pending < room and not self.questions.are_alone:
      running = self._next_group(ask.version)
      if running is None:
        break
      running.replica = ask.replica
      turns += [self._turn(running, m) for m in running.writable]
      num_pending += len(running.pending)
    return turns, num_pending

  def report(self, report: messages.Report) -> messages.Work:
    """Record the reported trajectories and return the work that follows.

    A report is ignored if its group has ended or if another replica has taken
    the group over. The answer then cancels the group.

    Raises:
      ValueError: a replica aborted a group that was not cancelled, or left out
        tokens.
      RewardError: too many groups in a row failed.
    """
    turns, failed, unwanted = [], {}, {}
    for written in report.written:
      running = self._running.get(written.group)
      member = written.trajectory.member
      reason = written.trajectory.finish_reason
      num_new = len(written.trajectory.tokens)
      if written.group < 0:
        is_wanted = self.questions.report(report.replica, written)
        if not is_wanted and reason is None:
          unwanted[written.group] = None
        continue
      if running is None or running.replica != report.replica:
        self.refused_tokens += num_new
        if reason is None:
          unwanted[written.group] = None
        continue
      self.recorded_tokens += num_new
      running.add(
        written.begin,
        running_group.Piece(report.replica, written.trajectory),
      )
      if reason is None:
        continue
      if running.failure is None:
        if reason is types.FinishReason.ABORTED:
          raise ValueError(f"group {written.group} was aborted by its replica")
        try:
          turns += self._advance(running, member, written.num_cached)
        except episode_lib.EpisodeError as error:
          running.fail(running_group.failure_of(error))
      if running.failure is not None:
        running.abort([member])
        failed[written.group] = running
    # A failed group ends when all members are reported: their tokens count.
    for running in failed.values():
      if not running.unfinished:
        self._end_failed(running)
    cancelled = [i for i, running in failed.items() if running.unfinished]
    return messages.Work(turns=tuple(turns), cancelled=(*cancelled, *unwanted))

  def adopted(self, adopted: messages.Adopted) -> None:
    """Record the policy version that a replica holds."""
    self._versions[adopted.replica] = adopted.version

  def drained(self, replica: str) -> None:
    """Let the groups of a replica wait for another, which goes on with them.

    The replica was lost, or its groups were taken from it.
    """
    self._versions.pop(replica, None)
    self.questions.take_back(replica)
    self._take_back({replica})

  def cut(self, version: int) -> None:
    """Let all groups wait for a replica that holds at least this version.

    The replicas must have reported and forgotten them. What is generated from
    now on depends only on what a checkpoint holds.
    """
    self._oldest_version = version
    self.questions.take_back()
    self._take_back({r.replica for r in self._running.values() if r.replica})

  def _take_back(self, replicas: Collection[str]) -> None:
    """Let the groups that replicas were generating wait for others."""
    for running in list(self._running.values()):
      if running.replica not in replicas:
        continue
      running.replica = None
      if running.failure is not None:
        running.abort(list(running.unfinished))
        self._end_failed(running)
      elif running.writable:
        self._wait(running)

  # -- calls from the owner -------------------------------------------------

  @property
  def policy_version(self) -> int:
    """Newest policy version that replicas may adopt; -1 before the first."""
    return self._buffer.policy_version

  @property
  def is_scoring(self) -> bool:
    """Whether any group awaits its score."""
    return any(r.score is not None for r in self._running.values())

  @property
  def awaits_answers(self) -> bool:
    """Whether an episode has to answer."""
    return self._environment.num_waiting > 0

  def num_starting(self, replica: str) -> int:
    """Return how many trajectories for a replica will soon have a first prompt.

    Those whose episodes take long to show one are left out, up to the number of
    slots: the replica would idle in the room that it keeps for them. More than
    that would only wait for each other.
    """
    num, num_late, oldest_s = 0, 0, self._busy.now() - _START_S
    for index in list(self._starting):
      running = self._running.get(index)
      if running is None or not running.num_starting:
        self._starting.discard(index)
      elif running.replica != replica:
        continue
      elif running.times_s["admitted"] < oldest_s:
        num_late += running.num_starting
      else:
        num += running.num_starting
    return num + max(0, num_late - self.settings.num_slots)

  def has_prompt(self, timeout_s: float = 0.0) -> bool:
    """Return whether a prompt is ready, after waiting up to `timeout_s`."""
    return self.stream.is_ready(timeout_s=timeout_s)

  def wait_for_admission(
    self, version: int, seen_version: int, timeout_s: float
  ) -> None:
    """Call `Buffer.wait_for_admission` with the same arguments."""
    self._buffer.wait_for_admission(version, seen_version, timeout_s)

  def status(self) -> str:
    """Return the replicas' versions and the number of groups, as text."""
    held = [f"{name} holding version {v}" for name, v in self._versions.items()]
    waiting = (
      [f"{n} episodes to answer"]
      if (n := self._environment.num_waiting)
      else []
    )
    running = f"{len(self._running)} groups running"
    return ", ".join([*held, running, *waiting])

  def metrics(self, num_replicas: int) -> dict[str, float]:
    """Return metrics about replicas, of which so many generate."""
    return {
      "rollout/replicas": float(num_replicas),
      "rollout/refused_tokens": float(self.refused_tokens),
      **running_group.oldest_metrics(self._running, self._busy.now()),
    }

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups in progress by index, as they were last reported.

    These are the groups that are being generated or scored.
    """
    return {index: r.group() for index, r in self._running.items()}

  def restore(self, groups: list[types.RolloutGroup]) -> None:
    """Continue the groups of a checkpoint, partial trajectories included.

    It must be called before any replica asks for work.
    """
    for group in groups:
      running = self._open(group.admission, group.prompt, dict(group.times_s))
      try:
        running_group.check_has_not_failed(group)
        for branches in group.branches():
          self._begin(running, branches[0].member, branches)
      except episode_lib.EpisodeError as error:
        for trajectory in group.trajectories:  # the ledger counts all tokens
          if not running.has(trajectory.member):
            running.set(trajectory)
        self._fail(running, running_group.failure_of(error))
        continue
      if running.writable:
        self._wait(running)
      self._score_if_done(running)

  def collect_answers(self) -> dict[str, messages.Work]:
    """Take the answers of episodes, and return what follows for which replica.

    A group that no replica has waits for one instead.

    Raises:
      RewardError: too many groups in a row failed.
    """
    self._environment.fail_late()
    turns: dict[str, list[messages.Turn]] = {}
    cancelled: dict[str, list[int]] = {}
    answers = self._environment.answers
    while not answers.empty():
      episode = answers.get_nowait()
      index, member = episode.key
      self.num_answers += 1
      if index < 0:
        self.questions.take(episode)
        continue
      running = self._running.get(index)
      if running is None or not running.has_episode(episode):
        continue
      if running.failure is not None:
        continue  # its replica has to report it
      replica, could_be_written = running.replica, bool(running.writable)
      try:
        follows = self._take(running, member, episode.taken())
      except episode_lib.EpisodeError as error:
        running.fail(running_group.failure_of(error))
        at_no_replica = running.unfinished if replica is None else [member]
        running.abort(running.unfinished.intersection(at_no_replica))
        if not running.unfinished:
          self._end_failed(running)
        elif replica is not None:
          cancelled.setdefault(replica, []).append(index)
        continue
      if follows is None:
        self._score_if_done(running)
      elif replica is not None:
        turns.setdefault(replica, []).append(self._turn(running, follows))
      elif not could_be_written:
        self._wait(running)
    return {
      name: messages.Work(
        turns=tuple(turns.get(name, ())),
        cancelled=tuple(cancelled.get(name, ())),
      )
      for name in {**turns, **cancelled}
    }

  def collect_scores(self) -> None:
    """Finish every group whose rewards have arrived.

    Such a group goes to the buffer, or it ends as filtered or failed.

    Raises:
      RewardError: too many groups in a row failed or were filtered.
    """
    scored = [
      r
      for r in self._running.values()
      if r.score is not None and r.score.done()
    ]
    for running in scored:
      self._finish(running)

  def overdue(self) -> dict[str, messages.Work]:
    """Let groups fail that take too long, and return what to cancel where.

    Such a group ends when its replica has reported it. It ends at once if no
    replica generates any of it.

    Raises:
      RewardError: too many groups in a row failed.
    """
    found: dict[str, list[int]] = {}
    if not self.settings.max_group_s:
      return {}
    late = []
    for running in self._running.values():
      if running.replica is None and self.questions.are_alone:
        # Nothing is handed out, so a group that waits is not at fault.
        running.patience = self._patience()
      elif running.is_overdue:
        late.append(running)
    for running in late:
      index = running.admission.index
      failure = running_group.overdue(self.settings.max_group_s)
      if running.replica is None:
        self._fail(running, failure)
      else:
        running.fail(failure)
        if running.unfinished:
          found.setdefault(running.replica, []).append(index)
        else:
          self._end_failed(running)
    return {n: messages.Work(cancelled=tuple(i)) for n, i in found.items()}

  # -- groups and members ---------------------------------------------------

  def _next_group(self, version: int) -> running_group.RunningGroup | None:
    """Return a group for a replica of this version; None if there is none."""
    # No token of a group may be older than the group's birth version.
    if version < self._oldest_version:
      return None
    waiting = self._next_waiting(version)
    if waiting is not None:
      return waiting
    while self.stream.is_ready():
      admission = self._buffer.try_admit(version)
      if admission is None:
        return None
      running = self._start(admission, self.stream.next())
      if running is not None:
        return running
    return None

  def _wait(self, running: running_group.RunningGroup) -> None:
    """Let a group wait for a replica."""
    admission = running.admission
    heapq.heappush(self._waiting, (admission.deadline, admission.index))

  def _next_waiting(self, version: int) -> running_group.RunningGroup | None:
    """Take the group that has waited for this version, the oldest deadline."""
    newer, found = [], None
    while self._waiting and found is None:
      entry = heapq.heappop(self._waiting)
      running = self._running.get(entry[1])
      if running is None or running.replica or not running.writable:
        continue  # it has failed, or was handed out, meanwhile
      if running.admission.birth <= version:
        found = running
      else:
        newer.append(entry)
    for entry in newer:
      heapq.heappush(self._waiting, entry)
    return found

  def _open(
    self,
    admission: types.Admission,
    prompt: types.Prompt,
    times_s: dict[str, float],
  ) -> running_group.RunningGroup:
    """Return a group that runs from now on and has no members yet."""
    limit = len(prompt.tokens) + self.settings.max_completion_tokens
    running = running_group.RunningGroup(
      admission=admission,
      prompt=prompt,
      limit=min(limit, self.settings.max_tokens),
      times_s=times_s,
      patience=self._patience(),
    )
    self._running[admission.index] = running
    return running

  def _patience(self) -> supervisor_lib.Deadline | None:
    return running_group.patience(self.settings.max_group_s, self._new_deadline)

  def _start(
    self, admission: types.Admission, prompt: types.Prompt
  ) -> running_group.RunningGroup | None:
    """Start the episodes of a new group; return None if one of them failed."""
    times_s = {"admitted": self._busy.now()}
    running = self._open(admission, prompt, times_s)
    try:
      for member in range(self.settings.group_size):
        self._begin(running, member, [])
    except episode_lib.EpisodeError as error:
      self._fail(running, running_group.failure_of(error))
      return None
    if running.pending:
      self._starting.add(admission.index)
    return running

  def _begin(
    self,
    running: running_group.RunningGroup,
    member: int,
    recorded: Sequence[types.Trajectory],
  ) -> None:
    """Start the episode of a member, or continue it as a checkpoint held it.

    A recorded episode is run up to where its last branch stopped. A finished
    member is scored again with its group. A partial completion is continued. If
    the recorded turn had ended, the next turn starts.

    Raises:
      EpisodeError: the episode failed, or its prompts differ from the record.
    """
    episode = self._environment.open(
      running.prompt,
      key=(running.admission.index, member),
      limit=running.limit,
      recorded=recorded,
      events=recorded[0].events if recorded else (),
    )
    running.episodes[member] = episode
    answer = episode.begin()
    for trajectory in recorded:
      running.set(dataclasses.replace(trajectory, reward=None))
      member = trajectory.member
    episode.key = running.admission.index, member
    if answer is None:
      if not recorded:
        running.set(episode_lib.nothing(member))
      running.unfinished.add(member)
      running.pending.add(member)
    else:
      follows = self._take(running, member, answer)
      if follows is not None:
        running.unfinished.add(follows)

  def _turn(
    self, running: running_group.RunningGroup, member: int
  ) -> messages.Turn:
    return messages.Turn(
      admission=running.admission,
      trajectory=running.trajectory(member),
      limit=running.limit,
      temperature=self.settings.temperature,
      stop=self.settings.stop,
      stop_token_ids=self.settings.stop_token_ids,
    ).until(running.ends[member])

  def _advance(
    self, running: running_group.RunningGroup, member: int, num_cached: int
  ) -> list[messages.Turn]:
    """Pass a finished turn to its episode and return the next turn, if any.

    Raises:
      EpisodeError: the episode failed.
    """
    episode = running.episodes[member % types.MEMBERS]
    answer = episode.send(running.last_completion(member, num_cached))
    if answer is None:
      running.pending.add(member)
      return []
    follows = self._take(running, member, answer)
    if follows is not None:
      return [self._turn(running, follows)]
    self._score_if_done(running)
    return []

  def _take(
    self,
    running: running_group.RunningGroup,
    member: int,
    answer: episode_lib.Answer,
  ) -> int | None:
    """Take the answer of an episode.

    Returns:
      The number of the branch that has another turn; None if there is none.

    Raises:
      EpisodeError: the first prompt leaves no room.
    """
    running.pending.discard(member)
    if answer.tokens is not None:
      if not running.has_begun(member):
        running.start(member, answer.tokens)
        running.ends[member] = answer.ends
        return member
      branches = running.branches(member)
      if self._environment.may_go_on(branches, answer, running.limit):
        member = running.follow(member, answer)
        running.ends[member] = answer.ends
        return member
      running.set(
        dataclasses.replace(
          branches[-1], finish_reason=types.FinishReason.LENGTH
        )
      )
    running.finish(member)
    return None

  # -- scores and failures --------------------------------------------------

  def _score_if_done(self, running: running_group.RunningGroup) -> None:
    if running.unfinished or running.score is not None:
      return
    running.times_s["generated"] = self._busy.now()
    running.score = self._rewards.submit(
      running.prompt.item, running.group().of_members().trajectories
    )

  def _finish(self, running: running_group.RunningGroup) -> None:
    assert running.score is not None
    outcome = running.score.result()
    if isinstance(outcome, service_lib.RewardFailure):
      self._fail(running, outcome)
      return
    self._failures.clear()
    running.times_s["scored"] = self._busy.now()
    whole = running.group()
    group = running_group.scored(whole, outcome)
    self._ledger.tell_dropped(whole, group.dropped)
    index = running.admission.index
    del self._running[index]
    rewards = [x for x in outcome if isinstance(x, types.Reward)]
    if self.settings.filter_zero_std and self._teach_nothing(rewards):
      self._ledger.add_filtered(group)
      self._buffer.drop(index)
      self._num_filtered += 1
      if self._num_filtered >= self.settings.max_filtered_groups:
        why = "the questions are too easy or too hard"
        if group.dropped:
          why = (
            f"{len(group.dropped)} completions of this group could not be"
            f" scored ({group.dropped[0].reason})"
          )
        raise RewardError(
          f"{self._num_filtered} groups in a row had equal rewards and were"
          " left out (algorithm.filter_zero_std); the last reward was"
          f" {rewards[0].score:g}: {why}"
        )
    else:
      self._num_filtered = 0
      self._buffer.put(group)

  def _teach_nothing(self, rewards: list[types.Reward]) -> bool:
    settings = self.settings
    if settings.budgets:
      return cut_scores.teach_nothing(rewards, settings.budgets)
    return types.teach_nothing(
      rewards, reads_token_scores=settings.reads_token_scores
    )

  def _fail(
    self,
    running: running_group.RunningGroup,
    failure: service_lib.RewardFailure,
  ) -> None:
    """End a group that failed while no replica generates any of its members."""
    running.fail(failure)
    running.abort(list(running.unfinished))
    self._end_failed(running)

  def _end_failed(self, running: running_group.RunningGroup) -> None:
    """Record a failed group after all of its members have been reported."""
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
