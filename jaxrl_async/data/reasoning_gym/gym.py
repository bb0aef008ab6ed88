"""The `source.Source` of reasoning-gym's datasets."""

from collections.abc import Mapping
import dataclasses
from importlib import metadata
from typing import Any

from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import question_stream
from jaxrl_async.data.reasoning_gym import questions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGym:
  """The questions of one dataset.

  A hash of a question's text decides which split it belongs to, independently
  of the seed. No held-out question is therefore ever trained on; see
  `questions`.

  Attributes:
    name: name of the dataset.
    params: parameters of the dataset.
    seed: seed of the run.
  """

  name: str
  params: Mapping[str, Any]
  seed: int

  @property
  def versions(self) -> dict[str, str]:
    """Version of the library, since another one may make other questions."""
    return {"reasoning_gym": metadata.version("reasoning-gym")}

  @property
  def splits(self) -> tuple[str, ...]:
    """The splits of `source.Split`."""
    return tuple(source_lib.Split)

  def check(self) -> None:
    """Check name and seed, and start the process that imports the library.

    Only the library knows whether the dataset exists and accepts its
    parameters. A mistake there is raised with the first question of a stream.

    Raises:
      sections.ConfigError: the name or the seed cannot be used.
    """
    questions.check(self.name, self.seed)
    question_stream.start_server()

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> question_stream.QuestionStream:
    """Start `num_workers` processes that make the questions of a split."""
    return self.open_every(split, first_index, 1, num_workers=num_workers)

  def open_every(
    self, split: str, first_index: int, step: int, *, num_workers: int
  ) -> question_stream.QuestionStream:
    """Do what `open` does, for every `step`-th item from the first one on."""
    return question_stream.QuestionStream(
      self.name,
      self.params,
      seed=self.seed,
      split=source_lib.Split(split),
      first_index=first_index,
      step=step,
      num_processes=num_workers,
    )

  def is_held_out(self, question: str) -> bool:
    """Return False, because it is not known what the dataset may ask.

    The hash that decides on a question's split says nothing about a text that
    is not one of its questions.
    """
    return False

  def items_per_index(self, split: str) -> float:
    """Return the share of questions that belong to a split."""
    return questions.TENTHS[source_lib.Split(split)] / 10

  def num_questions(self, split: str) -> None:
    """Return None, because only making them all would tell."""

  def epochs(self, split: str, next_index: int) -> dict[str, float]:
    """Return nothing, because there is no end of questions."""
    return {}

  def num_bad(self) -> int:
    """Return 0, because generated questions have no rows."""
    return 0

  def describe(self) -> list[str]:
    """Return nothing, because there are no rows to count."""
    return []
