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
    32,
    "number of sequences that are decoded side by side",
    low=1,
    free="half-written trajectories wait for a slot",
  )
  max_prompt_tokens: int = setting(
    64,
    "longer prompts are skipped and counted, never cut",
    low=1,
    fixed="it decides which questions there are",
    of_answers=True,
  )
  max_completion_tokens: int = setting(
    64,
    "most tokens that the policy writes per trajectory",
    low=1,
    free=(
      "a half-written trajectory that is as long already ends as it is;"
      " evaluations follow the new limit"
    ),
    of_answers=True,
  )
  cache_tokens: int = setting(
    128,
    "cached tokens per slot, at least prompt plus completion",
    low=1,
    free=(
      "caches are rebuilt; those of half-written trajectories have to fit,"
      " which is checked"
    ),
  )
  decode_steps_per_call: int = setting(
    16,
    "tokens that each sequence gains per decode call, after which the host"
    " looks at the results",
    low=1,
  )
  prefill_rows: int = setting(
    8,
    "sequences per prefill call. If it is a multiple of mesh.rollout_data,"
    " the rows are split over these replicas; otherwise every replica computes"
    " all of them.",
    low=1,
  )
  prefill_buckets: tuple[int, ...] = setting(
    (64, 128),
    "padded lengths of prefill calls, up to cache_tokens",
    most=setting_lib.MAX_BUCKETS,
  )
  window_buckets: tuple[int, ...] = setting(
    (64, 128),
    "attended lengths of decode calls, up to cache_tokens",
    most=setting_lib.MAX_BUCKETS,
  )
  prefill_chunk: int = setting(
    0,
    "prompts of longer buckets are prefilled this many tokens at a time, with"
    " decode calls in between; 0 disables chunks",
    low=0,
  )
  num_pages: int = setting(
    0,
    "the cache is a pool of this many pages, which may be fewer than all"
    " slots need at once; 0 gives each slot memory of its own",
    low=0,
    free="caches are rebuilt",
  )
  page_tokens: int = setting(
    16, "tokens per page", low=1, free="caches are rebuilt"
  )
  preemption: Preemption = setting(
    Preemption.FAST, "how a sequence is resumed after its pages were taken away"
  )
  kv_on_adopt: KvOnAdopt = setting(
    KvOnAdopt.RECOMPUTE,
    "what happens to running sequences when new weights arrive",
  )
  temperature: float = setting(
    1.0,
    "sampling temperature; the trainer divides its logits by the same value",
    low=setting_lib.MIN_TEMPERATURE,
    high=setting_lib.MAX_TEMPERATURE,
    fixed="stored logprobs are of tokens drawn at it",
  )
  stop: tuple[str, ...] = setting(
    (),
    "texts each of which ends a completion and belongs to it",
    most=setting_lib.MAX_STOPS,
    fixed="half-written trajectories were read with it",
    of_answers=True,
  )
  stop_token_ids: tuple[int, ...] = setting(
    (),
    "tokens each of which ends one, besides the end tokens",
    most=setting_lib.MAX_STOP_TOKENS,
    fixed="half-written trajectories were read with it",
    of_answers=True,
  )
  dtype: str = setting(
    "float32",
    "dtype of the rollout weights and of the cache",
    choices=setting_lib.DTYPES,
    of_answers=True,
  )
  weights: WeightFormat = setting(
    WeightFormat.FLOAT,
    "int8 or fp8 quantises the published matrices, with one scale per output"
    " channel; mismatch_kl measures the cost",
    of_answers=True,
  )
  max_group_seconds: float = setting(
    0.0,
    "a group that is not generated after so long is ended and counted as"
    " failed, for the time in which the process runs; 0 waits for every group."
    " What is waited for is in the metrics rollout/oldest_group and"
    " rollout/oldest_group_s.",
    low=0,
    high=setting_lib.MAX_TIMEOUT_S,
    free=setting_lib.SUPERVISION,
  )
  attention: str = setting(
    "auto",
    '"auto" takes the platform\'s first kernel that works and agrees with'
    ' plain XLA; "xla" takes no kernel; the name of a kernel (cudnn or'
    " splash for prefill, gpu_paged or tpu_paged for decoding over pages)"
    " insists on it",
  )
