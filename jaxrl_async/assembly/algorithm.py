"""The algorithm that a config describes: advantages, stages and the loss."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import advantages as advantages_lib
from jaxrl_async.algorithms import budget_curves
from jaxrl_async.algorithms import losses
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import algorithm_section
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import episodes
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import stages as stages_lib
from jaxrl_async.training import train_step


def policy_loss(config: sections.Config) -> objectives.Loss:
  """Return the loss that the config describes, with its penalties.

  Raises:
    ConfigError: `algorithm.loss` names a function that cannot be imported.
  """
  section, critic = config.algorithm, config.critic
  average = objectives.aggregate(
    section.aggregation,
    section.aggregation_tokens or config.rollout.max_completion_tokens,
  )
  if section.loss in algorithm_section.LOSSES:
    loss = objectives.policy_loss(
      _objective(section),
      objectives.behavior_correction(
        level=section.behavior_weight_level,
        floor=section.behavior_weight_floor,
        cap=section.behavior_weight_cap,
        cap_mode=section.behavior_weight_cap_mode,
        has_second_moment=section.second_moment_bound > 0,
        sequence_kl_bound=section.sequence_kl_bound,
      ),
      average,
      proximal=objectives.PROXIMAL_MODES[section.proximal],
      is_coupled=section.loss == "coupled_ppo",
    )
  else:
    loss = _imported("algorithm.loss", section.loss)
  loss = objectives.with_penalties(
    loss,
    average,
    kl_coef=section.kl_coef,
    kl_estimator=section.kl_estimator,
    kl_in_reward=section.kl_in_reward,
    entropy_coef=section.entropy_coef,
  )
  if section.advantage != "gae":
    return loss
  return critic_lib.with_value_loss(
    loss, coef=critic.value_coef, clip=critic.value_clip
  )


def _objective(section: sections.AlgorithmSection) -> objectives.TokenObjective:
  """Return the objective of a loss that comes with the project."""
  clip = {"clip_low": section.clip_low, "clip_high": section.clip_high}
  ppo = functools.partial(
    losses.ppo_objective, **clip, dual_clip=section.dual_clip
  )
  known: dict[str, objectives.TokenObjective] = {
    "ppo": objectives.per_token(ppo),
    "coupled_ppo": objectives.per_token(ppo),
    "gspo": objectives.gspo(**clip),
    "cispo": objectives.per_token(
      functools.partial(losses.cispo_objective, **clip)
    ),
    "sapo": objectives.per_token(
      functools.partial(
        losses.sapo_objective,
        positive=section.sapo_positive,
        negative=section.sapo_negative,
      )
    ),
    "reinforce": objectives.per_token(losses.reinforce_objective),
  }
  return known[section.loss]


def stages(setup: setup_lib.Setup) -> list[train_step.Stage]:
  """Return the stages that the loss needs, in their order."""
  section = setup.config.algorithm
  critic = setup.config.critic
  found = []
  if section.proximal is sections.ProximalMode.RECOMPUTE:
    found.append(train_step.PROXIMAL_STAGE)
  if section.kl_coef != 0:
    found.append(
      stages_lib.reference_stage()
      if setup.model.lora is None
      else stages_lib.base_as_reference_stage()
    )
  kl_coef = section.kl_coef if section.kl_in_reward else 0.0
  if section.advantage == "gae":
    found.append(critic_lib.value_stage(critic.trunk))
    found.append(
      critic_lib.gae_stage(
        gamma=section.gamma,
        gae_lambda=section.gae_lambda,
        is_whitened=_is_whitened(section),
        normalize_decay=critic.normalize_decay,
        kl_coef=kl_coef,
        kl_clip=section.kl_reward_clip,
      )
    )
  elif kl_coef != 0:
    found.append(
      stages_lib.kl_in_reward_stage(
        coef=kl_coef,
        clip=section.kl_reward_clip,
        is_whitened=_is_whitened(section),
      )
    )
  if section.teacher:
    found.append(stages_lib.distillation_stage(section.distill_coef))
  if section.second_moment_bound != 0:
    # It needs the sign of the advantages as they will be.
    found.append(stages_lib.second_moment_stage(section.second_moment_bound))
  return found


def _has_token_advantages(section: sections.AlgorithmSection) -> bool:
  """Return whether a stage makes the advantages that are learned from."""
  return section.advantage == "gae" or section.kl_in_reward


def _is_whitened(section: sections.AlgorithmSection) -> bool:
  """Return whether that stage divides them by their deviation."""
  return (
    section.advantage in algorithm_section.ADVANTAGES
    and section.advantage_scale is sections.AdvantageScale.BATCH_STD
  )


def advantages(
  section: sections.AlgorithmSection,
  *,
  budgets: budgets_lib.Budgets | None = None,
  longest: int = 0,
) -> packing.MakeAdvantages:
  """Return the function that makes advantages of groups, on the host.

  Members are compared with each other, not their branches: each branch has the
  advantage of its member. Those of gae are 0, because a stage replaces them. So
  are those of none.

  Args:
    section: of the config.
    budgets: where thoughts were cut. Their parts are then compared by
      `advantages.budget_advantages`.
    longest: the most tokens of a completion, L_max.

  Raises:
    ConfigError: `algorithm.advantage` names a function that cannot be imported.
  """
  own = None
  scale = section.advantage_scale
  if _has_token_advantages(section) and _is_whitened(section):
    scale = sections.AdvantageScale.NONE  # the stage divides
  if section.advantage not in algorithm_section.ADVANTAGES:
    own = _imported("algorithm.advantage", section.advantage)

  def of_groups(groups: Sequence[types.RolloutGroup]) -> packing.Advantages:
    if budgets is not None:
      return _of_budgets(groups, budgets.budgets, longest, section)
    made = of_members([group.of_members() for group in groups])
    return _of_branches(made, groups)

  def of_members(groups: Sequence[types.RolloutGroup]) -> packing.Advantages:
    trajectories = [t for group in groups for t in group.trajectories]
    scores = np.array([t.score for t in trajectories], np.float64)
    rewards = _shaping(section)(scores)
    group_ids = np.repeat(
      np.arange(len(groups)), [len(g.trajectories) for g in groups]
    )
    if section.advantage in ("gae", "none"):
      return np.zeros_like(rewards)
    if section.advantage == "segment":
      return advantages_lib.segment_advantages(
        rewards,
        _token_scores(trajectories, section.reward_scale),
        [t.loss_mask for t in trajectories],
        group_ids,
        len(groups),
        scale=scale,
      )
    if own is not None:
      made = own(rewards, group_ids, len(groups), trajectories)
      return _checked(made, trajectories)
    return advantages_lib.relative_advantages(
      rewards,
      group_ids,
      len(groups),
      baseline=section.advantage,
      scale=scale,
    )

  return of_groups


def _of_budgets(
  groups: Sequence[types.RolloutGroup],
  budgets: Sequence[int],
  longest: int,
  section: sections.AlgorithmSection,
) -> packing.Advantages:
  """Return the advantages of all tokens of thoughts that were cut.

  Those of a completion's own answer belong to the last part of its thought.
  Forced answers have the advantage 0, and are not trained
  (`packing.learned`).
  """
  weights = budget_curves.weights(budgets, longest)
  members = [branches for group in groups for branches in group.branches()]
  scores = np.zeros((len(members), len(weights)))
  for row, (first, *forced) in zip(scores, members, strict=True):
    row[:] = first.score
    for i, t in enumerate(forced):
      assert t.reward is not None and t.reward.token_scores is not None
      row[i] = t.reward.token_scores[t.num_completion_tokens - 1]
  made = advantages_lib.budget_advantages(
    _shaping(section)(scores),
    weights,
    np.repeat(np.arange(len(groups)), [len(g.branches()) for g in groups]),
    len(groups),
  )
  found = []
  for of_parts, (first, *forced) in zip(made, members, strict=True):
    # A token after a cut that was not made is one of the last part.
    number = np.cumsum(first.loss_mask)
    at = np.minimum(np.searchsorted(budgets, number), len(forced))
    found.append(np.where(first.loss_mask, of_parts[at], np.float32(0)))
    found += [np.zeros(len(t.tokens), np.float32) for t in forced]
  return found


def _of_branches(
  made: packing.Advantages, groups: Sequence[types.RolloutGroup]
) -> packing.Advantages:
  """Return the advantages of all trajectories, from those of the members."""
  members = [branches for group in groups for branches in group.branches()]
  if isinstance(made, np.ndarray):
    return np.repeat(made, [len(branches) for branches in members])
  found = []
  for values, branches in zip(made, members, strict=True):
    ends = np.cumsum([len(t.tokens) for t in branches])
    found += np.split(values, ends[:-1])
  return found


def reads_token_scores(section: sections.AlgorithmSection) -> bool:
  """Return whether the scores that rewards give to tokens are learned from.

  A loss or an advantage of one's own may read them.
  """
  return (
    section.advantage in ("segment", "gae")
    or section.advantage not in algorithm_section.ADVANTAGES
    or section.loss not in algorithm_section.LOSSES
  )


def _token_scores(
  trajectories: Sequence[types.Trajectory], scale: float
) -> list[dict[int, float]]:
  """Return the scores of each trajectory's tokens, by position."""
  rewards = [t.reward for t in trajectories]
  return [
    {at: scale * x for at, x in (r and r.token_scores or {}).items()}
    for r in rewards
  ]


