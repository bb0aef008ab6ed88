"""A source divided among several hosts, each of which makes its own items."""

from collections.abc import Collection, Mapping
import dataclasses
import time
from typing import Any, Protocol, runtime_checkable

from jaxrl_async.data import source as source_lib


@runtime_checkable
class Strided(Protocol):
  """A source that can pass over items without making them."""

  def open_every(
    self, split: str, first_index: int, step: int, *, num_workers: int
  ) -> source_lib.ItemStream:
    """Do what `open` does, for every `step`-th item from the first one on."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """The part of a source that belongs to one host.

  Item i of shard k of n is item n i + k of the whole source. So the shards have
  no index in common, together they have all, and each pass of a shuffled source
  is divided among them. It takes every shard's index to say where a run is.

  Attributes:
    whole: the source that is divided.
    index: which shard this is, from 0.
    count: number of shards.
  """

  whole: source_lib.Source
  index: int
  count: int

  def __post_init__(self):
    """Refuse a shard that does not exist."""
    if not 0 <= self.index < self.count:
      raise ValueError(f"there is no shard {self.index} of {self.count}")

  @property
  def name(self) -> str:
    """The name of the whole source."""
    return self.whole.name

  @property
  def params(self) -> Mapping[str, Any]:
    """What the items of the whole source depend on."""
    return self.whole.params

  @property
  def versions(self) -> Mapping[str, str]:
    """The versions of the whole source."""
    return self.whole.versions

  @property
  def splits(self) -> Collection[str]:
    """The splits of the whole source."""
    return self.whole.splits

  def check(self) -> None:
    """Check the whole source."""
    self.whole.check()

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> source_lib.ItemStream:
    """Start to make the items of this shard from its index on.

    A source that is not `Strided` makes the items of the other shards as well,
    and they are dropped.
    """
    first = first_index * self.count + self.index
    if isinstance(self.whole, Strided):
      return self.whole.open_every(
        split, first, self.count, num_workers=num_workers
      )
    stream = self.whole.open(split, first, num_workers=num_workers)
    return _Every(stream, self.count)


class _Every:
  """Every n-th item of a stream.

  Threads: only one thread at a time may use it.
  """

  def __init__(self, stream: source_lib.ItemStream, step: int):
    self._stream = stream
    self._step = step
    self._num_others = 0  # items to drop before the next one

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether `next` would return at once."""
    deadline = time.monotonic() + timeout_s
    while self._stream.is_ready(max(0.0, deadline - time.monotonic())):
      if not self._num_others:
        return True
      self._drop_one()
    return False

  def next(self) -> dict[str, Any] | None:
    """Drop the items between, and return the next one."""
    while self._num_others:
      self._drop_one()
    self._num_others = self._step - 1
    return self._stream.next()

  def close(self) -> None:
    """Close the stream."""
    self._stream.close()

  def _drop_one(self) -> None:
    self._stream.next()
    self._num_others -= 1
