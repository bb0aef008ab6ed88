"""How fast the two slices of a config are, measured alone on random weights.

A train step and the generation of its batch are timed on made-up trajectories
of an assumed length. The slice that needs less time will wait for the other.
Which shapes of a train step are fastest depends on the device, so several are
tried.
"""

from collections.abc import Iterator, Sequence
import copy
import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import trainer as trainer_lib

_FILLS_OF_SLOTS = 3  # sequences for each slot; the first fill is not timed


# The settings of a train step that change its speed and not its result, by
# path, and what to try besides the config's own. Rows are halved and doubled.
_ROWS = "train.rows_per_microbatch"
_TRIED: dict[str, tuple[Any, ...]] = {
  _ROWS: (),
  "model.remat": (
    sections.Remat.NONE,
    sections.Remat.DOTS,
    sections.Remat.FULL,
  ),
  "train.attention": ("xla", "blocks"),
}
Shapes = dict[str, Any]


class Lengths(NamedTuple):
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


class Tried(NamedTuple):
  """Shapes, and the seconds of a train step; None if they were refused."""

  shapes: Shapes
  step_s: float | None

  @property
  def flags(self) -> str:
    """The flags that choose the shapes."""
    return " ".join(
      f"--config.{path}={fields_lib.plain(value)}"
      for path, value in self.shapes.items()
    )

  def as_json(self) -> dict[str, Any]:
    """Return the fields of one row."""
    found = (
      {"refused": True} if self.step_s is None else {"step_s": self.step_s}
    )
    return {"flags": self.flags, **found}


def shapes_of(config: sections.Config) -> Shapes:
  """Return the shapes of a config."""
  return {x.path: x.value for x in fields_lib.walk(config) if x.path in _TRIED}


def with_shapes(setup: setup_lib.Setup, shapes: Shapes) -> setup_lib.Setup:
  """Return a setup with these shapes."""
  config = copy.deepcopy(setup.config)
  for path, value in shapes.items():
    fields_lib.set_at(config, path, value)
  return dataclasses.replace(setup, config=config)


def candidates(setup: setup_lib.Setup) -> Iterator[Shapes]:
  """Yield shapes to try: the config's, then others that differ in one setting.

  Shapes that the run would refuse are left out. The estimate of their memory is
  a lower bound, so that a device may refuse others.
  """
  own = shapes_of(setup.config)
  yield own
  rows = own[_ROWS]
  for path, values in {**_TRIED, _ROWS: (rows // 2, 2 * rows)}.items():
    for value in values:
      if value != own[path] and may_run(setup, own | {path: value}):
        yield own | {path: value}


def may_run(setup: setup_lib.Setup, shapes: Shapes) -> bool:
  """Return whether the checks of a run take these shapes."""
  rows = shapes[_ROWS]
  least = setup.train_mesh.shape["data"] * setup.train_mesh.shape["fsdp"]
  if not rows or rows % least:
    return False
  changed = with_shapes(setup, shapes)
  try:
    config_checks.check(changed.config)
    device_checks.check_training_memory(changed)
    device_checks.check_shared_memory(changed)
  except sections.ConfigError:
    return False
  return True


def tried(
  setup: setup_lib.Setup, lengths: Lengths, *, repeats: int
) -> Iterator[Tried]:
  """Measure the config's shapes, the candidates, and the best of each setting.

  Raises:
    ConfigError: the config's own shapes do not fit the device.
  """

  def measured(shapes: Shapes) -> Tried:
    try:
      changed = with_shapes(setup, shapes)
      return Tried(shapes, train_step_s(changed, lengths, repeats=repeats))
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      return Tried(shapes, None)

  rows: list[Tried] = []
  for shapes in candidates(setup):
    rows.append(measured(shapes))
    sections.require(
      rows[0].step_s is not None,
      _ROWS,
      "a train step of this config does not fit the device",
    )
    yield rows[-1]
  own = rows[0].shapes
  best = {}
  for path in own:
    others = [x for x in rows if x.shapes | {path: own[path]} == own]
    best[path] = fastest(others).shapes[path]
  if best not in [row.shapes for row in rows] and may_run(setup, best):
    yield measured(best)


def fastest(rows: Sequence[Tried]) -> Tried:
  """Return the row whose train step takes the least time."""
  return min(rows, key=lambda x: math.inf if x.step_s is None else x.step_s)


def _groups(
  setup: setup_lib.Setup, lengths: Lengths
) -> list[types.RolloutGroup]:
  """Return a train step's groups, whose rewards differ."""
  algorithm = setup.config.algorithm
  rng = np.random.default_rng(0)

  def trajectory(member: int, count: int) -> types.Trajectory:
    mask = np.arange(lengths.prompt + count) >= lengths.prompt
    return types.Trajectory(
      member=member,
      tokens=np.ones(len(mask), np.int32),
      loss_mask=mask,
      behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
      policy_versions=np.where(mask, 0, -1).astype(np.int32),
      finish_reason=types.FinishReason.LENGTH,
      reward=types.Reward(score=float(member % 2)),
    )

  prompt = types.Prompt(
    prompt_id="", tokens=np.ones(lengths.prompt, np.int32), item={}
  )
  return [
    types.RolloutGroup(
      admission=types.Admission(index=index, birth=0, deadline=1),
      prompt=prompt,
      trajectories=[
        trajectory(*x)
        for x in enumerate(lengths.drawn(algorithm.group_size, rng).tolist())
      ],
    )
    for index in range(algorithm.groups_per_step)
  ]


def _started_trainer(setup: setup_lib.Setup) -> trainer_lib.Trainer:
  """Return a trainer with random weights."""
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  params = initial_params.random(setup)
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
  times = sorted([(train_s, "training"), (rollout_s, "generation")])
  (least_s, faster), (most_s, slower) = times
  if most_s < 1.1 * least_s:
    verdict = "both slices are busy"
  else:
    share = 1 - least_s / most_s
    verdict = f"{faster} waits for {slower} {share:.0%} of the time"
  return (
    f"a train step takes {train_s:.3g} s, generating its batch {rollout_s:.3g}"
    f" s: {verdict}"
  )
