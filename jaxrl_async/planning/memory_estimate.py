"""What each slice needs of a device, by arithmetic.

Parameters, gradients and moments are exact. Of activations it is what
automatic differentiation keeps, and of working sets the large arrays only:
`dry_run --compile` has the compiler's own figure.
"""

from collections.abc import Callable, Iterable
import dataclasses
import math
import os
import pathlib

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs

BYTES = {"float32": 4, "bfloat16": 2}
_BATCH_BYTES = (
  7 * 4 + 1 + 4
)  # of a token: PackedBatch, and its proximal logprob


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBytes:
  """Bytes of one device that a model of the train state takes.

  Attributes:
    trainable: the parameters that are trained.
    frozen: the other parameters, in the type that they are held in.
    optimizer: the optimizer's state, unless it lies in the host's memory.
  """

  trainable: int
  frozen: int
  optimizer: int

  @property
  def weights(self) -> int:
    """All parameters."""
    return self.trainable + self.frozen

  @property
  def gradients(self) -> int:
    """The sum so far, and the gradients of a microbatch."""
    return 2 * self.trainable

  @property
  def parts(self) -> dict[str, int]:
    """What the model takes, by name. What it does without is left out."""
    parts = {
      "weights": self.weights,
      "optimizer": self.optimizer,
      "gradients": self.gradients,
    }
    return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """Bytes of one device during an update.

  Attributes:
    weights: of all models that the trainer holds.
    optimizer: its state, unless that is the host's.
    gradients: the sum so far, and those of a microbatch.
    activations: kept from the forward pass for the backward pass.
    layer: one layer's backward pass, its gathered weights included.
    logits: of a chunk of the vocabulary, a few times.
    batch: of a train step.
    least_activations: that no compiler can do without.
    least_working: the same of a layer's backward pass or a chunk's logits,
      whichever is larger.
  """

  weights: int
  optimizer: int
  gradients: int
  activations: int
  layer: int
  logits: int
  batch: int
  least_activations: int
  least_working: int

  @property
  def parts(self) -> dict[str, int]:
    """What `total` is made of, by name."""
    parts = dataclasses.asdict(self)
    del parts["least_activations"], parts["least_working"]
    del parts["logits" if self.layer > self.logits else "layer"]
    return parts

  @property
  def total(self) -> int:
    """All of it; a layer's backward pass and the logits take turns."""
    return sum(self.parts.values())

  @property
  def at_least(self) -> int:
    """What an update holds at one moment, however it is compiled."""
    return (
      self.weights
      + self.optimizer
      + self.gradients
      + self.batch
      + self.least_activations
      + self.least_working
    )


def _kept(
  model: configs.ModelConfig,
  parts: Callable[[str], int],
  remat: sections.Remat,
  *,
  num_scores: int,
  itemsize: int,
) -> int:
  """Bytes a token that one layer keeps.

  Args:
    model: whose layers these are.
    parts: into how many parts a logical axis is split.
    remat: what is computed again.
    num_scores: attention scores of a token that are written out.
    itemsize: of an activation.
  """
  width = model.model_dim
  query = model.num_heads * model.head_dim // parts("heads")
  key = model.num_kv_heads * model.head_dim // parts("kv_heads")
  mlp = model.mlp_dim // parts("mlp")
  match remat:
    case sections.Remat.OFFLOAD:
      return 0
    case sections.Remat.FULL:
      return itemsize * width
    case sections.Remat.ATTENTION:
      return itemsize * (width + query)
    case sections.Remat.DOTS:
      return itemsize * (2 * width + 2 * query + 2 * key + 2 * mlp)
    case sections.Remat.NONE:
      # Each norm keeps three float32 arrays; the softmax its numerators too.
      norms = 6 * width + 3 * (query + key) * model.has_qk_norm
      inputs = 2 * width + 2 * query + 2 * key + 6 * mlp
      if num_scores == 0:
        inputs += query
      scores = num_scores * (4 + itemsize)
      return 4 * norms + itemsize * inputs + scores


