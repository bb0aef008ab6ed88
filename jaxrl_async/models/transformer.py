"""The decoder: layers of a mixer and a feed-forward, with norms around them.

A mixer is grouped-query attention, over all tokens or within a window, or the
gated delta rule (`gated_delta`). A feed-forward is a gated product (SwiGLU or
GeGLU), or one of experts for each token (`models.experts`).
`configs.ModelConfig` says what a family's layers have.

Trainer and engine use the same NNX module. The trainer stacks its layers, and
scans and rematerialises them. The engine holds its layers separately, because a
scan over the cache would copy it. The caller provides the attention:
`attend(layer, q, k, v)` returns the mixed values and whatever the caller wants
to keep of each layer. That is nothing in the trainer, keys and values in
prefill, and the updated cache in decoding. Likewise it provides `recur(layer,
inputs, filters, activation)` for the gated delta rule, which keeps states.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax import ad_checkpoint
from jax import numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import products
from jaxrl_async.models import configs
from jaxrl_async.models import experts as experts_lib
from jaxrl_async.models import gated_delta
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import remat as remat_lib
from jaxrl_async.models import rotary
from jaxrl_async.models.attention import reference

Params = dict[str, Any]
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Recur = Callable[
  [Any, gated_delta.Inputs, gated_delta.Filters, gated_delta.Activation],
  tuple[jax.Array, Any],
]

_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def rms_norm(
  x: Float[Array, "*B D"],
  scale: Float[Array, "D"],
  eps: float,
  *,
  is_centred: bool = False,
) -> Float[Array, "*B D"]:
  """Return x / sqrt(mean(x^2) + eps) * scale (arXiv:1910.07467).

  The computation is in float32, the result in the dtype of x. With
  `is_centred`, x is multiplied by 1 + scale.
  """
  wide = x.astype(jnp.float32)
  variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normed = wide * jax.lax.rsqrt(variance + jnp.float32(eps))
  scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
  if is_centred:
    scale = 1.0 + scale
  return (normed * scale).astype(x.dtype)


def _scaled(x: Float[Array, "*B D"], scale: float) -> Float[Array, "*B D"]:
  """Return x times a float32 number, rounded once to the dtype of x."""
  if scale == 1.0:
    return x
  return (x.astype(jnp.float32) * jnp.float32(scale)).astype(x.dtype)


def scalars(
  hidden: Float[Array, "*B D"], head: Float[Array, "D"]
) -> Float[Array, "*B"]:
  """Return the product of each state with a scalar head, in float32."""
  head = head.astype(jnp.float32).reshape((1,) * (hidden.ndim - 1) + (-1,))
  return (hidden.astype(jnp.float32) * head).sum(-1)


def _param(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  *,
  fan_in: int,
) -> nnx.Param:
  """Return a parameter, initialised as a truncated normal.

  Its standard deviation is 1 / sqrt(fan_in).
  """
  init = jax.nn.initializers.truncated_normal(stddev=fan_in**-0.5)
  value = init(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, logical_axes=axes)


def _constant(
  value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> nnx.Param:
  """Return a parameter all of whose elements have the same value."""
  return nnx.Param(jnp.full(shape, value, jnp.float32), logical_axes=axes)


def _project(equation: str, x: jax.Array, kernel: Any) -> jax.Array:
  """Return a product with a kernel, under the name that DOTS keeps."""
  product = quantization.project(equation, x, kernel)
  return ad_checkpoint.checkpoint_name(product, remat_lib.PRODUCT)


class Block(nnx.Module):
  """One layer: a mixer and a feed-forward, each added to its input.

  Args:
    layer: its index, which decides on its mixer.
  """

  def __init__(
    self, config: configs.ModelConfig, *, rngs: nnx.Rngs, layer: int = 0
  ):
    c = config
    d, n, k, h = c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim
    self.config = c
    self.is_delta = bool(c.is_delta) and c.is_delta[layer]
    # What a norm multiplies by at first, whether it is w or 1 + w, is 1.
    one = 0.0 if c.has_centred_norms else 1.0
    for name in configs.NORMS[c.norms]:
      setattr(self, name, _constant(one, (d,), (None,)))
    for name, projection in c.projections.items():
      if layer not in c.layers_with(name):
        continue
      shape, first = c.kernel_shapes[name], len(projection.groups)
      fan_in = math.prod(shape[first : first + len(projection.inputs)])
      axes = projection.logical_axes
      setattr(self, name, _param(rngs, shape, axes, fan_in=fan_in))
    if c.experts is not None:
      shape = d, c.experts.num_experts
      self.router = _param(rngs, shape, ("embed", None), fan_in=d)
    if self.is_delta:
      self._add_delta(c.delta, rngs)
    elif c.has_qkv_bias:
      self.query_bias = _constant(0.0, (n, h), ("heads", "head"))
      self.key_bias = _constant(0.0, (k, h), ("kv_heads", "head"))
      self.value_bias = _constant(0.0, (k, h), ("kv_heads", "head"))
    if not self.is_delta and (c.has_qk_norm or c.has_wide_qk_norm):
      of_query, of_key = c.qk_norm_shapes
      axes = ("heads", "head"), ("kv_heads", "head")
      axes = axes if c.has_wide_qk_norm else ((None,), (None,))
      self.query_norm = _constant(one, of_query, axes[0])
      self.key_norm = _constant(one, of_key, axes[1])
    # Drawn last, so that the base is the same with and without adapters.
    if c.lora is not None:
      for module in c.lora.modules:
        if layer in c.layers_with(module):
          self._add_adapter(c.lora, module, rngs)

  def _add_delta(
    self, delta: configs.GatedDelta | None, rngs: nnx.Rngs
  ) -> None:
    """Add the parameters of the gated delta rule that are no projections."""
    assert delta is not None
    for name, shape in delta.leaf_shapes.items():
      if name == "delta_log_decay":  # as in transformers
        drawn = jax.random.uniform(rngs.params(), shape, jnp.float32, 0.01, 16)
        param = nnx.Param(jnp.log(drawn), logical_axes=("heads",))
      elif len(shape) == 1:
        axis = "heads" if name == "delta_decay_bias" else None
        param = _constant(1.0, shape, (axis,))
      else:
        axes = ("heads", "head", None)
        param = _param(rngs, shape, axes, fan_in=shape[-1])
      setattr(self, name, param)

  def _add_adapter(
    self, lora: configs.Lora, module: str, rngs: nnx.Rngs
  ) -> None:
    """Add the two matrices of an adapter; its rank is not split."""
    kernel = getattr(self, module)
    shapes = lora_lib.shapes(lora, module, kernel.shape, lora.rank)
    names = kernel.get_metadata()["logical_axes"]
    axes = lora_lib.shapes(lora, module, names, None)
    values = lora_lib.initial(rngs.params(), *shapes)
    for name, value, own in zip(
      lora_lib.names(module), values, axes, strict=True
    ):
      setattr(self, name, nnx.Param(value, logical_axes=own))

  def _product(
    self, module: str, equation: str, x: jax.Array, rows: jax.Array | None
  ) -> jax.Array:
    """Return a product with a kernel, and with its adapter if it has one."""
    product = _project(equation, x, getattr(self, module).get_value())
    lora = self.config.lora
    if lora is None or module not in lora.modules:
      return product
    a, b = (getattr(self, name)[...] for name in lora_lib.names(module))
    return product + lora_lib.added(lora, equation, x, a, b, rows)

  def _heads(
    self,
    module: str,
    x: jax.Array,
    rows: jax.Array | None,
    bias: nnx.Param | None,
    norm: nnx.Param | None,
  ) -> jax.Array:
    """Return queries, keys or values: product, bias and norm of each head."""
    heads = self._product(module, "...d,dnh->...nh", x, rows)
    if bias is not None:
      shape = (1,) * (x.ndim - 1) + bias.shape
      heads = heads + bias[...].astype(x.dtype).reshape(shape)
    if norm is None:
      return heads
    if self.config.has_wide_qk_norm:
      wide = heads.reshape(*x.shape[:-1], -1)
      return self._normed(wide, norm[...].reshape(-1)).reshape(heads.shape)
    return self._normed(heads, norm[...])

  def _normed(self, x: jax.Array, scale: jax.Array) -> jax.Array:
    c = self.config
    return rms_norm(x, scale, c.norm_eps, is_centred=c.has_centred_norms)

  def _around(
    self, name: str, x: jax.Array, half: Callable[[jax.Array], jax.Array]
  ) -> jax.Array:
    """Return x with what a half of the layer adds to it.

    Args:
      name: "attention" or "mlp", whose norms these are.
      x: states before it.
      half: the mixer or the feed-forward.
    """
    norms = configs.NORMS[self.config.norms]
    h = x
    if f"{name}_norm" in norms:
      h = self._normed(h, getattr(self, f"{name}_norm")[...])
    h = half(h)
    if f"{name}_post_norm" in norms:
      h = self._normed(h, getattr(self, f"{name}_post_norm")[...])
    return x + _scaled(h, self.config.residual_scale)

  def _mixed(
    self,
    h: Float[Array, "*B D"],
    factors: rotary.Factors,
    layer: Any,
    attend: Attend,
    rows: Int[Array, "R"] | None,
  ) -> tuple[Float[Array, "*B D"], Any]:
    """Return what the mixer adds, and what `attend` kept."""
    c = self.config
    biases = (
      (self.query_bias, self.key_bias, self.value_bias)
      if c.has_qkv_bias
      else (None, None, None)
    )
    has_norms = c.has_qk_norm or c.has_wide_qk_norm
    norms = (self.query_norm, self.key_norm) if has_norms else (None, None)
    gate = None
    if c.has_gated_attention:
      both = self._heads("query", h, rows, None, None)
      query, gate = jnp.split(both, 2, axis=-1)
      query = query if norms[0] is None else self._normed(query, norms[0][...])
    else:
      query = self._heads("query", h, rows, biases[0], norms[0])
    key = self._heads("key", h, rows, biases[1], norms[1])
    value = self._heads("value", h, rows, biases[2], None)
    # Attention divides by sqrt(H), whatever the scale of the model is.
    scale = (c.attention_scale or c.head_dim**-0.5) * math.sqrt(c.head_dim)
    scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-12) else scale
    mixed, kept = attend(
      layer,
      rotary.rotated(query, *factors, scale),
      rotary.rotated(key, *factors),
      value,
    )
    if gate is not None:
      mixed = mixed * jax.nn.sigmoid(gate)
    return self._product("output", "...nh,nhd->...d", mixed, rows), kept

  def _recurred(
    self,
    h: Float[Array, "*B D"],
    layer: Any,
    recur: Recur,
    rows: Int[Array, "R"] | None,
  ) -> tuple[Float[Array, "*B D"], Any]:
    """Return what the gated delta rule adds, and what `recur` kept.

    With the log decay -exp(w) softplus(x a + bias) and the rate sigmoid(x b).
    What the rule gives is normed in each head, and multiplied by silu of a
    gate.
    """
    c = self.config

    def product(name: str, axes: str) -> jax.Array:
      return self._product(name, f"...d,d{axes}->...{axes}", h, rows)

    def leaf(name: str) -> jax.Array:
      return getattr(self, f"delta_{name}")[...]

    def of_heads(name: str) -> jax.Array:
      shape = (1,) * (h.ndim - 1) + (-1,)
      return leaf(name).astype(jnp.float32).reshape(shape)

    decay = product("delta_decay", "n").astype(jnp.float32)
    decay = jax.nn.softplus(decay + of_heads("decay_bias"))
    inputs = gated_delta.Inputs(
      query=product("delta_query", "nh"),
      key=product("delta_key", "nh"),
      value=product("delta_value", "nh"),
      log_decay=-jnp.exp(of_heads("log_decay")) * decay,
      rate=jax.nn.sigmoid(product("delta_rate", "n").astype(jnp.float32)),
    )
    filters = gated_delta.Filters(
      query=leaf("query_filter"),
      key=leaf("key_filter"),
      value=leaf("value_filter"),
    )
    mixed, kept = recur(layer, inputs, filters, _ACTIVATIONS[c.activation])
    mixed = ad_checkpoint.checkpoint_name(mixed, reference.MIXED)
    gate = product("delta_gate", "nh").astype(jnp.float32)
    mixed = rms_norm(mixed, leaf("norm"), c.norm_eps)
    mixed = (mixed.astype(jnp.float32) * jax.nn.silu(gate)).astype(h.dtype)
    return self._product("delta_output", "...nh,nhd->...d", mixed, rows), kept

  def _fed_forward(
    self,
    h: Float[Array, "*B D"],
    rows: Int[Array, "R"] | None,
    placement: experts_lib.Placement | None,
  ) -> Float[Array, "*B D"]:
    """Return what the feed-forward adds."""
    activation = _ACTIVATIONS[self.config.activation]
    if self.config.experts is not None:
      names = "router", *configs.EXPERT_KERNELS
      kernels = {name: getattr(self, name).get_value() for name in names}
      return experts_lib.applied(
        self.config.experts,
        kernels,
        h,
        activation,
        remat_lib.PRODUCT,
        placement,
      )
    gate = activation(self._product("gate", "...d,df->...f", h, rows))
    up = self._product("up", "...d,df->...f", h, rows)
    return self._product("down", "...f,fd->...d", gate * up, rows)

  def __call__(
    self,
    x: Float[Array, "*B D"],
    factors: rotary.Factors,
    layer: Any,
    attend: Attend,
    rows: Int[Array, "R"] | None = None,
    recur: Recur | None = None,
    placement: experts_lib.Placement | None = None,
  ) -> tuple[Float[Array, "*B D"], Any]:
    kept: Any = None

    def mix(h: jax.Array) -> jax.Array:
      nonlocal kept
      if self.is_delta:
        assert recur is not None
        mixed, kept = self._recurred(h, layer, recur, rows)
      else:
        mixed, kept = self._mixed(h, factors, layer, attend, rows)
      return mixed

    x = self._around("attention", x, mix)
    x = self._around("mlp", x, lambda h: self._fed_forward(h, rows, placement))
    return x, kept


def _stacked(c: configs.ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
  """Return all layers as one module whose parameters are stacked.

  A parameter that not all layers have is stacked over those that have it.
  """
  if not c.is_delta:
    stack = nnx.vmap(lambda r: Block(c, rngs=r))
    return stack(rngs.split(c.num_layers))
  found: dict[str, list[Any]] = {}
  for layer in range(c.num_layers):
    for name, param in nnx.state(Block(c, rngs=rngs, layer=layer)).items():
      found.setdefault(name, []).append(param)
  layers = nnx.Module()
  for name, params in found.items():
    stacked = jnp.stack([param[...] for param in params])
    axes = params[0].get_metadata()["logical_axes"]
    setattr(layers, name, nnx.Param(stacked, logical_axes=axes))
  return layers


@functools.lru_cache(maxsize=64)
def _abstract_block(config: configs.ModelConfig, layer: int) -> tuple[Any, Any]:
  """Return the graph and the state of a layer of shapes without values."""
  return nnx.split(
    nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0), layer=layer))
  )


class Decoder(nnx.Module):
  """Embedding, layers and final norm; `head` returns the output matrix.

  A decoder with a scalar head has a vector in place of that matrix, which is
  zero at first.

  Args:
    is_stacked: hold the layers as one stacked block (trainer) instead of a list
      (engine).
    remat: activations of each stacked layer that the backward pass computes
      again.
  """

  def __init__(
    self,
    config: configs.ModelConfig,
    *,
    rngs: nnx.Rngs,
    is_stacked: bool = True,
    remat: sections.Remat = sections.Remat.NONE,
  ):
    c = config
    self.config = c
    self.is_stacked = is_stacked
    self.remat = remat
    self.embedding = _param(
      rngs, (c.vocab_size, c.model_dim), ("vocab", "embed"), fan_in=c.model_dim
    )
    if is_stacked:
      self.layers = _stacked(c, rngs)
    else:
      blocks = [Block(c, rngs=rngs, layer=i) for i in range(c.num_layers)]
      self.layers: Any = nnx.List(blocks)
    one = 0.0 if c.has_centred_norms else 1.0
    self.final_norm = _constant(one, (c.model_dim,), (None,))
    if c.has_scalar_head:
      self.scalar_head = _constant(0.0, (c.model_dim,), (None,))
    elif not c.has_tied_head:
      self.output_head = _param(
        rngs,
        (c.model_dim, c.vocab_size),
        ("embed", "vocab"),
        fan_in=c.model_dim,
      )

  def head(self) -> Float[Array, "V D"]:
    """Return the vectors whose products with hidden states are logits."""
    if self.config.has_tied_head:
      return self.embedding[...]
    return quantization.dequantize(self.output_head[...]).T

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Return float32 logits; a quantised head is not dequantised as a whole."""
    c = self.config
    if c.has_tied_head:
      table = self.embedding[...].astype(hidden.dtype)
      logits = products.contract(hidden, table, (1,), jnp.float32)
    else:
      head = self.output_head.get_value()
      logits = quantization.project("...d,dv->...v", hidden, head, jnp.float32)
    if c.logits_divisor != 1.0:
      logits = logits / c.logits_divisor
    return reference.soft_capped(logits, c.logits_soft_cap)

  def scalars(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B"]:
    """Return the float32 number that the scalar head makes of each state."""
    return scalars(hidden, self.scalar_head[...])

  def embed(
    self, tokens: Int[Array, "*B"], dtype: jnp.dtype
  ) -> Float[Array, "*B D"]:
    """Look up tokens; the gradient is summed in the dtype of the embedding."""
    embedded = products.rows(self.embedding[...], tokens).astype(dtype)
    scale = self.config.embedding_scale
    if self.config.has_rounded_embedding_scale:
      scale = float(np.asarray(scale, dtype))
    return _scaled(embedded, scale)

  def hidden(
    self,
    x: Float[Array, "*B D"],
    positions: Int[Array, "*B"],
    attend: Attend,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    rows: Int[Array, "R"] | None = None,
    per_layer: Any = None,
    recur: Recur | None = None,
    placement: experts_lib.Placement | None = None,
  ) -> tuple[Float[Array, "*B D"], Any]:
    """Return the normed hidden states, and what `attend` kept of each layer.

    Args:
      x: result of `embed`.
      positions: of each token in its sequence.
      attend: the attention, see the module's docstring.
      constrain: constrains how the states after each layer are split.
      rows: the adapter of each row, if the model holds a stack of adapters.
      per_layer: arrays with a value for each layer, which `attend` gets instead
        of the layer's index. Only for stacked layers.
      recur: the gated delta rule, if the model has it.
      placement: of the states, for experts on a mesh.
    """
    ropes, kinds = rotary.kinds(self.config)
    factors = [rotary.factors(self.config, rope, positions) for rope in ropes]
    if self.is_stacked and self.config.is_delta:
      assert per_layer is None and len(factors) == 1
      x, kept = self._periods(
        x, factors[0], attend, constrain, rows, recur, placement
      )
    elif self.is_stacked:
      block_def, stacked = nnx.split(self.layers)
      is_same = len(factors) == 1
      all_factors = is_same or jax.tree.map(lambda *x: jnp.stack(x), *factors)

      def step(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        layer_params, layer_values, kind = layer
        block = nnx.merge(block_def, layer_params)
        x = ad_checkpoint.checkpoint_name(x, remat_lib.LAYER_INPUT)
        own = factors[0]
        if not is_same:
          own = jax.tree.map(lambda x: x[kind], all_factors)
        x, kept = block(x, own, layer_values, attend, rows, None, placement)
        return constrain(x), kept

      body: Any = step
      if self.remat is not sections.Remat.NONE:
        # The scan already separates the two passes, so the barriers that
        # prevent common subexpressions from being merged are not needed.
        body = jax.checkpoint(
          step, policy=remat_lib.POLICIES[self.remat], prevent_cse=False
        )
      of_layers = None if is_same else jnp.array(kinds, jnp.int32)
      x, kept = jax.lax.scan(body, x, (stacked, per_layer, of_layers))
    else:
      kept = []
      for layer, block in enumerate(self.layers):
        x, kept_here = block(
          x, factors[kinds[layer]], layer, attend, rows, recur, placement
        )
        x = constrain(x)
        kept.append(kept_here)
    c = self.config
    x = rms_norm(
      x, self.final_norm[...], c.norm_eps, is_centred=c.has_centred_norms
    )
    return x, kept

  def _periods(
    self,
    x: jax.Array,
    factors: rotary.Factors,
    attend: Attend,
    constrain: Callable[[jax.Array], jax.Array],
    rows: jax.Array | None,
    recur: Recur | None,
    placement: experts_lib.Placement | None,
  ) -> tuple[jax.Array, Any]:
    """Scan stacked layers of two kinds, a period of them at a time."""
    c = self.config
    period = c.period
    num_periods = c.num_layers // period
    stacked = nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))
    apart = jax.tree.map(
      lambda leaf: leaf.reshape(num_periods, -1, *leaf.shape[1:]), stacked
    )

    def body(x: jax.Array, own: Any) -> tuple[jax.Array, Any]:
      kept = []
      for layer in range(period):

        def one(x: jax.Array, params: Any, layer: int = layer):
          graph, shapes = _abstract_block(c, layer)
          state = jax.tree.map(lambda x: x, shapes)
          nnx.replace_by_pure_dict(state, params)
          block = nnx.merge(graph, state)
          x = ad_checkpoint.checkpoint_name(x, remat_lib.LAYER_INPUT)
          x, kept = block(x, factors, layer, attend, rows, recur, placement)
          return constrain(x), kept

        params = {}
        for name, leaf in own.items():
          if layer in (having := c.layers_with(name)):
            at = having.index(layer)
            params[name] = jax.tree.map(lambda x, at=at: x[at], leaf)
        if self.remat is not sections.Remat.NONE:
          one = jax.checkpoint(one, policy=remat_lib.POLICIES[self.remat])
        x, kept_here = one(x, params)
        kept.append(kept_here)
      return x, kept

    return jax.lax.scan(body, x, apart)


