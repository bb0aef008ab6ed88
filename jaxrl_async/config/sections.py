"""All settings of a run, as dataclasses that may be nested.

The `get_config(variant)` of a config file returns a `Config`, and absl's
`--config.section.field=value` overrides single fields. After that,
`config_checks.validate` checks that the fields fit together. The dataclasses
are neither frozen nor checked in `__post_init__`, because overrides arrive
after construction.
"""

from collections.abc import Collection, Iterable
import dataclasses
import difflib
import enum
from typing import Any

from ml_collections import config_dict


class ConfigError(ValueError):
  """A setting is wrong; the message is one line that names the field."""


class KvOnAdopt(enum.Enum):
  """What happens to the caches of running sequences when new weights arrive."""

  RECOMPUTE = "recompute"
  KEEP = "keep"


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


class AdvantageScale(enum.Enum):
  """The divisor of a group's centred rewards."""

  STD = "std"
  NONE = "none"


class BehaviorWeightCapMode(enum.Enum):
  """What happens to tokens whose pi_prox / pi_behav exceeds the cap."""

  MASK = "mask"
  TRUNCATE = "truncate"


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


class OptimizerName(enum.Enum):
  """The optimizers of the warm start and of the RL stage."""

  ADAMW = "adamw"
  MUON = "muon"


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelSection:
  """The decoder and its compute dtype.

  Attributes:
    name: a key of `models.configs.MODELS`, or a directory in Hugging Face
      format, which provides architecture, tokenizer and initial weights.
    compute_dtype: dtype of the trainer's activations; its master weights are
      float32.
    remat: activations that the backward pass computes again.
  """

  name: str = "quickstart"
  compute_dtype: str = "float32"
  remat: Remat = Remat.FULL


MESH_AXES = ("data", "fsdp", "context", "tensor")


@dataclasses.dataclass(kw_only=True, slots=True)
class ShardingRules:
  """Mesh axes that split each logical axis of an array; () leaves it whole.

  Attributes:
    batch: rows of a batch, slots of a cache.
    tokens: tokens of a row.
    layers: stacked layers of the trainer's parameters.
  """

  batch: tuple[str, ...] = ("data", "fsdp")
  tokens: tuple[str, ...] = ("context",)
  layers: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ("tensor",)
  embed: tuple[str, ...] = ("fsdp", "context")
  heads: tuple[str, ...] = ("tensor",)
  kv_heads: tuple[str, ...] = ("tensor",)
  head: tuple[str, ...] = ()
  mlp: tuple[str, ...] = ("tensor",)


