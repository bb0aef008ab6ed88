"""An estimate, by arithmetic, of the device memory that each slice needs.

Parameters, gradients and moments are exact. Activations are those that
automatic differentiation keeps. Of temporary arrays only the large ones count.
`dry_run --compile` reports the compiler's own figure.
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
# Of an element of the embedding or of the head under a frozen base.
BASE_BYTES = BYTES | {"int8": 2}
_BATCH_BYTES = (
  7 * 4 + 1 + 4
)  # of a token: PackedBatch, and its proximal logprob


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBytes:
  """Bytes that a model of the train state takes on one device.

  Attributes:
    trainable: bytes of the trainable parameters.
    frozen: bytes of the other parameters, in the dtype in which they are held.
    optimizer: bytes of the optimizer's state; 0 if it is in host memory.
  """

  trainable: int
  frozen: int
  optimizer: int

  @property
  def weights(self) -> int:
    """Bytes of all parameters."""
    return self.trainable + self.frozen

  @property
  def gradients(self) -> int:
    """Bytes of the accumulated gradients and of one microbatch's gradients."""
    return 2 * self.trainable

  @property
  def parts(self) -> dict[str, int]:
    """Bytes by name, without the parts that are 0."""
    parts = {
      "weights": self.weights,
      "optimizer": self.optimizer,
      "gradients": self.gradients,
    }
    return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """Bytes on one device during an update.

  Attributes:
    weights: the parameters of all models of the train state.
    optimizer: the optimizer's state; 0 if it is in host memory.
    gradients: the accumulated gradients and those of one microbatch.
    activations: activations kept from the forward pass for the backward pass.
    layer: temporary arrays of one layer's backward pass, with the layer's
      gathered weights.
    logits: temporary arrays for the logits of one chunk of the vocabulary.
    batch: the packed batch of a train step.
    least_activations: a lower bound of the activations for any compiler.
    least_working: a lower bound of the temporary arrays, either of a layer's
      backward pass or of a chunk's logits, whichever is larger.
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
    """The terms of `total` by name."""
    parts = dataclasses.asdict(self)
    del parts["least_activations"], parts["least_working"]
    del parts["logits" if self.layer > self.logits else "layer"]
    return parts

  @property
  def total(self) -> int:
    """The estimate in bytes.

    A layer's backward pass and the logits are not in memory at the same time,
    so that only the larger one counts.
    """
    return sum(self.parts.values())

  @property
  def at_least(self) -> int:
    """A lower bound of the peak in bytes, however the update is compiled."""
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
  """Return the bytes per token that one layer keeps for the backward pass.

  Args:
    model: the architecture.
    parts: returns into how many parts a logical axis is split.
    remat: which activations are recomputed instead of kept.
    num_scores: attention scores per token that are written to memory. 0 if the
      kernel does not write them.
    itemsize: bytes of an activation.
  """
  width = model.model_dim
  query = model.num_heads * model.head_dim // parts("heads")
  key = model.num_kv_heads * model.head_dim // parts("kv_heads")
  if model.has_gated_attention:
    query = query * 3 // 2
  if model.delta is not None:
    query, key = _mean_widths(model, parts, query, key)
  mlp = model.mlp_dim // parts("mlp")
  rows = 0  # states of tokens in the order of their experts
  if model.experts is not None:
    # On average; a device whose experts are chosen more often keeps more.
    rows = width * model.experts.num_per_token // parts("experts")
    mlp = mlp * model.experts.num_per_token // parts("experts")
  match remat:
    case sections.Remat.OFFLOAD:
      return 0
    case sections.Remat.FULL:
      return itemsize * width
    case sections.Remat.ATTENTION:
      return itemsize * (width + query)
    case sections.Remat.DOTS:
      return itemsize * (2 * width + 2 * query + 2 * key + 2 * mlp + rows)
    case sections.Remat.NONE:
      # Each norm keeps three float32 arrays. The softmax keeps its numerators
      # besides its result, and a soft cap its tanh.
      norms = 3 * len(configs.NORMS[model.norms]) * width
      norms += 3 * (query + key) * bool(model.qk_norm_shapes)
      inputs = 2 * width + 2 * query + 2 * key + 6 * mlp + 4 * rows
      if num_scores == 0:
        inputs += query
      is_capped = model.attention_soft_cap is not None
      scores = num_scores * (4 + 4 * is_capped + itemsize)
      return 4 * norms + itemsize * inputs + scores


def _mean_widths(
  model: configs.ModelConfig,
  parts: Callable[[str], int],
  query: int,
  key: int,
) -> tuple[int, int]:
  """Return the widths of queries and keys, in the mean over both mixers.

  The gated delta rule has a value, a gate and a result for each element of its
  value heads. The matrices of its chunks are as wide as three values.
  """
  delta = model.delta
  assert delta is not None
  values = delta.num_value_heads * delta.value_dim // parts("heads")
  keys = delta.num_key_heads * delta.key_dim // parts("heads")
  share = sum(model.is_delta) / model.num_layers
  return (
    int((1 - share) * query + share * 3 * values),
    int((1 - share) * key + share * keys),
  )


def training(
  model: configs.ModelConfig,
  shape: mesh_lib.MeshShape,
  rules: sections.ShardingRules,
  train: sections.TrainSection,
  section: sections.ModelSection,
  *,
  policy: ModelBytes,
  others: Iterable[ModelBytes] = (),
  num_trunks: int = 1,
  num_fields: int = 0,
  tokens_per_step: int,
) -> Estimate:
  """Return the estimate for an update on the training slice.

  Args:
    model: the policy's architecture, with the tokenizer's vocabulary.
    shape: the shape of the training mesh.
    rules: which mesh axes split which logical axes.
    train: the section with the rows, the attention and the vocabulary chunk.
    section: the section with the dtype and rematerialisation of activations.
    policy: bytes of the policy on a device.
    others: bytes of each other model of the train state on a device.
    num_trunks: models through whose layers the update has a backward pass. A
      compiler may finish one before the other, which the lower bound assumes.
    num_fields: further float32 fields of the batch.
    tokens_per_step: size of a step's packed batch in tokens, padding included.
  """

  def parts(axis: str) -> int:
    return shape.parts(getattr(rules, axis))

  split = parts("batch") * parts("tokens")
  tokens = train.rows_per_microbatch * train.tokens_per_row // split
  itemsize = BYTES[section.compute_dtype]
  # "auto" writes scores to memory only for short rows.
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
  # A compiler may drop activations that it can recompute from the products.
  least = kept(dots if remat is none else remat)
  head = model.vocab_size * model.model_dim // parts("vocab")
  of_head = 4 if model.lora is None else BASE_BYTES[section.lora.base_dtype]
  layer_weights = policy.weights * parts("embed") - of_head * head * (
    1 if model.has_tied_head else 2
  )
  gathered = layer_weights // model.num_layers if parts("embed") > 1 else 0
  # Compiled programs were found to take half as much again as a layer keeps.
  layer = kept(none) * (2 if remat is none else 3) // 2 + gathered
  chunk = min(train.vocab_chunk, model.vocab_size) // parts("vocab")
  # The backward pass recomputes the products of a layer that were not kept.
  working = 0 if remat in (none, dots) else kept(dots)
  working += tokens * num_scores * itemsize
  states = 3 * tokens * model.model_dim * 4
  of_logits = 3 if model.logits_soft_cap is None else 4  # float32 arrays
  models = policy, *others
  return Estimate(
    weights=sum(x.weights for x in models),
    optimizer=sum(x.optimizer for x in models),
    gradients=sum(x.gradients for x in models),
    activations=num_trunks * model.num_layers * kept(remat),
    layer=layer,
    logits=of_logits * 4 * tokens * chunk
    + states
    + 4 * chunk * model.model_dim,
    batch=(_BATCH_BYTES + 4 * num_fields) * math.ceil(tokens_per_step / split),
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
  base: int = 0,
  on_cpu: bool = False,
) -> dict[str, int]:
  """Return the large parts of a rollout device's memory, in bytes by name.

  Args:
    model: the architecture, with the tokenizer's vocabulary.
    shape: the shape of the rollout mesh.
    rules: which mesh axes split which logical axes.
    section: the section with the slots, the prefill buckets and the cache.
    published: bytes of one version of the weights, before they are sharded.
    base: likewise of the weights that all versions share.
    on_cpu: whether the devices are CPUs, on which the cache is float32.
  """

  def parts(axis: str) -> int:
    return shape.parts(getattr(rules, axis))

  itemsize = BYTES[section.dtype]
  cached = BYTES["float32"] if on_cpu else itemsize
  in_pages = section.num_pages * section.page_tokens
  if in_pages:
    cache = model.cache_bytes(tokens=in_pages, itemsize=cached)
  else:
    slot = model.slot_bytes(tokens=section.cache_tokens, itemsize=cached)
    cache = section.num_slots * slot
  slots = 1 if in_pages else parts("batch")
  kept = _kept(
    model, parts, sections.Remat.DOTS, num_scores=0, itemsize=itemsize
  )
  longest = section.prefill_buckets[-1]
  bucket = min(section.prefill_chunk or longest, longest)
  rows, left = divmod(section.prefill_rows, parts("batch"))
  rows = section.prefill_rows if left else rows
  split = parts("mlp") * parts("embed")
  if model.experts is not None:
    split *= parts("experts")
  cache //= slots * parts("kv_heads")
  state = model.state_bytes(itemsize=cached) // parts("heads")
  cache += section.num_slots * state // parts("batch")
  return {
    # While a new version is being adopted, the previous one is still in use.
    "weights": 2 * published // split,
    **({"base": base // split} if base else {}),
    "cache": cache,
    "prefill": rows * bucket * kept,
    "prefilled": model.cache_bytes(tokens=rows * bucket, itemsize=cached)
    // parts("kv_heads")
    + rows * state,
  }


def check(estimate: Estimate, limit: int | float | None) -> None:
  """Check that a device can hold an update.

  Args:
    estimate: the estimate for the training slice.
    limit: bytes of a device. None means unknown, and nothing is checked.

  Raises:
    ConfigError: a device has fewer bytes than the lower bound of the estimate.
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


