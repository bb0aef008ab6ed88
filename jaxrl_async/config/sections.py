"""All settings of a run, as dataclasses that may be nested.

The `get_config(variant)` of a config file returns a `Config`, and absl's
`--config.section.field=value` overrides single fields. After that,
`run.config_checks` checks that the fields fit together. The dataclasses
are neither frozen nor checked in `__post_init__`, because overrides arrive
after construction.
"""

import dataclasses
import enum
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import cluster_section
from jaxrl_async.config import optimizer_section
from jaxrl_async.config import refusals
from jaxrl_async.config import rollout_section
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config import task_section
from jaxrl_async.config.setting import section
from jaxrl_async.config.setting import setting

# Names by which the whole code refuses a setting.
ConfigError = refusals.ConfigError
require = refusals.require
require_one_of = refusals.require_one_of
shown = refusals.shown
did_you_mean = refusals.did_you_mean
ClusterKind = cluster_section.ClusterKind
ClusterSection = cluster_section.ClusterSection
AdvantageScale = algorithm_section.AdvantageScale
Aggregation = algorithm_section.Aggregation
AlgorithmSection = algorithm_section.AlgorithmSection
BehaviorWeightCapMode = algorithm_section.BehaviorWeightCapMode
BehaviorWeightLevel = algorithm_section.BehaviorWeightLevel
CriticSection = algorithm_section.CriticSection
CriticTrunk = algorithm_section.CriticTrunk
KlEstimator = algorithm_section.KlEstimator
OptimizerName = optimizer_section.OptimizerName
OptimizerSection = optimizer_section.OptimizerSection
ProximalMode = algorithm_section.ProximalMode
StalenessControlSection = algorithm_section.StalenessControlSection
KvOnAdopt = rollout_section.KvOnAdopt
OnBadRow = task_section.OnBadRow
Preemption = rollout_section.Preemption
RolloutSection = rollout_section.RolloutSection
TaskSection = task_section.TaskSection
WeightFormat = rollout_section.WeightFormat


class Channel(enum.Enum):
  """How weights travel from the trainer to the engines."""

  ORBAX = "orbax"
  DIRECT = "direct"


class Remat(enum.Enum):
  """Which activations of a layer the backward pass computes again.

  NONE keeps everything. FULL keeps only the input of each layer. ATTENTION
  keeps the output of attention in addition, and DOTS every product with a
  weight. OFFLOAD is FULL with the layers' inputs in host memory.
  """

  NONE = "none"
  FULL = "full"
  ATTENTION = "attention"
  DOTS = "dots"
  OFFLOAD = "offload"