# Logical axes of activations that are split; in decoding there is no "tokens".
ACTIVATION_AXES = (
  ("batch", "tokens", "heads", "head"),
  ("batch", "tokens", "kv_heads", "head"),
  ("batch", "tokens", "mlp"),
  ("batch", "tokens", "vocab"),
)


@functools.lru_cache(maxsize=64)
def _abstract(config: configs.ModelConfig, is_stacked: bool) -> tuple[Any, Any]:
  """Return the graph and the state of a decoder of shapes without values."""
  return nnx.split(
    nnx.eval_shape(
      lambda: Decoder(config, rngs=nnx.Rngs(0), is_stacked=is_stacked)
    )
  )


def logical_axes(config: configs.ModelConfig, *, is_stacked: bool) -> Params:
  """Return the names of the axes of every parameter, as a tree."""
  # All layers have the same axes, and tracing each of 64 layers takes seconds.
  _, state = _abstract(config, True)
  flat = [
    (path, variable.get_metadata()["logical_axes"])
    for path, variable in nnx.to_flat_state(state)
  ]
  tree = nnx.to_pure_dict(nnx.from_flat_state(flat))
  if is_stacked:
    tree["layers"] = {k: ("layers", *x) for k, x in tree["layers"].items()}
  else:
    tree["layers"] = [
      {k: x for k, x in tree["layers"].items() if i in config.layers_with(k)}
      for i in range(config.num_layers)
    ]
  return tree