def least_rollout(parts: dict[str, int]) -> int:
  """Return a lower bound of the bytes that generation needs on a device.

  Args:
    parts: the result of `rollout`.
  """
  weights = parts["weights"] // 2 + parts.get("base", 0)
  held = parts.get("evaluation", 0)
  return weights + parts["cache"] + parts["prefilled"] + held


def check_rollout(
  parts: dict[str, int],
  section: sections.RolloutSection,
  limit: int | float | None,
) -> None:
  """Check that a device of the rollout slice can hold what generation needs.

  Args:
    parts: the result of `rollout`.
    section: the section that `rollout` was called with.
    limit: bytes of a device. None means unknown, and nothing is checked.

  Raises:
    ConfigError: weights, cache and the outputs of prefill do not fit.
  """
  at_least = least_rollout(parts)
  if limit is None or at_least <= limit:
    return
  cache = "rollout.num_pages" if section.num_pages else "rollout.num_slots"
  largest = {
    "model.name": ("weights", parts["weights"] // 2 + parts.get("base", 0)),
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
  """Check that a batch of the warm start fits.

  Args:
    section: the section of the warm start.
    tokens_per_row: length of a row.
    limit: bytes of all devices together. None means unknown, and nothing is
      checked.

  Raises:
    ConfigError: the batch has more bytes than the devices.
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
  """Return the bytes of memory of this machine or container."""
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
  """Raise a ConfigError that names the largest part.

  Args:
    what: name of the work that does not fit.
    at_least: bytes that it needs on a device.
    limit: bytes that a device has.
    largest: for each field of the config, the part of memory that it controls
      and the part's bytes.
    use: for each field, advice on how to need less.
  """
  path = max(largest, key=lambda name: largest[name][1])
  part, num_bytes = largest[path]
  raise sections.ConfigError(
    f"{path}: {what} needs at least {size(at_least)} a device, which has"
    f" {size(int(limit))}; {size(num_bytes)} of it are {part}; use {use[path]}"
  )


def size(num_bytes: int) -> str:
  """Return a size as text, in MiB below one GiB and in GiB otherwise."""
  if num_bytes < 1 << 30:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
  return f"{num_bytes / (1 << 30):,.1f} GiB"


def line(parts: dict[str, int]) -> str:
  """Return the names and sizes of the parts as text, largest first."""
  ordered = sorted(parts.items(), key=lambda part: -part[1])
  return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in ordered)
