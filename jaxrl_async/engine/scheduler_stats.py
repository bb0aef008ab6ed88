"""What a scheduler has counted."""

import dataclasses


@dataclasses.dataclass(kw_only=True, slots=True)
class SchedulerStats:
  """Counts since the start.

  `prefill_tokens` were computed by prefill, and `cached_tokens` did not have to
  be, because pages held them that were kept from other sequences or turns.
  `generated_tokens` are those of all sequences but the answers of evaluations,
  which are counted apart. `guided_tokens` are those of them that guides wrote
  for training, and of these `steered_tokens` are not learned from.
  `decode_steps` are those of calls that were read. The
  last two give the occupancy over the calls in which a sequence waited for a
  slot: the tokens drawn in them, and their slots times their steps.
  """

  generated_tokens: int = 0
  evaluation_tokens: int = 0
  guided_tokens: int = 0
  steered_tokens: int = 0
  prefill_tokens: int = 0
  cached_tokens: int = 0
  recompute_tokens: int = 0
  adoptions: int = 0
  interruptions: int = 0
  preemptions: int = 0
  decode_steps: int = 0
  busy_slot_steps: int = 0
  waiting_slot_steps: int = 0
