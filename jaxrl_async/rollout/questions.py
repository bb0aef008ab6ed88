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
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import running_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
  """How questions are answered.

  Attributes:
    samples: answers to each question.
    temperature: the sampling temperature; 0 is greedy.
    max_completion_tokens: longest answer.
    stop: texts each of which ends an answer.
    stop_token_ids: tokens each of which ends an answer.
  """

  samples: int = 1
  temperature: float
  max_completion_tokens: int
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()


class Question(NamedTuple):
  """One answer that is wanted.

  Attributes:
    of: the set of questions.
    number: of the question in its set. With that of the answer it decides the
      random numbers.
    sample: number of the answer among those to its question.
    prompt: of the question.
    settings: how it is answered.
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

  Args:
    name: of the set.
    prompts: of its questions.
    settings: how they are answered.
    numbers: of the questions that are asked; None is all of them.
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
  trajectory: types.Trajectory | None = None,
) -> messages.Turn:
  """Return the turn in which a question is answered.

  Args:
    question: what is asked.
    index: negative, and of no other turn.
    max_tokens: the longest answer with its question.
    version: of the policy that may answer it first.
    trajectory: the answer so far; None if it was not begun.
  """
  settings = question.settings
  tokens = question.prompt.tokens
  return messages.Turn(
    admission=types.Admission(index=index, birth=version, deadline=version),
    trajectory=trajectory
    or episode_lib.First(tokens).trajectory(question.sample),
    limit=min(len(tokens) + settings.max_completion_tokens, max_tokens),
    temperature=settings.temperature,
    stop=settings.stop,
    stop_token_ids=settings.stop_token_ids,
    question=question.number,
  )


class Written(NamedTuple):
  """One answer, before it is scored."""

  question: Question
  trajectory: types.Trajectory


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
  """An answer that is not complete.

  Attributes:
    trajectory: as it was last reported.
    replica: that writes it; None while it waits for one.
  """

  question: Question
  trajectory: types.Trajectory
  replica: str | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class _Asked:
  """What was asked at once.

  Attributes:
    running: the answers that are not complete, by index.
    waiting: indices of those that wait for a replica, the next one last.
    num_out: answers that each replica writes, by its name.
  """

  version: int
  is_alone: bool
  written: "queue.SimpleQueue[Written]"
  running: dict[int, _Running]
  waiting: list[int]
  num_out: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )


class Questions:
  """The questions that are being answered.

  Invariant: every answer that is wanted is complete, waits, or belongs to one
  replica. Its index is negative, which that of no group is.

  Threads: any may call any method. A lock guards everything.

  Attributes:
    recorded_tokens: tokens of answers that replicas reported.
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
    self._asked: _Asked | None = None

  def ask(
    self, questions: Iterable[Question], version: int, *, is_alone: bool
  ) -> "queue.SimpleQueue[Written]":
    """Have questions answered, instead of those that were asked before.

    Args:
      questions: in the order in which they are begun.
      version: of the policy. Replicas with an older one get none of them.
      is_alone: whether no turn of a group is handed out until `forget`.

    Returns:
      The queue that gets the answers.
    """
    written: queue.SimpleQueue[Written] = queue.SimpleQueue()
    with self._lock:
      running = {
        next(self._indices): _Running(
          question=one,
          trajectory=episode_lib.First(one.prompt.tokens).trajectory(
            one.sample
          ),
        )
        for one in questions
      }
      self._asked = _Asked(
        version=version,
        is_alone=is_alone,
        written=written,
        running=running,
        waiting=list(running)[::-1],
      )
    return written

  def forget(self) -> None:
    """Let groups go on alone. Answers that are not complete are given up."""
    with self._lock:
      self._asked = None

  @property
  def are_alone(self) -> bool:
    """Whether groups have to wait."""
    asked = self._asked
    return asked is not None and asked.is_alone

  # -- the coordinator ------------------------------------------------------

  def admit(self, ask: messages.Ask) -> list[messages.Turn]:
    """Return answers to write for a replica that has room."""
    with self._lock:
      asked, room = self._asked, ask.room
      if asked is None or not asked.waiting or ask.version < asked.version:
        return []
      if not asked.is_alone:
        room = min(room, self._most - asked.num_out[ask.replica])
      turns = []
      while asked.waiting and len(turns) < room:
        index = asked.waiting.pop()
        one = asked.running[index]
        one.replica = ask.replica
        turns.append(
          turn_of(
            one.question,
            index,
            self._max_tokens,
            version=asked.version,
            trajectory=one.trajectory,
          )
        )
      asked.num_out[ask.replica] += len(turns)
      return turns

  def report(self, replica: str, written: messages.Written) -> bool:
    """Record what a replica has written of an answer.

    Returns:
      Whether it shall go on. If not, nobody wants it, or another replica has
      taken it over.
    """
    with self._lock:
      asked = self._asked
      one = asked and asked.running.get(written.group)
      if asked is None or one is None or one.replica != replica:
        return False
      new = written.trajectory
      assert written.begin == len(one.trajectory.tokens)
      self.recorded_tokens += len(new.tokens)
      (one.trajectory,) = running_group.joined(
        [one.trajectory], [[running_group.Piece(replica, new)]]
      )
      if new.finish_reason is not None:
        del asked.running[written.group]
        asked.num_out[replica] -= 1
        asked.written.put(Written(one.question, one.trajectory))
      return True

  def take_back(self, replica: str | None = None) -> None:
    """Let answers of a replica, or of all, wait for another one."""
    with self._lock:
      if (asked := self._asked) is None:
        return
      for index, one in reversed(asked.running.items()):
        if one.replica is not None and replica in (None, one.replica):
          asked.num_out[one.replica] -= 1
          one.replica = None
          asked.waiting.append(index)


def versions_of(trajectories: Iterable[types.Trajectory]) -> tuple[int, int]:
  """Return the first and the last version that has written any of these."""
  found = [t.policy_versions[t.loss_mask] for t in trajectories]
  written = np.concatenate(found)
  return int(written.min()), int(written.max())
