"""From a config to the parts of a run."""

from collections.abc import Callable, Sequence
import dataclasses
import os
import pathlib
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.coordination import transfer_directory
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.planning import aot
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import worker as worker_lib
from jaxrl_async.run import config_checks
from jaxrl_async.run import device_checks
from jaxrl_async.run import dry_run
from jaxrl_async.run import initial_params
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import sft
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib


def _published(config: sections.Config) -> pathlib.Path | None:
  """The directory of a published model, if `model.name` names one."""
  name = config.model.name  # os.path takes any, where pathlib may raise
  is_directory = name not in configs.MODELS and os.path.isdir(name)
  return pathlib.Path(name) if is_directory else None


def load_tokenizer(config: sections.Config) -> tokenizer_lib.Tokenizer:
  """The published model's tokenizer; without one, a token a character.

  Raises:
    ConfigError: the directory has no tokenizer that can be used.
  """
  directory = _published(config)
  if directory is None:
    return tokenizer_lib.character_level()
  try:
    return tokenizer_lib.load(directory)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"model.name: {error}") from error


def model_config(
  config: sections.Config, vocab_size: int
) -> configs.ModelConfig:
  """The architecture of a run, with its tokenizer's vocabulary.

  A published model keeps its own, which may be larger, and so does one of
  ours that has the shapes of a published one.

  Raises:
    ConfigError: there is no model of that name, or not one of ours.
  """
  name = config.model.name
  if name in configs.MODELS:
    model = configs.MODELS[name]
    return dataclasses.replace(
      model, vocab_size=max(model.vocab_size, vocab_size)
    )
  directory = _published(config)
  if directory is None:
    raise sections.ConfigError(
      f"model.name: {sections.shown(name)} does not exist; use one of"
      f" {', '.join(configs.MODELS)}, or a directory in Hugging Face's format"
    )
  try:
    model = hf_config.model_config(directory)
    hf_config.check_vocabulary(directory, model, vocab_size)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"model.name: {error}") from error
  return model


def forward_settings(
  config: sections.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  temperature: float,
) -> train_step.ForwardSettings:
  """The trainer's forward pass over a mesh, at a temperature.

  Raises:
    ConfigError: its attention does not work there.
  """
  layout = mesh_lib.Layout(mesh=mesh, rules=config.mesh.train_rules)
  return train_step.ForwardSettings(
    model=model,
    compute_dtype=config.model.compute_dtype,
    remat=config.model.remat,
    attention=packed_attention.choose(
      config.train.attention,
      num_heads=model.num_heads,
      num_kv_heads=model.num_kv_heads,
      head_dim=model.head_dim,
      tokens_per_row=config.train.tokens_per_row,
      dtype=jax.numpy.dtype(config.model.compute_dtype),
      layout=layout,
    ),
    temperature=temperature,
    vocab_chunk=config.train.vocab_chunk,
  )


def make_engine(
  config: sections.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  end_tokens: tuple[int, ...],
) -> engine_lib.Engine:
  """The engine of a run."""
  names = [
    field.name for field in dataclasses.fields(decode_state_lib.EngineSizes)
  ]
  sizes = {name: getattr(config.rollout, name) for name in names}
  return engine_lib.Engine(
    model,
    decode_state_lib.EngineSizes(**sizes),
    mesh=mesh,
    rules=config.mesh.rollout_rules,
    seed=config.seed,
    end_tokens=end_tokens,
    dtype=config.rollout.dtype,
    weights=config.rollout.weights,
    attention=config.rollout.attention,
  )


def worker_settings(config: sections.Config) -> worker_lib.WorkerSettings:
  """What the rollout worker needs of a config."""
  return worker_lib.WorkerSettings(
    group_size=config.algorithm.group_size,
    max_completion_tokens=config.rollout.max_completion_tokens,
    temperature=config.rollout.temperature,
    filter_zero_std=config.algorithm.filter_zero_std,
    max_failed_groups=config.task.max_failed_groups,
  )


def make_rewards(
  task: sections.TaskSection, scorer: service_lib.Scorer
) -> service_lib.RewardService:
  """The scoring processes of a run."""
  return service_lib.RewardService(
    num_workers=task.reward_workers,
    timeout_s=task.reward_timeout_s,
    num_retries=task.reward_retries,
    answer_prefix=task.answer_prefix,
    scorer=scorer,
  )


