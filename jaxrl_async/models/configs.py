"""Architectures: sizes and switches of a decoder, and some of them by name.

A layer is a mixer and a feed-forward. The mixer is attention or the gated delta
rule; `is_delta` lists which. All else is the same in all layers of a model,
except for the window and the rotary embedding of attention, which `ropes` and
`sliding_windows` list. `families` says what the models of a family have.
"""

import dataclasses
import enum
import functools
import math
from typing import Any, NamedTuple


class Projection(NamedTuple):
  """A matrix of a layer that tokens are multiplied by.

  Attributes:
    stored: its name in a layer of Hugging Face's format.
    inputs: names of the axes that a product sums over; they come first.
    outputs: names of the other axes.
    groups: names of axes in front of them, along which there are matrices for
      different tokens. In files these are tensors of their own.
  """

  stored: str
  inputs: tuple[str, ...]
  outputs: tuple[str, ...]
  groups: tuple[str, ...] = ()

  @property
  def axes(self) -> tuple[str, ...]:
    """The names of all axes."""
    return self.groups + self.inputs + self.outputs

  @property
  def logical_axes(self) -> tuple[str, ...]:
    """The axes of the sharding rules that they are split as."""
    return tuple(_SPLIT_AS.get(axis, axis) for axis in self.axes)


# Which axis of the sharding rules others are split as.
_SPLIT_AS = {
  "delta_key_heads": "heads",
  "delta_heads": "heads",
  "delta_key": "head",
  "delta_value": "head",
}
# Those of layers without experts, in the order in which they are initialised.
PROJECTIONS = {
  "query": Projection("self_attn.q_proj", ("embed",), ("heads", "head")),
  "key": Projection("self_attn.k_proj", ("embed",), ("kv_heads", "head")),
  "value": Projection("self_attn.v_proj", ("embed",), ("kv_heads", "head")),
  "output": Projection("self_attn.o_proj", ("heads", "head"), ("embed",)),
  "gate": Projection("mlp.gate_proj", ("embed",), ("mlp",)),
  "up": Projection("mlp.up_proj", ("embed",), ("mlp",)),
  "down": Projection("mlp.down_proj", ("mlp",), ("embed",)),
  "delta_query": Projection(
    "linear_attn.in_proj_q", ("embed",), ("delta_key_heads", "delta_key")
  ),
  "delta_key": Projection(
    "linear_attn.in_proj_k", ("embed",), ("delta_key_heads", "delta_key")
  ),
  "delta_value": Projection(
    "linear_attn.in_proj_v", ("embed",), ("delta_heads", "delta_value")
  ),
  "delta_gate": Projection(
    "linear_attn.in_proj_z", ("embed",), ("delta_heads", "delta_value")
  ),
  "delta_rate": Projection(
    "linear_attn.in_proj_b", ("embed",), ("delta_heads",)
  ),
  "delta_decay": Projection(
    "linear_attn.in_proj_a", ("embed",), ("delta_heads",)
  ),
  "delta_output": Projection(
    "linear_attn.out_proj", ("delta_heads", "delta_value"), ("embed",)
  ),
}
_OF_ATTENTION = ("query", "key", "value", "output")
_OF_DELTA = "delta"
DENSE_KERNELS = "gate", "up", "down"
# What a layer of experts has in place of these, beside its router.
EXPERT_KERNELS = {
  "expert_gate": Projection(
    "mlp.experts.{}.gate_proj", ("embed",), ("mlp",), ("experts",)
  ),
  "expert_up": Projection(
    "mlp.experts.{}.up_proj", ("embed",), ("mlp",), ("experts",)
  ),
  "expert_down": Projection(
    "mlp.experts.{}.down_proj", ("mlp",), ("embed",), ("experts",)
  ),
}
ROUTER = "mlp.gate"  # in a layer of Hugging Face's format


class Norms(enum.StrEnum):
  """Where the norms of a layer are: before or after each half, or both."""

  BEFORE = "before"
  AFTER = "after"
  AROUND = "around"


