"""Which attention can be asked for by name, known without importing JAX.

The implementations are in `packed_attention`, `attention` and
`rollout.paged_attention`; a test compares their names with these.
"""

from jaxrl_async.config import sections

AUTO = "auto"
PACKED = ("xla", "blocks", "splash", "pallas_gpu", "cudnn")
PREFILL = ("xla", "cudnn", "splash")
DECODE = ("xla", "gpu_paged", "tpu_paged")


def check_packed(wanted: str) -> None:
  """Raises a ConfigError unless packed rows have attention of that name."""
  sections.require_one_of("train.attention", wanted, (AUTO, *PACKED))


def check_rollout(wanted: str, *, has_pages: bool) -> None:
  """Raises a ConfigError unless the engine has attention of that name."""
  known = dict.fromkeys((AUTO, *PREFILL, *DECODE))
  sections.require_one_of("rollout.attention", wanted, tuple(known))
  sections.require(
    has_pages or wanted == "xla" or wanted not in DECODE,
    "rollout.attention",
    f"{wanted} reads pages, and rollout.num_pages is 0",
  )