def _checked(
  made: Any, trajectories: Sequence[types.Trajectory]
) -> packing.Advantages:
  """Return the advantages that a user's function has made.

  Args:
    made: a number for each trajectory, or an array for each, with a number for
      each token that the policy wrote.
    trajectories: in the same order.

  Raises:
    ValueError: it is neither, or a number is not finite.
  """
  found = [np.asarray(x, np.float32) for x in made]
  counts = [t.num_completion_tokens for t in trajectories]
  shapes = [x.shape for x in found]
  is_of_tokens = shapes == [(count,) for count in counts]
  if not is_of_tokens and shapes != [()] * len(counts):
    raise ValueError(
      f"algorithm.advantage returned arrays of the shapes {shapes[:8]}, and"
      f" there has to be a number for each of {len(counts)} trajectories, or"
      " an array for each with a number for each token of its completion, here"
      f" {counts[:8]}"
    )
  if not all(np.isfinite(x).all() for x in found):
    raise ValueError("algorithm.advantage returned numbers that are not finite")
  if not is_of_tokens:
    return np.array(found, np.float32)
  spread = [np.zeros(len(t.tokens), np.float32) for t in trajectories]
  for values, trajectory, own in zip(spread, trajectories, found, strict=True):
    values[trajectory.loss_mask] = own
  return spread


def fields(section: sections.AlgorithmSection) -> packing.MakeFields:
  """Return the function that makes the further fields of a batch."""
  if section.advantage != "gae":
    return packing.reward_fields
  return functools.partial(
    episodes.fields, shaped=_shaping(section), token_scale=section.reward_scale
  )


def _shaping(
  section: sections.AlgorithmSection,
) -> Callable[[np.ndarray], np.ndarray]:
  return functools.partial(
    advantages_lib.shaped,
    bias=section.reward_bias,
    scale=section.reward_scale,
    clip=section.reward_clip,
  )


def check(section: sections.AlgorithmSection) -> None:
  """Import the functions that a config names, if it names any.

  Raises:
    ConfigError: there is no such function.
  """
  for field in ("loss", "advantage"):
    name = getattr(section, field)
    if ":" in name:
      _imported(f"algorithm.{field}", name)


def _imported(path: str, name: str) -> Callable[..., Any]:
  """Return the function that a field names as module:function."""
  try:
    return user_code.function(name, "it is not module:function")
  except user_code.UserCodeError as error:
    raise sections.ConfigError(f"{path}: {error}") from error