def training(
  model: configs.ModelConfig,
  shape: mesh_lib.MeshShape,
  rules: sections.ShardingRules,
  train: sections.TrainSection,
  section: sections.ModelSection,
  *,
  policy: ModelBytes,
  others: Iterable[ModelBytes] = (),
  tokens_per_step: int,
) -> Estimate:
  """The training slice's estimate.

  Args:
    model: the policy's architecture, with the tokenizer's vocabulary.
    shape: of the training mesh.
    rules: of the same.
    train: rows, attention and the logits' chunk.
    section: type and rematerialisation of activations.
    policy: what the policy takes of a device.
    others: what each other model of the train state takes.
    tokens_per_step: places of a step's packed batch.
  """

  def parts(axis: str) -> int:
    return shape.parts(getattr(rules, axis))

  split = parts("batch") * parts("tokens")
  tokens = train.rows_per_microbatch * train.tokens_per_row // split
  itemsize = BYTES[section.compute_dtype]
  # "auto" writes scores out for short rows only.
  has_scores = train.attention == "xla" or (
    train.attention == "auto" and train.tokens_per_row <= 256
  )
  heads = model.num_heads // parts("heads")
  num_scores = heads * train.tokens_per_row if has_scores else 0

  def kept(remat: sections.Remat) -> int:
    return tokens * _kept(
      model, parts, remat, num_scores=num_scores, itemsize=itemsize
    )

  none, dots = sections.Remat.NONE, sections.Remat.DOTS
  remat = section.remat
  # A compiler may drop what it can make again from the products.
  least = kept(dots if remat is none else remat)
  head = model.vocab_size * model.model_dim // parts("vocab")
  layer_weights = policy.weights * parts("embed") - 4 * head * (
    1 if model.has_tied_head else 2
  )
  gathered = layer_weights // model.num_layers if parts("embed") > 1 else 0
  # Half as much again as what a layer keeps is what compiled programs take.
  layer = kept(none) * (2 if remat is none else 3) // 2 + gathered
  chunk = min(train.vocab_chunk, model.vocab_size) // parts("vocab")
  # The products of a layer are made again, if they were not kept.
  working = 0 if remat in (none, dots) else kept(dots)
  working += tokens * num_scores * itemsize
  states = 3 * tokens * model.model_dim * 4
  models = policy, *others
  return Estimate(
    weights=sum(x.weights for x in models),
    optimizer=sum(x.optimizer for x in models),
    gradients=sum(x.gradients for x in models),
    activations=model.num_layers * kept(remat),
    layer=layer,
    logits=3 * 4 * tokens * chunk + states + 4 * chunk * model.model_dim,
    batch=_BATCH_BYTES * math.ceil(tokens_per_step / split),
    least_activations=model.num_layers * least,
    least_working=max(working, 4 * tokens * chunk),
  )


def rollout(
  model: configs.ModelConfig,
  shape: mesh_lib.MeshShape,
  rules: sections.ShardingRules,
  section: sections.RolloutSection,
  *,
  published: int,
) -> dict[str, int]:
  """Bytes of a device of the rollout slice: what is large there.

  Args:
    model: with the tokenizer's vocabulary.
    shape: of the rollout mesh.
    rules: of the same.
    section: slots, buckets and cache.
    published: bytes of one version of the weights, before it is split.
  """

  def parts(axis: str) -> int:
    return shape.parts(getattr(rules, axis))

  itemsize = BYTES[section.dtype]
  in_pages = section.num_pages * section.page_tokens
  cache = model.cache_bytes(
    tokens=in_pages or section.num_slots * section.cache_tokens,
    itemsize=itemsize,
  )
  slots = 1 if in_pages else parts("batch")
  kept = _kept(
    model, parts, sections.Remat.DOTS, num_scores=0, itemsize=itemsize
  )
  longest = section.prefill_buckets[-1]
  bucket = min(section.prefill_chunk or longest, longest)
  rows, left = divmod(section.prefill_rows, parts("batch"))
  rows = section.prefill_rows if left else rows
  return {
    # While one version is adopted, the one before it is in use.
    "weights": 2 * published // (parts("mlp") * parts("embed")),
    "cache": cache // (slots * parts("kv_heads")),
    "prefill": rows * bucket * kept,
    "prefilled": model.cache_bytes(tokens=rows * bucket, itemsize=itemsize)
    // parts("kv_heads"),
  }


