"""From the lines that the programs of head_to_head.py wrote to its tables."""

from collections.abc import Mapping, Sequence
import json
import pathlib
import statistics
from typing import Any

from peers import shared_work

# Columns of each table, and their formats.
_THROUGHPUT = {
  "case": "",
  "system": "",
  "tokens_per_s": ",.0f",
  "ratio": ".2f",
  "step_s": ".2f",
  "step_cpu_s": ".2f",
  "train_frac": ".2f",
  "rollout_frac": ".2f",
  "step_tokens": ",.0f",
  "longest_tokens": ".0f",
  "first_step_s": ".1f",
  "num_compilations": "d",
  "peak_mb": ",.0f",
}
_REWARD = {
  "case": "",
  "system": "",
  "reach_s": ".1f",
  "ratio": ".2f",
  "reach_steps": "d",
  "accuracy_before": ".3f",
  "accuracy_after": ".3f",
  "tokens_per_s": ",.0f",
  "step_s": ".2f",
  "step_cpu_s": ".2f",
  "train_frac": ".2f",
  "rollout_frac": ".2f",
  "first_step_s": ".1f",
  "num_compilations": "d",
  "peak_mb": ",.0f",
}

Line = Mapping[str, Any]


def read(directory: str | pathlib.Path) -> list[Line]:
  """Return the lines of a run that has ended.

  Raises:
    ValueError: it has not.
  """
  path = shared_work.lines_file(directory)
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  if not lines or lines[-1]["kind"] != shared_work.END:
    raise ValueError(f"{path}: the run has not ended")
  return lines


def run(
  lines: Sequence[Line], *, skip_first: int, skip_last: int, target: float = 0.0
) -> dict[str, Any]:
  """Return what one run says.

  Args:
    lines: of the run.
    skip_first: steps at the beginning that are not measured.
    skip_last: steps at the end that are not.
    target: held-out accuracy whose time is asked for; 0 asks for none.
  """
  steps = [line for line in lines if line["kind"] == shared_work.STEP]
  end = lines[-1]
  measured = range(skip_first, len(steps) - skip_last)
  if not measured:
    raise ValueError(f"{len(steps)} steps, none of which is measured")
  part = [steps[i] for i in measured]
  step_s = sum(step["step_s"] for step in part)
  cpu_s = part[-1]["cpu_s"] - steps[measured[0] - 1]["cpu_s"]
  values = {
    "tokens_per_s": sum(step["tokens"] for step in part) / step_s,
    "step_s": statistics.median(step["step_s"] for step in part),
    "step_cpu_s": cpu_s / len(part),
    "train_frac": sum(step["train_s"] for step in part) / step_s,
    "rollout_frac": sum(step["rollout_s"] for step in part) / step_s,
    "step_tokens": statistics.mean(step["tokens"] for step in part),
    "longest_tokens": statistics.mean(step["longest_tokens"] for step in part),
    "first_step_s": steps[0]["at_s"],
    "num_compilations": end["num_compilations"],
    "peak_mb": end["peak_bytes"] / 2**20,
    "settings": end["settings"],
    "versions": end["versions"],
  }
  return values | (_reached(lines, steps, target) if target else {})


def _reached(
  lines: Sequence[Line], steps: Sequence[Line], target: float
) -> dict[str, Any]:
  """Return when the target was reached, and accuracies.

  `reach_s` is the time from the start of the program to the end of its first
  step, and that of the further steps without evaluations.
  """
  found = [line for line in lines if line["kind"] == shared_work.EVALUATION]
  reached = [line["step"] for line in found if line["accuracy"] >= target]
  values: dict[str, Any] = {
    "accuracy_before": found[0]["accuracy"],
    "accuracy_after": found[-1]["accuracy"],
    "reach_s": None,
    "reach_steps": None,
  }
  if reached:
    count = reached[0]
    later_s = sum(step["step_s"] for step in steps[1:count])
    values |= {"reach_s": steps[0]["at_s"] + later_s, "reach_steps": count}
  return values


def rows(
  case: str, runs: Mapping[str, Sequence[dict[str, Any]]], peers: Sequence[str]
) -> list[dict[str, Any]]:
  """Return the rows of a case, one for each system.

  Numbers are medians over the repeats. `ratio` is how many times faster a
  system is than the fastest of the peers in the same repeat: by `reach_s` where
  that was measured, else by `tokens_per_s`.

  Args:
    case: its name.
    runs: the repeats of each system, in order.
    peers: those of the systems that are compared with.
  """
  result = []
  for system, repeats in runs.items():
    row = {"system": system, "case": case, **_median(repeats)}
    others = [runs[peer] for peer in peers if peer in runs]
    ratios = [
      _ratio(own, [other[i] for other in others])
      for i, own in enumerate(repeats)
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    row["ratio"] = statistics.median(known) if known else None
    row["ratio_repeats"] = ratios
    result.append(row)
  return result


def _ratio(
  own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> float | None:
  if "reach_s" not in own:
    fastest = max((other["tokens_per_s"] for other in others), default=None)
    return own["tokens_per_s"] / fastest if fastest else None
  times_s = [other["reach_s"] for other in others if other["reach_s"]]
  return min(times_s) / own["reach_s"] if times_s and own["reach_s"] else None


def _median(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Return the median of each number; other values are the first run's."""
  values = {}
  for name, first in repeats[0].items():
    found = [run[name] for run in repeats]
    is_number = all(isinstance(x, int | float) for x in found)
    values[name] = statistics.median_low(found) if is_number else first
    if None in found:
      values[name] = None
  return values


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Return a Markdown table of the rows of one kind of case."""
  columns = _REWARD if "reach_s" in rows[0] else _THROUGHPUT
  lines = [[*columns], ["---"] * len(columns)]
  lines += [
    [
      "" if row[name] is None else f"{row[name]:{form}}"
      for name, form in columns.items()
    ]
    for row in rows
  ]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
