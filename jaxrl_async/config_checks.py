"""What must hold in a configuration, checked before anything compiles."""

from collections.abc import Callable, Sequence
import dataclasses
import string
from typing import Any

from jaxrl_async.config import MESH_AXES
from jaxrl_async.config import Config
from jaxrl_async.config import ConfigError
from jaxrl_async.config import MeshSection
from jaxrl_async.config import ProximalMode
from jaxrl_async.config import RolloutSection
from jaxrl_async.config import check_type
from jaxrl_async.config import leaves
from jaxrl_async.config import require
from jaxrl_async.mesh import MeshShape

_AT_LEAST_ONE = """warm_start.rows_per_batch warm_start.num_examples
  task.reward_workers task.max_failed_groups task.question_workers
  rollout.num_slots
  rollout.max_prompt_tokens rollout.max_completion_tokens rollout.cache_tokens
  rollout.decode_steps_per_call rollout.prefill_rows rollout.page_tokens
  algorithm.groups_per_step
  algorithm.num_minibatches algorithm.behavior_weight_cap train.num_steps
  train.tokens_per_row train.rows_per_microbatch train.max_bad_updates
  train.vocab_chunk eval.num_items run.checkpoint_every run.keep_checkpoints"""
_AT_LEAST_ZERO = """task.reward_retries rollout.prefill_chunk rollout.num_pages
  warm_start.num_steps eval.every
  eval.temperature algorithm.clip_high"""
_ABOVE_ZERO = """task.reward_timeout_s rollout.temperature run.stall_timeout_s
  run.join_timeout_s"""
_FRACTIONS = """warm_start.corrupted_frac warm_start.decay train.decay
  algorithm.clip_low"""
_DTYPES = ("float32", "bfloat16")


def _check_bounds(values: dict[str, Any]) -> None:
  def check(paths: str, holds: Callable[[Any], bool], use: str) -> None:
    for path in paths.split():
      message = f"{values[path]} is out of range; use {use}"
      require(holds(values[path]), path, message)

  bound = values["algorithm.max_staleness"]
  message = f"{bound} is negative; use 0 (synchronous) or more"
  require(bound >= 0, "algorithm.max_staleness", message)
  check("algorithm.group_size", lambda x: x >= 2, "2 or more, to compare")
  check("seed", lambda x: 0 <= x < 256, "0 to 255")
  check(_AT_LEAST_ONE, lambda x: x >= 1, "1 or more")
  check(_AT_LEAST_ZERO, lambda x: x >= 0, "0 or more")
  check(_ABOVE_ZERO, lambda x: x > 0, "a number above 0")
  check(_FRACTIONS, lambda x: 0 <= x <= 1, "0 to 1")
  dtypes = "model.compute_dtype rollout.dtype"
  check(dtypes, lambda x: x in _DTYPES, " or ".join(_DTYPES))
  for at in ("warm_start.optimizer.", "train.optimizer."):
    zero = f"{at}learning_rate {at}warmup_steps {at}weight_decay"
    check(zero, lambda x: x >= 0, "0 or more")
    check(f"{at}eps {at}max_grad_norm", lambda x: x > 0, "a number above 0")
    check(f"{at}b1 {at}b2", lambda x: 0 <= x < 1, "0 or more, below 1")
    check(f"{at}state_dtype", lambda x: x in _DTYPES, " or ".join(_DTYPES))


def _check_lengths(rollout: RolloutSection, tokens_per_row: int) -> None:
  longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
  cache = rollout.cache_tokens
  require(
    longest <= cache,
    "rollout.cache_tokens",
    f"{cache} is less than max_prompt_tokens + max_completion_tokens;"
    f" use {longest} or more",
  )
  for name in ("prefill_buckets", "window_buckets"):
    buckets = getattr(rollout, name)
    path = f"rollout.{name}"
    require(len(buckets) > 0, path, f"() is empty; use ({cache},)")
    require(
      buckets[0] >= 1
      and all(a < b for a, b in zip(buckets, buckets[1:], strict=False)),
      path,
      f"{buckets} is not positive and ascending",
    )
    require(
      buckets[-1] == cache,
      path,
      f"the last bucket of {buckets} is not cache_tokens; end with {cache}",
    )
  require(
    tokens_per_row >= cache,
    "train.tokens_per_row",
    f"{tokens_per_row} is less than rollout.cache_tokens; use {cache} or more",
  )


def _check_cache(rollout: RolloutSection) -> None:
  def fits(name: str, part: int) -> None:
    for bucket in getattr(rollout, name):
      require(
        bucket < part or bucket % part == 0,
        f"rollout.{name}",
        f"{bucket} is no multiple of prefill_chunk {part}",
      )

  if rollout.prefill_chunk:
    fits("prefill_buckets", rollout.prefill_chunk)
  if not rollout.num_pages:
    return
  page, cache = rollout.page_tokens, rollout.cache_tokens
  for name in ("prefill_buckets", "window_buckets"):
    require(
      all(bucket % page == 0 for bucket in getattr(rollout, name)),
      f"rollout.{name}",
      f"{getattr(rollout, name)} are not all multiples of page_tokens {page}",
    )
  require(
    rollout.num_pages * page >= cache,
    "rollout.num_pages",
    f"{rollout.num_pages} pages of {page} do not hold one sequence of"
    f" cache_tokens {cache}; use {-(-cache // page)} or more",
  )


