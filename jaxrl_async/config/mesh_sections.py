"""The settings of the meshes; `sections` has all others."""

import dataclasses

from jaxrl_async.config import setting as setting_lib

MESH_AXES = ("data", "fsdp", "context", "tensor")


@dataclasses.dataclass(kw_only=True, slots=True)
class ShardingRules:
  """Mesh axes that split each logical axis of an array; () leaves it whole."""

  batch: tuple[str, ...] = setting_lib.setting(
    ("data", "fsdp"),
    "rows of a batch, slots of a cache",
  )
  tokens: tuple[str, ...] = setting_lib.setting(
    ("context",),
    "tokens of a row",
  )
  layers: tuple[str, ...] = setting_lib.setting(
    (),
    "stacked layers of the trainer's parameters",
  )
  vocab: tuple[str, ...] = setting_lib.setting(
    ("tensor",),
    "entries of the vocabulary",
  )
  embed: tuple[str, ...] = setting_lib.setting(
    ("fsdp", "context"),
    "the residual stream",
  )
  heads: tuple[str, ...] = setting_lib.setting(
    ("tensor",),
    "query heads",
  )
  kv_heads: tuple[str, ...] = setting_lib.setting(
    ("tensor",),
    "heads of keys and values",
  )
  head: tuple[str, ...] = setting_lib.setting(
    (),
    "the numbers of a head",
  )
  mlp: tuple[str, ...] = setting_lib.setting(
    ("tensor",),
    "the hidden layer of an MLP",
  )


def _rollout_rules() -> ShardingRules:
  # Decoding reads every weight for every token, so gathering weights over fsdp
  # would dominate its time.
  return ShardingRules(batch=("data",), embed=(), tokens=())


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshSection:
  """Number of devices along each axis of both slices; -1 means the rest.

  If there is only one device, both slices share it.
  """

  train_data: int = setting_lib.setting(
    1,
    "splits the rows of a batch",
  )
  train_fsdp: int = setting_lib.setting(
    1,
    "splits the rows of a batch, and the weights",
  )
  train_context: int = setting_lib.setting(
    1,
    "splits the tokens of a row, for rows too long for one device. Like"
    " train_fsdp it also splits the weights.",
  )
  train_tensor: int = setting_lib.setting(
    1,
    "splits heads, MLPs and the vocabulary",
  )
  rollout_data: int = setting_lib.setting(
    1,
    "splits the slots; each part has all weights",
  )
  rollout_tensor: int = setting_lib.setting(
    1,
    "splits heads, MLPs and the vocabulary",
  )
  train_rules: ShardingRules = setting_lib.section(
    ShardingRules,
  )
  rollout_rules: ShardingRules = setting_lib.section(
    _rollout_rules,
  )
