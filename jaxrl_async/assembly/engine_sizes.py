"""Sizes of an engine that generates for clients, or for an evaluation."""

from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections

_SMALLEST_BUCKET = 64
_FEWEST_SLOTS = 8


def set_cache_tokens(
  rollout: sections.RolloutSection, cache_tokens: int
) -> None:
  """Change the longest sequence of an engine, and its buckets with it."""
  sizes = []
  size = min(_SMALLEST_BUCKET, cache_tokens)
  while size < cache_tokens:
    sizes.append(size)
    size *= 2
  buckets = (*sizes, cache_tokens)
  rollout.cache_tokens = cache_tokens
  rollout.num_pages = rollout.prefill_chunk = 0
  rollout.prefill_buckets = rollout.window_buckets = buckets
  rollout.decode_steps_per_call = min(
    rollout.decode_steps_per_call, cache_tokens
  )


def fit_slots(setup: setup_lib.Setup) -> None:
  """Take half of the slots until the engine fits into the devices' memory.

  Raises:
    ConfigError: not even a few slots fit.
  """
  rollout = setup.config.rollout
  while True:
    try:
      device_checks.check_rollout_memory(setup)
    except sections.ConfigError:
      if rollout.num_slots % 2 or rollout.num_slots // 2 < _FEWEST_SLOTS:
        raise
      rollout.num_slots //= 2
    else:
      return
