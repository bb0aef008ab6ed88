"""The dry run, which reports what a config needs from the machine."""

from collections.abc import Mapping
import dataclasses

from jax.sharding import Mesh

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.planning import aot
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import train_state


def _slice(mesh: Mesh) -> str:
  names = [str(device) for device in mesh.devices.flat]
  if len(names) > 4:
    names = [f"{len(names)} devices, {names[0]} to {names[-1]}"]
  return f"{', '.join(names)}   ({mesh_lib.shape_of(mesh)})"


def describe(setup: setup_lib.Setup) -> str:
  """Return the text that `--dry_run` prints; nothing is compiled."""
  return report(
    setup,
    models=device_checks.model_bytes(setup),
    training=device_checks.training_memory(setup),
    generation=device_checks.rollout_memory(setup),
  )


def programs(
  setup: setup_lib.Setup,
) -> tuple[dict[str, list[aot.Program]], str]:
  """Return the programs that a run on these devices compiles.

  Returns:
    The programs of each slice, and a description of the attention that they
    use.
  """
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  engine = assembly.make_engine(setup)
  slices = {
    "training": trainer.programs(),
    "rollout": engine.programs(trainer.engine_shapes()),
  }
  attention = f"packed rows {trainer.forward.attention}"
  return slices, f"{attention}, {engine.attention.description}"


def _lora(setup: setup_lib.Setup) -> list[str]:
  """Return lines that say what LoRA saves, none without LoRA."""
  model, section = setup.model, setup.config.model.lora
  if model.lora is None:
    return []
  whole = dataclasses.replace(setup, model=model.base)
  held, without = (
    device_checks.model_bytes(x)[train_state.POLICY] for x in (setup, whole)
  )
  version, _ = device_checks.published_bytes(setup)
  before, _ = device_checks.published_bytes(whole)
  trained = lora_lib.num_params(model)
  size = memory_estimate.size
  return [
    f"  LoRA             rank {section.rank} on"
    f" {', '.join(model.lora.modules)}: {trained:,} parameters are trained,"
    f" {100 * trained / model.num_params:.2g}%",
    f"    weights        {size(held.weights)} a device with a base of"
    f" {section.base_dtype}, instead of {size(without.weights)}",
    f"    moments        {size(held.optimizer)} a device instead of"
    f" {size(without.optimizer)}; gradients {size(held.gradients)} instead of"
    f" {size(without.gradients)}",
    f"    a version      {size(version)} are transferred instead of"
    f" {size(before)}",
  ]


def _active(model: configs.ModelConfig) -> str:
  """Return how many parameters a token uses, if these are not all."""
  if model.experts is None:
    return ""
  return f" {model.num_active_params:,} of them for each token,"


def report(
  setup: setup_lib.Setup,
  *,
  models: Mapping[str, memory_estimate.ModelBytes],
  training: memory_estimate.Estimate,
  generation: dict[str, int],
) -> str:
  """Return a text about the batch sizes, parameters, memory and devices.

  Args:
    setup: of the run.
    models: for each model of the train state, the bytes that it needs on each
      device.
    training: memory of each device of the training slice, including the models.
    generation: bytes of each device of the rollout slice, by their use.
  """
  config, model = setup.config, setup.model
  train_mesh, rollout_mesh = setup.train_mesh, setup.rollout_mesh
  algorithm, rollout, train = config.algorithm, config.rollout, config.train
  trajectories = algorithm.group_size * algorithm.groups_per_step
  longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
  microbatch = train.rows_per_microbatch * train.tokens_per_row
  per_minibatch = trajectories // algorithm.num_minibatches
  updates = algorithm.num_minibatches * algorithm.num_epochs
  max_groups = (algorithm.max_staleness + 1) * algorithm.groups_per_step
  lines = [
    "Batch",
    f"  a train step     {algorithm.groups_per_step} groups x"
    f" {algorithm.group_size} = {trajectories:,} trajectories,"
    f" at most {trajectories * longest:,} tokens",
    f"  an update        {per_minibatch:,} trajectories;"
    f" {updates} updates a step, {updates * train.num_steps:,} in the run",
    f"  a microbatch     {train.rows_per_microbatch} rows x"
    f" {train.tokens_per_row} = {microbatch:,} tokens; at most"
    f" {setup.max_microbatches} an update",
    f"  outstanding      at most {max_groups:,} groups ="
    f" {max_groups * algorithm.group_size:,} trajectories"
    f" (max_staleness {algorithm.max_staleness});"
    f" {rollout.num_slots} are decoded at once",
    f"  the run          {train.num_steps * trajectories:,} trajectories in"
    f" {train.num_steps} train steps",
    *_data(setup.source),
    "Model",
    f"  {config.model.name:<16} {model.num_params:,} parameters,"
    f"{_active(model)} vocabulary {model.vocab_size:,}",
    *_lora(setup),
    "Memory a device, estimated",
    f"  training slice   {memory_estimate.size(training.total)}:"
    f" {memory_estimate.line(training.parts)}",
    *_each(models),
    f"  rollout slice    {memory_estimate.size(sum(generation.values()))}:"
    f" {memory_estimate.line(generation)}",
    "Devices",
    f"  training slice   {_slice(train_mesh)}",
    f"  rollout slice    {_slice(rollout_mesh)}",
  ]
  if setup.shares_a_device:
    together = memory_estimate.size(training.total + sum(generation.values()))
    lines.append(f"  both slices share a device, with {together} together")
  return "\n".join(lines)


def _data(source: source_lib.Source) -> list[str]:
  """Return lines about the data, or none if the source does not tell."""
  if not isinstance(source, source_lib.Counted):
    return []
  lines = [f"  {line}" for line in source.describe()]
  return ["Data", *lines] if lines else []


def _each(models: Mapping[str, memory_estimate.ModelBytes]) -> list[str]:
  """Return a line for each model, or none if the policy is the only model."""
  if len(models) == 1:
    return []
  return [
    f"    {name:<14} {memory_estimate.size(sum(model.parts.values()))}:"
    f" {memory_estimate.line(model.parts)}"
    for name, model in models.items()
  ]
