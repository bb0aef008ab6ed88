"""What each `model.remat` keeps between the forward and the backward pass."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.models.attention import reference

# Names of activations, beside `reference.MIXED`, that a policy below may keep.
LAYER_INPUT, PRODUCT = "layer_input", "product"
# The forward passes of attention kernels, most of which name nothing: cuDNN's,
# Tokamax's, Triton's and splash's.
_KERNELS = (
  "dot_product_attention_fwd_wrapper",
  "remat_opt",
  "custom_vjp_call",
  "pallas_call",
)


def _keeping(*names: str) -> Callable[..., Any]:
  """Return a policy that keeps what has these names, and what kernels made."""
  return jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(*names),
    lambda primitive, *_, **__: primitive.name in _KERNELS,
  )


POLICIES = {  # policies of `jax.checkpoint`
  sections.Remat.FULL: jax.checkpoint_policies.nothing_saveable,
  sections.Remat.ATTENTION: _keeping(reference.MIXED),
  sections.Remat.DOTS: _keeping(reference.MIXED, PRODUCT),
  sections.Remat.OFFLOAD: (
    jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=[LAYER_INPUT],
      offload_src="device",
      offload_dst="pinned_host",
    )
  ),
}
