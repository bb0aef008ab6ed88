"""What must hold in a configuration, checked before anything compiles."""

from collections.abc import Callable
import dataclasses
import string
from typing import Any

from jaxrl_async.config import Config
from jaxrl_async.config import ConfigError
from jaxrl_async.config import MeshSection
from jaxrl_async.config import RolloutSection
from jaxrl_async.config import check_type
from jaxrl_async.config import leaves
from jaxrl_async.config import require

_AT_LEAST_ONE = """warm_start.rows_per_batch warm_start.num_examples
  task.reward_workers task.max_failed_groups rollout.num_slots
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
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
  """Sizes of (data, fsdp, tensor) of both slices, with -1 resolved.

  Raises:
    ConfigError: an axis is not positive or -1, or the devices do not suffice.
  """
  sizes = {f.name: getattr(mesh, f.name) for f in dataclasses.fields(mesh)}
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

  def counts() -> tuple[int, int]:
    train = sizes["train_data"] * sizes["train_fsdp"] * sizes["train_tensor"]
    return train, sizes["rollout_data"] * sizes["rollout_tensor"]

  for name in open_axes:
    sizes[name] = 1
    own, other = counts()
    if name.startswith("rollout"):
      own, other = other, own
    left = num_devices - other
    sizes[name] = max(1, left // own)
  train, rollout = counts()
  require(
    train + rollout <= num_devices or num_devices == train == rollout == 1,
    "mesh",
    f"train_* need {train} and rollout_* {rollout} devices, together"
    f" {train + rollout}; there {'is' if num_devices == 1 else 'are'}"
    f" {num_devices}",
  )
  return (
    (sizes["train_data"], sizes["train_fsdp"], sizes["train_tensor"]),
    (sizes["rollout_data"], 1, sizes["rollout_tensor"]),
  )


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

  def divides(path: str, parts: int, size: int, of: str) -> None:
    message = f"{parts} does not divide {size} {of}; use numbers that divide"
    require(size % parts == 0, path, message)

  algorithm = config.algorithm
  divides(
    "algorithm.num_minibatches",
    algorithm.num_minibatches,
    algorithm.group_size * algorithm.groups_per_step,
    "trajectories of a train step (group_size * groups_per_step)",
  )
  train_shape, rollout_shape = slice_shapes(config.mesh, num_devices)
  shards = train_shape[0] * train_shape[1]
  rows = config.train.rows_per_microbatch
  divides("mesh.train_*", shards, rows, "train.rows_per_microbatch")
  if config.warm_start.num_steps:
    whole, of = config.warm_start.rows_per_batch, "warm_start.rows_per_batch"
    divides("train.rows_per_microbatch", rows, whole, of)
  slots = config.rollout.num_slots
  divides("mesh.rollout_data", rollout_shape[0], slots, "rollout.num_slots")
