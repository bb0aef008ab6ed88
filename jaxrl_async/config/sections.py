"""Every setting of a run, and what must hold between them.

A config file's `get_config(variant)` returns a `Config`; absl's
`--config.section.field=value` overrides single fields;
`config_checks.validate` then checks what belongs together. Dataclasses here are
neither frozen nor checked in `__post_init__`, because overrides arrive after
construction.
"""

from collections.abc import Collection, Iterable, Iterator
import dataclasses
import difflib
import enum
import math
from typing import Any

from ml_collections import config_dict


class ConfigError(ValueError):
  """A setting is wrong; the message is one line that names the field."""


class KvOnAdopt(enum.Enum):
  """What happens to running sequences' caches when new weights arrive."""

  RECOMPUTE = "recompute"
  KEEP = "keep"


class Preemption(enum.Enum):
  """How a sequence that lost its pages is taken up again.

  FAST prefills all of it; EXACT prefills what was prefilled before and feeds
  the rest through the decode program, which gives the same bits.
  """

  FAST = "fast"
  EXACT = "exact"


class Channel(enum.Enum):
  """How weights travel from the trainer to the engines."""

  ORBAX = "orbax"
  DIRECT = "direct"


class WeightFormat(enum.Enum):
  """What the engine holds its large matrices as."""

  FLOAT = "float"
  INT8 = "int8"
  FP8 = "fp8"


class Remat(enum.Enum):
  """What of a layer the backward pass computes again.

  NONE keeps everything; FULL keeps a layer's input only; ATTENTION also what
  attention gave; DOTS every product with a weight; OFFLOAD is FULL with the
  layers' inputs in the host's memory.
  """

  NONE = "none"
  FULL = "full"
  ATTENTION = "attention"
  DOTS = "dots"
  OFFLOAD = "offload"


class AdvantageScale(enum.Enum):
  """What a group's centred rewards are divided by."""

  STD = "std"
  NONE = "none"


class BehaviorWeightCapMode(enum.Enum):
  """What happens to tokens whose pi_prox / pi_behav exceeds the cap."""

  MASK = "mask"
  TRUNCATE = "truncate"


class ProximalMode(enum.Enum):
  """Where the logprobs of the centre of the trust region come from.

  RECOMPUTE takes a forward pass a train step. LOGLINEAR lays them between
  behavior and current ones by their versions. REUSE takes the update's own,
  which are the same as long as a train step is one update.
  """

  RECOMPUTE = "recompute"
  LOGLINEAR = "loglinear"
  REUSE = "reuse"


class OptimizerName(enum.Enum):
  """Optimizers of the two stages."""

  ADAMW = "adamw"
  MUON = "muon"


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelSection:
  """Which decoder, and the type it computes in.

  Attributes:
    name: a key of `models.configs.MODELS`, or a directory in Hugging Face's
      format, which gives architecture, tokenizer and first weights.
    compute_dtype: activations of the trainer; master weights are float32.
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
    tokens: of a row.
    layers: of the trainer's stacked parameters.
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
  # Decoding reads every weight for every token: nothing is gathered over fsdp.
  return ShardingRules(batch=("data",), embed=(), tokens=())


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshSection:
  """How many devices each slice takes, by axis; -1 is "what is left".

  With a single device both slices share it.

  Attributes:
    train_context: splits the tokens of a row, for rows that one device does
      not hold; like train_fsdp it splits the weights too.
    train_rules: what each mesh axis splits; on the command line
      --config.mesh.train_rules.kv_heads="()".
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
  """Where prompts come from and how answers are read and scored.

  Attributes:
    dataset: any dataset of reasoning-gym by name.
    params: its parameters.
    template: str.format template of the prompt; fields are "question" and the
      keys of the item's metadata.
    answer_prefix: the extracted answer is what follows the last occurrence of
      this in the completion, up to the end of its line; "" takes the whole
      completion, stripped.
    reward_timeout_s: deadline of one score.
    reward_workers: processes that score.
    reward_retries: further attempts before a group is `failed`.
    max_failed_groups: that many failed groups in a row end the run.
    question_workers: processes that make questions ahead of time; more help
      where a question takes longer to make than to answer.
  """

  dataset: str = "chain_sum"
  params: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  template: str = "{question}\n"
  answer_prefix: str = "="
  reward_timeout_s: float = 10.0
  reward_workers: int = 1
  reward_retries: int = 1
  max_failed_groups: int = 8
  question_workers: int = 2


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerSection:
  """An Optax optimizer with linear warmup and global-norm clipping.

  Attributes:
    state_dtype: of the first moment, Muon's included; the second stays float32.
    offload: moments live in the host's memory between updates.
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
    num_examples: worked solutions; a pass over them is shuffled.
    corrupted_frac: share of intermediate results that are written wrong and
      carried on, so that the policy has something left to learn.
    decay: final learning rate over peak, reached by cosine.
    checkpoint: directory of parameters to take instead, of `launch/sft.py` or
      in Hugging Face's format.
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
    num_slots: sequences decoded side by side.
    max_prompt_tokens: longer prompts are skipped and counted, never cut.
    max_completion_tokens: at most that many written tokens a trajectory.
    cache_tokens: cached tokens a slot, at least prompt + completion.
    decode_steps_per_call: tokens a sequence gains between two host looks.
    prefill_rows: sequences of one prefill call; a multiple of the replicas that
      slots are split over (mesh.rollout_data) is split too, else each does all.
    prefill_buckets: padded lengths of prefill calls, up to cache_tokens.
    window_buckets: attended lengths of decode calls, up to cache_tokens.
    prefill_chunk: prompts of longer buckets are prefilled that many tokens at
      a time, with decode calls in between; 0 never does.
    num_pages: the cache is a pool of that many pages, which may be fewer than
      all slots need at once; 0 gives each slot its own.
    page_tokens: tokens of a page.
    temperature: of sampling; the trainer scales by the same.
    dtype: of rollout weights and cache.
    weights: int8 or fp8 quantises the matrices of what is published, with a
      scale a channel; mismatch_kl is its price.
    attention: "auto" takes the first kernel of the platform that works and
      agrees with plain XLA; "xla" takes none; a kernel's name (cudnn or splash
      of prefill, gpu_paged or tpu_paged of decoding over pages) insists on it.
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
    max_staleness: train version minus token version, at most; 0 is
      synchronous.
    filter_zero_std: drop groups of equal rewards; they teach nothing. A
      thousand of them in a row end the run.
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
    tokens_per_row: packed length of a row.
    rows_per_microbatch: rows of one forward and backward.
    max_bad_updates: that many non-finite updates in a row end the run.
    vocab_chunk: vocabulary entries a chunk of the logprob walk; with all of
      them in one, the backward pass does not make the logits again.
    attention: over packed rows, a name of `packed_attention.IMPLEMENTATIONS`;
      "auto" takes the first of the platform's that works and agrees with xla.
    decay: as of the warm start, at num_steps; 1 keeps the rate constant. A run
      continued with another num_steps follows the new curve from there.
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
    directory: where versions are written; "" is a memory-backed directory of
      this host where there is one, else the workdir.
  """

  channel: Channel = Channel.ORBAX
  directory: str = ""


