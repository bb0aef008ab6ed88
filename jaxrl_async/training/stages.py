"""Stages of a train step beside the proximal forward pass.

Each adds to the batch what some losses need; `train_step.Stage` says how.
"""

import dataclasses
import functools

import jax
from jax import numpy as jnp
from jaxtyping import ScalarLike

from jaxrl_async.algorithms import corrections
from jaxrl_async.algorithms import distillation
from jaxrl_async.algorithms import gae
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step


def reference_stage() -> train_step.Stage:
  """Return the stage that adds the logprobs under the reference.

  The reference may be in host memory. It is then on the devices only while the
  stage runs.
  """

  def run(given: train_step.Given) -> train_step.Fields:
    settings, params, batch, _ = given
    name = train_state.REFERENCE
    model = train_state.on_device(params[name])
    logprobs = train_step.batch_logprobs(settings[name], model, batch)
    return {objectives.REFERENCE: logprobs}

  return train_step.Stage(name="reference", fields=run)


def base_as_reference_stage() -> train_step.Stage:
  """Return the stage that adds the logprobs under the policy's base."""

  def run(given: train_step.Given) -> train_step.Fields:
    settings, params, batch, _ = given
    policy = settings[train_state.POLICY]
    forward = dataclasses.replace(policy, model=policy.model.base)
    base = lora_lib.base(params[train_state.POLICY])
    return {
      objectives.REFERENCE: train_step.batch_logprobs(forward, base, batch)
    }

  return train_step.Stage(name="reference", fields=run)


def distillation_stage(coef: ScalarLike) -> train_step.Stage:
  """Return the stage that adds what a teacher says to the advantages.

  See `distillation.advantages`. The teacher is compared with the proximal
  policy if `train_step.PROXIMAL_STAGE` has run, and otherwise with the behavior
  policy, whose logprobs are older by the staleness of the token. The stage has
  to come after `train_step.PROXIMAL_STAGE`, if that runs, and after every stage
  that makes advantages.
  """

  def run(given: train_step.Given) -> train_step.Fields:
    settings, params, batch, _ = given
    teacher = train_step.batch_logprobs(
      settings[train_state.TEACHER], params[train_state.TEACHER], batch
    )
    policy = batch.fields.get(objectives.PROXIMAL, batch.behavior_logprobs)
    added = distillation.advantages(teacher, policy, batch.loss_mask, coef=coef)
    return {
      objectives.TEACHER: teacher,
      "advantages": batch.advantages + added,
    }

  return train_step.Stage(name="teacher", fields=run)


def second_moment_stage(bound: ScalarLike) -> train_step.Stage:
  """Return the stage that says which tokens M2PO learns from, as 0 and 1.

  It has to come after `train_step.PROXIMAL_STAGE`.
  """
  within = jax.vmap(
    functools.partial(corrections.within_second_moment, bound=bound)
  )

  def run(given: train_step.Given) -> train_step.Fields:
    batch = given.batch
    kept = within(
      batch.fields[objectives.PROXIMAL],
      batch.behavior_logprobs,
      batch.advantages,
      batch.loss_mask,
    )
    return {objectives.WITHIN_SECOND_MOMENT: kept.astype(jnp.float32)}

  return train_step.Stage(name="second_moment", fields=run)


def kl_in_reward_stage(
  *, coef: ScalarLike, clip: ScalarLike, is_whitened: bool
) -> train_step.Stage:
  r"""Return the stage that takes the divergence off the advantages.

  A_t = A - coef sum_{u >= t} clip(log pi_behav(u) - log pi_ref(u))

  This is eq. 8 of REINFORCE++, arXiv:2501.03262, for any advantage A of a
  trajectory. The stage has to come after that of the reference.
  """

  def run(given: train_step.Given) -> train_step.Fields:
    batch = given.batch
    mask = batch.loss_mask
    rewards = gae.kl_rewards(
      batch.behavior_logprobs,
      batch.fields[objectives.REFERENCE],
      mask,
      coef=coef,
      clip=clip,
    )
    nothing = jnp.zeros_like(rewards)
    to_come = gae.generalized_advantages(
      rewards,
      nothing,
      nothing,
      mask,
      batch.segment_ids,
      gamma=1.0,
      gae_lambda=1.0,
    )
    advantages = batch.advantages + to_come
    return {
      "advantages": gae.whitened(advantages, mask)
      if is_whitened
      else advantages
    }

  return train_step.Stage(name="advantages", fields=run)
