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
    trajectory: prompt and completion, with the reward once there is one.
    failure: why there is no reward; None before the answer is scored, too.
  """

  question: Question
  trajectory: types.Trajectory
  failure: service_lib.RewardFailure | None = None

  @property
  def name(self) -> str:
    """The question's name, with "#" and a number for all but the first."""
    name, sample = self.question.prompt.prompt_id, self.question.sample
    return f"{name}#{sample}" if sample else name


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
  """An answer as it was last reported, and the replica that writes it."""

  question: Question
  turn: messages.Turn
  replica: str | None = None


class Questions:
  """The questions that are being answered.

  Invariant: every answer that is wanted is complete, waits, or belongs to one
  replica. Its index is negative, which that of no group is.

  Threads: any may call any method. A lock guards everything.

  Attributes:
    recorded_tokens: tokens of answers that replicas reported.
    are_alone: whether groups have to wait.
  """

  def __init__(self, *, max_tokens: int, num_slots: int):
    """Begin without questions.

    Args:
      max_tokens: the longest answer with its question.
      num_slots: of each replica's engine. Beside groups, answers get at most
        half of them, so that training goes on however many questions there are.
    """
    self.recorded_tokens = 0
    self._max_tokens = max_tokens
    self._most = max(1, num_slots // 2)
    self._lock = threading.Lock()
    self._indices = itertools.count(-1, -1)
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
      self.are_alone = is_alone
      self._version = version
      self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
      self._running: dict[int, _Running] = {}
      for one in questions:
        index = next(self._indices)
        turn = turn_of(one, index, self._max_tokens, version=version)
        self._running[index] = _Running(question=one, turn=turn)
      # Those that wait for a replica, the next one last.
      self._waiting = list(self._running)[::-1]
      self._num_out: collections.Counter[str] = collections.Counter()
      return self._answers

  def forget(self) -> None:
    """Let groups go on alone. Answers that are not complete are given up."""
    self.ask((), 0, is_alone=False)

  # -- the coordinator ------------------------------------------------------

  def admit(self, ask: messages.Ask) -> list[messages.Turn]:
    """Return answers to write for a replica that has room."""
    with self._lock:
      room = ask.room if ask.version >= self._version else 0
      if not self.are_alone:
        room = min(room, self._most - self._num_out[ask.replica])
      turns = []
      while self._waiting and len(turns) < room:
        one = self._running[self._waiting.pop()]
        one.replica = ask.replica
        turns.append(one.turn)
      self._num_out[ask.replica] += len(turns)
      return turns

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
      if new.finish_reason is not None:
        del self._running[written.group]
        self._num_out[replica] -= 1
        self._answers.put(Answer(one.question, trajectory))
      return True

  def take_back(self, replica: str | None = None) -> None:
    """Let answers of a replica, or of all, wait for another one."""
    with self._lock:
      for index, one in reversed(self._running.items()):
        if one.replica is not None and replica in (None, one.replica):
          self._num_out[one.replica] -= 1
          one.replica = None
          self._waiting.append(index)


def versions_of(trajectories: Iterable[types.Trajectory]) -> tuple[int, int]:
  """Return the first and the last version that has written any of these."""
  found = [t.policy_versions[t.loss_mask] for t in trajectories]
  written = np.concatenate(found)
  return int(written.min()), int(written.max())