# The kernels of a layer that an adapter may be put beside.
LORA_MODULES = ("query", "key", "value", "output", "gate", "up", "down")
LORA_BASE_DTYPES = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(kw_only=True, slots=True)
class LoraSection:
  """Low-rank adapters (arXiv:2106.09685); rank = 0 trains the whole model."""

  rank: int = setting(
    0,
    "the rank of every adapter; 0 switches adapters off",
    low=0,
    high=setting_lib.MAX_GROUP,
    fixed="the stored adapters have it",
  )
  alpha: float = setting(
    16.0,
    "what an adapter adds is multiplied by alpha / rank",
    low=setting_lib.MIN_FLOAT,
    fixed="the stored adapters were trained with it",
  )
  modules: tuple[str, ...] = setting(
    LORA_MODULES,
    "the kernels of each layer that get an adapter",
    choices=LORA_MODULES,
    fixed="the stored adapters are of these kernels",
  )
  base_dtype: str = setting(
    "bfloat16",
    "how the trainer holds the frozen model. int8 quantises the matrices of"
    " the layers; the rest is then bfloat16.",
    choices=LORA_BASE_DTYPES,
    fixed="the stored adapters were trained on that base",
  )
  adapter: str = setting(
    "",
    'directory of an adapter to start from, in PEFT\'s format. "" starts'
    " from a new one, which changes nothing before its first update.",
    directory="use one in PEFT's format",
    fixed="the stored adapters came of it",
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelSection:
  """The decoder and its compute dtype."""

  name: str = setting(
    "quickstart",
    "a key of `models.configs.MODELS`, or a directory in Hugging Face format,"
    " which provides architecture, tokenizer and initial weights",
    fixed="stored weights and tokens are of that model and tokenizer",
  )
  tokenizer: str = setting(
    "",
    "directory of a tokenizer in Hugging Face format, for a model of"
    ' `MODELS`; "" makes each character a token',
    directory="use a directory with a tokenizer.json",
    fixed="stored weights and tokens are of that tokenizer",
    of_answers=True,
  )
  compute_dtype: str = setting(
    "float32",
    "dtype of the trainer's activations; its master weights are float32",
    choices=setting_lib.DTYPES,
    free="activations only; stored weights are float32",
  )
  remat: Remat = setting(
    Remat.FULL,
    "activations that the backward pass computes again",
    free=setting_lib.MEMORY,
  )
  lora: LoraSection = section(LoraSection)


MESH_AXES = ("data", "fsdp", "context", "tensor")


def _axes(default: tuple[str, ...], meaning: str) -> Any:
  return setting(default, meaning, choices=MESH_AXES)


def _size(meaning: str) -> Any:
  return setting(1, meaning, low=1, also=(-1,))


@dataclasses.dataclass(kw_only=True, slots=True)
class ShardingRules:
  """Mesh axes that split each logical axis of an array; () leaves it whole."""

  batch: tuple[str, ...] = _axes(
    ("data", "fsdp"), "rows of a batch, slots of a cache"
  )
  tokens: tuple[str, ...] = _axes(("context",), "tokens of a row")
  layers: tuple[str, ...] = _axes(
    (), "stacked layers of the trainer's parameters"
  )
  vocab: tuple[str, ...] = _axes(("tensor",), "entries of the vocabulary")
  embed: tuple[str, ...] = _axes(("fsdp", "context"), "the residual stream")
  heads: tuple[str, ...] = _axes(("tensor",), "query heads")
  kv_heads: tuple[str, ...] = _axes(("tensor",), "heads of keys and values")
  head: tuple[str, ...] = _axes((), "the numbers of a head")
  mlp: tuple[str, ...] = _axes(("tensor",), "the hidden layer of an MLP")


def _rollout_rules() -> ShardingRules:
  # Decoding reads every weight for every token, so gathering weights over fsdp
  # would dominate its time.
  return ShardingRules(batch=("data",), embed=(), tokens=())


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshSection:
  """Number of devices along each axis of both slices; -1 means the rest.

  If there is only one device, both slices share it.
  """

  train_data: int = _size("splits the rows of a batch")
  train_fsdp: int = _size("splits the rows of a batch, and the weights")
  train_context: int = _size(
    "splits the tokens of a row, for rows too long for one device. Like"
    " train_fsdp it also splits the weights."
  )
  train_tensor: int = _size("splits heads, MLPs and the vocabulary")
  rollout_data: int = _size("splits the slots; each part has all weights")
  rollout_tensor: int = _size("splits heads, MLPs and the vocabulary")
  train_rules: ShardingRules = section(ShardingRules)
  rollout_rules: ShardingRules = section(_rollout_rules)


def _rate_has_curve(section: Any, config: Any) -> str:
  del config
  if not section.optimizer.rate_curve:
    return ""
  return "its optimizer's rate_curve says how the rate changes"


def _train_rate_has_curve(section: Any, config: Any) -> str:
  """Return why nothing reads the decay, which the critic's rate may have."""
  is_of_critic = (
    config.algorithm.advantage == "gae"
    and not config.critic.optimizer.rate_curve
  )
  return "" if is_of_critic else _rate_has_curve(section, config)


def _measures_nothing(section: Any, config: Any) -> str:
  del config
  return "" if section.eval_every else "nothing is measured (eval_every is 0)"


def _is_not_dpo(section: Any, config: Any) -> str:
  del config
  is_dpo = section.loss is PreferenceLoss.DPO
  return "" if is_dpo else f"{section.loss.value} (preference.loss) has none"


@dataclasses.dataclass(kw_only=True, slots=True)
class WarmStartSection:
  """Supervised first stage on worked solutions; num_steps = 0 skips it.

  `launch/sft.py` runs this stage alone, and only there `eval_every`,
  `num_eval_examples` and `patience` have an effect.
  """

  num_steps: int = setting(0, "updates; 0 skips the stage", low=0)
  checkpoint: str = setting(
    "",
    "directory of parameters to load instead of training, either from"
    " `launch/sft.py` or in Hugging Face format",
    directory="launch/sft.py writes parameters to WORKDIR/params",
  )
  rows_per_batch: int = setting(
    32,
    "rows of `train.tokens_per_row` tokens in each update",
    low=1,
    high=setting_lib.MAX_GROUP,
  )
  solver: str = setting(
    "chain_sum",
    "a key of `worked_solutions.SOLVERS`; field:NAME, an entry or a column of"
    " the data; or module:function of (item, rng), which returns the"
    " solution's text. Solutions longer than a row are skipped and counted.",
  )
  num_examples: int = setting(
    20_000,
    "number of worked solutions; every pass over them is shuffled",
    low=1,
    high=1000000,
  )
  corrupted_frac: float = setting(
    0.2,
    "for solvers of SOLVERS, share of intermediate results that are written"
    " wrong and then carried on, so that the policy has something left to"
    " learn",
    low=0,
    high=1,
  )
  decay: float = setting(
    0.1,
    "final learning rate over the peak, reached on a cosine curve",
    low=0,
    high=1,
    unread=(_rate_has_curve,),
  )
  eval_every: int = setting(
    0,
    "steps between two measurements of the loss on held-out examples; 0"
    " measures none. The parameters with the least loss are the result.",
    low=0,
  )
  num_eval_examples: int = setting(
    256, "number of held-out examples", low=1, high=1000000
  )
  patience: int = setting(
    0,
    "training ends after this many measurements in a row that are no better"
    " than the best; 0 never ends it early",
    low=0,
    unread=(_measures_nothing,),
  )
  optimizer: OptimizerSection = section(OptimizerSection)


# The fields that name the two completions of a pair.
PREFERENCE_SIDES = ("chosen", "rejected")


class PreferenceLoss(enum.Enum):
  """What `launch/prefer.py` minimises; see `algorithms.preferences`."""

  DPO = "dpo"
  IPO = "ipo"


class RewardLoss(enum.Enum):
  """What `launch/reward_model.py` minimises; see `algorithms.preferences`.

  BRADLEY_TERRY learns a score of whole completions from pairs. STEPS learns
  from labels whether each step of a solution is right.
  """

  BRADLEY_TERRY = "bradley_terry"
  STEPS = "steps"


@dataclasses.dataclass(kw_only=True, slots=True)
class PreferenceSection:
  """Training on pairs of completions, of which one is better.

  `launch/prefer.py` trains a policy, and `launch/reward_model.py` a reward
  model. Only these two read this section. Both start from the policy of
  `warm_start.checkpoint`, or from the pretrained model of `model.name`. For
  `launch/prefer.py` that policy is also the reference.
  """

  loss: PreferenceLoss = setting(
    PreferenceLoss.DPO, "what `launch/prefer.py` minimises for each pair"
  )
  beta: float = setting(
    0.1, "strength of the tie to the reference", low=setting_lib.MIN_FLOAT
  )
  label_smoothing: float = setting(
    0.0,
    "share of the pairs that DPO takes to be labelled the wrong way round",
    low=0,
    below=0.5,
    unread=(_is_not_dpo,),
  )
  length_normalised: bool = setting(
    False, "divide the log-ratio of a completion by its number of tokens"
  )
  reward_loss: RewardLoss = setting(
    RewardLoss.BRADLEY_TERRY, "what `launch/reward_model.py` minimises"
  )
  chosen: str = setting(
    "field:chosen",
    "the better completion: field:NAME, an entry or a column of the data,"
    " which is a text or a chat that ends with the assistant's answer; a key"
    " of `worked_solutions.SOLVERS`, whose solution is then right; or"
    " module:function of (item, rng), which returns a text",
  )
  rejected: str = setting(
    "field:rejected",
    "the worse one, in the same way. A solver of SOLVERS makes mistakes as"
    " often as `warm_start.corrupted_frac` says, which must then be above 0."
    " Pairs whose completions are equal are left out and counted.",
  )
  steps: str = setting(
    "steps", "column of the data with the steps of a solution, a list of texts"
  )
  labels: str = setting(
    "labels", "column with a label for each of them: true or 1 if it is right"
  )
  num_steps: int = setting(200, "number of updates", low=1)
  rows_per_batch: int = setting(
    32,
    "rows of `train.tokens_per_row` tokens in each",
    low=1,
    high=setting_lib.MAX_GROUP,
  )
  num_examples: int = setting(
    10_000,
    "number of pairs or solutions; every pass over them is shuffled",
    low=1,
    high=1000000,
  )
  decay: float = setting(
    0.1,
    "final learning rate over the peak, reached on a cosine curve",
    low=0,
    high=1,
    unread=(_rate_has_curve,),
  )
  eval_every: int = setting(
    20,
    "steps between two measurements on held-out ones; 0 measures none. The"
    " parameters with the least loss are the result.",
    low=0,
  )
  num_eval_examples: int = setting(
    256, "number of held-out pairs or solutions", low=1, high=1000000
  )
  patience: int = setting(
    0,
    "training ends after this many measurements in a row that are no better"
    " than the best; 0 never ends it early",
    low=0,
    unread=(_measures_nothing,),
  )
  optimizer: OptimizerSection = section(
    lambda: OptimizerSection(learning_rate=1e-6)
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainSection:
  """The training slice."""

  num_steps: int = setting(
    60,
    "train steps of the whole run",
    low=1,
    free=(
      "how far to go; a decaying learning rate follows the new curve from there"
    ),
  )
  tokens_per_row: int = setting(
    512,
    "length of a packed row",
    low=1,
    free=(
      "rows are packed anew each step; stored trajectories have to fit, which"
      " is checked"
    ),
  )
  rows_per_microbatch: int = setting(
    8, "rows of one forward and backward pass", low=1, free=setting_lib.MEMORY
  )
  max_bad_updates: int = setting(
    3,
    "the run ends after this many non-finite updates in a row",
    low=1,
    free=setting_lib.SUPERVISION,
  )
  vocab_chunk: int = setting(
    4096,
    "vocabulary entries per chunk when logprobs are computed. If one chunk"
    " holds all of them, the backward pass does not recompute the logits.",
    low=1,
    free=setting_lib.MEMORY,
  )
  attention: str = setting(
    "auto",
    "attention over packed rows, a name of"
    ' `packed_attention.IMPLEMENTATIONS`. "auto" takes the platform\'s first'
    " one that works and agrees with xla.",
    free=setting_lib.MEMORY,
  )
  decay: float = setting(
    1.0,
    "final learning rate over the peak, reached at num_steps; 1 keeps the"
    " rate constant. A run that is continued with another num_steps follows"
    " the new curve from there.",
    low=0,
    high=1,
    unread=(_train_rate_has_curve,),
    free=(
      "the rate is a function of the number of updates, which goes on: the"
      " new curve holds from there"
    ),
  )
  optimizer: OptimizerSection = section(OptimizerSection)


@dataclasses.dataclass(kw_only=True, slots=True)
class TransferSection:
  """Weight transfer between the slices."""

  channel: Channel = setting(
    Channel.ORBAX, "how weights travel from the trainer to the engines"
  )
  directory: str = setting(
    "",
    'where versions are written; "" selects a memory-backed directory of'
    " this host if there is one, else the workdir",
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class QuestionSet:
  """An entry of `eval.sets`; what it does not give is that of the run."""

  dataset: str = setting("", "as `task.dataset`")
  num_items: int = setting(
    0,
    "number of questions; 0 is all of them",
    low=0,
    high=setting_lib.MAX_ITEMS,
  )
  samples: int = setting(
    1, "answers to each", low=1, high=setting_lib.MAX_SAMPLES
  )
  fields: config_dict.ConfigDict = setting(
    config_dict.ConfigDict, "as `task.fields`"
  )
  params: config_dict.ConfigDict = setting(
    config_dict.ConfigDict, "as `task.params`"
  )
  template: str = setting("{question}\n", "as `task.template`")


@dataclasses.dataclass(kw_only=True, slots=True)
class EvalSection:
  """Held-out accuracy and its settings."""

  num_items: int = setting(
    256,
    "number of distinct held-out questions",
    low=1,
    high=setting_lib.MAX_ITEMS,
    fixed=setting_lib.HELD_OUT,
  )
  every: int = setting(
    10,
    "train steps between evaluations; 0 evaluates at start and end only",
    low=0,
    free="how often; not what is measured",
  )
  temperature: float = setting(
    1.0,
    "sampling temperature of the sampled accuracy; the greedy accuracy is"
    " measured as well",
    low=setting_lib.MIN_TEMPERATURE,
    high=setting_lib.MAX_TEMPERATURE,
    also=(0,),
    fixed=setting_lib.HELD_OUT,
    of_answers=True,
  )
  samples: int = setting(
    1,
    "answers to each question; more than one also give pass@k",
    low=1,
    high=4096,
    free="more answers narrow the same accuracy",
  )
  beside: bool = setting(
    True,
    "whether evaluations between the first and the last step run while"
    " training goes on. They take one more version of the weights and one more"
    " cache, and every other decode call. If not, both slices wait for them.",
    free="when; not what is measured",
  )
  sets: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    "further sets of questions by name; docs/evaluation.md explains them",
    entries=QuestionSet,
    needs=("dataset",),
    free="each has metrics of its own name; nothing stored depends on it",
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class RunSection:
  """Supervision and persistence of a run, and what it writes beside."""

  checkpoint_every: int = setting(
    20, "train steps between two checkpoints", low=1
  )
  keep_checkpoints: int = setting(
    2, "how many of the newest checkpoints are kept", low=1
  )
  max_checkpoint_failures: int = setting(
    10,
    "so many attempts in a row that fail to write a checkpoint end the run",
    low=1,
  )
  preemption_grace_s: float = setting(
    30.0,
    "seconds between SIGTERM and the end of the machine. If a checkpoint is"
    " being written then, another one is begun behind it only if it is"
    " expected to fit into them. 0 is no limit.",
    low=0,
    high=setting_lib.MAX_TIMEOUT_S,
  )
  stall_timeout_s: float = setting(
    300.0,
    "the run ends after so many seconds without any progress",
    low=1,
    high=setting_lib.MAX_TIMEOUT_S,
  )
  join_timeout_s: float = setting(
    30.0,
    "seconds that threads and processes have to end",
    low=0.1,
    high=setting_lib.MAX_TIMEOUT_S,
  )
  sample_groups: int = setting(
    4,
    "groups of each train step whose completions are written to"
    " WORKDIR/samples, besides those that failed or were filtered; 0 writes"
    " none",
    low=0,
    high=1024,
  )
  exact_resume: bool = setting(
    False,
    "whether a run that continues from a checkpoint, or is replayed from one,"
    " repeats the bits of one that went on. Every checkpoint then ends the"
    " caches of all trajectories, which are made again. To be replayed it needs"
    " `record_schedule` too.",
  )
  record_schedule: bool = setting(
    True,
    "whether WORKDIR/schedule.jsonl gets a line for each train step, with which"
    " the run can be replayed. A trajectory takes about 50 bytes of it, and 20"
    " more for each version of the weights that wrote it.",
  )
  keep_trajectories: bool = setting(
    False,
    "whether all tokens that were trained are stored in WORKDIR/trajectories,"
    " so that a replay can show where it differs. Needs `record_schedule`.",
  )
  wandb_project: str = setting(
    "", 'project at Weights & Biases that gets the metrics too; "" is none'
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """All settings of a run."""

  seed: int = setting(
    0,
    "of all random numbers of the run",
    low=0,
    high=255,
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  model: ModelSection = section(ModelSection)
  mesh: MeshSection = section(
    MeshSection, free="the train state is read into the shardings of this start"
  )
  task: TaskSection = section(TaskSection)
  warm_start: WarmStartSection = section(
    WarmStartSection, fixed=setting_lib.WARM_START
  )
  preference: PreferenceSection = section(
    PreferenceSection, fixed=setting_lib.WARM_START
  )
  rollout: RolloutSection = section(RolloutSection, free=setting_lib.PROGRAM)
  algorithm: AlgorithmSection = section(
    AlgorithmSection, free=setting_lib.IN_THE_LOSS
  )
  critic: CriticSection = section(
    CriticSection, unread=(algorithm_section.has_no_critic,)
  )
  staleness_control: StalenessControlSection = section(
    StalenessControlSection,
    free=(
      "decides the bound of groups born afterwards; a stored bound outside of"
      " the limits becomes the nearer limit"
    ),
  )
  train: TrainSection = section(TrainSection)
  transfer: TransferSection = section(
    TransferSection,
    free=(
      "weights are published anew; those of earlier starts are removed or"
      " never adopted"
    ),
  )
  eval: EvalSection = section(EvalSection)
  run: RunSection = section(RunSection, free=setting_lib.SUPERVISION)
  cluster: ClusterSection = section(
    ClusterSection,
    free=(
      "groups, checkpoints and versions are the same in any number of processes"
    ),
  )
