"""What a run's books cost after a thousand steps, and after a million.

    python benchmarks/bookkeeping.py

Grows two busy clocks step by step, as a run does: four busy intervals for each
step, and an evaluation every 50 steps. After 1,000, 100,000 and 1,000,000 steps
(--steps) it measures

    step_ms       the books of a train step: busy intervals, totals, metrics,
                  ledger, metrics.jsonl, TensorBoard and samples of four
                  groups; median of --repeats
    totals_us     the part of these that runs on the thread that trains
    memory_mb     peak memory of the process so far

It also measures buffers with 100 to 100,000 outstanding groups (--groups). Half
of the groups are finished, and their deadlines are spread over the steps that
max_staleness=4 allows:

    admit_us      `try_admit` of a group that fits; median of --repeats
    refuse_us     `try_admit` of a group that does not fit
    poll_us       looking for a batch that is not there yet
    state_ms      `state`, as a checkpoint reads it

Last, it measures train steps of 512 to 8,192 trajectories of 8,192 tokens
(--batches, in groups of 16, and --tokens), as `large_step` describes. The run
with the most of them is also killed while it writes a step down, and resumed:
its books have to be those of the run that was not, bit for bit (`survives`).

The classes are those of a run, with stand-ins for the rollout worker and the
reward service, of which the books only read counters. Steps that are not
measured write nothing to disk. Nothing is compiled, and no device is used.

Hardware: two CPU cores, 6 GB of memory and 10 GB of disk for the last part.
Time: about five minutes. Result: docs/project/notebook.md.
The last line of standard output is one JSON object whose keys are the sizes.
"""

from collections.abc import Callable, Iterator, Sequence
import hashlib
import itertools
import json
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import numpy as np
import run_books

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.replay import timing_record

_STEPS = flags.DEFINE_list(
  "steps", ["1000", "100000", "1000000"], "Train steps of the run, ascending."
)
_GROUPS = flags.DEFINE_list(
  "groups", ["100", "1000", "10000", "100000"], "Numbers of outstanding groups."
)
_BATCHES = flags.DEFINE_list(
  "batches", ["32", "128", "512"], "Numbers of groups of a train step."
)
_TOKENS = flags.DEFINE_integer("tokens", 8_192, "Of each trajectory.", 512)
_REPEATS = flags.DEFINE_integer(
  "repeats", 100, "How often each measurement is repeated.", 1
)

_LARGE_STEP = pathlib.Path(__file__).with_name("large_step.py")
_LARGE_STEPS = 4
_MAX_STALENESS = 4
_EVALUATE_EVERY = 50
_PROMPT = types.Prompt(
  prompt_id="none/train/0", tokens=np.zeros(1, np.int32), item={}
)


def _timed(call: Callable[[], Any], repeats: int) -> float:
  """Return the median seconds of a call."""
  times_s = []
  for _ in range(repeats):
    start_s = time.perf_counter()
    call()
    times_s.append(time.perf_counter() - start_s)
  return statistics.median(times_s)


def _group(index: int, step: int) -> types.RolloutGroup:
  """Return four short trajectories, all written by the current version."""
  tokens = 32
  trajectories = [
    types.Trajectory(
      member=member,
      tokens=np.ones(tokens, np.int32),
      loss_mask=np.arange(tokens) >= 16,
      behavior_logprobs=np.zeros(tokens, np.float32),
      policy_versions=np.where(np.arange(tokens) >= 16, step, -1),
      finish_reason=types.FinishReason.EOS,
      reward=types.Reward(score=member / 3),
    )
    for member in range(4)
  ]
  return types.RolloutGroup(
    admission=types.Admission(
      index=index, birth=step, deadline=step + _MAX_STALENESS
    ),
    prompt=_PROMPT,
    trajectories=trajectories,
  )


