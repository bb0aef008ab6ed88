"""The settings of the algorithm, of its critic and of the moving bound."""

from collections.abc import Callable
import dataclasses
import enum
from typing import Any

from jaxrl_async.config import optimizer_section
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config.setting import section
from jaxrl_async.config.setting import setting

# The names of losses and of advantages that come with the project. A name with
# a colon is module:function. A baseline makes one advantage for a trajectory,
# segment one for each of its turns, and gae one for each token.
LOSSES = ("ppo", "coupled_ppo", "gspo", "cispo", "sapo", "reinforce")
BASELINES = ("group", "leave_one_out", "batch")
ADVANTAGES = (*BASELINES, "segment", "gae", "none")
# Functions of `optax.schedules` whose arguments a config can hold.
SCHEDULES = (
  "constant_schedule",
  "cosine_decay_schedule",
  "cosine_onecycle_schedule",
  "exponential_decay",
  "linear_onecycle_schedule",
  "linear_schedule",
  "piecewise_constant_schedule",
  "piecewise_interpolate_schedule",
  "polynomial_schedule",
  "warmup_constant_schedule",
  "warmup_cosine_decay_schedule",
  "warmup_exponential_decay_schedule",
)


class AdvantageScale(enum.Enum):
  """The divisor of rewards minus their baseline.

  STD is the standard deviation of the group, and BATCH_STD of the whole
  batch. Where tokens of a trajectory differ, as those of gae do, BATCH_STD also
  subtracts the mean of the batch's tokens.
  """

  STD = "std"
  NONE = "none"
  BATCH_STD = "batch_std"


class BehaviorWeightCapMode(enum.Enum):
  """What happens to tokens whose behavior weight is out of bounds.

  MASK leaves them out. TRUNCATE replaces the weight by the nearest bound.
  """

  MASK = "mask"
  TRUNCATE = "truncate"


class BehaviorWeightLevel(enum.Enum):
  """What the behavior weight pi_prox / pi_behav is a weight of.

  TOKEN has one for each token. The others have one for all tokens of a
  trajectory: SEQUENCE_MEAN is the geometric mean of the tokens' weights, and
  SEQUENCE_PRODUCT their product. NONE applies no weight.
  """

  NONE = "none"
  TOKEN = "token"
  SEQUENCE_MEAN = "sequence_mean"
  SEQUENCE_PRODUCT = "sequence_product"


class ProximalMode(enum.Enum):
  """Where the logprobs of the centre of the trust region come from.

  RECOMPUTE costs one forward pass per train step. LOGLINEAR interpolates
  between behavior and current logprobs by their versions. REUSE takes the
  logprobs of the update itself, which are the same as long as a train step is
  one update.
  """

  RECOMPUTE = "recompute"
  LOGLINEAR = "loglinear"
  REUSE = "reuse"


class Aggregation(enum.Enum):
  """How the losses of tokens become the loss of a minibatch.

  TOKEN_MEAN is the mean over all tokens. SEQUENCE_MEAN is the mean over
  trajectories of their means. SEQUENCE_SUM is the mean over trajectories of
  their sums, each divided by the same constant.
  """

  TOKEN_MEAN = "token_mean"
  SEQUENCE_MEAN = "sequence_mean"
  SEQUENCE_SUM = "sequence_sum"


class KlEstimator(enum.Enum):
  """Estimators of a divergence, of http://joschu.net/blog/kl-approx.html."""

  K1 = "k1"
  K2 = "k2"
  K3 = "k3"


# Losses that clip a ratio, and those that have a second clip.
_CLIPPED = ("ppo", "coupled_ppo", "gspo", "cispo")
_DUAL = ("ppo", "coupled_ppo")


def _unless(
  is_read: Callable[[Any], bool], reason: str
) -> Callable[[Any, Any], str]:
  """Return what says why nothing reads a field of a section.

  Args:
    is_read: whether something does, of the section.
    reason: the answer if not, a template for `str.format` of the section.
  """
  return lambda section, _: "" if is_read(section) else reason.format(section)


