"""Everything that a replica in another process needs to begin.

It is plain data: settings, shapes, a tokenizer, and the directory through which
the weights come. A replica reads no config file and no model directory, so that
its host needs neither.
"""

import dataclasses
import pathlib
from typing import Any

import jax

from jaxrl_async.cluster import hosts
from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.planning import aot
from jaxrl_async.rollout import remote
from jaxrl_async.storage import disk
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.weights import weight_transfer

# Besides the time in which the base of a model is written.
_PATIENCE_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsSpec:
  """A channel of weights; see `weight_transfer.OrbaxChannel`.

  Attributes:
    directory: of the channel, which the replica's host sees too.
    incarnation: of the channel.
    shapes: shapes and dtypes of the published arrays.
    coalesce: False at max_staleness 0, where no version may be skipped.
  """

  directory: pathlib.Path
  incarnation: str
  shapes: Any
  coalesce: bool = True

  def channel(
    self,
    shardings: Any,
    kind: type[weight_transfer.OrbaxChannel] = weight_transfer.OrbaxChannel,
  ) -> weight_transfer.OrbaxChannel:
    """Return the side of the channel that adopts into these shardings."""
    return kind(
      self.directory,
      self.incarnation,
      aot.placed(self.shapes, shardings),
      coalesce=self.coalesce,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
  """The arguments of an engine, and the shape of its mesh."""

  model: configs.ModelConfig
  sizes: decode_state_lib.EngineSizes
  mesh: MeshShape
  rules: sections.ShardingRules
  seed: int
  end_tokens: tuple[int, ...]
  dtype: str
  weights: sections.WeightFormat
  attention: str

  def make(self) -> engine_lib.Engine:
    """Build the engine on the first devices of this replica.

    Raises:
      ReplicaFailed: there are too few devices, or too many for all processes of
        the replica to have a part in it.
    """
    devices = jax.devices()
    needed = self.mesh.num_devices
    has_enough = len(devices) >= needed
    if not has_enough or (jax.process_count() > 1 and len(devices) > needed):
      raise remote.ReplicaFailed(
        f"mesh.rollout_*: a replica needs {needed} devices, and its"
        f" {jax.process_count()} processes have {len(devices)}"
        f" ({devices[0].device_kind})"
      )
    return engine_lib.Engine(
      self.model,
      self.sizes,
      mesh=mesh_lib.make_mesh(devices[:needed], self.mesh),
      rules=self.rules,
      seed=self.seed,
      end_tokens=self.end_tokens,
      dtype=self.dtype,
      weights=self.weights,
      attention=self.attention,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
  """All that a replica is attached with.

  Attributes:
    engine: its engine. A replica that is attached again with an equal one keeps
      it, with all compiled programs.
    weights: the channel that brings each version.
    base: the channel that brings the base of a model with LoRA, once.
    probe: a file in the directory of the weights, and what it contains.
    versions: those of the coordinator's process, by package.
    report_every_s: seconds between two reports of what is half-written.
    heartbeat_s: a replica with nothing to say tells so after so many seconds.
    coordinator_timeout_s: it ends after so many seconds without a call.
  """

  engine: EngineSpec
  kv_on_adopt: sections.KvOnAdopt
  tokenizer: tokenizer_lib.Tokenizer
  weights: WeightsSpec
  base: WeightsSpec | None
  probe: hosts.Probe
  versions: dict[str, str]
  report_every_s: float
  heartbeat_s: float
  coordinator_timeout_s: float


def engine_and_channel(
  spec: ReplicaSpec,
  before: ReplicaSpec | None,
  engine: engine_lib.Engine | None,
  kind: type[weight_transfer.OrbaxChannel] = weight_transfer.OrbaxChannel,
) -> tuple[engine_lib.Engine, weight_transfer.OrbaxChannel]:
  """Return what a replica is made of, with the base of its model.

  Args:
    spec: of the replica.
    before: what the process was attached with before, if it was.
    engine: that it has from then. It is kept, with all compiled programs, if it
      would be the same again.
    kind: of the channel of the versions.

  Raises:
    ReplicaFailed: the engine does not fit the devices, or the base did not
      arrive.
  """
  is_kept = (
    engine is not None
    and before is not None
    and (before.engine, before.base) == (spec.engine, spec.base)
  )
  if engine is None or not is_kept:
    engine = spec.engine.make()
  shardings = engine.params_sharding.weights
  if spec.base is None:
    return engine, spec.weights.channel(shardings, kind)
  if not is_kept:
    base = spec.base.channel(lora_lib.base(shardings))
    timeout_s = _PATIENCE_S + disk.most_s(base.num_bytes)
    adopted = base.adopt_first(timeout_s)
    if adopted is None:
      raise remote.ReplicaFailed(
        f"the base of the model did not arrive in {timeout_s:.0f} s"
      )
    engine.hold_base(adopted[0])
  return engine, spec.weights.channel(lora_lib.adapters(shardings), kind)