# The norms of a layer, and their names in a layer of Hugging Face's format.
NORMS = {
  Norms.BEFORE: {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
  },
  Norms.AFTER: {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
  },
  Norms.AROUND: {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
  },
}
# Activations of the gate, and their names in Hugging Face's format.
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """A scaling of rotary frequencies for longer contexts; see `rotary`.

  Attributes:
    kind: "linear", "dynamic", "llama3", "yarn" or "longrope".
    factor: how much longer the context becomes.
    low_freq_factor: of llama3: frequencies with at most this many turns within
      the original context are slowed by the whole factor.
    high_freq_factor: of llama3: frequencies with at least this many turns are
      unchanged.
    beta_fast: of yarn: likewise, the turns from which on nothing changes.
    beta_slow: of yarn: the turns up to which the whole factor counts.
    has_whole_bounds: of yarn: its two bounds are rounded to whole pairs.
    short_factors: of longrope: the divisor of each frequency, for sequences
      within the original context.
    long_factors: likewise, for longer ones.
    amplitude: what cosines and sines are multiplied by.
    original_max_tokens: length of the context before the scaling.
    max_tokens: of dynamic and longrope: the longest sequence of a run, which
      decides for all of its sequences. None is none beyond the original. Of
      longrope all longer lengths are one more than the original, since they are
      the same architecture.
  """

  kind: str = "llama3"
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  has_whole_bounds: bool = True
  short_factors: tuple[float, ...] = ()
  long_factors: tuple[float, ...] = ()
  amplitude: float = 1.0
  original_max_tokens: int
  max_tokens: int | None = None

  def __post_init__(self):
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f"low_freq_factor {self.low_freq_factor} is not below"
        f" high_freq_factor {self.high_freq_factor}"
      )


