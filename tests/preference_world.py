"""Pairs of right and wrong solutions, and trainers of them."""

import dataclasses
import functools
import json

import jax
import numpy as np
import test_sft
import tiny

from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.data import pairs as pairs_lib
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.training import sft
from jaxrl_async.training import train_state

RIGHT = "yes"


def right(item, rng):
  """A completion that a test may change."""
  del item, rng
  return RIGHT


def counting(count, seed=0):
  """Pairs: counting up is better, and counting down is worse."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(count):
    first, p = int(rng.integers(20, 80)), int(rng.integers(1, 3))
    prompt = np.full(p, first, np.int32)
    chosen, rejected = (
      worked_examples_lib.joined(
        [
          (prompt, False),
          ((first + sign * np.arange(1, 1 + n)).astype(np.int32), True),
        ]
      )
      for sign, n in ((1, rng.integers(1, 6)), (-1, rng.integers(1, 6)))
    )
    made.append(pairs_lib.Pair(chosen=chosen, rejected=rejected))
  return made


def trainer(
  section,
  rows,
  objective,
  *,
  rows_per_microbatch=4,
  shape=None,
  model=tiny.MODEL,
):
  """A trainer of rows on one device, or on a mesh of this shape."""
  shape = shape or MeshShape()
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  made = sft.SupervisedTrainer(
    section,
    objective=objective,
    mesh=mesh,
    policy=train_state.ModelSettings(model=model, optimizer=section.optimizer),
    forward=dataclasses.replace(test_sft.FORWARD, model=model),
    rows_per_microbatch=rows_per_microbatch,
    max_bad_updates=3,
    seed=0,
  )
  made.use(rows)
  return made


def section_of(**fields):
  """A section for few pairs and a large learning rate."""
  fields = {"num_steps": 20, "rows_per_batch": 4, "eval_every": 0} | fields
  return sections.PreferenceSection(
    optimizer=sections.OptimizerSection(learning_rate=1e-2), **fields
  )


def placed(params, trainer_):
  """Parameters that a trainer may donate, where it wants them."""
  shardings = jax.tree.map(
    lambda x: x.sharding, trainer_.abstract_state().policy.params
  )
  copied = jax.tree.map(functools.partial(np.array, copy=True), params)
  return mesh_lib.put(copied, shardings)


def sums(path, count=60):
  """Writes rows whose better sums say yes and worse ones no; returns the URI.

  So what is preferred holds for other questions too.
  """
  lines = []
  for i in range(count):
    a, b = i % 10, i // 10
    is_right = bool(i % 2)
    lines.append(
      {
        "prompt": f"{a}+{b}",
        "chosen": f"yes {a + b}",
        "rejected": f"no {a + b + 1}",
        "steps": [f"{a}+{b}", "yes" if is_right else "no"],
        "labels": [True, is_right],
        "completion": f"yes {a + b}" if is_right else f"no {a + b}",
      }
    )
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return f"jsonl:{path}"
