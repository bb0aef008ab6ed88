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
from jaxrl_async.config import staleness_section

# Names by which the whole code refuses a setting.
ConfigError = refusals.ConfigError
require = refusals.require
require_one_of = refusals.require_one_of
shown = refusals.shown
did_you_mean = refusals.did_you_mean


class KvOnAdopt(enum.Enum):
  """What happens to running sequences when new weights arrive.

  RECOMPUTE and KEEP interrupt them: the new weights write the rest. RECOMPUTE
  rebuilds their caches under these weights, and KEEP does not. WAIT adopts the
  weights when all sequences have ended, and admits no others meanwhile.
  """

  RECOMPUTE = "recompute"
  KEEP = "keep"
  WAIT = "wait"


class OnBadRow(enum.Enum):
  """What happens if a row of a dataset cannot be used."""

  ERROR = "error"
  SKIP = "skip"


class Preemption(enum.Enum):
  """How a sequence is resumed after its cache pages were taken away.

  FAST prefills the whole sequence. EXACT prefills only what was prefilled
  before and feeds the remaining tokens through the decode program, which
  reproduces the same bits.
  """

  FAST = "fast"
  EXACT = "exact"


class Channel(enum.Enum):
  """How weights travel from the trainer to the engines."""

  ORBAX = "orbax"
  DIRECT = "direct"


