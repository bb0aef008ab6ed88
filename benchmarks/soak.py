"""A long run of a tiny policy in which something fails every few seconds.

    uv run benchmarks/soak.py --steps=1000 --directory=/tmp/soak

Two runs are made of so many train steps: one without faults, and one in which
each of these happens in turn (`faulty_train.py`, `soak_rewards.py`):

    a published version is torn, or is from another run
    the loss of an update is not finite
    the disk is full for a second, and so is what holds the versions
    rewards raise, hang, die, flood their output, or are no numbers
    a process that scores is killed
    the whole run is stopped for some seconds, as by SIGSTOP

Both have run.exact_resume, and evaluations beside training.

The last line is JSON: what was injected, what the run counted, whether its
books hold every group once, the memory and open files of both runs in their
second quarter and in their last one, and the mean reward of their last tenth.
"""

from collections.abc import Iterator
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags
import launching
import surviving_books

BENCHMARKS = pathlib.Path(__file__).resolve().parent
_SAMPLE_S = 0.25
_OUTSIDE = ("reward process killed", "stopped")
_SUMMED = (
  "transfer/refused_versions",
  "train/bad_updates",
)
_COUNTED = (
  "reward_service/timeouts",
  "reward_service/errors",
  "checkpoint/failures",
)
_EVALUATED = "eval/held_out/avg@1"


class SoakError(RuntimeError):
  """A run ended before its last step."""


def flags_of_run(workdir: pathlib.Path, steps: int, cache: str) -> list[str]:
  """Return the flags that both runs have."""
  return [
    f"--config={launching.ROOT / 'configs' / 'tiny.py'}",
    f"--workdir={workdir}",
    f"--compile_cache={cache}",
    f"--config.train.num_steps={steps}",
    "--config.warm_start.num_steps=0",
    "--config.task.answer_prefix=",
    "--config.task.reward_timeout_s=1.0",
    "--config.task.reward_workers=2",
    "--config.task.max_failed_groups=100",
    "--config.rollout.max_group_seconds=60.0",
    "--config.run.checkpoint_every=25",
    "--config.run.exact_resume",
    "--config.eval.num_items=4",
    "--config.eval.every=10",
    "--config.run.sample_groups=0",
  ]


def _children(pid: int) -> list[int]:
  # The kernel lists them by the thread that started them.
  threads = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
  return [int(child) for path in threads for child in path.read_text().split()]


def reward_processes(pid: int) -> Iterator[int]:
  """Yield the processes that a run's fork server has made."""
  for child in _children(pid):
    command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
    if b"multiprocessing.forkserver" in command:
      yield from _children(child)


class Outside:
  """Faults that come from outside of the run."""

  def __init__(self, every_s: float, seed: int = 0):
    self.counts = dict.fromkeys(_OUTSIDE, 0)
    self._every_s = every_s
    self._last_s = time.monotonic()
    self._rng = random.Random(seed)

  def maybe(self, pid: int) -> None:
    """Inject one if it is time."""
    if time.monotonic() - self._last_s < self._every_s:
      return
    kind = _OUTSIDE[sum(self.counts.values()) % len(_OUTSIDE)]
    if kind == "stopped":
      os.kill(pid, signal.SIGSTOP)
      time.sleep(self._rng.uniform(0.5, 3.0))
      os.kill(pid, signal.SIGCONT)
    else:
      found = [*reward_processes(pid)]
      if not found:
        return
      os.kill(self._rng.choice(found), signal.SIGKILL)
    self.counts[kind] += 1
    self._last_s = time.monotonic()


def sample(pid: int) -> dict[str, float]:
  """Return the resident memory in MB, open files and threads of a process."""
  status = pathlib.Path(f"/proc/{pid}/status").read_text()
  fields = dict(line.split(":", 1) for line in status.splitlines())
  return {
    "resident_mb": int(fields["VmRSS"].split()[0]) / 1024,
    "open_files": len(os.listdir(f"/proc/{pid}/fd")),
    "threads": int(fields["Threads"]),
  }


