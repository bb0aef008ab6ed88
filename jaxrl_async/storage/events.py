"""TensorBoard event files, written by the calling thread.

tensorboardX's own writer passes events to a thread through a bounded queue. If
that thread fails, the queue fills up and the caller waits forever; and events
that are still queued when the process is killed are lost. Here an event is in
the file when `add` returns, or `add` raises.
"""

from collections.abc import Mapping
import itertools
import pathlib
import struct
import sys
import time
from typing import Any

from jaxrl_async.storage import disk


def _import_tensorboardx():
  """Import what is used of tensorboardX, and no PyTorch.

  Where PyTorch is installed, tensorboardX imports it, which takes two seconds
  of every start, to accept its tensors.
  """
  is_hidden = "torch" not in sys.modules
  if is_hidden:
    sys.modules["torch"] = None  # type: ignore[assignment]
  try:
    from tensorboardX import record_writer
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2
  finally:
    if is_hidden:
      del sys.modules["torch"]
  return record_writer, summary, event_pb2


record_writer, summary, event_pb2 = _import_tensorboardx()

# Its classes are created at import, so pyright does not know them.
_proto: Any = event_pb2


class EventFile:
  """One file of events; each start of a run writes its own.

  TensorBoard drops events of earlier files from the first step of this file on.

  Threads: one at a time.
  """

  def __init__(self, directory: pathlib.Path, first_step: int):
    """Open the file.

    Raises:
      OSError: the file cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # The time has whole seconds only, so a quick restart needs the step as well
    # to get a different name.
    name = f"events.out.tfevents.{int(time.time())}.{first_step}"
    self._file = disk.AppendFile(directory / name)
    start = _proto.SessionLog(status=_proto.SessionLog.START)
    try:
      self._append(_proto.Event(file_version="brain.Event:2"))
      self._append(_proto.Event(step=first_step, session_log=start))
    except disk.StorageError:  # do not leave an empty file behind
      self._file.close()
      (directory / name).unlink()
      raise

  def add(self, step: int, values: Mapping[str, Any]) -> None:
    """Write one event with everything that is known about a step.

    Args:
      step: completed train steps.
      values: numbers, lists whose entry i counts the value i, or dicts of the
        limits and counts of a `metrics.Histogram`.

    Raises:
      StorageError: nothing of the event was written.
    """
    found = summary.Summary()
    for name, value in values.items():
      name = name.replace("@", "_")  # TensorBoard's names have no such sign
      if isinstance(value, dict):
        histogram = _histogram(name, value["limits"], value["counts"])
        found.value.extend(histogram.value)
      elif not isinstance(value, list):
        found.value.extend(summary.scalar(name, value).value)
      elif sum(value):
        limits = [i - 0.5 for i in range(len(value) + 1)]
        found.value.extend(_histogram(name, limits, value).value)
    self._append(_proto.Event(step=step, summary=found))

  def sync(self) -> None:
    """Wait until everything has reached the disk."""
    self._file.sync()

  def close(self) -> None:
    """Close the file."""
    self._file.close()

  def _append(self, event: Any) -> None:
    event.wall_time = time.time()
    data = event.SerializeToString()
    size = struct.pack("<Q", len(data))
    checksums = [
      struct.pack("<I", record_writer.masked_crc32c(part))
      for part in (size, data)
    ]
    self._file.append(size + checksums[0] + data + checksums[1])


def _histogram(name: str, limits: list[float], counts: list[Any]) -> Any:
  """Return the summary of a histogram, as if values were in the middle."""
  used = [i for i, count in enumerate(counts) if count]
  middles = [(a + b) / 2 for a, b in itertools.pairwise(limits)]
  return summary.histogram_raw(
    name,
    min=middles[used[0]],
    max=middles[used[-1]],
    num=sum(counts),
    sum=sum(x * count for x, count in zip(middles, counts, strict=True)),
    sum_squares=sum(
      x * x * count for x, count in zip(middles, counts, strict=True)
    ),
    bucket_limits=limits[1:],
    bucket_counts=counts,
  )