class Books(run_books.Books):
  """The books of a run that records some busy intervals in each step."""

  def __init__(self, workdir: pathlib.Path):
    super().__init__(workdir)
    self.step = 0
    self._evaluate()
    self.recorder.start_rl()

  def _evaluate(self) -> None:
    with self.recorder.evaluating():
      pass

  def _work(self) -> None:
    """Record the busy intervals of a step."""
    for activity in ("prefill", "decode", "decode"):
      with self.busy["rollout"].record(activity):
        pass
    with self.busy["train"].record("update"):
      pass

  def skip_to(self, step: int) -> None:
    """Add steps to the clocks without writing anything."""
    while self.step < step:
      self._work()
      self.step += 1
      if self.step % _EVALUATE_EVERY == 0:
        self._evaluate()

  def measured_step(self) -> tuple[float, float]:
    """Return the seconds of a step's books, and of the totals among them."""
    groups = [_group(4 * self.step + i, self.step) for i in range(4)]
    pending = run_books.pending(self.step, groups, 32)
    self.rollout.generated_tokens += sum(
      group.num_completion_tokens for group in groups
    )
    self.step += 1
    start_s = time.perf_counter()
    self._work()
    totals_start_s = time.perf_counter()
    totals = self.recorder.totals()
    totals_s = time.perf_counter() - totals_start_s
    self.recorder.begin(pending, totals, {})
    assert self.recorder.wait(60.0)
    return time.perf_counter() - start_s, totals_s


def measure_steps(
  sizes: Sequence[int], repeats: int
) -> dict[str, dict[str, float]]:
  """Return the first table of the module's docstring, by number of steps."""
  found: dict[str, dict[str, float]] = {}
  with tempfile.TemporaryDirectory() as directory:
    books = Books(pathlib.Path(directory))
    try:
      for size in sizes:
        books.skip_to(size)
        times = [books.measured_step() for _ in range(repeats)]
        step_s, totals_s = map(statistics.median, zip(*times, strict=True))
        row = {
          "step_ms": 1e3 * step_s,
          "totals_us": 1e6 * totals_s,
          "memory_mb": run_books.peak_memory_bytes() / 1e6,
        }
        for name, value in row.items():
          found.setdefault(name, {})[str(size)] = value
    finally:
      books.close()
  return found


