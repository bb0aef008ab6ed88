"""An evaluation of its own: every answer on disk, and a table at the end.

    OUTPUT/evaluation.json      what the answers depend on
    OUTPUT/completions/N.parquet  all answers to the questions of block N
    OUTPUT/results.json         the statistics

A block has a fixed number of questions, and its file is written when the last
of its answers has been scored. An evaluation that was stopped, in whatever way,
goes on with the blocks that have no file. The result is the same as without the
stop, because an answer depends on nothing but the weights and its numbers.
"""

from collections.abc import Callable
import json
import pathlib
import time
from typing import Any, NamedTuple

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.evaluation import answer_results
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import service as service_lib
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
  """Return what counts of every answer in a file.

  Raises:
    ConfigError: the file is damaged or missing.
  """
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
    )
    for row in rows
  ]


def _row(
  plan: Plan, answer: answers_lib.Answer, tokenizer: tokenizer_lib.Tokenizer
) -> dict[str, Any]:
  (_, number, sample, prompt, _), trajectory, failure = answer
  completion = completion_lib.of_trajectory(trajectory, tokenizer)
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
    "num_tokens": trajectory.num_completion_tokens,
    "finish_reason": completion.finish_reason.value,
  }


# -- running ----------------------------------------------------------------


def run(
  plan: Plan,
  output: pathlib.Path,
  scheduler: Callable[[], scheduler_lib.Scheduler],
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  rewards: service_lib.RewardService,
  progress: progress_lib.Progress,
  stop: supervisor_lib.StopRequest,
) -> dict[str, Any]:
  """Generate and score the answers that are missing, and return the results.

  Args:
    plan: what is asked.
    output: directory of the evaluation, which belongs to this process.
    scheduler: makes a scheduler that holds the weights. It is not called if no
      answer is missing.
    tokenizer: of the policy.
    rewards: scores the answers.
    progress: shows how far the evaluation is.
    stop: the stop request, which a signal sets.

  Raises:
    Interrupted: the evaluation was asked to stop. It can be continued.
    ConfigError: the directory holds another evaluation, or a damaged one.
    EvaluationError: none of the first answers could be scored.
    StorageError: a file could not be written.
  """
  _check_settings(output, plan.made_from)
  samples, blocks = plan.settings.samples, _blocks(output, plan)
  file_of = {i: path for path, block in blocks.items() for i in block}
  is_known = {path: path.exists() for path in blocks}
  missing = [i for i, path in file_of.items() if not is_known[path]]
  total, num_missing = len(file_of) * samples, len(missing) * samples
  done = total - num_missing
  if done:
    progress.note(f"{done} of {total} answers are in {output} already")
  start_s, num_tokens, num_scored = time.perf_counter(), 0, 0
  if missing:
    rewards.warm_up()
    writer = scheduler()
    text = f"stopped; the same command goes on with {output}"
    asked = questions_lib.of_set(
      plan.config.task.dataset, plan.prompts, plan.settings, missing
    )
    rows: dict[pathlib.Path, list[dict[str, Any]]] = {}
    for count, answer in enumerate(
      answers_lib.scored(
        answers_lib.write(writer, asked, tokenizer),
        rewards=rewards,
        num_slots=writer.engine.sizes.num_slots,
        check=lambda: stop.check(text),
      ),
      1,
    ):
      stop.check(text)
      num_scored += answer.failure is None
      if not num_scored and count == min(_MAX_UNSCORED, num_missing):
        raise answers_lib.give_up(count, answer)
      path = file_of[answer.question.number]
      block = rows.setdefault(path, [])
      block.append(_row(plan, answer, tokenizer))
      if len(block) == len(blocks[path]) * samples:
        block.sort(key=lambda row: (row["question"], row["sample"]))
        columns.write(path, rows.pop(path), _SCHEMA)
      num_tokens += answer.trajectory.num_completion_tokens
      rate = num_tokens / (time.perf_counter() - start_s)
      progress.stage("answers", done + count, total, f"{rate:,.0f} tokens/s")
  records = []
  for path, block in blocks.items():
    records += _records(path, len(block) * samples)
  results = _results(plan, records)
  disk.replace_text(output / RESULTS, json.dumps(results, indent=2) + "\n")
  return results


def _results(
  plan: Plan, records: list[answer_results.Record]
) -> dict[str, Any]:
  config, made_from = plan.config, plan.made_from
  values = answer_results.by_question(
    records,
    len(plan.prompts),
    plan.settings.samples,
    solved_score=config.task.solved_score,
  )
  reward = "task.rewards" if config.task.rewards else "task.reward"
  about = ("step", "task.dataset", reward, "samples", "category", "questions")
  results = {name: made_from[name] for name in about} | {
    "prompts_too_long": made_from["prompts_too_long"],
    "answers": len(records),
    "failed_scores": sum(record.score is None for record in records),
    "results": answer_results.with_intervals(values, config.seed),
  }
  if any(plan.categories):
    results["by_category"] = answer_results.by_category(
      values, plan.categories, config.seed
    )
  return results
