"""LoRA: low-rank adapters beside the kernels of a decoder (arXiv:2106.09685).

    y = x W + (alpha / r) (x A) B      A: [inputs, r],  B: [r, outputs]

W is a kernel of a layer and stays as it is. A and B are the adapter. They are
leaves of the same tree of parameters, beside their kernel: `query` has
`query_lora_a` and `query_lora_b`. B begins at zero, so that a new adapter
changes nothing.

A tree with adapters is the union of two trees without a common leaf, the base
and the adapters. `base` and `adapters` take it apart, and `joined` puts it
together. All three work for stacked layers and for a list of layers.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import quantization

_A, _B = "_lora_a", "_lora_b"

Axes = tuple[str | None, ...]


def names(module: str) -> tuple[str, str]:
  """Return the names of the leaves A and B of a kernel's adapter."""
  return module + _A, module + _B


def is_adapter(path: Sequence[str]) -> bool:
  """Return whether the leaf with this path belongs to an adapter."""
  return path[-1].endswith((_A, _B))


def of_section(section: sections.LoraSection) -> configs.Lora | None:
  """Return the adapters that a config asks for, None if it has none."""
  if not section.rank:
    return None
  return configs.Lora(
    rank=section.rank,
    alpha=float(section.alpha),
    modules=tuple(m for m in sections.LORA_MODULES if m in section.modules),
  )


def num_params(model: configs.ModelConfig) -> int:
  """Return the number of parameters of a model's adapters."""
  lora = model.lora
  if lora is None:
    return 0
  return sum(
    len(model.layers_with(module)) * math.prod(shape)
    for module in lora.modules
    for shape in shapes(lora, module, model.kernel_shapes[module], lora.rank)
  )


# -- in the forward pass ------------------------------------------------------


