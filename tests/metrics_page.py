"""The names of metrics in docs/reference/metrics.md, for tests of runs."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[1] / "docs/reference/metrics.md"
# Written only where the settings or the batch have something to say.
SOMETIMES = {
  "loss/<name>",
  "reward/parts/<name>",
  "reward_service/<name>/timeouts",
  "reward_service/<name>/errors",
  "reward_service/<name>/latency_s",
  "offpolicy/mismatch_kl",
  "staleness/bound",
  "staleness/asked",
  "staleness/decision",
  "policy/reference_kl",
  "policy/teacher_kl",
  "time/teacher_s",
  "time/reference_s",
  "time/second_moment_s",
  "time/values_s",
  "time/advantages_s",
  "critic/loss",
  "critic/explained_variance",
  "critic/value_mean",
  "critic/return_mean",
  "critic/clip_frac",
  "critic/grad_norm",
  "eval/held_out/parts/<name>",
  "eval/held_out/tokens_mean",
  "eval/held_out/frac_truncated",
  "eval/mismatch_kl",
  "eval/<name>/accuracy",
  "eval/<name>/pass@<k>",
  "eval/<name>/tokens_mean",
  "eval/<name>/frac_truncated",
  "eval/<name>/failed",
  "eval/<name>/parts/<name>",
  "data/epoch",
  "data/epoch/<name>",
  "reward/source/<name>",
  "eval/greedy/parts/<name>",
}
# Written by launch/sft.py and its like and not by a run.
FINE_TUNING = ("sft/", "preference/", "reward_model/")


def entries():
  """The names of the tables' first cells, as they are written there."""
  cells = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(), re.MULTILINE)
  rows = re.findall(r"`([^`]+)`", " ".join(cells))
  assert len(rows) == len(set(rows)) > 60
  assert set(rows) >= SOMETIMES
  return rows


def pattern(entry):
  parts = re.split(r"(<\w+>)", entry)
  kinds = {"<k>": r"\d+", "<name>": r"[\w/-]+"}
  return re.compile("".join(kinds.get(x) or re.escape(x) for x in parts))


def unexplained(names):
  """Those that the page lacks."""
  known = [pattern(entry) for entry in entries()]
  return {x for x in names if not any(k.fullmatch(x) for k in known)} - {
    "step",
    "timelines",
  }


def unwritten(names):
  """Entries of the page that every run should have written."""
  return {
    entry
    for entry in set(entries()) - SOMETIMES
    if not entry.startswith(FINE_TUNING)
    and not any(pattern(entry).fullmatch(name) for name in names)
  }
