"""Weight-only int8 and fp8: matrices a quarter of their size, for the engine.

The trainer quantises what it publishes; the channel moves the smaller arrays
and the engine multiplies by them. Activations, cache and the trainer's own
weights stay as they are. The trainer goes on to score with its full weights,
so `mismatch_kl` says what quantising costs, and since the recorded behavior
logprobs are those of the quantised policy, the loss corrects for it as for any
other stale policy.

Quantised are the matrices every token is multiplied by: the seven of a layer
and an untied output head. Norms and biases are small. The embedding is only
looked up; where it is the output head too, its error would enter at both ends
of the model.
"""

from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float
import numpy as np
import qwix

from jaxrl_async.config import sections
from jaxrl_async.models import projection

_TYPES = {
  sections.WeightFormat.INT8: "int8",
  sections.WeightFormat.FP8: "float8_e4m3fn",
}
# Matrices by name, and how many of their first axes are summed over. The other
# axes are output channels, each with a scale of its own.
_NUM_CONTRACTED = {
  "query": 1,
  "key": 1,
  "value": 1,
  "output": 2,
  "gate": 1,
  "up": 1,
  "down": 1,
  "output_head": 1,
}


def _is_quantized(leaf: Any) -> bool:
  return isinstance(leaf, qwix.QArray)


def _map_matrices(
  fn: Any, tree: Any, weight_format: sections.WeightFormat
) -> Any:
  """Puts `fn(leaf, contracted axes)` in the place of each matrix."""
  if weight_format is sections.WeightFormat.FLOAT:
    return tree

  def replaced(path, leaf):
    name = getattr(path[-1], "key", None)
    if name not in _NUM_CONTRACTED:
      return leaf
    return fn(leaf, range(_NUM_CONTRACTED[name]))

  return jax.tree_util.tree_map_with_path(
    replaced, tree, is_leaf=lambda x: isinstance(x, tuple)
  )


def quantize(
  params: Any, weight_format: sections.WeightFormat, dtype: str
) -> Any:
  """What travels: quantised matrices, everything else cast to `dtype`.

  A matrix is scaled to the largest magnitude of each output channel; int8 is
  off by half a scale at most.

  Args:
    params: layers unstacked, in full precision.
    weight_format: FLOAT only casts.
    dtype: of what is not quantised. Scales are float32.
  """

  def quantized(matrix, contracted):
    return qwix.quantize(
      matrix.astype(jnp.float32),
      jnp.dtype(_TYPES[weight_format]),
      channelwise_axes=[x for x in range(matrix.ndim) if x not in contracted],
    )

  return jax.tree.map(
    lambda x: x if _is_quantized(x) else x.astype(dtype),
    _map_matrices(quantized, params, weight_format),
    is_leaf=_is_quantized,
  )


def logical_axes(axes: Any, weight_format: sections.WeightFormat) -> Any:
  """`transformer.logical_axes`, unstacked, in the tree that is published."""

  def quantized(names, contracted):
    # A scale is of size one where it is summed over: nothing to split.
    kept: Any = tuple(
      None if i in contracted else name for i, name in enumerate(names)
    )
    return qwix.QArray(
      qvalue=names,
      scale=kept,
      qtype=jnp.dtype(_TYPES[weight_format]),
    )

  return _map_matrices(quantized, axes, weight_format)


def dequantize(params: Any) -> Any:
  """Arrays as they are, quantised ones as the float32 ones they stand for."""
  return jax.tree.map(
    lambda x: qwix.dequantize(x) if _is_quantized(x) else x,
    params,
    is_leaf=_is_quantized,
  )


def project(
  equation: str, x: Float[Array, "..."], kernel: Any, dtype: Any = None
) -> Float[Array, "..."]:
  """`jnp.einsum` of activations with a kernel, which may be quantised.

  Args:
    equation: as "...d,dnh->...nh"; the kernel's output channels come last.
    x: activations; what is computed has their type.
    kernel: an array or a quantised one.
    dtype: of the sum and of the result, where it is not that of x.
  """
  if not _is_quantized(kernel):
    return projection.project(equation, dtype, x, kernel)
  # In a decode loop the kernel does not change, so XLA would widen it before
  # the loop and keep the copy. It cannot where x, which does change, is needed.
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


def unsupported(weight_format: sections.WeightFormat, device: Any) -> str:
  """Why a device cannot multiply by such weights, or "" if it can.

  Found out by a small product, compiled and compared with the host's: a
  platform that lacks a type may widen it in software, which is slow and right,
  or not know it at all.
  """
  if weight_format is sections.WeightFormat.FLOAT:
    return ""
  order = np.arange(256, dtype=np.float32).reshape(16, 16)
  x, matrix = np.cos(order[:4]), np.sin(order)

  @jax.jit
  def product(x, matrix):
    params = quantize({"up": matrix}, weight_format, "float32")
    return project("...d,df->...f", x, params["up"])

  try:
    found = np.asarray(product(*jax.device_put((x, matrix), device)))
  except (jax.errors.JaxRuntimeError, NotImplementedError) as problem:
    return str(problem).splitlines()[0]
  error = np.max(np.abs(found - x @ matrix))
  # Sums of 16 products of up to one: off by 0.02 in int8, by 0.1 in fp8.
  return "" if error < 0.3 else f"a product is off by {error:.2g}"
