"""An evaluation of its own: every answer on disk, and a table at the end.

    OUTPUT/evaluation.json      what the answers depend on
    OUTPUT/completions/N.parquet  all answers to the questions of block N
    OUTPUT/results.json         the statistics

A block has a fixed number of questions, and its file is written when the last
of its answers has been scored. An evaluation that was stopped, in whatever way,
goes on with the blocks that have no file. The result is the same as without the
stop, because an answer depends on nothing but the weights and its numbers.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import pathlib
import time
from typing import Any

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.evaluation import answer_results
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import progress as progress_lib
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What is asked, and what the answers depend on.

  Attributes:
    prompts: of the questions.
    categories: of each question; all "" if there are no categories.
    settings: how the questions are answered.
    made_from: JSON of everything that the answers and their scores depend on.
    answer_prefix: as `task.answer_prefix`.
    solved_score: as `task.solved_score`.
    seed: of the intervals.
  """

  prompts: list[types.Prompt]
  categories: list[str]
  settings: questions_lib.AnswerSettings
  made_from: dict[str, Any]
  answer_prefix: str
  solved_score: float
  seed: int

  @property
  def questions_per_block(self) -> int:
    """Number of questions whose answers are in one file."""
    return -(-_ANSWERS_PER_BLOCK // self.settings.samples)


# -- what is on disk --------------------------------------------------------


def check_settings(output: pathlib.Path, made_from: Mapping[str, Any]) -> None:
  """Write what an evaluation depends on, or compare it with what is there.

  Args:
    output: directory of the evaluation.
    made_from: see `Plan`.

  Raises:
    ConfigError: the directory holds another evaluation, or something else.
  """
  path = output / SETTINGS
  try:
    stored = json.loads(path.read_text())
  except FileNotFoundError:
    sections.require(
      not (output / COMPLETIONS).exists(),
      "output",
      f"{output} has {COMPLETIONS}, but no {SETTINGS}; use an empty directory",
    )
    with disk.writing(path):
      output.mkdir(parents=True, exist_ok=True)
    disk.replace_text(path, json.dumps(made_from, indent=2) + "\n")
    return
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"output: {path} cannot be read") from error
  for name in sorted(stored.keys() | made_from.keys()):
    before, now = stored.get(name), made_from.get(name)
    sections.require(
      before == now,
      "output",
      f"{output} holds another evaluation, with {name} {sections.shown(before)}"
      f" and not {sections.shown(now)}; use another directory",
    )


def stored_step(output: pathlib.Path) -> int | None:
  """Return the train step that an output directory is about, if it has one."""
  try:
    return json.loads((output / SETTINGS).read_text())["step"]
  except (OSError, ValueError, LookupError, TypeError):
    return None


