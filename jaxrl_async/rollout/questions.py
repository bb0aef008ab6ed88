"""The questions of an evaluation, which replicas answer beside the groups.

An answer is an ordinary sequence. The coordinator hands it out like a turn of a
group, a replica reports it like one, and it goes on elsewhere if its replica is
lost. Nothing of it reaches the buffer or the ledger.
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import queue
import threading
from typing import NamedTuple

import numpy as np

from jaxrl_async import types
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import running_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
  """How questions are answered, each `samples` times."""

  samples: int = 1
  temperature: float
  max_completion_tokens: int
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()


class Question(NamedTuple):
  """One answer that is wanted.

  Attributes:
    of: the set of questions.
    number: of the question in its set.
    sample: number of the answer among those to its question. With `number` it
      decides the random numbers.
  """

  of: str
  number: int
  sample: int
  prompt: types.Prompt
  settings: AnswerSettings


def of_set(
  name: str,
  prompts: Sequence[types.Prompt],
  settings: AnswerSettings,
  numbers: Iterable[int] | None = None,
) -> list[Question]:
  """Return all answers that are wanted to a set of questions, in order.

  Only the questions of these numbers are asked; None is all of them.
  """
  asked = range(len(prompts)) if numbers is None else numbers
  return [
    Question(name, number, sample, prompts[number], settings)
    for number, sample in itertools.product(asked, range(settings.samples))
  ]


def turn_of(
  question: Question,
  index: int,
  max_tokens: int,
  *,
  version: int = 0,
) -> messages.Turn:
  """Return the turn in which a question is answered.

  Args:
    index: negative, and of no other turn.
    max_tokens: the longest answer with its question.
    version: of the policy that may answer it first.
  """
  settings = question.settings
  tokens = question.prompt.tokens
  return messages.Turn(
    admission=types.Admission(index=index, birth=version, deadline=version),
    trajectory=episode_lib.First(tokens).trajectory(question.sample),
    limit=min(len(tokens) + settings.max_completion_tokens, max_tokens),
    temperature=settings.temperature,
    stop=settings.stop,
    stop_token_ids=settings.stop_token_ids,
    question=question.number,
  )


class Answer(NamedTuple):
  """One answer.

  Attributes:
    question: what was asked.
    trajectory: prompt and completion, with the reward once there is one. If the
      episode has branches, they are end to end (`types.whole`).
    failure: why there is no reward, such as an episode that failed; None before
      the answer is scored, too.
    branches: of the episode, as they were written.
  """

  question: Question
  trajectory: types.Trajectory
  failure: service_lib.RewardFailure | None = None
  branches: Sequence[types.Trajectory] = ()

  @property
  def completed(self) -> types.Trajectory:
    """What counts as the completion, with the reward; see `types.completed`."""
    if len(self.branches) < 2:
      return self.trajectory
    return dataclasses.replace(
      types.completed(self.branches), reward=self.trajectory.reward
    )

  @property
  def name(self) -> str:
    """The question's name, with "#" and a number for all but the first."""
    name, sample = self.question.prompt.prompt_id, self.question.sample
    return f"{name}#{sample}" if sample else name


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
  """An answer as it was last reported, and the replica that writes it.

  Attributes:
    earlier: the branches before the one that is written.
    episode: of the answer, once it has begun; None if it has a single turn.
    is_pending: whether the episode has to answer.
    ends: what ends the turn besides what ends all turns.
  """

  question: Question
  turn: messages.Turn
  replica: str | None = None
  earlier: list[types.Trajectory] = dataclasses.field(default_factory=list)
  episode: environment_lib.Conversation | None = None
  is_pending: bool = False
  ends: messages.Ends = messages.Ends()

  @property
  def to_write(self) -> messages.Turn:
    """The turn as a replica gets it."""
    return self.turn.until(self.ends)

  def answer(self, failure: service_lib.RewardFailure | None = None) -> Answer:
    """Return what was written, and why there is nothing to score."""
    trajectory = self.turn.trajectory
    if failure is not None:
      trajectory = dataclasses.replace(
        trajectory, finish_reason=types.FinishReason.ABORTED
      )
    branches = [*self.earlier, trajectory]
    if self.episode is not None and self.episode.context is not None:
      events = self.episode.context.events
      branches[0] = dataclasses.replace(branches[0], events=events)
    return Answer(self.question, types.whole(branches), failure, branches)


