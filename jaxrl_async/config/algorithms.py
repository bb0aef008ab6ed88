"""Settings of published methods, for `config.algorithm` in a config file.

    config.algorithm = algorithms.dapo(group_size=16, groups_per_step=64)

Each function returns the section with the choices of its paper. Every other
field has its default, or the value that is passed: sizes and staleness belong
to the run, not to the method. docs/algorithms.md has the equations, and says
where they differ from the papers'.

All of them correct for stale tokens by the behavior weight of AReaL, which is 1
in a run with max_staleness=0, unless the method has a correction of its own.
"""

from typing import Any

from jaxrl_async.config import algorithm_section

_NO_CORRECTION = algorithm_section.BehaviorWeightLevel.NONE
_TRUNCATE = algorithm_section.BehaviorWeightCapMode.TRUNCATE


def _section(
  choices: dict[str, Any], changes: dict[str, Any]
) -> algorithm_section.AlgorithmSection:
  return algorithm_section.AlgorithmSection(**{**choices, **changes})


def areal(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return decoupled PPO as in AReaL, arXiv:2505.24298; the defaults."""
  return _section({}, changes)


def grpo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return GRPO, arXiv:2402.03300, with its divergence from a reference."""
  choices = {
    "aggregation": algorithm_section.Aggregation.SEQUENCE_MEAN,
    "kl_coef": 0.04,
  }
  return _section(choices, changes)


def dr_grpo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return Dr. GRPO, arXiv:2503.20783: no division by lengths or deviations."""
  choices = {
    "aggregation": algorithm_section.Aggregation.SEQUENCE_SUM,
    "advantage_scale": algorithm_section.AdvantageScale.NONE,
  }
  return _section(choices, changes)


def dapo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return DAPO, arXiv:2503.14476; its penalty for length is a reward.

  That is `overlong` of `task.rewards`.
  """
  choices = {"clip_high": 0.28, "filter_zero_std": True}
  return _section(choices, changes)


def ppo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return PPO, arXiv:1707.06347, whose ratio is to the behavior policy.

  The other sections decouple the two policies. This one is for comparison.
  """
  choices = {
    "loss": "coupled_ppo",
    "behavior_weight_level": _NO_CORRECTION,
    "proximal": algorithm_section.ProximalMode.REUSE,
  }
  return _section(choices, changes)


def ppo_gae(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return decoupled PPO with a critic, arXiv:1506.02438 and 1707.06347.

  The critic has the defaults of `config.critic`.
  """
  choices = {
    "advantage": "gae",
    "advantage_scale": algorithm_section.AdvantageScale.BATCH_STD,
  }
  return _section(choices, changes)


def gspo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return GSPO, arXiv:2507.18071, with the ratio of a whole trajectory."""
  choices = {
    "loss": "gspo",
    "clip_low": 3e-4,
    "clip_high": 4e-4,
    "aggregation": algorithm_section.Aggregation.SEQUENCE_MEAN,
  }
  return _section(choices, changes)


def cispo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return CISPO, arXiv:2506.13585, whose ratio has an upper bound only.

  The paper does not say which. 5 is from arXiv:2510.13786.
  """
  choices = {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}
  return _section(choices, changes)


def sapo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return SAPO, arXiv:2511.20347, with a gate in place of the clip."""
  choices = {
    "loss": "sapo",
    "aggregation": algorithm_section.Aggregation.SEQUENCE_MEAN,
  }
  return _section(choices, changes)


def rloo(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return RLOO, arXiv:2402.14740: REINFORCE with a baseline of the others."""
  choices = {
    "loss": "reinforce",
    "proximal": algorithm_section.ProximalMode.REUSE,
    "aggregation": algorithm_section.Aggregation.SEQUENCE_SUM,
    "advantage": "leave_one_out",
    "advantage_scale": algorithm_section.AdvantageScale.NONE,
  }
  return _section(choices, changes)


def reinforce_pp(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return REINFORCE++, arXiv:2501.03262, normalised over the batch.

  The paper's variant with a baseline has advantage="group", kl_in_reward=False
  and kl_estimator=KlEstimator.K2.
  """
  choices = {
    "advantage": "batch",
    "advantage_scale": algorithm_section.AdvantageScale.BATCH_STD,
    "kl_coef": 0.01,
    "kl_estimator": algorithm_section.KlEstimator.K1,
    "kl_in_reward": True,
  }
  return _section(choices, changes)


def tis(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return decoupled PPO whose weights are truncated at 2.

  Truncated importance sampling against the mismatch of engine and trainer:
  https://fengyao.notion.site/off-policy-rl
  """
  choices = {
    "behavior_weight_cap": 2.0,
    "behavior_weight_cap_mode": _TRUNCATE,
  }
  return _section(choices, changes)


def icepop(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return decoupled PPO with the two bounds of IcePop, arXiv:2510.18855."""
  choices = {"behavior_weight_floor": 0.5, "behavior_weight_cap": 5.0}
  return _section(choices, changes)


def m2po(**changes: Any) -> algorithm_section.AlgorithmSection:
  """Return M2PO, arXiv:2510.01161, whose only bound is a second moment.

  The clip stays, and bounds how far one train step moves the policy.
  """
  choices = {"second_moment_bound": 0.04, "behavior_weight_cap": 1e6}
  return _section(choices, changes)
