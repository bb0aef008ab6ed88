"""What the studies of benchmarks/papers.py share: stages, rows and claims.

A study is a series of stages. Each leaves a result in the workdir, and is not
made again if it is there. Trainings are launch scripts in processes of their
own, which continue what was stopped. Answers are those of an evaluation, which
does too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
import pathlib
import statistics
import sys
from typing import Any

import launching
import numpy as np
import paper_models
import paper_sums

from jaxrl_async.algorithms import answer_statistics
from jaxrl_async.storage import columns

CONFIG = launching.ROOT / "configs" / "papers.py"
Row = dict[str, Any]
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
# In a row the values of each question, which no table shows.
BY_QUESTION = "by_question"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """Where a study is kept, and how much is done.

  Attributes:
    directory: of all stages.
    seeds: of the study; each has a policy and questions of its own.
    is_quick: only whether every stage runs is of interest.
    launch_script: as `launching.launch`.
    models: has what `paper_models` has.
  """

  directory: pathlib.Path
  seeds: Sequence[int]
  is_quick: bool = False
  launch_script: Callable[..., dict[str, Any]] = launching.launch
  models: Any = paper_models

  def of_seed(self, seed: int) -> pathlib.Path:
    """Return the directory of a seed."""
    return self.directory / f"seed_{seed}"

  def once(
    self, seed: int, name: str, made_from: list[Any], make: Callable[[], Row]
  ) -> Row:
    """Return the result of a stage, as `launching.once`."""
    return launching.once(self.of_seed(seed), name, made_from, make)

  def is_made(self, seed: int, name: str) -> bool:
    """Return whether a stage has its result."""
    return launching.is_made(self.of_seed(seed), name)

  def launch(
    self,
    script: str,
    seed: int,
    name: str,
    variant: str,
    fields: Mapping[str, Any],
    *flags: str,
    config: pathlib.Path = CONFIG,
  ) -> Row:
    """Run a launch script to its end in the workdir `name`.

    Args:
      script: its name.
      seed: of the run.
      name: of the stage.
      variant: of the config.
      fields: of the config.
      *flags: of the script.
      config: its file.

    Returns:
      The JSON of its last line.
    """
    directory = self.of_seed(seed)
    usual = {
      "seed": seed,
      "task.dataset": f"jsonl:{directory}/data/train.jsonl",
      "task.eval_dataset": f"jsonl:{directory}/data/test.jsonl",
      **(_QUICK if self.is_quick else {}),
    }
    return launching.launch_once(
      script,
      directory,
      name,
      f"--compile_cache={self.directory.absolute()}/compile_cache",
      f"--config={config}:{variant}",
      *(f"--config.{k}={v}" for k, v in (usual | dict(fields)).items()),
      *flags,
      launch=self.launch_script,
    )

  def data(self, seed: int, **options: Any) -> pathlib.Path:
    """Write the questions of a seed, as `paper_sums.write` does."""
    directory = self.of_seed(seed) / "data"
    if self.is_quick:
      # Hardly any answer is right, and a pair needs the teacher's.
      options["corrupted_frac"] = 0.0
    options["num_train"] = 300 if self.is_quick else 20_000
    options["num_test"] = 32 if self.is_quick else 512

    def make() -> Row:
      paper_sums.write(directory, seed=seed, **options)
      return {}

    self.once(seed, "questions", [options], make)
    return directory

  def answers(
    self,
    seed: int,
    name: str,
    checkpoint: str,
    step: int | None,
    *,
    questions: pathlib.Path,
    num_questions: int,
    samples: int,
    temperature: float = 1.0,
    **more: Any,
  ) -> list[Row]:
    """Return a policy's answers to the first questions of a file, as rows.

    They are those of `launch/evaluate.py`: `question`, its number, `completion`
    and `score` among others, in the order of the questions.

    Args:
      seed: whose directory has them.
      name: of the directory of the answers.
      checkpoint: of the policy.
      step: of a run's checkpoint.
      questions: file with a question, and the answer, in each line.
      num_questions: how many are asked.
      samples: answers to each.
      temperature: 0 for greedy answers.
      **more: of `paper_models.write_answers`.
    """
    output = self.of_seed(seed) / name
    options = {
      "checkpoint": str(checkpoint),
      "step": step,
      "questions": str(questions),
      "num_questions": num_questions,
      "samples": samples,
      "temperature": temperature,
      **more,
    }

    def make() -> Row:
      self.models.write_answers(output, **options)
      return {}

    self.once(seed, name, [options], make)
    files = sorted((output / "completions").glob("*.parquet"))
    return [row for path in files for row in columns.read(path)]

  def measured(
    self,
    seed: int,
    name: str,
    checkpoint: str,
    *,
    step: int | None = None,
    num_questions: int,
    samples: int,
    of_sampled: Mapping[str, Any] | None = None,
    **more: Any,
  ) -> tuple[Row, list[Row]]:
    """Return the accuracies of a policy, and its sampled answers.

    The accuracies are of the first held-out questions: `greedy`, `sampled` at
    temperature 1, and `pass@k` with k = 5 and 16 as far as there are so many
    samples. `tokens` is the mean length of a sampled answer, and `truncated`
    the share that was cut off. In BY_QUESTION are `greedy` and `pass@5`.

    Args:
      seed: as `answers`, like what follows.
      name: of the stages.
      checkpoint: of the policy.
      step: of a run's checkpoint.
      num_questions: how many are asked.
      samples: sampled answers to each.
      of_sampled: arguments of `answers` for these alone.
      **more: arguments of `answers` for the greedy ones too.
    """
    questions = self.of_seed(seed) / "data" / "test.jsonl"
    greedy, sampled = (
      self.answers(
        seed,
        f"{name}.{kind}",
        checkpoint,
        step,
        questions=questions,
        num_questions=num_questions,
        samples=count,
        temperature=temperature,
        **more,
        **further,
      )
      for kind, count, temperature, further in (
        ("greedy", 1, 0.0, {}),
        ("sampled", samples, 1.0, of_sampled or {}),
      )
    )
    values = {
      "greedy": values_of(greedy, accuracy),
      "pass@5": values_of(sampled, lambda group: pass_at_k(group, 5)),
    }
    return {
      "greedy": accuracy(greedy),
      **accuracies(sampled),
      BY_QUESTION: values,
    }, sampled


# A model and stages that only show that everything runs. Nothing is learned.
_QUICK = {
  "model.name": "tiny",
  "warm_start.num_steps": 4,
  "warm_start.num_examples": 64,
  "rollout.max_completion_tokens": 24,
  "run.checkpoint_every": 2,
  "eval.num_items": 4,
}


def stop_early(signal_number: int, frame: Any) -> None:
  """End as after Ctrl-C, so that the launch script that runs is ended too."""
  del frame
  sys.exit(128 + signal_number)


# -- what answers say ---------------------------------------------------------


def is_right(answer: Mapping[str, Any]) -> bool:
  """Return whether an answer is right."""
  return answer["score"] is not None and answer["score"] >= 1


def accuracy(answers: Sequence[Mapping[str, Any]]) -> float:
  """Return the share of right answers."""
  return statistics.mean(float(is_right(x)) for x in answers)


def by_question(
  answers: Iterable[Mapping[str, Any]],
) -> dict[int, list[Mapping[str, Any]]]:
  """Return the answers to each question, by its number."""
  found: dict[int, list[Mapping[str, Any]]] = {}
  for answer in answers:
    found.setdefault(answer["question"], []).append(answer)
  return found


def values_of(
  answers: Iterable[Mapping[str, Any]],
  value: Callable[[Sequence[Mapping[str, Any]]], float],
) -> list[float]:
  """Return a value of the answers to each question, in their order."""
  return [value(group) for group in by_question(answers).values()]


def pass_at_k(group: Sequence[Mapping[str, Any]], k: int) -> float:
  """Return pass@k of the answers to one question."""
  return answer_statistics.pass_at_k(len(group), sum(map(is_right, group)), k)


def accuracies(answers: Sequence[Mapping[str, Any]]) -> Row:
  """Return the sampled accuracies and lengths, as `Study.measured`."""
  groups = by_question(answers).values()
  most = min(map(len, groups))
  row: Row = {"sampled": accuracy(answers)}
  for k in (5, 16):
    if k <= most:
      row[f"pass@{k}"] = statistics.mean(pass_at_k(x, k) for x in groups)
  row["tokens"] = statistics.mean(x["num_tokens"] for x in answers)
  row["truncated"] = statistics.mean(
    float(x["finish_reason"] == "length") for x in answers
  )
  return row


# -- rows and claims ----------------------------------------------------------


def mean_row(
  names: Mapping[str, Any], rows: Sequence[Row], by_seed: str
) -> Row:
  """Return the means over the seeds of what was measured.

  Args:
    names: the columns that tell the row from others.
    rows: of each seed, with the same columns.
    by_seed: the column whose values are kept for each seed, in `seeds`, and
      whose deviation is shown.

  Returns:
    The row, whose BY_QUESTION has the questions of all seeds, one seed after
    the other.
  """
  values = [row[by_seed] for row in rows]
  means = {
    column: None
    if any(row[column] is None for row in rows)
    else statistics.mean(row[column] for row in rows)
    for column in rows[0]
    if column != BY_QUESTION
  }
  return {
    **names,
    "num_seeds": len(rows),
    **means,
    f"{by_seed}_std": statistics.stdev(values) if len(values) > 1 else 0.0,
    "seeds": values,
    BY_QUESTION: {
      column: [x for row in rows for x in row[BY_QUESTION][column]]
      for column in rows[0][BY_QUESTION]
    },
  }


def shown(rows: Iterable[Row]) -> list[Row]:
  """Return rows without the values of each question."""
  return [{k: v for k, v in x.items() if k != BY_QUESTION} for x in rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
  """What a claim says of a mean over the questions.

  Attributes:
    name: of the values.
    values: of each question.
    above, below: the mean is between them.
  """

  name: str
  values: Sequence[float]
  above: float = -math.inf
  below: float = math.inf

  def verdict(self, low: float, high: float) -> str:
    """Return what a confidence interval of the mean says."""
    if self.above < low and high < self.below:
      return HOLDS
    if high <= self.above or self.below <= low:
      return FAILS
    return OPEN


def difference(
  name: str,
  first: Sequence[float],
  second: Sequence[float],
  *,
  factor: float = 1.0,
  above: float = -math.inf,
  below: float = math.inf,
) -> Condition:
  """Return a condition on first - factor * second.

  Both are of the same questions. If one of them has only those of the first
  seed, the questions of the other seeds have no difference.
  """
  most = min(len(first), len(second))
  values = np.full(max(len(first), len(second)), np.nan)
  values[:most] = np.array(first[:most]) - factor * np.array(second[:most])
  return Condition(name=name, values=values.tolist(), above=above, below=below)


def claim(
  text: str,
  expected: str,
  seen: Mapping[str, float],
  conditions: Sequence[Condition],
) -> Row:
  """Return a claim of a paper, and whether it was seen here.

  Args:
    text: the claim.
    expected: what the paper has.
    seen: the means that it is about.
    conditions: it holds if all of them do, and does not if one does not.

  Returns:
    These, `differences`, which are the mean of each condition and its 95 %
    interval by a bootstrap over the questions, and the `verdict`.
  """
  intervals = answer_statistics.bootstrap_intervals(
    np.array([x.values for x in conditions]), seed=0
  ).tolist()
  verdicts = {
    condition.verdict(*interval)
    for condition, interval in zip(conditions, intervals, strict=True)
  }
  (only,) = verdicts if len(verdicts) == 1 else (OPEN,)
  return {
    "claim": text,
    "expected": expected,
    "seen": dict(seen),
    "differences": {
      condition.name: [float(np.nanmean(condition.values)), *interval]
      for condition, interval in zip(conditions, intervals, strict=True)
    },
    "verdict": FAILS if FAILS in verdicts else only,
  }