class Questions:
  """The questions that are being answered.

  With an episode of several turns, a turn that follows another is handed out by
  the next `admit` of the replica that wrote that one.

  Invariant: every answer that is wanted is complete, waits, or belongs to one
  replica. Its index is negative, which that of no group is.

  Threads: any may call any method. A lock guards everything.

  Attributes:
    recorded_tokens: tokens of answers that replicas reported.
    are_alone: whether groups have to wait.
  """

  def __init__(
    self,
    *,
    max_tokens: int,
    num_slots: int,
    environment: environment_lib.Environment | None = None,
  ):
    """Begin without questions.

    Args:
      max_tokens: the longest answer with its question.
      num_slots: of each replica's engine. Beside groups, answers get at most
        half of them, so that training goes on however many questions there are.
      environment: has the episodes of the answers; without it they are of a
        single turn.
    """
    self.recorded_tokens = 0
    self._max_tokens = max_tokens
    self._num_slots = num_slots
    self._most = max(1, num_slots // 2)
    self._environment = environment or environment_lib.Environment()
    self._lock = threading.Lock()
    self._indices = itertools.count(-1, -1)
    self._running: dict[int, _Running] = {}
    self.ask((), 0, is_alone=False)

  def ask(
    self, questions: Iterable[Question], version: int, *, is_alone: bool
  ) -> "queue.SimpleQueue[Answer]":
    """Have questions answered, instead of those that were asked before.

    Args:
      questions: in the order in which they are begun.
      version: of the policy. Replicas with an older one get none of them.
      is_alone: whether no turn of a group is handed out until `forget`.

    Returns:
      The queue that gets the answers.
    """
    with self._lock:
      for one in self._running.values():
        if one.episode is not None:
          one.episode.close()
      self.are_alone = is_alone
      self._version = version
      self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
      self._running = {}
      for one in questions:
        index = next(self._indices)
        turn = turn_of(one, index, self._max_tokens, version=version)
        self._running[index] = _Running(question=one, turn=turn)
      # Those that wait for a replica, the next one last.
      self._waiting = list(self._running)[::-1]
      # Turns that follow others, for the replicas that wrote these.
      self._ready: dict[str, list[messages.Turn]] = {}
      self._num_out: collections.Counter[str] = collections.Counter()
      # Those whose episodes have to show their first prompt.
      self._starting: set[int] = set()
      return self._answers

  def forget(self) -> None:
    """Let groups go on alone. Answers that are not complete are given up."""
    self.ask((), 0, is_alone=False)

  @property
  def num_missing(self) -> int:
    """The number of answers that are not complete."""
    return len(self._running)

  # -- the coordinator ------------------------------------------------------

  def admit(self, ask: messages.Ask) -> list[messages.Turn]:
    """Return answers to write for a replica that has room.

    Turns that follow others come first, even if there is no room. No room is
    kept for episodes that start slowly, up to the number of slots.
    """
    with self._lock:
      turns = self._ready.pop(ask.replica, [])
      room = ask.room if ask.version >= self._version else 0
      room -= len(turns)
      if not self.are_alone:
        room = min(room, self._most - self._num_out[ask.replica])
      room -= max(0, self._num_starting(ask.replica) - self._num_slots)
      while self._waiting and room > 0:
        index = self._waiting.pop()
        one = self._running[index]
        one.replica = ask.replica
        self._num_out[ask.replica] += 1
        room -= 1
        if self._has_begun(index, one):
          turns.append(one.to_write)
      return turns

  def _num_starting(self, replica: str) -> int:
    return sum(self._running[i].replica == replica for i in self._starting)

  def report(self, replica: str, written: messages.Written) -> bool:
    """Record what a replica has written of an answer.

    Returns:
      Whether it shall go on. If not, nobody wants it, or another replica has
      taken it over.
    """
    with self._lock:
      one = self._running.get(written.group)
      if one is None or one.replica != replica:
        return False
      new, before = written.trajectory, one.turn.trajectory
      assert written.begin == len(before.tokens)
      self.recorded_tokens += len(new.tokens)
      (trajectory,) = running_group.joined(
        [before], [[running_group.Piece(replica, new)]]
      )
      one.turn = one.turn._replace(trajectory=trajectory)
      if new.finish_reason is None:
        return True
      if one.episode is None:
        self._end(written.group, one)
      else:
        self._send(written, one, trajectory)
      return True

  def take(self, episode: environment_lib.Conversation) -> None:
    """Take the answer of an episode, which has come later."""
    with self._lock:
      index = episode.key[0]
      one = self._running.get(index)
      if one is None or one.episode is not episode:
        return  # nobody wants it any more
      one.is_pending = False
      self._starting.discard(index)
      try:
        goes_on = self._follow(one, episode.taken())
      except episode_lib.EpisodeError as error:
        self._end(index, one, running_group.failure_of(error))
        return
      if not goes_on:
        self._end(index, one)
      elif one.replica is None:
        self._waiting.append(index)
      else:
        self._ready.setdefault(one.replica, []).append(one.to_write)

  def take_back(self, replica: str | None = None) -> None:
    """Let answers of a replica, or of all, wait for another one."""
    with self._lock:
      for index, one in reversed(self._running.items()):
        if one.replica is not None and replica in (None, one.replica):
          self._num_out[one.replica] -= 1
          self._ready.pop(one.replica, None)
          one.replica = None
          if not one.is_pending:
            self._waiting.append(index)

  # -- episodes -------------------------------------------------------------

  def _has_begun(self, index: int, one: _Running) -> bool:
    """Return whether there is a turn to write; begin an episode before."""
    if self._environment.is_single_turn or one.episode is not None:
      return True
    try:
      one.episode = self._environment.open(
        one.question.prompt,
        key=(index, one.question.sample),
        limit=one.turn.limit,
      )
      answer = one.episode.begin()
      if answer is None:
        one.is_pending = True
        self._starting.add(index)
        return False
      return self._follow(one, answer)
    except episode_lib.EpisodeError as error:
      self._end(index, one, running_group.failure_of(error))
      return False

  def _send(
    self,
    written: messages.Written,
    one: _Running,
    trajectory: types.Trajectory,
  ) -> None:
    """Pass a finished turn to its episode."""
    assert one.episode is not None and one.replica is not None
    index, completion = written.group, episode_lib.last_completion(trajectory)
    try:
      answer = one.episode.send(
        completion._replace(num_cached=written.num_cached)
      )
      if answer is None:
        one.is_pending = True
      elif self._follow(one, answer):
        self._ready.setdefault(one.replica, []).append(one.to_write)
      else:
        self._end(index, one)
    except episode_lib.EpisodeError as error:
      self._end(index, one, running_group.failure_of(error))

  def _follow(self, one: _Running, answer: episode_lib.Answer) -> bool:
    """Make the next turn of an answer; return False if there is none.

    Raises:
      EpisodeError: the first prompt leaves no room.
    """
    trajectory, limit, more = one.turn.trajectory, one.turn.limit, answer.tokens
    if more is None:
      return False
    branches, goes_on = [*one.earlier, trajectory], True
    if not trajectory.loss_mask.any():
      if len(more) >= limit:
        raise episode_lib.no_room(more, limit)
      follows = episode_lib.First(more).trajectory(one.question.sample)
    elif self._environment.may_go_on(branches, answer, limit):
      follows = episode_lib.followed(trajectory, answer)
      if answer.is_anew:
        one.earlier = branches
    else:
      follows = dataclasses.replace(
        trajectory, finish_reason=types.FinishReason.LENGTH
      )
      goes_on = False
    one.turn = one.turn._replace(trajectory=follows)
    one.ends = answer.ends
    return goes_on

  def _end(
    self,
    index: int,
    one: _Running,
    failure: service_lib.RewardFailure | None = None,
  ) -> None:
    """Pass an answer on that is complete, or has failed."""
    del self._running[index]
    if one.replica is not None:
      self._num_out[one.replica] -= 1
    if one.episode is not None:
      one.episode.close()
    self._answers.put(one.answer(failure))


def versions_of(trajectories: Iterable[types.Trajectory]) -> tuple[int, int]:
  """Return the first and the last version that has written any of these."""
  found = [t.policy_versions[t.loss_mask] for t in trajectories]
  written = np.concatenate(found)
  return int(written.min()), int(written.max())
