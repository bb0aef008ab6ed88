"""The interface of a source of items: reasoning-gym, files, a list, your own.

A source has named splits. Each split is an endless sequence of items. The item
at an index of a split is the same in every process and in every run, so that a
checkpoint only stores the index of a stream. A source of finite data begins
again after its last item. It may shuffle each pass anew, as long as the order
depends only on the source's seed, the split and the index.

An item is a dict. It becomes `types.Prompt.item`, is stored in checkpoints and
is passed to the scorer. It has these entries, and any others that the scorer
needs:

    index       int that identifies the item within its split; the same for the
                same question in a later pass
    question    str; two items with the same question count as one
    source      name of the source, which `prompts` adds if it is missing; a
                mixture sets it to the name of its member
    messages    list of chat messages, which are the prompt instead of the
                filled-in template; optional
    tools       list of tools that the assistant of a chat may call; optional
    turn        the assistant's message after them, to be learned; optional
    metadata    dict of further fields for the prompt's template; optional
    answer      the right answer, if it is known; a warm start checks it

Entries must be of the types that `storage.item_json` can store. A source of
real data maps the columns of its files to these entries.

`prompts` does the rest for all sources: it fills in the template, tokenizes,
skips prompts that are too long, and keeps the position of a stream.
"""

from collections.abc import Collection, Iterator, Mapping
import enum
from typing import Any, Protocol, runtime_checkable

from jaxrl_async.config import sections
from jaxrl_async.storage import item_json


class Split(enum.StrEnum):
  """The splits that a run uses by default.

  Each source has `TRAIN` and `EVAL`. `WARM_START` is needed for a warm start
  from worked solutions. A source may have further splits of its own.
  """

  TRAIN = "train"
  WARM_START = "warm_start"
  EVAL = "eval"


class SourceError(RuntimeError):
  """A source failed to produce an item."""


@runtime_checkable
class ItemStream(Protocol):
  """The items of one split in order, from an index on.

  Threads: only one thread at a time may use it.
  """

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether `next` would return at once.

    The rollout thread calls this method between two decode calls, and continues
    to decode while the result is False. A source that takes long to make an
    item should therefore make it in another process or thread.

    Args:
      timeout_s: how long to wait for the item, in seconds.

    Raises:
      SourceError: the next item will never be ready.
    """
    ...

  def next(self) -> dict[str, Any] | None:
    """Wait for the item at the next index and return it.

    Returns:
      The item, or None if the split has no item at that index. The index is
      used up in both cases. A source that decides on an item's split only after
      making it returns None for items of other splits.

    Raises:
      sections.ConfigError: the source cannot be used as it is configured.
      SourceError: the item could not be made.
    """
    ...

  def close(self) -> None:
    """Stop making items ahead of time. It may be called twice."""
    ...


@runtime_checkable
class Source(Protocol):
  """Items in splits, each of which depends only on (seed, split, index).

  The source must ensure that no question of `EVAL` is in another split.
  Otherwise held-out accuracy means nothing. No other code checks this.
  """

  @property
  def name(self) -> str:
    """The first part of prompt ids, and the source's name in messages."""
    ...

  @property
  def params(self) -> Mapping[str, Any]:
    """Everything that the items depend on besides name and seed.

    The values are of types that `storage.item_json` can store.
    """
    ...

  @property
  def versions(self) -> Mapping[str, str]:
    """Versions of the code or files that the items come from, by name.

    The held-out questions in a workdir are made again if a version, a parameter
    or the name of the source has changed.
    """
    ...

  @property
  def splits(self) -> Collection[str]:
    """Names of the splits."""
    ...

  def check(self) -> None:
    """Check the settings, and start to load anything that takes long.

    A mistake that appears only when an item is made is raised by the stream.

    Raises:
      sections.ConfigError: the source cannot be used. The message is one line
        that names the setting.
    """
    ...

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> ItemStream:
    """Start to make a split's items from an index on, without waiting.

    Args:
      split: one of `splits`.
      first_index: index of the first item, 0 or more.
      num_workers: how many processes may make items at the same time. The
        items must not depend on it. A source without processes ignores it.
    """
    ...


@runtime_checkable
class Counted(Protocol):
  """What a source of finite data can tell besides; all of it is optional.

  A source that inherits from this class and defines nothing has no end.
  """

  def num_questions(self, split: str) -> int | None:
    """Return the number of distinct questions of a split, if it is known."""
    return None

  def epochs(self, split: str, next_index: int) -> dict[str, float]:
    """Return how many passes lie before an index, by name of the data."""
    return {}

  def num_bad(self) -> int:
    """Return the number of rows that cannot be used and are left out."""
    return 0

  def describe(self) -> list[str]:
    """Return lines about the data for the user."""
    return []


def stored(item: dict[str, Any], source_name: str) -> Any:
  """Return an item as JSON, for `item_json.decode`.

  Raises:
    sections.ConfigError: a checkpoint cannot store the item.
  """
  try:
    return item_json.encode(item)
  except item_json.UnstorableError as error:
    raise sections.ConfigError(
      f"task.dataset: {source_name} cannot be used, because its items hold"
      f" {error}, which a checkpoint cannot store"
    ) from error


class IteratorStream:
  """An `ItemStream` of an iterator that returns its next item quickly."""

  def __init__(self, items: Iterator[dict[str, Any] | None]):
    """Create a stream of an iterator that begins at the first index."""
    self._items = items

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return True, because `next` gets the item from the iterator."""
    return True

  def next(self) -> dict[str, Any] | None:
    """Return the iterator's next item.

    Raises:
      SourceError: the iterator ended.
    """
    for item in self._items:
      return item
    raise SourceError("a split ended, where it should have begun again")

  def close(self) -> None:
    """Do nothing, because nothing runs ahead of time."""
