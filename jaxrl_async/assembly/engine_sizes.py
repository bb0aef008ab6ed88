"""Sizes of an engine that generates for clients, or for an evaluation."""

import math

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
  rollout.num_pages = rollout.prefill_chunk = rollout.kept_tokens = 0
  rollout.prefill_buckets = rollout.window_buckets = buckets
  rollout.decode_steps_per_call = min(
    rollout.decode_steps_per_call, cache_tokens
  )


def set_kept_tokens(rollout: sections.RolloutSection, kept_tokens: int) -> None:
  """Keep the cache between turns, in pages beside those that slots need.

  Raises:
    ConfigError: the buckets cannot be divided into pages or chunks.
  """
  rollout.kept_tokens = kept_tokens
  if not rollout.num_pages:
    num_tokens = rollout.num_slots * rollout.cache_tokens + kept_tokens
    rollout.num_pages = -(-num_tokens // rollout.page_tokens)
  rollout.prefill_chunk = rollout.prefill_chunk or rollout.prefill_buckets[0]
  rollout.preemption = sections.Preemption.FAST
  page, chunk = rollout.page_tokens, rollout.prefill_chunk
  sections.require(
    all(x % page == 0 and x % chunk == 0 for x in rollout.prefill_buckets)
    and all(x % page == 0 for x in rollout.window_buckets),
    "kept_tokens",
    f"needs a cache in multiples of {math.lcm(page, chunk)} tokens, and the"
    f" buckets are {sections.shown(rollout.prefill_buckets)}; use another"
    " cache_tokens",
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