class WeightFormat(enum.Enum):
  """The format in which the engine holds its large matrices."""

  FLOAT = "float"
  INT8 = "int8"
  FP8 = "fp8"


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
  """The decoder and its compute dtype.

  Attributes:
    name: a key of `models.configs.MODELS`, or a directory in Hugging Face
      format, which provides architecture, tokenizer and initial weights.
    tokenizer: directory of a tokenizer in Hugging Face format, for a model of
      `MODELS`; "" makes each character a token.
    compute_dtype: dtype of the trainer's activations; its master weights are
      float32.
    remat: activations that the backward pass computes again.
    lora: low-rank adapters to train instead of the whole model.
  """

  name: str = "quickstart"
  tokenizer: str = ""
  compute_dtype: str = "float32"
  remat: Remat = Remat.FULL
  lora: lora_section.LoraSection = dataclasses.field(
    default_factory=lora_section.LoraSection
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


@dataclasses.dataclass(kw_only=True, slots=True)
class TaskSection:
  """The source of prompts, and how answers are extracted and scored.

  Attributes:
    dataset: URI of the data, or the name of a dataset of reasoning-gym. See
      `data.tables.uri` for the kinds: jsonl, json, parquet, arrayrecord,
      datasets, hf, reasoning_gym.
    sources: a mixture instead of one dataset. By name, each has a `dataset`, a
      `weight`, and any of params, eval_dataset, eval_percent, fields,
      on_bad_row, template, chat and system that differ from those here.
    params: parameters of a dataset of reasoning-gym.
    eval_dataset: URI of the held-out rows. "" takes the dataset's own split
      `test` or `validation` if it has one (datasets, hf), and otherwise holds
      out `eval_percent` of the questions.
    eval_percent: share of the questions that a hash of their text holds out.
    fields: names the columns of a file that are the question and the answer, if
      they are not called so: {"question": "problem"}. "messages" names a column
      of chat messages, which are then the prompt. The other columns become the
      item's metadata.
    on_bad_row: whether a row that cannot be used ends the start with an error
      or is left out.
    rest_after: after this many groups in a row whose rewards were all equal, a
      question rests; 0 lets none rest.
    rest_for: so many passes are made without a question that rests.
    template: str.format template of the prompt; its fields are "question" and
      the keys of the item's metadata.
    chat: the filled-in template is a user's message, and the tokenizer's own
      chat template makes the prompt of it.
    system: message of the system before it; "" is none.
    answer_prefix: the extracted answer is the text between the last occurrence
      of this prefix in the completion and the end of its line; "" takes the
      whole completion, stripped.
    reward: what scores a completion: reasoning_gym, mathematics, code, exact,
      numeric, answered, ended, module:function of a module that does not import
      JAX, or the address of a server, http://HOST:PORT/PATH. The directory in
      which a launch script is started is searched too.
    rewards: several rewards, whose weighted sum is the score. Each entry has a
      name, and the fields function (as `reward`; also matches and overlong,
      which need params), params (of the function), weight, timeout_s, retries,
      and sources, the names of the sources whose items it scores. Only function
      is required. `reward` is then not used.
    solved_score: a completion with at least this score counts as solved, in
      held-out accuracies and in the metrics reward/pass@k.
    reward_timeout_s: deadline for one score, or for one request to a server,
      which scores a group.
    reward_workers: number of scoring processes.
    reward_retries: further attempts before a group is counted as failed.
    max_failed_groups: the run ends after this many failed groups in a row.
    question_workers: number of processes that make questions ahead of time.
      More of them help if making a question takes longer than answering it.
  """

  dataset: str = "chain_sum"
  sources: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  params: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  eval_dataset: str = ""
  eval_percent: int = 10
  fields: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  on_bad_row: OnBadRow = OnBadRow.ERROR
  rest_after: int = 0
  rest_for: int = 1
  template: str = "{question}\n"
  chat: bool = False
  system: str = ""
  answer_prefix: str = "="
  reward: str = "reasoning_gym"
  rewards: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  solved_score: float = 1.0
  reward_timeout_s: float = 10.0
  reward_workers: int = 1
  reward_retries: int = 1
  max_failed_groups: int = 8
  question_workers: int = 2


@dataclasses.dataclass(kw_only=True, slots=True)
class WarmStartSection:
  """Supervised first stage on worked solutions; num_steps = 0 skips it.

  `launch/sft.py` runs this stage alone, and only there `eval_every`,
  `num_eval_examples` and `patience` have an effect.

  Attributes:
    solver: a key of `worked_solutions.SOLVERS`; field:NAME, an entry or a
      column of the data; or module:function of (item, rng), which returns the
      solution's text. Solutions longer than a row are skipped and counted.
    num_examples: number of worked solutions; every pass over them is shuffled.
    corrupted_frac: for solvers of SOLVERS, share of intermediate results that
      are written wrong and then carried on, so that the policy has something
      left to learn.
    decay: final learning rate over the peak, reached on a cosine curve.
    checkpoint: directory of parameters to load instead of training, either from
      `launch/sft.py` or in Hugging Face format.
    eval_every: steps between two measurements of the loss on held-out examples;
      0 measures none. The parameters with the least loss are the result.
    num_eval_examples: number of held-out examples.
    patience: training ends after this many measurements in a row that are no
      better than the best; 0 never ends it early.
  """

  num_steps: int = 0
  checkpoint: str = ""
  rows_per_batch: int = 32
  solver: str = "chain_sum"
  num_examples: int = 20_000
  corrupted_frac: float = 0.2
  decay: float = 0.1
  eval_every: int = 0
  num_eval_examples: int = 256
  patience: int = 0
  optimizer: OptimizerSection = dataclasses.field(
    default_factory=OptimizerSection
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutSection:
  """The rollout slice.

  Attributes:
    num_slots: number of sequences that are decoded side by side.
    max_prompt_tokens: longer prompts are skipped and counted, never cut.
    max_completion_tokens: most tokens that the policy writes per trajectory.
    cache_tokens: cached tokens per slot, at least prompt plus completion.
    decode_steps_per_call: tokens that each sequence gains per decode call,
      after which the host looks at the results.
    prefill_rows: sequences per prefill call. If it is a multiple of
      mesh.rollout_data, the rows are split over these replicas; otherwise every
      replica computes all of them.
    prefill_buckets: padded lengths of prefill calls, up to cache_tokens.
    window_buckets: attended lengths of decode calls, up to cache_tokens.
    prefill_chunk: prompts of longer buckets are prefilled this many tokens at a
      time, with decode calls in between; 0 disables chunks.
    num_pages: the cache is a pool of this many pages, which may be fewer than
      all slots need at once; 0 gives each slot memory of its own.
    page_tokens: tokens per page.
    temperature: sampling temperature; the trainer divides its logits by the
      same value.
    stop: texts each of which ends a completion and belongs to it.
    stop_token_ids: tokens each of which ends one, besides the end tokens.
    dtype: dtype of the rollout weights and of the cache.
    weights: int8 or fp8 quantises the published matrices, with one scale per
      output channel; mismatch_kl measures the cost.
    max_group_seconds: a group that is not generated after so long is ended and
      counted as failed, for the time in which the process runs; 0 waits for
      every group. What is waited for is in the metrics rollout/oldest_group and
      rollout/oldest_group_s.
    attention: "auto" takes the platform's first kernel that works and agrees
      with plain XLA; "xla" takes no kernel; the name of a kernel (cudnn or
      splash for prefill, gpu_paged or tpu_paged for decoding over pages)
      insists on it.
  """

  num_slots: int = 32
  max_prompt_tokens: int = 64
  max_completion_tokens: int = 64
  cache_tokens: int = 128
  decode_steps_per_call: int = 16
  prefill_rows: int = 8
  prefill_buckets: tuple[int, ...] = (64, 128)
  window_buckets: tuple[int, ...] = (64, 128)
  prefill_chunk: int = 0
  num_pages: int = 0
  page_tokens: int = 16
  preemption: Preemption = Preemption.FAST
  kv_on_adopt: KvOnAdopt = KvOnAdopt.RECOMPUTE
  temperature: float = 1.0
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  dtype: str = "float32"
  weights: WeightFormat = WeightFormat.FLOAT
  max_group_seconds: float = 0.0
  attention: str = "auto"


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainSection:
  """The training slice.

  Attributes:
    num_steps: train steps of the whole run.
    tokens_per_row: length of a packed row.
    rows_per_microbatch: rows of one forward and backward pass.
    max_bad_updates: the run ends after this many non-finite updates in a row.
    vocab_chunk: vocabulary entries per chunk when logprobs are computed. If one
      chunk holds all of them, the backward pass does not recompute the logits.
    attention: attention over packed rows, a name of
      `packed_attention.IMPLEMENTATIONS`. "auto" takes the platform's first one
      that works and agrees with xla.
    decay: final learning rate over the peak, reached at num_steps; 1 keeps the
      rate constant. A run that is continued with another num_steps follows the
      new curve from there.
  """

  num_steps: int = 60
  tokens_per_row: int = 512
  rows_per_microbatch: int = 8
  max_bad_updates: int = 3
  vocab_chunk: int = 4096
  attention: str = "auto"
  decay: float = 1.0
  optimizer: OptimizerSection = dataclasses.field(
    default_factory=OptimizerSection
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class TransferSection:
  """Weight transfer between the slices.

  Attributes:
    directory: where versions are written; "" selects a memory-backed directory
      of this host if there is one, else the workdir.
  """

  channel: Channel = Channel.ORBAX
  directory: str = ""


@dataclasses.dataclass(kw_only=True, slots=True)
class EvalSection:
  """Held-out accuracy and its settings.

  Attributes:
    num_items: number of distinct held-out questions.
    every: train steps between evaluations; 0 evaluates at start and end only.
    temperature: sampling temperature of the sampled accuracy; the greedy
      accuracy is measured as well.
    samples: answers to each question; more than one also give pass@k.
    beside: whether evaluations between the first and the last step run while
      training goes on. They take one more version of the weights and one more
      cache, and every other decode call. If not, both slices wait for them.
    sets: further sets of questions by name: ConfigDicts with `dataset`, and
      optionally `num_items`, `samples`, `fields`, `params` and `template`;
      docs/evaluation.md explains them.
  """

  num_items: int = 256
  every: int = 10
  temperature: float = 1.0
  samples: int = 1
  beside: bool = True
  sets: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class RunSection:
  """Supervision and persistence of a run, and what it writes beside.

  Attributes:
    max_checkpoint_failures: so many attempts in a row that fail to write a
      checkpoint end the run.
    preemption_grace_s: seconds between SIGTERM and the end of the machine. If a
      checkpoint is being written then, another one is begun behind it only if
      it is expected to fit into them. 0 is no limit.
    sample_groups: groups of each train step whose completions are written to
      WORKDIR/samples, besides those that failed or were filtered; 0 writes
      none.
    exact_resume: whether a run that continues from a checkpoint, or is replayed
      from one, repeats the bits of one that went on. Every checkpoint then ends
      the caches of all trajectories, which are made again. To be replayed it
      needs `record_schedule` too.
    record_schedule: whether WORKDIR/schedule.jsonl gets a line for each train
      step, with which the run can be replayed. A trajectory takes about 50
      bytes of it, and 20 more for each version of the weights that wrote it.
    keep_trajectories: whether all tokens that were trained are stored in
      WORKDIR/trajectories, so that a replay can show where it differs. Needs
      `record_schedule`.
    wandb_project: project at Weights & Biases that gets the metrics too; "" is
      none.
  """

  checkpoint_every: int = 20
  keep_checkpoints: int = 2
  max_checkpoint_failures: int = 10
  preemption_grace_s: float = 30.0
  stall_timeout_s: float = 300.0
  join_timeout_s: float = 30.0
  sample_groups: int = 4
  exact_resume: bool = False
  record_schedule: bool = True
  keep_trajectories: bool = False
  wandb_project: str = ""


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """All settings of a run."""

  seed: int = 0
  model: ModelSection = dataclasses.field(default_factory=ModelSection)
  mesh: MeshSection = dataclasses.field(default_factory=MeshSection)
  task: TaskSection = dataclasses.field(default_factory=TaskSection)
  warm_start: WarmStartSection = dataclasses.field(
    default_factory=WarmStartSection
  )
  preference: PreferenceSection = dataclasses.field(
    default_factory=PreferenceSection
  )
  rollout: RolloutSection = dataclasses.field(default_factory=RolloutSection)
  algorithm: AlgorithmSection = dataclasses.field(
    default_factory=AlgorithmSection
  )
  critic: CriticSection = dataclasses.field(default_factory=CriticSection)
  staleness_control: StalenessControlSection = dataclasses.field(
    default_factory=StalenessControlSection
  )
  train: TrainSection = dataclasses.field(default_factory=TrainSection)
  transfer: TransferSection = dataclasses.field(default_factory=TransferSection)
  eval: EvalSection = dataclasses.field(default_factory=EvalSection)
  run: RunSection = dataclasses.field(default_factory=RunSection)
  cluster: ClusterSection = dataclasses.field(default_factory=ClusterSection)
