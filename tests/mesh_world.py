"""A small trainer on a mesh of any shape, and two train steps of it."""

import dataclasses

import jax
import numpy as np
import test_train_step
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import trainer as trainer_lib

# Eight devices can share each of its axes, and rows and their tokens too.
MODEL = dataclasses.replace(
  tiny.MODEL, vocab_size=96, num_heads=8, num_kv_heads=8
)
NUM_STEPS = 2


def make_trainer(shape, *, rules=mesh_lib.TRAIN_RULES):
  """A trainer without parameters, on the first devices."""
  return trainer_lib.Trainer(
    mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
    rules=rules,
    # AdamW divides by a root: with a small eps the sign of a gradient that is
    # all rounding error would decide a whole step.
    models=tiny.policy_settings(
      MODEL,
      sections.OptimizerSection(learning_rate=1e-2, weight_decay=0.1, eps=1e-3),
    ),
    forward=dataclasses.replace(test_train_step.FORWARD, model=MODEL),
    loss=test_train_step.LOSS,
    stages=test_train_step.STAGES,
    batch=packing.BatchSettings(
      tokens_per_row=16,
      rows_per_microbatch=8,
      num_minibatches=2,
      min_microbatches=1,
      advantages=test_train_step.ADVANTAGES,
    ),
    num_steps=NUM_STEPS,
    decay=1.0,
    rollout_dtype="float32",
    busy=metrics_lib.BusyClock(),
  )


def train(trainer):
  """Starts from the tiny parameters; gives the arrays of each step."""
  params = jax.tree.map(np.array, tiny.params(model=MODEL))
  trainer.start({train_state.POLICY: params})
  version = test_train_step.VERSION
  steps = []
  for step in range(NUM_STEPS):
    groups = test_train_step.groups(seed=step)
    sums = trainer.step(version + step, trainer.prepare(groups)).sums
    steps.append({name: np.asarray(x) for name, x in sums.items()})
  return steps
