"""A source of the rows of files: their splits, their order, their passes.

Training rows are shuffled anew in each pass, by Grain, as a function of the
seed and the place alone. So a run goes on at any item, and what it goes on with
does not depend on how it was stopped.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import hashlib
import itertools
from typing import Any

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.data import columns as columns_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.tables import opening
from jaxrl_async.data.tables import table as table_lib
from jaxrl_async.data.tables import uri as uri_lib

_SHOWN = 3  # bad rows in a message
_TRAIN, _WARM_START, _EVAL = source_lib.Split
# The warm start reads the training rows in an order of its own.
_SEEDS: dict[str, int] = {_TRAIN: 0, _WARM_START: 2**16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scan:
  """What one look at every row of a table finds.

  Attributes:
    good: the numbers of the rows that can be used.
    questions: a hash of the question of each of them.
    num_bad: number of the other rows.
    bad: the first of them, each with its place and what is wrong.
  """

  table: table_lib.Table
  good: np.ndarray
  questions: np.ndarray
  num_bad: int
  bad: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """The rows of a dataset for training, and of another one for evaluations.

  The held-out questions are those of `eval_dataset`, else those of the
  dataset's own split for tests, and training leaves them out. If there is
  neither, a hash of the question's text decides which rows are held out. The
  warm start reads the rows for training.

  Attributes:
    dataset: URI of the training rows.
    eval_dataset: URI of the held-out rows, or "".
    fields: which columns become which entries; see `columns.Columns`.
    environment: settings of the environment that the rows are tasks of.
    in_template: names that the template uses, which all rows must have.
    eval_percent: how much is held out by the hash.
    skips_bad_rows: leave rows out that cannot be used, and do not refuse them.
    seed: of the order of the training rows.
    label: name of the source; "" derives it from the URI.
    setting: the section of the config, for messages.
    check_item: raises a ValueError for an item that cannot be used.
  """

  dataset: str
  eval_dataset: str = ""
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  in_template: tuple[str, ...] = ()
  eval_percent: int = 10
  skips_bad_rows: bool = False
  seed: int = 0
  label: str = ""
  setting: str = "task"
  check_item: Callable[[dict[str, Any]], None] = lambda item: None

  @property
  def name(self) -> str:
    """The label, or the name of the file without its folder."""
    return self._name

  @property
  def params(self) -> dict[str, Any]:
    """What the items depend on besides the files."""
    return {
      "fields": self._columns.by_entry,
      "eval_percent": self.eval_percent,
      "eval_dataset": str(self._eval_uri or ""),
    }

  @property
  def versions(self) -> dict[str, str]:
    """Digests of the files; none of files that `check` refuses."""
    try:
      scans = {self._uri: self._train, self._eval_uri: self._eval}
    except sections.ConfigError:
      return {}
    return {str(u): scan.table.digest for u, scan in scans.items() if scan}

  @property
  def splits(self) -> tuple[str, ...]:
    """The splits of `source.Split`."""
    return tuple(source_lib.Split)

  def check(self) -> None:
    """Read the files, and look at every row.

    Raises:
      sections.ConfigError: a file cannot be read, has no rows, or has rows that
        cannot be used; or a split is empty.
    """
    for split in (_TRAIN, _EVAL):
      if not len(self._numbers[split]):
        raise sections.ConfigError(self._why_empty(split))

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> source_lib.ItemStream:
    """Begin to read a split; rows are read when they are asked for."""
    import grain  # which imports JAX

    del num_workers  # reading a row takes microseconds
    table, numbers = self._table(split), self._numbers[split]
    if not len(numbers):
      raise sections.ConfigError(
        f"{self.setting}.dataset: {self.dataset} has no rows for the split"
        f" {split}"
      )
    order: Any = grain.MapDataset.source(numbers.tolist())
    if split in _SEEDS:
      order = order.seed(self.seed + _SEEDS[split]).shuffle()
    order = order.repeat()
    places = (order[i] for i in itertools.count(first_index))
    return source_lib.IteratorStream(
      self._columns.item(table, row)
      for row in places
      if row is not None  # which `MapDataset` has where it filters
    )

  # -- what is known of a source of finite data ------------------------------

  def is_held_out(self, question: str) -> bool:
    """Return whether a question is one of the held-out ones."""
    return _hash(question) in self._held_out

  def items_per_index(self, split: str) -> float:
    """Return 1, because there is a row at each index."""
    return 1.0

  def num_questions(self, split: str) -> int:
    """Return the number of distinct questions of a split."""
    scan = self._scan(split)
    is_ours = np.isin(scan.good, self._numbers[split])
    return len(np.unique(scan.questions[is_ours]))

  def epochs(self, split: str, next_index: int) -> dict[str, float]:
    """Return the number of passes over the split before an index."""
    return {self.name: next_index / len(self._numbers[split])}

  def num_bad(self) -> int:
    """Return the number of rows that cannot be used and are left out."""
    return sum(scan.num_bad for scan in self._scans)

  def describe(self) -> list[str]:
    """Return a line on the rows, and one on those that are left out."""
    lines = [
      f"{self.name}: {len(self._numbers[_TRAIN]):,} rows for training,"
      f" {len(self._numbers[_EVAL]):,} held out"
      + (f" ({self._eval_uri})" if self._eval_uri else " (by a hash)")
    ]
    for scan in self._scans:
      if scan.num_bad:
        lines.append(
          f"{self.name}: {scan.num_bad:,} rows of"
          f" {scan.num_bad + len(scan.good):,} cannot be used and are left out:"
          f" {'; '.join(scan.bad)}"
        )
    return lines

  # -- files -----------------------------------------------------------------

  @functools.cached_property
  def _name(self) -> str:
    return self.label or self._uri.label

  @functools.cached_property
  def _columns(self) -> columns_lib.Columns:
    return columns_lib.Columns(self.fields, self.in_template)

  @functools.cached_property
  def _uri(self) -> uri_lib.Uri:
    return uri_lib.parse(f"{self.setting}.dataset", self.dataset)

  @functools.cached_property
  def _eval_uri(self) -> uri_lib.Uri | None:
    if self.eval_dataset:
      return uri_lib.parse(f"{self.setting}.eval_dataset", self.eval_dataset)
    try:
      return opening.test_split(self._uri)
    except table_lib.TableError as error:
      raise sections.ConfigError(f"{self.setting}.dataset: {error}") from error

  @functools.cached_property
  def _train(self) -> _Scan:
    return self._scanned("dataset", self._uri)

  @functools.cached_property
  def _eval(self) -> _Scan | None:
    if self._eval_uri is None:
      return None
    if self._eval_uri == self._uri:  # an evaluation asks all rows
      return self._train
    return self._scanned("eval_dataset", self._eval_uri)

  @property
  def _scans(self) -> list[_Scan]:
    """What is known of each table, once."""
    train, held_out = self._train, self._eval
    if held_out is None or held_out is train:
      return [train]
    return [train, held_out]

  def _scan(self, split: str) -> _Scan:
    return (self._eval if split == _EVAL else None) or self._train

  def _table(self, split: str) -> table_lib.Table:
    return self._scan(split).table

  def _scanned(self, field: str, uri: uri_lib.Uri) -> _Scan:
    """Look at every row of a table."""
    field = f"{self.setting}.{field}"
    try:
      table = opening.open_table(uri, self.environment)
    except table_lib.TableError as error:
      raise sections.ConfigError(f"{field}: {error}") from error
    sections.require(len(table) > 0, field, f"{uri} has no rows")
    self._check_template(table)
    good, questions, bad = [], [], []
    num_bad = 0
    for row in range(len(table)):
      try:
        item = self._columns.item(table, row)
        self._check_item(item, table.where(row))
        questions.append(_hash(item["question"]))
        good.append(row)
      except table_lib.RowError as error:
        num_bad += 1
        if len(bad) < _SHOWN:
          bad.append(str(error))
    if num_bad == len(table):  # for one reason, most likely
      del bad[1:]
    elif num_bad > len(bad):
      bad.append(f"and {num_bad - len(bad)} more")
    if num_bad and not (self.skips_bad_rows and good):
      raise sections.ConfigError(
        f"{field}: {num_bad} of {len(table)} rows cannot be used:"
        f" {'; '.join(bad)}"
      )
    return _Scan(
      table=table,
      good=np.array(good, np.int64),
      questions=np.array(questions, np.uint64),
      num_bad=num_bad,
      bad=tuple(bad),
    )

  def _check_item(self, item: dict[str, Any], where: str) -> None:
    try:
      self.check_item(item)
    except ValueError as error:
      raise table_lib.RowError(f"{where}: {error}") from error

  def _check_template(self, table: table_lib.Table) -> None:
    """Name the template if it is wrong, and not each of the rows."""
    rows = []
    for row in {0, len(table) // 2, len(table) - 1}:
      with contextlib.suppress(table_lib.RowError):
        rows.append(table[row])
    self._columns.check_template(f"{self.setting}.template", rows)

  # -- splits ----------------------------------------------------------------

  @functools.cached_property
  def _numbers(self) -> dict[str, np.ndarray]:
    """The numbers of each split's rows in its table."""
    train, held_out = self._train, self._eval
    if held_out is None:
      is_held_out = train.questions % np.uint64(100) < self.eval_percent
      numbers = train.good[is_held_out]
    else:
      is_held_out = np.isin(train.questions, held_out.questions)
      numbers = held_out.good
    trained = train.good[~is_held_out]
    return {_TRAIN: trained, _WARM_START: trained, _EVAL: numbers}

  @functools.cached_property
  def _held_out(self) -> frozenset[int]:
    scan = self._scan(_EVAL)
    is_ours = np.isin(scan.good, self._numbers[_EVAL])
    return frozenset(scan.questions[is_ours].tolist())

  def _why_empty(self, split: str) -> str:
    """Return a message about a split that has no rows."""
    number = len(self._train.good)
    rows = f"{self._uri} has {number} row{'s' if number != 1 else ''}"
    if split == _EVAL:
      return (
        f"{self.setting}.eval_percent: {rows}, none of which its"
        f" {self.eval_percent} % hold out; use more, or name"
        f" {self.setting}.eval_dataset"
      )
    if self._eval is None:
      return (
        f"{self.setting}.eval_percent: {rows}, all of which its"
        f" {self.eval_percent} % hold out; use more rows, or name"
        f" {self.setting}.eval_dataset"
      )
    return (
      f"{self.setting}.dataset: {rows}, all of which ask questions that are"
      f" held out ({self._eval_uri}); use other rows"
    )


def _hash(question: str) -> int:
  """Return 64 bits that stand for a question, in every process alike."""
  digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big")
