"""A long run of a tiny policy in which something fails every few seconds.

    uv run benchmarks/soak.py --steps=1000 --directory=/tmp/soak
    uv run --extra ray benchmarks/soak.py --steps=300 --replicas=2

Two runs are made of so many train steps: one without faults, and one in which
each of these happens in turn (`faulty_train.py`, `soak_rewards.py`):

    the loss of an update is not finite
    the disk is full for a second, and so is what holds the versions
    rewards raise, hang, die, flood their output, or are no numbers
    a process that scores is killed
    the whole run is stopped for some seconds, as by SIGSTOP

With --replicas the engines are in other processes, in a Ray cluster that the
run makes, and these come in addition:

    a replica is killed
    a replica is stopped for longer than cluster.replica_timeout_s

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
import marked_processes
import surviving_books

BENCHMARKS = pathlib.Path(__file__).resolve().parent
_SAMPLE_S = 0.25
_OUTSIDE = ("reward process killed", "stopped")
_OF_REPLICAS = ("replica killed", "replica stopped")
_REPLICA_TIMEOUT_S = 5.0
_SUMMED = ("train/bad_updates",)
_COUNTED = (
  "reward_service/timeouts",
  "reward_service/errors",
  "checkpoint/failures",
)
_EVALUATED = "eval/held_out/avg@1"


class SoakError(RuntimeError):
  """A run ended before its last step."""


def flags_of_run(
  workdir: pathlib.Path, steps: int, cache: str, replicas: int = 0
) -> list[str]:
  """Return the flags that both runs have."""
  remote = [
    "--config.cluster.kind=ray",
    f"--config.cluster.replicas={replicas}",
    f"--config.cluster.replica_timeout_s={_REPLICA_TIMEOUT_S}",
  ]
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
    *(remote if replicas else []),
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


def replica_processes(mark: str) -> list[int]:
  """Return the processes of Ray that hold a replica of a marked run."""
  names = marked_processes.find(mark)
  return [pid for pid, name in names.items() if name.startswith("ray::")]


class Outside:
  """Faults that come from outside of the run.

  Attributes:
    counts: how often each of them has happened.
  """

  def __init__(self, every_s: float, mark: str = "", seed: int = 0):
    """Create the faults of a run.

    Args:
      every_s: seconds between two.
      mark: of the processes of a run with replicas in other processes.
      seed: decides whom they meet, and for how long.
    """
    self._kinds = (*_OUTSIDE, *(_OF_REPLICAS if mark else ()))
    self.counts = dict.fromkeys(self._kinds, 0)
    self._mark = mark
    self._every_s = every_s
    self._last_s = time.monotonic()
    self._rng = random.Random(seed)

  def maybe(self, pid: int) -> None:
    """Inject one if it is time."""
    if time.monotonic() - self._last_s < self._every_s:
      return
    kind = self._kinds[sum(self.counts.values()) % len(self._kinds)]
    if kind == "stopped":
      self._stop(pid, self._rng.uniform(0.5, 3.0))
    elif kind in _OF_REPLICAS:
      found = replica_processes(self._mark)
      if not found:
        return
      replica = self._rng.choice(found)
      if kind == "replica stopped":
        self._stop(replica, _REPLICA_TIMEOUT_S + self._rng.uniform(1.0, 3.0))
      else:
        os.kill(replica, signal.SIGKILL)
    else:
      found = [*reward_processes(pid)]
      if not found:
        return
      os.kill(self._rng.choice(found), signal.SIGKILL)
    self.counts[kind] += 1
    self._last_s = time.monotonic()

  def _stop(self, pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


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
  command: list[str],
  workdir: pathlib.Path,
  outside: Outside | None,
  mark: str,
) -> list[dict[str, float]]:
  """Run to the end, and return what was sampled while it trained.

  Args:
    command: what Python runs.
    workdir: of the run.
    outside: what goes wrong, if anything.
    mark: of its processes.

  Raises:
    SoakError: it failed; the message has the last lines of its output.
  """
  log = workdir.with_suffix(".log")
  with open(log, "wb") as output:
    process = subprocess.Popen(
      [sys.executable, *command],
      cwd=BENCHMARKS,
      stdout=output,
      stderr=output,
      env=marked_processes.environment(mark),
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
  replicas: int = 0,
) -> dict[str, Any]:
  """Make both runs in a directory, which is emptied, and compare them.

  Args:
    directory: for the runs.
    steps: train steps of each.
    every_s: seconds between faults.
    compile_cache: directory of XLA's programs.
    compares: False makes only the run with faults.
    replicas: in other processes; 0 is the one within the run.
  """
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  calm, faulty = directory / "calm", directory / "faulty"
  before, mark = [], marked_processes.new_mark()
  if compares:
    before = run(
      [
        str(launching.ROOT / "launch" / "train.py"),
        *flags_of_run(calm, steps, compile_cache, replicas),
        "--config.task.reward=soak_rewards:ones",
      ],
      calm,
      None,
      mark,
    )
  counts = directory / "faults.json"
  outside = Outside(every_s, mark if replicas else "")
  start_s = time.monotonic()
  samples = run(
    [
      str(BENCHMARKS / "faulty_train.py"),
      str(counts),
      str(every_s),
      *flags_of_run(faulty, steps, compile_cache, replicas),
      "--config.task.reward=soak_rewards:faulty_ones",
    ],
    faulty,
    outside,
    mark,
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
_REPLICAS = flags.DEFINE_integer(
  "replicas", 0, "Replicas in other processes; 0 is one within the run.", 0
)
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
  result = measure(
    directory,
    _STEPS.value,
    _EVERY_S.value,
    _CACHE.value,
    replicas=_REPLICAS.value,
  )
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
