"""Functions that build the parts of a run from its setup."""

from collections.abc import Callable
import contextlib
import dataclasses
import itertools
import pathlib

import jax

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import choice
from jaxrl_async.processes import world as world_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import wandb_log as wandb_log_lib
from jaxrl_async.rewards import reward_terms
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import named_episodes
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import episode as tool_episode
from jaxrl_async.training import example_rows
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import publishing
from jaxrl_async.training import sft
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib

# A run ends after so many batches of groups in a row that teach nothing. With
# small batches that may be bad luck, so it takes so many groups at least.
_FILTERED_BATCHES = 20
_MIN_FILTERED = 1_000


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
    attention=setup.attention
    or choice.for_training(
      config.train.attention,
      heads=(model.num_heads, model.num_kv_heads, model.head_dim),
      tokens_per_row=config.train.tokens_per_row,
      dtype=jax.numpy.dtype(config.model.compute_dtype),
      layout=layout,
      sliding_windows=model.windows_within(config.train.tokens_per_row),
      soft_cap=model.attention_soft_cap,
    ),
    temperature=temperature,
    vocab_chunk=config.train.vocab_chunk,
  )


def engine_sizes(config: sections.Config) -> decode_state_lib.EngineSizes:
  """Return the sizes of a replica's engine."""
  names = [
    field.name for field in dataclasses.fields(decode_state_lib.EngineSizes)
  ]
  return decode_state_lib.EngineSizes(
    **{name: getattr(config.rollout, name) for name in names}
  )


def make_engine(setup: setup_lib.Setup) -> engine_lib.Engine:
  """Build the engine of the rollout slice."""
  config = setup.config
  return engine_lib.Engine(
    setup.model,
    engine_sizes(config),
    mesh=setup.rollout_mesh,
    rules=config.mesh.rollout_rules,
    seed=config.seed,
    end_tokens=setup.tokenizer.end_tokens,
    dtype=config.rollout.dtype,
    weights=config.rollout.weights,
    attention=config.rollout.attention,
  )


def engine_with(
  setup: setup_lib.Setup, params: transformer.Params, version: int
) -> tuple[engine_lib.Engine, decode_state_lib.EngineParams]:
  """Return an engine and parameters in the format in which it takes them.

  Args:
    setup: its two meshes may share their devices.
    params: float32 with stacked layers, on the training mesh.
    version: the policy version of the parameters.
  """
  config = setup.config
  engine = make_engine(setup)
  publish = publishing.make_publish(
    setup.model,
    mesh_lib.Layout(mesh=setup.train_mesh, rules=config.mesh.train_rules),
    dtype=config.rollout.dtype,
    weights=config.rollout.weights,
  )
  return engine, engine.load_params(publish(params), version)


def coordinator_settings(
  config: sections.Config, *, has_own_loss: bool
) -> coordinator_settings_lib.CoordinatorSettings:
  """Return the settings that the coordinator needs.

  Args:
    config: a validated config.
    has_own_loss: whether a script has passed a loss, which may read everything.
  """
  budgets = budgets_lib.of_task(config.task)
  return coordinator_settings_lib.CoordinatorSettings(
    group_size=config.algorithm.group_size,
    max_completion_tokens=config.rollout.max_completion_tokens,
    max_tokens=config.rollout.cache_tokens,
    temperature=config.rollout.temperature,
    filter_zero_std=config.algorithm.filter_zero_std,
    reads_token_scores=has_own_loss
    or algorithm_lib.reads_token_scores(config.algorithm),
    max_failed_groups=config.task.max_failed_groups,
    max_filtered_groups=config.algorithm.max_filtered_groups
    or max(_MIN_FILTERED, _FILTERED_BATCHES * config.algorithm.groups_per_step),
    num_slots=config.rollout.num_slots,
    max_group_s=config.rollout.max_group_seconds,
    budgets=() if budgets is None else budgets.budgets,
    stop=config.rollout.stop,
    stop_token_ids=config.rollout.stop_token_ids,
  )


