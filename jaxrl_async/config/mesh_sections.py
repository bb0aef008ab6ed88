"""The settings of the meshes; `sections` has all others."""

import dataclasses

MESH_AXES = ("data", "fsdp", "context", "tensor")


@dataclasses.dataclass(kw_only=True, slots=True)
class ShardingRules:
  """Mesh axes that split each logical axis of an array; () leaves it whole.

  Attributes:
    batch: rows of a batch, slots of a cache.
    tokens: tokens of a row.
    layers: stacked layers of the trainer's parameters.
  """

  batch: tuple[str, ...] = ("data", "fsdp")
  tokens: tuple[str, ...] = ("context",)
  layers: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ("tensor",)
  embed: tuple[str, ...] = ("fsdp", "context")
  heads: tuple[str, ...] = ("tensor",)
  kv_heads: tuple[str, ...] = ("tensor",)
  head: tuple[str, ...] = ()
  mlp: tuple[str, ...] = ("tensor",)


def _rollout_rules() -> ShardingRules:
  # Decoding reads every weight for every token, so gathering weights over fsdp
  # would dominate its time.
  return ShardingRules(batch=("data",), embed=(), tokens=())


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshSection:
  """Number of devices along each axis of both slices; -1 means the rest.

  If there is only one device, both slices share it.

  Attributes:
    train_context: splits the tokens of a row, for rows too long for one device.
      Like train_fsdp it also splits the weights.
    train_rules: mesh axes that split each logical axis; on the command line
      for example --config.mesh.train_rules.kv_heads="()".
  """

  train_data: int = 1
  train_fsdp: int = 1
  train_context: int = 1
  train_tensor: int = 1
  rollout_data: int = 1
  rollout_tensor: int = 1
  train_rules: ShardingRules = dataclasses.field(default_factory=ShardingRules)
  rollout_rules: ShardingRules = dataclasses.field(
    default_factory=_rollout_rules
  )
