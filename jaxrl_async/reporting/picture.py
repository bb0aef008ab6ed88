"""The picture of a run: `summary.png`, made from the lines of its metrics."""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any

import numpy as np

from jaxrl_async.reporting import summary as summary_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.storage import disk

_COLORS = {
  "prefill": "#f0a202",
  "decode": "#2a7f9e",
  "proximal": "#8fb339",
  "update": "#c8553d",
  "publish": "#5d4a9c",
}
_OTHER_COLORS = ("#7a7a7a", "#a98467", "#4a5568", "#98c1d9")
# Lower edge of the lane of each slice.
_LANES = {"train": 0.0, "rollout": 1.15}
# The metrics of the small plots, by the titles of these. A plot has one or two
# lines, each with its label.
_PLOTS = {
  "Entropy per token": {"policy/entropy": "policy"},
  "KL per token": {
    "offpolicy/behavior_kl": "behavior to proximal",
    "policy/approx_kl": "proximal to current",
  },
  "Tokens per completion": {
    "completion/tokens_mean": "mean",
    "completion/tokens_max": "longest",
  },
}
_PAUSE = "#dddddd"
_SECONDS = "seconds since the start of the run"
_NUM_COLUMNS = 400


def draw(workdir: pathlib.Path, record: summary_lib.Record) -> None:
  """Draw `summary.png` in the workdir of a run from the record of its metrics.

  Raises:
    StorageError: the file could not be written.
  """
  # Importing matplotlib takes half a second, and only this function needs it.
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(13, 10.5), dpi=110, layout="constrained")
  backend_agg.FigureCanvasAgg(figure)
  grid = figure.add_gridspec(4, 12, height_ratios=(1.25, 0.85, 1, 1))
  _draw_learning(figure.add_subplot(grid[0, :6]), record)
  staleness = figure.add_subplot(grid[0, 6:9])
  _draw_shares(
    staleness, record.staleness_counts, "#2a7f9e", "Staleness of tokens"
  )
  bound = record.last.get("run/max_staleness", 0)
  staleness.axvline(bound + 0.5, color="#c8553d", ls="--", lw=1)
  staleness.set(
    xlabel=f"versions (bound {bound}, dashed)",
    ylabel="share of trained tokens",
  )
  versions = figure.add_subplot(grid[0, 9:])
  _draw_shares(
    versions, record.versions_counts, "#5d4a9c", "Versions per trajectory"
  )
  versions.set(xlabel="versions that wrote it", ylabel="share of trajectories")
  for i, (title, plot) in enumerate(_PLOTS.items()):
    axes = figure.add_subplot(grid[1, 4 * i : 4 * i + 4])
    _draw_signals(axes, record, title, plot)
  colors = _activity_colors(record)
  whole = figure.add_subplot(grid[2, :])
  _draw_lanes(whole, record, colors, *_whole(record))
  _add_legend(whole, colors, record)
  whole.set_title("What each slice did", loc="left")
  zoom = figure.add_subplot(grid[3, :])
  start_s, end_s = _zoom(record)
  _draw_lanes(zoom, record, colors, start_s, end_s)
  _mark_steps(zoom, record, start_s, end_s)
  zoom.set_title(
    f"{end_s - start_s:.1f} s of it, about three train steps", loc="left"
  )
  zoom.set_xlabel(_SECONDS)
  for axes in figure.axes:
    axes.spines[["top", "right"]].set_visible(False)
  with disk.replacing(workdir / "summary.png") as incomplete:
    figure.savefig(incomplete, format="png")


def _draw_learning(axes: Any, record: summary_lib.Record) -> None:
  rewards = _finite(record.signals["reward/mean"])
  evaluations = [(x.at_s, x.accuracy) for x in record.evaluations]
  if rewards:
    axes.plot(
      record.step_ends_s, rewards, color="#f0a202", lw=1.4, label="mean reward"
    )
  if evaluations:
    axes.plot(
      *zip(*evaluations, strict=True),
      color="#2a7f9e",
      marker="o",
      lw=2,
      label="held-out accuracy",
    )
  values = [*rewards, *(y for _, y in evaluations)]
  axes.set_ylim(min([0.0, *values]), 1.03 * max([1.0, *values]))
  axes.set(title="Learning", xlabel=_SECONDS, ylabel="")
  axes.grid(alpha=0.25)
  if values:
    axes.legend(frameon=False, loc="lower right")


def _finite(values: Sequence[float | None]) -> list[float]:
  """Return numbers in place of what is missing, which leave gaps in a line."""
  return [math.nan if value is None else value for value in values]


