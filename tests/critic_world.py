"""A trainer with a critic, for tests."""

import dataclasses

import jax
import numpy as np
import test_train_step
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import episodes
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib

POLICY, CRITIC = train_state.POLICY, train_state.CRITIC
OWN, SHARED = sections.CriticTrunk
# Eight devices can share each of its axes.
MODEL = dataclasses.replace(
  tiny.MODEL, vocab_size=96, num_heads=8, num_kv_heads=8
)
# A small eps would make steps of rounding errors.
OPTIMIZER = sections.OptimizerSection(learning_rate=1e-2, eps=1e-3)
GAMMA, LAMBDA, DECAY, CLIP, COEF = 0.95, 0.9, 0.9, 0.1, 0.5


def settings(trunk, optimizer=OPTIMIZER):
  """Of the policy and its critic."""
  critic = train_state.ModelSettings(
    model=dataclasses.replace(MODEL, has_scalar_head=True),
    optimizer=optimizer,
    is_trainable=train_state.is_critic_weight,
    trunk=trunk,
  )
  policy = train_state.ModelSettings(model=MODEL, optimizer=optimizer)
  return {POLICY: policy, CRITIC: critic}


def first_params(trunk):
  """Of both models; the critic's head is not zero."""
  params = jax.tree.map(np.array, tiny.params(model=MODEL))
  critic = critic_lib.first_params(settings(trunk)[CRITIC], params)
  head = np.random.default_rng(3).normal(0, 0.3, MODEL.model_dim)
  return {
    POLICY: params,
    CRITIC: {**critic, train_state.VALUE_HEAD: head.astype(np.float32)},
  }


def make_trainer(
  trunk,
  shape=mesh_lib.ONE,
  *,
  warmup_steps=0,
  minibatches=2,
  epochs=1,
  rows=8,
  loss=test_train_step.LOSS,
  whole_loss=None,
):
  """A trainer that has been started; `whole_loss` has that of the values."""
  stage = critic_lib.gae_stage(
    gamma=GAMMA,
    gae_lambda=LAMBDA,
    is_whitened=True,
    normalize_decay=DECAY,
    kl_coef=0.0,
    kl_clip=0.0,
  )
  trainer = trainer_lib.Trainer(
    mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
    models=settings(trunk),
    forward=dataclasses.replace(test_train_step.FORWARD, model=MODEL),
    loss=whole_loss or critic_lib.with_value_loss(loss, coef=COEF, clip=CLIP),
    stages=[train_step.PROXIMAL_STAGE, critic_lib.value_stage(trunk), stage],
    batch=packing.BatchSettings(
      tokens_per_row=16,
      rows_per_microbatch=rows,
      num_minibatches=minibatches,
      num_epochs=epochs,
      min_microbatches=1,
      advantages=lambda groups: np.zeros(
        sum(len(group.trajectories) for group in groups)
      ),
      fields=lambda trajectories: episodes.fields(
        trajectories, shaped=lambda x: x, token_scale=1.0
      ),
    ),
    critic=sections.CriticSection(
      trunk=trunk, warmup_steps=warmup_steps, normalize_decay=DECAY
    ),
    num_steps=8,
    decay=1.0,
    rollout_dtype="float32",
    busy=metrics_lib.BusyClock(),
  )
  trainer.start(first_params(trunk))
  return trainer


def train(trainer, num_steps=2):
  """The pending metrics of each step, from version `VERSION` on."""
  return [
    trainer.step(
      test_train_step.VERSION + step,
      trainer.prepare(test_train_step.groups(seed=step)),
    )
    for step in range(num_steps)
  ]