def item_source(config: sections.Config) -> source_lib.Source:
  """The source of a run's items."""
  return gym.ReasoningGym(
    name=config.task.dataset,
    params=config.task.params.to_dict(),
    seed=config.seed,
  )


def prompt_source(
  config: sections.Config, tokenizer: tokenizer_lib.Tokenizer
) -> prompts.PromptSource:
  """Where the prompts of a run come from."""
  return prompts.PromptSource(
    items=item_source(config),
    task=config.task,
    tokenizer=tokenizer,
    seed=config.seed,
    max_prompt_tokens=config.rollout.max_prompt_tokens,
  )


def make_scheduler(
  config: sections.Config,
  engine: engine_lib.Engine,
  tokenizer: tokenizer_lib.Tokenizer,
  busy: metrics_lib.BusyClock,
) -> scheduler_lib.Scheduler:
  """The scheduler of a run; what its template begins with is shared."""
  beginning = config.task.template.split("{", 1)[0]
  return scheduler_lib.Scheduler(
    engine,
    kv_on_adopt=config.rollout.kv_on_adopt,
    shared_tokens=tokenizer.encode_prompt(beginning),
    busy=busy,
  )


def make_channel(
  config: sections.Config,
  workdir: pathlib.Path,
  published: Any,
  engine: engine_lib.Engine,
  note: Callable[[str], None],
) -> weight_transfer.WeightChannel:
  """The channel of a run, for arrays of the shapes and types `published`."""
  target = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    published,
    engine.params_sharding.weights,
  )
  return weight_transfer.make_channel(
    config.transfer.channel,
    directory=transfer_directory.prepare(
      config.transfer, workdir, device_checks.num_bytes(target), note
    ),
    target=target,
    coalesce=config.algorithm.max_staleness > 0,
  )


def _microbatches(config: sections.Config) -> int:
  """Of a minibatch of the longest trajectories."""
  algorithm, rollout = config.algorithm, config.rollout
  return packing.expected_microbatches(
    algorithm.group_size
    * algorithm.groups_per_step
    // algorithm.num_minibatches,
    max_tokens=rollout.max_prompt_tokens + rollout.max_completion_tokens,
    tokens_per_row=config.train.tokens_per_row,
    rows_per_microbatch=config.train.rows_per_microbatch,
  )


def make_trainer(
  config: sections.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  busy: metrics_lib.BusyClock,
) -> trainer_lib.Trainer:
  """The trainer of a run."""
  algorithm = config.algorithm
  return trainer_lib.Trainer(
    mesh=mesh,
    rules=config.mesh.train_rules,
    forward=forward_settings(config, model, mesh, config.rollout.temperature),
    loss=objectives.decoupled_ppo(
      proximal=objectives.PROXIMAL_MODES[algorithm.proximal],
      clip_low=algorithm.clip_low,
      clip_high=algorithm.clip_high,
      behavior_weight_cap=algorithm.behavior_weight_cap,
      cap_mode=algorithm.behavior_weight_cap_mode,
    ),
    stages=(
      [train_step.PROXIMAL_STAGE]
      if algorithm.proximal is sections.ProximalMode.RECOMPUTE
      else []
    ),
    batch=trainer_lib.BatchSettings(
      tokens_per_row=config.train.tokens_per_row,
      rows_per_microbatch=config.train.rows_per_microbatch,
      num_minibatches=algorithm.num_minibatches,
      min_microbatches=_microbatches(config),
      advantage_scale=algorithm.advantage_scale,
    ),
    optimizer=config.train.optimizer,
    num_steps=config.train.num_steps,
    decay=config.train.decay,
    rollout_dtype=config.rollout.dtype,
    rollout_weights=config.rollout.weights,
    busy=busy,
  )


