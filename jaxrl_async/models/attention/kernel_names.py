"""Names of the attention implementations, known without importing JAX.

The implementations are in `packed_attention`, `reference` and
`paged_attention`; a test compares their names with these.
"""

from jaxrl_async.config import sections

AUTO = "auto"
PACKED = (
  "xla",
  "blocks",
  "chunks",
  "splash",
  "tokamax",
  "cudnn",
  "pallas_gpu",
)
PREFILL = ("xla", "cudnn", "splash")
DECODE = ("xla", "gpu_paged", "tpu_paged")


def check_packed(wanted: str) -> None:
  """Raise a ConfigError unless this is a name of attention over packed rows."""
  sections.require_one_of("train.attention", wanted, (AUTO, *PACKED))


def check_rollout(wanted: str, *, has_pages: bool) -> None:
  """Raise a ConfigError unless this is a name of the engine's attention."""
  known = dict.fromkeys((AUTO, *PREFILL, *DECODE))
  sections.require_one_of("rollout.attention", wanted, tuple(known))
  sections.require(
    has_pages or wanted == "xla" or wanted not in DECODE,
    "rollout.attention",
    f"{wanted} needs pages, but rollout.num_pages is 0",
  )
