"""The results of a finished run: `summary.json` and `summary.png`."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.storage import disk

_COLORS = {
  "prefill": "#f0a202",
  "decode": "#2a7f9e",
  "proximal": "#8fb339",
  "update": "#c8553d",
  "publish": "#5d4a9c",
  "compile": "#9b9b9b",
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
SIGNALS = tuple(name for plot in _PLOTS.values() for name in plot)
_HEIGHTS = (-0.05, 2.2)  # lower and upper limit of the axes
_EVALUATION = 0xDD / 0xFF  # grey


@dataclasses.dataclass(kw_only=True, slots=True)
class Tokens:
  """Written training tokens by what became of them."""

  generated: int
  trained: int
  filtered: int
  failed: int
  in_flight: int


@dataclasses.dataclass(kw_only=True, slots=True)
class Summary:
  """The fields of `summary.json`.

  Attributes:
    eval_before: sampled held-out accuracy after the warm start.
    eval_after: sampled held-out accuracy after the last train step.
    wall_s: time of the whole run, including `warm_start_s`.
    rollout_busy_frac: time inside device programs, divided by the time of the
      RL stage without evaluation.
    extra: further fields, such as greedy accuracies and compilations.
  """

  eval_before: float
  eval_after: float
  wall_s: float
  warm_start_s: float
  train_steps: int
  staleness_mean: float
  staleness_max: int
  mismatch_kl_mean: float
  tokens: Tokens
  rollout_busy_frac: float
  train_busy_frac: float
  versions_per_trajectory_mean: float
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def contradictions(summary: Summary, *, max_staleness: int) -> list[str]:
  """Return what is wrong with the numbers."""
  tokens = summary.tokens
  ended = tokens.trained + tokens.filtered + tokens.failed
  problems = {
    f"{tokens} do not add up": tokens.generated == ended + tokens.in_flight,
    f"staleness_max {summary.staleness_max} exceeds {max_staleness}": (
      summary.staleness_max <= max_staleness
    ),
    "warm_start_s exceeds wall_s": summary.warm_start_s <= summary.wall_s,
  }
  for name in (
    "eval_before",
    "eval_after",
    "rollout_busy_frac",
    "train_busy_frac",
  ):
    value = getattr(summary, name)
    problems[f"{name} {value} is not a fraction"] = 0 <= value <= 1
  for field in dataclasses.fields(summary):
    if field.name in summary.extra:
      problems[f"extra has {field.name}"] = False
    value = getattr(summary, field.name)
    if isinstance(value, float):
      problems[f"{field.name} is {value}"] = math.isfinite(value)
  return [text for text, holds in problems.items() if not holds]


def write(
  workdir: str | os.PathLike[str],
  summary: Summary,
  *,
  max_staleness: int,
  note: Callable[[str], None],
) -> str:
  """Write `summary.json`; return the same object on one line, for stdout.

  Args:
    workdir: the directory of the file.
    summary: is written as it is, apart from numbers that are not finite, which
      are null.
    max_staleness: the bound of the run.
    note: is called with a warning if the numbers contradict each other. The
      training behind them is done, and must not fail here.

  Raises:
    StorageError: the file could not be written.
  """
  if wrong := contradictions(summary, max_staleness=max_staleness):
    note(f"WARNING: summary.json: {'; '.join(wrong)}")
  values = metrics_lib.finite(dataclasses.asdict(summary))
  values |= values.pop("extra")
  text = json.dumps(values, indent=2, allow_nan=False)
  path = pathlib.Path(workdir) / "summary.json"
  with disk.writing(path):
    path.write_text(text + "\n")
  return json.dumps(values, allow_nan=False)


@dataclasses.dataclass(kw_only=True, slots=True)
class History:
  """The data of `summary.png`; times are seconds since the start of the run.

  Attributes:
    max_staleness: the bound, drawn beside the histogram.
    evaluations: (time, held-out accuracy) of each evaluation.
    rewards: (time, mean reward) of each train step.
    signals: (time, *values) of each train step, with the values of `SIGNALS`
      in their order. A value that is missing or not finite is None.
    staleness_counts: trained tokens by staleness, from 0.
    versions_counts: trained trajectories by number of versions, from 0.
    lanes: activities of the slices "rollout" and "train" since the last start.
    evaluating: times of evaluations, which are shaded because neither slice is
      counted during them.
    step_ends_s: times at which the last train steps were finished.
    num_steps: number of the last of these steps.
    is_resumed: whether there were earlier starts.
  """

  max_staleness: int
  evaluations: Sequence[tuple[float, float]]
  rewards: Sequence[tuple[float, float]]
  signals: Sequence[tuple[float | None, ...]]
  staleness_counts: Sequence[int]
  versions_counts: Sequence[int]
  lanes: Mapping[str, timeline_lib.Timeline]
  evaluating: timeline_lib.Timeline
  step_ends_s: Sequence[float]
  num_steps: int
  is_resumed: bool


def draw(path: str | os.PathLike[str], history: History) -> None:
  """Draw `summary.png`."""
  # Importing matplotlib takes half a second, and only this function needs it.
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(13, 10.5), dpi=110, layout="constrained")
  backend_agg.FigureCanvasAgg(figure)
  grid = figure.add_gridspec(4, 12, height_ratios=(1.25, 0.85, 1, 1))
  learning = figure.add_subplot(grid[0, :6])
  _draw_learning(learning, history)
  staleness = figure.add_subplot(grid[0, 6:9])
  _draw_shares(
    staleness, history.staleness_counts, "#2a7f9e", "Staleness of tokens"
  )
  staleness.axvline(history.max_staleness + 0.5, color="#c8553d", ls="--", lw=1)
  staleness.set(
    xlabel=f"versions (bound {history.max_staleness}, dashed)",
    ylabel="share of trained tokens",
  )
  versions = figure.add_subplot(grid[0, 9:])
  _draw_shares(
    versions, history.versions_counts, "#5d4a9c", "Versions per trajectory"
  )
  versions.set(
    xlabel="versions that wrote it",
    ylabel="share of trajectories",
  )
  for i, (title, plot) in enumerate(_PLOTS.items()):
    axes = figure.add_subplot(grid[1, 4 * i : 4 * i + 4])
    _draw_signals(axes, history, title, plot)
  whole = figure.add_subplot(grid[2, :])
  colors = _activity_colors(history)
  _draw_occupancy(whole, history, colors)
  what = "since the last start" if history.is_resumed else "the whole run"
  whole.set_title(f"What each slice did: {what}", loc="left")
  zoom = figure.add_subplot(grid[3, :])
  start_s, end_s = _zoom(history)
  _draw_intervals(zoom, history, colors, start_s, end_s)
  zoom.set_title(
    f"{end_s - start_s:.1f} s of it, about three train steps", loc="left"
  )
  zoom.set_xlabel("seconds since the start of the run")
  for axes in figure.axes:
    axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(path)


def _draw_learning(axes: Any, history: History) -> None:
  if history.rewards:
    axes.plot(
      *zip(*history.rewards, strict=True),
      color="#f0a202",
      lw=1.4,
      label="mean reward",
    )
  if history.evaluations:
    axes.plot(
      *zip(*history.evaluations, strict=True),
      color="#2a7f9e",
      marker="o",
      lw=2,
      label="held-out accuracy",
    )
  values = [y for _, y in (*history.rewards, *history.evaluations)]
  axes.set_ylim(min([0.0, *values]), 1.03 * max([1.0, *values]))
  axes.set(
    title="Learning", xlabel="seconds since the start of the run", ylabel=""
  )
  axes.grid(alpha=0.25)
  if values:
    axes.legend(frameon=False, loc="lower right")


def _draw_signals(
  axes: Any, history: History, title: str, plot: Mapping[str, str]
) -> None:
  """Draw metrics of the train steps over time; gaps are left open."""
  colors = ("#2a7f9e", "#c8553d")
  times = [point[0] for point in history.signals]
  for color, (name, label) in zip(colors, plot.items(), strict=False):
    at = 1 + SIGNALS.index(name)
    values = [point[at] for point in history.signals]
    if any(value is not None for value in values):
      line = [math.nan if value is None else value for value in values]
      axes.plot(times, line, color=color, lw=1.2, label=label)
  axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
  axes.set_title(title, fontsize=10.5)
  axes.set_xlabel("seconds since the start of the run")
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
  mean = sum(i * share for i, share in enumerate(shares))
  axes.set_title(f"{title} (mean {mean:.2f})", fontsize=10.5)


def _activity_colors(history: History) -> dict[str, str]:
  """Return a color for each activity that occurs."""
  seen = dict.fromkeys(
    name for lane in _LANES for name in history.lanes[lane].activities
  )
  known = {name: color for name, color in _COLORS.items() if name in seen}
  others = [name for name in seen if name not in known]
  return known | {
    name: _OTHER_COLORS[i % len(_OTHER_COLORS)] for i, name in enumerate(others)
  }


def _prepare_lanes(axes: Any, start: float, end: float) -> None:
  """Set the limits of the axes and label the lanes."""
  axes.set_xlim(start, end)
  axes.set_ylim(*_HEIGHTS)
  axes.set_yticks([y + 0.5 for y in _LANES.values()], list(_LANES))
  axes.tick_params(axis="y", length=0)


def _add_legend(axes: Any, colors: Mapping[str, str], history: History) -> None:
  from matplotlib.patches import Patch

  patches = [Patch(color=color, label=name) for name, color in colors.items()]
  if history.evaluating.span_s:
    patches.append(Patch(color=str(_EVALUATION), label="evaluation"))
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


def _draw_occupancy(
  axes: Any, history: History, colors: Mapping[str, str]
) -> None:
  """Draw the busy share of each slice over time, stacked by activity.

  Hundreds of thousands of intervals do not fit into a thousand pixels, so the
  share of each pixel is drawn. An evaluation is as dark as its share.
  """
  start_s, end_s = _whole(history)
  _prepare_lanes(axes, start_s, end_s)
  edges = np.linspace(start_s, end_s, 401)
  nothing = np.zeros(len(edges) - 1)
  finer = np.linspace(start_s, end_s, 1_601)
  for share in history.evaluating.shares(finer).values():
    axes.imshow(
      1.0 - share[None] * (1.0 - _EVALUATION),
      extent=(start_s, end_s, *_HEIGHTS),
      cmap="gray",
      vmin=0.0,
      vmax=1.0,
      aspect="auto",
      zorder=0,
    )
  for lane, base in _LANES.items():
    bottom = nothing + base
    shares = history.lanes[lane].shares(edges)
    for name, color in colors.items():
      top = np.minimum(bottom + shares.get(name, nothing), base + 1.0)
      axes.stairs(top, edges, baseline=bottom, fill=True, color=color, lw=0)
      bottom = top
    axes.axhline(base, color="#999999", lw=0.6)
  _add_legend(axes, colors, history)


def _whole(history: History) -> tuple[float, float]:
  """Return the first and the last busy moment, including evaluations."""
  timelines = (*history.lanes.values(), history.evaluating)
  spans = [x.span_s for x in timelines if x.span_s]
  if not spans:
    return 0.0, 1.0
  start_s = min(a for a, _ in spans)
  return start_s, max(start_s + 1e-9, *(b for _, b in spans))


def _zoom(history: History) -> tuple[float, float]:
  """Return the limits of about three train steps.

  They are taken from the middle of the period that is known in detail.
  """
  start_s, end_s = _whole(history)
  timelines = (*history.lanes.values(), history.evaluating)
  start_s = max([start_s, *(x.detailed_from_s for x in timelines)])
  ends = [x for x in history.step_ends_s if x >= start_s]
  if len(ends) < 4:
    return start_s, end_s
  # Prefer steps without an evaluation between them, which would fill the
  # picture.
  spans = [(ends[i], ends[i + 3]) for i in range(len(ends) - 3)]
  middle = (len(spans) - 1) / 2
  by_distance = sorted(range(len(spans)), key=lambda i: (abs(i - middle), i))
  for i in by_distance:
    a, b = spans[i]
    if not any(x < b and y > a for x, y, _ in history.evaluating.recent):
      return a, b
  return spans[by_distance[0]]


def _draw_intervals(
  axes: Any,
  history: History,
  colors: Mapping[str, str],
  start_s: float,
  end_s: float,
) -> None:
  """Draw every busy interval of the window as a bar."""
  _prepare_lanes(axes, start_s, end_s)
  for a, b, _ in history.evaluating.recent:
    if b > start_s and a < end_s:
      axes.axvspan(
        max(a, start_s), min(b, end_s), color=str(_EVALUATION), lw=0, zorder=0
      )
  for lane, base in _LANES.items():
    for name, color in colors.items():
      bars = [
        (a, b - a)
        for a, b, x_name in history.lanes[lane].recent
        if x_name == name and b > start_s and a < end_s
      ]
      axes.broken_barh(bars, (base, 1.0), color=color, lw=0)
    axes.axhline(base, color="#999999", lw=0.6)
  axes.set_ylim(-0.05, 2.42)
  first = history.num_steps - len(history.step_ends_s)
  for step, end in enumerate(history.step_ends_s, first):
    if start_s < end <= end_s:
      axes.axvline(end, color="#333333", lw=0.8, ls=":")
      axes.annotate(
        f"step {step + 1} done ",
        (end, 2.4),
        ha="right",
        va="top",
        fontsize=8,
        color="#333333",
      )
