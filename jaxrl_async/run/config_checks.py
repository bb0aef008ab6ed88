"""Checks of settings against each other, made before any slow import.

`check` needs neither devices nor JAX, so that the launch scripts can report a
wrong setting within a second. `validate` also takes the number of devices into
account.
"""

from collections.abc import Sequence
import dataclasses
import json
import re
import string
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import lora_section
from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.data import worked_solutions
from jaxrl_async.models import configs
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.reporting import wandb_log as wandb_log_lib
from jaxrl_async.run import algorithm_checks
from jaxrl_async.run import cluster_checks
from jaxrl_async.run import reward_terms
from jaxrl_async.run import schedule_checks
from jaxrl_async.run import source_checks
from jaxrl_async.storage import config_json
from jaxrl_async.storage import directories

# An upper bound for templates: no tokenizer has tokens this long on average.
_MAX_CHARACTERS_PER_TOKEN = 32
# The evaluations of every run, whose names no set of `eval.sets` may have.
_EVALUATIONS = ("held_out", "greedy")
# Entries of such a set: their types, and how to say so.
_SET_ENTRIES = {
  "dataset": (str, "a text"),
  "num_items": (int, "an integer"),
  "samples": (int, "an integer"),
  "template": (str, "a text"),
  "fields": (config_dict.ConfigDict, "a ConfigDict"),
  "params": (config_dict.ConfigDict, "a ConfigDict"),
}


def _check_lengths(
  rollout: sections.RolloutSection, tokens_per_row: int
) -> None:
  longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
  cache = rollout.cache_tokens
  sections.require(
    longest <= cache,
    "rollout.cache_tokens",
    f"{cache} is less than max_prompt_tokens + max_completion_tokens;"
    f" use {longest} or more",
  )
  sections.require(
    rollout.decode_steps_per_call <= cache,
    "rollout.decode_steps_per_call",
    f"{rollout.decode_steps_per_call} is more than a sequence has tokens"
    f" (rollout.cache_tokens); use {cache} or less",
  )
  for name in ("prefill_buckets", "window_buckets"):
    buckets = getattr(rollout, name)
    path = f"rollout.{name}"
    sections.require(len(buckets) > 0, path, f"() is empty; use ({cache},)")
    sections.require(
      buckets[0] >= 1
      and all(a < b for a, b in zip(buckets, buckets[1:], strict=False)),
      path,
      f"{sections.shown(buckets)} is not positive and ascending",
    )
    sections.require(
      buckets[-1] == cache,
      path,
      f"the last bucket of {sections.shown(buckets)} is not cache_tokens; end"
      f" with {cache}",
    )
  sections.require(
    tokens_per_row >= cache,
    "train.tokens_per_row",
    f"{tokens_per_row} is less than rollout.cache_tokens; use {cache} or more",
  )