class Blocks:
  """The answers of an evaluation, in a file for each block of questions."""

  def __init__(self, output: pathlib.Path, plan: Plan):
    """Find the blocks that are complete."""
    self._directory = output / COMPLETIONS
    self._plan = plan
    num_questions = len(plan.prompts)
    self.num_blocks = -(-num_questions // plan.questions_per_block)
    self._complete = {
      block for block in range(self.num_blocks) if self._path(block).exists()
    }
    self._open: dict[int, list[dict[str, Any]]] = {}

  def is_known(self, question: int) -> bool:
    """Return whether all answers to a question are on disk."""
    return question // self._plan.questions_per_block in self._complete

  def num_known(self) -> int:
    """Return the number of answers on disk."""
    return self._plan.settings.samples * sum(
      map(self.is_known, range(len(self._plan.prompts)))
    )

  def add(self, row: dict[str, Any]) -> None:
    """Keep a row, and write its block if that is complete.

    Raises:
      StorageError: the file could not be written.
    """
    block = row["question"] // self._plan.questions_per_block
    rows = self._open.setdefault(block, [])
    rows.append(row)
    if len(rows) == self._num_rows(block):
      rows.sort(key=lambda row: (row["question"], row["sample"]))
      columns.write(self._path(block), rows, _SCHEMA)
      self._complete.add(block)
      del self._open[block]

  def records(self) -> list[answer_results.Record]:
    """Return what counts of every answer, read from the files.

    Raises:
      ConfigError: a file is damaged or missing.
    """
    found = []
    for block in range(self.num_blocks):
      path = self._path(block)
      try:
        rows = columns.read(path)
        if len(rows) != self._num_rows(block):
          raise ValueError(f"{path} has {len(rows)} rows")
      except (OSError, ValueError) as error:
        raise sections.ConfigError(
          f"output: {error}; remove the file, and start again"
        ) from error
      found += map(_record, rows)
    return found

  def _num_rows(self, block: int) -> int:
    size = self._plan.questions_per_block
    questions = min(size, len(self._plan.prompts) - block * size)
    return questions * self._plan.settings.samples

  def _path(self, block: int) -> pathlib.Path:
    return self._directory / f"{block:06}.parquet"


def _record(row: Mapping[str, Any]) -> answer_results.Record:
  return answer_results.Record(
    question=row["question"],
    score=row["score"],
    answer=row["answer"],
    num_tokens=row["num_tokens"],
    is_truncated=row["finish_reason"] == FinishReason.LENGTH,
  )


def _row(
  plan: Plan, answer: answers_lib.Answer, tokenizer: tokenizer_lib.Tokenizer
) -> dict[str, Any]:
  number, prompt = answer.question.number, answer.question.prompt
  reward, text = answer.trajectory.reward, answer.completion.text
  if reward is None:
    extracted = extraction.extract_answer(text, plan.answer_prefix)
  else:
    extracted = reward.answer
  return {
    "question": number,
    "sample": answer.question.sample,
    "prompt_id": prompt.prompt_id,
    "category": plan.categories[number],
    "prompt": tokenizer.decode(prompt.tokens),
    "completion": text,
    "answer": extracted,
    "score": None if reward is None else float(reward.score),
    "parts": json.dumps({} if reward is None else dict(reward.parts)),
    "failure": None if answer.failure is None else answer.failure.reason,
    "num_tokens": answer.trajectory.num_completion_tokens,
    "finish_reason": answer.completion.finish_reason.value,
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
  check_settings(output, plan.made_from)
  blocks = Blocks(output, plan)
  total = len(plan.prompts) * plan.settings.samples
  done = blocks.num_known()
  if done:
    progress.note(f"{done} of {total} answers are in {output} already")
  start_s, num_tokens, num_missing = time.perf_counter(), 0, total - done
  num_unscored: int | None = 0  # None once there is a score
  if done < total:
    rewards.warm_up()
    writer = scheduler()
    text = f"stopped; the same command goes on with {output}"
    answers = answers_lib.scored(
      answers_lib.write(
        writer,
        questions_lib.of_set(
          plan.made_from["task.dataset"],
          plan.prompts,
          plan.settings,
          [i for i in range(len(plan.prompts)) if not blocks.is_known(i)],
        ),
        tokenizer,
      ),
      tokenizer=tokenizer,
      rewards=rewards,
      num_slots=writer.engine.sizes.num_slots,
      check=lambda: stop.check(text),
    )
    for answer in answers:
      stop.check(text)
      if answer.failure is None:
        num_unscored = None
      elif num_unscored is not None:
        num_unscored += 1
        if num_unscored == min(_MAX_UNSCORED, num_missing):
          raise answers_lib.give_up(num_unscored, answer)
      blocks.add(_row(plan, answer, tokenizer))
      done += 1
      num_tokens += answer.trajectory.num_completion_tokens
      rate = num_tokens / (time.perf_counter() - start_s)
      progress.stage("answers", done, total, f"{rate:,.0f} tokens/s")
  results = _results(plan, blocks.records())
  disk.replace_text(output / RESULTS, json.dumps(results, indent=2) + "\n")
  return results


def _results(
  plan: Plan, records: list[answer_results.Record]
) -> dict[str, Any]:
  values = answer_results.by_question(
    records,
    len(plan.prompts),
    plan.settings.samples,
    solved_score=plan.solved_score,
  )
  failed = sum(record.score is None for record in records)
  reward = "task.rewards" if plan.made_from["task.rewards"] else "task.reward"
  about = ("step", "task.dataset", reward, "samples", "category")
  results = {
    **{name: plan.made_from[name] for name in about},
    "questions": len(plan.prompts),
    "prompts_too_long": plan.made_from["prompts_too_long"],
    "answers": len(records),
    "failed_scores": failed,
    "results": answer_results.with_intervals(values, plan.seed),
  }
  if any(plan.categories):
    results["by_category"] = answer_results.by_category(
      values, plan.categories, plan.seed
    )
  return results


def describe(results: Mapping[str, Any]) -> str:
  """Return the results as tables, with a line about what is not in them."""
  text = answer_results.table(results["results"])
  if "by_category" in results:
    text += "\n\n" + answer_results.table_of_categories(
      results["by_category"], results["samples"]
    )
  if failed := results["failed_scores"]:
    text += (
      f"\n{failed} of {results['answers']} answers could not be scored and do"
      " not count as right or wrong."
    )
  if skipped := results["prompts_too_long"]:
    text += f"\n{skipped} questions are too long and were left out."
  return text