def check(estimate: Estimate, limit: int | float | None) -> None:
  """Refuses what a device of that many bytes cannot hold; None is unknown.

  Raises:
    ConfigError: it has less than what no compiler can do without.
  """
  if limit is None or estimate.at_least <= limit:
    return
  largest = {
    "model.remat": ("activations", estimate.least_activations),
    "train.optimizer": ("optimizer state", estimate.optimizer),
    "mesh.train_fsdp": (
      "weights and gradients",
      estimate.weights + estimate.gradients,
    ),
    "train.rows_per_microbatch": (
      "one layer's backward pass, or a chunk of the logits",
      estimate.least_working,
    ),
    "algorithm.groups_per_step": ("a train step's batch", estimate.batch),
  }
  use = {
    "model.remat": "a smaller train.rows_per_microbatch, model.remat=full or"
    " offload, or more mesh.train_fsdp or train_context",
    "train.optimizer": "train.optimizer.offload=True or more mesh.train_fsdp",
    "mesh.train_fsdp": "more of it (or mesh.train_tensor), or a smaller model",
    "train.rows_per_microbatch": "fewer of them, a smaller train.vocab_chunk,"
    " or train.attention=blocks where it is xla",
    "algorithm.groups_per_step": "fewer of them, or a smaller group_size",
  }
  _refuse("an update", estimate.at_least, limit, largest, use)


def check_rollout(
  parts: dict[str, int],
  section: sections.RolloutSection,
  limit: int | float | None,
) -> None:
  """Refuses what a device of the rollout slice cannot hold.

  Args:
    parts: of `rollout`.
    section: that they are of.
    limit: bytes of a device; None is unknown.

  Raises:
    ConfigError: weights, cache and what is prefilled are more than it has.
  """
  at_least = parts["weights"] // 2 + parts["cache"] + parts["prefilled"]
  if limit is None or at_least <= limit:
    return
  cache = "rollout.num_pages" if section.num_pages else "rollout.num_slots"
  largest = {
    "model.name": ("weights", parts["weights"] // 2),
    cache: ("the cache", parts["cache"]),
    "rollout.prefill_rows": (
      "what one prefill call gives",
      parts["prefilled"],
    ),
  }
  use = {
    "model.name": "a smaller model, or more mesh.rollout_tensor",
    cache: "fewer of them, or a smaller rollout.cache_tokens",
    "rollout.prefill_rows": "fewer of them, or rollout.prefill_chunk",
  }
  _refuse("generation", at_least, limit, largest, use)


def check_warm_start(
  section: sections.WarmStartSection,
  tokens_per_row: int,
  limit: int | float | None,
) -> None:
  """Refuses a batch of the warm start that is more than all devices hold.

  Raises:
    ConfigError: it is.
  """
  num_bytes = section.rows_per_batch * tokens_per_row * _BATCH_BYTES
  if section.num_steps and limit is not None:
    sections.require(
      num_bytes <= limit,
      "warm_start.rows_per_batch",
      f"a batch of {section.rows_per_batch} rows of {tokens_per_row} tokens is"
      f" {size(num_bytes)}, of {size(int(limit))}; use fewer",
    )


def host_bytes() -> int:
  """Memory of this machine, or of the container that this runs in."""
  physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  try:
    limit = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
  except OSError:
    return physical
  return min(physical, int(limit)) if limit.isdecimal() else physical


def _refuse(
  what: str,
  at_least: int,
  limit: int | float,
  largest: dict[str, tuple[str, int]],
  use: dict[str, str],
) -> None:
  """Raises a ConfigError that names the largest part.

  Args:
    what: needs it.
    at_least: bytes that it needs of a device.
    limit: bytes that a device has.
    largest: by field, the part that it sizes, and the part's bytes.
    use: what helps, by field.
  """
  path = max(largest, key=lambda name: largest[name][1])
  part, num_bytes = largest[path]
  raise sections.ConfigError(
    f"{path}: {what} needs at least {size(at_least)} a device, which has"
    f" {size(int(limit))}; {size(num_bytes)} of it are {part}; use {use[path]}"
  )


def size(num_bytes: int) -> str:
  """MiB below a GiB, else GiB."""
  if num_bytes < 1 << 30:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
  return f"{num_bytes / (1 << 30):,.1f} GiB"


def line(parts: dict[str, int]) -> str:
  """The parts by name, largest first."""
  ordered = sorted(parts.items(), key=lambda part: -part[1])
  return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in ordered)