def make_environment(
  setup: setup_lib.Setup,
  episode: episode_lib.Episode | None,
  *,
  is_replay: bool = False,
) -> environment_lib.Environment:
  """Return the episodes of a run.

  Args:
    setup: of the run.
    episode: is used instead of what the config names.
    is_replay: no calls are made, because all of them are recorded.

  Raises:
    ConfigError: there is no such episode.
  """
  task = setup.config.task
  return environment_lib.Environment(
    episode or episode_of(task),
    tokenizer=setup.tokenizer,
    template=setup.chat_template,
    vocab_size=setup.model.vocab_size,
    temperature=setup.config.rollout.temperature,
    max_turns=task.max_turns,
    timeout_s=task.episode_timeout_s,
    num_workers=task.episode_workers,
    is_replay=is_replay,
  )


def episode_of(task: sections.TaskSection) -> episode_lib.Episode:
  """Return the episode that a config names, and import its module.

  Raises:
    ConfigError: there is none, it takes other params, or its tools need a
      sandbox and none works here.
  """
  params = fields_lib.plain(task)["episode_params"]
  try:
    episode = named_episodes.find(task.episode, params)
  except ValueError as error:
    raise sections.ConfigError(f"task.episode: {error}") from error
  if task.episode == "tools":
    tool_episode.check_sandbox(params)
  return episode


def answer_settings(
  config: sections.Config, samples: int
) -> questions_lib.AnswerSettings:
  """Return how the questions of an evaluation are answered.

  Args:
    config: a validated config.
    samples: answers to each question.
  """
  return questions_lib.AnswerSettings(
    samples=samples,
    temperature=config.eval.temperature,
    max_completion_tokens=config.rollout.max_completion_tokens,
    stop=config.rollout.stop,
    stop_token_ids=config.rollout.stop_token_ids,
  )


def make_scorers(
  task: sections.TaskSection,
  tokenizer: tokenizer_lib.Tokenizer,
  scorer: service_lib.Scorer | None = None,
) -> scoring.Scorers:
  """Return what the processes that score have to know.

  Args:
    task: of the run.
    tokenizer: of the policy.
    scorer: scores instead of what the task names.
  """
  return scoring.Scorers(
    terms=tuple(
      reward_terms.of_task(task)
      if scorer is None
      else [reward_terms.of_scorer(task, scorer)]
    ),
    answer_prefix=task.answer_prefix,
    tokenizer=tokenizer,
    budgets=budgets_lib.of_task(task),
  )


def make_wandb_log(
  config: sections.Config, workdir: pathlib.Path
) -> wandb_log_lib.WandbLog | None:
  """Return the run's log at W&B, or None if the config names no project."""
  if not config.run.wandb_project:
    return None
  return wandb_log_lib.WandbLog(
    workdir, config.run.wandb_project, fields_lib.plain(config)
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
    chat_template=setup.chat_template,
    evaluated=setup.evaluated,
    max_positions=setup.model.max_positions,
    tools=setup_lib.tools_of(config.task, setup.tokenizer, setup.chat_template),
  )


def make_scheduler(
  setup: setup_lib.Setup,
  engine: engine_lib.Engine,
  busy: metrics_lib.BusyClock,
) -> scheduler_lib.Scheduler:
  """Build the scheduler of a run."""
  return scheduler_lib.Scheduler(
    engine,
    kv_on_adopt=setup.config.rollout.kv_on_adopt,
    busy=busy,
  )


