"""What a run writes down about itself: metrics, busy time, compilations.

`metrics.jsonl` has one object a step; TensorBoard gets the same numbers.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import copy
import json
import math
import os
import pathlib
import resource
import sys
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorboardX

from jaxrl_async import timeline as timeline_lib
from jaxrl_async import workdir as workdir_lib

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def _plain(name: str, value: Any) -> float | int | list[float | int]:
  array = np.asarray(value)
  if array.dtype.kind not in "biuf" or array.ndim > 1:
    raise TypeError(f"metric {name}: {value!r} is no number or list of numbers")
  return array.tolist()


def _finite(value: Any) -> Any:
  if isinstance(value, list):
    return [_finite(x) for x in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


class MetricsWriter:
  """Writes `metrics.jsonl` and TensorBoard events; a resume cuts both back.

  The files are opened by the first `write`: a writer that was not restored
  begins them anew.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    self._workdir = pathlib.Path(workdir)
    self._num_bytes = 0
    self._last_step = -1
    self._file = None
    self._events = None

  def _open(self) -> None:
    self._workdir.mkdir(parents=True, exist_ok=True)
    path = self._workdir / "metrics.jsonl"
    has = path.stat().st_size if path.exists() else 0
    if has < self._num_bytes:
      raise ValueError(
        f"{path} has {has} bytes, the checkpoint knows of {self._num_bytes}"
      )
    self._file = open(path, "r+b" if path.exists() else "w+b")
    self._file.truncate(self._num_bytes)
    self._file.seek(self._num_bytes)
    self._events = tensorboardX.SummaryWriter(
      str(self._workdir / "tensorboard"),
      purge_step=self._last_step + 1,
      # Names carry whole seconds only; a quick restart would overwrite.
      filename_suffix=f".{self._last_step + 1}",
      flush_secs=10,
    )

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Write everything that is known about one step.

    Args:
      step: completed train steps; grows with every call.
      values: numbers; or lists of counts, whose entry i counts the value i
        (`staleness/histogram`). What is not finite becomes null.
    """
    if step <= self._last_step:
      raise ValueError(f"step {step} was written already ({self._last_step})")
    plain = {name: _plain(name, value) for name, value in values.items()}
    finite = {name: _finite(value) for name, value in plain.items()}
    line = json.dumps({"step": step, **finite}, allow_nan=False)
    if self._file is None:
      self._open()
    assert self._file is not None and self._events is not None
    workdir_lib.check_in_place(self._workdir / workdir_lib.METRICS, self._file)
    self._file.write(line.encode() + b"\n")
    self._file.flush()
    self._num_bytes = self._file.tell()
    self._last_step = step
    for name, value in plain.items():
      if isinstance(value, list):
        self._add_counts(name, value, step)
      else:
        self._events.add_scalar(name, value, step)

  def _add_counts(self, name: str, counts: list[Any], step: int) -> None:
    assert self._events is not None
    if sum(counts) == 0:
      return
    used = [i for i, count in enumerate(counts) if count]
    self._events.add_histogram_raw(
      name,
      min=used[0],
      max=used[-1],
      num=sum(counts),
      sum=sum(i * count for i, count in enumerate(counts)),
      sum_squares=sum(i * i * count for i, count in enumerate(counts)),
      bucket_limits=[i + 0.5 for i in range(len(counts))],
      bucket_counts=counts,
      global_step=step,
    )

  def state(self) -> dict[str, int]:
    """What a checkpoint keeps; everything up to it is on disk afterwards."""
    if self._file is not None:
      os.fsync(self._file.fileno())
    return {"num_bytes": self._num_bytes, "last_step": self._last_step}

  def restore(self, state: Mapping[str, int]) -> None:
    """Go on after what `state` knew; later lines and events are dropped.

    Raises:
      ValueError: something was written already, or the file is too short.
    """
    if self._file is not None:
      raise ValueError("restore comes before the first write")
    self._num_bytes = state["num_bytes"]
    self._last_step = state["last_step"]
    self._open()

  def close(self) -> None:
    """Flush and close both files."""
    if self._file is not None and self._events is not None:
      self._file.close()
      self._events.close()


class BusyClock:
  """Knows for how long one slice has been inside device programs.

  It keeps totals and a timeline for the picture, so that its memory and the
  time of each call do not depend on how much was recorded.

  Invariant: `_busy_s` is the length of the closed stretches in which at least
  one thread was inside; `_since_s` is the start of the open one, if there is
  one. Starts and ends are read under the lock, so that they are in order.

  Threads: any thread may record and read. Time that two threads of the slice
  spend in programs at once counts once.
  """

  def __init__(
    self,
    origin_s: float | None = None,
    seconds: Callable[[], float] = time.perf_counter,
  ):
    """Starts now, or at `origin_s`, a reading of `seconds`.

    The clocks of one run share their origin; a resumed run sets it back by the
    seconds that were spent before.
    """
    self._seconds = seconds
    self._origin_s = seconds() if origin_s is None else origin_s
    self._lock = threading.Lock()
    self._num_inside = 0
    self._since_s = 0.0
    self._busy_s = 0.0
    self._activity_s: dict[str, float] = collections.defaultdict(float)
    self._timeline = timeline_lib.Timeline()

  def now(self) -> float:
    """Seconds since the origin."""
    return self._seconds() - self._origin_s

  @contextlib.contextmanager
  def record(self, activity: str) -> Iterator[None]:
    """Record the time inside the with statement, also when it raises."""
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
        self._activity_s[activity] += end_s - start_s
        self._timeline.add(timeline_lib.Interval(start_s, end_s, activity))

  def activity_s(self) -> dict[str, float]:
    """Seconds of each activity, summed over threads."""
    with self._lock:
      return dict(self._activity_s)

  def timeline(self) -> timeline_lib.Timeline:
    """A copy of what the picture shows."""
    with self._lock:
      return copy.deepcopy(self._timeline)


class Reading(NamedTuple):
  """Several clocks at one moment.

  Attributes:
    now_s: since their origin.
    busy_s: of each clock up to now, what has not ended included.
  """

  now_s: float
  busy_s: dict[str, float]


def read(clocks: Mapping[str, BusyClock]) -> Reading:
  """Read clocks of one origin at the same moment.

  One after the other would not do: between two readings a thread may lose the
  processor, and a slice could come out as busy for longer than there was time.
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
  """Counts XLA programs that were compiled while it is entered.

  Attributes:
    num_programs: programs asked for, with those the persistent cache had.
    num_cache_hits: programs that the persistent cache had.
    total_s: time of both.
  """

  def __init__(self):
    self.num_programs = 0
    self.num_cache_hits = 0
    self.total_s = 0.0
    self._lock = threading.Lock()

  @property
  def num_compiled(self) -> int:
    """Programs that XLA really compiled."""
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


def peak_memory_bytes() -> int:
  """The most host memory this process has held so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024