def _full_buffer(num_groups: int) -> tuple[buffer_lib.Buffer, int]:
  """Return a buffer with room for one more group, and the version to start it.

  The groups with the earliest deadlines are running, so no batch may be taken
  although many groups are finished.
  """
  step = _MAX_STALENESS
  num_deadlines = _MAX_STALENESS + 1
  per_step = num_groups // num_deadlines
  admissions = [
    types.Admission(index=i, birth=i // per_step, deadline=step + i // per_step)
    for i in range(num_deadlines * per_step - 1)
  ]
  num_running = len(admissions) // 2
  buffer = buffer_lib.Buffer(per_step, _MAX_STALENESS)
  buffer.restore(
    buffer_lib.BufferState(
      groups_per_step=per_step,
      next_step=step,
      next_index=len(admissions),
      running=admissions[:num_running],
      finished=[
        types.RolloutGroup(
          admission=a,
          prompt=_PROMPT,
          trajectories=[],
        )
        for a in admissions[num_running:]
      ],
    )
  )
  return buffer, step


def _measure_groups(size: int, repeats: int) -> dict[str, float]:
  buffer, version = _full_buffer(size)
  admit_s = []
  for _ in range(repeats):
    start_s = time.perf_counter()
    admission = buffer.try_admit(version)
    admit_s.append(time.perf_counter() - start_s)
    assert admission is not None
    buffer.drop(admission.index)
  assert buffer.get_batch(version, 0.0) is None
  poll_s = _timed(lambda: buffer.get_batch(version, 0.0), repeats)
  buffer.try_admit(version)
  assert buffer.try_admit(version) is None
  return {
    "admit_us": 1e6 * statistics.median(admit_s),
    "refuse_us": 1e6 * _timed(lambda: buffer.try_admit(version), repeats),
    "poll_us": 1e6 * poll_s,
    "state_ms": 1e3 * _timed(buffer.state, min(repeats, 20)),
  }


def measure_buffer(
  sizes: Sequence[int], repeats: int
) -> dict[str, dict[str, float]]:
  """Return the second table of the module's docstring, by number of groups."""
  rows = {str(size): _measure_groups(size, repeats) for size in sizes}
  names = next(iter(rows.values()))
  return {name: {size: rows[size][name] for size in rows} for name in names}


class _LargeRun:
  """A run of `large_step` in a process of its own."""

  def __init__(self, workdir: pathlib.Path, num_groups: int, num_tokens: int):
    self.workdir = workdir
    self._process = subprocess.Popen(
      [
        *(sys.executable, str(_LARGE_STEP), f"--workdir={workdir}"),
        *(f"--groups={num_groups}", f"--tokens={num_tokens}"),
        f"--train_steps={_LARGE_STEPS}",
      ],
      stdout=subprocess.PIPE,
      text=True,
    )

  def row(self) -> dict[str, float]:
    """Wait for its end, and return what it has measured."""
    output, _ = self._process.communicate()
    if self._process.returncode:
      raise RuntimeError(f"{_LARGE_STEP} failed")
    return json.loads(output.splitlines()[-1])

  def kill(self) -> None:
    """Kill it while the books of its last step but one are written."""
    assert self._process.stdout is not None
    for line in self._process.stdout:
      if line == f"step {_LARGE_STEPS - 2}\n":
        break
    ledger = self.workdir / "ledger.jsonl"
    before = ledger.stat().st_size
    while ledger.stat().st_size == before and self._process.poll() is None:
      time.sleep(0.001)
    self._process.kill()
    self._process.communicate()
    if self._process.returncode != -signal.SIGKILL:
      raise RuntimeError(f"{_LARGE_STEP} ended before it was killed")

  def books(self) -> Iterator[bytes]:
    """Yield all that does not depend on time."""
    yield (self.workdir / "ledger.jsonl").read_bytes()
    with open(self.workdir / "timing.jsonl", "rb") as file:
      for line in file:
        if not line.startswith(timing_record.START):
          yield line
    for line in (self.workdir / "metrics.jsonl").read_text().splitlines():
      values = json.loads(line).items()
      names = ("reward/", "completion/", "staleness/", "ledger/")
      yield json.dumps([x for x in values if x[0].startswith(names)]).encode()
    last = self.workdir / "checkpoints" / str(_LARGE_STEPS)
    for path in (last / "groups.json", *sorted(last.glob("*.npy"))):
      with open(path, "rb") as file:
        yield hashlib.file_digest(file, "sha256").digest()


def measure_batches(
  sizes: Sequence[int], num_tokens: int
) -> dict[str, dict[str, float]]:
  """Return the third table, by number of trajectories."""
  rows = {}
  with tempfile.TemporaryDirectory() as directory:
    for size in sizes:
      name = str(16 * size)
      path = pathlib.Path(directory)
      run = _LargeRun(path / name, size, num_tokens)
      rows[name] = run.row()
      if size == max(sizes):
        _LargeRun(path / "killed", size, num_tokens).kill()
        resumed = _LargeRun(path / "killed", size, num_tokens)
        again = resumed.row()
        rows[name] |= {x: again[x] for x in ("check", "restore")}
        pairs = itertools.zip_longest(run.books(), resumed.books())
        rows[name]["survives"] = float(all(a == b for a, b in pairs))
      else:
        shutil.rmtree(run.workdir)
  names = rows[str(16 * max(sizes))]
  return {
    name: {size: row.get(name, 0.0) for size, row in rows.items()}
    for name in names
  }


def main(argv: Sequence[str]) -> None:
  """Measure all and print a table of each."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  result: dict[str, dict[str, float]] = {}
  for what, measure, sizes, argument in (
    ("steps", measure_steps, _STEPS.value, _REPEATS.value),
    ("groups", measure_buffer, _GROUPS.value, _REPEATS.value),
    ("trajectories", measure_batches, _BATCHES.value, _TOKENS.value),
  ):
    if not sizes:
      continue
    found = measure(sorted(map(int, sizes)), argument)
    columns = next(iter(found.values()))
    print("".join(f"{x:>14}" for x in (what, *columns)))
    for name, row in found.items():
      print(f"{name:>14}" + "".join(f"{x:14,.2f}" for x in row.values()))
      result.setdefault(name, {}).update(row)
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
