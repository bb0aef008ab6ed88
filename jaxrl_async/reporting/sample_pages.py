"""Samples of completions on a terminal, or as plain text in a pipe."""

from collections.abc import Iterator
import dataclasses
import pathlib
from typing import Any

import rich.console
import rich.rule
import rich.text

from jaxrl_async.config import sections
from jaxrl_async.reporting import samples as samples_lib

Row = dict[str, Any]
# A completion may hold any character, also those that command a terminal.
_SHOWN_CONTROLS = {
  **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
  **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
  """Which completions to show, and in which order.

  Attributes:
    step: only this step; None is all of them.
    sort: "step" is the newest first and group by group, "reward" the best
      first, and "length" the longest first.
    is_reversed: the other way round.
    prompt: a part of the prompt's text, or its prompt_id.
    has_failed: only completions without a reward.
    is_evaluation: those of evaluations instead of train steps.
    max_rows: 0 shows all.
  """

  step: int | None = None
  sort: str = "step"
  is_reversed: bool = False
  prompt: str = ""
  has_failed: bool = False
  is_evaluation: bool = False
  max_rows: int = 20


def select(workdir: pathlib.Path, query: Query) -> list[Row]:
  """Return the completions that a query asks for, in its order."""
  rows: list[Row] = []
  kind = samples_lib.EVAL if query.is_evaluation else samples_lib.TRAIN
  is_newest_first = query.sort != "step" or not query.is_reversed
  for part, found in samples_lib.read(
    workdir, [kind], is_newest_first=is_newest_first
  ):
    if query.step is not None and part.step != query.step:
      continue
    rows += (row for row in found if _matches(row, query))
    if query.sort == "step":
      if query.max_rows and len(rows) >= query.max_rows:
        break
    elif query.max_rows:
      rows = _ordered(rows, query)[: query.max_rows]
  rows = rows if query.sort == "step" else _ordered(rows, query)
  return rows[: query.max_rows or None]


def _matches(row: Row, query: Query) -> bool:
  if query.has_failed and row["reward"] is not None:
    return False
  is_asked_for = query.prompt in (row["prompt_id"], "")
  return is_asked_for or query.prompt in row["prompt"]


def _ordered(rows: list[Row], query: Query) -> list[Row]:
  if query.sort == "length":
    return sorted(
      rows, key=lambda row: row["num_tokens"], reverse=not query.is_reversed
    )
  # Completions without a reward come last in both directions.
  sign = 1 if query.is_reversed else -1
  return sorted(
    rows,
    key=lambda row: (row["reward"] is None, sign * (row["reward"] or 0.0)),
  )


def show(workdir: pathlib.Path, query: Query) -> None:
  """Print the completions of a query; a terminal gets a pager.

  Raises:
    ConfigError: there are no samples, or none that match.
  """
  rows = select(workdir, query)
  if not rows:
    raise sections.ConfigError(_why_nothing(workdir, query))
  console = rich.console.Console(highlight=False, soft_wrap=True)
  if not console.is_terminal:
    for line in lines(rows):
      console.print(line)
    return
  with console.pager(styles=True):
    for line in lines(rows):
      console.print(line)


def _why_nothing(workdir: pathlib.Path, query: Query) -> str:
  kind = samples_lib.EVAL if query.is_evaluation else samples_lib.TRAIN
  directory = workdir / samples_lib.DIRECTORY
  parts = [x for x in samples_lib.parts_in(directory) if x.kind == kind]
  if not parts:
    return (
      f"workdir: {directory} has no samples of this kind; a run writes them"
      " from its first step on, unless run.sample_groups is 0"
    )
  steps = [part.step for part in parts]
  if query.step is not None and query.step not in steps:
    near = min(steps, key=lambda step: abs(step - (query.step or 0)))
    return (
      f"step: there are no samples of step {query.step}, but of"
      f" {len(steps)} steps from {steps[0]} to {steps[-1]}, such as {near}"
    )
  field = "failed" if query.has_failed else "prompt"
  return (
    f"{field}: none of the samples matches, of {len(steps)} steps from"
    f" {steps[0]} to {steps[-1]}"
  )


def lines(rows: list[Row]) -> Iterator[rich.console.RenderableType]:
  """Yield what is printed of completions, in their order.

  A prompt is printed once for completions of it that follow each other.
  """
  last = None
  for row in rows:
    prompt = row["step"], row["fate"], row["group"], row["prompt_id"]
    if prompt != last:
      last = prompt
      yield rich.rule.Rule(_text(_title(row), "bold"), align="left")
      yield _text(row["prompt"], "cyan")
    yield _text(_measures(row), _style(row))
    if row["turns"]:
      for turn in row["turns"]:
        yield _text(turn["prompt"], "cyan")
        yield _text(turn["completion"])
    else:
      yield _text(row["completion"])
    yield _text(_answer(row), "dim")


def _text(text: str, style: str = "") -> rich.text.Text:
  shown = text.rstrip("\n").translate(_SHOWN_CONTROLS)
  return rich.text.Text(shown, style=style)


def _title(row: Row) -> str:
  words = [f"step {row['step']}"]
  if row["group"] is not None:
    words.append(f"group {row['group']}")
  words.append(row["prompt_id"])
  if row["chosen"]:
    words.append(row["chosen"])
  return " · ".join(words)


def _measures(row: Row) -> str:
  reward = "no reward" if row["reward"] is None else f"{row['reward']:.3f}"
  parts = ", ".join(f"{x['name']} {x['value']:.3g}" for x in row["parts"])
  low, high = row["version_min"], row["version_max"]
  return " · ".join(
    [
      f"── {row['member']}: reward {reward}" + (f" ({parts})" if parts else ""),
      f"{row['num_tokens']} tokens",
      f"ended by {row['finish_reason']}",
      f"version {low}" if low == high else f"versions {low} to {high}",
    ]
  )


def _style(row: Row) -> str:
  if row["reward"] is None:
    return "bold red"
  return "bold green" if row["reward"] > 0 else "bold yellow"


def _answer(row: Row) -> str:
  answer = "none" if row["answer"] is None else repr(row["answer"])
  text = f"answer: {answer}"
  if row["expected"] is not None:
    text += f", expected: {row['expected']!r}"
  if row["failure"]:
    text += f"; {row['failure']}"
  return text
