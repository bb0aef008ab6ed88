"""An evaluation of its own: every answer on disk, and a table at the end.

    OUTPUT/evaluation.json      what the answers depend on
    OUTPUT/completions/N.parquet  all answers to the questions of block N
    OUTPUT/results.json         the statistics

A block has a fixed number of questions, and its file is written when the last
of its answers has been scored. An evaluation that was stopped, in whatever way,
goes on with the blocks that have no file. The result is the same as without the
stop, because an answer depends on nothing but the weights and its numbers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import pathlib
import time
from typing import Any, NamedTuple

from ml_collections import config_dict

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import engine_sizes
from jaxrl_async.assembly import question_sets
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.evaluation import answer_results
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.models import hf_config
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import cut_scores
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import reward_terms
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import forced_answers
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.storage import columns
from jaxrl_async.storage import disk
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.types import FinishReason

SETTINGS = "evaluation.json"
RESULTS = "results.json"
COMPLETIONS = "completions"
_ANSWERS_PER_BLOCK = 256
_MAX_UNSCORED = 32  # in a row from the first one on: the reward does not fit
_SCHEMA = {
  "question": int,
  "sample": int,
  "prompt_id": str,
  "category": str,
  "prompt": str,
  "completion": str,
  "answer": str,
  "score": float,
  "parts": str,  # a JSON object
  "failure": str,
  "num_tokens": int,
  "finish_reason": str,
}
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
    budgets: `task.episode_params` of the episode budgets, with which answers
      are also measured after parts of their thoughts; {} are those of the
      policy's config, if it has that episode.
  """

  dataset: str = ""
  samples: int = 1
  num_items: int = 0
  category: str = ""
  given: Collection[str] = ()
  budgets: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Plan(NamedTuple):
  """What is asked, and what the answers depend on.

  Attributes:
    config: of the policy, with an engine that is large enough.
    prompts: of the questions.
    categories: of each question; all "" if there are no categories.
    settings: how the questions are answered.
    made_from: JSON of everything that the answers and their scores depend on.
  """

  config: sections.Config
  prompts: list[types.Prompt]
  categories: list[str]
  settings: questions_lib.AnswerSettings
  made_from: dict[str, Any]


