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
OnFailedScore = task_section.OnFailedScore
Preemption = rollout_section.Preemption
RolloutSection = rollout_section.RolloutSection
TaskSection = task_section.TaskSection
WeightFormat = rollout_section.WeightFormat


class Channel(enum.Enum):
  """How weights travel from the trainer to the engines.

  DIRECT copies from device to device, within one process. ORBAX writes versions
  to a directory that both sides see. AUTO is DIRECT if the engine is in the
  process that trains, and ORBAX otherwise.
  """

  AUTO = "auto"
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
    0, low=0, high=setting_lib.MAX_GROUP, fixed="the stored adapters have it"
  )
  """The rank of every adapter; 0 switches adapters off."""
  alpha: float = setting(
    16.0,
    low=setting_lib.MIN_FLOAT,
    fixed="the stored adapters were trained with it",
  )
  """What an adapter adds is multiplied by alpha / rank."""
  modules: tuple[str, ...] = setting(
    LORA_MODULES,
    choices=LORA_MODULES,
    fixed="the stored adapters are of these kernels",
  )
  """The kernels of each layer that get an adapter."""
  base_dtype: str = setting(
    "bfloat16",
    choices=LORA_BASE_DTYPES,
    fixed="the stored adapters were trained on that base",
  )
  """How the trainer holds the frozen model. int8 quantises the matrices of the
  layers; the rest is then bfloat16."""
  adapter: str = setting(
    "",
    directory="use one in PEFT's format",
    fixed="the stored adapters came of it",
  )
  """Directory of an adapter to start from, in PEFT's format. "" starts from a
  new one, which changes nothing before its first update."""


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelSection:
  """The decoder and its compute dtype."""

  name: str = setting(
    "quickstart",
    fixed="stored weights and tokens are of that model and tokenizer",
  )
  """A key of `models.configs.MODELS`, a directory in Hugging Face format, or
  hf:ORG/NAME[@REVISION] of its hub. The last two provide the architecture, the
  tokenizer and the initial weights."""
  tokenizer: str = setting(
    "",
    directory="use a directory with a tokenizer.json",
    fixed="stored weights and tokens are of that tokenizer",
    of_answers=True,
  )
  """Directory of a tokenizer in Hugging Face format, for a model of `MODELS`;
  "" makes each character a token."""
  max_positions: int = setting(
    0,
    low=0,
    high=setting_lib.MAX_INT,
    free="a bound on lengths; no weight depends on it",
  )
  """Longest sequence that the model may get; 0 is max_position_embeddings of
  its config.json, beyond which it was not trained."""
  compute_dtype: str = setting(
    "float32",
    choices=setting_lib.DTYPES,
    free="activations only; stored weights are float32",
  )
  """Dtype of the trainer's activations; its master weights are float32."""
  remat: Remat = setting(Remat.FULL, free=setting_lib.MEMORY)
  """Activations that the backward pass computes again."""
  lora: LoraSection = section(LoraSection)


MESH_AXES = ("data", "fsdp", "context", "tensor")


def _axes(*default: str) -> Any:
  return setting(default, choices=MESH_AXES)


def _size() -> Any:
  return setting(1, low=1, also=(-1,))


@dataclasses.dataclass(kw_only=True, slots=True)
class ShardingRules:
  """Mesh axes that split each logical axis of an array; () leaves it whole."""

  batch: tuple[str, ...] = _axes("data", "fsdp")
  """Rows of a batch, slots of a cache."""
  tokens: tuple[str, ...] = _axes("context")
  """Tokens of a row."""
  layers: tuple[str, ...] = _axes()
  """Stacked layers of the trainer's parameters."""
  vocab: tuple[str, ...] = _axes("tensor")
  """Entries of the vocabulary."""
  embed: tuple[str, ...] = _axes("fsdp", "context")
  """The residual stream."""
  heads: tuple[str, ...] = _axes("tensor")
  """Query heads."""
  kv_heads: tuple[str, ...] = _axes("tensor")
  """Heads of keys and values."""
  head: tuple[str, ...] = _axes()
  """The numbers of a head."""
  mlp: tuple[str, ...] = _axes("tensor")
  """The hidden layer of an MLP, or of each expert."""
  experts: tuple[str, ...] = _axes()
  """The experts of a layer."""


