"""Functions that build the parts of a run from its setup."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.coordination import transfer_directory
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.data import prompts
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.planning import aot
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.run import device_checks
from jaxrl_async.run import initial_params
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import sft
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib


def forward_settings(
  setup: setup_lib.Setup, temperature: float
) -> train_step.ForwardSettings:
  """Return the settings of the policy's forward pass on the training slice.

  Args:
    setup: of the run.
    temperature: the temperature that logprobs are computed at.

  Raises:
    ConfigError: the configured attention does not work on these devices.
  """
  config, model = setup.config, setup.model
  layout = mesh_lib.Layout(mesh=setup.train_mesh, rules=config.mesh.train_rules)
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


def make_engine(setup: setup_lib.Setup) -> engine_lib.Engine:
  """Build the engine of the rollout slice."""
  config = setup.config
  names = [
    field.name for field in dataclasses.fields(decode_state_lib.EngineSizes)
  ]
  sizes = {name: getattr(config.rollout, name) for name in names}
  return engine_lib.Engine(
    setup.model,
    decode_state_lib.EngineSizes(**sizes),
    mesh=setup.rollout_mesh,
    rules=config.mesh.rollout_rules,
    seed=config.seed,
    end_tokens=setup.tokenizer.end_tokens,
    dtype=config.rollout.dtype,
    weights=config.rollout.weights,
    attention=config.rollout.attention,
  )


def coordinator_settings(
  config: sections.Config,
) -> coordinator_lib.CoordinatorSettings:
  """Return the settings that the coordinator needs from a config."""
  return coordinator_lib.CoordinatorSettings(
    group_size=config.algorithm.group_size,
    max_completion_tokens=config.rollout.max_completion_tokens,
    max_tokens=config.rollout.cache_tokens,
    temperature=config.rollout.temperature,
    filter_zero_std=config.algorithm.filter_zero_std,
    max_failed_groups=config.task.max_failed_groups,
  )


def make_rewards(
  task: sections.TaskSection, scorer: service_lib.Scorer
) -> service_lib.RewardService:
  """Build the reward service of a run, which scores in processes."""
  return service_lib.RewardService(
    num_workers=task.reward_workers,
    timeout_s=task.reward_timeout_s,
    num_retries=task.reward_retries,
    answer_prefix=task.answer_prefix,
    scorer=scorer,
  )


def prompt_source(setup: setup_lib.Setup) -> prompts.PromptSource:
  """Return the source that makes the prompts of a run."""
  config = setup.config
  return prompts.PromptSource(
    items=setup.source,
    task=config.task,
    tokenizer=setup.tokenizer,
    seed=config.seed,
    max_prompt_tokens=config.rollout.max_prompt_tokens,
  )


def make_scheduler(
  setup: setup_lib.Setup,
  engine: engine_lib.Engine,
  busy: metrics_lib.BusyClock,
) -> scheduler_lib.Scheduler:
  """Build the scheduler of a run.

  All prompts share the tokens of the template's text before its first field.
  """
  config = setup.config
  beginning = config.task.template.split("{", 1)[0]
  return scheduler_lib.Scheduler(
    engine,
    kv_on_adopt=config.rollout.kv_on_adopt,
    shared_tokens=setup.tokenizer.encode_prompt(beginning),
    busy=busy,
  )


def make_channel(
  config: sections.Config,
  workdir: pathlib.Path,
  published: Any,
  engine: engine_lib.Engine,
  note: Callable[[str], None],
) -> weight_transfer.WeightChannel:
  """Build the channel that brings weights from the trainer to the engine.

  Args:
    config: a validated config.
    workdir: of the run.
    published: shapes and dtypes of the arrays that are published.
    engine: the engine that adopts them.
    note: is called with messages about what was found in the directory of the
      channel.
  """
  target = aot.placed(published, engine.params_sharding.weights)
  return weight_transfer.make_channel(
    config.transfer.channel,
    directory=transfer_directory.prepare(
      config.transfer, workdir, device_checks.num_bytes(target), note
    ),
    target=target,
    coalesce=config.algorithm.max_staleness > 0,
  )


def policy_loss(section: sections.AlgorithmSection) -> objectives.Loss:
  """Return the loss that the config selects, which is decoupled PPO."""
  return objectives.decoupled_ppo(
    proximal=objectives.PROXIMAL_MODES[section.proximal],
    clip_low=section.clip_low,
    clip_high=section.clip_high,
    behavior_weight_cap=section.behavior_weight_cap,
    cap_mode=section.behavior_weight_cap_mode,
  )


def make_trainer(
  setup: setup_lib.Setup,
  busy: metrics_lib.BusyClock,
  *,
  loss: objectives.Loss | None = None,
) -> trainer_lib.Trainer:
  """Build the trainer of a run.

  Args:
    setup: of the run.
    busy: measures how long the training slice is busy.
    loss: the loss to minimise; None is the config's `policy_loss`.
  """
  config = setup.config
  algorithm = config.algorithm
  return trainer_lib.Trainer(
    mesh=setup.train_mesh,
    rules=config.mesh.train_rules,
    models=setup.models,
    forward=forward_settings(setup, config.rollout.temperature),
    loss=loss or policy_loss(algorithm),
    stages=(
      [train_step.PROXIMAL_STAGE]
      if algorithm.proximal is sections.ProximalMode.RECOMPUTE
      else []
    ),
    batch=trainer_lib.BatchSettings(
      tokens_per_row=config.train.tokens_per_row,
      rows_per_microbatch=config.train.rows_per_microbatch,
      num_minibatches=algorithm.num_minibatches,
      min_microbatches=setup.max_microbatches,
      advantage_scale=algorithm.advantage_scale,
    ),
    num_steps=config.train.num_steps,
    decay=config.train.decay,
    rollout_dtype=config.rollout.dtype,
    rollout_weights=config.rollout.weights,
    busy=busy,
  )


def warm_start(
  setup: setup_lib.Setup, on_step: Callable[[int, float], None]
) -> transformer.Params:
  """Run the first stage, supervised training, and return its parameters.

  The stage starts from the parameters of the pretrained model, or from newly
  initialised ones. If `warm_start.checkpoint` is set, the stage is skipped and
  its result is loaded from there.

  Args:
    setup: of the run.
    on_step: is called after each step with the step and its loss.
  """
  config = setup.config
  section = config.warm_start
  if section.checkpoint:
    return initial_params.load(section.checkpoint, setup)
  rows = params = None
  if section.num_steps:
    max_tokens = config.train.tokens_per_row
    examples = prompts.worked_examples(
      prompt_source(setup), section, max_tokens=max_tokens
    )
    rows = sft.pack_examples(examples, tokens_per_row=max_tokens)
  if setup.pretrained is not None:
    params = initial_params.load_pretrained(
      "model.name", setup.pretrained, setup
    )
  return sft.warm_start(
    section,
    rows,
    params=params,
    mesh=setup.train_mesh,
    rules=config.mesh.train_rules,
    forward=forward_settings(setup, 1.0),
    rows_per_microbatch=config.train.rows_per_microbatch,
    max_bad_updates=config.train.max_bad_updates,
    seed=config.seed,
    on_step=on_step,
  )
