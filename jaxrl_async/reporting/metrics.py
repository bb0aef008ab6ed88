"""Metrics of train steps, busy time of the slices, and compilations.

`metrics.jsonl` is the record of a run: each line belongs to a train step, and
all that `summary` and `picture` show is made from it. TensorBoard gets the same
numbers.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import json
import math
import os
import pathlib
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.reporting import wandb_log as wandb_log_lib
from jaxrl_async.storage import disk
from jaxrl_async.storage import events

# What the slices did, which is in the lines only; see `timelines`.
TIMELINES = "timelines"
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_NUM_BINS = 16
_NUM_RECENT = 256


class Histogram(NamedTuple):
  """How many of some numbers lie between neighbouring limits.

  Attributes:
    limits: ascending, one more than there are counts.
    counts: `counts[i]` numbers are at least `limits[i]` and less than
      `limits[i + 1]`. The last limit itself counts as well.
  """

  limits: list[float]
  counts: list[int]


def histogram_of(values: Sequence[float] | np.ndarray) -> Histogram:
  """Return a histogram of finite numbers in a fixed number of bins."""
  counts, limits = np.histogram(np.asarray(values, np.float64), _NUM_BINS)
  return Histogram(limits.tolist(), counts.tolist())


def _plain(name: str, value: Any) -> Any:
  """Return a metric as numbers of Python, in a list or a dict if several."""
  if isinstance(value, Histogram):
    return {k: _plain(name, v) for k, v in value._asdict().items()}
  array = np.asarray(value)
  if array.dtype.kind not in "biuf" or array.ndim > 1:
    raise TypeError(
      f"metric {name}: {value!r} is not a number or a list of numbers"
    )
  return array.tolist()


def finite(value: Any) -> Any:
  """Return the value with None in place of NaN and infinities."""
  if isinstance(value, dict):
    return {name: finite(x) for name, x in value.items()}
  if isinstance(value, list):
    return [finite(x) for x in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def lines(workdir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """Yield the lines of `metrics.jsonl`, also while a run is writing.

  A line that is not complete yet is the last one, and is left out.

  Raises:
    FileNotFoundError: there is no such file.
  """
  with open(pathlib.Path(workdir) / "metrics.jsonl", "rb") as file:
    for line in file:
      if line.endswith(b"\n"):
        yield json.loads(line)


def by_step(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Return one object for each step, with everything that its lines say."""
  steps: dict[int, dict[str, Any]] = {}
  for line in lines(workdir):
    step = steps.setdefault(line["step"], {})
    if "eval/begun_s" in line:  # its totals are those of a later time
      line |= step
    step.update(line)
  return [steps[step] for step in sorted(steps)]