def _check_cache(rollout: sections.RolloutSection) -> None:
  def fits(name: str, part: int) -> None:
    for bucket in getattr(rollout, name):
      sections.require(
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
    sections.require(
      all(bucket % page == 0 for bucket in getattr(rollout, name)),
      f"rollout.{name}",
      f"{sections.shown(getattr(rollout, name))} are not all multiples of"
      f" page_tokens {page}, as rollout.num_pages wants",
    )
  sections.require(
    rollout.num_pages * page >= cache,
    "rollout.num_pages",
    f"{rollout.num_pages} pages of {page} do not hold one sequence of"
    f" cache_tokens {cache}; use {-(-cache // page)} or more",
  )


def _check_template(path: str, template: str, max_prompt_tokens: int) -> None:
  longest = _MAX_CHARACTERS_PER_TOKEN * max_prompt_tokens
  sections.require(
    len(template) <= longest,
    path,
    f"{len(template)} characters are more than {max_prompt_tokens} tokens"
    " (rollout.max_prompt_tokens); use a shorter one",
  )
  try:
    parts = list(string.Formatter().parse(template))
  except ValueError as error:
    raise sections.ConfigError(
      f"{path}: {sections.shown(template)} is not a str.format template"
      f" ({error}); double a brace that is meant literally"
    ) from error
  named = [name for _, name, _, _ in parts if name is not None]
  # A field such as {question:>1000000000} would become a gigabyte of text.
  widths = re.findall(r"\d+", " ".join(spec or "" for _, _, spec, _ in parts))
  sections.require(
    all(len(width) < 10 and int(width) <= longest for width in widths),
    path,
    f"{sections.shown(template)} has a field wider than {max_prompt_tokens}"
    " tokens (rollout.max_prompt_tokens)",
  )
  sections.require(
    all(name[:1].isidentifier() for name in named),
    path,
    f"{sections.shown(template)} has a field without a name; write"
    " {question}",
  )
  sections.require(
    len(named) > 0,
    path,
    f"{sections.shown(template)} has no field; add {{question}}",
  )


def slice_shapes(
  mesh: sections.MeshSection, num_devices: int, *, are_apart: bool = False
) -> tuple[MeshShape, MeshShape]:
  """Return the shapes of the train and the rollout mesh, with -1 resolved.

  Args:
    mesh: of the config.
    num_devices: number of devices that the two meshes are cut from.
    are_apart: only the train mesh is cut from them. The rollout mesh is that of
      a replica in another process.

  Raises:
    ConfigError: the size of an axis is neither positive nor -1, more than one
      axis is -1, or there are too few devices.
  """
  fields = [f.name for f in dataclasses.fields(mesh) if f.type is int]
  sizes = {name: getattr(mesh, name) for name in fields}
  for name, size in sizes.items():
    sections.require(
      size == -1 or size >= 1,
      f"mesh.{name}",
      f"{size} is no size of an axis; use 1 or more, or -1 for what is left",
    )
  open_axes = [name for name in sizes if sizes[name] == -1]
  sections.require(
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
    left = num_devices - (0 if are_apart else other)
    sizes[name] = max(1, left // own)
  train, rollout = shape("train").num_devices, shape("rollout").num_devices
  there_are = f"there {'is' if num_devices == 1 else 'are'} {num_devices}"
  fits = train + rollout <= num_devices
  sections.require(
    fits or are_apart or num_devices == train == rollout == 1,
    "mesh",
    f"train_* need {train} and rollout_* {rollout} devices, together"
    f" {train + rollout}; {there_are}",
  )
  message = f"train_* need {train} devices; {there_are}"
  sections.require(train <= num_devices, "mesh", message)
  return shape("train"), shape("rollout")


def _check_rules(mesh: sections.MeshSection) -> None:
  for side in ("train", "rollout"):
    rules = getattr(mesh, f"{side}_rules")
    for path, _, axes, _ in fields_lib.walk(rules, f"mesh.{side}_rules."):
      for axis in axes:
        sections.require(
          axis in sections.MESH_AXES,
          path,
          f"{sections.shown(axis)} is no axis of a mesh; use"
          f" {', '.join(sections.MESH_AXES)}",
        )
      sections.require(
        len(set(axes)) == len(axes),
        path,
        f"{sections.shown(axes)} names an axis twice",
      )


def mesh_fields(side: str, shape: MeshShape, axes: Sequence[str]) -> str:
  """Return the mesh settings by which a slice splits an array over these axes.

  The result has the form "mesh.train_data * train_fsdp", for error messages.
  """
  used = [f"{side}_{axis}" for axis in axes if shape.parts([axis]) > 1]
  return f"mesh.{' * '.join(used)}"


def _divides(path: str, parts: int, size: int, of: str) -> None:
  message = f"{parts} does not divide {size} {of}; use numbers that divide"
  sections.require(size % parts == 0, path, message)


def _check_names(config: sections.Config) -> None:
  kernel_names.check_packed(config.train.attention)
  kernel_names.check_rollout(
    config.rollout.attention, has_pages=config.rollout.num_pages > 0
  )


def _check_warm_start(section: sections.WarmStartSection) -> None:
  if section.num_steps and not section.checkpoint:
    worked_solutions.check(section.solver)
  sections.require(
    section.eval_every > 0 or not section.patience,
    "warm_start.patience",
    f"{section.patience} has no effect without measurements"
    " (warm_start.eval_every is 0); use 0, or measure",
  )


def _check_lora(config: sections.Config) -> None:
  lora = config.model.lora
  for name in lora.modules:
    sections.require(
      name in lora_section.MODULES,
      "model.lora.modules",
      f"{sections.shown(name)} is no kernel of a layer; use"
      f" {', '.join(lora_section.MODULES)}",
    )
  sections.require(
    len(set(lora.modules)) == len(lora.modules),
    "model.lora.modules",
    f"{sections.shown(lora.modules)} names a kernel twice",
  )
  if not lora.rank:
    sections.require(
      not lora.adapter,
      "model.lora.adapter",
      f"{sections.shown(lora.adapter)} is not read while model.lora.rank is 0;"
      " give the adapter's rank",
    )
    return
  sections.require(
    len(lora.modules) > 0,
    "model.lora.modules",
    f"() leaves nothing to train; use {', '.join(lora_section.MODULES)}",
  )
  sections.require(
    config.train.optimizer.name is sections.OptimizerName.ADAMW,
    "train.optimizer.name",
    "muon is for whole matrices, not for the factors of an adapter"
    " (model.lora.rank); use adamw",
  )
  if lora.adapter:
    directories.check_can_read(
      "model.lora.adapter", lora.adapter, "use one in PEFT's format"
    )


def _check_directories(config: sections.Config) -> None:
  name = config.model.name
  if name not in configs.MODELS:
    known = f"use one of {', '.join(configs.MODELS)}"
    directories.check_can_read(
      "model.name", name, f"{known}, or a directory in Hugging Face's format"
    )
  if config.model.tokenizer:
    directories.check_can_read(
      "model.tokenizer",
      config.model.tokenizer,
      "use a directory with a tokenizer.json",
    )
  if config.warm_start.checkpoint:
    directories.check_can_read(
      "warm_start.checkpoint",
      config.warm_start.checkpoint,
      "launch/sft.py writes parameters to WORKDIR/params",
    )
  if config.transfer.directory:
    directories.check_can_write("transfer.directory", config.transfer.directory)


def _check_task(task: sections.TaskSection, max_prompt_tokens: int) -> None:
  for name in ("params", "fields", "sources", "rewards"):
    _check_stored(f"task.{name}", task, name)
  reward_terms.check(task)
  source_checks.check(task)
  _check_template("task.template", task.template, max_prompt_tokens)
  longest = _MAX_CHARACTERS_PER_TOKEN * max_prompt_tokens
  members = source_checks.members_of(task)
  for name, member in members.items():
    path = f"task.sources.{name}"
    _check_template(f"{path}.template", member.template, max_prompt_tokens)
  for name, each in {"": task, **members}.items():
    path = f"task.sources.{name}" if name else "task"
    sections.require(
      len(each.system) <= longest,
      f"{path}.system",
      f"{len(each.system)} characters are more than {max_prompt_tokens} tokens"
      " (rollout.max_prompt_tokens); use a shorter one",
    )


def _check_stored(path: str, section: Any, name: str) -> None:
  """Check that config.json can store a field of free form unchanged."""
  try:
    values = config_json.to_dict(section)[name]
    read = json.loads(json.dumps(values, allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    reason = str(error).partition("\n")[0]
    raise sections.ConfigError(
      f"{path}: they cannot be written as JSON ({reason}); use numbers, texts,"
      " lists and dicts"
    ) from error
  sections.require(
    read == values,
    path,
    f"{sections.shown(values)} would be read from JSON as"
    f" {sections.shown(read)}",
  )


def _check_wandb(project: str) -> None:
  path = "run.wandb_project"
  sections.require(
    not project or wandb_log_lib.is_installed(),
    path,
    "the package wandb is not installed; pip install jaxrl_async[wandb], or"
    ' leave it ""',
  )
  sections.require(
    len(project) <= 128
    and not set(project) & set("/\\#?%:")
    and project.isprintable()
    and project.isascii(),
    path,
    f"{sections.shown(project)} is no name that W&B takes; use up to 128"
    " letters, digits, - and _",
  )


def _check_sets(section: sections.EvalSection, max_prompt_tokens: int) -> None:
  """Check the names and entries of `eval.sets`."""
  sets: dict[str, Any] = dict(section.sets.items())
  for name, entries in sets.items():
    path = f"eval.sets: {name}"
    sections.require(
      isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name) is not None,
      "eval.sets",
      f"{sections.shown(name)} is no name of a set; use letters and digits",
    )
    sections.require(
      name not in _EVALUATIONS,
      path,
      "this is the name of another evaluation; use another one",
    )
    sections.require(
      isinstance(entries, config_dict.ConfigDict),
      path,
      f"{sections.shown(entries)} is not a ConfigDict with a dataset",
    )
    for entry, value in entries.items():
      kind, wanted = _SET_ENTRIES.get(entry, (None, ""))
      sections.require(
        kind is not None,
        path,
        f"there is no entry {sections.shown(entry)}; use"
        f" {', '.join(_SET_ENTRIES)}",
      )
      sections.require(
        type(value) is kind,
        f"{path}.{entry}",
        f"{sections.shown(value)} is not {wanted}",
      )
    sections.require(
      bool(entries.get("dataset")),
      f"{path}.dataset",
      "is missing; use that of a dataset, as in task.dataset",
    )
    for entry, low, high in (
      ("num_items", 0, setting_lib.MAX_ITEMS),
      ("samples", 1, setting_lib.MAX_SAMPLES),
    ):
      value = entries.get(entry, low)
      sections.require(
        low <= value <= high,
        f"{path}.{entry}",
        f"{value} is out of range; use {low} to {high:,}",
      )
    if "template" in entries:
      _check_template(f"{path}.template", entries.template, max_prompt_tokens)


def check(config: sections.Config) -> None:
  """Check every field, and fields against each other, without any device.

  Checks that need a library or the files of a model are made where these are
  used, and raise the same error. Examples are the names of data sets and the
  fields of the template.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  fields_lib.check(config)
  _check_lengths(config.rollout, config.train.tokens_per_row)
  _check_cache(config.rollout)
  _check_task(config.task, config.rollout.max_prompt_tokens)
  _check_stored("eval.sets", config.eval, "sets")
  _check_sets(config.eval, config.rollout.max_prompt_tokens)
  _check_rules(config.mesh)
  _check_names(config)
  _check_warm_start(config.warm_start)
  _check_lora(config)
  _check_directories(config)
  _check_wandb(config.run.wandb_project)
  sections.require(
    config.run.record_schedule or not config.run.keep_trajectories,
    "run.keep_trajectories",
    "a replay that reads them needs the schedule too; set run.record_schedule",
  )
  cluster_checks.check(config)
  algorithm_checks.check(config)
  schedule_checks.check(config)

  rows = config.train.rows_per_microbatch
  if config.warm_start.num_steps:
    whole, of = config.warm_start.rows_per_batch, "warm_start.rows_per_batch"
    _divides("train.rows_per_microbatch", rows, whole, of)


def validate(config: sections.Config, num_devices: int) -> None:
  """Do what `check` does, and check the meshes against the devices.

  There have to be enough devices, and the axes of the meshes have to divide the
  sizes that are split over them.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  check(config)
  rows = config.train.rows_per_microbatch
  train, rollout = slice_shapes(
    config.mesh,
    num_devices,
    are_apart=cluster_checks.has_remote_replicas(config),
  )
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
