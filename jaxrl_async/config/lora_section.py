"""The settings of LoRA: low-rank adapters beside a frozen model."""

import dataclasses

# The kernels of a layer that an adapter may be put beside.
MODULES = ("query", "key", "value", "output", "gate", "up", "down")
BASE_DTYPES = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(kw_only=True, slots=True)
class LoraSection:
  """Low-rank adapters (arXiv:2106.09685); rank = 0 trains the whole model.

  Attributes:
    rank: the rank of every adapter; 0 switches adapters off.
    alpha: what an adapter adds is multiplied by alpha / rank.
    modules: the kernels of each layer that get an adapter.
    base_dtype: how the trainer holds the frozen model. int8 quantises the
      matrices of the layers; the rest is then bfloat16.
    adapter: directory of an adapter to start from, in PEFT's format. "" starts
      from a new one, which changes nothing before its first update.
  """

  rank: int = 0
  alpha: float = 16.0
  modules: tuple[str, ...] = MODULES
  base_dtype: str = "bfloat16"
  adapter: str = ""
