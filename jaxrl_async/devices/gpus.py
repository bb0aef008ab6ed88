"""GPUs that this machine does not have, by name.

A kind of which XLA's own description is at hand is compiled for, as TPUs are
(`KINDS`). The description is the `target_config` of
`jax.experimental.topologies.get_topology_desc`, and the plugin of `jax[cuda13]`
compiles. For any other GPU only its memory counts: devices of the CPU stand in
for it.
"""

import dataclasses
import pathlib
import re

from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips

_NAME = re.compile(r"(?:(\d{1,3})x)?(?:gpu:(\d{1,4})GB|(h\d+))")
# The rates are NVIDIA's (H200 data sheet), without sparsity, and of NVLink in
# one direction. Programs may use the share of the memory that JAX takes.
KINDS = {
  "h200": tpu_chips.Chip(
    kind="NVIDIA H200",
    hbm_bytes=0.75 * 150_109_880_320,
    flops_per_s=989e12,
    hbm_bytes_per_s=4_800e9,
    ici_bytes_per_s=450e9,
    slices=(),
  )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpus:
  """Some GPUs of one kind.

  Attributes:
    count: the number of GPUs.
    memory_bytes: memory of each that programs may use. GPUs are sold by GiB and
      called GB. The difference, 7 %, is left to the driver.
    kind: in `KINDS`, or "".
  """

  count: int
  memory_bytes: int
  kind: str = ""


def is_named(name: str) -> bool:
  """Return whether a topology is one of GPUs."""
  return "gpu" in name or name.partition("x")[2] in KINDS or name in KINDS


def parse(name: str) -> Gpus:
  """Return the GPUs that a name means; "8xgpu:80GB" is eight of 80 GB.

  Raises:
    ConfigError: the name does not have this form.
  """
  found = _NAME.fullmatch(name)
  sections.require(
    found is not None
    and int(found[1] or 1) > 0
    and (found[3] in KINDS or int(found[2] or 0) > 0),
    "topology",
    f"{sections.shown(name)} does not exist; gpu:24GB is one GPU of 24 GB,"
    f" 8xgpu:80GB are eight of 80 GB, and 8x{next(iter(KINDS))} are eight for"
    " which programs are compiled",
  )
  assert found is not None
  count = int(found[1] or 1)
  if kind := found[3]:
    memory_bytes = int(KINDS[kind].hbm_bytes)
    return Gpus(count=count, memory_bytes=memory_bytes, kind=kind)
  return Gpus(count=count, memory_bytes=int(found[2]) * 10**9)


def description(kind: str) -> str:
  """Return the text with which XLA describes a kind, as such a GPU gave it."""
  return pathlib.Path(__file__).with_name(f"{kind}.pbtxt").read_text()
