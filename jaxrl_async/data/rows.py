"""A source of the rows of files: their splits, their order, their passes.

Training rows are shuffled anew in each pass, by Grain, as a function of the
seed and the place alone. So a run goes on at any item, and what it goes on with
does not depend on how it was stopped.
"""

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import itertools
import pathlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data import jsonl
from jaxrl_async.data import source as source_lib

_SHOWN = 3  # bad rows in a message
_FIELDS = {"question": "question", "answer": "answer"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """The rows of a JSON Lines file, and of another one for evaluations.

  Without a file for evaluations, a hash of the question's text decides which
  rows are held out. With one, training leaves out the questions that it has.

  Attributes:
    path: the training rows.
    eval_path: the held-out rows, in their order; None cuts them from `path`.
    fields: which column is the question, and which the answer.
    eval_percent: how much of `path` is held out if there is no `eval_path`.
    skips_bad_rows: leave rows out that cannot be used, and do not refuse them.
    seed: of the order of the training rows.
  """

  path: pathlib.Path
  eval_path: pathlib.Path | None = None
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  eval_percent: int = 10
  skips_bad_rows: bool = False
  seed: int = 0

  @property
  def name(self) -> str:
    """The name of the training file, without its folder."""
    return self.path.stem

  @property
  def params(self) -> dict[str, Any]:
    """What the items depend on besides the files."""
    return {
      "fields": dict(self._columns),
      "eval_percent": self.eval_percent,
      "has_eval_file": self.eval_path is not None,
    }

  @property
  def versions(self) -> dict[str, str]:
    """Digests of the files."""
    files = [self._train_file] + ([self._eval_file] if self._eval_file else [])
    return {file.path.name: file.digest for file in files}

  @property
  def splits(self) -> tuple[str, ...]:
    """Training and evaluation."""
    return (source_lib.Split.TRAIN, source_lib.Split.EVAL)

  def check(self) -> None:
    """Read the files, and look at every row.

    Raises:
      sections.ConfigError: a file cannot be read, has no rows, or has rows that
        cannot be used; or a split is empty.
    """
    for split in self.splits:
      if not self._rows_of(split):
        raise sections.ConfigError(
          f"task.dataset: {self.path} has no rows for the split {split}"
        )

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> source_lib.ItemStream:
    """Begin to read a split; rows are read when they are asked for."""
    import grain  # which imports JAX

    del num_workers  # reading a row takes microseconds
    file, numbers = self._file_of(split), self._rows_of(split)
    order = grain.MapDataset.source(numbers)
    if split == source_lib.Split.TRAIN:
      order = order.seed(self.seed).shuffle()
    order = order.repeat()
    places = (order[i] for i in itertools.count(first_index))
    return source_lib.IteratorStream(
      jsonl.item_of(file, row, self._columns)
      for row in places
      if row is not None  # which `MapDataset` has where it filters
    )

  @functools.cached_property
  def _columns(self) -> dict[str, str]:
    return {**_FIELDS, **self.fields}

  @functools.cached_property
  def _train_file(self) -> jsonl.JsonLines:
    return _opened("task.dataset", self.path)

  @functools.cached_property
  def _eval_file(self) -> jsonl.JsonLines | None:
    if self.eval_path is None:
      return None
    return _opened("task.eval_dataset", self.eval_path)

  def _file_of(self, split: str) -> jsonl.JsonLines:
    is_eval = split == source_lib.Split.EVAL
    return (self._eval_file if is_eval else None) or self._train_file

  def _rows_of(self, split: str) -> list[int]:
    """Return the numbers of a split's rows in its file."""
    return self._splits[split]

  @functools.cached_property
  def _splits(self) -> dict[str, list[int]]:
    questions = {
      row: self._question(self._train_file, row)
      for row in self._good_rows("task.dataset", self._train_file)
    }
    if self._eval_file is None:
      held_out = [r for r, q in questions.items() if self._is_held_out(q)]
      left_out = {questions[row] for row in held_out}
    else:
      held_out = self._good_rows("task.eval_dataset", self._eval_file)
      left_out = {self._question(self._eval_file, row) for row in held_out}
    trained = [r for r, q in questions.items() if q not in left_out]
    return {
      source_lib.Split.TRAIN: trained,
      source_lib.Split.EVAL: held_out,
    }

  def _question(self, file: jsonl.JsonLines, row: int) -> str:
    return jsonl.item_of(file, row, self._columns)["question"]

  def _is_held_out(self, question: str) -> bool:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < self.eval_percent

  def _good_rows(self, field: str, file: jsonl.JsonLines) -> list[int]:
    bad = dict(jsonl.bad_rows(file, self._columns))
    good = [row for row in range(len(file)) if row not in bad]
    if bad and not self.skips_bad_rows:
      shown = "; ".join(str(error) for error in list(bad.values())[:_SHOWN])
      more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
      raise sections.ConfigError(
        f"{field}: {len(bad)} of {len(file)} rows cannot be used: {shown}{more}"
      )
    return good


def _opened(field: str, path: pathlib.Path) -> jsonl.JsonLines:
  try:
    return jsonl.JsonLines(path)
  except OSError as error:
    raise sections.ConfigError(
      f"{field}: {path} cannot be read: {error.strerror}"
    ) from error
