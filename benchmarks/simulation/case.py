"""A random run: sizes, times and faults, all of them a function of the seed."""

import dataclasses
import random

from jaxrl_async.config import sections
from jaxrl_async.engine import decode_state as decode_state_lib
from simulation import script as script_lib

MAX_TOKENS = 14  # of a trajectory
_CACHE_TOKENS = 16
_FAULTS = (
  *("die", "leave", "fail", "silence", "silence", "hang", "slow", "restart"),
)
_DELAYS_S = 0.1, 1.0, 4.0
SLOW = 5.0  # times as long take the calls of a slow replica
_GRACE_S = 10.0  # for messages, and versions that are damaged
# For how long each fault may hold a run up: until it is noticed, and until
# another replica is there and has adopted a version. A slow replica makes every
# group take longer, see `_group_s`.
_HELD_UP_S = {
  **{"die": 5.0, "fail": 5.0, "restart": 6.0, "silence": 8.0, "hang": 30.0},
  **{"leave": 35.0, "slow": 0.0},
}
# How often a group is begun in the place of one that has failed, about.
_TRIES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """Something that goes wrong.

  Attributes:
    step: it happens when this version has been trained,
    delay_s: or so many seconds after that.
    kind: "die": a replica's process ends, and what it was about to report is
      lost. "leave": the same, and its place stays empty for long. "fail": its
      code raises; in the trainer's process, that of the engine alone. "hang":
      it answers, and its thread never comes back. "silence": it goes on, but
      is not heard for longer than its lease. "slow": its calls take five times
      as long from then on. "restart": the trainer's process ends, and another
      goes on from the last checkpoint.
    place: of the replica; None is the one with the newest version.
  """

  step: int
  delay_s: float
  kind: str
  place: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A run; times are in seconds of the virtual clock.

  Attributes:
    is_fleet: whether the replicas are in processes of their own.
    sizes: of each engine.
    train_s: the longest train step; half of them are a tenth of it.
    call_s: the longest decode call.
    adopt_s: the longest time in which a version is fetched.
    reward_s: the longest time in which a group is scored.
    message_s: the longest way of a message to or from a process.
    late_frac: how often work arrives seconds later than that.
    late_s: when the last replica joins, if not at once.
    script: what the policy writes, and how groups end.
    no_prompt_frac: how often the next question is not ready.
    tune_frac: how often the bound moves after a step.
    checkpoint_every: in train steps.
    survives: whether replicas outlive the trainer's process.
    is_exact: whether every checkpoint is a cut (`run.exact_resume`).
    max_group_s: a group that is not generated after so long fails; 0 waits.
    eval_every: train steps between evaluations beside training; 0 has none.
  """

  seed: int
  is_fleet: bool
  groups_per_step: int
  group_size: int
  max_staleness: int
  num_steps: int
  num_replicas: int
  sizes: decode_state_lib.EngineSizes
  kv_on_adopt: sections.KvOnAdopt
  train_s: float
  call_s: float
  adopt_s: float
  reward_s: float
  message_s: float
  late_frac: float
  late_s: float
  script: script_lib.Script
  no_prompt_frac: float
  tune_frac: float
  checkpoint_every: int
  survives: bool
  report_every_s: float
  faults: tuple[Fault, ...]
  is_exact: bool
  max_group_s: float
  eval_every: int

  def longest_wait_s(self, num_steps: int) -> float:
    """Return the longest time that may pass in so many train steps."""
    group_s = _group_s(self)
    if 0 < self.max_group_s < group_s:
      # Most groups fail, one after the other, and those that have not wait.
      group_s *= _TRIES
    step_s = self.train_s + self.reward_s + self.adopt_s + group_s
    held_up_s = sum(_HELD_UP_S[fault.kind] for fault in self.faults)
    return num_steps * step_s + held_up_s + self.late_s + _GRACE_S


def _sizes(rng: random.Random) -> decode_state_lib.EngineSizes:
  num_slots = rng.randint(1, 5)
  num_pages = page_tokens = 0
  if rng.random() < 0.2:
    # A page of four tokens; the longest sequence always fits alone.
    page_tokens = 4
    fewest = _CACHE_TOKENS // page_tokens
    num_pages = rng.randint(fewest, fewest * num_slots)
  return decode_state_lib.EngineSizes(
    num_slots=num_slots,
    cache_tokens=_CACHE_TOKENS,
    decode_steps_per_call=rng.randint(2, 5),
    prefill_rows=rng.randint(1, 3),
    prefill_buckets=(_CACHE_TOKENS // 2, _CACHE_TOKENS),
    window_buckets=(_CACHE_TOKENS,),
    prefill_chunk=4 if rng.random() < 0.1 else 0,
    num_pages=num_pages,
    page_tokens=page_tokens,
  )


def _faults(
  rng: random.Random, num_replicas: int, num_steps: int, is_fleet: bool
) -> tuple[Fault, ...]:
  kinds = _FAULTS if is_fleet else ("slow", "restart")
  faults = []
  for _ in range(rng.choice((0, 1, 2, 3, 4))):
    kind, place = rng.choice(kinds), rng.randrange(num_replicas)
    is_newest = kind in ("die", "silence") and rng.random() < 0.5
    if kind == "fail" and place == 0:
      kind = "die"  # a run ends if all replicas fail over and over
    faults.append(
      Fault(
        step=rng.randrange(num_steps),
        delay_s=rng.choice(_DELAYS_S) * rng.random(),
        kind=kind,
        place=None if is_newest else place,
      )
    )
  return tuple(faults)


def of_seed(seed: int) -> Case:
  """Return the case of a seed, which decides everything."""
  case = _of_seed(seed)
  # What was added later is drawn apart, so that older seeds stay what they are.
  rng = random.Random(f"more {seed}")
  case = dataclasses.replace(
    case,
    is_exact=rng.random() < 0.4,
    max_group_s=rng.choice((0.0, 0.0, 0.4, 1.0)) * _group_s(case),
    eval_every=rng.choice((0, 0, 1, 2)),
  )
  if not case.is_fleet and rng.random() < 0.5:
    failure = Fault(
      step=rng.randrange(case.num_steps),
      delay_s=rng.choice(_DELAYS_S) * rng.random(),
      kind="fail",
      place=0,
    )
    case = dataclasses.replace(case, faults=(*case.faults, failure))
  return case


def _group_s(case: Case) -> float:
  """Return about how long a group takes that waits for those before it."""
  sizes = case.sizes
  side_by_side = sizes.num_slots
  if sizes.num_pages:
    side_by_side = min(side_by_side, sizes.num_pages // sizes.pages_per_slot)
  num_calls = MAX_TOKENS / sizes.decode_steps_per_call
  num_calls *= 1 + 2 * case.group_size / side_by_side
  pace = SLOW if any(fault.kind == "slow" for fault in case.faults) else 1.0
  return pace * num_calls * (case.call_s + 0.1)


def _of_seed(seed: int) -> Case:
  rng = random.Random(seed)
  is_fleet = rng.random() < 0.75
  num_replicas = rng.choice((1, 2, 3, 3)) if is_fleet else 1
  num_steps = rng.randint(2, 5)
  return Case(
    seed=seed,
    is_fleet=is_fleet,
    groups_per_step=rng.randint(1, 4),
    group_size=rng.choice((2, 2, 2, 3)),
    max_staleness=rng.randint(0, 3),
    num_steps=num_steps,
    num_replicas=num_replicas,
    sizes=_sizes(rng),
    kv_on_adopt=rng.choice((sections.KvOnAdopt.RECOMPUTE, *sections.KvOnAdopt)),
    train_s=rng.choice((0.05, 0.5, 2.0)),
    call_s=rng.choice((0.05, 0.3, 1.0)),
    adopt_s=rng.choice((0.0, 0.5, 2.0)),
    reward_s=rng.choice((0.0, 0.2, 2.0)),
    message_s=rng.choice((0.01, 0.3)),
    late_frac=rng.choice((0.0, 0.0, 0.3)),
    late_s=rng.choice((0.0, 0.0, 5.0)),
    script=script_lib.Script(
      seed=seed,
      limit=MAX_TOKENS,
      turns_frac=rng.choice((0.0, 0.0, 0.5)),
      raise_frac=rng.choice((0.0, 0.0, 0.1)),
      fail_frac=rng.choice((0.0, 0.0, 0.2)),
      filter_frac=rng.choice((0.0, 0.0, 0.3)),
    ),
    no_prompt_frac=rng.choice((0.0, 0.0, 0.3)),
    tune_frac=rng.choice((0.0, 0.0, 0.5)),
    checkpoint_every=rng.randint(1, 2),
    survives=rng.random() < 0.5,
    report_every_s=rng.choice((0.1, 1.0)),
    faults=_faults(rng, num_replicas, num_steps, is_fleet),
    is_exact=False,
    max_group_s=0.0,
    eval_every=0,
  )