def _draw_signals(
  axes: Any, record: summary_lib.Record, title: str, plot: Mapping[str, str]
) -> None:
  """Draw metrics of the train steps over time; gaps are left open."""
  colors = ("#2a7f9e", "#c8553d")
  for color, (name, label) in zip(colors, plot.items(), strict=False):
    values = record.signals[name]
    if any(value is not None for value in values):
      axes.plot(
        record.step_ends_s, _finite(values), color=color, lw=1.2, label=label
      )
  axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
  axes.set_title(title, fontsize=10.5)
  axes.set_xlabel(_SECONDS)
  axes.grid(alpha=0.25)
  if len(plot) > 1 and axes.lines:
    axes.legend(frameon=False, fontsize=8.5)


def _draw_shares(
  axes: Any, counts: Sequence[int], color: str, title: str
) -> None:
  total = max(sum(counts), 1)
  shares = [count / total for count in counts]
  used = [i for i, count in enumerate(counts) if count]
  first = used[0] if used else 0
  axes.bar(range(first, len(counts)), shares[first:], color=color, width=0.8)
  axes.xaxis.get_major_locator().set_params(integer=True)
  mean = summary_lib.mean_of_counts(counts)
  axes.set_title(f"{title} (mean {mean:.2f})", fontsize=10.5)


def _activity_colors(record: summary_lib.Record) -> dict[str, str]:
  """Return a color for each activity that occurs."""
  seen = dict.fromkeys(
    name
    for lane in _LANES
    for timeline in record.timelines[lane]
    for name in timeline.activities
  )
  known = {name: color for name, color in _COLORS.items() if name in seen}
  others = [name for name in seen if name not in known]
  return known | {
    name: _OTHER_COLORS[i % len(_OTHER_COLORS)] for i, name in enumerate(others)
  }


def _add_legend(
  axes: Any, colors: Mapping[str, str], record: summary_lib.Record
) -> None:
  from matplotlib.patches import Patch

  patches = [Patch(color=color, label=name) for name, color in colors.items()]
  if record.pauses:
    patches.append(Patch(color=_PAUSE, label="pause"))
  axes.legend(
    handles=patches,
    frameon=False,
    loc="lower right",
    bbox_to_anchor=(1.0, 1.0),
    ncols=len(patches) or 1,
    borderaxespad=0.2,
    handlelength=1.0,
    columnspacing=1.2,
  )


def _draw_lanes(
  axes: Any,
  record: summary_lib.Record,
  colors: Mapping[str, str],
  start_s: float,
  end_s: float,
) -> None:
  """Draw the busy share of each slice over time, stacked by activity.

  Pauses are shaded, because neither slice is counted in them.
  """
  axes.set_xlim(start_s, end_s)
  axes.set_ylim(-0.05, 2.2)
  axes.set_yticks([y + 0.5 for y in _LANES.values()], list(_LANES))
  axes.tick_params(axis="y", length=0)
  for at_s, length_s in record.pauses:
    if at_s < end_s and at_s + length_s > start_s:
      axes.axvspan(at_s, at_s + length_s, color=_PAUSE, lw=0, zorder=0)
  edges = np.linspace(start_s, end_s, _NUM_COLUMNS + 1)
  for lane, base in _LANES.items():
    bottom = np.full(_NUM_COLUMNS, base)
    shares = timeline_lib.shares(record.timelines[lane], edges)
    for name, color in colors.items():
      top = np.minimum(bottom + shares.get(name, 0.0), base + 1.0)
      axes.stairs(top, edges, baseline=bottom, fill=True, color=color, lw=0)
      bottom = top
    axes.axhline(base, color="#999999", lw=0.6)


def _mark_steps(
  axes: Any, record: summary_lib.Record, start_s: float, end_s: float
) -> None:
  axes.set_ylim(-0.05, 2.42)
  first = record.num_steps - len(record.step_ends_s) + 1
  for step, at_s in enumerate(record.step_ends_s, first):
    if start_s < at_s <= end_s:
      axes.axvline(at_s, color="#333333", lw=0.8, ls=":")
      axes.annotate(
        f"step {step} done ",
        (at_s, 2.4),
        ha="right",
        va="top",
        fontsize=8,
        color="#333333",
      )


def _whole(record: summary_lib.Record) -> tuple[float, float]:
  """Return the time from the first timeline to the end of the last one."""
  timelines = [x for lane in record.timelines.values() for x in lane]
  start_s = min((x.start_s for x in timelines), default=0.0)
  end_s = max((x.end_s for x in timelines), default=1.0)
  return start_s, max(end_s, start_s + 1e-9)


def _zoom(record: summary_lib.Record) -> tuple[float, float]:
  """Return the limits of about three train steps in the middle of the run.

  Steps without a pause between them are preferred, as it would fill the
  picture.
  """
  ends = record.step_ends_s
  spans = [(ends[i], ends[i + 3]) for i in range(len(ends) - 3)]
  if not spans:
    return _whole(record)
  middle = (len(spans) - 1) / 2
  by_distance = sorted(range(len(spans)), key=lambda i: abs(i - middle))
  for i in by_distance:
    start_s, end_s = spans[i]
    if not any(a < end_s and a + b > start_s for a, b in record.pauses):
      return spans[i]
  return spans[by_distance[0]]
