"""From a config to the parts of a run: the one place that takes it apart."""

import dataclasses
from typing import Any

import jax

from jaxrl_async import config as config_lib
from jaxrl_async import metrics as metrics_lib
from jaxrl_async import progress as progress_lib
from jaxrl_async import prompts
from jaxrl_async import sft
from jaxrl_async import tokenizer as tokenizer_lib
from jaxrl_async import train_step
from jaxrl_async import trainer as trainer_lib
from jaxrl_async.models import configs
from jaxrl_async.rollout import engine as engine_lib


def model_config(
  config: config_lib.Config, vocab_size: int
) -> configs.ModelConfig:
  """The architecture of a run, with its tokenizer's vocabulary.

  Raises:
    ConfigError: there is no model of that name.
  """
  name = config.model.name
  if name not in configs.MODELS:
    raise config_lib.ConfigError(
      f"model.name: {name!r} does not exist; use one of"
      f" {', '.join(configs.MODELS)}"
    )
  return dataclasses.replace(configs.MODELS[name], vocab_size=vocab_size)


def forward_settings(
  config: config_lib.Config, model: configs.ModelConfig, temperature: float
) -> train_step.ForwardSettings:
  """The trainer's forward pass, at a temperature."""
  return train_step.ForwardSettings(
    model=model,
    compute_dtype=config.model.compute_dtype,
    remat=config.model.remat,
    temperature=temperature,
    vocab_chunk=config.train.vocab_chunk,
  )


def make_engine(
  config: config_lib.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  eos_id: int,
) -> engine_lib.Engine:
  """The engine of a run."""
  names = [field.name for field in dataclasses.fields(engine_lib.EngineSizes)]
  sizes = {name: getattr(config.rollout, name) for name in names}
  return engine_lib.Engine(
    model,
    engine_lib.EngineSizes(**sizes),
    mesh=mesh,
    seed=config.seed,
    end_tokens=(eos_id,),
    dtype=config.rollout.dtype,
  )


def make_trainer(
  config: config_lib.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  busy: metrics_lib.BusyClock,
) -> trainer_lib.Trainer:
  """The trainer of a run."""
  algorithm = config.algorithm
  return trainer_lib.Trainer(
    mesh=mesh,
    forward=forward_settings(config, model, config.rollout.temperature),
    loss=train_step.LossSettings(
      clip_low=algorithm.clip_low,
      clip_high=algorithm.clip_high,
      behavior_weight_cap=algorithm.behavior_weight_cap,
      cap_mode=algorithm.behavior_weight_cap_mode,
    ),
    batch=trainer_lib.BatchSettings(
      tokens_per_row=config.train.tokens_per_row,
      rows_per_microbatch=config.train.rows_per_microbatch,
      num_minibatches=algorithm.num_minibatches,
      advantage_scale=algorithm.advantage_scale,
    ),
    optimizer=config.train.optimizer,
    rollout_dtype=config.rollout.dtype,
    busy=busy,
  )


def warm_start(
  config: config_lib.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  tokenizer: tokenizer_lib.Tokenizer,
  progress: progress_lib.Progress,
) -> Any:
  """The first stage: parameters after supervised training, or fresh ones."""
  section = config.warm_start
  rows = None
  if section.num_steps:
    examples = prompts.worked_examples(
      config.task,
      section,
      tokenizer,
      seed=config.seed,
      max_prompt_tokens=config.rollout.max_prompt_tokens,
    )
    rows = sft.pack_examples(
      examples, tokens_per_row=config.train.tokens_per_row
    )
  return sft.warm_start(
    section,
    rows,
    params=None,
    mesh=mesh,
    forward=forward_settings(config, model, 1.0),
    seed=config.seed,
    on_step=lambda step, loss: progress.stage(
      "warm start", step, section.num_steps, f"loss {loss:.3f}"
    ),
  )
