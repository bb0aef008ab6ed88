r"""Learned rewards beside success, arXiv:2410.15115: the study `rewards`.

For each seed: a policy from a teacher who errs and now and then writes a line
twice; a model of outcomes and one of steps, trained on labels of the policy's
own solutions; and runs of PPO with a critic, whose reward is 1 for a right
answer and, with the weight alpha,

    +outcome     what the first model says of the solution, at its end
    +process     what the second one says of each line, at its end
    +clip, +delta, +clip_delta      rewards made of that; eta is the threshold

The setting that the claims are about was named before anything was run: alpha
0.1, and for eta the median of the scores of the first policy's own steps. The
other alphas, and the quartiles, are run for clip_delta with the first seed.

Besides, without training: the return of a right solution whose last operation
is written n more times.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import pathlib
import socket
import statistics
from typing import Any
from urllib import parse

import numpy as np
import paper_study
import paper_sums

from jaxrl_async.algorithms import step_rewards

Row = paper_study.Row
ALPHA, ETA = 0.1, "median"
ALPHAS = (0.02, 0.1, 0.5)
ETAS = {"p25": 25, "median": 50, "p75": 75}
REPEATS = (0, 1, 2, 4, 8)
_VARIANT, _SCORED = "rewards", "scored"
_OUTCOME, _PROCESS = "outcome", "process"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """What is added to the reward of a right answer.

  Attributes:
    shape: of the query of a reward server; "" adds nothing.
    alpha: the weight.
    eta: a name of `ETAS`, where there is a threshold.
  """

  shape: str = ""
  alpha: float = ALPHA
  eta: str = ETA

  @property
  def names(self) -> dict[str, Any]:
    """The columns that tell its row from others."""
    has_eta = self.shape in step_rewards.CLIPPED
    return {
      "reward": f"+{self.shape}" if self.shape else "success",
      "alpha": self.alpha if self.shape else "",
      "eta": self.eta if has_eta else "",
    }

  @property
  def stage(self) -> str:
    """The name of its run."""
    return "_".join(str(x).lstrip("+") for x in self.names.values() if x != "")


RULES = tuple(
  map(lambda x: Rule(shape=x), ("", _OUTCOME, *step_rewards.SHAPES))
)
FURTHER = tuple(
  rule
  for alpha in ALPHAS
  for eta in ETAS
  if (rule := Rule(shape="clip_delta", alpha=alpha, eta=eta)) not in RULES
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """How much is done.

  Attributes:
    warm_start_steps: updates of the supervised training.
    num_labelled: solutions with labels, for each of the models.
    completions: from the end of each step.
    model_steps: updates of each model.
    num_steps: train steps of each run, of 128 answers each.
    num_questions: held-out questions of each measurement.
    num_answers: sampled answers to each of them.
    further: rules that are tried with the first seed alone.
  """

  warm_start_steps: int = 215
  num_labelled: Mapping[str, int] = dataclasses.field(
    default_factory=lambda: {_OUTCOME: 4_000, _PROCESS: 1_000}
  )
  completions: int = 8
  model_steps: int = 300
  num_steps: int = 60
  groups_per_step: int = 64
  num_questions: int = 512
  num_answers: int = 16
  further: Sequence[Rule] = FURTHER


_QUICK = Sizes(
  warm_start_steps=4,
  num_labelled={_OUTCOME: 8, _PROCESS: 4},
  completions=1,
  model_steps=2,
  num_steps=2,
  groups_per_step=4,
  num_questions=4,
  num_answers=16,
  further=FURTHER[:1],
)


def sizes(study: paper_study.Study) -> Sizes:
  """Return those of a study."""
  return _QUICK if study.is_quick else Sizes()


# -- what solutions say -------------------------------------------------------


def lines_of(text: str) -> list[str]:
  """Return the steps of a solution: its lines, but for empty ones."""
  return [line for line in text.split("\n") if line.strip()]


def repeated_frac(lines: Sequence[str]) -> float:
  """Return the share of lines that stand before in the same solution."""
  return 1 - len(set(lines)) / len(lines) if lines else 0.0


def repeated(lines: Sequence[str], times: int) -> list[str]:
  """Return a solution whose last operation is written `times` more times."""
  *before, last = lines
  return [*before, *before[-1:] * times, last]


def returns(
  scores: Mapping[int, Sequence[np.ndarray]], eta: float
) -> list[Row]:
  """Return a row for each rule with the mean return of right solutions.

  It is 1 + alpha times the sum of the rewards of the steps, with the alpha of
  the claims. BY_QUESTION has the return of each solution.

  Args:
    scores: of the steps of each solution, by the number of repetitions.
    eta: the threshold.
  """
  rows = []
  for shape in step_rewards.SHAPES:
    values = {
      f"n={times}": [
        1
        + ALPHA
        * float(step_rewards.shaped(x, shape=shape, threshold=eta).sum())
        for x in found
      ]
      for times, found in scores.items()
    }
    rows.append(
      {
        "reward": f"+{shape}",
        **{column: statistics.mean(found) for column, found in values.items()},
        paper_study.BY_QUESTION: values,
      }
    )
  return rows


def _port(directory: pathlib.Path) -> int:
  """Return the port of the study's servers, the same after a stop.

  A run that goes on must have the rewards that it began with.
  """
  path = directory / "port"
  if not path.exists():
    with socket.socket() as listener:
      listener.bind(("127.0.0.1", 0))
      path.write_text(str(listener.getsockname()[1]))
  return int(path.read_text())


# -- stages -------------------------------------------------------------------


class _Seed:
  """The stages of one seed."""

  def __init__(self, study: paper_study.Study, seed: int):
    self._study, self._seed, self._sizes = study, seed, sizes(study)
    self._directory = study.of_seed(seed)
    self._data = study.data(
      seed, num_operations=4, corrupted_frac=0.25, restated_frac=0.1
    )
    fields = {"warm_start.num_steps": self._sizes.warm_start_steps}
    self.sft = study.launch("sft.py", seed, "sft", _VARIANT, fields)["params"]
    for kind, labels in ((_OUTCOME, "outcome"), (_PROCESS, "monte_carlo")):
      self._train_model(kind, labels)
    self.etas = self._etas()

  def _train_model(self, kind: str, labels: str) -> None:
    """Label solutions of the first policy, and train a model on the labels."""
    found = self._sizes
    begin = {"warm_start.checkpoint": self.sft}
    made = self._study.launch(
      "reward_model.py",
      self._seed,
      f"{kind}_labels",
      _VARIANT,
      begin,
      f"--labels={labels}",
      f"--num_prompts={found.num_labelled[kind]}",
      f"--completions={found.completions}",
    )
    rows = paper_sums.read_rows(
      pathlib.Path(made["labels"]).read_text().splitlines()
    )
    num_held_out = -(-len(rows) // 10)
    train, held_out = (
      self._directory / f"{kind}_{name}.jsonl" for name in ("train", "test")
    )
    paper_sums.write_rows(train, rows[:-num_held_out])
    paper_sums.write_rows(held_out, rows[-num_held_out:])
    self._study.launch(
      "reward_model.py",
      self._seed,
      f"{kind}_model",
      _VARIANT,
      {
        **begin,
        "task.dataset": f"jsonl:{train}",
        "task.eval_dataset": f"jsonl:{held_out}",
        "eval.num_items": num_held_out,
        "preference.reward_loss": "steps",
        "preference.num_steps": found.model_steps,
        "preference.num_examples": len(rows) - num_held_out,
        "preference.num_eval_examples": num_held_out,
        "preference.eval_every": max(found.model_steps // 10, 1),
        "preference.rows_per_batch": 16,
        "preference.optimizer.name": "muon",
        "preference.optimizer.learning_rate": 1e-3,
      },
    )

  def _answers_of_sft(self) -> tuple[Row, list[Row]]:
    return self._study.measured(
      self._seed,
      "sft",
      self.sft,
      num_questions=self._sizes.num_questions,
      samples=self._sizes.num_answers,
    )

  def _etas(self) -> dict[str, float]:
    """Return the thresholds: quartiles of the first policy's own scores."""

    def make() -> Row:
      _, answers = self._answers_of_sft()
      rows = self._to_score(answers)
      scores = np.concatenate(
        self._study.models.step_scores(self._model(_PROCESS), rows)
      )
      return {x: float(np.percentile(scores, q)) for x, q in ETAS.items()}

    return self._study.once(self._seed, "etas", [], make)

  def _model(self, kind: str) -> pathlib.Path:
    return self._directory / f"{kind}_model"

  def _to_score(self, answers: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of answers that have a step."""
    text = (self._data / "test.jsonl").read_text()
    questions = paper_sums.read_rows(text.splitlines())
    return [
      {
        "question": questions[answer["question"]]["question"],
        "answer": questions[answer["question"]]["answer"],
        "steps": lines,
      }
      for answer in answers
      if (lines := lines_of(answer["completion"]))
    ]

  def row(self, rule: Rule | None) -> Row:
    """Return what is measured of the policy of a rule, or of the first one."""
    if rule is None:
      name, (row, answers) = "sft", self._answers_of_sft()
    else:
      name = rule.stage
      self._train(rule)
      row, answers = self._study.measured(
        self._seed,
        name,
        str(self._directory / name),
        num_questions=self._sizes.num_questions,
        samples=self._sizes.num_answers,
      )
    solutions = [lines_of(x["completion"]) for x in answers]
    row[paper_study.BY_QUESTION]["steps"] = paper_study.values_of(
      answers,
      lambda group: statistics.mean(
        len(lines_of(x["completion"])) for x in group
      ),
    )

    def make() -> Row:
      rows = self._to_score(answers)
      found = self._study.models.step_scores(self._model(_PROCESS), rows)
      return {"process_sum": statistics.mean(float(x.sum()) for x in found)}

    return {
      **row,
      "steps": statistics.mean(map(len, solutions)),
      "repeated": statistics.mean(map(repeated_frac, solutions)),
      **self._study.once(self._seed, f"{name}.process_sum", [], make),
    }

  def _train(self, rule: Rule) -> None:
    """Train the policy of a rule."""
    found = self._sizes
    fields: dict[str, Any] = {
      "warm_start.checkpoint": self.sft,
      "train.num_steps": found.num_steps,
      "algorithm.groups_per_step": found.groups_per_step,
    }
    if not rule.shape:
      self._launch(rule, _VARIANT, fields)
      return
    port = _port(self._study.directory)
    query = {"reward": rule.shape}
    if rule.shape in step_rewards.CLIPPED:
      query["threshold"] = f"{self.etas[rule.eta]:.6f}"
    address = f"http://127.0.0.1:{port}/?{parse.urlencode(query)}"
    fields |= {
      "task.rewards.steps.function": address,
      "task.rewards.steps.weight": rule.alpha,
    }
    kind = _OUTCOME if rule.shape == _OUTCOME else _PROCESS
    # A result that is there needs no server, which takes a while to start.
    server = (
      contextlib.nullcontext()
      if self._study.is_made(self._seed, rule.stage)
      else self._study.models.served(self._model(kind), port)
    )
    with server:
      self._launch(rule, _SCORED, fields)

  def _launch(self, rule: Rule, variant: str, fields: dict[str, Any]) -> None:
    self._study.launch("train.py", self._seed, rule.stage, variant, fields)

  def returns(self) -> list[Row]:
    """Return the returns of right solutions with repetitions, by rule."""
    count = self._sizes.num_questions
    text = (self._data / "test.jsonl").read_text().splitlines()[:count]
    rng = np.random.default_rng(self._seed)
    rows = [
      {
        "question": row["question"],
        "answer": row["answer"],
        "steps": repeated(
          lines_of(paper_sums.solution(row["question"], rng)), times
        ),
      }
      for times in REPEATS
      for row in paper_sums.read_rows(text)
    ]

    def make() -> Row:
      scores = self._study.models.step_scores(self._model(_PROCESS), rows)
      parts = {
        times: scores[i * len(text) : (i + 1) * len(text)]
        for i, times in enumerate(REPEATS)
      }
      return {"rows": returns(parts, self.etas[ETA])}

    return self._study.once(self._seed, "returns", [], make)["rows"]


def run(study: paper_study.Study) -> tuple[list[Row], list[Row], list[Row]]:
  """Make the stages that are missing.

  Returns:
    The table, the table of returns, and the claims.
  """
  seeds = [_Seed(study, seed) for seed in study.seeds]
  rows = []
  further = sizes(study).further
  for rule in (None, *RULES, *further):
    own = seeds[:1] if rule in further else seeds
    names = (
      {"reward": "sft", "alpha": "", "eta": ""} if rule is None else rule.names
    )
    found = [stages.row(rule) for stages in own]
    rows.append(paper_study.mean_row(names, found, "greedy"))
  of_repeats = [
    paper_study.mean_row(
      {"reward": of_rule[0]["reward"]},
      [{k: v for k, v in row.items() if k != "reward"} for row in of_rule],
      f"n={REPEATS[-1]}",
    )
    for of_rule in zip(*(stages.returns() for stages in seeds), strict=True)
  ]
  return (
    paper_study.shown(rows),
    paper_study.shown(of_repeats),
    claims(rows, of_repeats),
  )


def claims(rows: Sequence[Row], of_repeats: Sequence[Row]) -> list[Row]:
  """Return what the paper says, and whether it was seen.

  The paper's accuracies are greedy ones of Qwen2-1.5B on MATH.

  Args:
    rows: as `paper_study.mean_row` returns them, in the order of `run`.
    of_repeats: the same of `returns`.
  """
  main = {row["reward"]: row for row in rows[: 1 + len(RULES)]}

  def of(column: str, *names: str) -> dict[str, float]:
    return {name: main[name][column] for name in names}

  def compared(
    column: str, first: str, second: str, factor: float = 1.0, **bounds: float
  ) -> paper_study.Condition:
    times = "" if factor == 1 else f"{factor} "
    return paper_study.difference(
      f"{first} - {times}{second}",
      *(main[x][paper_study.BY_QUESTION][column] for x in (first, second)),
      factor=factor,
      **bounds,
    )

  def grows(
    row: Row, begin: int, end: int, **bounds: float
  ) -> paper_study.Condition:
    values = row[paper_study.BY_QUESTION]
    return paper_study.difference(
      f"{row['reward']}, n={end} - n={begin}",
      values[f"n={end}"],
      values[f"n={begin}"],
      **bounds,
    )

  first, last = REPEATS[0], REPEATS[-1]
  of_process = [
    grows(row, begin, end, above=0.0)
    for row in of_repeats
    if row["reward"] == "+process"
    for begin, end in itertools.pairwise(REPEATS)
  ]
  of_others = [
    grows(row, first, last, below=1e-6)
    for row in of_repeats
    if row["reward"] != "+process"
  ]
  return [
    paper_study.claim(
      "Process rewards lose accuracy, at least 10 points",
      "11.2 after 30.6",
      of("greedy", "success", "+process"),
      [compared("greedy", "success", "+process", above=0.1)],
    ),
    paper_study.claim(
      "Process rewards make solutions longer, at least 1.5 times",
      "steps grow through the whole training",
      of("steps", "success", "+process"),
      [compared("steps", "+process", "success", 1.5, above=0.0)],
    ),
    paper_study.claim(
      "Clip and delta together lose no more than half a point",
      "31.4 after 30.6",
      of("greedy", "success", "+clip_delta"),
      [compared("greedy", "+clip_delta", "success", above=-0.005)],
    ),
    paper_study.claim(
      "Clip and delta together leave the number of steps within a tenth",
      "no growth",
      of("steps", "success", "+clip_delta"),
      [
        compared("steps", "+clip_delta", "success", 0.9, above=0.0),
        compared("steps", "+clip_delta", "success", 1.1, below=0.0),
      ],
    ),
    paper_study.claim(
      "A model of outcomes adds nothing to the reward itself, within 2 points",
      "30.6 and 30.6",
      of("greedy", "success", "+outcome"),
      [compared("greedy", "+outcome", "success", above=-0.02, below=0.02)],
    ),
    paper_study.claim(
      "A repeated line raises the return of process rewards and of no other",
      "grows with every repetition; flat or falling otherwise",
      {x["reward"]: x[f"n={last}"] - x[f"n={first}"] for x in of_repeats},
      [*of_process, *of_others],
    ),
  ]
