"""The settings of the algorithm: advantages, the loss and its corrections."""

import dataclasses
import enum

from ml_collections import config_dict

from jaxrl_async.config import setting as setting_lib

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
  """

  max_staleness: int = setting_lib.setting(
    4,
    "bound on train version minus token version; 0 is synchronous training",
    low=0,
    free=(
      "deadlines are stored with groups; another bound holds for groups born"
      " afterwards"
    ),
  )
  group_size: int = setting_lib.setting(
    16,
    "trajectories of a prompt, which are compared with each other",
    low=2,
    high=setting_lib.MAX_GROUP,
    fixed_with_groups="groups that the checkpoint holds have that size",
  )
  groups_per_step: int = setting_lib.setting(
    32,
    "groups that a train step trains",
    low=1,
    high=setting_lib.MAX_GROUP,
    fixed_with_groups="their deadlines were given for batches of that size",
  )
  num_minibatches: int = setting_lib.setting(
    4,
    "updates of one pass over the trajectories of a train step",
    low=1,
    fixed=(
      "the stored number of updates, and so the place on the learning rate's"
      " curve, counts so many a step"
    ),
  )
  num_epochs: int = setting_lib.setting(
    1,
    "a train step passes so many times over its minibatches. What is computed"
    " before its first update, such as the proximal logprobs, stays.",
    low=1,
    fixed="the stored number of updates counts so many a step",
  )
  loss: str = setting_lib.setting(
    "ppo",
    "one of `LOSSES`, or module:function of a function of a"
    " `training.objectives.Microbatch`",
    free=setting_lib.IN_THE_LOSS,
  )
  clip_low: float = setting_lib.setting(
    0.2,
    "the ratio of ppo, coupled_ppo, gspo and cispo is clipped at 1 - clip_low"
    " from below. 1 sets no lower bound.",
    low=0,
    high=1,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  clip_high: float = setting_lib.setting(
    0.2,
    "it is clipped at 1 + clip_high from above",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  dual_clip: float = setting_lib.setting(
    0.0,
    "with a negative advantage, the objective of ppo and coupled_ppo is at"
    " least dual_clip times the advantage; 0 sets no such bound",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.BOUND,
  )
  sapo_positive: float = setting_lib.setting(
    1.0,
    "temperature of sapo's gate where the advantage is positive",
    low=setting_lib.MIN_FLOAT,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  sapo_negative: float = setting_lib.setting(
    1.05,
    "temperature of sapo's gate elsewhere",
    low=setting_lib.MIN_FLOAT,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  aggregation: Aggregation = setting_lib.setting(
    Aggregation.TOKEN_MEAN,
    "from the losses of tokens to that of a minibatch",
    free=setting_lib.IN_THE_LOSS,
  )
  aggregation_tokens: int = setting_lib.setting(
    0,
    "the constant of SEQUENCE_SUM; 0 takes rollout.max_completion_tokens",
    low=0,
    free=setting_lib.IN_THE_LOSS,
  )
  proximal: ProximalMode = setting_lib.setting(
    ProximalMode.RECOMPUTE,
    "where the logprobs of the centre of the trust region come from",
    free=setting_lib.IN_THE_LOSS,
  )
  behavior_weight_level: BehaviorWeightLevel = setting_lib.setting(
    BehaviorWeightLevel.TOKEN,
    "what the behavior weight is a weight of",
    free=setting_lib.IN_THE_LOSS,
  )
  behavior_weight_floor: float = setting_lib.setting(
    0.0,
    "smallest behavior weight that is used unchanged",
    low=0,
    high=1,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  behavior_weight_cap: float = setting_lib.setting(
    5.0,
    "largest behavior weight that is used unchanged",
    low=1,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  behavior_weight_cap_mode: BehaviorWeightCapMode = setting_lib.setting(
    BehaviorWeightCapMode.MASK,
    "what happens to tokens whose behavior weight is out of bounds",
    free=setting_lib.IN_THE_LOSS,
  )
  second_moment_bound: float = setting_lib.setting(
    0.0,
    "M2PO's bound on the mean squared log-ratio of proximal and behavior"
    " policy, beyond which tokens are left out; 0 sets none",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.BOUND,
  )
  sequence_kl_bound: float = setting_lib.setting(
    0.0,
    "trajectories with a negative advantage are left out if the mean"
    " log-ratio of behavior and current policy is above; 0 keeps all",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.BOUND,
  )
  advantage: str = setting_lib.setting(
    "group",
    "baseline of the rewards, one of `ADVANTAGES`, or module:function."
    " segment compares each turn of an episode with the same turn of the"
    " others of its group. gae has the values of a critic, see"
    " `critic_section`. none learns nothing from rewards, and needs a teacher.",
    free=setting_lib.IN_THE_LOSS,
  )
  advantage_scale: AdvantageScale = setting_lib.setting(
    AdvantageScale.STD,
    "what advantages are divided by",
    free=setting_lib.IN_THE_LOSS,
  )
  gamma: float = setting_lib.setting(
    1.0,
    "discount per token of gae",
    low=0,
    high=1,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  gae_lambda: float = setting_lib.setting(
    1.0,
    "how much gae trusts rewards over values: 1 takes the whole return, 0 the"
    " next value",
    low=0,
    high=1,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  reward_bias: float = setting_lib.setting(
    0.0,
    "is added to each reward",
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  reward_scale: float = setting_lib.setting(
    1.0,
    "the sum is multiplied by this",
    low=setting_lib.MIN_FLOAT,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  reward_clip: float = setting_lib.setting(
    0.0,
    "largest absolute value of the result; 0 sets no bound",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.BOUND,
  )
  overlong_filter: bool = setting_lib.setting(
    False,
    "nothing is learned from trajectories that were cut off at a limit of"
    " tokens. Their rewards count in the baseline. gae then has no return left"
    " that a critic would bootstrap.",
    free=setting_lib.IN_THE_LOSS,
  )
  filter_zero_std: bool = setting_lib.setting(
    False,
    "drop groups whose rewards are all equal, since they carry no gradient,"
    " and generate others in their place. A group whose tokens have scores"
    " that are learned from is kept. A thousand dropped ones in a row end the"
    " run.",
    free=(
      "asked when a group is scored; groups that were kept before are trained"
    ),
  )
  kl_coef: float = setting_lib.setting(
    0.0,
    "coefficient of the divergence from the reference, which begins as the"
    " policy before the first train step; 0 keeps no reference",
    low=0,
    fixed="the checkpoint holds a reference, or none if it was 0",
    schedule=setting_lib.Schedule.COEFFICIENT,
  )
  kl_estimator: KlEstimator = setting_lib.setting(
    KlEstimator.K3,
    "of that divergence, from one token",
    free=setting_lib.IN_THE_LOSS,
  )
  kl_in_reward: bool = setting_lib.setting(
    False,
    "the divergence of a token is subtracted from its reward, instead of"
    " being added to the loss. It needs the estimator k1.",
    free=setting_lib.IN_THE_LOSS,
  )
  kl_reward_clip: float = setting_lib.setting(
    0.0,
    "largest absolute value of the estimate of a token in the reward; 0 sets"
    " no bound",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.BOUND,
  )
  reference_every: int = setting_lib.setting(
    0,
    "the reference moves to the policy after every so many train steps; 0"
    " leaves it where it began",
    low=0,
    fixed="the reference of the checkpoint has moved by it",
  )
  reference_decay: float = setting_lib.setting(
    0.0,
    "share of the reference that stays when it moves. 0 replaces it by the"
    " policy; 0.99 with reference_every=1 is a moving average.",
    low=0,
    high=1,
    fixed="the reference of the checkpoint has moved by it",
  )
  reference_offload: bool = setting_lib.setting(
    False,
    "keep the reference in host memory between its uses",
    free="where the reference lies between its uses",
  )
  entropy_coef: float = setting_lib.setting(
    0.0,
    "coefficient of the bonus for the policy's entropy",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.COEFFICIENT,
  )
  schedules: config_dict.ConfigDict = setting_lib.setting(
    config_dict.ConfigDict,
    "fields of the loss that change with the train step, by name; value_coef"
    " and value_clip are those of the critic. Each entry has `schedule`, one"
    " of `SCHEDULES`, and its arguments. It begins with the field's own value,"
    " or rises to it from 0, by default.",
    free=setting_lib.IN_THE_LOSS,
  )
  teacher: str = setting_lib.setting(
    "",
    "directory of a model with the policy's tokenizer, from which the policy"
    " learns by its logprobs of what the policy writes: one in Hugging Face"
    " format, of any size, or parameters of the policy's architecture that"
    ' `launch/sft.py` wrote. "" is none.',
    fixed="the checkpoint holds the teacher, or none",
  )
  distill_coef: float = setting_lib.setting(
    0.0,
    "coefficient of the teacher's part of the advantages",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.COEFFICIENT,
  )
