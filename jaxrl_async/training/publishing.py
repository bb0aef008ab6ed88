"""The trainer's programs that make the weights for engines."""

from collections.abc import Callable
import functools
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer


def published_params(
  params: transformer.Params,
  num_layers: int,
  dtype: str,
  weights: sections.WeightFormat,
  model: configs.ModelConfig | None = None,
) -> transformer.Params:
  """Return the weights for the engines, with layers unstacked and cast.

  The parameters may be those of a base or of its adapters alone. The matrices
  are quantised if `weights` says so. Call this function in a jit: its outputs
  are then new buffers, so that the trainer can donate its own. `model` is as in
  `transformer.unstack`.
  """
  unstacked = transformer.unstack(params, num_layers, model)
  return quantization.quantize(unstacked, weights, dtype)


def make_publish(
  model: configs.ModelConfig,
  layout: mesh_lib.Layout,
  *,
  dtype: str,
  weights: sections.WeightFormat,
  part: Callable[[Any], Any] = lambda tree: tree,
) -> Any:
  """Return `published_params` compiled for parameters in this layout.

  Training and serving both make an engine's weights with this program, so that
  a server uses the same weights as the engine of the run. `part` takes the
  parameters of the program out of all of them, as `lora.base` does.
  """
  axes = transformer.logical_axes(model, is_stacked=False)
  return jax.jit(
    functools.partial(
      published_params,
      num_layers=model.num_layers,
      dtype=dtype,
      weights=weights,
      model=model,
    ),
    out_shardings=mesh_lib.shardings(
      layout.mesh, layout.rules, part(quantization.logical_axes(axes, weights))
    ),
  )