class MetricsWriter:
  """Writes `metrics.jsonl`, TensorBoard events, and to W&B if asked to.

  The first `write` opens the files. It starts them anew, unless `restore` was
  called, which cuts both back to a checkpoint. Only `metrics.jsonl` must
  succeed.

  The lines of train steps are in order. An evaluation has a line of its own,
  which may come after those of later steps.

  Threads: one at a time.

  Attributes:
    totals: is called for what each line says besides its own values, such as
      clocks and counters of the run.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    side_outputs: side_outputs_lib.SideOutputs,
    wandb_log: wandb_log_lib.WandbLog | None = None,
    note: Callable[[str], None] | None = None,
  ):
    """Prepare a writer; no file is opened yet.

    Args:
      workdir: of the run; it is created by the first write.
      side_outputs: counts failures of TensorBoard's files and of W&B.
      wandb_log: gets the same values.
      note: if given, lines that the disk refuses are kept in memory, and this
        is called with a message.
    """
    self.totals: Callable[[], Mapping[str, Any]] = dict
    self._workdir = pathlib.Path(workdir)
    self._side_outputs = side_outputs
    self._wandb_log = wandb_log
    self._note = note
    self._num_bytes = 0
    self._last_step = -1
    self._file: disk.AppendFile | None = None
    self._events: events.EventFile | None = None

  def _open(self) -> disk.AppendFile:
    path = self._workdir / "metrics.jsonl"
    with disk.writing(path):
      self._workdir.mkdir(parents=True, exist_ok=True)
    return disk.AppendFile(path, self._num_bytes, self._note)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Write a line about a step, with the totals of this moment.

    Args:
      step: completed train steps, not less than in the call before.
      values: numbers, lists whose entry i counts the value i
        (`staleness/histogram`), or histograms. NaN and infinities become null.
        They replace totals of the same name.

    Raises:
      StorageError: `metrics.jsonl` could not be written, and its line is not
        kept in memory.
    """
    if step < self._last_step:
      raise ValueError(f"step {step} comes after step {self._last_step}")
    self._write(step, values, self._wandb_log and self._wandb_log.add)
    self._last_step = step

  def write_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
    """Write the line of an evaluation, with the totals of this moment.

    Args:
      step: completed train steps when it began.
      values: as for `write`.

    Raises:
      StorageError: as `write`.
    """
    self._write(
      step,
      values,
      self._wandb_log and self._wandb_log.add_evaluation,
      shows_totals=False,
    )

  def _write(
    self,
    step: int,
    values: Mapping[str, Any],
    log: Callable[[int, Mapping[str, Any]], None] | None,
    *,
    shows_totals: bool = True,
  ) -> None:
    own = values.keys()
    values = {
      name: value if name == TIMELINES else _plain(name, value)
      for name, value in {**self.totals(), **values}.items()
    }
    line = json.dumps({"step": step, **finite(values)}, allow_nan=False)
    if self._file is None:
      self._file = self._open()
    self._file.append(line.encode() + b"\n")
    self._num_bytes = self._file.num_bytes
    shown = values.keys() if shows_totals else own
    values = {k: values[k] for k in shown if k != TIMELINES}
    with self._side_outputs.attempt("TensorBoard"):
      if self._events is None:
        first_step = self._last_step + 1
        self._events = events.EventFile(
          self._workdir / "tensorboard", first_step
        )
      self._events.add(step, values)
    if log is not None:
      with self._side_outputs.attempt("the log at W&B"):
        log(step, values)

  def state(self) -> dict[str, Any]:
    """Return what a checkpoint keeps.

    Everything written so far has reached the disk afterwards.

    Raises:
      StorageError: `metrics.jsonl` did not reach the disk.
    """
    if self._file is not None:
      self._file.sync()
    if self._events is not None:
      with self._side_outputs.attempt("TensorBoard"):
        self._events.sync()
    return {
      "num_bytes": self._num_bytes,
      "last_step": self._last_step,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continue after the point of `state`; later lines and events are dropped.

    Raises:
      ValueError: something was written already, or the file is too short.
    """
    if self._file is not None:
      raise ValueError("restore must come before the first write")
    self._num_bytes = state["num_bytes"]
    self._last_step = state["last_step"]
    self._file = self._open()

  def close(self) -> None:
    """Close both files, and the log at W&B.

    Raises:
      StorageError: `metrics.jsonl` lacks lines that the disk refuses.
    """
    if self._wandb_log is not None:
      with self._side_outputs.attempt("the log at W&B"):
        self._wandb_log.close()
    for file in (self._events, self._file):
      if file is not None:
        file.close()


class BusyClock:
  """Measures how long one slice has been inside device programs.

  It keeps totals, the last intervals, and a timeline since the last line of
  metrics. Its memory and the time of each call do not depend on how much was
  recorded.

  Invariant: `_busy_s` is the length of the closed periods in which at least one
  thread was inside a program; `_since_s` is the start of the open period, if
  there is one. Starts and ends are read under the lock, so they are in order.

  Threads: any thread may record and read. Time that two threads of the slice
  spend in programs simultaneously counts once.
  """

  def __init__(
    self,
    origin_s: float | None = None,
    seconds: Callable[[], float] = time.perf_counter,
  ):
    """Start now, or at `origin_s`, which is a reading of `seconds`.

    The clocks of one run share their origin. A resumed run moves it back by the
    seconds that were spent before.
    """
    self._seconds = seconds
    self._origin_s = seconds() if origin_s is None else origin_s
    self._lock = threading.Lock()
    self._num_inside = 0
    self._since_s = 0.0
    self._busy_s = 0.0
    self._activity_s: dict[str, float] = collections.defaultdict(float)
    self._recent: collections.deque[timeline_lib.Interval] = collections.deque(
      maxlen=_NUM_RECENT
    )
    self._timeline = timeline_lib.Timeline(self.now())

  def now(self) -> float:
    """Return the seconds since the origin."""
    return self._seconds() - self._origin_s

  @contextlib.contextmanager
  def record(self, activity: str) -> Iterator[None]:
    """Record the time inside the with statement, even if it raises."""
    with self._lock:
      start_s = self.now()
      if not self._num_inside:
        self._since_s = start_s
      self._num_inside += 1
    try:
      yield
    finally:
      with self._lock:
        end_s = self.now()
        self._num_inside -= 1
        if not self._num_inside:
          self._busy_s += end_s - self._since_s
        self._add(timeline_lib.Interval(start_s, end_s, activity))

  def _add(self, interval: timeline_lib.Interval) -> None:
    self._activity_s[interval.activity] += interval.end_s - interval.start_s
    self._recent.append(interval)
    self._timeline.add(interval)

  def add(
    self, busy_s: float, intervals: Iterable[timeline_lib.Interval]
  ) -> None:
    """Add what was measured in other processes.

    Args:
      busy_s: seconds in which the slice was busy, on the average of them.
      intervals: for the timeline, by this clock.
    """
    with self._lock:
      self._busy_s += busy_s
      for interval in intervals:
        self._add(interval)

  def since(self, end_s: float) -> list[timeline_lib.Interval]:
    """Return the intervals that ended after `end_s`, at most the last 256."""
    with self._lock:
      return [x for x in self._recent if x.end_s > end_s]

  def activity_s(self) -> dict[str, float]:
    """Return the seconds of each activity, summed over threads."""
    with self._lock:
      return dict(self._activity_s)

  def cut_timeline(self) -> timeline_lib.Timeline:
    """Return the timeline since the last call, and begin a new one."""
    with self._lock:
      found, now_s = self._timeline, self.now()
      self._timeline = timeline_lib.Timeline(now_s)
    found.end_s = max(found.end_s, now_s)
    return found


class Reading(NamedTuple):
  """Several clocks at one moment.

  Attributes:
    now_s: seconds since their common origin.
    busy_s: busy seconds of each clock, including a period that is still open.
  """

  now_s: float
  busy_s: dict[str, float]


def read(clocks: Mapping[str, BusyClock]) -> Reading:
  """Read clocks of one origin at the same moment.

  Reading them one after the other would be wrong: the thread may be suspended
  between two readings, and a slice could then seem busy for longer than the
  time that has passed.
  """
  with contextlib.ExitStack() as stack:
    for clock in clocks.values():
      stack.enter_context(clock._lock)
    now_s = next(iter(clocks.values())).now()
    busy_s = {
      name: clock._busy_s
      + (now_s - clock._since_s if clock._num_inside else 0.0)
      for name, clock in clocks.items()
    }
  return Reading(now_s, busy_s)


class CompilationCounter:
  """Counts the XLA programs that are compiled inside the with statement.

  Attributes:
    num_programs: requested programs, including those from the cache.
    num_cache_hits: programs that the persistent cache had.
    total_s: time of all requests.
  """

  def __init__(self):
    self.num_programs = 0
    self.num_cache_hits = 0
    self.total_s = 0.0
    self._lock = threading.Lock()

  @property
  def num_compiled(self) -> int:
    """Programs that XLA did compile."""
    return self.num_programs - self.num_cache_hits

  def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
    if event == _BACKEND_COMPILE:
      with self._lock:
        self.num_programs += 1
        self.total_s += duration_secs

  def _on_event(self, event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
      with self._lock:
        self.num_cache_hits += 1

  def __enter__(self) -> "CompilationCounter":
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    jax.monitoring.register_event_listener(self._on_event)
    return self

  def __exit__(self, *_: Any) -> None:
    jax.monitoring.unregister_event_duration_listener(self._on_duration)
    jax.monitoring.unregister_event_listener(self._on_event)