def _rollout_rules() -> ShardingRules:
  # Decoding reads every weight for every token, so gathering weights over fsdp
  # would dominate its time.
  return ShardingRules(batch=("data",), embed=(), tokens=())


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshSection:
  """Number of devices along each axis of both slices; -1 means the rest.

  If there is only one device, both slices share it.

  Attributes:
    train_context: splits the tokens of a row, for rows too long for one device.
      Like train_fsdp it also splits the weights.
    train_rules: mesh axes that split each logical axis; on the command line
      for example --config.mesh.train_rules.kv_heads="()".
  """

  train_data: int = 1
  train_fsdp: int = 1
  train_context: int = 1
  train_tensor: int = 1
  rollout_data: int = 1
  rollout_tensor: int = 1
  train_rules: ShardingRules = dataclasses.field(default_factory=ShardingRules)
  rollout_rules: ShardingRules = dataclasses.field(
    default_factory=_rollout_rules
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class TaskSection:
  """The source of prompts, and how answers are extracted and scored.

  Attributes:
    dataset: name of any dataset of reasoning-gym, or "jsonl:" and the path of a
      file with one JSON object in each line.
    params: parameters of a dataset of reasoning-gym.
    eval_dataset: "jsonl:" and the path of the file for evaluations. "" holds
      out `eval_percent` of the questions of a file, by a hash of their text.
    eval_percent: see `eval_dataset`.
    fields: names the columns of a file that are the question and the answer, if
      they are not called so: {"question": "problem"}. The other columns become
      the item's metadata.
    on_bad_row: whether a row that cannot be used ends the start with an error
      or is left out.
    template: str.format template of the prompt; its fields are "question" and
      the keys of the item's metadata.
    answer_prefix: the extracted answer is the text between the last occurrence
      of this prefix in the completion and the end of its line; "" takes the
      whole completion, stripped.
    reward: what scores a completion: reasoning_gym, mathematics, code, exact,
      numeric, or module:function of a module that does not import JAX. The
      directory in which a launch script is started is searched too.
    reward_timeout_s: deadline for one score.
    reward_workers: number of scoring processes.
    reward_retries: further attempts before a group is counted as failed.
    max_failed_groups: the run ends after this many failed groups in a row.
    question_workers: number of processes that make questions ahead of time.
      More of them help if making a question takes longer than answering it.
  """

  dataset: str = "chain_sum"
  params: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  eval_dataset: str = ""
  eval_percent: int = 10
  fields: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  on_bad_row: OnBadRow = OnBadRow.ERROR
  template: str = "{question}\n"
  answer_prefix: str = "="
  reward: str = "reasoning_gym"
  reward_timeout_s: float = 10.0
  reward_workers: int = 1
  reward_retries: int = 1
  max_failed_groups: int = 8
  question_workers: int = 2


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerSection:
  """An Optax optimizer with linear warmup and global-norm clipping.

  Attributes:
    state_dtype: dtype of the first moment, Muon's included; the second moment
      stays float32.
    offload: keep the moments in host memory between updates.
  """

  name: OptimizerName = OptimizerName.ADAMW
  learning_rate: float = 3e-4
  warmup_steps: int = 0
  b1: float = 0.9
  b2: float = 0.99
  eps: float = 1e-8
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0
  state_dtype: str = "float32"
  offload: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class WarmStartSection:
  """Supervised first stage on worked solutions; num_steps = 0 skips it.

  Attributes:
    solver: a key of `worked_solutions.SOLVERS`.
    num_examples: number of worked solutions; every pass over them is shuffled.
    corrupted_frac: share of intermediate results that are written wrong and
      then carried on, so that the policy has something left to learn.
    decay: final learning rate over the peak, reached on a cosine curve.
    checkpoint: directory of parameters to load instead of training, either from
      `launch/sft.py` or in Hugging Face format.
  """

  num_steps: int = 0
  checkpoint: str = ""
  rows_per_batch: int = 32
  solver: str = "chain_sum"
  num_examples: int = 20_000
  corrupted_frac: float = 0.2
  decay: float = 0.1
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
    dtype: dtype of the rollout weights and of the cache.
    weights: int8 or fp8 quantises the published matrices, with one scale per
      output channel; mismatch_kl measures the cost.
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
  dtype: str = "float32"
  weights: WeightFormat = WeightFormat.FLOAT
  attention: str = "auto"


@dataclasses.dataclass(kw_only=True, slots=True)
class AlgorithmSection:
  """Group-relative advantages and the decoupled PPO loss.

  Attributes:
    max_staleness: bound on train version minus token version; 0 is synchronous
      training.
    filter_zero_std: drop groups whose rewards are all equal, since they carry
      no gradient. A thousand of them in a row end the run.
  """

  max_staleness: int = 4
  group_size: int = 16
  groups_per_step: int = 32
  num_minibatches: int = 4
  clip_low: float = 0.2
  clip_high: float = 0.2
  behavior_weight_cap: float = 5.0
  behavior_weight_cap_mode: BehaviorWeightCapMode = BehaviorWeightCapMode.MASK
  proximal: ProximalMode = ProximalMode.RECOMPUTE
  advantage_scale: AdvantageScale = AdvantageScale.STD
  filter_zero_std: bool = False


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
  """

  num_items: int = 256
  every: int = 10
  temperature: float = 1.0


@dataclasses.dataclass(kw_only=True, slots=True)
class RunSection:
  """Supervision and persistence of a run."""

  checkpoint_every: int = 20
  keep_checkpoints: int = 2
  stall_timeout_s: float = 300.0
  join_timeout_s: float = 30.0


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
  rollout: RolloutSection = dataclasses.field(default_factory=RolloutSection)
  algorithm: AlgorithmSection = dataclasses.field(
    default_factory=AlgorithmSection
  )
  train: TrainSection = dataclasses.field(default_factory=TrainSection)
  transfer: TransferSection = dataclasses.field(default_factory=TransferSection)
  eval: EvalSection = dataclasses.field(default_factory=EvalSection)
  run: RunSection = dataclasses.field(default_factory=RunSection)


def require(holds: bool, path: str, message: str) -> None:
  """Raise a ConfigError of one line about the field unless `holds` is True."""
  if not holds:
    raise ConfigError(f"{path}: {message}")


_SHOWN = 60  # characters of a value that a message shows


def shown(value: Any) -> str:
  """Return a value as messages show it: on one line, and cut if it is long."""
  if type(value) is int and value.bit_length() > 8 * _SHOWN:
    return f"an integer of {value.bit_length()} bits"
  try:
    text = " ".join(repr(value).split())
  except ValueError:  # a huge integer inside a container
    return f"a {type(value).__name__}"
  if len(text) <= 2 * _SHOWN:
    return text
  return f"{text[:_SHOWN]}... ({len(text)} characters)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """End a message that refuses a name: say what would be right."""
  known = sorted(known)
  close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  if close:
    return f"; did you mean {' or '.join(close)}?"
  shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
  return f"; there is {shown}"


def require_one_of(path: str, value: str, known: Collection[str]) -> None:
  """Raise a ConfigError that lists the known names unless `value` is one."""
  require(
    value in known, path, f"{shown(value)} is not one of {', '.join(known)}"
  )
