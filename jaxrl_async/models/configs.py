"""Architectures of the Qwen2, Qwen3 and Llama families, by name."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Llama 3's scaling of rotary frequencies, for longer contexts.

  Attributes:
    factor: divisor of the slowest frequencies.
    low_freq_factor: frequencies with at most this many turns within the
      original context are slowed by the whole factor.
    high_freq_factor: frequencies with at least this many turns are unchanged.
    original_max_tokens: length of the context before the scaling.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_tokens: int

  def __post_init__(self):
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f"low_freq_factor {self.low_freq_factor} is not below"
        f" high_freq_factor {self.high_freq_factor}"
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
    has_tied_head: the output head is the transposed embedding.
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
  has_tied_head: bool = True

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

  @property
  def num_params(self) -> int:
    """The number of parameters; a tied head counts once."""
    d, h = self.model_dim, self.head_dim
    qkv = d * h * (self.num_heads + 2 * self.num_kv_heads)
    bias = h * (self.num_heads + 2 * self.num_kv_heads) * self.has_qkv_bias
    qk_norm = 2 * h * self.has_qk_norm
    block = qkv + bias + qk_norm + self.num_heads * h * d
    block += 3 * d * self.mlp_dim + 2 * d
    heads = 1 if self.has_tied_head else 2
    return self.num_layers * block + heads * self.vocab_size * d + d

  def cache_bytes(self, *, tokens: int, itemsize: int) -> int:
    """Return the memory of a key-value cache for this many tokens."""
    per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
    return per_token * tokens * itemsize


MODELS = {
  "tiny": ModelConfig(  # tests
    vocab_size=97,
    model_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    has_qk_norm=True,
  ),
  "quickstart": ModelConfig(
    vocab_size=97,
    model_dim=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    mlp_dim=256,
    has_qk_norm=True,
  ),
  "qwen2-0.5b": ModelConfig(
    vocab_size=151_936,
    model_dim=896,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=4_864,
    rope_theta=1e6,
    has_qkv_bias=True,
  ),
  "qwen2-1.5b": ModelConfig(
    vocab_size=151_936,
    model_dim=1_536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    mlp_dim=8_960,
    rope_theta=1e6,
    has_qkv_bias=True,
  ),
  "qwen2.5-7b": ModelConfig(
    vocab_size=152_064,
    model_dim=3_584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=18_944,
    rope_theta=1e6,
    has_qkv_bias=True,
    has_tied_head=False,
  ),
  "qwen2.5-32b": ModelConfig(
    vocab_size=152_064,
    model_dim=5_120,
    num_layers=64,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=27_648,
    rope_theta=1e6,
    norm_eps=1e-5,
    has_qkv_bias=True,
    has_tied_head=False,
  ),
}
