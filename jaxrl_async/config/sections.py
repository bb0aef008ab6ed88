"""All settings of a run, as dataclasses that may be nested.

The `get_config(variant)` of a config file returns a `Config`, and absl's
`--config.section.field=value` overrides single fields. After that,
`config_checks.validate` checks that the fields fit together. The dataclasses
are neither frozen nor checked in `__post_init__`, because overrides arrive
after construction.
"""

import dataclasses
import enum

from ml_collections import config_dict

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import cluster_section
from jaxrl_async.config import critic_section
from jaxrl_async.config import lora_section
from jaxrl_async.config import mesh_sections
from jaxrl_async.config import optimizer_section
from jaxrl_async.config import preference_section
from jaxrl_async.config import refusals
from jaxrl_async.config import rollout_section
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config import staleness_section
from jaxrl_async.config import task_section

# Names by which the whole code refuses a setting.
ConfigError = refusals.ConfigError
require = refusals.require
require_one_of = refusals.require_one_of
shown = refusals.shown
did_you_mean = refusals.did_you_mean


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


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelSection:
  """The decoder and its compute dtype."""

  name: str = setting_lib.setting(
    "quickstart",
    "a key of `models.configs.MODELS`, or a directory in Hugging Face format,"
    " which provides architecture, tokenizer and initial weights",
    fixed="stored weights and tokens are of that model and tokenizer",
  )
  tokenizer: str = setting_lib.setting(
    "",
    "directory of a tokenizer in Hugging Face format, for a model of"
    ' `MODELS`; "" makes each character a token',
    fixed="stored weights and tokens are of that tokenizer",
    of_answers=True,
  )
  compute_dtype: str = setting_lib.setting(
    "float32",
    "dtype of the trainer's activations; its master weights are float32",
    choices=setting_lib.DTYPES,
    free="activations only; stored weights are float32",
  )
  remat: Remat = setting_lib.setting(
    Remat.FULL,
    "activations that the backward pass computes again",
    free=setting_lib.MEMORY,
  )
  lora: lora_section.LoraSection = setting_lib.section(
    lora_section.LoraSection,
  )


MESH_AXES = mesh_sections.MESH_AXES
ShardingRules = mesh_sections.ShardingRules
MeshSection = mesh_sections.MeshSection
ClusterKind = cluster_section.ClusterKind
ClusterSection = cluster_section.ClusterSection
AdvantageScale = algorithm_section.AdvantageScale
Aggregation = algorithm_section.Aggregation
AlgorithmSection = algorithm_section.AlgorithmSection
BehaviorWeightCapMode = algorithm_section.BehaviorWeightCapMode
BehaviorWeightLevel = algorithm_section.BehaviorWeightLevel
CriticSection = critic_section.CriticSection
CriticTrunk = critic_section.CriticTrunk
KlEstimator = algorithm_section.KlEstimator
OptimizerName = optimizer_section.OptimizerName
OptimizerSection = optimizer_section.OptimizerSection
ProximalMode = algorithm_section.ProximalMode
PreferenceLoss = preference_section.PreferenceLoss
PreferenceSection = preference_section.PreferenceSection
RewardLoss = preference_section.RewardLoss
StalenessControlSection = staleness_section.StalenessControlSection
KvOnAdopt = rollout_section.KvOnAdopt
OnBadRow = task_section.OnBadRow
Preemption = rollout_section.Preemption
RolloutSection = rollout_section.RolloutSection
TaskSection = task_section.TaskSection
WeightFormat = rollout_section.WeightFormat


