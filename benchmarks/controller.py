"""The controller on a virtual clock: many random runs, with faults.

    python benchmarks/controller.py --seeds=10000

Each seed is a run of buffer, coordinator, replicas, schedulers, leases and
batches, with modelled engines, a modelled trainer and modelled rewards
(`benchmarks/simulation`). Replicas die, are silent, are slow, fail, join late
and leave; the trainer's process ends and goes on from a checkpoint. Some runs
cut at every checkpoint (`run.exact_resume`), evaluate beside training, or let
groups fail that take too long. A seed that violates an invariant is printed,
and `--first` runs it alone:

    python benchmarks/controller.py --first=SEED --seeds=1

Prints, as the last line, one JSON object: `seeds`, `violations`, `deadlocks`
(which are counted as violations too), `groups_per_s` (groups that ended, per
second of the real clock), `groups`, `faults` by kind, `seen` (how often what
is of interest has happened), `wall_s`. Ends with status 1 if there was a
violation. All processors are used (`--processes`).
"""

from concurrent import futures
import json
import multiprocessing
import os
import sys
import time

from absl import app
from absl import flags
from simulation import seeds

_SEEDS = flags.DEFINE_integer("seeds", 1000, "How many.", lower_bound=1)
_FIRST = flags.DEFINE_integer("first", 0, "The first seed.", lower_bound=0)
_PROCESSES = flags.DEFINE_integer(
  "processes", os.cpu_count(), "That run seeds at the same time.", 1
)
_SEEDS_AT_ONCE = 250


def main(_) -> int:
  """Run the seeds."""
  end = _FIRST.value + _SEEDS.value
  parts = [
    range(first, min(first + _SEEDS_AT_ONCE, end))
    for first in range(_FIRST.value, end, _SEEDS_AT_ONCE)
  ]
  start_s = time.perf_counter()
  if _PROCESSES.value == 1 or len(parts) == 1:
    found = seeds.joined(map(seeds.run, parts))
  else:
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(_PROCESSES.value, spawn) as pool:
      found = seeds.joined(pool.map(seeds.run, parts))
  wall_s = time.perf_counter() - start_s
  for seed, text in found.failures.items():
    print(f"seed {seed}: {text}", file=sys.stderr)
  print(
    json.dumps(
      {
        "seeds": found.num_seeds,
        "violations": len(found.failures),
        "deadlocks": found.num_deadlocks,
        "groups_per_s": round(found.num_groups / wall_s, 1),
        "groups": found.num_groups,
        "faults": dict(sorted(found.faults.items())),
        "seen": dict(sorted(found.seen.items())),
        "wall_s": round(wall_s, 1),
      }
    )
  )
  return min(1, len(found.failures))


if __name__ == "__main__":
  app.run(main)
