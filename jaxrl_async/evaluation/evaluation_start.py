"""Prepares and starts an evaluation of its own: policy, questions, engine."""

from collections.abc import Collection, Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import engine_sizes
from jaxrl_async.assembly import question_sets
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.evaluation import evaluation
from jaxrl_async.models import hf_config
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import reward_terms
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.storage import model_files
from jaxrl_async.text import tokenizer as tokenizer_lib

_COMPLETION_TOKENS = 1_024  # for a pretrained model, unless it can hold fewer
_SLOTS = 64  # for a pretrained model, unless the memory is too small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
  """What the caller asks for.

  Attributes:
    dataset: as `task.dataset`; "" means the held-out questions of a run.
    samples: answers to each question.
    num_items: number of questions; 0 is all of a dataset of rows, and otherwise
      as many as by default.
    category: the column of a row that names its category; "" for none.
    given: paths of the settings that the caller has chosen. They are not fitted
      to the questions.
  """

  dataset: str = ""
  samples: int = 1
  num_items: int = 0
  category: str = ""
  given: Collection[str] = ()


def evaluate(
  checkpoint: pathlib.Path,
  step: int | None,
  config: sections.Config,
  wanted: Wanted,
  output: pathlib.Path,
  devices: Sequence[Any],
  *,
  progress: progress_lib.Progress,
  stop: supervisor_lib.StopRequest,
) -> dict[str, Any]:
  """Begin or continue an evaluation, and return its results.

  Args:
    checkpoint: directory of the policy.
    step: train step of a run's checkpoint. None is that of the evaluation in
      `output`, if there is one, and otherwise the newest.
    config: of the policy, with the caller's changes.
    wanted: what the caller asks for.
    output: directory of the evaluation, which belongs to this process.
    devices: all of them generate.
    progress: shows how far the evaluation is.
    stop: the stop request, which a signal sets.

  Raises:
    ConfigError: one line that names the flag or the field.
    Interrupted: the evaluation was asked to stop. It can be continued.
    EvaluationError: none of the first answers could be scored.
    StorageError: a file could not be written.
  """
  if step is None:
    step = evaluation.stored_settings(output).get("step")
  stored = stored_policy.find(checkpoint, step)
  if stored.kind is stored_policy.Kind.RUN and stored.step is None:
    stored = dataclasses.replace(stored, step=stored_policy.newest(stored))
  is_pretrained = stored.kind is stored_policy.Kind.PRETRAINED
  if is_pretrained and not wanted.dataset:
    raise sections.ConfigError(
      "dataset: missing; use for example --dataset=jsonl:test.jsonl"
    )
  stored = dataclasses.replace(stored, config=config)
  tokenizer = stored_policy.tokenizer(stored)
  plan = prepare(stored, wanted, tokenizer, is_cpu=devices[0].platform == "cpu")
  setup = setup_lib.on_all_devices(plan.config, devices, tokenizer=tokenizer)
  device_checks.check_sharding(setup)
  device_checks.check_weights(setup)
  engine_sizes.fit_slots(setup)
  rewards = service_lib.RewardService(
    assembly.make_scorers(plan.config.task, tokenizer),
    num_workers=plan.config.task.reward_workers,
  )

  def scheduler() -> scheduler_lib.Scheduler:
    version, params = stored_policy.load(stored, setup)
    engine, engine_params = assembly.engine_with(setup, params, version)
    made = assembly.make_scheduler(setup, engine, metrics_lib.BusyClock())
    made.adopt(engine_params, version)
    return made

  with contextlib.closing(rewards):
    return evaluation.run(
      plan,
      output,
      scheduler,
      tokenizer=tokenizer,
      rewards=rewards,
      progress=progress,
      stop=stop,
    )


