"""What a config asks of the machine, before anything compiles."""

from jax.sharding import Mesh

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.planning import memory_estimate


def _slice(mesh: Mesh) -> str:
  names = [str(device) for device in mesh.devices.flat]
  if len(names) > 4:
    names = [f"{len(names)} devices, {names[0]} to {names[-1]}"]
  return f"{', '.join(names)}   ({mesh_lib.shape_of(mesh)})"


def report(
  config: sections.Config,
  model: configs.ModelConfig,
  *,
  training: memory_estimate.Estimate,
  published_bytes: int,
  train_mesh: Mesh,
  rollout_mesh: Mesh,
) -> str:
  """The batch arithmetic, parameters, memory and devices, as a text.

  Args:
    config: validated.
    model: with the tokenizer's vocabulary.
    training: memory of the training slice.
    published_bytes: of the engine's weights, before they are sharded.
    train_mesh: of the training slice.
    rollout_mesh: of the rollout slice.
  """
  algorithm, rollout, train = config.algorithm, config.rollout, config.train
  trajectories = algorithm.group_size * algorithm.groups_per_step
  longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
  microbatch = train.rows_per_microbatch * train.tokens_per_row
  per_minibatch = trajectories // algorithm.num_minibatches
  # Rows that are packed whole: a row holds at least this many of the longest.
  per_row = train.tokens_per_row // longest
  max_rows = -(-per_minibatch // per_row)
  max_groups = (algorithm.max_staleness + 1) * algorithm.groups_per_step
  generation = memory_estimate.rollout(
    model,
    mesh_lib.shape_of(rollout_mesh),
    config.mesh.rollout_rules,
    rollout,
    published=published_bytes,
  )
  lines = [
    "Batch",
    f"  a train step     {algorithm.groups_per_step} groups x"
    f" {algorithm.group_size} = {trajectories:,} trajectories,"
    f" at most {trajectories * longest:,} tokens",
    f"  an update        {per_minibatch:,} trajectories;"
    f" {algorithm.num_minibatches} updates a step,"
    f" {algorithm.num_minibatches * train.num_steps:,} in the run",
    f"  a microbatch     {train.rows_per_microbatch} rows x"
    f" {train.tokens_per_row} = {microbatch:,} tokens; at most"
    f" {-(-max_rows // train.rows_per_microbatch)} an update",
    f"  outstanding      at most {max_groups:,} groups ="
    f" {max_groups * algorithm.group_size:,} trajectories"
    f" (max_staleness {algorithm.max_staleness});"
    f" {rollout.num_slots} are decoded at once",
    f"  the run          {train.num_steps * trajectories:,} trajectories in"
    f" {train.num_steps} train steps",
    "Model",
    f"  {config.model.name:<16} {model.num_params:,} parameters,"
    f" vocabulary {model.vocab_size:,}",
    "Memory a device, estimated",
    f"  training slice   {memory_estimate.size(training.total)}:"
    f" {memory_estimate.line(training.parts)}",
    f"  rollout slice    {memory_estimate.size(sum(generation.values()))}:"
    f" {memory_estimate.line(generation)}",
    "Devices",
    f"  training slice   {_slice(train_mesh)}",
    f"  rollout slice    {_slice(rollout_mesh)}",
  ]
  if train_mesh.size == 1 and train_mesh == rollout_mesh:
    lines.append("  both slices share a device")
  return "\n".join(lines)
