"""Conversations whose tools are slow, through the rollout side of a run.

Coordinator, replica, scheduler, engine, buffer, ledger and environment are the
real ones. Rewards are given at once, and every train step takes its batch and
publishes the same weights under the next version.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
import dataclasses
import itertools
import pathlib
import tempfile
import threading
import time
from typing import Any, NamedTuple

import generation
import jax
import numpy as np
import workloads

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.data import prompts
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import worker as worker_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.weights import weight_transfer

_GROUP, _STALENESS = 8, 4
_PROMPT, _ANSWER = 32, 16
_CACHE, _VOCAB = 512, 128
_ENDS = (1, 2)  # tokens that end a turn: one of 64 at equal logits
_SHORTEST_S, _LONGEST_S = 0.01, 10.0
_PATIENCE_S = 120.0
_FOREVER = 2**31


def case(slots: int, steps: int) -> workloads.Case:
  """Return a model of 90,000 parameters and an engine of so many slots."""
  small = workloads.CPU_CASES["cpu-1m"]
  return dataclasses.replace(
    small,
    model=dataclasses.replace(
      small.model,
      vocab_size=_VOCAB,
      model_dim=64,
      num_layers=2,
      num_heads=2,
      num_kv_heads=1,
      mlp_dim=128,
    ),
    sizes=decode_state_lib.EngineSizes(
      num_slots=slots,
      cache_tokens=_CACHE,
      decode_steps_per_call=steps,
      prefill_rows=8,
      prefill_buckets=(64, 128, 256, 512),
      window_buckets=(128, 256, 384, 512),
    ),
  )


class _Prompts(prompts.PromptStream):
  """Random prompts, one after another."""

  def __init__(self, seed: int):
    self._seed, self._count = seed, 0

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    return True

  def metrics(self) -> dict[str, float]:
    return {}

  def next(self) -> types.Prompt:
    number, self._count = self._count, self._count + 1
    return types.Prompt(
      prompt_id=f"none/train/{number}",
      tokens=np.zeros(_PROMPT, np.int32),  # the episode shows others
      item={"number": self._seed + number},
    )


class _Scored(service_lib.ScoreHandle):
  def __init__(self, count: int):
    self._count = count

  def done(self) -> bool:
    return True

  def result(self) -> service_lib.Outcome:
    return [types.Reward(score=float(i % 2)) for i in range(self._count)]


class _Rewards(service_lib.RewardService):
  """Scores at once."""

  def __init__(self):
    pass

  def submit(
    self, item: dict[str, Any], trajectories: Sequence[types.Trajectory]
  ) -> service_lib.ScoreHandle:
    return _Scored(len(trajectories))


def _said(number: int, member: int, turn: int) -> tuple[float, np.ndarray]:
  """Return how long a tool takes before a turn, and the tokens it returns."""
  rng = np.random.default_rng([number, member, turn])
  seconds = _SHORTEST_S * (_LONGEST_S / _SHORTEST_S) ** rng.random()
  return seconds, rng.integers(
    0, _VOCAB, _ANSWER if turn else _PROMPT, np.int32
  )


async def _tool(number: int, member: int, turn: int) -> int:
  seconds, _ = _said(number, member, turn)
  await asyncio.sleep(seconds)
  return turn


class _Talk:
  """An episode that waits for a tool before each of its turns."""

  def __init__(self, turns: int):
    self._turns = turns

  async def __call__(
    self, prompt: types.Prompt, context: episode_lib.Context
  ) -> AsyncGenerator[np.ndarray, np.ndarray]:
    number, member = prompt.item["number"], context.member
    for turn in range(self._turns):
      called = await context.call(_tool, number, member, turn, timeout_s=60.0)
      yield _said(number, member, called)[1]

  def is_whole(self, prompt: types.Prompt, found: types.Trajectory) -> bool:
    """Return whether a conversation has all its turns, and nothing else."""
    turns = list(episode_lib.recorded_turns([found]))
    number = prompt.item["number"]
    for index, turn in enumerate(turns):
      shown = _said(number, found.member, index)[1]
      if turn.completion is None or not np.array_equal(turn.prompt, shown):
        return False
    calls = [event.number for event in found.events]
    if found.finish_reason is types.FinishReason.LENGTH:
      # What has no room any more may have been called for.
      return calls in ([*range(len(turns))], [*range(len(turns) + 1)])
    return calls == [*range(self._turns)] and len(turns) == self._turns


class _Reading(NamedTuple):
  """Counters at a time."""

  at_s: float
  busy_s: float
  drawn: int
  slot_steps: int
  num_turns: int
  prefill_s: float


class _Run:
  """The rollout side, and the steps that take what it has generated."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    params: decode_state_lib.EngineParams,
    *,
    conversations: int,
    turns: int,
    seed: int,
    directory: pathlib.Path,
  ):
    per_step = -(-conversations // (_GROUP * (1 + _STALENESS)))
    self._weights, self._talk = params.weights, _Talk(turns)
    self.buffer: buffer_lib.Buffer[types.RolloutGroup] = buffer_lib.Buffer(
      per_step, _STALENESS
    )
    self.ledger = ledger_lib.Ledger(
      directory / "ledger.jsonl", ledger_lib.LedgerState()
    )
    self.busy = metrics_lib.BusyClock()
    self.environment = environment_lib.Environment(
      self._talk, vocab_size=_VOCAB
    )
    self.coordinator = coordinator_lib.Coordinator(
      coordinator_settings_lib.CoordinatorSettings(
        group_size=_GROUP,
        num_slots=engine.sizes.num_slots,
        max_completion_tokens=_CACHE - _PROMPT,
        max_tokens=_CACHE,
        temperature=1.0,
        filter_zero_std=False,
        reads_token_scores=False,
        max_failed_groups=3,
        max_filtered_groups=3,
        stop_token_ids=_ENDS,
      ),
      stream=_Prompts(seed),
      buffer=self.buffer,
      rewards=_Rewards(),
      ledger=self.ledger,
      busy=self.busy,
      environment=self.environment,
    )
    self.channel = weight_transfer.DirectChannel(
      jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        params.weights,
        engine.params_sharding.weights,
      )
    )
    self.replica = replica_lib.Replica(
      "replica 0",
      self.coordinator,
      scheduler_lib.Scheduler(engine, busy=self.busy),
      channel=self.channel,
      tokenizer=tokenizer_lib.character_level(),
    )
    self.worker = worker_lib.RolloutWorker(self.coordinator, self.replica)
    self.version, self.num_whole, self.num_taken = 0, 0, 0
    self.channel.publish(self._weights, 0)
    self.buffer.set_policy_version(0)
    self._thread = threading.Thread(target=self._drive, name="rollout")
    self._error: BaseException | None = None
    self._thread.start()

  def _drive(self) -> None:
    try:
      self.worker.run()
    except BaseException as error:
      self._error = error
      self.buffer.close(error)

  def train(self, until_s: float, until_version: int = _FOREVER) -> None:
    """Take batches until that time or that version."""
    while (left_s := until_s - time.monotonic()) > 0:
      if self.version >= until_version:
        return
      batch = self.buffer.get_batch(self.version, left_s)
      if batch is None:
        return
      self._take(batch)
      self.ledger.add_trained(batch, step=self.version, skipped_update=False)
      self.version += 1
      self.channel.publish(self._weights, self.version)
      self.buffer.set_policy_version(self.version)

  def _take(self, groups: Sequence[types.RolloutGroup]) -> None:
    for group in groups:
      self.num_taken += 1
      assert len(group.trajectories) == _GROUP
      self.num_whole += sum(
        self._talk.is_whole(group.prompt, one) for one in group.trajectories
      )

  def reading(self) -> _Reading:
    """Return the counters now."""
    stats = self.replica.scheduler.stats
    slots = self.replica.scheduler.engine.sizes.num_slots
    activity_s = self.busy.activity_s()
    return _Reading(
      at_s=time.monotonic(),
      busy_s=sum(activity_s.values()),
      drawn=stats.generated_tokens,
      slot_steps=stats.decode_steps * slots,
      num_turns=self.coordinator.num_answers,
      prefill_s=activity_s.get("prefill", 0.0),
    )

  def end(self) -> dict[str, int]:
    """Stop, and return what is missing and what is left behind.

    Raises:
      RuntimeError: a token is not accounted for.
    """
    with self.worker.paused(_PATIENCE_S):
      running = self.worker.groups()
      self.worker.cut(self.version)
      leaked = len(self.replica.scheduler.sequences())
      state = self.buffer.state()
    self.worker.stop()
    self._thread.join(_PATIENCE_S)
    if self._error is not None:
      raise self._error
    self.environment.close(_PATIENCE_S)
    self.channel.close()
    self._take(state.finished)
    num_groups = self.num_taken + len(running)
    totals = self.ledger.totals()
    in_flight = [*running.values(), *state.finished]
    ledger_lib.check_balance(
      generated=self.worker.generated_tokens,
      trained=totals.trained_tokens,
      filtered=totals.filtered_tokens,
      failed=totals.failed_tokens,
      in_flight=sum(
        t.num_completion_tokens for g in in_flight for t in g.trajectories
      ),
    )
    self.ledger.close()
    return {
      "conversations_ended": self.num_taken * _GROUP,
      "leaked_slots": leaked,
      # Groups that are nowhere or have failed, and conversations of the others
      # that lack a turn, a call or a result.
      "lost": (state.next_index - num_groups) * _GROUP
      + self.num_taken * _GROUP
      - self.num_whole,
    }