def _rollout_rules() -> ShardingRules:
  # Decoding reads every weight for every token, so gathering weights over fsdp
  # would dominate its time.
  return ShardingRules(batch=("data",), embed=(), tokens=())


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshSection:
  """Number of devices along each axis of both slices; -1 means the rest.

  If there is only one device, both slices share it.
  """

  train_data: int = _size()
  """Splits the rows of a batch."""
  train_fsdp: int = _size()
  """Splits the rows of a batch, and the weights."""
  train_context: int = _size()
  """Splits the tokens of a row, for rows too long for one device. Like
  train_fsdp it also splits the weights."""
  train_tensor: int = _size()
  """Splits heads, MLPs and the vocabulary."""
  rollout_data: int = _size()
  """Splits the slots; each part has all weights."""
  rollout_tensor: int = _size()
  """Splits heads, MLPs and the vocabulary."""
  train_rules: ShardingRules = section(ShardingRules)
  rollout_rules: ShardingRules = section(_rollout_rules)


def _rate_has_schedule(section: Any, config: Any) -> str:
  del config
  if not section.optimizer.rate_schedule:
    return ""
  return "its optimizer's rate_schedule says how the rate changes"


def _train_rate_has_schedule(section: Any, config: Any) -> str:
  """Return why nothing reads the decay, which the critic's rate may have."""
  is_of_critic = (
    config.algorithm.advantage == "gae"
    and not config.critic.optimizer.rate_schedule
  )
  return "" if is_of_critic else _rate_has_schedule(section, config)


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

  num_steps: int = setting(0, low=0)
  """Updates; 0 skips the stage."""
  checkpoint: str = setting(
    "", directory="launch/sft.py writes parameters to WORKDIR/params"
  )
  """Directory of parameters to load instead of training, either from
  `launch/sft.py` or in Hugging Face format."""
  rows_per_batch: int = setting(32, low=1, high=setting_lib.MAX_GROUP)
  """Rows of `train.tokens_per_row` tokens in each update."""
  solver: str = setting("chain_sum")
  """A key of `worked_solutions.SOLVERS`; field:NAME, an entry or a column of
  the data; or module:function of (item, rng), which returns the solution's
  text, or a text that is only shown and the rest. Solutions longer than a row
  are skipped and counted."""
  num_examples: int = setting(20_000, low=1, high=1000000)
  """Number of worked solutions; every pass over them is shuffled."""
  corrupted_frac: float = setting(0.2, low=0, high=1)
  """For solvers of SOLVERS, share of intermediate results that are written
  wrong and then carried on, so that the policy has something left to learn."""
  decay: float = setting(0.1, low=0, high=1, unread=(_rate_has_schedule,))
  """Final learning rate over the peak, reached on a cosine schedule."""
  eval_every: int = setting(0, low=0)
  """Steps between two measurements of the loss on held-out examples; 0 measures
  none. The parameters with the least loss are the result."""
  num_eval_examples: int = setting(256, low=1, high=1000000)
  """Number of held-out examples."""
  patience: int = setting(0, low=0, unread=(_measures_nothing,))
  """Training ends after this many measurements in a row that are no better than
  the best; 0 never ends it early."""
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

  loss: PreferenceLoss = setting(PreferenceLoss.DPO)
  """What `launch/prefer.py` minimises for each pair."""
  beta: float = setting(0.1, low=setting_lib.MIN_FLOAT)
  """Strength of the tie to the reference."""
  label_smoothing: float = setting(0.0, low=0, below=0.5, unread=(_is_not_dpo,))
  """Share of the pairs that DPO takes to be labelled the wrong way round."""
  length_normalised: bool = setting(False)
  """Divide the log-ratio of a completion by its number of tokens."""
  reward_loss: RewardLoss = setting(RewardLoss.BRADLEY_TERRY)
  """What `launch/reward_model.py` minimises."""
  chosen: str = setting("field:chosen")
  """The better completion: field:NAME, an entry or a column of the data, which
  is a text or a chat that ends with the assistant's answer; a key of
  `worked_solutions.SOLVERS`, whose solution is then right; or module:function
  of (item, rng), which returns a text."""
  rejected: str = setting("field:rejected")
  """The worse one, in the same way. A solver of SOLVERS makes mistakes as often
  as `warm_start.corrupted_frac` says, which must then be above 0. Pairs whose
  completions are equal are left out and counted."""
  steps: str = setting("steps")
  """Column of the data with the steps of a solution, a list of texts."""
  labels: str = setting("labels")
  """Column with a label for each of them: true or 1 if it is right."""
  num_steps: int = setting(200, low=1)
  """Number of updates."""
  rows_per_batch: int = setting(32, low=1, high=setting_lib.MAX_GROUP)
  """Rows of `train.tokens_per_row` tokens in each."""
  num_examples: int = setting(10_000, low=1, high=1000000)
  """Number of pairs or solutions; every pass over them is shuffled."""
  decay: float = setting(0.1, low=0, high=1, unread=(_rate_has_schedule,))
  """Final learning rate over the peak, reached on a cosine schedule."""
  eval_every: int = setting(20, low=0)
  """Steps between two measurements on held-out ones; 0 measures none. The
  parameters with the least loss are the result."""
  num_eval_examples: int = setting(256, low=1, high=1000000)
  """Number of held-out pairs or solutions."""
  patience: int = setting(0, low=0, unread=(_measures_nothing,))
  """Training ends after this many measurements in a row that are no better than
  the best; 0 never ends it early."""
  optimizer: OptimizerSection = section(
    lambda: OptimizerSection(learning_rate=1e-6)
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainSection:
  """The training slice."""

  num_steps: int = setting(
    60,
    low=1,
    free="how far to go; a rate that decays follows the new curve from there",
  )
  """Train steps of the whole run."""
  tokens_per_row: int = setting(
    512,
    low=1,
    free="rows are packed anew; that stored trajectories fit is checked",
  )
  """Length of a packed row."""
  rows_per_microbatch: int = setting(8, low=1, free=setting_lib.MEMORY)
  """Rows of one forward and backward pass."""
  max_bad_updates: int = setting(3, low=1, free=setting_lib.SUPERVISION)
  """The run ends after this many non-finite updates in a row."""
  vocab_chunk: int = setting(4096, low=1, free=setting_lib.MEMORY)
  """Vocabulary entries per chunk when logprobs are computed. If one chunk holds
  all of them, the backward pass does not recompute the logits."""
  attention: str = setting("auto", free=setting_lib.MEMORY)
  """Attention over packed rows, a name of `packed_attention.IMPLEMENTATIONS`.
  "auto" takes the platform's first one that works and agrees with xla."""
  decay: float = setting(
    1.0,
    low=0,
    high=1,
    unread=(_train_rate_has_schedule,),
    free="the rate is a function of the number of updates, which goes on: the"
    " new schedule holds from there",
  )
  """Final learning rate over the peak, reached at num_steps; 1 keeps the rate
  constant. A run that is continued with another num_steps follows the new
  schedule from there."""
  optimizer: OptimizerSection = section(OptimizerSection)


def _is_direct(section: Any, config: Any) -> str:
  is_apart = config.cluster.kind is ClusterKind.RAY
  is_direct = section.channel is Channel.DIRECT or (
    section.channel is Channel.AUTO and not is_apart
  )
  return "weights are copied from device to device" if is_direct else ""


@dataclasses.dataclass(kw_only=True, slots=True)
class TransferSection:
  """Weight transfer between the slices."""

  channel: Channel = setting(Channel.AUTO)
  """How weights travel from the trainer to the engines."""
  directory: str = setting("", unread=(_is_direct,))
  """Where versions are written; "" selects a memory-backed directory of this
  host if there is one, else the workdir."""


@dataclasses.dataclass(kw_only=True, slots=True)
class QuestionSet:
  """An entry of `eval.sets`; what it does not give is that of the run."""

  dataset: str = setting("")
  """As `task.dataset`."""
  num_items: int = setting(0, low=0, high=setting_lib.MAX_ITEMS)
  """Number of questions; 0 is all of them."""
  samples: int = setting(1, low=1, high=setting_lib.MAX_SAMPLES)
  """Answers to each."""
  fields: config_dict.ConfigDict = setting(config_dict.ConfigDict)
  """As `task.fields`."""
  params: config_dict.ConfigDict = setting(config_dict.ConfigDict)
  """As `task.params`."""
  template: str = setting("{question}\n")
  """As `task.template`."""


@dataclasses.dataclass(kw_only=True, slots=True)
class EvalSection:
  """Held-out accuracy and its settings."""

  num_items: int = setting(
    256, low=1, high=setting_lib.MAX_ITEMS, fixed=setting_lib.HELD_OUT
  )
  """Number of distinct held-out questions."""
  every: int = setting(10, low=0, free="how often; not what is measured")
  """Train steps between evaluations; 0 evaluates at start and end only."""
  temperature: float = setting(
    1.0,
    low=setting_lib.MIN_TEMPERATURE,
    high=setting_lib.MAX_TEMPERATURE,
    also=(0,),
    fixed=setting_lib.HELD_OUT,
    of_answers=True,
  )
  """Sampling temperature of the sampled accuracy; the greedy accuracy is
  measured as well."""
  samples: int = setting(
    1, low=1, high=4096, free="more answers narrow the same accuracy"
  )
  """Answers to each question; more than one also give pass@k."""
  sets: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    entries=QuestionSet,
    needs=("dataset",),
    free="each has metrics of its own name; nothing stored depends on it",
  )
  """Further sets of questions by name; see docs/how-to/evaluation.md."""