class Rope(NamedTuple):
  """The rotary embedding of a layer: its base, and its scaling."""

  theta: float
  scaling: RopeScaling | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
  """Sizes of the layers that mix by the gated delta rule; see `gated_delta`.

  Attributes:
    num_key_heads: heads of queries and of keys.
    num_value_heads: heads of values, a multiple of these.
    key_dim: size of a query or key head.
    value_dim: size of a value head.
    conv_tokens: tokens that the convolution sees, the own one included.
  """

  num_key_heads: int
  num_value_heads: int
  key_dim: int
  value_dim: int
  conv_tokens: int

  def __post_init__(self):
    if self.num_value_heads % self.num_key_heads:
      raise ValueError(
        f"num_value_heads {self.num_value_heads} is not a multiple of"
        f" num_key_heads {self.num_key_heads}"
      )
    if self.conv_tokens < 2:
      raise ValueError(f"conv_tokens {self.conv_tokens} is below 2")

  @property
  def leaf_shapes(self) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a layer that are no projections."""
    keys = self.num_key_heads, self.key_dim, self.conv_tokens
    values = self.num_value_heads, self.value_dim, self.conv_tokens
    return {
      "delta_query_filter": keys,
      "delta_key_filter": keys,
      "delta_value_filter": values,
      "delta_log_decay": (self.num_value_heads,),
      "delta_decay_bias": (self.num_value_heads,),
      "delta_norm": (self.value_dim,),
    }

  @property
  def state_sizes(self) -> tuple[int, int]:
    """The float32 numbers of a row's state, and those of the cache's dtype."""
    keys = self.num_key_heads * self.key_dim
    values = self.num_value_heads * self.value_dim
    return self.key_dim * values, (self.conv_tokens - 1) * (2 * keys + values)


# What the parameters of `GatedDelta.leaf_shapes` are in a layer of Hugging
# Face's format. The three filters are the rows of one array.
DELTA_LEAVES = {
  "linear_attn.conv1d.weight": (
    "delta_query_filter",
    "delta_key_filter",
    "delta_value_filter",
  ),
  "linear_attn.A_log": ("delta_log_decay",),
  "linear_attn.dt_bias": ("delta_decay_bias",),
  "linear_attn.norm.weight": ("delta_norm",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """Low-rank adapters beside kernels of every layer; see `models.lora`.

  Attributes:
    rank: number of columns of each matrix A, and of rows of each matrix B.
    alpha: what an adapter adds is multiplied by `scale`, alpha / rank.
    modules: names of the kernels that have an adapter.
    num_adapters: the parameters hold that many adapters in a stack, and each
      row of a batch chooses one of them. 0 means one adapter for all rows.
  """

  rank: int
  alpha: float
  modules: tuple[str, ...]
  num_adapters: int = 0

  @property
  def scale(self) -> float:
    """The factor of what an adapter adds."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A feed-forward of which each token uses a part; see `models.experts`.

  Attributes:
    num_experts: in each layer.
    num_per_token: how many of them a token is fed to.
    has_normed_weights: the weights of a token's experts are divided by their
      sum.
  """

  num_experts: int
  num_per_token: int
  has_normed_weights: bool = True

  def __post_init__(self):
    if not 0 < self.num_per_token <= self.num_experts:
      raise ValueError(
        f"num_per_token {self.num_per_token} is not between 1 and num_experts"
        f" {self.num_experts}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Sizes and switches of a decoder.

  Attributes:
    vocab_size: rows of the embedding; a run sets it to the size of its
      tokenizer's vocabulary. Pretrained models have more rows than their
      tokenizer has tokens.
    has_qkv_bias: Qwen2's biases of queries, keys and values.
    has_qk_norm: Qwen3's RMSNorm of each query and key head.
    has_wide_qk_norm: OLMo's, of all heads of a token together.
    mlp_dim: hidden size of the feed-forward, or of each expert.
    experts: the feed-forward of all layers is one of experts; None is a dense
      one.
    norms: where the norms of a layer are.
    has_centred_norms: norms multiply by 1 + w instead of w, as in Gemma.
    activation: of the gate, one of `ACTIVATIONS`.
    has_tied_head: the output head is the transposed embedding.
    has_scalar_head: the decoder ends in a vector that makes one number of each
      hidden state, as critics and reward models do, and has no output head.
    lora: adapters beside the kernels, or None.
    has_gated_attention: what attention mixes is multiplied by a sigmoid of as
      many numbers, which the query projection makes beside each head's query.
    delta: sizes of the layers that mix by the gated delta rule instead.
    is_delta: for each layer, whether it does. Empty if there is none.
    sliding_windows: for each layer, how many tokens a token sees, itself
      included; None is all tokens up to itself. Empty if no layer has a window.
    rotary_dim: leading elements of each head that are rotated; None is all.
    has_rotary: for each layer, whether queries and keys are rotated. Empty if
      they are in all layers.
    window_rope_theta: rotary base of the layers with a window, which is then
      not scaled. None is that of the other layers.
    embedding_scale: what embeddings are multiplied by.
    has_rounded_embedding_scale: that number is rounded to the dtype of the
      embeddings first, as in Gemma.
    residual_scale: what each half of a layer adds is multiplied by it.
    attention_scale: of the scores; None is 1 / sqrt(head_dim).
    logits_divisor: what logits are divided by.
    attention_soft_cap: c of c tanh(x / c), applied to scores; None is none.
    logits_soft_cap: likewise, applied to logits.
    max_positions: longest sequence that it was made for, which its config.json
      calls max_position_embeddings; None is not known. It does not change what
      the decoder computes.
    family: name of the family in Hugging Face's format, as it was read. It does
      not change what the decoder computes, and two configs that differ only
      here are equal. If it is empty, it follows from the other settings.
  """

  vocab_size: int
  model_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  has_qkv_bias: bool = False
  has_qk_norm: bool = False
  has_wide_qk_norm: bool = False
  experts: Experts | None = None
  norms: Norms = Norms.BEFORE
  has_centred_norms: bool = False
  activation: str = "silu"
  has_tied_head: bool = True
  has_scalar_head: bool = False
  lora: Lora | None = None
  has_gated_attention: bool = False
  delta: GatedDelta | None = None
  is_delta: tuple[bool, ...] = ()
  sliding_windows: tuple[int | None, ...] = ()
  rotary_dim: int | None = None
  has_rotary: tuple[bool, ...] = ()
  window_rope_theta: float | None = None
  embedding_scale: float = 1.0
  has_rounded_embedding_scale: bool = False
  residual_scale: float = 1.0
  attention_scale: float | None = None
  logits_divisor: float = 1.0
  attention_soft_cap: float | None = None
  logits_soft_cap: float | None = None
  max_positions: int | None = dataclasses.field(default=None, compare=False)
  family: str = dataclasses.field(default="", compare=False)

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads {self.num_heads} is not a multiple of num_kv_heads"
        f" {self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(
        f"head_dim {self.head_dim} is odd; rotary embeddings need pairs"
      )
    rotated = self.rotary_dim
    if rotated is not None and not (
      0 < rotated <= self.head_dim and rotated % 2 == 0
    ):
      raise ValueError(
        f"rotary_dim {rotated} is not an even part of head_dim {self.head_dim}"
      )
    if self.has_rotary and len(self.has_rotary) != self.num_layers:
      raise ValueError(
        f"has_rotary has {len(self.has_rotary)} entries for num_layers"
        f" {self.num_layers}"
      )
    if self.activation not in ACTIVATIONS:
      raise ValueError(
        f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}"
      )
    windows = self.sliding_windows
    if windows and len(windows) != self.num_layers:
      raise ValueError(
        f"sliding_windows has {len(windows)} entries for num_layers"
        f" {self.num_layers}"
      )
    if any(window is not None and window < 1 for window in windows):
      raise ValueError(f"sliding_windows {windows} has one below 1")
    if windows and not any(windows):
      raise ValueError("sliding_windows has no window; leave it empty")
    if bool(self.is_delta) != (self.delta is not None):
      raise ValueError("is_delta and delta: set both or none")
    if self.is_delta and (
      len(self.is_delta) != self.num_layers or not any(self.is_delta)
    ):
      raise ValueError(
        f"is_delta {self.is_delta} does not name some of num_layers"
        f" {self.num_layers}"
      )
    if self.is_delta and (windows or self.has_rotary):
      raise ValueError("is_delta: such a model has no windows or has_rotary")
    if why := self.why_no_adapters(self.lora):
      raise ValueError(f"lora.modules {why}")

  def layers_with(self, leaf: str) -> tuple[int, ...]:
    """Return the layers that have a parameter, or an adapter of it."""
    kind = leaf.partition("_")[0]
    layers = range(self.num_layers)
    if not self.is_delta or kind not in (*_OF_ATTENTION, _OF_DELTA):
      return tuple(layers)
    return tuple(i for i in layers if self.is_delta[i] == (kind == _OF_DELTA))

  @property
  def period(self) -> int:
    """After how many layers their mixers repeat themselves."""
    n, kinds = self.num_layers, self.is_delta
    return next(
      p for p in range(1, n + 1) if n % p == 0 and kinds == kinds[:p] * (n // p)
    )

  @property
  def num_attention_layers(self) -> int:
    """The number of layers that mix by attention."""
    return self.num_layers - sum(self.is_delta)

  def why_no_adapters(self, lora: Lora | None) -> str:
    """Return why the model cannot have these adapters, or "".

    In PEFT's format, an adapter of experts is one for gate and up together,
    which transformers 5 holds in one parameter. Ours would be two.
    """
    if self.experts is None or lora is None:
      return ""
    if dense := [name for name in DENSE_KERNELS if name in lora.modules]:
      return (
        f"has {dense[0]}, but the feed-forward has experts, on which there are"
        f" no adapters; leave {', '.join(DENSE_KERNELS)} out"
      )
    return ""

  @property
  def base(self) -> "ModelConfig":
    """The same architecture without adapters."""
    return dataclasses.replace(self, lora=None)

  @property
  def ropes(self) -> tuple[Rope | None, ...]:
    """The rotary embedding of each layer; None where nothing is rotated."""
    windows = self.sliding_windows or (None,) * self.num_layers
    rotates = self.has_rotary or (True,) * self.num_layers
    own, local = (
      Rope(self.rope_theta, self.rope_scaling),
      self.window_rope_theta,
    )
    return tuple(
      None
      if not is_rotated
      else own
      if window is None or local is None
      else Rope(local, None)
      for window, is_rotated in zip(windows, rotates, strict=True)
    )

  @property
  def qk_norm_shapes(self) -> tuple[tuple[int, ...], ...]:
    """The shapes of the norms of queries and of keys; empty without them."""
    h = self.head_dim
    if self.has_wide_qk_norm:
      return (self.num_heads, h), (self.num_kv_heads, h)
    return ((h,), (h,)) if self.has_qk_norm else ()

  @property
  def longest(self) -> int | None:
    """A length for `within` that gives this architecture."""
    return None if self.rope_scaling is None else self.rope_scaling.max_tokens

  def within(self, num_tokens: int | None) -> "ModelConfig":
    """Return the architecture for sequences of at most this length.

    It differs only for rotary scalings that depend on the length. Results are
    equal if they compute the same. None is the original context.
    """
    scaling = self.rope_scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
      return self
    context = scaling.original_max_tokens
    if num_tokens is not None and num_tokens <= context:
      num_tokens = None
    elif num_tokens is not None and scaling.kind == "longrope":
      num_tokens = context + 1
    scaling = dataclasses.replace(scaling, max_tokens=num_tokens)
    return dataclasses.replace(self, rope_scaling=scaling)

  @property
  def projections(self) -> dict[str, Projection]:
    """The kernels of all layers by name, without routers."""
    found = dict(PROJECTIONS)
    if self.delta is None:
      found = {k: x for k, x in found.items() if not k.startswith(_OF_DELTA)}
    if self.experts is None:
      return found
    mixers = {k: x for k, x in found.items() if k not in DENSE_KERNELS}
    return mixers | EXPERT_KERNELS

  @property
  def kernel_shapes(self) -> dict[str, tuple[int, ...]]:
    """The shape of each kernel by name, in the order of its axes.

    Which layers have it, `layers_with` says.
    """
    sizes = {
      "embed": self.model_dim,
      "heads": self.num_heads,
      "kv_heads": self.num_kv_heads,
      "head": self.head_dim,
      "mlp": self.mlp_dim,
      "experts": 0 if self.experts is None else self.experts.num_experts,
    }
    if self.delta is not None:
      sizes |= {
        "delta_key_heads": self.delta.num_key_heads,
        "delta_key": self.delta.key_dim,
        "delta_heads": self.delta.num_value_heads,
        "delta_value": self.delta.value_dim,
      }
    shapes = {
      name: tuple(sizes[axis] for axis in projection.axes)
      for name, projection in self.projections.items()
    }
    if self.has_gated_attention:
      *others, head = shapes["query"]
      shapes["query"] = (*others, 2 * head)
    return shapes

  @property
  def num_params(self) -> int:
    """The number of parameters without adapters; a tied head counts once."""
    d, h = self.model_dim, self.head_dim
    shapes = dict(self.kernel_shapes)
    if self.delta is not None:
      shapes |= self.delta.leaf_shapes
    params = sum(
      len(self.layers_with(name)) * math.prod(shape)
      for name, shape in shapes.items()
    )
    bias = h * (self.num_heads + 2 * self.num_kv_heads) * self.has_qkv_bias
    qk_norm = sum(map(math.prod, self.qk_norm_shapes))
    params += self.num_attention_layers * (bias + qk_norm)
    router = 0 if self.experts is None else d * self.experts.num_experts
    params += self.num_layers * (router + len(NORMS[self.norms]) * d)
    params += self.vocab_size * d + d
    if self.has_scalar_head:
      return params + d
    return params + (0 if self.has_tied_head else self.vocab_size * d)

  @property
  def num_active_params(self) -> int:
    """The number of parameters that a single token uses, as `num_params`."""
    if self.experts is None:
      return self.num_params
    idle = self.experts.num_experts - self.experts.num_per_token
    expert = 3 * self.model_dim * self.mlp_dim
    return self.num_params - self.num_layers * idle * expert

  def windows_within(self, num_tokens: int) -> tuple[int | None, ...]:
    """Return the window of each layer for sequences of at most this length.

    A window that is not shorter than the sequences changes nothing, and is None
    in the result.
    """
    windows = self.sliding_windows or (None,) * self.num_layers
    return tuple(
      window if window is not None and window < num_tokens else None
      for window in windows
    )

  def cache_bytes(self, *, tokens: int, itemsize: int) -> int:
    """Return the memory of a key-value cache for this many tokens.

    All tokens count, whether or not they are still within a window.
    """
    per_token = 2 * self.num_attention_layers * self.num_kv_heads
    return per_token * self.head_dim * tokens * itemsize

  def state_bytes(self, *, itemsize: int) -> int:
    """Return the memory of the states of a sequence, however long it is."""
    if self.delta is None:
      return 0
    wide, narrow = self.delta.state_sizes
    return sum(self.is_delta) * (4 * wide + itemsize * narrow)

  def slot_bytes(self, *, tokens: int, itemsize: int) -> int:
    """Return the memory of a slot of the cache for this many tokens.

    A layer with a window keeps no more tokens than its window, and one with a
    state none.
    """
    if self.is_delta:
      return self.cache_bytes(tokens=tokens, itemsize=itemsize)
    kept = sum(window or tokens for window in self.windows_within(tokens))
    per_token = 2 * self.num_kv_heads * self.head_dim
    return per_token * kept * itemsize


_SIZES = (
  "vocab_size model_dim num_layers num_heads num_kv_heads head_dim mlp_dim"
)


def _model(*sizes: int, **switches: Any) -> ModelConfig:
  return ModelConfig(
    **dict(zip(_SIZES.split(), sizes, strict=True)), **switches
  )


_own = functools.partial(_model, has_qk_norm=True)
_qwen2 = functools.partial(_model, rope_theta=1e6, has_qkv_bias=True)
_qwen2_untied = functools.partial(_qwen2, has_tied_head=False)

MODELS = {
  "tiny": _own(97, 32, 2, 4, 2, 8, 64),  # tests
  "tiny-experts": _own(
    97, 32, 2, 4, 2, 8, 24, experts=Experts(num_experts=5, num_per_token=2)
  ),  # tests
  "quickstart": _own(97, 96, 2, 4, 2, 24, 256),
  "three-layers": _own(
    97, 96, 3, 4, 2, 24, 256
  ),  # other small runs of configs/
  "reasoning": _own(97, 128, 3, 4, 2, 32, 384),  # configs/reasoning.py
  "half-million": _own(97, 128, 3, 4, 2, 32, 320),  # configs/papers.py
  "small": _own(97, 64, 2, 4, 2, 16, 256),  # for a large vocabulary on a CPU
  "qwen2-0.5b": _qwen2(151_936, 896, 24, 14, 2, 64, 4_864),
  "qwen2-1.5b": _qwen2(151_936, 1_536, 28, 12, 2, 128, 8_960),
  "qwen2.5-7b": _qwen2_untied(152_064, 3_584, 28, 28, 4, 128, 18_944),
  "qwen2.5-32b": _qwen2_untied(
    152_064, 5_120, 64, 40, 8, 128, 27_648, norm_eps=1e-5
  ),
  "qwen3-8b": _own(
    *(151_936, 4_096, 36, 32, 8, 128, 12_288),
    has_tied_head=False,
    rope_theta=1e6,
  ),
  "qwen3-30b-a3b": _own(
    *(151_936, 2_048, 48, 32, 4, 128, 768),
    experts=Experts(num_experts=128, num_per_token=8),
    has_tied_head=False,
    rope_theta=1e6,
  ),
}
