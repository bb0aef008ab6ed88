"""A mixture: the items of several sources in turn, in proportion to weights.

The turns are those of a weighted round robin. Each source gains credit by its
weight at each turn, and the one with the most credit is next and pays for it.
This is a function of the index alone, and repeats after as many turns as the
weights add up to as integers. So a run goes on at any index. Each source keeps
its own order.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import fractions
import functools
import itertools
import math
from typing import Any, Protocol, runtime_checkable

from jaxrl_async.data import source as source_lib

# So many turns are counted through when a run goes on.
_MAX_PERIOD = 100_000


@runtime_checkable
class Member(source_lib.Source, source_lib.Counted, Protocol):
  """A source that a mixture can hold."""

  def is_held_out(self, question: str) -> bool:
    """Return whether the source holds a question out."""
    ...

  def items_per_index(self, split: str) -> float:
    """Return the share of a split's indices that have an item."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
  """Several sources as one.

  A split of the mixture consists of that split of the members that have it. A
  question that any member holds out is trained on by none.
  """

  members: Mapping[str, Member]
  weights: Mapping[str, float]

  @property
  def name(self) -> str:
    """The names of the members."""
    return "+".join(self.members)

  @property
  def params(self) -> dict[str, Any]:
    """The weights, and what the items of the members depend on."""
    return {
      name: {"weight": self.weights[name], **member.params}
      for name, member in self.members.items()
    }

  @property
  def versions(self) -> dict[str, str]:
    """The versions of all members."""
    return {
      f"{name}: {key}": version
      for name, member in self.members.items()
      for key, version in member.versions.items()
    }

  @property
  def splits(self) -> tuple[str, ...]:
    """The splits that any member has."""
    found = (s for member in self.members.values() for s in member.splits)
    return tuple(dict.fromkeys(found))

  def check(self) -> None:
    """Check all members."""
    for member in self.members.values():
      member.check()

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> source_lib.ItemStream:
    """Start to make the items of all members."""
    counts = self._counts(split, first_index)
    streams = {
      name: self.members[name].open(split, count, num_workers=num_workers)
      for name, count in counts.items()
    }
    return _Stream(self, split, first_index, streams)

  def num_questions(self, split: str) -> int | None:
    """Return the sum over the members; None if any of them does not know."""
    counts = [
      self.members[name].num_questions(split) for name in self._shares(split)
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None

  def epochs(self, split: str, next_index: int) -> dict[str, float]:
    """Return the number of passes over each member before an index."""
    return {
      name: passes
      for member, count in self._counts(split, next_index).items()
      for name, passes in self.members[member].epochs(split, count).items()
    }

  def num_bad(self) -> int:
    """Return the sum over the members."""
    return sum(member.num_bad() for member in self.members.values())

  def describe(self) -> list[str]:
    """Return the lines of all members."""
    return [line for m in self.members.values() for line in m.describe()]

  def turns(self, split: str, first_index: int) -> Iterator[str]:
    """Yield the member whose turn it is at each index from one on."""
    shares = self._shares(split)
    period = sum(shares.values())
    credit = dict.fromkeys(shares, 0)
    # All credits are 0 again after a period.
    for index in itertools.count(first_index - first_index % period):
      for name, share in shares.items():
        credit[name] += share
      chosen = max(credit, key=credit.__getitem__)  # the first of equal ones
      credit[chosen] -= period
      if index >= first_index:
        yield chosen

  def held_out_elsewhere(self, member: str, question: str) -> bool:
    """Return whether another member holds a question out."""
    return any(
      other.is_held_out(question)
      for name, other in self.members.items()
      if name != member
    )

  def _counts(self, split: str, index: int) -> dict[str, int]:
    """Return how many turns each member has had before an index."""
    shares = self._shares(split)
    whole, rest = divmod(index, sum(shares.values()))
    counts = {name: whole * share for name, share in shares.items()}
    for name in itertools.islice(self.turns(split, 0), rest):
      counts[name] += 1
    return counts

  def _shares(self, split: str) -> dict[str, int]:
    """Return the turns of each member in a period, as small integers.

    A member that has no item at some of its indices gets more turns, so that
    its items are as many as its weight says.
    """
    return _integers(
      tuple(
        (name, self.weights[name] / member.items_per_index(split))
        for name, member in self.members.items()
        if split in member.splits
      )
    )


@functools.cache
def _integers(weights: tuple[tuple[str, float], ...]) -> dict[str, int]:
  """Return small integers in proportion to weights, exactly where they are."""
  # 0.1 is meant as 1/10, whatever its binary digits are.
  exact = {
    name: fractions.Fraction(repr(float(weight))).limit_denominator(10_000)
    for name, weight in weights
  }
  whole = math.lcm(*(x.denominator for x in exact.values()))
  if whole * sum(exact.values()) > _MAX_PERIOD:
    whole = _MAX_PERIOD / sum(exact.values())
  shares = {name: max(1, round(x * whole)) for name, x in exact.items()}
  divisor = math.gcd(*shares.values())
  return {name: share // divisor for name, share in shares.items()}


class _Stream:
  """The items of a mixture's split in order.

  Threads: only one thread at a time may use it.
  """

  def __init__(
    self,
    mixture: Mixture,
    split: str,
    first_index: int,
    streams: Mapping[str, source_lib.ItemStream],
  ):
    self._mixture = mixture
    self._is_trained = split != source_lib.Split.EVAL
    self._streams = streams
    self._turns = mixture.turns(split, first_index)
    self._turn = next(self._turns)

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether the member whose turn it is has its item ready."""
    return self._streams[self._turn].is_ready(timeout_s)

  def next(self) -> dict[str, Any] | None:
    """Return the item of the member whose turn it is, with its `source`."""
    name = self._turn
    item = self._streams[name].next()
    self._turn = next(self._turns)
    if item is None:
      return None
    if self._is_trained and self._mixture.held_out_elsewhere(
      name, item["question"]
    ):
      return None
    return {**item, "source": name}

  def close(self) -> None:
    """Close the streams of all members."""
    for stream in self._streams.values():
      stream.close()