def make_trainer(
  setup: setup_lib.Setup,
  busy: metrics_lib.BusyClock,
  *,
  loss: objectives.Loss | None = None,
  world: world_lib.World | None = None,
) -> trainer_lib.Trainer:
  """Build the trainer of a run.

  Args:
    setup: of the run.
    busy: measures how long the training slice is busy.
    loss: the loss to minimise; None is the config's `algorithm.policy_loss`.
    world: the processes that train together; None is this one alone.
  """
  config = setup.config
  forward = forward_settings(setup, config.rollout.temperature)
  if world is not None:
    # A kernel is tried on the first device, which is one of process 0.
    world.tell("begin", attention=forward.attention)
  return trainer_lib.Trainer(
    mesh=setup.train_mesh,
    rules=config.mesh.train_rules,
    models=setup.models,
    forward=forward,
    loss=loss or algorithm_lib.policy_loss(config),
    stages=algorithm_lib.stages(setup),
    batch=packing.BatchSettings(
      tokens_per_row=config.train.tokens_per_row,
      rows_per_microbatch=config.train.rows_per_microbatch,
      num_minibatches=config.algorithm.num_minibatches,
      min_microbatches=setup.max_microbatches,
      advantages=algorithm_lib.advantages(
        config.algorithm,
        budgets=budgets_lib.of_task(config.task),
        longest=config.rollout.max_completion_tokens,
      ),
      fields=algorithm_lib.fields(config.algorithm),
      overlong_filter=config.algorithm.overlong_filter,
      num_epochs=config.algorithm.num_epochs,
    ),
    critic=config.critic if config.algorithm.advantage == "gae" else None,
    reference_every=config.algorithm.reference_every,
    reference_decay=config.algorithm.reference_decay,
    num_steps=config.train.num_steps,
    decay=config.train.decay,
    rollout_dtype=config.rollout.dtype,
    rollout_weights=config.rollout.weights,
    busy=busy,
    world=world,
  )


def make_supervised_trainer(
  setup: setup_lib.Setup,
  section: sections.WarmStartSection | sections.PreferenceSection,
  objective: sft.Objective = sft.NEXT_TOKEN,
) -> sft.SupervisedTrainer:
  """Build a trainer for supervised training.

  Args:
    setup: of the run. If its model has adapters, only these are trained, and
      a scalar head.
    section: number of steps, and the optimizer.
    objective: what is minimised.
  """
  config = setup.config
  policy = setup.models[train_state.POLICY]
  if setup.model.lora is not None and setup.model.has_scalar_head:
    policy = dataclasses.replace(policy, is_trainable=_is_adapter_or_head)
  return sft.SupervisedTrainer(
    section,
    objective=objective,
    mesh=setup.train_mesh,
    rules=config.mesh.train_rules,
    policy=dataclasses.replace(policy, optimizer=section.optimizer),
    forward=forward_settings(setup, 1.0),
    rows_per_microbatch=config.train.rows_per_microbatch,
    max_bad_updates=config.train.max_bad_updates,
    seed=config.seed,
  )


def _is_adapter_or_head(path: train_state.Path) -> bool:
  return path[0] == "scalar_head" or lora_lib.is_adapter(path)


def warm_start(
  setup: setup_lib.Setup,
  on_step: Callable[[int, float], None],
  note: Callable[[str], None] = lambda message: None,
) -> transformer.Params:
  """Run the first stage, supervised training, and return its parameters.

  The stage starts from the parameters of the pretrained model, or from newly
  initialised ones. If `warm_start.checkpoint` is set, the stage is skipped and
  its result is loaded from there. The stage trains the whole model. Adapters
  are added to its result; see `initial_params.with_adapters`.

  Args:
    setup: of the run.
    on_step: is called after each step with the step and its loss.
    note: is called with a message if worked solutions were too long.
  """
  section = setup.config.warm_start
  if section.checkpoint:
    return initial_params.load(section.checkpoint, setup)
  if not section.num_steps:
    return initial_params.before_training(setup)
  whole = dataclasses.replace(setup, model=setup.model.base)
  trainer = make_supervised_trainer(whole, section)
  tokens_per_row = setup.config.train.tokens_per_row
  examples = worked_examples_lib.WorkedExamples(
    prompt_source(setup), section, max_tokens=tokens_per_row
  )
  parts = example_rows.packed_ahead(examples, tokens_per_row=tokens_per_row)
  with contextlib.closing(parts):
    rows = example_rows.batches(
      parts, section.rows_per_batch, setup.config.seed
    )
    first = next(rows)
    trainer.start(initial_params.before_training(setup))
    params = sft.warm_start(
      trainer, itertools.chain([first], rows), section.num_steps, on_step
    )
  if examples.num_too_long:
    note(
      f"warm start: {examples.num_too_long:,} worked solutions longer than"
      f" {tokens_per_row:,} tokens (train.tokens_per_row) were left out"
    )
  return params