@dataclasses.dataclass(kw_only=True, slots=True)
class EvalSection:
  """Held-out accuracy, with stated settings.

  Attributes:
    num_items: distinct held-out questions.
    every: train steps between evaluations; 0 evaluates at start and end only.
    temperature: of the sampled accuracy; the greedy one stands beside it.
  """

  num_items: int = 256
  every: int = 10
  temperature: float = 1.0


@dataclasses.dataclass(kw_only=True, slots=True)
class RunSection:
  """Supervision and persistence."""

  checkpoint_every: int = 20
  keep_checkpoints: int = 2
  stall_timeout_s: float = 300.0
  join_timeout_s: float = 30.0


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """A whole run."""

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
  """Raise a ConfigError of one line about that field unless it holds."""
  if not holds:
    raise ConfigError(f"{path}: {message}")


_SHOWN = 60  # characters of a value that a message repeats


def shown(value: Any) -> str:
  """A value as a message repeats it: on one line, and cut where it is long."""
  if type(value) is int and value.bit_length() > 8 * _SHOWN:
    return f"an integer of {value.bit_length()} bits"
  try:
    text = " ".join(repr(value).split())
  except ValueError:  # such an integer, inside of something
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
  """Raise a ConfigError that lists the known names unless it is one."""
  require(
    value in known, path, f"{shown(value)} is not one of {', '.join(known)}"
  )


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
  """Path, declared type and value of every field, in order."""
  for field in dataclasses.fields(section):
    kind, path = field.type, prefix + field.name
    value = getattr(section, field.name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      if not isinstance(value, kind):
        raise ConfigError(f"{path}: {shown(value)} is not a section")
      yield from leaves(value, path + ".")
    else:
      yield path, kind, value


def check_type(path: str, kind: Any, value: Any) -> None:
  """Raise a ConfigError unless the value is of the field's declared type."""
  if kind is int:
    holds, wanted = type(value) is int, "an integer"
  elif kind is float:
    # An integer of any size is finite, and may be too large for isfinite.
    is_finite = type(value) is float and math.isfinite(value)
    holds = is_finite or type(value) is int
    wanted = "a finite number"
  elif kind == tuple[int, ...]:
    holds = type(value) is tuple and all(type(x) is int for x in value)
    wanted = "a tuple of integers, as (64, 128)"
  elif kind == tuple[str, ...]:
    holds = type(value) is tuple and all(type(x) is str for x in value)
    wanted = 'a tuple of names, as ("data", "fsdp")'
  elif issubclass(kind, enum.Enum):
    wanted = "one of " + ", ".join(member.value for member in kind)
    holds = isinstance(value, kind)
  else:
    holds, wanted = isinstance(value, kind), f"a {kind.__name__}"
  if not holds:
    raise ConfigError(f"{path}: {shown(value)} is not {wanted}")
