"""The settings of the algorithm: advantages, the loss and its corrections."""

import dataclasses
import enum

from ml_collections import config_dict

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

  STD is the standard deviation of the group, and BATCH_STD that of the whole
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


@dataclasses.dataclass(kw_only=True, slots=True)
class AlgorithmSection:
  """The algorithm; docs/algorithms.md has the equation of each choice.

  The defaults are AReaL's: advantages relative to the group, and the decoupled
  PPO loss. `config.algorithms` has the settings of other methods.

  Attributes:
    max_staleness: bound on train version minus token version; 0 is synchronous
      training.
    num_epochs: a train step passes so many times over its minibatches. What is
      computed before its first update, such as the proximal logprobs, stays.
    loss: one of `LOSSES`, or module:function of a function of a
      `training.objectives.Microbatch`.
    clip_low: the ratio of ppo, coupled_ppo, gspo and cispo is clipped at
      1 - clip_low from below. 1 sets no lower bound.
    clip_high: it is clipped at 1 + clip_high from above.
    dual_clip: with a negative advantage, the objective of ppo and coupled_ppo
      is at least dual_clip times the advantage; 0 sets no such bound.
    sapo_positive: temperature of sapo's gate where the advantage is positive.
    sapo_negative: temperature of sapo's gate elsewhere.
    aggregation: from the losses of tokens to that of a minibatch.
    aggregation_tokens: the constant of SEQUENCE_SUM; 0 takes
      rollout.max_completion_tokens.
    behavior_weight_floor: smallest behavior weight that is used unchanged.
    behavior_weight_cap: largest behavior weight that is used unchanged.
    second_moment_bound: M2PO's bound on the mean squared log-ratio of proximal
      and behavior policy, beyond which tokens are left out; 0 sets none.
    sequence_kl_bound: trajectories with a negative advantage are left out if
      the mean log-ratio of behavior and current policy is above; 0 keeps all.
    advantage: baseline of the rewards, one of `ADVANTAGES`, or module:function.
      segment compares each turn of an episode with the same turn of the others
      of its group. gae has the values of a critic, see `critic_section`. none
      learns nothing from rewards, and needs a teacher.
    advantage_scale: what advantages are divided by.
    gamma: discount per token of gae.
    gae_lambda: how much gae trusts rewards over values: 1 takes the whole
      return, 0 the next value.
    reward_bias: is added to each reward.
    reward_scale: the sum is multiplied by this.
    reward_clip: largest absolute value of the result; 0 sets no bound.
    overlong_filter: nothing is learned from trajectories that were cut off at
      a limit of tokens. Their rewards count in the baseline. gae then has no
      return left that a critic would bootstrap.
    filter_zero_std: drop groups whose rewards are all equal, since they carry
      no gradient, and generate others in their place. A group whose tokens have
      scores that are learned from is kept. A thousand dropped ones in a row end
      the run.
    kl_coef: coefficient of the divergence from the reference, which begins as
      the policy before the first train step; 0 keeps no reference.
    kl_estimator: of that divergence, from one token.
    kl_in_reward: the divergence of a token is subtracted from its reward,
      instead of being added to the loss. It needs the estimator k1.
    kl_reward_clip: largest absolute value of the estimate of a token in the
      reward; 0 sets no bound.
    reference_every: the reference moves to the policy after every so many train
      steps; 0 leaves it where it began.
    reference_decay: share of the reference that stays when it moves. 0 replaces
      it by the policy; 0.99 with reference_every=1 is a moving average.
    reference_offload: keep the reference in host memory between its uses.
    entropy_coef: coefficient of the bonus for the policy's entropy.
    schedules: fields of the loss that change with the train step, by name;
      value_coef and value_clip are those of the critic. Each entry has
      `schedule`, one of `SCHEDULES`, and its arguments. It begins with the
      field's own value, or rises to it from 0, by default.
    teacher: directory of a model with the policy's tokenizer, from which the
      policy learns by its logprobs of what the policy writes: one in Hugging
      Face format, of any size, or parameters of the policy's architecture that
      `launch/sft.py` wrote. "" is none.
    distill_coef: coefficient of the teacher's part of the advantages.
  """

  max_staleness: int = 4
  group_size: int = 16
  groups_per_step: int = 32
  num_minibatches: int = 4
  num_epochs: int = 1
  loss: str = "ppo"
  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float = 0.0
  sapo_positive: float = 1.0
  sapo_negative: float = 1.05
  aggregation: Aggregation = Aggregation.TOKEN_MEAN
  aggregation_tokens: int = 0
  proximal: ProximalMode = ProximalMode.RECOMPUTE
  behavior_weight_level: BehaviorWeightLevel = BehaviorWeightLevel.TOKEN
  behavior_weight_floor: float = 0.0
  behavior_weight_cap: float = 5.0
  behavior_weight_cap_mode: BehaviorWeightCapMode = BehaviorWeightCapMode.MASK
  second_moment_bound: float = 0.0
  sequence_kl_bound: float = 0.0
  advantage: str = "group"
  advantage_scale: AdvantageScale = AdvantageScale.STD
  gamma: float = 1.0
  gae_lambda: float = 1.0
  reward_bias: float = 0.0
  reward_scale: float = 1.0
  reward_clip: float = 0.0
  overlong_filter: bool = False
  filter_zero_std: bool = False
  kl_coef: float = 0.0
  kl_estimator: KlEstimator = KlEstimator.K3
  kl_in_reward: bool = False
  kl_reward_clip: float = 0.0
  reference_every: int = 0
  reference_decay: float = 0.0
  reference_offload: bool = False
  entropy_coef: float = 0.0
  schedules: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  teacher: str = ""
  distill_coef: float = 0.0
