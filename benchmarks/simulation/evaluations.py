"""Evaluations beside training, on the virtual clock.

The questions are handed out, written and reported by the real code. What waits
for the answers is a look of the trainer here.
"""

from collections.abc import Callable

from jaxrl_async import types
from jaxrl_async.rollout import questions as questions_lib
from simulation import script as script_lib

NUM_QUESTIONS = 5
SAMPLES = 2


class Evaluation:
  """One evaluation.

  Attributes:
    version: that begins to answer.
  """

  def __init__(self, asked: questions_lib.Questions, version: int, limit: int):
    """Ask the questions.

    Args:
      asked: those of the coordinator.
      version: that begins to answer, and is published next.
      limit: the most tokens of an answer with its question.
    """
    self.version = version
    settings = questions_lib.AnswerSettings(
      samples=SAMPLES,
      temperature=1.0,
      max_completion_tokens=limit - len(script_lib.PROMPT),
    )
    prompts = [
      types.Prompt(
        prompt_id=f"simulation/eval/{number}",
        tokens=script_lib.PROMPT,
        item={"number": number},
      )
      for number in range(NUM_QUESTIONS)
    ]
    self._wanted = questions_lib.of_set("simulation", prompts, settings)
    self._asked = asked
    self._written = asked.ask(self._wanted, version, is_alone=False)

  def has_ended(
    self, check: Callable[[questions_lib.Answer, int], None]
  ) -> bool:
    """Return whether all is answered, and check the answers then.

    Args:
      check: is called with each answer and the version.
    """
    if self._written.qsize() < len(self._wanted):
      return False
    found = [self._written.get() for _ in self._wanted]
    for written in found:
      check(written, self.version)
    numbers = {(x.question.number, x.question.sample) for x in found}
    assert len(numbers) == len(self._wanted), found
    self._asked.forget()
    return True
