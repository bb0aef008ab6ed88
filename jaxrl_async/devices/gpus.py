"""Names of GPUs that this machine does not have, for estimates of memory.

Unlike for TPUs, nothing is compiled for them: devices of the CPU stand in for
them, and only their memory counts. XLA could compile for a GPU that is not
there, with the plugin of `jax[cuda13]` and a text that describes the GPU, the
`target_config` of `jax.experimental.topologies.get_topology_desc`. That is not
built in yet.
"""

import dataclasses
import re

from jaxrl_async.config import sections

_NAME = re.compile(r"(?:(\d{1,3})x)?gpu:(\d{1,4})GB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpus:
  """Some GPUs of one kind.

  Attributes:
    count: the number of GPUs.
    memory_bytes: memory of each that programs may use. GPUs are sold by GiB and
      called GB. The difference, 7 %, is left to the driver.
  """

  count: int
  memory_bytes: int


def is_named(name: str) -> bool:
  """Return whether a topology is one of GPUs."""
  return "gpu" in name


def parse(name: str) -> Gpus:
  """Return the GPUs that a name means; "8xgpu:80GB" is eight of 80 GB.

  Raises:
    ConfigError: the name does not have this form.
  """
  found = _NAME.fullmatch(name)
  sections.require(
    found is not None and int(found[1] or 1) > 0 and int(found[2]) > 0,
    "topology",
    f"{sections.shown(name)} does not exist; gpu:24GB is one GPU of 24 GB and"
    " 8xgpu:80GB are eight of 80 GB",
  )
  assert found is not None
  return Gpus(count=int(found[1] or 1), memory_bytes=int(found[2]) * 10**9)