@dataclasses.dataclass(kw_only=True, slots=True)
class WarmStartSection:
  """Supervised first stage on worked solutions; num_steps = 0 skips it.

  `launch/sft.py` runs this stage alone, and only there `eval_every`,
  `num_eval_examples` and `patience` have an effect.
  """

  num_steps: int = setting_lib.setting(
    0,
    "updates; 0 skips the stage",
    low=0,
  )
  checkpoint: str = setting_lib.setting(
    "",
    "directory of parameters to load instead of training, either from"
    " `launch/sft.py` or in Hugging Face format",
  )
  rows_per_batch: int = setting_lib.setting(
    32,
    "rows of `train.tokens_per_row` tokens in each update",
    low=1,
    high=setting_lib.MAX_GROUP,
  )
  solver: str = setting_lib.setting(
    "chain_sum",
    "a key of `worked_solutions.SOLVERS`; field:NAME, an entry or a column of"
    " the data; or module:function of (item, rng), which returns the"
    " solution's text. Solutions longer than a row are skipped and counted.",
  )
  num_examples: int = setting_lib.setting(
    20_000,
    "number of worked solutions; every pass over them is shuffled",
    low=1,
    high=1000000,
  )
  corrupted_frac: float = setting_lib.setting(
    0.2,
    "for solvers of SOLVERS, share of intermediate results that are written"
    " wrong and then carried on, so that the policy has something left to"
    " learn",
    low=0,
    high=1,
  )
  decay: float = setting_lib.setting(
    0.1,
    "final learning rate over the peak, reached on a cosine curve",
    low=0,
    high=1,
  )
  eval_every: int = setting_lib.setting(
    0,
    "steps between two measurements of the loss on held-out examples; 0"
    " measures none. The parameters with the least loss are the result.",
    low=0,
  )
  num_eval_examples: int = setting_lib.setting(
    256,
    "number of held-out examples",
    low=1,
    high=1000000,
  )
  patience: int = setting_lib.setting(
    0,
    "training ends after this many measurements in a row that are no better"
    " than the best; 0 never ends it early",
    low=0,
  )
  optimizer: OptimizerSection = setting_lib.section(
    OptimizerSection,
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainSection:
  """The training slice."""

  num_steps: int = setting_lib.setting(
    60,
    "train steps of the whole run",
    low=1,
    free=(
      "how far to go; a decaying learning rate follows the new curve from there"
    ),
  )
  tokens_per_row: int = setting_lib.setting(
    512,
    "length of a packed row",
    low=1,
    free=(
      "rows are packed anew each step; stored trajectories have to fit, which"
      " is checked"
    ),
  )
  rows_per_microbatch: int = setting_lib.setting(
    8,
    "rows of one forward and backward pass",
    low=1,
    free=setting_lib.MEMORY,
  )
  max_bad_updates: int = setting_lib.setting(
    3,
    "the run ends after this many non-finite updates in a row",
    low=1,
    free=setting_lib.SUPERVISION,
  )
  vocab_chunk: int = setting_lib.setting(
    4096,
    "vocabulary entries per chunk when logprobs are computed. If one chunk"
    " holds all of them, the backward pass does not recompute the logits.",
    low=1,
    free=setting_lib.MEMORY,
  )
  attention: str = setting_lib.setting(
    "auto",
    "attention over packed rows, a name of"
    ' `packed_attention.IMPLEMENTATIONS`. "auto" takes the platform\'s first'
    " one that works and agrees with xla.",
    free=setting_lib.MEMORY,
  )
  decay: float = setting_lib.setting(
    1.0,
    "final learning rate over the peak, reached at num_steps; 1 keeps the"
    " rate constant. A run that is continued with another num_steps follows"
    " the new curve from there.",
    low=0,
    high=1,
    free=(
      "the rate is a function of the number of updates, which goes on: the"
      " new curve holds from there"
    ),
  )
  optimizer: OptimizerSection = setting_lib.section(
    OptimizerSection,
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class TransferSection:
  """Weight transfer between the slices."""

  channel: Channel = setting_lib.setting(
    Channel.ORBAX,
    "how weights travel from the trainer to the engines",
  )
  directory: str = setting_lib.setting(
    "",
    'where versions are written; "" selects a memory-backed directory of'
    " this host if there is one, else the workdir",
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class EvalSection:
  """Held-out accuracy and its settings."""

  num_items: int = setting_lib.setting(
    256,
    "number of distinct held-out questions",
    low=1,
    high=setting_lib.MAX_ITEMS,
    fixed=setting_lib.HELD_OUT,
  )
  every: int = setting_lib.setting(
    10,
    "train steps between evaluations; 0 evaluates at start and end only",
    low=0,
    free="how often; not what is measured",
  )
  temperature: float = setting_lib.setting(
    1.0,
    "sampling temperature of the sampled accuracy; the greedy accuracy is"
    " measured as well",
    low=setting_lib.MIN_TEMPERATURE,
    high=setting_lib.MAX_TEMPERATURE,
    also=(0,),
    fixed=setting_lib.HELD_OUT,
    of_answers=True,
  )
  samples: int = setting_lib.setting(
    1,
    "answers to each question; more than one also give pass@k",
    low=1,
    high=4096,
    free="more answers narrow the same accuracy",
  )
  beside: bool = setting_lib.setting(
    True,
    "whether evaluations between the first and the last step run while"
    " training goes on. They take one more version of the weights and one more"
    " cache, and every other decode call. If not, both slices wait for them.",
    free="when; not what is measured",
  )
  sets: config_dict.ConfigDict = setting_lib.setting(
    config_dict.ConfigDict,
    "further sets of questions by name: ConfigDicts with `dataset`, and"
    " optionally `num_items`, `samples`, `fields`, `params` and `template`;"
    " docs/evaluation.md explains them",
    free="each has metrics of its own name; nothing stored depends on it",
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class RunSection:
  """Supervision and persistence of a run, and what it writes beside."""

  checkpoint_every: int = setting_lib.setting(
    20,
    "train steps between two checkpoints",
    low=1,
  )
  keep_checkpoints: int = setting_lib.setting(
    2,
    "how many of the newest checkpoints are kept",
    low=1,
  )
  max_checkpoint_failures: int = setting_lib.setting(
    10,
    "so many attempts in a row that fail to write a checkpoint end the run",
    low=1,
  )
  preemption_grace_s: float = setting_lib.setting(
    30.0,
    "seconds between SIGTERM and the end of the machine. If a checkpoint is"
    " being written then, another one is begun behind it only if it is"
    " expected to fit into them. 0 is no limit.",
    low=0,
    high=setting_lib.MAX_TIMEOUT_S,
  )
  stall_timeout_s: float = setting_lib.setting(
    300.0,
    "the run ends after so many seconds without any progress",
    low=1,
    high=setting_lib.MAX_TIMEOUT_S,
  )
  join_timeout_s: float = setting_lib.setting(
    30.0,
    "seconds that threads and processes have to end",
    low=0.1,
    high=setting_lib.MAX_TIMEOUT_S,
  )
  sample_groups: int = setting_lib.setting(
    4,
    "groups of each train step whose completions are written to"
    " WORKDIR/samples, besides those that failed or were filtered; 0 writes"
    " none",
    low=0,
    high=1024,
  )
  exact_resume: bool = setting_lib.setting(
    False,
    "whether a run that continues from a checkpoint, or is replayed from one,"
    " repeats the bits of one that went on. Every checkpoint then ends the"
    " caches of all trajectories, which are made again. To be replayed it needs"
    " `record_schedule` too.",
  )
  record_schedule: bool = setting_lib.setting(
    True,
    "whether WORKDIR/schedule.jsonl gets a line for each train step, with which"
    " the run can be replayed. A trajectory takes about 50 bytes of it, and 20"
    " more for each version of the weights that wrote it.",
  )
  keep_trajectories: bool = setting_lib.setting(
    False,
    "whether all tokens that were trained are stored in WORKDIR/trajectories,"
    " so that a replay can show where it differs. Needs `record_schedule`.",
  )
  wandb_project: str = setting_lib.setting(
    "",
    'project at Weights & Biases that gets the metrics too; "" is none',
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """All settings of a run."""

  seed: int = setting_lib.setting(
    0,
    "of all random numbers of the run",
    low=0,
    high=255,
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  model: ModelSection = setting_lib.section(
    ModelSection,
  )
  mesh: MeshSection = setting_lib.section(
    MeshSection,
    free="the train state is read into the shardings of this start",
  )
  task: TaskSection = setting_lib.section(
    TaskSection,
  )
  warm_start: WarmStartSection = setting_lib.section(
    WarmStartSection,
    fixed=setting_lib.WARM_START,
  )
  preference: PreferenceSection = setting_lib.section(
    PreferenceSection,
    fixed=setting_lib.WARM_START,
  )
  rollout: RolloutSection = setting_lib.section(
    RolloutSection,
  )
  algorithm: AlgorithmSection = setting_lib.section(
    AlgorithmSection,
  )
  critic: CriticSection = setting_lib.section(
    CriticSection,
  )
  staleness_control: StalenessControlSection = setting_lib.section(
    StalenessControlSection,
    free=(
      "decides the bound of groups born afterwards; a stored bound outside of"
      " the limits becomes the nearer limit"
    ),
  )
  train: TrainSection = setting_lib.section(
    TrainSection,
  )
  transfer: TransferSection = setting_lib.section(
    TransferSection,
    free=(
      "weights are published anew; those of earlier starts are removed or"
      " never adopted"
    ),
  )
  eval: EvalSection = setting_lib.section(
    EvalSection,
  )
  run: RunSection = setting_lib.section(
    RunSection,
    free=setting_lib.SUPERVISION,
  )
  cluster: ClusterSection = setting_lib.section(
    ClusterSection,
    free=(
      "groups, checkpoints and versions are the same in any number of processes"
    ),
  )
