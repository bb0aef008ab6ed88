"""How long a trainer stands still for a checkpoint, and how long writing takes.

    python benchmarks/checkpoints.py --megabytes=50,400 --directory=/tmp

A train state of AdamW, parameters and two moments in float32, is written
several times with `storage.checkpoint`. The parts take

    copy_ms         `begin`, during which the trainer stands still
    write_ms        what `begin` returns, which a thread does beside training.
                    A checkpoint that is waited for takes both.
    step_ms         a program that changes the state in place
    step_beside_ms  the same right after `begin`. On a CPU, the copy of what
                    is being written is made here and not in `begin`.
    memcpy_ms       a plain copy of the arrays in memory, for comparison

Medians of --repeats. The last line of standard output is one JSON object whose
keys are the sizes. Result: docs/project/notebook.md.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import json
import pathlib
import statistics
import tempfile
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.storage import checkpoint

_MEGABYTES = flags.DEFINE_list("megabytes", ["50", "400"], "Sizes of states.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Checkpoints of each size.")
_DIRECTORY = flags.DEFINE_string("directory", None, "Where to write.")
_NUM_LAYERS = 12


def _state(num_bytes: int) -> dict[str, dict[str, jax.Array]]:
  """Return parameters and two moments with that many bytes altogether."""
  columns = 1024
  rows = max(1, num_bytes // (3 * _NUM_LAYERS * 4 * columns))
  make = jax.jit(lambda key: jax.random.normal(key, (rows, columns)))
  return {
    part: {
      f"layer{i}": make(jax.random.key(_NUM_LAYERS * j + i))
      for i in range(_NUM_LAYERS)
    }
    for j, part in enumerate(("params", "mu", "nu"))
  }


def _measure(megabytes: float) -> dict[str, float]:
  state = jax.block_until_ready(_state(int(1e6 * megabytes)))
  step = jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)
  times: dict[str, list[float]] = collections.defaultdict(list)

  @contextlib.contextmanager
  def timed(name: str) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    times[name].append(1e3 * (time.perf_counter() - start_s))

  with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as directory:
    for index in range(_REPEATS.value + 1):
      if index == 1:  # the first one warms up
        times.clear()
      with timed("memcpy_ms"):
        jax.tree.map(np.array, state)
      with timed("step_ms"):
        state = jax.block_until_ready(step(state))
      with timed("copy_ms"):
        finish = checkpoint.begin(pathlib.Path(directory), index, state, {}, [])
      with timed("step_beside_ms"):
        state = jax.block_until_ready(step(state))
      with timed("write_ms"):
        finish()
  return {name: round(statistics.median(t), 1) for name, t in times.items()}


def main(arguments: Sequence[str]) -> None:
  """Measure each size, and print the numbers."""
  del arguments
  found = {}
  for megabytes in _MEGABYTES.value:
    found[megabytes] = _measure(float(megabytes))
    print(f"{megabytes} MB: {found[megabytes]}", flush=True)
  print(json.dumps(found))


if __name__ == "__main__":
  app.run(main)
