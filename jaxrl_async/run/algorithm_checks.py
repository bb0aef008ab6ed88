"""Checks of the algorithm's settings against each other, before any import."""

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.run import schedule_checks
from jaxrl_async.run import unread_settings
from jaxrl_async.storage import directories

# Losses whose ratio has the proximal policy as its anchor.
_ANCHORED = ("ppo", "gspo", "cispo", "sapo")
# Advantages that equal rewards in a group do not make 0.
_NOT_OF_GROUPS = ("batch", "gae", "none")


def check(config: sections.Config) -> None:
  """Check that the settings of `algorithm` do not contradict each other.

  Raises:
    ConfigError: one line that names the field, and the other one.
  """
  config = unread_settings.settled(config)
  section = config.algorithm
  _check_name("loss", section.loss, algorithm_section.LOSSES)
  _check_name("advantage", section.advantage, algorithm_section.ADVANTAGES)
  _check_updates(config)
  _check_loss(section)
  _check_corrections(section)
  _check_advantage(section)
  _check_teacher(section)
  _check_gae(config)
  _check_penalty(section)
  _check_equal_rewards(config)
  _check_staleness_control(config)
  _check_reference(config)
  check_optimizers(config)
  sections.require(
    not (section.kl_coef and config.model.lora.adapter),
    "algorithm.kl_coef",
    "the reference of adapters is the model without them, and"
    " model.lora.adapter starts from others; merge that adapter into the model,"
    " or use 0",
  )


def check_optimizers(config: sections.Config) -> None:
  """Check that no update removes more than a whole weight.

  Raises:
    ConfigError: one line that names the field.
  """
  for name in schedule_checks.TRAINED:
    optimizer = getattr(config, name).optimizer
    rate, decay = optimizer.learning_rate, optimizer.weight_decay
    sections.require(
      rate * decay <= 1,
      f"{name}.optimizer.weight_decay",
      f"{decay:g} at a learning rate of {rate:g} removes more than the whole"
      " weight at each update; use less",
    )


def _check_teacher(section: sections.AlgorithmSection) -> None:
  sections.require(
    bool(section.teacher) == (section.distill_coef > 0),
    "algorithm.distill_coef",
    f"{section.distill_coef:g}, and algorithm.teacher is"
    f" {sections.shown(section.teacher)}; set both, or neither",
  )
  sections.require(
    section.advantage != "none" or bool(section.teacher),
    "algorithm.advantage",
    "none leaves nothing to learn without algorithm.teacher; name one, or use"
    " another advantage",
  )
  if section.teacher:
    directories.check_can_read(
      "algorithm.teacher",
      section.teacher,
      "use one in Hugging Face's format, or WORKDIR/params of launch/sft.py",
    )


def _check_name(field: str, name: str, known: tuple[str, ...]) -> None:
  """Check a name, or the form module:function, which is imported later."""
  module, has_colon, function = name.partition(":")
  parts = module.split(".")
  is_function = function.isidentifier() and all(x.isidentifier() for x in parts)
  sections.require(
    name in known or (bool(has_colon) and is_function),
    f"algorithm.{field}",
    f"{sections.shown(name)} is not one of {', '.join(known)}, and not"
    " module:function",
  )


def _check_updates(config: sections.Config) -> None:
  section = config.algorithm
  trajectories = section.group_size * section.groups_per_step
  sections.require(
    trajectories % section.num_minibatches == 0,
    "algorithm.num_minibatches",
    f"{section.num_minibatches} does not divide {trajectories} trajectories of"
    " a train step (group_size * groups_per_step); use numbers that divide",
  )
  sections.require(
    section.num_minibatches <= section.groups_per_step,
    "algorithm.num_minibatches",
    f"{section.num_minibatches} are more than the {section.groups_per_step}"
    " groups of a train step (algorithm.groups_per_step), so that an update"
    " would have fewer trajectories than a group; use fewer",
  )
  step_updates = section.num_minibatches * section.num_epochs
  num_updates = config.train.num_steps * step_updates
  sections.require(
    num_updates <= setting_lib.MAX_INT,
    "train.num_steps",
    f"{config.train.num_steps} of {step_updates} updates each"
    " (algorithm.num_minibatches * algorithm.num_epochs) are more than"
    f" {setting_lib.MAX_INT} updates, which is as far as optimizers count",
  )


def _check_loss(section: sections.AlgorithmSection) -> None:
  sections.require(
    section.proximal is not sections.ProximalMode.REUSE
    or section.num_minibatches * section.num_epochs == 1
    or section.loss not in _ANCHORED,
    "algorithm.proximal",
    "reuse is wrong after the first of"
    f" {section.num_minibatches * section.num_epochs} updates; use"
    " algorithm.num_minibatches=1 with algorithm.num_epochs=1, recompute or"
    " loglinear",
  )
  sections.require(
    section.proximal is not sections.ProximalMode.LOGLINEAR
    or section.loss != "coupled_ppo",
    "algorithm.proximal",
    "loglinear has no effect, because the ratio of coupled_ppo (algorithm.loss)"
    " is to the behavior policy; use reuse, or recompute for more metrics",
  )
  sections.require(
    section.dual_clip == 0 or section.dual_clip > 1,
    "algorithm.dual_clip",
    f"{section.dual_clip:g} would clip every ratio; use more than 1, such as 3,"
    " or 0 for none",
  )