def warm_start(
  config: sections.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  tokenizer: tokenizer_lib.Tokenizer,
  on_step: Callable[[int, float], None],
) -> Any:
  """The first stage: parameters after supervised training, or without it.

  They are fresh before it, or those of the published model.
  """
  section = config.warm_start
  shardings = initial_params.shardings(config, model, mesh)
  if section.checkpoint:
    return initial_params.load(section.checkpoint, model, shardings)
  published = _published(config)
  rows = None
  if section.num_steps:
    source = prompt_source(config, tokenizer)
    max_tokens = config.train.tokens_per_row
    examples = prompts.worked_examples(source, section, max_tokens=max_tokens)
    rows = sft.pack_examples(examples, tokens_per_row=max_tokens)
  return sft.warm_start(
    section,
    rows,
    params=published
    and initial_params.load_published(
      "model.name", published, model, shardings
    ),
    mesh=mesh,
    rules=config.mesh.train_rules,
    forward=forward_settings(config, model, mesh, 1.0),
    rows_per_microbatch=config.train.rows_per_microbatch,
    max_bad_updates=config.train.max_bad_updates,
    seed=config.seed,
    on_step=on_step,
  )


def training_memory(
  config: sections.Config, model: configs.ModelConfig, devices: Sequence[Any]
) -> memory_estimate.Estimate:
  """What the training slice needs of a device, before anything compiles."""
  mesh, _ = cut_devices(config, devices)
  return device_checks.training_memory(
    config, model, mesh, microbatches=_microbatches(config)
  )


def check(config: sections.Config, devices: Sequence[Any]) -> None:
  """Checks what `config_checks` cannot: names, sizes, data and template.

  Quantised weights are tried out on a rollout device, if it is there; else
  nothing compiles.

  Raises:
    ConfigError: one line that names the field.
  """
  item_source(config).check()  # begins to import its library
  tokenizer = load_tokenizer(config)
  model = model_config(config, tokenizer.vocab_size)
  train_mesh, rollout_mesh = cut_devices(config, devices)
  device_checks.check_sharding(config, model, len(devices))
  device_checks.check_weights(config.rollout.weights, rollout_mesh)
  device_checks.check_training_memory(
    config, training_memory(config, model, devices), train_mesh
  )
  device_checks.check_rollout_memory(config, model, rollout_mesh)
  source = prompt_source(config, tokenizer)
  prompts.validate_task(source)
  if config.warm_start.num_steps and not config.warm_start.checkpoint:
    prompts.validate_warm_start(
      source, config.warm_start, max_tokens=config.train.tokens_per_row
    )


def cut_devices(
  config: sections.Config, devices: Sequence[Any]
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Train and rollout mesh.

  Raises:
    ConfigError: a mesh would have chips of two TPU slices.
  """
  train, rollout = config_checks.slice_shapes(config.mesh, len(devices))
  meshes = mesh_lib.cut_devices(
    devices, train_shape=train, rollout_shape=rollout
  )
  for side, mesh in zip(("train", "rollout"), meshes, strict=True):
    sections.require(
      len(set(mesh.devices.flat)) == mesh.size,
      f"mesh.{side}_data",
      f"the {side} slice would have chips of two TPU slices; give each mesh the"
      " chips of one",
    )
  return meshes


def describe(config: sections.Config, devices: Sequence[Any]) -> str:
  """What `--dry_run` prints: sizes, memory and devices; compiles nothing.

  Except for a small product, where weights are to be quantised.

  Raises:
    ConfigError: as a run would.
  """
  check(config, devices)
  model = model_config(config, load_tokenizer(config).vocab_size)
  train_mesh, rollout_mesh = cut_devices(config, devices)
  return dry_run.report(
    config,
    model,
    training=training_memory(config, model, devices),
    published_bytes=device_checks.published_bytes(config, model),
    train_mesh=train_mesh,
    rollout_mesh=rollout_mesh,
  )


def programs(
  config: sections.Config, devices: Sequence[Any]
) -> tuple[dict[str, list[aot.Program]], str]:
  """What a run on these devices compiles, by slice.

  Returns:
    And which attention they take.
  """
  tokenizer = load_tokenizer(config)
  model = model_config(config, tokenizer.vocab_size)
  train_mesh, rollout_mesh = cut_devices(config, devices)
  trainer = make_trainer(config, model, train_mesh, metrics_lib.BusyClock())
  engine = make_engine(config, model, rollout_mesh, tokenizer.end_tokens)
  slices = {
    "training": trainer.programs(),
    "rollout": engine.programs(trainer.published_shapes()),
  }
  attention = f"packed rows {trainer.forward.attention}"
  return slices, f"{attention}, {engine.attention.description}"
