"""Drives the scheduler through a workload and records measurements.

It uses only the scheduler's public interface: submit, adopt, step, and its
counters.
"""

from collections.abc import Sequence
import dataclasses
import functools
import statistics
import time

import jax
import numpy as np
import workloads

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import scheduler_stats
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import publishing

_STEPS_BEFORE = 8  # steps before the timed adoptions
_NUM_ADOPTIONS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """The measurements of one run of the scheduler.

  Attributes:
    wall_s: from the first submission to the last end.
    cpu_s: time of the process on cores during that time.
    step_ends_s: end of each scheduler step, from the start.
    entered: [S] for each sequence, index of the first step that had a slot for
      it.
    began: [S] for each sequence, index of the step that gave its first token.
    busy_s: time inside device programs, by activity.
  """

  wall_s: float
  cpu_s: float
  step_ends_s: np.ndarray
  entered: np.ndarray
  began: np.ndarray
  busy_s: dict[str, float]
  stats: scheduler_stats.SchedulerStats


def engine(case: workloads.Case, seed: int) -> engine_lib.Engine:
  """Compile the programs; no token ends a sequence."""
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  return engine_lib.Engine(
    case.model,
    case.sizes,
    mesh=mesh,
    seed=seed,
    end_tokens=(),
    dtype=case.dtype,
  )


def params(
  engine: engine_lib.Engine, seed: int, version: int
) -> decode_state_lib.EngineParams:
  """Return random weights, which differ between versions."""
  init = functools.partial(transformer.init_params, engine.model)
  # In one program XLA would draw each layer of a stack anew, and take minutes
  # to compile that for a GPU.
  stacked = jax.jit(init)(jax.random.key(seed + version))
  unstack = functools.partial(
    publishing.published_params,
    num_layers=engine.model.num_layers,
    dtype=engine.dtype.name,
    weights=sections.WeightFormat.FLOAT,
  )
  return engine.load_params(jax.jit(unstack)(stacked), version)


def _sequence(prompt, new_tokens, group: int, member: int):
  return sequence_lib.Sequence(
    prompt,
    limit=len(prompt) + int(new_tokens),
    stream=sampling.Stream.TRAIN,
    group=group,
    member=member,
    settings=sampling.SamplingSettings(),
  )


def run(
  engine: engine_lib.Engine,
  versions: Sequence[decode_state_lib.EngineParams],
  workload: workloads.Workload,
  *,
  kv_on_adopt: sections.KvOnAdopt = sections.KvOnAdopt.RECOMPUTE,
  adopt_every: int = 0,
) -> Record:
  """Write the workload once; with `adopt_every` the versions alternate."""
  busy = metrics_lib.BusyClock()
  scheduler = scheduler_lib.Scheduler(
    engine, kv_on_adopt=kv_on_adopt, busy=busy
  )
  sequences = [
    _sequence(prompt, new_tokens, int(group), member)
    for member, (prompt, new_tokens, group) in enumerate(
      zip(
        workload.prompts,
        workload.completion_tokens,
        workload.groups,
        strict=True,
      )
    )
  ]
  scheduler.adopt(versions[0], 0)
  num_slots = engine.sizes.num_slots
  entered = np.zeros((len(sequences),), np.int64)
  began = np.zeros_like(entered)
  step_ends_s, num_entered, num_ended, silent = [], 0, 0, []
  start_s, start_cpu_s = busy.now(), time.process_time()
  for sequence in sequences:
    scheduler.submit(sequence)
  while not scheduler.is_idle:
    step = len(step_ends_s)
    if adopt_every and step and step % adopt_every == 0:
      version = step // adopt_every
      scheduler.adopt(versions[version % len(versions)], version)
    # First come, first served: sequences with a free slot enter in this step.
    enters = range(num_entered, min(len(sequences), num_ended + num_slots))
    entered[enters] = step
    silent += enters
    num_entered += len(enters)
    num_ended += len(scheduler.step())
    step_ends_s.append(busy.now() - start_s)
    waiting = []
    for i in silent:
      if sequences[i].length == len(workload.prompts[i]):
        waiting.append(i)
      else:
        began[i] = step
    silent = waiting
  wall_s = busy.now() - start_s
  cpu_s = time.process_time() - start_cpu_s
  assert all(s.length == s.limit for s in sequences)
  return Record(
    wall_s=wall_s,
    cpu_s=cpu_s,
    step_ends_s=np.array(step_ends_s),
    entered=entered,
    began=began,
    busy_s=busy.activity_s(),
    stats=scheduler.stats,
  )


def adoption_s(
  engine: engine_lib.Engine,
  versions: Sequence[decode_state_lib.EngineParams],
  workload: workloads.Workload,
  kv_on_adopt: sections.KvOnAdopt,
) -> float:
  """Return the median seconds that an adoption costs with all slots busy.

  Measures an adoption and the step after it, minus a step without an adoption.
  The step is included because it waits for what adopting leaves to the device.
  """
  busy = metrics_lib.BusyClock()
  scheduler = scheduler_lib.Scheduler(
    engine, kv_on_adopt=kv_on_adopt, busy=busy
  )
  scheduler.adopt(versions[0], 0)
  sizes = engine.sizes
  for slot in range(sizes.num_slots):
    prompt = workload.prompts[slot]
    room = sizes.cache_tokens - len(prompt)
    scheduler.submit(_sequence(prompt, room, slot, 0))
  for _ in range(_STEPS_BEFORE):
    scheduler.step()
  times_s = []
  for version in range(1, _NUM_ADOPTIONS + 1):
    start_s = time.perf_counter()
    scheduler.step()
    middle_s = time.perf_counter()
    scheduler.adopt(versions[version % len(versions)], version)
    scheduler.step()
    end_s = time.perf_counter()
    times_s.append((end_s - middle_s) - (middle_s - start_s))
  return statistics.median(times_s)
