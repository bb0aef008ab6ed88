"""Weight-only int8 and fp8 quantization of matrices.

The trainer quantises the weights that it publishes; the channel then moves
smaller arrays, and the engine multiplies by them. Activations, the cache and
the weights that the trainer updates are not quantised. A base that LoRA freezes
may be int8 in the trainer too. The trainer computes logprobs with
its full weights, so `mismatch_kl` measures the cost of quantization. The
recorded behavior logprobs are those of the quantised policy, so the loss
corrects for it as it does for any stale policy.

Quantised are the matrices that tokens are multiplied by: those of a layer, its
experts included, and an untied output head. Norms, biases and routers are small
and stay as they are. The embedding stays too: it is only looked up, and if it
also serves as the output head, its error would enter at both ends of the model.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np
import qwix

from jaxrl_async.config import sections
from jaxrl_async.devices import grouped
from jaxrl_async.devices import products
from jaxrl_async.models import configs

_TYPES = {
  sections.WeightFormat.INT8: "int8",
  sections.WeightFormat.FP8: "float8_e4m3fn",
}
# Matrices by name, and the number of axes that a product sums over. They come
# first, after the axis of experts. The other axes are output channels, each of
# which has a scale of its own.
NUM_CONTRACTED = {
  **{name: len(x.inputs) for name, x in configs.PROJECTIONS.items()},
  **{name: len(x.inputs) for name, x in configs.EXPERT_KERNELS.items()},
  "output_head": 1,
}


def _is_quantized(leaf: Any) -> bool:
  return isinstance(leaf, qwix.QArray)


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class ChannelsFirst:
  """A matrix in `matrix`, with its output channels before its summed axes.

  `products.contract` multiplies few rows by it in less time.
  """

  matrix: Any


def channels_first(params: Any) -> Any:
  """Return the tree of float arrays with its matrices as `ChannelsFirst`.

  The matrices of experts stay as they are.
  """

  def moved(matrix: jax.Array, contracted: range) -> ChannelsFirst:
    last = range(matrix.ndim - len(contracted), matrix.ndim)
    return ChannelsFirst(jnp.moveaxis(matrix, tuple(contracted), tuple(last)))

  return _map_matrices(moved, params, has_experts=False)


def channels_first_leaves(tree: Any) -> Any:
  """Return a tree that has one leaf for each array as that of its result."""
  return _map_matrices(
    lambda leaf, _: ChannelsFirst(leaf), tree, has_experts=False
  )


def _map_matrices(
  fn: Callable[[Any, range], Any], tree: Any, *, has_experts: bool = True
) -> Any:
  """Replace each matrix with `fn(leaf, contracted axes)`."""

  def replaced(path: tuple[Any, ...], leaf: Any) -> Any:
    name = getattr(path[-1], "key", None)
    is_expert = name in configs.EXPERT_KERNELS
    if name not in NUM_CONTRACTED or (is_expert and not has_experts):
      return leaf
    # Stacked layers have one axis more, in front: ("layers", name).
    start = int(getattr(path[0], "key", None) == "layers" and len(path) == 2)
    start += is_expert
    return fn(leaf, range(start, start + NUM_CONTRACTED[name]))

  return jax.tree_util.tree_map_with_path(
    replaced, tree, is_leaf=lambda x: isinstance(x, tuple) or _is_quantized(x)
  )


def quantize(
  params: Any, weight_format: sections.WeightFormat, dtype: str
) -> Any:
  """Return the tree with quantised matrices, and all else in `dtype`.

  Each output channel is scaled by its largest magnitude. The error of int8 is
  at most half a scale. A matrix that has this format already stays as it is.

  Args:
    params: layers stacked or not, in full precision or quantised.
    weight_format: FLOAT only casts.
    dtype: of arrays that are not quantised. Scales are float32.
  """

  def quantized(matrix: Any, contracted: range) -> qwix.QArray:
    if _is_quantized(matrix):
      if matrix.qtype == jnp.dtype(_TYPES[weight_format]):
        return matrix
      matrix = qwix.dequantize(matrix)
    return qwix.quantize(
      matrix.astype(jnp.float32),
      jnp.dtype(_TYPES[weight_format]),
      channelwise_axes=[x for x in range(matrix.ndim) if x not in contracted],
    )

  if weight_format is sections.WeightFormat.FLOAT:
    params = dequantize(params)
  else:
    params = _map_matrices(quantized, params)
  return jax.tree.map(
    lambda x: x if _is_quantized(x) else x.astype(dtype),
    params,
    is_leaf=_is_quantized,
  )


def frozen(params: Any, dtype: str) -> Any:
  """Return parameters as the trainer holds those that it does not train.

  Args:
    params: layers stacked.
    dtype: a dtype to cast to. "int8" quantises the matrices of the layers, and
      the rest becomes bfloat16. The head is not quantised, because the trainer
      would have to dequantise it as a whole.
  """
  if dtype != "int8":
    return jax.tree.map(lambda x: x.astype(dtype), params)
  layers = {"layers": params.get("layers", {})}
  return {
    **jax.tree.map(lambda x: x.astype("bfloat16"), params),
    **quantize(layers, sections.WeightFormat.INT8, "bfloat16"),
  }


def frozen_axes(axes: Any, dtype: str) -> Any:
  """Return the logical axes of the result of `frozen`."""
  if dtype != "int8":
    return axes
  layers = {"layers": axes["layers"]}
  return {**axes, **logical_axes(layers, sections.WeightFormat.INT8)}


def logical_axes(axes: Any, weight_format: sections.WeightFormat) -> Any:
  """Return the logical axes of the result of `quantize`.

  Args:
    axes: `transformer.logical_axes` of the tree that is quantised.
    weight_format: of the quantised tree.
  """

  def quantized(names: Any, contracted: range) -> qwix.QArray:
    # A scale has size one along the contracted axes, which are therefore not
    # split.
    kept: Any = tuple(
      None if i in contracted else name for i, name in enumerate(names)
    )
    return qwix.QArray(
      qvalue=names,
      scale=kept,
      qtype=jnp.dtype(_TYPES[weight_format]),
    )

  if weight_format is sections.WeightFormat.FLOAT:
    return axes
  return _map_matrices(quantized, axes)


def dequantize(params: Any) -> Any:
  """Return the tree with quantised arrays as the float32 they stand for."""
  return jax.tree.map(
    lambda x: qwix.dequantize(x) if _is_quantized(x) else x,
    params,
    is_leaf=_is_quantized,
  )


# -- products -----------------------------------------------------------------


def _plain_product(
  num_in: int, dtype: Any, x: Float[Array, "..."], kernel: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Return the product in `dtype`, with the kernel cast to the type of x."""
  summed = tuple(range(num_in))
  return products.contract(x, kernel.astype(x.dtype), summed, dtype or x.dtype)