def evaluate(
  checkpoint: str | pathlib.Path,
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
    checkpoint: directory of the policy, or hf:ORG/NAME of the hub.
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
    step = stored_settings(output).get("step")
  stored = stored_policy.find(checkpoint, step)
  if stored.kind is stored_policy.Kind.RUN and stored.step is None:
    stored = dataclasses.replace(stored, step=stored_policy.newest(stored))
  is_pretrained = stored.kind is stored_policy.Kind.PRETRAINED
  if is_pretrained and not wanted.dataset:
    raise sections.ConfigError(
      "dataset: missing; use for example --dataset=jsonl:test.jsonl"
    )
  stored = dataclasses.replace(stored, config=config)
  config = stored_policy.own_config(stored)
  stored = dataclasses.replace(stored, config=config)
  tokenizer = stored_policy.tokenizer(stored)
  plan = prepare(stored, wanted, tokenizer, is_cpu=devices[0].platform == "cpu")
  setup = setup_lib.on_all_devices(plan.config, devices, tokenizer=tokenizer)
  device_checks.check_sharding(setup)
  device_checks.check_weights(setup)
  engine_sizes.fit_slots(setup)
  _check_settings(output, plan.made_from)
  samples, blocks = plan.settings.samples, _blocks(output, plan)
  missing = {p: block for p, block in blocks.items() if not p.exists()}
  total = len(plan.prompts) * samples
  done = total - samples * sum(map(len, missing.values()))
  if done:
    progress.note(f"{done} of {total} answers are in {output} already")
  if missing:
    start_s, num_tokens = time.perf_counter(), 0
    text = f"stopped; the same command goes on with {output}"
    for answer in _write(
      stored, setup, plan, missing, lambda: stop.check(text)
    ):
      done += 1
      num_tokens += answer.trajectory.num_completion_tokens
      rate = num_tokens / (time.perf_counter() - start_s)
      progress.stage("answers", done, total, f"{rate:,.0f} tokens/s")
  records = []
  for path, block in blocks.items():
    records += _records(path, len(block) * samples)
  results = _results(plan, records)
  disk.replace_text(output / RESULTS, json.dumps(results, indent=2) + "\n")
  return results


def _write(
  stored: stored_policy.StoredPolicy,
  setup: setup_lib.Setup,
  plan: Plan,
  missing: dict[pathlib.Path, range],
  check: Callable[[], None],
) -> Iterator[answers_lib.Answer]:
  """Generate and score answers, write them to their files, and yield them."""
  tokenizer, task = setup.tokenizer, plan.config.task
  rewards = service_lib.RewardService(
    assembly.make_scorers(task, tokenizer), num_workers=task.reward_workers
  )
  environment = assembly.make_environment(setup, None)
  with contextlib.closing(rewards), _closing(environment, plan.config):
    rewards.warm_up()
    version, params = stored_policy.load(stored, setup)
    engine, engine_params = assembly.engine_with(setup, params, version)
    scheduler = assembly.make_scheduler(setup, engine, metrics_lib.BusyClock())
    scheduler.adopt(engine_params, version)
    file_of = {i: path for path, block in missing.items() for i in block}
    asked = questions_lib.of_set(
      task.dataset, plan.prompts, plan.settings, list(file_of)
    )
    answers = answers_lib.scored(
      answers_lib.write(scheduler, asked, tokenizer, environment),
      rewards=rewards,
      num_slots=engine.sizes.num_slots,
      check=check,
    )
    rows: dict[pathlib.Path, list[dict[str, Any]]] = {}
    num_scored = 0
    for count, answer in enumerate(answers, 1):
      check()
      num_scored += answer.failure is None
      if not num_scored and count == min(_MAX_UNSCORED, len(asked)):
        raise answers_lib.give_up(count, answer)
      path = file_of[answer.question.number]
      block = rows.setdefault(path, [])
      block.append(_row(plan, answer, tokenizer))
      if len(block) == len(missing[path]) * plan.settings.samples:
        block.sort(key=lambda row: (row["question"], row["sample"]))
        columns.write(path, rows.pop(path), _SCHEMA)
      yield answer


@contextlib.contextmanager
def _closing(
  environment: environment_lib.Environment, config: sections.Config
) -> Iterator[None]:
  try:
    yield
  finally:
    environment.close(config.run.join_timeout_s)


def _results(
  plan: Plan, records: list[answer_results.Record]
) -> dict[str, Any]:
  config, made_from = plan.config, plan.made_from
  budgets = budgets_lib.of_task(config.task)
  parts = {}
  if budgets is not None:
    parts = dict.fromkeys(map(cut_scores.part, budgets.budgets), True)
    parts |= {types.THOUGHT_TOKENS: False, cut_scores.THOUGHT_TRUNCATED: False}
  values = answer_results.by_question(
    records,
    len(plan.prompts),
    plan.settings.samples,
    solved_score=config.task.solved_score,
    parts=parts,
  )
  reward = "task.rewards" if config.task.rewards else "task.reward"
  about = ("step", "task.dataset", reward, "samples", "category", "questions")
  results = {name: made_from[name] for name in about} | {
    "prompts_too_long": made_from["prompts_too_long"],
    "answers": len(records),
    "failed_scores": sum(record.score is None for record in records),
    "results": answer_results.with_intervals(values, config.seed),
  }
  if budgets is not None:
    names = [*map(cut_scores.part, budgets.budgets), "pass@1"]
    results["curve"] = {
      "budgets": [*budgets.budgets, config.rollout.max_completion_tokens],
      "accuracy": [results["results"][name]["mean"] for name in names],
    }
  if any(plan.categories):
    results["by_category"] = answer_results.by_category(
      values, plan.categories, config.seed
    )
  return results


# -- what is asked ----------------------------------------------------------


def prepare(
  stored: stored_policy.StoredPolicy,
  wanted: Wanted,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  is_cpu: bool,
) -> Plan:
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
  if wanted.budgets:
    _set_budgets(config, wanted.budgets)
  assembly.episode_of(config.task)
  terms = reward_terms.of_task(config.task)
  reward_terms.try_out(terms)
  questions = _questions(config, wanted, tokenizer)
  reward_terms.check_prompts(terms, questions.prompts)
  categories = _categories(questions.prompts, wanted.category)
  longest = max(len(prompt.tokens) for prompt in questions.prompts)
  _fit(stored, config, wanted.given, longest, is_cpu)
  config_checks.check(config)
  forced_answers.check(config, tokenizer)
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
  return Plan(
    config=config,
    prompts=questions.prompts,
    categories=categories,
    settings=assembly.answer_settings(config, wanted.samples),
    made_from=made_from,
  )


def _set_budgets(config: sections.Config, params: Mapping[str, Any]) -> None:
  """Let answers be measured by budgets.

  What is not given is as in the policy's own config.
  """
  task = config.task
  sections.require(
    task.episode in ("", budgets_lib.EPISODE),
    "budgets",
    "they cut answers of a single turn, and task.episode is"
    f" {sections.shown(task.episode)}; leave one of them out",
  )
  own = fields_lib.plain(task)["episode_params"] if task.episode else {}
  sections.require(
    "end" in {**own, **params},
    "end",
    "missing: the text with which a thought ends, such as --end='</think>'",
  )
  task.episode = budgets_lib.EPISODE
  task.episode_params = config_dict.ConfigDict({**own, **params})
  # Nothing is trained, but every config is checked for both sides.
  config.algorithm.advantage = "segment"
  config.algorithm.advantage_scale = sections.AdvantageScale.NONE


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
  """Return the category of each question, as text."""
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
      most = hf_config.max_positions(stored.directory) or 2**31
      most = max(1, min(_COMPLETION_TOKENS, most - longest))
      rollout.max_completion_tokens = most
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


# -- what is on disk --------------------------------------------------------


def stored_settings(output: pathlib.Path) -> dict[str, Any]:
  """Return what the answers in a directory depend on; nothing without any.

  Raises:
    ConfigError: the directory holds something else.
  """
  path = output / SETTINGS
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    sections.require(
      not (output / COMPLETIONS).exists(),
      "output",
      f"{output} has {COMPLETIONS}, but no {SETTINGS}; use an empty directory",
    )
    return {}
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"output: {path} cannot be read") from error


