"""The settings of the rollout slice."""

import dataclasses
import enum

from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config.setting import setting


class KvOnAdopt(enum.Enum):
  """What happens to running sequences when new weights arrive.

  RECOMPUTE and KEEP interrupt them: the new weights write the rest. RECOMPUTE
  rebuilds their caches under these weights, and KEEP does not. WAIT adopts the
  weights when all sequences have ended, and admits no others meanwhile.
  """

  RECOMPUTE = "recompute"
  KEEP = "keep"
  WAIT = "wait"


class Preemption(enum.Enum):
  """How a sequence is resumed after its cache pages were taken away.

  FAST prefills the whole sequence. EXACT prefills only what was prefilled
  before and feeds the remaining tokens through the decode program, which
  reproduces the same bits.
  """

  FAST = "fast"
  EXACT = "exact"


class WeightFormat(enum.Enum):
  """The format in which the engine holds its large matrices."""

  FLOAT = "float"
  INT8 = "int8"
  FP8 = "fp8"


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutSection:
  """The rollout slice."""

  num_slots: int = setting(
    32, low=1, free="half-written trajectories wait for a slot"
  )
  """Number of sequences that are decoded side by side."""
  max_prompt_tokens: int = setting(
    64, low=1, fixed="it decides which questions there are", of_answers=True
  )
  """Longer prompts are skipped and counted, never cut."""
  max_completion_tokens: int = setting(
    64,
    low=1,
    free="a half-written trajectory that is as long already ends as it is;"
    " evaluations follow the new limit",
    of_answers=True,
  )
  """Most tokens that the policy writes per trajectory."""
  cache_tokens: int = setting(
    128,
    low=1,
    free="caches are rebuilt; those of half-written trajectories have to fit,"
    " which is checked",
  )
  """Cached tokens per slot, at least prompt plus completion."""
  decode_steps_per_call: int = setting(16, low=1)
  """Tokens that each sequence gains per decode call, after which the host looks
  at the results."""
  prefill_rows: int = setting(8, low=1)
  """Sequences per prefill call. If it is a multiple of mesh.rollout_data, the
  rows are split over these replicas; otherwise every replica computes all of
  them."""
  prefill_buckets: tuple[int, ...] = setting(
    (64, 128), most=setting_lib.MAX_BUCKETS
  )
  """Padded lengths of prefill calls, up to cache_tokens."""
  window_buckets: tuple[int, ...] = setting(
    (64, 128), most=setting_lib.MAX_BUCKETS
  )
  """Attended lengths of decode calls, up to cache_tokens."""
  prefill_chunk: int = setting(0, low=0)
  """Prompts of longer buckets are prefilled this many tokens at a time, with
  decode calls in between; 0 disables chunks. With kept_tokens several such
  parts follow each other, so that a prompt waits for 16 calls at most."""
  num_pages: int = setting(0, low=0, free="caches are rebuilt")
  """The cache is a pool of this many pages, which may be fewer than all slots
  need at once; 0 gives each slot memory of its own."""
  page_tokens: int = setting(16, low=1, free="caches are rebuilt")
  """Tokens per page."""
  kept_tokens: int = setting(0, low=0, free="caches are rebuilt")
  """Pages of up to this many tokens are kept after their sequence has ended,
  for the next turn of its conversation and for prompts that begin alike; they
  are taken back when pages are needed. 0 keeps none."""
  preemption: Preemption = setting(Preemption.FAST)
  """How a sequence is resumed after its pages were taken away."""
  kv_on_adopt: KvOnAdopt = setting(KvOnAdopt.RECOMPUTE)
  """What happens to running sequences when new weights arrive."""
  temperature: float = setting(
    1.0,
    low=setting_lib.MIN_TEMPERATURE,
    high=setting_lib.MAX_TEMPERATURE,
    fixed="stored logprobs are of tokens drawn at it",
  )
  """Sampling temperature; the trainer divides its logits by the same value."""
  stop: tuple[str, ...] = setting(
    (),
    most=setting_lib.MAX_STOPS,
    fixed="half-written trajectories were read with it",
    of_answers=True,
  )
  """Texts each of which ends a completion and belongs to it."""
  stop_token_ids: tuple[int, ...] = setting(
    (),
    most=setting_lib.MAX_STOP_TOKENS,
    fixed="half-written trajectories were read with it",
    of_answers=True,
  )
  """Tokens each of which ends one, besides the end tokens."""
  dtype: str = setting("float32", choices=setting_lib.DTYPES, of_answers=True)
  """Dtype of the rollout weights and, except on a CPU, of the cache."""
  weights: WeightFormat = setting(WeightFormat.FLOAT, of_answers=True)
  """int8 or fp8 quantises the published matrices, with one scale per output
  channel; mismatch_kl measures the cost."""
  max_group_seconds: float = setting(
    0.0, low=0, high=setting_lib.MAX_TIMEOUT_S, free=setting_lib.SUPERVISION
  )
  """A group that is not generated after so long is ended and counted as
  failed, for the time in which the process runs; 0 waits for every group.
  What is waited for is in the metrics rollout/oldest_group and
  rollout/oldest_group_s."""
  attention: str = setting("auto")
  """Kernel: "auto" takes the platform's first kernel that works and agrees with
  plain XLA; "xla" takes no kernel; the name of a kernel (cudnn or splash for
  prefill, gpu_paged or tpu_paged for decoding over pages) insists on it."""