def _check_template(template: str) -> None:
  path = "task.template"
  try:
    fields = [name for _, name, _, _ in string.Formatter().parse(template)]
  except ValueError as error:
    raise ConfigError(
      f"{path}: {template!r} is not a str.format template ({error}); double"
      " a brace that is meant literally"
    ) from error
  named = [name for name in fields if name is not None]
  require(
    all(name[:1].isidentifier() for name in named),
    path,
    f"{template!r} has a field without a name; write {{question}}",
  )
  require(len(named) > 0, path, f"{template!r} has no field; add {{question}}")


def slice_shapes(
  mesh: MeshSection, num_devices: int
) -> tuple[MeshShape, MeshShape]:
  """Shapes of the train and the rollout mesh, with -1 resolved.

  Raises:
    ConfigError: an axis is not positive or -1, or the devices do not suffice.
  """
  fields = [f.name for f in dataclasses.fields(mesh) if f.type is int]
  sizes = {name: getattr(mesh, name) for name in fields}
  for name, size in sizes.items():
    require(
      size == -1 or size >= 1,
      f"mesh.{name}",
      f"{size} is no size of an axis; use 1 or more, or -1 for what is left",
    )
  open_axes = [name for name in sizes if sizes[name] == -1]
  require(
    len(open_axes) <= 1,
    f"mesh.{[*sizes, *open_axes][-1]}",
    f"only one axis may be -1; {' and '.join(open_axes)} are",
  )

  def shape(side: str) -> MeshShape:
    start = f"{side}_"
    own = {n[len(start) :]: sizes[n] for n in fields if n.startswith(start)}
    return MeshShape(**own)

  for name in open_axes:
    sizes[name] = 1
    own, other = shape("train").num_devices, shape("rollout").num_devices
    if name.startswith("rollout"):
      own, other = other, own
    left = num_devices - other
    sizes[name] = max(1, left // own)
  train, rollout = shape("train").num_devices, shape("rollout").num_devices
  require(
    train + rollout <= num_devices or num_devices == train == rollout == 1,
    "mesh",
    f"train_* need {train} and rollout_* {rollout} devices, together"
    f" {train + rollout}; there {'is' if num_devices == 1 else 'are'}"
    f" {num_devices}",
  )
  return shape("train"), shape("rollout")


def _check_rules(mesh: MeshSection) -> None:
  for side in ("train", "rollout"):
    rules = getattr(mesh, f"{side}_rules")
    for path, _, axes in leaves(rules, f"mesh.{side}_rules."):
      for axis in axes:
        require(
          axis in MESH_AXES,
          path,
          f"{axis!r} is no axis of a mesh; use {', '.join(MESH_AXES)}",
        )
      require(len(set(axes)) == len(axes), path, f"{axes} names an axis twice")


def mesh_fields(side: str, shape: MeshShape, axes: Sequence[str]) -> str:
  """The settings of a slice that split an array over these mesh axes."""
  used = [f"{side}_{axis}" for axis in axes if shape.parts([axis]) > 1]
  return f"mesh.{' * '.join(used)}"


def _divides(path: str, parts: int, size: int, of: str) -> None:
  message = f"{parts} does not divide {size} {of}; use numbers that divide"
  require(size % parts == 0, path, message)


def validate(config: Config, num_devices: int) -> None:
  """Check every field and what belongs together, before anything compiles.

  What needs other modules (model and data set names, the template's fields) is
  checked where they are looked up, with the same error.

  Raises:
    ConfigError: one line that names the field and what would be right.
  """
  values = {}
  for path, kind, value in leaves(config):
    check_type(path, kind, value)
    values[path] = value
  _check_bounds(values)
  _check_lengths(config.rollout, config.train.tokens_per_row)
  _check_cache(config.rollout)
  _check_template(config.task.template)
  _check_rules(config.mesh)

  algorithm = config.algorithm
  _divides(
    "algorithm.num_minibatches",
    algorithm.num_minibatches,
    algorithm.group_size * algorithm.groups_per_step,
    "trajectories of a train step (group_size * groups_per_step)",
  )
  require(
    algorithm.proximal is not ProximalMode.REUSE
    or algorithm.num_minibatches == 1,
    "algorithm.proximal",
    f"reuse is wrong after the first of {algorithm.num_minibatches} updates;"
    " use algorithm.num_minibatches=1, recompute or loglinear",
  )
  rows = config.train.rows_per_microbatch
  if config.warm_start.num_steps:
    whole, of = config.warm_start.rows_per_batch, "warm_start.rows_per_batch"
    _divides("train.rows_per_microbatch", rows, whole, of)
  train, rollout = slice_shapes(config.mesh, num_devices)
  train_rules = config.mesh.train_rules
  rollout_rules = config.mesh.rollout_rules
  tokens = config.train.tokens_per_row
  slots = config.rollout.num_slots
  for side, shape, axes, size, of in (
    ("train", train, train_rules.batch, rows, "train.rows_per_microbatch"),
    ("train", train, train_rules.tokens, tokens, "train.tokens_per_row"),
    ("rollout", rollout, rollout_rules.batch, slots, "rollout.num_slots"),
  ):
    _divides(mesh_fields(side, shape, axes), shape.parts(axes), size, of)
