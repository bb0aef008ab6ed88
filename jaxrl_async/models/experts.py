"""The feed-forward of experts: each token is fed to a few of many (Qwen3-MoE).

    p = softmax(h R)                       a probability for each expert
    y = sum of w_e f_e(h) over the k experts of largest p

f_e is a gated product with matrices of its own, and w is p, divided by its sum
over these k if `has_normed_weights`. No token is left out, however many choose
the same expert, so that what a token gets depends on nothing but itself. The
rows are sorted by expert, and each group is multiplied by its matrices
(`devices.grouped`).
"""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

import jax
from jax import ad_checkpoint
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import products
from jaxrl_async.models import configs
from jaxrl_async.models import quantization


def routed(
  experts: configs.Experts, h: Float[Array, "T D"], router: Float[Array, "D E"]
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
  """Return the experts of each token, and their weights in float32.

  The scores are sums in float32, whatever the dtype of h is.
  """
  scores = products.contract(h, router.astype(h.dtype), (0,), jnp.float32)
  chances, chosen = jax.lax.top_k(
    jax.nn.softmax(scores, axis=-1), experts.num_per_token
  )
  if experts.has_normed_weights:
    chances = chances / chances.sum(-1, keepdims=True)
  return chosen, chances


@jax.custom_vjp
def _permuted(
  x: Float[Array, "M D"], order: Int[Array, "M"], inverse: Int[Array, "M"]
) -> Float[Array, "M D"]:
  """Return `x[order]`, whose gradient is a gather as well."""
  del inverse
  return products.rows(x, order)


_permuted.defvjp(
  lambda x, order, inverse: (_permuted(x, order, inverse), (order, inverse)),
  lambda orders, d_out: (products.rows(d_out, orders[1]), None, None),
)


class Placement(NamedTuple):
  """How the states of tokens are split over a mesh.

  Attributes:
    layout: the mesh and its rules.
    axes: logical axes of the states, without their last one.
  """

  layout: mesh_lib.Layout
  axes: tuple[str | None, ...]


def applied(
  experts: configs.Experts,
  kernels: Mapping[str, Any],
  h: Float[Array, "*B D"],
  activation: Callable[[jax.Array], jax.Array],
  product_name: str,
  placement: Placement | None = None,
) -> Float[Array, "*B D"]:
  """Return what the feed-forward adds.

  On a mesh, each device sorts its own tokens. It has a part of each expert, of
  some experts whole, or both, as the rules say, and the results are summed over
  devices.

  Args:
    experts: of the model.
    kernels: the router and `configs.EXPERT_KERNELS` of a layer, by name.
    h: states of tokens; those of padding change nothing for the others.
    activation: of the gate.
    product_name: the name of products for a policy of `jax.checkpoint`.
    placement: None leaves all shardings to the compiler.
  """

  def here(kernels: Mapping[str, Any], h: jax.Array, first: Any) -> jax.Array:
    return _on_device(experts, kernels, h, activation, product_name, first)

  if placement is None:
    return here(kernels, h, None)
  layout, axes = placement
  mesh, rules = layout.context, layout.rules
  sizes = layout.mesh.shape
  if all(sizes[axis] == 1 for axis in layout.axes):
    return here(kernels, h, None)
  states = mesh_lib.spec(rules, (*axes, None))
  divided = [x for x in rules.experts + rules.mlp if sizes[x] > 1]
  # Along a mesh axis that splits tokens too, devices first exchange these.
  shared = [
    tuple(x for x in divided if name and x in getattr(rules, name))
    for name in axes
  ]
  summed = tuple(x for x in divided if not any(x in own for own in shared))
  num_parts = layout.parts("experts")

  def on_device(kernels: Mapping[str, Any], h: jax.Array) -> jax.Array:
    first = None
    if num_parts > 1:
      each = experts.num_experts // num_parts
      first = lax.axis_index(rules.experts) * each
    for axis, own in enumerate(shared):
      h = lax.all_gather(h, own, axis=axis, tiled=True) if own else h
    out = here(kernels, h, first)
    for axis, own in enumerate(shared):
      if own:
        out = lax.psum_scatter(out, own, scatter_dimension=axis, tiled=True)
    return lax.psum(out, summed) if summed else out

  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=({n: _specs(rules, n, x) for n, x in kernels.items()}, states),
    out_specs=states,
    axis_names=layout.axes,
    check_vma=False,
  )(kernels, h)


def _specs(rules: sections.ShardingRules, name: str, kernel: Any) -> Any:
  """Return how a kernel is split where it is used: its inputs are not."""
  found = configs.EXPERT_KERNELS.get(name)
  if found is None:
    return P()

  def spec(leaf: jax.Array) -> P:
    names = zip(found.axes, leaf.shape, strict=True)
    # Scales of a quantised kernel have size one along its inputs.
    return mesh_lib.spec(
      rules, [None if n == "embed" or size == 1 else n for n, size in names]
    )

  return jax.tree.map(spec, kernel)


def _on_device(
  experts: configs.Experts,
  kernels: Mapping[str, Any],
  h: Float[Array, "*B D"],
  activation: Callable[[jax.Array], jax.Array],
  product_name: str,
  first: Any,
) -> Float[Array, "*B D"]:
  """Return the part of the result that comes from the kernels given.

  Args:
    first: number of the first expert whose kernels these are, if they are not
      all.
  """
  width, k = h.shape[-1], experts.num_per_token
  tokens = h.reshape(math.prod(h.shape[:-1]), width)
  chosen, weights = routed(experts, tokens, kernels["router"])
  num_here = jax.tree.leaves(kernels["expert_down"])[0].shape[0]
  of_rows = chosen.reshape(-1)
  if first is not None:
    of_rows = of_rows - first
    is_here = (of_rows >= 0) & (of_rows < num_here)
    of_rows = jnp.where(is_here, of_rows, num_here)  # sorted to the end
  order = jnp.argsort(of_rows)
  inverse = jnp.argsort(order)
  groups = jnp.minimum(of_rows[order], num_here - 1)
  sizes = jnp.sum(
    of_rows[:, None] == jnp.arange(num_here)[None], axis=0, dtype=jnp.int32
  )

  def product(x: jax.Array, name: str) -> jax.Array:
    found = quantization.project_groups(x, kernels[name], sizes, groups)
    return ad_checkpoint.checkpoint_name(found, product_name)

  def kept(x: jax.Array) -> jax.Array:
    """Set rows of other devices' experts to 0, and so their gradients."""
    if first is None:
      return x
    return jnp.where(is_here.reshape(-1, 1), x, jnp.zeros_like(x))

  rows = _permuted(kept(jnp.repeat(tokens, k, axis=0)), order, inverse)
  gated = activation(product(rows, "expert_gate")) * product(rows, "expert_up")
  out = kept(_permuted(product(gated, "expert_down"), inverse, order))
  out = out.reshape(-1, k, width).astype(jnp.float32)
  return (out * weights[..., None]).sum(1).astype(h.dtype).reshape(h.shape)
