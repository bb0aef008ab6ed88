"""What a run's books cost after a thousand steps, and after a million.

    python benchmarks/bookkeeping.py

Grows one run record and two busy clocks step by step, as a run does: for each
step four busy intervals and an entry in the record, and an evaluation every 50
steps. After 1,000, 100,000 and 1,000,000 steps (--steps) it measures

    step_ms       the books of a train step: busy intervals, totals, metrics,
                  ledger, metrics.jsonl, TensorBoard and samples of four
                  groups; median of --repeats
    totals_us     the part of these that runs on the thread that trains
    record_bytes  what a checkpoint keeps of the record
    record_ms     time to write the record as JSON
    memory_mb     peak memory of the process so far

It also measures buffers with 100 to 100,000 outstanding groups (--groups). Half
of the groups are finished, and their deadlines are spread over the steps that
max_staleness=4 allows:

    admit_us      `try_admit` of a group that fits; median of --repeats
    refuse_us     `try_admit` of a group that does not fit
    poll_us       looking for a batch that is not there yet
    state_ms      `state`, as a checkpoint reads it

The classes are those of a run, with stand-ins for the rollout worker and the
reward service, of which the books only read counters. Steps that are not
measured write nothing to disk. Nothing is compiled, and no device is used.

Hardware: two CPU cores. Time: about two minutes. Result: docs/performance.md.
The last line of standard output is one JSON object whose keys are the sizes.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

from absl import app
from absl import flags
from jax import numpy as jnp
import numpy as np
import rich.console

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import ledger as ledger_lib
from jaxrl_async.coordination import run_schedule
from jaxrl_async.engine import scheduler_stats
from jaxrl_async.models import configs
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import run_record
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import packing
from jaxrl_async.training import step_metrics

_STEPS = flags.DEFINE_list(
  "steps", ["1000", "100000", "1000000"], "Train steps of the run, ascending."
)
_GROUPS = flags.DEFINE_list(
  "groups", ["100", "1000", "10000", "100000"], "Numbers of outstanding groups."
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 100, "How often each measurement is repeated.", 1
)

_MAX_STALENESS = 4
_EVALUATE_EVERY = 50
_PROMPT = types.Prompt(
  prompt_id="none/train/0", tokens=np.zeros(1, np.int32), item={}
)
_SUMS = (
  "loss",
  "grad_norm",
  "bad_updates",
  "entropy_sum",
  "clip_count",
  "approx_kl_sum",
  "behavior_kl_sum",
  "behavior_weight_sum",
  "behavior_weight_square_sum",
  "behavior_weight_capped_count",
  "left_out_count",
  "mismatch_kl_sum",
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


class Books:
  """The record of a run, and everything that writes it down."""

  def __init__(self, workdir: pathlib.Path):
    self.step = 0
    self._busy = {
      name: metrics_lib.BusyClock(0.0) for name in ("rollout", "train")
    }
    beside = side_outputs_lib.SideOutputs(print)
    self._writer = metrics_lib.MetricsWriter(workdir, beside)
    self._ledger = ledger_lib.Ledger(
      workdir / "ledger.jsonl", ledger_lib.LedgerState()
    )
    self._schedule = run_schedule.Schedule(
      workdir,
      0,
      keep_trajectories=False,
      first_step=0,
      environment={},
      config={},
    )
    self._null = open(os.devnull, "w")
    self._rollout: Any = SimpleNamespace(
      coordinator=SimpleNamespace(stream=SimpleNamespace(metrics=dict)),
      generated_tokens=0,
      metrics=dict,
      totals=lambda: {
        **dataclasses.asdict(scheduler_stats.SchedulerStats()),
        "wait_s": 0.0,
        "adopt_s": 0.0,
        "refused_versions": 0,
      },
    )
    rewards: Any = SimpleNamespace(
      metrics=lambda: {"reward_service/latency_s": 0.1}
    )
    self.recorder = recorder_lib.Recorder(
      run_record.RunRecord(),
      workdir=workdir,
      writer=self._writer,
      ledger=self._ledger,
      schedule=self._schedule,
      rollout=self._rollout,
      rewards=rewards,
      busy=self._busy,
      progress=progress_lib.Progress(
        1, console=rich.console.Console(file=self._null)
      ),
      side_outputs=beside,
      sampler=sampler_lib.Sampler(
        workdir,
        num_groups=4,
        tokenizer=tokenizer_lib.character_level(),
        answer_prefix="",
        side_outputs=beside,
        first_step=0,
      ),
      max_bad_updates=1,
      solved_score=1.0,
    )
    self._evaluate()
    self.recorder.start_rl()

  def close(self) -> None:
    """End the recorder's thread and close the files."""
    self.recorder.close(60.0)
    self._writer.close()
    self._ledger.close()
    self._schedule.close()
    self._null.close()

  def _evaluate(self) -> None:
    with self.recorder.evaluating():
      pass
    self.recorder.record.mismatch_kl.add(1e-9)
    self.recorder.record.evaluations.append(
      (self._busy["train"].now(), self.step, 0.123456789, None)
    )

  def _work(self) -> None:
    """Record the busy intervals of a step."""
    for activity in ("prefill", "decode", "decode"):
      with self._busy["rollout"].record(activity):
        pass
    with self._busy["train"].record("update"):
      pass

  def skip_to(self, step: int) -> None:
    """Add steps to clocks and record without writing anything."""
    values = {
      "reward/mean": 0.123456789,
      "staleness/histogram": [4, 3, 2, 1, 1],
      "staleness/versions_histogram": [0, 5, 2],
      "offpolicy/mismatch_kl": 1.23456789e-9,
    }
    while self.step < step:
      self._work()
      self.recorder.record.add_step(self._busy["train"].now(), values)
      self.step += 1
      if self.step % _EVALUATE_EVERY == 0:
        self._evaluate()

  def measured_step(self) -> tuple[float, float]:
    """Return the seconds of a step's books, and of the totals among them."""
    groups = [_group(4 * self.step + i, self.step) for i in range(4)]
    pending = step_metrics.Pending(
      step=self.step,
      groups=groups,
      placement=packing.Placement(
        starts=np.arange(0, 16 * 32, 32),
        lengths=np.full(16, 32),
        shape=(1, 1, 16, 32),
      ),
      sums={name: jnp.zeros(1) for name in _SUMS}
      | {"num_loss_tokens": jnp.ones(1), "mismatch_count": jnp.ones(1)},
      learning_rate=lambda: 1e-3,
      times_s={"proximal_s": 0.1, "update_s": 0.1},
      programs_s=0.2,
      models=[configs.MODELS["tiny"]],
      peak_flops=1e12,
    )
    self._rollout.generated_tokens += sum(
      group.num_completion_tokens for group in groups
    )
    self.step += 1
    start_s = time.perf_counter()
    self._work()
    totals_start_s = time.perf_counter()
    totals = self.recorder.totals()
    totals_s = time.perf_counter() - totals_start_s
    self.recorder.begin(pending, totals, {}, is_evaluated=False)
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
        text = json.dumps(books.recorder.state())
        record_s = _timed(
          lambda: json.dumps(books.recorder.state()), min(repeats, 20)
        )
        row = {
          "step_ms": 1e3 * step_s,
          "totals_us": 1e6 * totals_s,
          "record_bytes": len(text),
          "record_ms": 1e3 * record_s,
          "memory_mb": metrics_lib.peak_memory_bytes() / 1e6,
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


def main(argv: Sequence[str]) -> None:
  """Measure both and print a table of each."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  result: dict[str, dict[str, float]] = {}
  for what, measure, sizes in (
    ("steps", measure_steps, sorted(map(int, _STEPS.value))),
    ("groups", measure_buffer, sorted(map(int, _GROUPS.value))),
  ):
    found = measure(sizes, _REPEATS.value)
    print("".join(f"{x:>14}" for x in (what, *sizes)))
    for name, row in found.items():
      print(f"{name:>14}" + "".join(f"{x:14,.2f}" for x in row.values()))
    result |= found
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