def run(
  command: list[str], workdir: pathlib.Path, outside: Outside | None
) -> list[dict[str, float]]:
  """Run to the end, and return what was sampled while it trained.

  Raises:
    SoakError: it failed; the message has the last lines of its output.
  """
  log = workdir.with_suffix(".log")
  with open(log, "wb") as output:
    process = subprocess.Popen(
      [sys.executable, *command], cwd=BENCHMARKS, stdout=output, stderr=output
    )
  samples = []
  metrics = workdir / "metrics.jsonl"
  try:
    while process.poll() is None:
      time.sleep(_SAMPLE_S)
      if not metrics.exists():
        continue
      try:
        samples.append(sample(process.pid))
        if outside is not None:
          outside.maybe(process.pid)
      except (FileNotFoundError, ProcessLookupError, KeyError):
        continue  # it has just ended
  finally:
    process.kill()
  if process.wait():
    text = log.read_text(errors="replace")[-2000:]
    raise SoakError(f"{workdir} ended with {process.returncode}: {text}")
  return samples


def quarters(samples: list[dict[str, float]]) -> dict[str, list[float]]:
  """Return the medians of the second and of the last quarter."""
  quarter = max(1, len(samples) // 4)
  return {
    name: [
      round(statistics.median(one[name] for one in part), 1)
      for part in (samples[quarter : 2 * quarter], samples[-quarter:])
    ]
    for name in samples[0]
  }


def last_reward(workdir: pathlib.Path) -> float:
  """Return the mean reward of the last tenth of a run's steps."""
  rewards = [
    line["reward/mean"]
    for line in launching.metrics(workdir)
    if "reward/mean" in line
  ]
  last = rewards[-max(1, len(rewards) // 10) :]
  return round(statistics.mean(last), 3)


def measure(
  directory: pathlib.Path,
  steps: int,
  every_s: float,
  compile_cache: str,
  *,
  compares: bool = True,
) -> dict[str, Any]:
  """Make both runs in a directory, which is emptied, and compare them.

  Args:
    directory: for the runs.
    steps: train steps of each.
    every_s: seconds between faults.
    compile_cache: directory of XLA's programs.
    compares: False makes only the run with faults.
  """
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  calm, faulty = directory / "calm", directory / "faulty"
  before = []
  if compares:
    before = run(
      [
        str(launching.ROOT / "launch" / "train.py"),
        *flags_of_run(calm, steps, compile_cache),
        "--config.task.reward=soak_rewards:ones",
      ],
      calm,
      None,
    )
  counts = directory / "faults.json"
  outside, start_s = Outside(every_s), time.monotonic()
  samples = run(
    [
      str(BENCHMARKS / "faulty_train.py"),
      str(counts),
      str(every_s),
      *flags_of_run(faulty, steps, compile_cache),
      "--config.task.reward=soak_rewards:faulty_ones",
    ],
    faulty,
    outside,
  )
  lines = launching.metrics(faulty)
  books = surviving_books.read(faulty)
  assert books is not None
  ledger = (faulty / "ledger.jsonl").read_text().splitlines()
  fates = [json.loads(line)["fate"] for line in ledger]
  return {
    "train_steps": books.prefix.step,
    "wall_s": round(time.monotonic() - start_s, 1),
    "injected": json.loads(counts.read_text()) | outside.counts,
    "counted": {
      name: sum(line.get(name, 0) for line in lines) for name in _SUMMED
    }
    | {name: lines[-1][name] for name in _COUNTED}
    | {
      "failed groups": fates.count("failed"),
      "evaluations": sum(_EVALUATED in line for line in lines),
    },
    "lost": len(books.lost),
    "duplicated": len(books.duplicated)
    + len(surviving_books.repeated_metrics(faulty)),
    "ledger_balanced": books.is_balanced,
    "bound_held": not books.out_of_bound,
    **quarters(samples),
    "reward_last_tenth": last_reward(faulty),
  } | (
    {
      "without_faults": quarters(before),
      "reward_last_tenth_without_faults": last_reward(calm),
    }
    if compares
    else {}
  )


_STEPS = flags.DEFINE_integer("steps", 1000, "Train steps of each run.", 1)
_EVERY_S = flags.DEFINE_float("every_s", 3.0, "Seconds between faults.", 0.1)
_DIRECTORY = flags.DEFINE_string(
  "directory", "/tmp/soak", "Directory of both runs; it is emptied."
)
_CACHE = flags.DEFINE_string(
  "compile_cache", "/tmp/soak_cache", "Directory of XLA's programs."
)


def main(argv: list[str]) -> None:
  """Measure, and print the result."""
  del argv
  directory = pathlib.Path(_DIRECTORY.value).absolute()
  result = measure(directory, _STEPS.value, _EVERY_S.value, _CACHE.value)
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
