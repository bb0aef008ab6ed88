"""The progress of a run, shown on stderr.

A terminal gets a live line; any other output gets a plain line every few
seconds. Nothing is written to stdout, whose last line is the summary.
"""

import contextlib
import dataclasses
import io
import os
import sys
import time
from typing import Any, TextIO, cast

import rich.console
import rich.progress


@dataclasses.dataclass(kw_only=True, slots=True)
class StepReport:
  """One train step in a line.

  Attributes:
    step: completed train steps.
    reward: mean over the step's trajectories.
    staleness_mean: mean over the step's tokens, in versions.
    staleness_max: maximum over the step's tokens.
    tokens_per_s: tokens that the rollout slice writes per second.
    rollout_busy_frac: share of the time since the last step that the rollout
      slice spent inside device programs.
    train_busy_frac: the same share of the training slice.
  """

  step: int
  reward: float
  staleness_mean: float
  staleness_max: int
  tokens_per_s: float
  rollout_busy_frac: float
  train_busy_frac: float


def _clock(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Left:
  """The time left, from the pace of the steps since the first report.

  The time until the first report does not count, because the first step waits
  for the compilation of both slices.
  """

  def __init__(self, num_steps: int):
    self._num_steps = num_steps
    self._first: tuple[int, float] | None = None

  def after(self, step: int, now_s: float) -> str:
    """Return the time left after a step, or "?" while it is unknown."""
    if self._first is None:
      self._first = (step, now_s)
    first_step, first_s = self._first
    if step == first_step:
      return "?"
    per_step_s = (now_s - first_s) / (step - first_step)
    return _clock(per_step_s * max(self._num_steps - step, 0))


class _Forgiving:
  """A stream that hides its failures from the writer.

  The reader of a pipe may be gone, a terminal closed or a disk full. None of
  these is a reason to end a run.
  """

  def __init__(self, stream: io.TextIOBase | TextIO):
    self._stream = stream
    self.encoding = stream.encoding
    self.isatty = stream.isatty
    self.fileno = stream.fileno

  def write(self, text: str) -> int:
    with contextlib.suppress(OSError):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    with contextlib.suppress(OSError):
      self._stream.flush()


class Progress:
  """Shows stages and train steps; a context manager.

  Threads: the training thread and the recorder's thread use it. rich, which has
  locks of its own, draws from another thread.
  """

  def __init__(
    self,
    num_steps: int,
    *,
    console: rich.console.Console | None = None,
    every_s: float = 5.0,
  ):
    """Prepare a display of `num_steps` train steps.

    Args:
      num_steps: of the whole run, including those before a resume.
      console: stderr if None.
      every_s: least time between two plain lines, where there is no terminal.
    """
    self._num_steps = num_steps
    self._console = console or rich.console.Console(
      file=cast(TextIO, _Forgiving(sys.stderr))
    )
    self._every_s = every_s
    self._last_line_s = -every_s
    self._left = _Left(num_steps)
    self._live: rich.progress.Progress | None = None
    self._task = rich.progress.TaskID(0)

  def __enter__(self) -> "Progress":
    if self._console.is_terminal:
      self._live = rich.progress.Progress(
        rich.progress.TextColumn("[bold]{task.description}"),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.TextColumn("{task.fields[text]}"),
        console=self._console,
        refresh_per_second=4,
      )
      self._task = self._live.add_task("starting", total=None, text="")
      self._live.start()
    return self

  def __exit__(self, *_: Any) -> None:
    if self._live is not None:
      self._live.stop()
      self._live = None

  def show_cursor(self) -> None:
    """Restore the terminal when the process is about to end."""
    if self._live is not None:
      os.write(2, b"\x1b[?25h\n")

  def note(self, text: str) -> None:
    """Print a line that stays, above the live one."""
    self._console.print(text, highlight=False, markup=False, soft_wrap=True)

  def stage(self, name: str, done: int, total: int, text: str = "") -> None:
    """Show how far a stage is, such as the warm start or an evaluation."""
    if self._live is not None:
      self._live.update(
        self._task, description=name, completed=done, total=total, text=text
      )
    elif self._is_due() or done == total:
      self.note(f"{name} {done}/{total} {text}".rstrip())

  def step(self, report: StepReport) -> None:
    """Show a finished train step."""
    left = self._left.after(report.step, time.monotonic())
    text = (
      f"reward {report.reward:.3f}"
      f" · staleness {report.staleness_mean:.1f} (max {report.staleness_max})"
      f" · {report.tokens_per_s:,.0f} tokens/s"
      f" · busy: rollout {report.rollout_busy_frac:.0%},"
      f" train {report.train_busy_frac:.0%}"
      f" · {left} left"
    )
    self.stage("step", report.step, self._num_steps, text)

  def _is_due(self) -> bool:
    now = time.monotonic()
    if now - self._last_line_s < self._every_s:
      return False
    self._last_line_s = now
    return True
