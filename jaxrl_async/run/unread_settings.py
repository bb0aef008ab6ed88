"""Settings that nothing reads because of the other settings.

A setting that was changed and has no effect is refused, so that nobody takes
the result for its own. The defaults always pass.
"""

from collections.abc import Iterator
import enum
from typing import Any

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import field_types
from jaxrl_async.config import sections
from jaxrl_async.storage import config_json

# Losses that clip a ratio, and those that have a second clip.
_CLIPPED = ("ppo", "coupled_ppo", "gspo", "cispo")
_DUAL = ("ppo", "coupled_ppo")


def check(config: sections.Config) -> None:
  """Check that every setting that was changed is read by something.

  Raises:
    ConfigError: one line that names the field, and the one that leaves it
      without an effect.
  """
  unread = reasons(config)
  found = field_types.leaves(config)
  usual = field_types.leaves(sections.Config())
  for (path, _, value), (_, _, default) in zip(found, usual, strict=True):
    sections.require(
      path not in unread or value == default,
      path,
      f"{_shown(value)} has no effect, because {unread.get(path)}; leave it at"
      f" {_shown(default)}",
    )


def reasons(config: sections.Config) -> dict[str, str]:
  """Return why nothing reads a field, by the path of each such field."""
  found: dict[str, str] = {}
  for prefix, names, is_read, reason in _rules(config):
    for name in names.split():
      if not is_read:
        found.setdefault(f"{prefix}.{name}", reason)
  return found


def _shown(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:g}"
  if isinstance(value, enum.Enum):
    return value.value
  return sections.shown(config_json.plain(value))


def _rules(config: sections.Config) -> Iterator[tuple[str, str, bool, str]]:
  """Yield a section, fields, whether they are read, and else why not.

  Of several reasons the first counts.
  """
  for rule in _of_algorithm(config.algorithm):
    yield "algorithm", *rule
  advantage = config.algorithm.advantage
  usual = sections.Config()
  of_critic = [path for path, _, _ in field_types.leaves(usual.critic)]
  yield (
    "critic",
    " ".join(of_critic),
    advantage == "gae",
    f"there is no critic without gae, and {_named(advantage)}",
  )
  # The critic's rate has the decay of the policy's.
  is_decayed = advantage == "gae" and not config.critic.optimizer.rate_schedule
  for name in ("warm_start", "preference", "train", "critic"):
    path = f"{name}.optimizer"
    has_own = bool(getattr(config, name).optimizer.rate_schedule)
    reason = f"{path}.rate_schedule says how the rate changes"
    yield path, "warmup_steps", not has_own, reason
    if name != "critic":
      is_read = not has_own or (name == "train" and is_decayed)
      yield name, "decay", is_read, reason
  yield (
    "staleness_control",
    "min_ess max_clip_frac max_left_out_frac max_wait_frac patience",
    config.staleness_control.maximum != 0,
    "the bound does not move (staleness_control.maximum is 0)",
  )
  yield (
    "run",
    "keep_trajectories",
    config.run.record_schedule,
    "a replay that reads them needs the schedule too (run.record_schedule)",
  )


def _named(advantage: str) -> str:
  return f"algorithm.advantage is {advantage[:60]}"


def _of_algorithm(
  section: algorithm_section.AlgorithmSection,
) -> Iterator[tuple[str, bool, str]]:
  """Yield fields of the algorithm, whether they are read, and else why not."""
  loss = f"{sections.shown(section.loss)} (algorithm.loss)"
  advantage = _named(section.advantage)
  level = section.behavior_weight_level
  is_known = section.loss in algorithm_section.LOSSES
  is_in_loss = section.kl_coef != 0 and not section.kl_in_reward
  yield from (
    (
      "clip_low clip_high",
      section.loss in _CLIPPED,
      f"{loss} has no clip, as {', '.join(_CLIPPED)} have",
    ),
    (
      "dual_clip",
      section.loss in _DUAL,
      f"{loss} has no second clip, as {', '.join(_DUAL)} have",
    ),
    (
      "sapo_positive sapo_negative",
      section.loss == "sapo",
      f"{loss} has no gate, as sapo has",
    ),
    (
      "behavior_weight_level behavior_weight_floor behavior_weight_cap"
      " behavior_weight_cap_mode second_moment_bound sequence_kl_bound",
      is_known,
      f"{loss} makes its own corrections",
    ),
    (
      "behavior_weight_floor behavior_weight_cap behavior_weight_cap_mode",
      level is not sections.BehaviorWeightLevel.NONE,
      "there is no weight to bound (algorithm.behavior_weight_level is none)",
    ),
    (
      "aggregation",
      is_known or is_in_loss or section.entropy_coef != 0,
      f"{loss} makes its own average, and the loss has no penalty",
    ),
    (
      "aggregation_tokens",
      section.aggregation is sections.Aggregation.SEQUENCE_SUM,
      f"{section.aggregation.value} (algorithm.aggregation) divides by no"
      " constant, as sequence_sum does",
    ),
    (
      "gamma gae_lambda",
      section.advantage == "gae",
      f"only gae reads it, and {advantage}",
    ),
    (
      "reward_bias reward_scale reward_clip",
      section.advantage != "none",
      f"rewards are not used ({advantage})",
    ),
    (
      "kl_estimator kl_in_reward reference_every reference_decay"
      " reference_offload",
      section.kl_coef != 0,
      "there is no reference (algorithm.kl_coef is 0)",
    ),
    (
      "kl_reward_clip",
      section.kl_in_reward,
      "no divergence is in the reward (algorithm.kl_in_reward is False)",
    ),
    (
      "reference_decay",
      section.reference_every != 0,
      "the reference does not move (algorithm.reference_every is 0)",
    ),
  )