def measure(
  *,
  conversations: int,
  turns: int,
  slots: int,
  steps: int,
  seconds: float,
  seed: int,
) -> dict[str, Any]:
  """Return how full the engine is while tools keep conversations waiting."""
  engine = generation.engine(case(slots, steps), seed)
  params = generation.params(engine, seed, 0)
  with tempfile.TemporaryDirectory() as directory:
    run = _Run(
      engine,
      params,
      conversations=conversations,
      turns=turns,
      seed=seed,
      directory=pathlib.Path(directory),
    )
    # Afterwards everything is compiled, and conversations are at different
    # turns.
    run.train(time.monotonic() + 4 * seconds, 1 + _STALENESS)
    readings, waiting = [run.reading()], []
    while readings[-1].at_s < readings[0].at_s + seconds:
      run.train(time.monotonic() + 1)
      readings.append(run.reading())
      waiting.append(run.environment.num_waiting)
      print(_line(readings[-2], readings[-1], waiting[-1]), flush=True)
    ended = run.end()
  first, last = readings[0], readings[-1]
  wall_s = last.at_s - first.at_s
  parts = [_occupancy(*pair) for pair in itertools.pairwise(readings)]
  return {
    **ended,
    "at_once": conversations,
    "slots": slots,
    "occupancy": round(_occupancy(first, last), 3),
    "occupancy_min": round(min(parts), 3),
    "busy": round((last.busy_s - first.busy_s) / wall_s, 3),
    "prefill": round((last.prefill_s - first.prefill_s) / wall_s, 3),
    "turns_per_s": round((last.num_turns - first.num_turns) / wall_s, 1),
    "drawn_per_s": round((last.drawn - first.drawn) / wall_s, 1),
    "in_tools": round(float(np.mean(waiting)), 1),
    "versions": run.version,
  }


def _occupancy(before: _Reading, after: _Reading) -> float:
  steps = after.slot_steps - before.slot_steps
  return (after.drawn - before.drawn) / steps if steps else 0.0


def _line(before: _Reading, after: _Reading, waiting: int) -> str:
  wall_s = after.at_s - before.at_s
  busy = (after.busy_s - before.busy_s) / wall_s
  turns = (after.num_turns - before.num_turns) / wall_s
  return (
    f"slots {_occupancy(before, after):.3f}, busy {busy:.3f},"
    f" {turns:.0f} turns/s, {waiting} conversations in tools"
  )