_LOSS = "{0.loss!r:.60} (algorithm.loss)"
_CLIP = _unless(
  lambda x: x.loss in _CLIPPED,
  f"{_LOSS} has no clip, as {', '.join(_CLIPPED)} have",
)
_DUAL_CLIP = _unless(
  lambda x: x.loss in _DUAL,
  f"{_LOSS} has no second clip, as {', '.join(_DUAL)} have",
)
_GATE = _unless(lambda x: x.loss == "sapo", f"{_LOSS} has no gate, as sapo has")
_CORRECTION = _unless(
  lambda x: x.loss in LOSSES, f"{_LOSS} makes its own corrections"
)
_WEIGHT = _unless(
  lambda x: x.behavior_weight_level is not BehaviorWeightLevel.NONE,
  "there is no weight to bound (algorithm.behavior_weight_level is none)",
)
_AVERAGE = _unless(
  lambda x: (
    x.loss in LOSSES
    or (x.kl_coef != 0 and not x.kl_in_reward)
    or x.entropy_coef != 0
  ),
  f"{_LOSS} makes its own average, and the loss has no penalty",
)
_CONSTANT = _unless(
  lambda x: x.aggregation is Aggregation.SEQUENCE_SUM,
  "{0.aggregation.value} (algorithm.aggregation) divides by no constant, as"
  " sequence_sum does",
)
_GAE = _unless(
  lambda x: x.advantage == "gae",
  "only gae reads it, and algorithm.advantage is {0.advantage:.60}",
)
_REWARDS = _unless(
  lambda x: x.advantage != "none",
  "rewards are not used (algorithm.advantage is none)",
)
_REFERENCE = _unless(
  lambda x: x.kl_coef != 0, "there is no reference (algorithm.kl_coef is 0)"
)
_IN_REWARD = _unless(
  lambda x: x.kl_in_reward,
  "no divergence is in the reward (algorithm.kl_in_reward is False)",
)
_MOVES = _unless(
  lambda x: x.reference_every != 0,
  "the reference does not move (algorithm.reference_every is 0)",
)
_FILTER = _unless(
  lambda x: x.filter_zero_std,
  "no group is dropped (algorithm.filter_zero_std is False)",
)
_CONTROL = _unless(
  lambda x: x.maximum != 0,
  "the bound does not move (staleness_control.maximum is 0)",
)


