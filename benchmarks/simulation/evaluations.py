"""Evaluations beside training, on the virtual clock.

The version that is held, and the rounds in which a replica answers with it,
are the real ones. The thread that waits for the answers is a process here that
looks again and again.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
import itertools
import queue

from jaxrl_async import types
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import fleet_answers
from jaxrl_async.rollout import held_version
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import rollout_side
from jaxrl_async.text import tokenizer as tokenizer_lib
from simulation import event_loop
from simulation import script as script_lib

NUM_QUESTIONS = 5
SAMPLES = 2
_LOOK_S = 0.1


class Answers:
  """What a replica has answered so far.

  Attributes:
    answers: those that were read.
  """

  def __init__(self, written: queue.Queue):
    """Read from a queue as `HeldVersion.answers` does, without waiting."""
    self.answers: list[answers_lib.Written] = []
    self._written = written
    self._has_ended = False

  def has_ended(self) -> bool:
    """Read what there is, and return whether this is all."""
    while not self._has_ended:
      try:
        written = self._written.get_nowait()
      except queue.Empty:
        return False
      if written is None:
        self._has_ended = True
      else:
        self.answers += written
    return True


def ask(
  held: held_version.HeldVersion,
  prompts: Mapping[int, types.Prompt],
  settings: answers_lib.AnswerSettings,
  tokenizer: tokenizer_lib.Tokenizer,
) -> Answers:
  """Ask a version that is held; its replica answers in its rounds."""
  asked = held_version._Pass(
    begin=lambda scheduler: answers_lib.write(
      scheduler, prompts, settings, tokenizer=tokenizer, questions=[*prompts]
    ),
    written=queue.Queue(held_version._MOST_UNREAD),
  )
  held._passes.put(asked)
  return Answers(asked.written)


class Evaluation:
  """One evaluation, from when its version is to be held until all is answered.

  Attributes:
    version: that answers.
    has_ended: whether nothing more comes of it.
    is_lost: whether it has ended without answers: nobody held the version.
  """

  def __init__(
    self,
    loop: event_loop.Loop,
    held: rollout_side.Held,
    version: int,
    limit: int,
    check: Callable[[answers_lib.Written, int], None],
    tokenizer: tokenizer_lib.Tokenizer,
  ):
    """Begin an evaluation.

    Args:
      loop: the clock.
      held: the version, as the rollout side holds it.
      version: its number.
      limit: the most tokens of an answer with its question.
      check: is called with each answer and the version.
      tokenizer: of the policy.
    """
    self.version = version
    self.has_ended = self.is_lost = False
    self._held = held
    self._check = check
    self._tokenizer = tokenizer
    self._settings = answers_lib.AnswerSettings(
      samples=SAMPLES,
      temperature=1.0,
      max_completion_tokens=limit - len(script_lib.PROMPT),
    )
    self._answers: Answers | None = None
    self._asked: dict[
      remote.Handle, futures.Future[list[answers_lib.Written]]
    ] = {}
    self.process = event_loop.Process(loop, self._turn, poll_s=_LOOK_S)
    self.process.wake()

  def is_held(self) -> bool:
    """Return whether a newer version may be published."""
    try:
      return self._held.is_held()
    except held_version.NotHeld:
      return True

  def end(self) -> None:
    """Give the version back."""
    self.has_ended = True
    self.process.end()
    self._held.release()

  def _turn(self) -> None:
    try:
      if not self._held.is_held():
        return
      if isinstance(self._held, held_version.HeldVersion):
        found = self._of_worker(self._held)
      else:
        assert isinstance(self._held, fleet_answers.HeldByFleet)
        found = self._of_fleet(self._held)
    except held_version.NotHeld:
      self.is_lost = True
      self.end()
      return
    if found is None:
      return
    for written in found:
      self._check(written, self.version)
    wanted = {(q, s) for q in range(NUM_QUESTIONS) for s in range(SAMPLES)}
    assert {(w.question, w.sample) for w in found} == wanted, found
    self.end()

  def _prompts(self) -> dict[int, types.Prompt]:
    return {
      number: types.Prompt(
        prompt_id=f"simulation/eval/{number}",
        tokens=script_lib.PROMPT,
        item={"number": number},
      )
      for number in range(NUM_QUESTIONS)
    }

  def _of_worker(
    self, held: held_version.HeldVersion
  ) -> list[answers_lib.Written] | None:
    if self._answers is None:
      self._answers = ask(
        held, self._prompts(), self._settings, self._tokenizer
      )
    if self._answers.has_ended():
      return self._answers.answers
    if held._is_released.is_set():  # as `HeldVersion.answers` looks
      raise held_version.NotHeld("its engine has failed")
    return None

  def _of_fleet(
    self, held: fleet_answers.HeldByFleet
  ) -> list[answers_lib.Written] | None:
    """Ask all replicas that hold it, and return what one has answered.

    The answers of the others are checked too.
    """
    for handle in held._holding():
      if handle not in self._asked:
        self._asked[handle] = handle.answer(self._questions())
    if not all(future.done() for future in self._asked.values()):
      return None
    found = [
      future.result()
      for future in self._asked.values()
      if future.exception() is None
    ]
    if not found:
      raise held_version.NotHeld("all that held it have ended")
    for written in itertools.chain.from_iterable(found):
      self._check(written, self.version)
    return found[0]

  def _questions(self) -> remote.Questions:
    prompts = self._prompts()
    return remote.Questions(
      version=self.version,
      prompts=tuple(prompts.values()),
      numbers=tuple(prompts),
      settings=self._settings,
      timeout_s=0.0,
      is_held=True,
    )