@dataclasses.dataclass(kw_only=True, slots=True)
class RunSection:
  """Supervision and persistence of a run, and what it writes beside."""

  checkpoint_every: int = setting(20, low=1)
  """Train steps between two checkpoints."""
  keep_checkpoints: int = setting(2, low=1)
  """How many of the newest checkpoints are kept."""
  max_checkpoint_failures: int = setting(10, low=1)
  """So many attempts in a row that fail to write a checkpoint end the run."""
  preemption_grace_s: float = setting(
    30.0, low=0, high=setting_lib.MAX_TIMEOUT_S
  )
  """Seconds between SIGTERM and the end of the machine. If a checkpoint is
  being written then, another one is begun behind it only if it is expected to
  fit into them. 0 is no limit."""
  stall_timeout_s: float = setting(300.0, low=1, high=setting_lib.MAX_TIMEOUT_S)
  """The run ends after so many seconds without any progress."""
  join_timeout_s: float = setting(30.0, low=0.1, high=setting_lib.MAX_TIMEOUT_S)
  """Seconds that threads and processes have to end."""
  sample_groups: int = setting(4, low=0, high=1024)
  """Groups of each train step whose completions are written to WORKDIR/samples,
  besides those that failed or were filtered; 0 writes none."""
  exact_resume: bool = setting(False)
  """Whether a run that continues from a checkpoint, or is replayed from one,
  repeats the bits of one that went on. Every checkpoint then ends the caches of
  all trajectories, which are made again. To be replayed it needs
  `record_timing` too."""
  record_timing: bool = setting(True)
  """Whether WORKDIR/timing.jsonl gets a line for each train step, with which
  the run can be replayed. A trajectory takes about 50 bytes of it, and 20 more
  for each version of the weights that wrote it."""
  wandb_project: str = setting("")
  """Project at Weights & Biases that gets the metrics too; "" is none."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """All settings of a run."""

  seed: int = setting(
    0, low=0, high=255, fixed=setting_lib.QUESTIONS, of_answers=True
  )
  """Of all random numbers of the run."""
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