def _plain_gradients(
  num_in: int, dtype: Any, inputs: Any, d_out: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
  """Return the gradients that JAX would compute, with operands reordered.

  In JAX's order, products.outer would take a third of a train step on a CPU.
  The kernel's gradient is accumulated in the kernel's own dtype.
  """
  del dtype
  x, kernel = inputs
  d_out = d_out.astype(x.dtype)
  channels = tuple(range(num_in, kernel.ndim))
  d_x = products.contract(d_out, kernel.astype(x.dtype), channels, x.dtype)
  return d_x, products.outer(x, d_out, x.ndim - num_in, kernel.dtype)


_project = jax.custom_vjp(_plain_product, nondiff_argnums=(0, 1))
_project.defvjp(
  lambda num_in, dtype, x, kernel: (
    _plain_product(num_in, dtype, x, kernel),
    (x, kernel),
  ),
  _plain_gradients,
)


def _project_plain(
  equation: str, dtype: Any, x: Float[Array, "..."], kernel: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Return `jnp.einsum(equation, x, kernel)` in `dtype`.

  Args:
    equation: such as "...d,dnh->...nh". The axes of x that are summed are its
      last and the kernel's first ones, in the same order.
    dtype: of the result; None is the dtype of x.
    x: activations.
    kernel: is cast to the dtype of x.
  """
  num_in = kernel.ndim - len(equation.partition("->...")[2])
  if num_in > 1:
    # Two summed axes are one axis in memory. XLA's CPU backend does not see
    # that, and transposes the kernel in each decode step.
    x = x.reshape(*x.shape[: x.ndim - num_in], -1)
    kernel = kernel.reshape(-1, *kernel.shape[num_in:])
  return _project(1, dtype, x, kernel)


def project(
  equation: str, x: Float[Array, "..."], kernel: Any, dtype: Any = None
) -> Float[Array, "..."]:
  """Return `jnp.einsum` of activations and a kernel, maybe a quantised one.

  Args:
    equation: such as "...d,dnh->...nh"; the kernel's output channels come last.
    x: activations; their dtype is that of the computation.
    kernel: an array, a quantised array, or an array as `ChannelsFirst`.
    dtype: of the sum and of the result; None is the dtype of x.
  """
  if isinstance(kernel, ChannelsFirst):
    num_channels = len(equation.partition("->...")[2])
    summed = tuple(range(num_channels, kernel.matrix.ndim))
    return products.contract(x, kernel.matrix, summed, dtype or x.dtype)
  if not _is_quantized(kernel):
    return _project_plain(equation, dtype, x, kernel)
  return _quantized_product(equation, dtype, x, kernel)


def project_groups(
  x: Float[Array, "M D"],
  kernel: Any,
  sizes: Int[Array, "E"],
  groups: Int[Array, "M"],
) -> Float[Array, "M F"]:
  """Return each row times the matrix of its group, maybe a quantised one.

  Args:
    x: rows in the order of their groups.
    kernel: a matrix for each group, cast to the dtype of x.
    sizes: number of rows of each group.
    groups: the group of each row.
  """
  if not _is_quantized(kernel):
    return grouped.product(x, kernel.astype(x.dtype), sizes)
  # See `_product`. The barrier has no gradient.
  _, values = jax.lax.optimization_barrier(
    (jax.lax.stop_gradient(x), kernel.qvalue)
  )
  found = grouped.product(x, values.astype(x.dtype), sizes)
  scales = jax.lax.stop_gradient(kernel.scale[:, 0])[groups]
  return (found.astype(jnp.float32) * scales).astype(x.dtype)


def _product(
  equation: str, dtype: Any, x: Float[Array, "..."], kernel: Any
) -> Float[Array, "..."]:
  """Return the product with a quantised kernel; see `project`."""
  # The kernel does not change during a decode loop, so XLA would convert it
  # before the loop and keep the larger copy. Tying it to x, which does change,
  # with a barrier prevents this.
  x, values = jax.lax.optimization_barrier((x, kernel.qvalue))
  summed = jnp.einsum(
    equation, x, values.astype(x.dtype), preferred_element_type=jnp.float32
  )
  num_channels = len(equation.partition("->...")[2])
  channels = kernel.scale.shape[-num_channels:]
  ones = (1,) * (summed.ndim - num_channels)
  return (summed * kernel.scale.reshape(ones + channels)).astype(
    dtype or x.dtype
  )


def _input_gradient(
  equation: str, dtype: Any, inputs: Any, d_out: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Any]:
  """Return the gradient of the input; a quantised kernel has none.

  The backward pass reads the quantised values. Automatic differentiation would
  keep the matrix in the dtype of x for each layer, between the two passes.
  """
  del dtype
  x, kernel = inputs
  operands, _, outputs = equation.partition("->...")
  into, _, whole = operands.removeprefix("...").partition(",")
  num_channels = len(outputs)
  ones = (1,) * (d_out.ndim - num_channels)
  scale = kernel.scale.reshape(ones + kernel.scale.shape[-num_channels:])
  scaled = (d_out.astype(jnp.float32) * scale).astype(x.dtype)
  d_x = jnp.einsum(
    f"...{outputs},{whole}->...{into}", scaled, kernel.qvalue.astype(x.dtype)
  )
  return d_x, jax.tree.map(_no_gradient, kernel)


def _no_gradient(x: jax.Array) -> Any:
  if jnp.issubdtype(x.dtype, jnp.integer):
    return np.zeros(x.shape, jax.dtypes.float0)
  return jnp.zeros_like(x)


_quantized_product = jax.custom_vjp(_product, nondiff_argnums=(0, 1))
_quantized_product.defvjp(
  lambda equation, dtype, x, kernel: (
    _product(equation, dtype, x, kernel),
    (x, kernel),
  ),
  _input_gradient,
)


def unsupported(weight_format: sections.WeightFormat, device: Any) -> str:
  """Return why a device cannot multiply by such weights, or "" if it can.

  A small product is compiled, run and compared with the host's result. A
  platform without support for a type may convert it in software, which is slow
  but correct, or may not know the type at all.
  """
  if weight_format is sections.WeightFormat.FLOAT:
    return ""
  order = np.arange(256, dtype=np.float32).reshape(16, 16)
  x, matrix = np.cos(order[:4]), np.sin(order)

  @jax.jit
  def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    params = quantize({"up": matrix}, weight_format, "float32")
    return project("...d,df->...f", x, params["up"])

  try:
    found = np.asarray(product(*jax.device_put((x, matrix), device)))
  except (jax.errors.JaxRuntimeError, NotImplementedError) as problem:
    return str(problem).splitlines()[0]
  error = np.max(np.abs(found - x @ matrix))
  # Sums of 16 products of at most one each: int8 is off by 0.02, fp8 by 0.1.
  return "" if error < 0.3 else f"a product is off by {error:.2g}"