def bind(
  config: configs.ModelConfig,
  params: Params,
  *,
  is_stacked: bool,
  remat: sections.Remat = sections.Remat.NONE,
) -> Decoder:
  """Return a decoder with these parameters; this costs only tracing time.

  Args:
    config: the architecture.
    params: a tree as of `init_params`, or of `unstack` if not `is_stacked`.
    is_stacked: whether `params` has one stacked block of layers or a list.
    remat: activations that the backward pass computes again.
  """
  graph, shapes = _abstract(config, is_stacked)
  state = jax.tree.map(lambda x: x, shapes)  # a copy, which is changed
  if not is_stacked:
    params = {**params, "layers": dict(enumerate(params["layers"]))}
  nnx.replace_by_pure_dict(state, params)
  model = nnx.merge(graph, state)
  model.remat = remat
  return model


def init_params(config: configs.ModelConfig, key: jax.Array) -> Params:
  """Return fresh float32 parameters with stacked layers; call it inside jit."""
  model = Decoder(config, rngs=nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def unstack(
  params: Params, num_layers: int, model: configs.ModelConfig | None = None
) -> Params:
  """Return the engine's tree, whose `layers` is a list, from the trainer's.

  Args:
    params: the trainer's tree.
    num_layers: of the model.
    model: the architecture, which is needed if layers have different mixers.
  """
  stacked = params["layers"]
  if model is None or not model.is_delta:
    layers = [
      jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(num_layers)
    ]
    return {**params, "layers": layers}
  layers = [{} for _ in range(num_layers)]
  for name, leaf in stacked.items():
    for i, layer in enumerate(model.layers_with(name)):
      layers[layer][name] = jax.tree.map(lambda x, i=i: x[i], leaf)
  return {**params, "layers": layers}
