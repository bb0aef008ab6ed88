"""The settings of LoRA: low-rank adapters beside a frozen model."""

import dataclasses

from jaxrl_async.config import setting as setting_lib

# The kernels of a layer that an adapter may be put beside.
MODULES = ("query", "key", "value", "output", "gate", "up", "down")
BASE_DTYPES = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(kw_only=True, slots=True)
class LoraSection:
  """Low-rank adapters (arXiv:2106.09685); rank = 0 trains the whole model."""

  rank: int = setting_lib.setting(
    0,
    "the rank of every adapter; 0 switches adapters off",
    low=0,
    high=setting_lib.MAX_GROUP,
    fixed="the stored adapters have it",
  )
  alpha: float = setting_lib.setting(
    16.0,
    "what an adapter adds is multiplied by alpha / rank",
    low=setting_lib.MIN_FLOAT,
    fixed="the stored adapters were trained with it",
  )
  modules: tuple[str, ...] = setting_lib.setting(
    MODULES,
    "the kernels of each layer that get an adapter",
    fixed="the stored adapters are of these kernels",
  )
  base_dtype: str = setting_lib.setting(
    "bfloat16",
    "how the trainer holds the frozen model. int8 quantises the matrices of"
    " the layers; the rest is then bfloat16.",
    choices=BASE_DTYPES,
    fixed="the stored adapters were trained on that base",
  )
  adapter: str = setting_lib.setting(
    "",
    'directory of an adapter to start from, in PEFT\'s format. "" starts'
    " from a new one, which changes nothing before its first update.",
    fixed="the stored adapters came of it",
  )