def _check_settings(output: pathlib.Path, made_from: dict[str, Any]) -> None:
  """Write what an evaluation depends on, or compare it with what is there."""
  stored = stored_settings(output)
  if not stored:
    path = output / SETTINGS
    with disk.writing(path):
      output.mkdir(parents=True, exist_ok=True)
    disk.replace_text(path, json.dumps(made_from, indent=2) + "\n")
    return
  for name in sorted(stored.keys() | made_from.keys()):
    before, now = stored.get(name), made_from.get(name)
    sections.require(
      before == now,
      "output",
      f"{output} holds another evaluation, with {name} {sections.shown(before)}"
      f" and not {sections.shown(now)}; use another directory",
    )


def _blocks(output: pathlib.Path, plan: Plan) -> dict[pathlib.Path, range]:
  """Return the numbers of the questions in each file of answers."""
  total = len(plan.prompts)
  size = -(-_ANSWERS_PER_BLOCK // plan.settings.samples)
  return {
    output / COMPLETIONS / f"{first // size:06}.parquet": range(
      first, min(first + size, total)
    )
    for first in range(0, total, size)
  }


def _records(path: pathlib.Path, num_rows: int) -> list[answer_results.Record]:
  """Return what counts of every answer in a file."""
  try:
    rows = columns.read(path)
    if len(rows) != num_rows:
      raise ValueError(f"{path} has {len(rows)} rows")
  except (OSError, ValueError) as error:
    raise sections.ConfigError(
      f"output: {error}; remove the file, and start again"
    ) from error
  return [
    answer_results.Record(
      question=row["question"],
      score=row["score"],
      num_tokens=row["num_tokens"],
      is_truncated=row["finish_reason"] == FinishReason.LENGTH,
      answer=row["answer"],
      parts=json.loads(row["parts"]),
    )
    for row in rows
  ]


def _row(
  plan: Plan, answer: answers_lib.Answer, tokenizer: tokenizer_lib.Tokenizer
) -> dict[str, Any]:
  (_, number, sample, prompt, _), trajectory, failure, _ = answer
  completion = completion_lib.of_trajectory(answer.completed, tokenizer)
  reward, text = trajectory.reward, completion.text
  if reward is None:
    extracted = extraction.extract_answer(text, plan.config.task.answer_prefix)
  else:
    extracted = reward.answer
  return {
    "question": number,
    "sample": sample,
    "prompt_id": prompt.prompt_id,
    "category": plan.categories[number],
    "prompt": tokenizer.decode(prompt.tokens),
    "completion": text,
    "answer": extracted,
    "score": None if reward is None else float(reward.score),
    "parts": json.dumps({} if reward is None else dict(reward.parts)),
    "failure": failure and failure.reason,
    "num_tokens": answer.completed.num_completion_tokens,
    "finish_reason": completion.finish_reason.value,
  }
