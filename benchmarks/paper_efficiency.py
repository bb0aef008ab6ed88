"""How long to think, arXiv:2506.07104: the study `efficiency`, on sums.

For each seed a policy from a teacher who errs, and writes some lines more than
once. Then runs of configs/reasoning.py from this policy, with these rewards:

    outcome          1 for a right answer
    length_penalty   less for each token of it
    fixed            1, with a quarter of the tokens to answer in
    exponential      REO-RL: right answers after parts of the thought count too,
                     at budgets of exponential distances
    uniform          at equal distances
    oracle           at those that are chosen for the frontier of all others

J(L) is the accuracy of answers whose thought is cut after L tokens. It is
measured with the same sampled answers for all L. The pool of a seed has all of
its policies, and its frontier is the best of them at each L. REG, the gap, is
what a policy falls short of the frontier.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import statistics
from typing import Any

import launching
import numpy as np
import paper_study

from configs import reasoning
from jaxrl_async import types
from jaxrl_async.algorithms import budget_curves
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.rewards import cut_scores

Row = paper_study.Row
LONGEST = reasoning.LONGEST
# Where curves are measured, besides at LONGEST.
GRID = tuple(range(0, LONGEST - 4, 4))
FORCED_TOKENS = 4  # a digit and the end of the text, and two more
NUM_BUDGETS = 5
COUNTS = (1, 2, 3, 5, 8)
# A policy's row, and the variant of the config.
SFT, ORACLE = "sft", "oracle"
METHODS = tuple(x for x in reasoning.VARIANTS if x != ORACLE) + (ORACLE,)
_CONFIG = launching.ROOT / "configs" / "reasoning.py"
_FRONTIER = "frontier"
_THOUGHT = types.THOUGHT_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """How much is done.

  Attributes:
    warm_start_steps: updates of the supervised training.
    num_steps: train steps of each run.
    groups_per_step: questions of a train step, with eight answers to each.
    num_questions: held-out questions of each measurement.
    num_answers: sampled answers to each of them.
    grid: budgets at which curves are measured.
  """

  warm_start_steps: int = 400
  num_steps: int = 80
  groups_per_step: int = 16
  num_questions: int = 256
  num_answers: int = 4
  grid: Sequence[int] = GRID


_QUICK = Sizes(
  warm_start_steps=4,
  num_steps=2,
  groups_per_step=2,
  num_questions=4,
  num_answers=2,
  grid=(0, 8, 24, 40, 56, 64, 80),
)


def sizes(study: paper_study.Study) -> Sizes:
  """Return those of a study."""
  return _QUICK if study.is_quick else Sizes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """What is measured of a policy.

  Attributes:
    row: as `paper_study.Study.measured` returns it, with the mean length of a
      thought.
    curve: J(L) of each question, [questions, budgets of the grid and LONGEST].
  """

  row: Row
  curve: np.ndarray


class _Seed:
  """The stages of one seed."""

  def __init__(self, study: paper_study.Study, seed: int):
    self._study, self._seed, self._sizes = study, seed, sizes(study)
    study.data(seed, num_operations=4, corrupted_frac=0.25, restated_frac=0.4)
    fields = {"warm_start.num_steps": self._sizes.warm_start_steps}
    result = self._launch("sft.py", SFT, METHODS[0], fields)
    self._sft = result["params"]

  def policies(self) -> dict[str, Measured]:
    """Return what is measured of each policy, in the order of the rows."""
    found = {SFT: self._measured(SFT, self._sft)}
    for method in METHODS:
      fields = {}
      if method == ORACLE:
        best = budget_curves.frontier(mean_curves(found))
        chosen = budget_curves.greedy(self.grid, best, NUM_BUDGETS)
        fields["task.episode_params.budgets"] = tuple(sorted(chosen))
      found[method] = self._trained(method, fields)
    return found

  @property
  def grid(self) -> tuple[int, ...]:
    """The budgets of a curve."""
    return (*self._sizes.grid, LONGEST)

  def _trained(self, method: str, fields: Mapping[str, Any]) -> Measured:
    fields = {
      "warm_start.checkpoint": self._sft,
      "train.num_steps": self._sizes.num_steps,
      "algorithm.groups_per_step": self._sizes.groups_per_step,
      **fields,
    }
    self._launch("train.py", method, method, fields)
    workdir = self._study.of_seed(self._seed) / method
    return self._measured(method, str(workdir))

  def _launch(
    self, script: str, name: str, method: str, fields: Mapping[str, Any]
  ) -> Row:
    shorter = LONGEST // 4 if method == "fixed" else LONGEST
    usual = {
      "task.template": "{question}\n",
      "warm_start.solver": f"{reasoning.HERE}:of_row",
      "rollout.max_completion_tokens": shorter,
      # What is compared is measured afterwards.
      "eval.num_items": 16,
      "eval.every": 0,
    }
    return self._study.launch(
      script, self._seed, name, method, usual | dict(fields), config=_CONFIG
    )

  def _measured(self, name: str, checkpoint: str) -> Measured:
    budgets = {
      "budgets": list(self._sizes.grid),
      "end": reasoning.END,
      "max_tokens": FORCED_TOKENS,
    }
    row, answers = self._study.measured(
      self._seed,
      name,
      checkpoint,
      num_questions=self._sizes.num_questions,
      samples=self._sizes.num_answers,
      longest=LONGEST,
      of_sampled={"budgets": budgets},
    )
    row[paper_study.BY_QUESTION] |= {
      "sampled": paper_study.values_of(answers, paper_study.accuracy),
      "thought": paper_study.values_of(answers, _thought),
    }
    row["thought"] = _thought(answers)
    return Measured(row=row, curve=curves_of(answers, self._sizes.grid))


def _thought(answers: Sequence[Mapping[str, Any]]) -> float:
  """Return the mean length of a thought, in tokens."""
  return statistics.mean(json.loads(x["parts"])[_THOUGHT] for x in answers)


def curves_of(
  answers: Sequence[Mapping[str, Any]], grid: Sequence[int]
) -> np.ndarray:
  """Return the accuracy of each question at each budget and without a cut."""
  values = []
  for group in paper_study.by_question(answers).values():
    parts = [json.loads(x["parts"]) for x in group]
    values.append(
      [statistics.mean(p[cut_scores.part(x)] >= 1 for p in parts) for x in grid]
      + [paper_study.accuracy(group)]
    )
  return np.array(values, np.float64)


def mean_curves(policies: Mapping[str, Measured]) -> np.ndarray:
  """Return J(L) of each policy."""
  return np.array([x.curve.mean(axis=0) for x in policies.values()])


def best_of(policies: Mapping[str, Measured]) -> np.ndarray:
  """Return the frontier of a pool, as the values of each question.

  At each budget they are those of the policy that is the best there by the mean
  over the questions, so that their mean is `budget_curves.frontier`.
  """
  best = mean_curves(policies).argmax(axis=0)
  curves = np.array([x.curve for x in policies.values()])
  return curves[best, :, np.arange(len(best))].T


def gaps(
  grid: Sequence[int], best: np.ndarray, policies: Mapping[str, Measured]
) -> dict[str, Row]:
  """Return the row of each policy of a pool, with its gaps to the frontier.

  They are `reg`, REG_int of `budget_curves`, and `reg_grid`. In BY_QUESTION is
  `reg`.
  """
  rows = {}
  for name, policy in policies.items():
    regs = [
      budget_curves.gap_mean(grid, own_best, own)
      for own_best, own in zip(best, policy.curve, strict=True)
    ]
    row = dict(policy.row)
    row |= {
      "reg": statistics.mean(regs),
      "reg_grid": budget_curves.gap_sum(
        best.mean(axis=0), policy.curve.mean(axis=0)
      ),
      paper_study.BY_QUESTION: {**row[paper_study.BY_QUESTION], "reg": regs},
    }
    rows[name] = row
  return rows


def quadrature(grid: Sequence[int], best: np.ndarray) -> list[Row]:
  """Return how far sums over N budgets are from the mean of a frontier.

  The errors are relative. For five exponential budgets, BY_QUESTION has the
  error of each question, and the mean of its curve.

  Args:
    grid: of the frontier, from 0 to the longest.
    best: as `best_of` returns it.
  """
  curve, longest = best.mean(axis=0), grid[-1]
  rows = []
  for count in COUNTS:
    budgets = {
      "exponential": budgets_lib.exponential(4, longest, count),
      "uniform": budgets_lib.uniform(longest, count),
      ORACLE: budget_curves.greedy(grid, curve, count),
    }
    errors = {
      kind: budget_curves.quadrature_error(grid, curve, found)
      for kind, found in budgets.items()
    }
    means = [budget_curves.mean(grid, own) for own in best]
    chosen = budgets["exponential"]
    weights = budget_curves.weights(chosen, longest)
    sums = [
      float(weights @ np.interp([*chosen, longest], grid, own)) for own in best
    ]
    values = {"error": np.subtract(sums, means).tolist(), "mean": means}
    rows.append({"budgets": count, **errors, paper_study.BY_QUESTION: values})
  return rows


def run(study: paper_study.Study) -> dict[str, list[Row]]:
  """Make the stages that are missing; return the tables and the claims."""
  of_seeds, curves, errors = [], [], []
  for seed in study.seeds:
    stages = _Seed(study, seed)
    policies, grid = stages.policies(), stages.grid
    best = best_of(policies)
    of_seeds.append(gaps(grid, best, policies))
    errors.append(quadrature(grid, best))
    curves.append(np.array([*mean_curves(policies), best.mean(axis=0)]))
  rows = [
    paper_study.mean_row(
      {"reward": name}, [found[name] for found in of_seeds], "reg"
    )
    for name in of_seeds[0]
  ]
  means = np.mean(curves, axis=0).T.tolist()
  names = (*of_seeds[0], _FRONTIER)
  quadratures = [
    paper_study.mean_row({"budgets": found[0]["budgets"]}, found, "exponential")
    for found in zip(*errors, strict=True)
  ]
  return {
    "rows": paper_study.shown(rows),
    "curves": [
      {"L": budget, **dict(zip(names, values, strict=True))}
      for budget, values in zip(grid, means, strict=True)
    ],
    "quadrature": paper_study.shown(quadratures),
    "claims": claims(rows, quadratures),
  }


def claims(rows: Sequence[Row], quadratures: Sequence[Row]) -> list[Row]:
  """Return what the paper says, and whether it was seen.

  The paper's numbers are those of DeepSeek-R1-Distill-Qwen-7B, where nothing
  else is said.

  Args:
    rows: as `paper_study.mean_row` returns them, in the order of `run`.
    quadratures: the same of `quadrature`.
  """
  by_name = {row["reward"]: row for row in rows}
  (of_five,) = (x for x in quadratures if x["budgets"] == NUM_BUDGETS)
  values = of_five[paper_study.BY_QUESTION]

  def compared(
    column: str, first: str, second: str, factor: float = 1.0, **bounds: float
  ) -> paper_study.Condition:
    times = "" if factor == 1 else f"{factor} "
    return paper_study.difference(
      f"{first} - {times}{second}",
      *(by_name[x][paper_study.BY_QUESTION][column] for x in (first, second)),
      factor=factor,
      **bounds,
    )

  def of(column: str, *names: str) -> dict[str, float]:
    return {name: by_name[name][column] for name in names}

  first, second = "exponential", "outcome"
  return [
    paper_study.claim(
      "Exponential budgets leave at most half of the gap of outcome rewards",
      "55.9 % of it are closed",
      of("reg", first, second),
      [compared("reg", first, second, 0.5, below=0.0)],
    ),
    paper_study.claim(
      "They lose no more than 2 points of accuracy",
      "62.9 after 64.4",
      of("sampled", first, second),
      [compared("sampled", first, second, above=-0.02)],
    ),
    paper_study.claim(
      "Their thoughts are shorter",
      "5,966 tokens after 11,283",
      of("thought", first, second),
      [compared("thought", first, second, below=0.0)],
    ),
    paper_study.claim(
      "A fixed budget leaves more of the gap, and loses accuracy",
      "27.5 % closed after 55.9 %, and 54.1 after 62.9",
      {
        **{f"reg {k}": v for k, v in of("reg", "fixed", first).items()},
        **{f"sampled {k}": v for k, v in of("sampled", "fixed", first).items()},
      },
      [
        compared("reg", "fixed", first, above=0.0),
        compared("sampled", "fixed", first, below=0.0),
      ],
    ),
    paper_study.claim(
      "Exponential budgets leave less of the gap than uniform ones",
      "an ablation says so",
      of("reg", first, "uniform"),
      [compared("reg", first, "uniform", below=0.0)],
    ),
    paper_study.claim(
      f"{NUM_BUDGETS} exponential budgets have the mean within 1 %",
      "less than 1 %",
      {first: of_five[first]},
      [
        paper_study.difference(
          f"error {sign} 1 % of the mean",
          values["error"],
          values["mean"],
          factor=factor,
          **bounds,
        )
        for sign, factor, bounds in (
          ("-", 0.01, {"below": 0.0}),
          ("+", -0.01, {"above": 0.0}),
        )
      ],
    ),
  ]
