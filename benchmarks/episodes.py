"""Turns of conversations: with the cache kept, and while tools are slow.

    python benchmarks/episodes.py

First, conversations of several turns are written twice in a row with the same
random weights: once with `rollout.kept_tokens` and once without, where every
turn prefills the whole history. A turn appends the tokens that the policy
writes and then those that the environment answers with. All conversations are
submitted at once. A turn whose conversation goes on is followed by the next one
at once, because the environment takes no time here. Both ways have done the
work once before, so compiling is not counted.

    tokens_per_s      tokens of the turns, written and answered, over wall-clock
                      time, median of the repeats
    written_per_s     written tokens alone
    ratio             tokens_per_s with the cache kept over that without, of
                      each repeat: the two take turns in one process
    cpu_time_ratio    time on cores without the kept cache over that with it.
                      Where other work shares the machine, this number is
                      steadier than the one above.
    cached_ratio      cached tokens over all tokens of the turns' prompts
    max_difference    largest difference between the logprobs of the same tokens
                      with and without; what is drawn is the same until two
                      logits are closer than the difference
    leaked_slots, leaked_pages
                      slots and pages that are in use at the end; must be 0

Then the rollout side of a run (slow_tools.py) has --at_once conversations that
call a tool before each turn, for 0.01 to 10 s, log-uniform. A turn ends at one
of two tokens, which may come at any time. The model has 90,000 parameters.
Groups of 8 begin while the engine has room, as far as the bound on staleness
allows: --at_once is that bound, not how many there are. What is measured begins
when conversations are at different turns.

    occupancy         tokens drawn over the slots of all decode steps
    occupancy_min     the same of the worst second
    busy              share of the time in which the engine's programs run
    turns_per_s       answers of tools
    in_tools          conversations that wait for a tool, on the average
    lost              conversations without their place in the ledger or the
                      buffer, or without a turn, a call or its result; must be
                      0, and so must every token that is unaccounted for

Hardware: two CPU cores, float32, a Qwen2 shape of 9.99 million parameters
(workloads.py, cpu-10m), or of 1.04 million with --model=cpu-1m. Time: with two
conversations of the smaller one, 25 s on cores, 15 s of them for the first
repeat with compiling. Result: docs/project/notebook.md.

The last line of standard output is one JSON object.
"""

from collections.abc import Sequence
import dataclasses
import json
import statistics
import time
from typing import Any

from absl import app
from absl import flags
import generation
import numpy as np
import slow_tools
import workloads

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib

_MODEL = flags.DEFINE_enum(
  "model", "cpu-10m", sorted(workloads.CPU_CASES), "Case whose model is used."
)
_CONVERSATIONS = flags.DEFINE_integer(
  "conversations",
  8,
  "Conversations whose cache is kept, all at a time; 0 leaves them out.",
  0,
)
_TURNS = flags.DEFINE_integer("turns", 8, "Turns of each.", 1)
_PROMPT = flags.DEFINE_integer("prompt", 1_024, "Tokens of the prompt.", 1)
_WRITTEN = flags.DEFINE_integer(
  "written", 16, "Tokens that the policy writes in a turn.", 1
)
_ANSWERED = flags.DEFINE_integer(
  "answered", 48, "Tokens of the environment after each turn but the last.", 0
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Times that both are timed.", 1)
_AT_ONCE = flags.DEFINE_integer(
  "at_once", 1_000, "Conversations with slow tools; 0 leaves them out.", 0
)
_TOOL_TURNS = flags.DEFINE_integer("tool_turns", 6, "Turns of each.", 1)
_SLOTS = flags.DEFINE_integer("slots", 64, "Slots of their engine.", 1)
_STEPS_PER_CALL = flags.DEFINE_integer(
  "steps_per_call", 8, "Decode steps of a call of it.", 1
)
_SECONDS = flags.DEFINE_float("seconds", 30.0, "For which it is measured.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and prompts.")

_PAGE, _CHUNK, _ROWS, _STEPS = 16, 64, 8, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
  """What was written and how long it took.

  Attributes:
    wall_s: from the first submission to the end of the last turn.
    cpu_s: time on cores meanwhile.
    logprobs: of all tokens, by conversation.
    tokens: by conversation.
    cached_tokens: tokens that prefill found cached.
    prefill_tokens: tokens that prefill computed.
    leaked_slots: slots that hold a sequence at the end.
    leaked_pages: pages that have a holder at the end.
  """

  wall_s: float
  cpu_s: float
  logprobs: list[np.ndarray]
  tokens: list[np.ndarray]
  cached_tokens: int
  prefill_tokens: int
  leaked_slots: int
  leaked_pages: int


def _sizes(*, is_kept: bool) -> decode_state_lib.EngineSizes:
  longest = _PROMPT.value + _TURNS.value * (_WRITTEN.value + _ANSWERED.value)
  cache = -(-longest // 256) * 256
  buckets = tuple(range(256, cache + 1, 256))
  tokens = _CONVERSATIONS.value * cache
  return decode_state_lib.EngineSizes(
    num_slots=_CONVERSATIONS.value,
    cache_tokens=cache,
    decode_steps_per_call=_STEPS,
    prefill_rows=min(_ROWS, _CONVERSATIONS.value),
    prefill_buckets=buckets,
    window_buckets=buckets,
    # Without a cache that is kept, whole rows are the fastest.
    prefill_chunk=_CHUNK if is_kept else 0,
    num_pages=tokens // _PAGE,
    page_tokens=_PAGE,
    kept_tokens=tokens if is_kept else 0,
  )


def _turn(number: int, tokens: np.ndarray) -> sequence_lib.Sequence:
  return sequence_lib.Sequence(
    tokens,
    limit=len(tokens) + _WRITTEN.value,
    stream=sampling.Stream.TRAIN,
    group=number,
    member=0,
    settings=sampling.SamplingSettings(),
    owner=sequence_lib.Owner("conversation", number),
  )


def write(
  engine: engine_lib.Engine,
  params: decode_state_lib.EngineParams,
  prompts: Sequence[np.ndarray],
  answers: np.ndarray,
) -> Turns:
  """Write all turns of all conversations.

  Args:
    engine: writes them.
    params: its weights.
    prompts: of each conversation.
    answers: [conversation, turn, token] what the environment says.
  """
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  scheduler.adopt(params, 0)
  written: list[list[sequence_lib.Sequence]] = [[] for _ in prompts]
  start_s, start_cpu_s = time.perf_counter(), time.process_time()
  for number, prompt in enumerate(prompts):
    scheduler.submit(_turn(number, prompt))
  while not scheduler.is_idle:
    for sequence in scheduler.step():
      number = sequence.group
      turns = written[number]
      turns.append(sequence)
      if len(turns) < _TURNS.value:
        answer = answers[number, len(turns) - 1]
        tokens = np.concatenate([sequence.written(), answer])
        scheduler.submit(_turn(number, tokens))
  wall_s = time.perf_counter() - start_s
  cpu_s = time.process_time() - start_cpu_s
  logprobs = []
  for turns in written:
    merged = np.zeros((turns[-1].length,), np.float32)
    for turn in turns:
      drawn = turn.loss_mask[: turn.length]
      merged[: turn.length][drawn] = turn.behavior_logprobs[: turn.length][
        drawn
      ]
    logprobs.append(merged)
  return Turns(
    wall_s=wall_s,
    cpu_s=cpu_s,
    logprobs=logprobs,
    tokens=[turns[-1].written().copy() for turns in written],
    cached_tokens=scheduler.stats.cached_tokens,
    prefill_tokens=scheduler.stats.prefill_tokens,
    leaked_slots=len(scheduler.sequences()),
    leaked_pages=scheduler.num_held_pages,
  )


def _difference(kept: Turns, fresh: Turns) -> float:
  """Return the largest difference of logprobs of what both have drawn alike."""
  found = 0.0
  for of_kept, of_fresh, one, other in zip(
    kept.tokens, fresh.tokens, kept.logprobs, fresh.logprobs, strict=True
  ):
    same = int(np.argmin([*(of_kept == of_fresh), False]))
    found = max(found, float(np.abs(one[:same] - other[:same]).max()))
  return found


def _report(kept: list[Turns], fresh: list[Turns]) -> dict[str, Any]:
  conversations, turns = _CONVERSATIONS.value, _TURNS.value
  num_written = conversations * turns * _WRITTEN.value
  num_tokens = num_written + conversations * (turns - 1) * _ANSWERED.value
  of_kept, of_fresh = ([x.wall_s for x in runs] for runs in (kept, fresh))
  ratios = [b / a for a, b in zip(of_kept, of_fresh, strict=True)]
  last = kept[-1]
  prompts = last.cached_tokens + last.prefill_tokens
  wall_s = {
    "kept": statistics.median(of_kept),
    "prefilled": statistics.median(of_fresh),
  }
  return {
    "model": _MODEL.value,
    "conversations": conversations,
    "turns": turns,
    "prompt": _PROMPT.value,
    "written": _WRITTEN.value,
    "answered": _ANSWERED.value,
    "tokens_per_s": {k: round(num_tokens / x, 1) for k, x in wall_s.items()},
    "written_per_s": {k: round(num_written / x, 1) for k, x in wall_s.items()},
    "cpu_time_ratio": [
      round(b.cpu_s / a.cpu_s, 2) for a, b in zip(kept, fresh, strict=True)
    ],
    "ratio": [round(x, 2) for x in ratios],
    "cached_ratio": round(last.cached_tokens / prompts, 3),
    "max_difference": max(
      _difference(a, b) for a, b in zip(kept, fresh, strict=True)
    ),
    "leaked_slots": sum(x.leaked_slots for x in (*kept, *fresh)),
    "leaked_pages": sum(x.leaked_pages for x in (*kept, *fresh)),
  }


def _kept_and_fresh() -> dict[str, Any]:
  """Time both ways in turn, and return the result."""
  case = workloads.CPU_CASES[_MODEL.value]
  engines = [
    generation.engine(
      dataclasses.replace(case, sizes=_sizes(is_kept=is_kept)), _SEED.value
    )
    for is_kept in (True, False)
  ]
  params = generation.params(engines[0], _SEED.value, 0)
  rng = np.random.default_rng(_SEED.value)
  vocab, conversations = case.model.vocab_size, _CONVERSATIONS.value
  prompts = list(
    rng.integers(0, vocab, (conversations, _PROMPT.value), np.int32)
  )
  answers = rng.integers(
    0, vocab, (conversations, _TURNS.value, _ANSWERED.value), np.int32
  )
  runs: list[list[Turns]] = [[], []]
  for repeat in range(1 + _REPEATS.value):
    for engine, of_engine in zip(engines, runs, strict=True):
      turns = write(engine, params, prompts, answers)
      if repeat:
        of_engine.append(turns)
      print(
        f"repeat {repeat}: {turns.wall_s:.2f} s, {turns.cpu_s:.2f} s on cores,"
        f" {turns.prefill_tokens} tokens"
        f" prefilled, {turns.cached_tokens} cached",
        flush=True,
      )
  return _report(*runs)


def main(_) -> None:
  """Measure both, and print the result."""
  report: dict[str, Any] = {"benchmark": "episodes", "leaked_slots": 0}
  if _CONVERSATIONS.value:
    report |= _kept_and_fresh()
  if _AT_ONCE.value:
    found = slow_tools.measure(
      conversations=_AT_ONCE.value,
      turns=_TOOL_TURNS.value,
      slots=_SLOTS.value,
      steps=_STEPS_PER_CALL.value,
      seconds=_SECONDS.value,
      seed=_SEED.value,
    )
    found["leaked_slots"] += report["leaked_slots"]
    report |= found
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