def _check_corrections(section: sections.AlgorithmSection) -> None:
  level = section.behavior_weight_level
  sections.require(
    level is sections.BehaviorWeightLevel.NONE or section.loss != "coupled_ppo",
    "algorithm.behavior_weight_level",
    f"{level.value} would correct twice, because the ratio of coupled_ppo"
    " (algorithm.loss) is to the behavior policy already; use none",
  )
  sections.require(
    section.second_moment_bound == 0
    or section.proximal is sections.ProximalMode.RECOMPUTE,
    "algorithm.second_moment_bound",
    "it needs the proximal logprobs before the first update; use"
    " algorithm.proximal=recompute, or 0",
  )


def _check_staleness_control(config: sections.Config) -> None:
  control, section = config.staleness_control, config.algorithm
  path = "staleness_control.maximum"
  sections.require(
    control.maximum <= section.max_staleness,
    path,
    f"{control.maximum} is more than the hard limit"
    f" {section.max_staleness} (algorithm.max_staleness); use at most that",
  )
  sections.require(
    control.minimum < control.maximum
    or control.minimum == control.maximum == 0,
    "staleness_control.minimum",
    f"{control.minimum} is not below {control.maximum} ({path}), so that"
    " nothing could move; use less, or 0 for both to switch the control off",
  )
  sections.require(
    not control.maximum or section.loss in algorithm_section.LOSSES,
    path,
    f"{sections.shown(section.loss)} (algorithm.loss) does not measure how old"
    " its data is; use 0, or a loss of the project",
  )
  sections.require(
    not control.maximum
    or section.loss == "coupled_ppo"
    or section.behavior_weight_level is not sections.BehaviorWeightLevel.NONE
    or section.second_moment_bound > 0
    or section.sequence_kl_bound > 0,
    path,
    "nothing measures how old the data is where"
    " algorithm.behavior_weight_level is none; use 0, or another level",
  )


def _check_advantage(section: sections.AlgorithmSection) -> None:
  sections.require(
    section.advantage != "batch"
    or section.advantage_scale is not sections.AdvantageScale.STD,
    "algorithm.advantage_scale",
    "std is of a group, and the baseline is that of the batch"
    " (algorithm.advantage); use batch_std or none",
  )
  sections.require(
    section.advantage in algorithm_section.ADVANTAGES[:-1]
    or section.advantage_scale is not sections.AdvantageScale.BATCH_STD,
    "algorithm.advantage_scale",
    "batch_std divides no advantages where algorithm.advantage is"
    f" {section.advantage[:60]}; use none",
  )


def _check_gae(config: sections.Config) -> None:
  """Check the critic, if there is one."""
  section, critic = config.algorithm, config.critic
  if section.advantage != "gae":
    return
  sections.require(
    section.advantage_scale is not sections.AdvantageScale.STD,
    "algorithm.advantage_scale",
    "std is of a group's scores, and gae (algorithm.advantage) has an advantage"
    " for each token; use batch_std or none",
  )
  sections.require(
    critic.trunk is sections.CriticTrunk.SHARED or not config.model.lora.rank,
    "critic.trunk",
    "a second model would be trained as a whole beside adapters"
    " (model.lora.rank); use shared, or a rank of 0",
  )
  sections.require(
    critic.warmup_steps < config.train.num_steps,
    "critic.warmup_steps",
    f"in {critic.warmup_steps} steps the policy does not learn, and"
    f" train.num_steps is {config.train.num_steps}; use fewer",
  )


def _check_penalty(section: sections.AlgorithmSection) -> None:
  """Check where the divergence from the reference goes."""
  sections.require(
    not section.kl_in_reward or section.kl_estimator is sections.KlEstimator.K1,
    "algorithm.kl_estimator",
    f"{section.kl_estimator.value} would be biased in the reward"
    " (algorithm.kl_in_reward); use k1",
  )


def _check_equal_rewards(config: sections.Config) -> None:
  """Check that groups of equal rewards are left out only if they teach nothing.

  `types.teach_nothing` says which groups are dropped, and after which a
  question rests.
  """
  section, advantage = config.algorithm, config.algorithm.advantage
  teaching = [
    text
    for text, does_teach in (
      (f"algorithm.advantage={advantage}", advantage in _NOT_OF_GROUPS),
      ("algorithm.teacher", bool(section.teacher)),
      ("algorithm.kl_in_reward", section.kl_in_reward),
    )
    if does_teach
  ]
  for path, value, off in (
    ("algorithm.filter_zero_std", section.filter_zero_std, False),
    ("task.rest_after", config.task.rest_after, 0),
  ):
    sections.require(
      not value or not teaching,
      path,
      "groups of equal rewards do teach something with"
      f" {' and '.join(teaching)}; use {off}",
    )


def _check_reference(config: sections.Config) -> None:
  section = config.algorithm
  for name in ("reference_every", "reference_decay", "reference_offload"):
    value = getattr(section, name)
    sections.require(
      not value or not config.model.lora.rank,
      f"algorithm.{name}",
      f"{value} is of a model of its own, and the reference of adapters"
      f" (model.lora.rank) is the model without them; use {type(value)()}",
    )
  sections.require(
    section.reference_decay < 1,
    "algorithm.reference_decay",
    "1 leaves the reference where it is; use algorithm.reference_every=0 for"
    " that",
  )
