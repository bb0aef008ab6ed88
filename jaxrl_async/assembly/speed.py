"""How fast the two slices of a config are, measured alone on random weights.

A train step and the generation of its batch are timed on made-up trajectories
of an assumed length. The slice that needs less time will wait for the other.
Which shapes of a train step are fastest depends on the device, so several are
tried.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import trainer as trainer_lib

_FILLS_OF_SLOTS = 3  # sequences for each slot; the first fill is not timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
  """Assumed lengths of trajectories, in tokens.

  Attributes:
    prompt: of every prompt.
    completion: mean of the completions, which are spread evenly between one
      token and twice the mean.
  """

  prompt: int
  completion: int

  def drawn(self, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the lengths of so many completions."""
    return rng.integers(1, 2 * self.completion, count, endpoint=True)


def lengths(
  config: sections.Config, *, prompt: int = 0, completion: int = 0
) -> Lengths:
  """Return the lengths to assume; 0 stands for half of the config's limit."""
  rollout = config.rollout
  return Lengths(
    prompt=prompt or max(rollout.max_prompt_tokens // 2, 1),
    completion=completion or max(rollout.max_completion_tokens // 2, 1),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """The settings of a train step that change its speed and not its result."""

  rows_per_microbatch: int
  remat: sections.Remat
  attention: str

  def flags(self) -> str:
    """Return the flags that choose them."""
    return (
      f"--config.train.rows_per_microbatch={self.rows_per_microbatch}"
      f" --config.model.remat={self.remat.value}"
      f" --config.train.attention={self.attention}"
    )


def shapes_of(config: sections.Config) -> Shapes:
  """Return those of a config."""
  return Shapes(
    rows_per_microbatch=config.train.rows_per_microbatch,
    remat=config.model.remat,
    attention=config.train.attention,
  )


def candidates(setup: setup_lib.Setup) -> Iterator[Shapes]:
  """Yield shapes to try: the config's, then others that differ in one setting.

  Rows are halved and doubled. Shapes that the run would refuse are left out.
  The estimate of their memory is a lower bound, so that a device may refuse
  others.
  """
  own = shapes_of(setup.config)
  yield own
  changed = [
    dataclasses.replace(own, rows_per_microbatch=rows)
    for rows in (own.rows_per_microbatch // 2, 2 * own.rows_per_microbatch)
  ]
  changed += [
    dataclasses.replace(own, remat=remat)
    for remat in (sections.Remat.NONE, sections.Remat.DOTS, sections.Remat.FULL)
  ]
  changed += [
    dataclasses.replace(own, attention=attention)
    for attention in ("xla", "blocks")
  ]
  for shapes in changed:
    if shapes != own and may_run(setup, shapes):
      yield shapes


def may_run(setup: setup_lib.Setup, shapes: Shapes) -> bool:
  """Return whether the checks of a run take these shapes."""
  rows = shapes.rows_per_microbatch
  least = setup.train_mesh.shape["data"] * setup.train_mesh.shape["fsdp"]
  if not rows or rows % least:
    return False
  config = with_shapes(setup.config, shapes)
  changed = dataclasses.replace(setup, config=config)
  try:
    config_checks.check(config)
    device_checks.check_training_memory(changed)
    device_checks.check_shared_memory(changed)
  except sections.ConfigError:
    return False
  return True


def with_shapes(config: sections.Config, shapes: Shapes) -> sections.Config:
  """Return a config with these shapes."""
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, remat=shapes.remat),
    train=dataclasses.replace(
      config.train,
      rows_per_microbatch=shapes.rows_per_microbatch,
      attention=shapes.attention,
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
  """Shapes, and the seconds of a train step; None if they were refused."""

  shapes: Shapes
  step_s: float | None

  def as_json(self) -> dict[str, Any]:
    """Return the fields of one row."""
    if self.step_s is None:
      return {"flags": self.shapes.flags(), "refused": True}
    return {"flags": self.shapes.flags(), "step_s": self.step_s}


def tried(
  setup: setup_lib.Setup, lengths: Lengths, *, repeats: int
) -> Iterator[Tried]:
  """Measure the config's shapes, the candidates, and the best of each setting.

  Raises:
    ConfigError: the config's own shapes do not fit the device.
  """
  rows: list[Tried] = []
  for shapes in candidates(setup):
    rows.append(_tried(setup, shapes, lengths, repeats))
    if not rows[1:]:
      sections.require(
        rows[0].step_s is not None,
        "train.rows_per_microbatch",
        "a train step of this config does not fit the device",
      )
    yield rows[-1]
  own = rows[0].shapes
  best = own
  for name in ("rows_per_microbatch", "remat", "attention"):
    others = [
      row
      for row in rows
      if dataclasses.replace(row.shapes, **{name: getattr(own, name)}) == own
    ]
    value = getattr(fastest(others).shapes, name)
    best = dataclasses.replace(best, **{name: value})
  is_new = best not in [row.shapes for row in rows]
  if is_new and may_run(setup, best):
    yield _tried(setup, best, lengths, repeats)


def fastest(rows: Sequence[Tried]) -> Tried:
  """Return the row whose train step takes the least time."""
  return min(
    (row for row in rows if row.step_s is not None),
    key=lambda row: row.step_s or 0.0,
  )


def _tried(
  setup: setup_lib.Setup, shapes: Shapes, lengths: Lengths, repeats: int
) -> Tried:
  try:
    config = with_shapes(setup.config, shapes)
    changed = dataclasses.replace(setup, config=config)
    return Tried(
      shapes=shapes, step_s=train_step_s(changed, lengths, repeats=repeats)
    )
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return Tried(shapes=shapes, step_s=None)


def _groups(
  setup: setup_lib.Setup, lengths: Lengths
) -> list[types.RolloutGroup]:
  """Return a train step's groups, whose rewards differ."""
  algorithm = setup.config.algorithm
  rng = np.random.default_rng(0)
  prompt = np.ones(lengths.prompt, np.int32)
  groups = []
  for index in range(algorithm.groups_per_step):
    trajectories = []
    for member, count in enumerate(lengths.drawn(algorithm.group_size, rng)):
      mask = np.arange(lengths.prompt + count) >= lengths.prompt
      trajectories.append(
        types.Trajectory(
          member=member,
          tokens=np.ones(len(mask), np.int32),
          loss_mask=mask,
          behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
          policy_versions=np.where(mask, 0, -1).astype(np.int32),
          finish_reason=types.FinishReason.LENGTH,
          reward=types.Reward(score=float(member % 2)),
        )
      )
    groups.append(
      types.RolloutGroup(
        admission=types.Admission(index=index, birth=0, deadline=1),
        prompt=types.Prompt(prompt_id="", tokens=prompt, item={}),
        trajectories=trajectories,
      )
    )
  return groups


def _started_trainer(setup: setup_lib.Setup) -> trainer_lib.Trainer:
  """Return a trainer with random weights."""
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  params = initial_params.random(setup)
  if setup.model.lora is not None:
    params = initial_params.with_adapters(params, setup)
  trainer.start(initial_params.of_models(setup, params))
  return trainer


def train_step_s(
  setup: setup_lib.Setup, lengths: Lengths, *, repeats: int = 2
) -> float:
  """Return the seconds of a train step, the least of some.

  Raises:
    JaxRuntimeError: the device has too little memory.
  """
  trainer = _started_trainer(setup)
  batch = trainer.prepare(_groups(setup, lengths))
  trainer.run_programs(0, batch.arrays)  # compiles
  times_s = []
  for step in range(1, repeats + 1):
    start_s = time.perf_counter()
    trainer.run_programs(step, batch.arrays)
    times_s.append(time.perf_counter() - start_s)
  return min(times_s)


def generation_s(setup: setup_lib.Setup, lengths: Lengths) -> float:
  """Return the seconds that the rollout slice takes for a train step's batch.

  Its slots are full all the time, and no weights are adopted meanwhile.
  """
  algorithm, sizes = setup.config.algorithm, setup.config.rollout
  trainer = _started_trainer(setup)
  engine = assembly.make_engine(setup)
  scheduler = assembly.make_scheduler(setup, engine, metrics_lib.BusyClock())
  scheduler.adopt(engine.load_params(trainer.published(), 0), 0)
  rng = np.random.default_rng(0)
  count = _FILLS_OF_SLOTS * sizes.num_slots
  drawn = lengths.drawn(count, rng)
  for number, length in enumerate(drawn):
    group, member = divmod(number, algorithm.group_size)
    prompt = np.full(lengths.prompt, group % setup.model.vocab_size, np.int32)
    scheduler.submit(
      sequence_lib.Sequence(
        prompt,
        limit=lengths.prompt + int(length),
        group=group,
        member=member,
        stream=sampling.Stream.TRAIN,
        settings=sampling.SamplingSettings(
          temperature=sizes.temperature, ignore_eos=True
        ),
      )
    )
  num_tokens = 0
  while num_tokens == 0 or len(scheduler.sequences()) > 2 * sizes.num_slots:
    scheduler.step()
    num_tokens = scheduler.stats.generated_tokens
  start_s = time.perf_counter()
  while len(scheduler.sequences()) > sizes.num_slots:
    scheduler.step()
  taken_s = time.perf_counter() - start_s
  tokens = scheduler.stats.generated_tokens - num_tokens
  wanted = algorithm.groups_per_step * algorithm.group_size * drawn.mean()
  return float(taken_s * wanted / tokens)


def line(train_s: float, rollout_s: float) -> str:
  """Return one line that says which slice will wait."""
  if max(train_s, rollout_s) < 1.1 * min(train_s, rollout_s):
    verdict = "both slices are busy"
  else:
    slower, faster = ("training", "generation")
    if rollout_s > train_s:
      slower, faster = faster, slower
    share = 1 - min(train_s, rollout_s) / max(train_s, rollout_s)
    verdict = f"{faster} waits for {slower} {share:.0%} of the time"
  return (
    f"a train step takes {train_s:.3g} s, generating its batch {rollout_s:.3g}"
    f" s: {verdict}"
  )