def prepare(
  stored: stored_policy.StoredPolicy,
  wanted: Wanted,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  is_cpu: bool,
) -> evaluation.Plan:
  """Return the plan of an evaluation.

  The engine is made large enough for the questions, unless its sizes are given.

  Args:
    stored: the policy, with the config that the caller wants. Its step is that
      of the checkpoint.
    wanted: what the caller asks for.
    tokenizer: of the policy.
    is_cpu: whether the devices are those of the host.

  Raises:
    ConfigError: one line that names the flag or the field.
  """
  config = stored.config
  if wanted.dataset:
    config = question_sets.task_of(config, wanted.dataset)
    is_default = "task.reward" not in wanted.given
    if is_default and question_sets.is_of_rows(wanted.dataset):
      has_default = config.task.reward == sections.TaskSection().reward
      if has_default and not config.task.rewards:
        config.task.reward = "mathematics"
  sections.require(
    wanted.samples == 1 or config.eval.temperature > 0,
    "samples",
    f"{wanted.samples} greedy answers are all the same; use 1, or"
    " --config.eval.temperature=1.0",
  )
  terms = reward_terms.of_task(config.task)
  reward_terms.try_out(terms)
  questions = _questions(config, wanted, tokenizer)
  reward_terms.check_prompts(terms, questions.prompts)
  categories = _categories(questions.prompts, wanted.category)
  longest = max(len(prompt.tokens) for prompt in questions.prompts)
  _fit(stored, config, wanted.given, longest, is_cpu)
  config_checks.check(config)
  made_from = {
    "weights": stored_policy.identity(stored, stored.step or 0),
    "step": stored.step,
    "tokenizer": tokenizer.digest(),
    "versions": questions.versions,
    "questions": len(questions.prompts),
    "prompts_too_long": questions.num_too_long,
    "samples": wanted.samples,
    "category": wanted.category,
  }
  for field in fields_lib.walk(config):
    if field.known.of_answers:
      made_from[field.path] = fields_lib.plain(field.value)
  return evaluation.Plan(
    config=config,
    prompts=questions.prompts,
    categories=categories,
    settings=assembly.answer_settings(config, wanted.samples),
    made_from=made_from,
  )


def _questions(
  config: sections.Config,
  wanted: Wanted,
  tokenizer: tokenizer_lib.Tokenizer,
) -> question_sets.Questions:
  most = config.rollout.max_prompt_tokens
  if not wanted.dataset:
    return question_sets.held_out_of(
      config, tokenizer, num_items=wanted.num_items or config.eval.num_items
    )
  if "rollout.max_prompt_tokens" not in wanted.given:
    most = question_sets.ANY_LENGTH
  return question_sets.read(
    config, tokenizer, num_items=wanted.num_items, max_prompt_tokens=most
  )


def _categories(prompts: list[types.Prompt], column: str) -> list[str]:
  """Return the category of each question, as text.

  Raises:
    ConfigError: a question has no such column.
  """
  if not column:
    return [""] * len(prompts)
  found = []
  for prompt in prompts:
    fields = {**prompt.item, **prompt.item.get("metadata", {})}
    sections.require(
      column in fields,
      "category",
      f"{prompt.prompt_id} has no column {column!r}"
      f"{sections.did_you_mean(column, map(str, fields))}",
    )
    found.append(str(fields[column]))
  return found


def _fit(
  stored: stored_policy.StoredPolicy,
  config: sections.Config,
  given: Collection[str],
  longest: int,
  is_cpu: bool,
) -> None:
  """Size the engine for prompts of up to `longest` tokens, where it is free."""
  rollout = config.rollout
  is_pretrained = stored.kind is stored_policy.Kind.PRETRAINED

  def is_free(name: str) -> bool:
    return f"rollout.{name}" not in given

  if is_free("max_prompt_tokens"):
    smallest = 1 if is_pretrained else rollout.max_prompt_tokens
    rollout.max_prompt_tokens = max(smallest, longest)
  if is_pretrained:
    if is_free("max_completion_tokens"):
      settings = model_files.read_optional(
        stored.directory / hf_config.CONFIG_FILE
      )
      most = settings.get("max_position_embeddings", 2**31) - longest
      rollout.max_completion_tokens = max(1, min(_COMPLETION_TOKENS, most))
    if is_free("num_slots"):
      rollout.num_slots = _SLOTS
    if is_free("dtype") and not is_cpu:
      rollout.dtype = "bfloat16"
  needed = rollout.max_prompt_tokens + rollout.max_completion_tokens
  has_room = rollout.cache_tokens >= needed
  if is_free("cache_tokens") and (is_pretrained or not has_room):
    engine_sizes.set_cache_tokens(rollout, needed)
  # Nothing is trained, but every config is checked for both sides.
  row = config.train.tokens_per_row
  config.train.tokens_per_row = max(row, rollout.cache_tokens)
