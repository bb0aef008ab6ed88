"""Questions that rest, because the policy always or never solves them.

A group whose rewards are all equal gives no gradient. After several such groups
in a row a question is left out for some passes. A stream asks when it draws,
and the record of each question is part of its state.

What is learned about a question takes effect with the next prompt that the
stream hands out, and not while it looks for that prompt. So what a stream draws
is a function of its state alone, and a run goes on exactly.
"""

from collections.abc import Mapping
from typing import Any


class Rests:
  """The record of each question that may come to rest.

  Threads: it belongs to the thread of its stream.
  """

  def __init__(self, rest_after: int, rest_for: int):
    """Begin without any record; with `rest_after` 0 no question ever rests."""
    self._rest_after = rest_after
    self._rest_for = rest_for
    # Groups with equal rewards in a row, and passes still to sit out, by id.
    self._streaks: dict[str, int] = {}
    self._passes: dict[str, int] = {}
    self._news: list[tuple[str, bool]] = []  # since the last `commit`
    self._sat_out: dict[str, int] = {}  # the same

  @property
  def num_resting(self) -> int:
    """Number of questions that rest."""
    return len(self._passes)

  def add(self, prompt_id: str, *, teaches: bool) -> None:
    """Record a group: whether its rewards differ."""
    if self._rest_after:
      self._news.append((prompt_id, teaches))

  def sits_out(self, prompt_id: str) -> bool:
    """Return whether a question that was drawn is to be left out this time."""
    num_before = self._sat_out.get(prompt_id, 0)
    if self._passes.get(prompt_id, 0) <= num_before:
      return False
    self._sat_out[prompt_id] = num_before + 1
    return True

  def commit(self) -> None:
    """Let what was drawn and recorded take effect, after a prompt was taken."""
    for prompt_id, count in self._sat_out.items():
      self._passes[prompt_id] -= count
      if not self._passes[prompt_id]:
        del self._passes[prompt_id]
    self._sat_out.clear()
    for prompt_id, teaches in self._news:
      streak = 0 if teaches else self._streaks.get(prompt_id, 0) + 1
      if streak >= self._rest_after:
        self._passes[prompt_id] = self._rest_for
        streak = 0
      self._streaks[prompt_id] = streak
      if not streak:
        del self._streaks[prompt_id]
    self._news.clear()

  def state(self) -> dict[str, Any]:
    """Return the record for a checkpoint, without what was drawn ahead."""
    return {
      "streaks": dict(self._streaks),
      "passes": dict(self._passes),
      "news": [list(each) for each in self._news],
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Go on from what `state` returned."""
    self._streaks = dict(state["streaks"])
    self._passes = dict(state["passes"])
    self._news = [(prompt_id, teaches) for prompt_id, teaches in state["news"]]
    self._sat_out = {}