def has_no_critic(section: Any, config: Any) -> str:
  """Return why nothing reads the critic's settings, "" if something does."""
  del section
  advantage = config.algorithm.advantage
  if advantage == "gae":
    return ""
  return (
    f"there is no critic without gae, and algorithm.advantage is"
    f" {advantage[:60]}"
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class AlgorithmSection:
  """The algorithm.

  docs/reference/algorithms.md has the equation of each choice.

  The defaults are AReaL's: advantages relative to the group, and the decoupled
  PPO loss. `config.algorithms` has the settings of other methods.
  """

  max_staleness: int = setting(
    4,
    low=0,
    free="deadlines are stored with groups; another bound holds for groups born"
    " afterwards",
  )
  """Bound on train version minus token version; 0 is synchronous training."""
  group_size: int = setting(
    16,
    low=2,
    high=setting_lib.MAX_GROUP,
    fixed_with_groups="groups that the checkpoint holds have that size",
  )
  """Trajectories of a prompt, which are compared with each other."""
  groups_per_step: int = setting(
    32,
    low=1,
    high=setting_lib.MAX_GROUP,
    fixed_with_groups="their deadlines were given for batches of that size",
  )
  """Groups that a train step trains."""
  num_minibatches: int = setting(
    4,
    low=1,
    fixed="the stored number of updates counts so many a step",
  )
  """Updates of one pass over the trajectories of a train step."""
  num_epochs: int = setting(
    1, low=1, fixed="the stored number of updates counts so many a step"
  )
  """A train step passes so many times over its minibatches. What is computed
  before its first update, such as the proximal logprobs, stays."""
  loss: str = setting("ppo")
  """One of `LOSSES`, or module:function of a function of a
  `training.objectives.Microbatch`."""
  clip_low: float = setting(0.2, low=0, high=1, unread=(_CLIP,))
  """The ratio of ppo, coupled_ppo, gspo and cispo is clipped at 1 - clip_low
  from below. 1 sets no lower bound."""
  clip_high: float = setting(0.2, low=0, unread=(_CLIP,))
  """It is clipped at 1 + clip_high from above."""
  dual_clip: float = setting(0.0, low=0, unread=(_DUAL_CLIP,))
  """With a negative advantage, the objective of ppo and coupled_ppo is at least
  dual_clip times the advantage; 0 sets no such bound."""
  sapo_positive: float = setting(
    1.0,
    low=setting_lib.MIN_FLOAT,
    unread=(_GATE,),
  )
  """Temperature of sapo's gate where the advantage is positive."""
  sapo_negative: float = setting(
    1.05,
    low=setting_lib.MIN_FLOAT,
    unread=(_GATE,),
  )
  """Temperature of sapo's gate elsewhere."""
  aggregation: Aggregation = setting(Aggregation.TOKEN_MEAN, unread=(_AVERAGE,))
  """From the losses of tokens to the loss of a minibatch."""
  aggregation_tokens: int = setting(0, low=0, unread=(_CONSTANT,))
  """The constant of SEQUENCE_SUM; 0 takes rollout.max_completion_tokens."""
  proximal: ProximalMode = setting(ProximalMode.RECOMPUTE)
  """Where the logprobs of the centre of the trust region come from."""
  behavior_weight_level: BehaviorWeightLevel = setting(
    BehaviorWeightLevel.TOKEN, unread=(_CORRECTION,)
  )
  """What the behavior weight is a weight of."""
  behavior_weight_floor: float = setting(
    0.0,
    low=0,
    high=1,
    unread=(_CORRECTION, _WEIGHT),
  )
  """Smallest behavior weight that is used unchanged."""
  behavior_weight_cap: float = setting(
    5.0,
    low=1,
    unread=(_CORRECTION, _WEIGHT),
  )
  """Largest behavior weight that is used unchanged."""
  behavior_weight_cap_mode: BehaviorWeightCapMode = setting(
    BehaviorWeightCapMode.MASK, unread=(_CORRECTION, _WEIGHT)
  )
  """What happens to tokens whose behavior weight is out of bounds."""
  second_moment_bound: float = setting(0.0, low=0, unread=(_CORRECTION,))
  """M2PO's bound on the mean squared log-ratio of proximal and behavior policy,
  beyond which tokens are left out; 0 sets none."""
  sequence_kl_bound: float = setting(0.0, low=0, unread=(_CORRECTION,))
  """Trajectories with a negative advantage are left out if the mean log-ratio
  of behavior and current policy is above; 0 keeps all."""
  advantage: str = setting("group")
  """Baseline of the rewards, one of `ADVANTAGES`, or module:function. segment
  compares each turn of an episode, and each part that ends at a token with a
  score, with the same one of the others of its group. gae has the values of a
  critic, see `critic`. none learns nothing from rewards, and needs a
  teacher."""
  advantage_scale: AdvantageScale = setting(AdvantageScale.STD)
  """What advantages are divided by."""
  gamma: float = setting(1.0, low=0, high=1, unread=(_GAE,))
  """Discount per token of gae."""
  gae_lambda: float = setting(1.0, low=0, high=1, unread=(_GAE,))
  """How much gae trusts rewards over values: 1 takes the whole return, 0 the
  next value."""
  reward_bias: float = setting(0.0, unread=(_REWARDS,))
  """Is added to each reward."""
  reward_scale: float = setting(
    1.0,
    low=setting_lib.MIN_FLOAT,
    unread=(_REWARDS,),
  )
  """The sum is multiplied by this."""
  reward_clip: float = setting(0.0, low=0, unread=(_REWARDS,))
  """Largest absolute value of the result; 0 sets no bound."""
  overlong_filter: bool = setting(False)
  """Nothing is learned from trajectories that were cut off at a limit of
  tokens. Their rewards count in the baseline. gae then has no return left that
  a critic would bootstrap."""
  filter_zero_std: bool = setting(
    False,
    free="asked when a group is scored; groups kept before are trained",
  )
  """Drop groups whose rewards are all equal, since they carry no gradient, and
  generate others in their place. A group whose tokens have scores that are
  learned from is kept."""
  max_filtered_groups: int = setting(
    0, low=0, free=setting_lib.SUPERVISION, unread=(_FILTER,)
  )
  """The run ends after this many dropped groups in a row. 0 is 1,000, or 20
  train steps' worth if that is more."""
  kl_coef: float = setting(
    0.0,
    low=0,
    fixed="the checkpoint holds a reference, or none if it was 0",
  )
  """Coefficient of the divergence from the reference, which begins as the
  policy before the first train step; 0 keeps no reference."""
  kl_estimator: KlEstimator = setting(KlEstimator.K3, unread=(_REFERENCE,))
  """Of that divergence, from one token."""
  kl_in_reward: bool = setting(False, unread=(_REFERENCE,))
  """The divergence of a token is subtracted from its reward, instead of being
  added to the loss. It needs the estimator k1."""
  kl_reward_clip: float = setting(0.0, low=0, unread=(_IN_REWARD,))
  """Largest absolute value of the estimate of a token in the reward; 0 sets no
  bound."""
  reference_every: int = setting(
    0,
    low=0,
    fixed="the reference of the checkpoint has moved by it",
    unread=(_REFERENCE,),
  )
  """The reference moves to the policy after every so many train steps; 0 leaves
  it where it began."""
  reference_decay: float = setting(
    0.0,
    low=0,
    below=1,
    fixed="the reference of the checkpoint has moved by it",
    unread=(_REFERENCE, _MOVES),
  )
  """Share of the reference that stays when it moves. 0 replaces it by the
  policy; 0.99 with reference_every=1 is a moving average."""
  reference_offload: bool = setting(
    False,
    free="where the reference lies between its uses",
    unread=(_REFERENCE,),
  )
  """Keep the reference in host memory between its uses."""
  entropy_coef: float = setting(0.0, low=0)
  """Coefficient of the bonus for the policy's entropy."""
  teacher: str = setting(
    "",
    directory="use one in Hugging Face's format, or WORKDIR/params of"
    " launch/sft.py",
    fixed="the checkpoint holds the teacher, or none",
  )
  """Directory of a model with the policy's tokenizer, from which the policy
  learns by its logprobs of what the policy writes: one in Hugging Face format,
  of any size, or parameters of the policy's architecture that `launch/sft.py`
  wrote. "" is none."""
  distill_coef: float = setting(0.0, low=0)
  """Coefficient of the teacher's part of the advantages."""


class CriticTrunk(enum.Enum):
  """Which layers a critic's values are computed from.

  OWN is a second model, which begins as a copy of the policy. SHARED are the
  policy's own layers, which then learn from both losses.
  """

  OWN = "own"
  SHARED = "shared"


@dataclasses.dataclass(kw_only=True, slots=True)
class CriticSection:
  """The critic: a model that predicts the return of each token."""

  trunk: CriticTrunk = setting(
    CriticTrunk.OWN, fixed="the checkpoint holds the other kind of critic"
  )
  """The layers under its head, which is a vector and begins at zero."""
  value_clip: float = setting(
    0.2,
    low=0,
    free=setting_lib.IN_THE_LOSS,
  )
  """Bound on how far a prediction gains by moving within a train step, in
  normalised units; 0 sets none."""
  value_coef: float = setting(0.5, low=0, free=setting_lib.IN_THE_LOSS)
  """Coefficient of the value loss beside the policy's."""
  warmup_steps: int = setting(
    0, low=0, fixed="the policy's learning rate counts from its end"
  )
  """In so many train steps, the first ones of the run, only the critic learns.
  Policy versions count on, and all have the same weights."""
  normalize_decay: float = setting(
    0.999,
    low=0,
    below=1,
    fixed="the stored critic predicts in units that it has made",
  )
  """Weight of earlier train steps in the running mean and deviation of the
  returns, by which the critic's targets are normalised; 0 normalises
  nothing."""
  optimizer: optimizer_section.OptimizerSection = section(
    optimizer_section.OptimizerSection
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class StalenessControlSection:
  """The bound on staleness between two limits; maximum = 0 leaves it fixed.

  A run starts with the minimum. The bound falls by one while the data is too
  old. It rises by one while the data is not, and the slices wait because of the
  bound. `buffer.staleness_control` has the rule.
  """

  minimum: int = setting(0, low=0)
  """Smallest bound."""
  maximum: int = setting(0, low=0)
  """Largest bound, at most `algorithm.max_staleness`; 0 switches the control
  off, and `algorithm.max_staleness` is then the bound."""
  min_ess: float = setting(0.8, low=0, high=1, unread=(_CONTROL,))
  """The data is too old if the metric offpolicy/ess is below."""
  max_clip_frac: float = setting(0.2, low=0, high=1, unread=(_CONTROL,))
  """It is too old if policy/clip_frac is above."""
  max_left_out_frac: float = setting(0.05, low=0, high=1, unread=(_CONTROL,))
  """It is too old if offpolicy/left_out_frac is above."""
  max_wait_frac: float = setting(0.1, low=0, high=1, unread=(_CONTROL,))
  """The bound rises if training waits for a larger share of the step, and
  generation does too, or trained tokens are as old as the bound."""
  patience: int = setting(2, low=1, unread=(_CONTROL,))
  """The bound moves after so many steps in a row that ask for it."""
