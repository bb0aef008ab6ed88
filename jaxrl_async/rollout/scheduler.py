"""Which sequence sits in which slot: continuous batching over one engine.

`submit` queues sequences; each `step` refills free slots, runs one `generate`
call and returns the sequences that ended in it. Sequences are host memory, so
everything written so far survives whatever happens on device: to continue
after an interruption, a preemption or a crash is to prefill what is there.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
import dataclasses
from typing import Any

import numpy as np

from jaxrl_async import config
from jaxrl_async import metrics
from jaxrl_async import types
from jaxrl_async.rollout import engine as engine_lib
from jaxrl_async.rollout import sampling

# Told the tokens of each call in order; says how many of them belong to the
# completion (at least 1) once a stop string is there, else None.
StopCheck = Callable[[np.ndarray], int | None]


class Sequence:
  """A trajectory being written: growing arrays of one fixed capacity.

  Attributes:
    stream, group, member: what its randomness is a function of.
    limit: it ends when it has that many tokens.
    settings: how its tokens are drawn.
    stop: looks for stop strings in what is written.
    owner: whatever the caller wants back with it.
  """

  def __init__(
    self,
    prompt_tokens: np.ndarray,
    *,
    limit: int,
    stream: sampling.Stream,
    group: int,
    member: int,
    settings: sampling.SamplingSettings,
    stop: StopCheck | None = None,
    owner: object = None,
  ):
    self.stream, self.group, self.member = stream, group, member
    self.settings = settings
    self.stop = stop
    self.limit = limit
    self.owner = owner
    self.length = 0
    self.tokens = np.zeros((limit,), np.int32)
    self.loss_mask = np.zeros((limit,), bool)
    self.behavior_logprobs = np.zeros((limit,), np.float32)
    self.policy_versions = np.full((limit,), -1, np.int32)
    self.finish_reason: types.FinishReason | None = None
    self.extend_prompt(prompt_tokens)

  def extend_prompt(self, tokens: np.ndarray) -> None:
    """Appends tokens the policy did not write."""
    end = self.length + len(tokens)
    self.tokens[self.length : end] = tokens
    self.length = end

  def append(self, tokens, logprobs, versions) -> None:
    """Appends tokens the policy wrote."""
    end = self.length + len(tokens)
    self.tokens[self.length : end] = tokens
    self.loss_mask[self.length : end] = True
    self.behavior_logprobs[self.length : end] = logprobs
    self.policy_versions[self.length : end] = versions
    self.length = end

  def trajectory(self) -> types.Trajectory:
    """A copy of what is there."""
    n = self.length
    return types.Trajectory(
      member=self.member,
      tokens=self.tokens[:n].copy(),
      loss_mask=self.loss_mask[:n].copy(),
      behavior_logprobs=self.behavior_logprobs[:n].copy(),
      policy_versions=self.policy_versions[:n].copy(),
      finish_reason=self.finish_reason,
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class SchedulerStats:
  """Counts since the start; occupancy is over calls made while work waited."""

  generated_tokens: int = 0
  prefill_tokens: int = 0
  recompute_tokens: int = 0
  interruptions: int = 0
  busy_slot_steps: int = 0
  waiting_slot_steps: int = 0


class Scheduler:
  """Keeps an engine's slots full.

  Threads: one thread at a time; nothing here is locked.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    *,
    kv_on_adopt: config.KvOnAdopt = config.KvOnAdopt.RECOMPUTE,
    busy: metrics.BusyClock,
  ):
    self.engine = engine
    self.kv_on_adopt = kv_on_adopt
    self.stats = SchedulerStats()
    self._busy = busy
    self._params: engine_lib.EngineParams | None = None
    self._version = -1
    self._state = engine.init_decode_state()
    self._slots: list[Sequence | None] = [None] * engine.sizes.num_slots
    self._waiting: collections.deque[Sequence] = collections.deque()
    # Prompt's bytes -> prefilled under the weights in use, and in which row.
    self._prefixes: dict[bytes, tuple[engine_lib.Prefix, int]] = {}

  @property
  def version(self) -> int:
    """Policy version of the weights in use; -1 before the first."""
    return self._version

  @property
  def num_free(self) -> int:
    """Slots that nothing sits in or waits for; negative: work is waiting."""
    return self._slots.count(None) - len(self._waiting)

  @property
  def is_idle(self) -> bool:
    """Nothing runs and nothing waits."""
    return not self._waiting and all(s is None for s in self._slots)

  def sequences(self) -> list[Sequence]:
    """Everything running or waiting."""
    return [s for s in self._slots if s is not None] + list(self._waiting)

  def submit(self, sequence: Sequence) -> None:
    """Queues a sequence.

    Raises:
      ValueError: it could not be held, or has no room for one token.
    """
    sizes = self.engine.sizes
    if sequence.limit > sizes.cache_tokens:
      raise ValueError(
        f"a sequence of up to {sequence.limit} tokens does not fit"
        f" cache_tokens {sizes.cache_tokens}"
      )
    if not 0 < sequence.length < sequence.limit:
      raise ValueError(
        f"{sequence.length} prompt tokens leave no room below {sequence.limit}"
      )
    self._waiting.append(sequence)

  def cancel(self, owner: object) -> int:
    """Forgets an owner's sequences; returns how many there were."""
    kept = [s for s in self._waiting if s.owner is not owner]
    count = len(self._waiting) - len(kept)
    self._waiting = collections.deque(kept)
    for slot, sequence in enumerate(self._slots):
      if sequence is not None and sequence.owner is owner:
        self._slots[slot] = None
        count += 1
    return count

  def adopt(self, params: engine_lib.EngineParams, version: int) -> None:
    """Changes the weights; the next call uses them.

    With kv_on_adopt RECOMPUTE the caches of running sequences are rebuilt
    under the new weights (arXiv:2505.24298, section 4.1).
    """
    self._params, self._version = params, version
    self._prefixes.clear()
    running = [(i, s) for i, s in enumerate(self._slots) if s is not None]
    self.stats.interruptions += len(running)
    if self.kv_on_adopt is config.KvOnAdopt.RECOMPUTE and running:
      self.stats.recompute_tokens += sum(s.length for _, s in running)
      self._place(running)

  def step(self) -> list[Sequence]:
    """Refills slots, generates once, returns what ended.

    Raises:
      ValueError: nothing was adopted yet.
    """
    if self._params is None:
      raise ValueError("adopt weights before the first step")
    self._refill()
    # The window must hold every position of this call.
    longest = max((s.length for s in self._slots if s is not None), default=0)
    sizes = self.engine.sizes
    reach = min(longest + sizes.decode_steps_per_call, sizes.cache_tokens)
    window = next(w for w in sizes.window_buckets if w >= reach)
    with self._busy.record("decode"):
      self._state, packed = self.engine.generate(
        self._params, self._state, window=window
      )
      result = self.engine.read(packed)
    return self._collect(result)

  def _refill(self) -> None:
    placed = []
    for slot, sequence in enumerate(self._slots):
      if sequence is None and self._waiting:
        self._slots[slot] = self._waiting.popleft()
        placed.append((slot, self._slots[slot]))
    if placed:
      self._place(placed)

  def _place(self, placed: SequenceOf[tuple[int, Sequence]]) -> None:
    """Inserts sequences into slots; equal ones share one prefill.

    What is still waiting for a slot shares it later, unless the weights change
    before: a prefix is kept until nothing that waits begins with it.
    """
    by_prompt = collections.defaultdict(list)
    for slot, sequence in placed:
      by_prompt[_written(sequence).tobytes()].append((slot, sequence))
    self._prefill(
      {
        prompt: _written(members[0][1])
        for prompt, members in by_prompt.items()
        if prompt not in self._prefixes
      }
    )
    targets = collections.defaultdict(list)
    for prompt, members in by_prompt.items():
      prefix, row = self._prefixes[prompt]
      targets[id(prefix)] += [(prefix, row, *member) for member in members]
    for members in targets.values():
      self._insert(members)
    waiting = {_written(s).tobytes() for s in self._waiting}
    self._prefixes = {
      prompt: kept
      for prompt, kept in self._prefixes.items()
      if prompt in waiting
    }

  def _prefill(self, prompts: dict[bytes, np.ndarray]) -> None:
    """Prefills prompts, those of a bucket in calls of several rows."""
    assert self._params is not None
    by_bucket = collections.defaultdict(list)
    for prompt, tokens in prompts.items():
      buckets = self.engine.sizes.prefill_buckets
      bucket = next(b for b in buckets if b >= len(tokens))
      by_bucket[bucket].append((prompt, tokens))
    rows = self.engine.sizes.prefill_rows
    for bucket, distinct in by_bucket.items():
      for start in range(0, len(distinct), rows):
        some = distinct[start : start + rows]
        padded = np.zeros((len(some), bucket), np.int32)
        lengths = np.array([len(tokens) for _, tokens in some], np.int32)
        for row, (_, tokens) in enumerate(some):
          padded[row, : len(tokens)] = tokens
        self.stats.prefill_tokens += int(lengths.sum())
        with self._busy.record("prefill"):
          prefix = self.engine.prefill(
            params=self._params, padded_tokens=padded, true_length=lengths
          )
        for row, (prompt, _) in enumerate(some):
          self._prefixes[prompt] = prefix, row

  def _insert(
    self, targets: list[tuple[engine_lib.Prefix, int, int, Sequence]]
  ) -> None:
    """Inserts rows of one prefix into slots."""
    prefixes, rows, slots, sequences = zip(*targets, strict=True)
    b = self.engine.sizes.num_slots

    def column(values, fill, dtype: Any = np.int32):
      array = np.full((b,), fill, dtype)
      array[: len(targets)] = values
      return array

    insertion = engine_lib.Insertion(
      slots=column(slots, b),
      sources=column(rows, 0),
      limits=column([s.limit for s in sequences], 0),
      streams=column([s.stream for s in sequences], 0),
      groups=column([s.group for s in sequences], 0),
      members=column([s.member for s in sequences], 0),
      temperature=column(
        [s.settings.temperature for s in sequences], 1, np.float32
      ),
    )
    with self._busy.record("prefill"):
      self._state = self.engine.insert(prefixes[0], self._state, insertion)

  def _collect(self, result: engine_lib.StepResult) -> list[Sequence]:
    counts = result.is_valid.sum(axis=1).tolist()
    ended = []
    in_use = 0
    for slot, sequence in enumerate(self._slots):
      if sequence is None:
        continue
      n = counts[slot]
      in_use += n
      sequence.append(
        result.tokens[slot, :n],
        result.logprobs[slot, :n],
        result.policy_versions[slot, :n],
      )
      if result.has_ended[slot]:
        is_eos = sequence.tokens[sequence.length - 1] in self.engine.end_tokens
        sequence.finish_reason = (
          types.FinishReason.EOS if is_eos else types.FinishReason.LENGTH
        )
        self._slots[slot] = None
        ended.append(sequence)
    self.stats.generated_tokens += in_use
    if self._waiting:
      self.stats.waiting_slot_steps += result.is_valid.size
      self.stats.busy_slot_steps += in_use
    return ended


def _written(sequence: Sequence) -> np.ndarray:
  return sequence.tokens[: sequence.length]
