"""Settings of published methods, for `config.algorithm` in a config file.

    config.algorithm = algorithms.dapo(group_size=16, groups_per_step=64)

Each function returns the section with the choices of its paper. Every other
field has its default, or the value that is passed: sizes and staleness belong
to the run, not to the method. docs/reference/algorithms.md has the equations,
and says where they differ from the papers'.

All of them correct for stale tokens by the behavior weight of AReaL, which is 1
in a run with max_staleness=0, unless the method has a correction of its own.
"""

from collections.abc import Callable
import functools
from typing import Any

from jaxrl_async.config import algorithm_section

_SEQUENCE_MEAN = algorithm_section.Aggregation.SEQUENCE_MEAN
_SEQUENCE_SUM = algorithm_section.Aggregation.SEQUENCE_SUM
_UNSCALED = algorithm_section.AdvantageScale.NONE
_BATCH_STD = algorithm_section.AdvantageScale.BATCH_STD
_REUSE = algorithm_section.ProximalMode.REUSE


def _method(
  **choices: Any,
) -> Callable[..., algorithm_section.AlgorithmSection]:
  return functools.partial(algorithm_section.AlgorithmSection, **choices)


# Decoupled PPO as in AReaL, arXiv:2505.24298; the defaults.
areal = _method()

# GRPO, arXiv:2402.03300, with its divergence from a reference.
grpo = _method(aggregation=_SEQUENCE_MEAN, kl_coef=0.04)

# Dr. GRPO, arXiv:2503.20783: no division by lengths or deviations.
dr_grpo = _method(aggregation=_SEQUENCE_SUM, advantage_scale=_UNSCALED)

# DAPO, arXiv:2503.14476. Its penalty for length is a reward: `overlong` of
# `task.rewards`.
dapo = _method(clip_high=0.28, filter_zero_std=True)

# PPO, arXiv:1707.06347, whose ratio is to the behavior policy. The other
# sections decouple the two policies. This one is for comparison.
ppo = _method(
  loss="coupled_ppo",
  behavior_weight_level=algorithm_section.BehaviorWeightLevel.NONE,
  proximal=_REUSE,
)

# Decoupled PPO with a critic, arXiv:1506.02438 and 1707.06347. The critic has
# the defaults of `config.critic`.
ppo_gae = _method(advantage="gae", advantage_scale=_BATCH_STD)

# GSPO, arXiv:2507.18071, with the ratio of a whole trajectory.
gspo = _method(
  loss="gspo", clip_low=3e-4, clip_high=4e-4, aggregation=_SEQUENCE_MEAN
)

# CISPO, arXiv:2506.13585, whose ratio has an upper bound only. The paper does
# not say which. 5 is from arXiv:2510.13786.
cispo = _method(loss="cispo", clip_low=1.0, clip_high=4.0)

# SAPO, arXiv:2511.20347, with a gate in place of the clip.
sapo = _method(loss="sapo", aggregation=_SEQUENCE_MEAN)

# RLOO, arXiv:2402.14740: REINFORCE with a baseline of the others.
rloo = _method(
  loss="reinforce",
  proximal=_REUSE,
  aggregation=_SEQUENCE_SUM,
  advantage="leave_one_out",
  advantage_scale=_UNSCALED,
)

# REINFORCE++, arXiv:2501.03262, normalised over the batch. The paper's variant
# with a baseline has advantage="group", kl_in_reward=False and
# kl_estimator=KlEstimator.K2.
reinforce_pp = _method(
  advantage="batch",
  advantage_scale=_BATCH_STD,
  kl_coef=0.01,
  kl_estimator=algorithm_section.KlEstimator.K1,
  kl_in_reward=True,
)

# Decoupled PPO whose weights are truncated at 2. Truncated importance sampling
# against the mismatch of engine and trainer:
# https://fengyao.notion.site/off-policy-rl
tis = _method(
  behavior_weight_cap=2.0,
  behavior_weight_cap_mode=algorithm_section.BehaviorWeightCapMode.TRUNCATE,
)

# Decoupled PPO with the two bounds of IcePop, arXiv:2510.18855.
icepop = _method(behavior_weight_floor=0.5, behavior_weight_cap=5.0)

# M2PO, arXiv:2510.01161, whose only bound is a second moment. The clip stays,
# and bounds how far one train step moves the policy.
m2po = _method(second_moment_bound=0.04, behavior_weight_cap=1e6)