def shapes(
  lora: configs.Lora, module: str, kernel: Sequence[Any], rank: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Return what describes the axes of A and of B, from that of the kernel.

  Args:
    lora: of the model.
    module: name of the kernel.
    kernel: a size or a name for each axis of the kernel in one layer.
    rank: the size or the name of the axis that the two have in common.
  """
  num_inputs = quantization.NUM_CONTRACTED[module]
  a = (*kernel[:num_inputs], rank)
  b = (rank, *kernel[num_inputs:])
  if not lora.num_adapters:
    return a, b
  stack = lora.num_adapters if rank is not None else None
  return (stack, *a), (stack, *b)


def initial(
  key: jax.Array, a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
  """Return a new adapter: A is drawn as in PEFT, and B is zero.

  The elements of A are uniform in ±1 / sqrt(number of inputs), which PyTorch
  calls kaiming_uniform with a = sqrt(5).
  """
  bound = math.prod(a[:-1]) ** -0.5
  drawn = jax.random.uniform(key, a, jnp.float32, -bound, bound)
  return drawn, jnp.zeros(b, jnp.float32)


def added(
  lora: configs.Lora,
  equation: str,
  x: Float[Array, "..."],
  a: Float[Array, "..."],
  b: Float[Array, "..."],
  rows: Int[Array, "R"] | None,
) -> Float[Array, "..."]:
  """Return (alpha / r) (x A) B, which is added to the kernel's product.

  Args:
    lora: of the model.
    equation: of the kernel's product, such as "...d,dnh->...nh".
    x: the kernel's input.
    a: the matrix A, with a first axis of adapters if `lora.num_adapters`.
    b: the matrix B, likewise.
    rows: the adapter of each row of x, if `lora.num_adapters`.
  """
  inputs, _, outputs = equation.partition("->...")
  into = inputs.partition(",")[0].removeprefix("...")
  if not lora.num_adapters:
    low = quantization.project(f"...{into},{into}r->...r", x, a)
    high = quantization.project(f"...r,r{outputs}->...{outputs}", low, b)
  else:
    assert rows is not None
    a, b = a[rows].astype(x.dtype), b[rows].astype(x.dtype)
    low = jnp.einsum(f"z...{into},z{into}r->z...r", x, a)
    high = jnp.einsum(f"z...r,zr{outputs}->z...{outputs}", low, b)
  return high * lora.scale


# -- trees with and without adapters ------------------------------------------


def _each_layer(fn: Callable[..., dict], *layers: Any) -> Any:
  """Apply a function to the stacked layers, or to each layer of a list."""
  if isinstance(layers[0], Mapping):
    return fn(*layers)
  return [fn(*own) for own in zip(*layers, strict=True)]


def adapters(tree: Any) -> dict[str, Any]:
  """Return only the adapters of a tree."""

  def kept(layer: Mapping[str, Any]) -> dict:
    return {name: x for name, x in layer.items() if is_adapter((name,))}

  return {"layers": _each_layer(kept, tree["layers"])}


def base(tree: Any) -> dict[str, Any]:
  """Return a tree without its adapters."""

  def kept(layer: Mapping[str, Any]) -> dict:
    return {name: x for name, x in layer.items() if not is_adapter((name,))}

  return {**tree, "layers": _each_layer(kept, tree["layers"])}


def joined(base: Any, adapters: Any) -> dict[str, Any]:
  """Return the tree that has this base and these adapters."""
  layers = _each_layer(
    lambda own, added: {**own, **added}, base["layers"], adapters["layers"]
  )
  return {**base, "layers": layers}


def merged(params: Any, lora: configs.Lora) -> dict[str, Any]:
  """Return a base into which the adapters are merged: W + (alpha / r) A B.

  The result is a tree without adapters, for a model without LoRA. Merged
  kernels are float32, and are computed on the host, one layer after the other.

  Args:
    params: base and adapters, with stacked layers; jax or numpy arrays. A
      quantised base becomes float32.
    lora: the adapters.
  """
  found = quantization.dequantize(base(params))
  layers = dict(found["layers"])
  for module in lora.modules:
    a, b = (np.asarray(params["layers"][name]) for name in names(module))
    kernel = np.asarray(layers[module])
    whole = np.empty(kernel.shape, np.float32)
    for layer in range(len(kernel)):
      low, high = a[layer].astype(np.float32), b[layer].astype(np.float32)
      rank = low.shape[-1]
      product = low.reshape(-1, rank) @ high.reshape(rank, -1)
      change = np.float32(lora.scale) * product.reshape(kernel.shape[1:])
      whole[layer] = kernel[layer].astype(np.float32) + change
    layers[module] = whole
  return {**found, "layers": layers}


def stacked(
  model: configs.ModelConfig,
  named: Sequence[tuple[configs.Lora, Any] | None],
) -> tuple[configs.Lora, dict[str, Any]]:
  """Return several adapters as one tree, for programs whose rows choose.

  Smaller ranks are filled up with zeros, which add nothing. So are modules that
  an adapter does not have. B is multiplied by the adapter's scale.

  Args:
    model: the architecture.
    named: adapters with stacked layers, in the order of their numbers. None is
      the base alone.

  Returns:
    What describes the stack, and the stack as numpy arrays. Its leaves are
    [L, K, ...] for K adapters.
  """
  used = [lora for entry in named if entry for lora in entry[:1]]
  lora = configs.Lora(
    rank=max((x.rank for x in used), default=1),
    alpha=float(max((x.rank for x in used), default=1)),
    modules=tuple(
      m for m in sections.LORA_MODULES if any(m in x.modules for x in used)
    ),
    num_adapters=len(named),
  )
  layers: dict[str, np.ndarray] = {}
  for module in lora.modules:
    a, b = shapes(lora, module, model.kernel_shapes[module], lora.rank)
    name_a, name_b = names(module)
    num_layers = len(model.layers_with(module))
    layers[name_a] = np.zeros((num_layers, *a), np.float32)
    layers[name_b] = np.zeros((num_layers, *b), np.float32)
    for number, entry in enumerate(named):
      if entry is None or module not in entry[0].modules:
        continue
      own, params = entry
      low = np.asarray(params["layers"][name_a], np.float32)
      high = np.asarray(params["layers"][name_b], np.float32)
      layers[name_a][:, number, ..., : own.rank] = low
      layers[name_b][:, number, : own.rank] = high * np.float32(own.scale)
  return lora, {"layers": layers}
