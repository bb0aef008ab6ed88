"""DPO against PPO, arXiv:2404.10719, on sums: the study `preference`.

The ladder of the paper's table 3, for each seed:

    sft              a teacher's solutions, two fifths of whose lines are wrong
    dpo              pairs of a right and a wrong answer of that policy
    dpo_iter_1 .. 4  a quarter of the questions at a time, answered by the
                     policy that the pairs then train, and that is the reference
                     of its round
    ppo_64           PPO with a critic and 64 answers a step, advantages not
                     normalised
    +norm            advantages normalised over the batch
    +512             512 answers a step
    +ema             the reference follows the policy

All draw the same number of answers. PPO learns from each of them, and DPO from
the pairs among them, at least once from each pair. `ppo_64` and `+norm` have a
second row after as many updates as the others. Then, with the first seed alone,
beta: the coefficient of the divergence in `+512`, and DPO's beta in `dpo`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import paper_study
import paper_sums

Row = paper_study.Row
BETA = 0.1
_VARIANT = "preference"
_MINIBATCHES = 4
_NO_PAIRS = {"pairs": 0, "passes": 0.0}
# The rows of PPO, and the names of their stages.
_PPO = {
  "ppo_64": "ppo_64",
  "+norm": "ppo_64_norm",
  "+512": "ppo_512_norm",
  "+ema": "ppo_512_norm_ema",
}
# The row that is compared with DPO, chosen beforehand.
_BEST_PPO = "+ema"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """How much is done.

  Attributes:
    num_prompts: questions of DPO, each of which gets `samples` answers.
    samples: answers to each.
    pairs_per_update: rows of an update of DPO. A row has room for one pair,
      so that the updates of a training go through all of its pairs.
    large_steps: train steps of PPO with `large` answers in each.
    small, large: answers of a train step of PPO.
    warm_start_steps: updates of the supervised training.
    num_questions: held-out questions of each measurement.
    num_answers: sampled answers to each of them.
    rounds: of iterative DPO.
    betas: coefficients that are compared.
  """

  num_prompts: int = 2_048
  samples: int = 4
  pairs_per_update: int = 32
  large_steps: int = 16
  small: int = 64
  large: int = 512
  warm_start_steps: int = 215
  num_questions: int = 512
  num_answers: int = 8
  rounds: int = 4
  betas: tuple[float, ...] = (0.0, 0.05, BETA, 0.2)

  @property
  def num_samples(self) -> int:
    """Answers that each method draws."""
    return self.large_steps * self.large

  @property
  def num_updates(self) -> int:
    """Updates of DPO, of its rounds together, and of PPO with large batches."""
    return self.large_steps * _MINIBATCHES


_QUICK = Sizes(
  num_prompts=16,
  samples=2,
  pairs_per_update=8,
  large_steps=2,
  small=8,
  large=16,
  warm_start_steps=4,
  num_questions=4,
  num_answers=5,
  rounds=2,
  betas=(0.0, BETA),
)


def sizes(study: paper_study.Study) -> Sizes:
  """Return those of a study."""
  return _QUICK if study.is_quick else Sizes()


def ppo_fields(
  found: Sizes,
  *,
  batch: int,
  is_normalised: bool,
  moves: bool = False,
  beta: float = BETA,
) -> dict[str, Any]:
  """Return the fields of a run of PPO.

  As in the paper the reward is 10 or 0, and the divergence is a part of it.
  """
  steps = found.num_samples // batch
  fields: dict[str, Any] = {
    "train.num_steps": steps,
    # The step after as many updates as the others make is among them. A run
    # that is stopped writes one more, so that all are kept.
    "run.checkpoint_every": found.large_steps,
    "run.keep_checkpoints": steps,
    "algorithm.groups_per_step": batch // 2,
    "algorithm.reward_scale": 10.0,
    "algorithm.advantage_scale": "batch_std" if is_normalised else "none",
  }
  if beta:
    fields |= {
      "algorithm.kl_coef": beta,
      "algorithm.kl_estimator": "k1",
      "algorithm.kl_in_reward": True,
    }
  if moves:
    fields |= {
      "algorithm.reference_every": 1,
      "algorithm.reference_decay": 0.99,
    }
  return fields


def pairs_of(
  questions: Sequence[Mapping[str, Any]],
  answers: Sequence[Mapping[str, Any]],
) -> tuple[list[Row], Row]:
  """Return a pair of each question that has one, and counts by reason.

  The first right and the first wrong answer are a pair. If none is right, the
  teacher's solution stands for it, where it is right itself.

  Args:
    questions: rows of `paper_sums`.
    answers: to all of them, by their number.

  Returns:
    Rows with the columns chosen and rejected besides, and the counts: `pairs`,
    `taught` of which have the teacher's solution, `none_right`, `none_wrong`.
  """
  counts = {"pairs": 0, "taught": 0, "none_right": 0, "none_wrong": 0}
  pairs = []
  for number, group in paper_study.by_question(answers).items():
    row = questions[number]
    # An empty text is no completion of a pair.
    texts = [(paper_study.is_right(x), x["completion"]) for x in group]
    right = [text for is_right, text in texts if is_right]
    wrong = [text for is_right, text in texts if not is_right and text.strip()]
    if not right and row["solution"].endswith(
      f"\n{paper_sums.ANSWER_PREFIX}{row['answer']}"
    ):
      right = [row["solution"]]
      counts["taught"] += bool(wrong)
    if right and wrong:
      counts["pairs"] += 1
      chosen = {"chosen": right[0], "rejected": wrong[0]}
      pairs.append({k: row[k] for k in ("question", "answer")} | chosen)
    else:
      counts["none_wrong" if right else "none_right"] += 1
  return pairs, counts


class _Seed:
  """The stages of one seed."""

  def __init__(self, study: paper_study.Study, seed: int):
    self._study, self._seed, self._sizes = study, seed, sizes(study)
    self._directory = study.of_seed(seed)
    self._data = study.data(
      seed, num_operations=4, corrupted_frac=0.4, restated_frac=0.0
    )
    fields = {"warm_start.num_steps": self._sizes.warm_start_steps}
    self.sft = study.launch("sft.py", seed, "sft", _VARIANT, fields)["params"]

  def row(
    self,
    name: str,
    checkpoint: str,
    *,
    step: int | None = None,
    num_samples: int = 0,
    num_updates: int = 0,
    **more: Any,
  ) -> Row:
    """Return what is measured of a policy."""
    label = name if step is None else f"{name}.{step}"
    row, answers = self._study.measured(
      self._seed,
      label,
      checkpoint,
      step=step,
      num_questions=self._sizes.num_questions,
      samples=self._sizes.num_answers,
    )
    of_reference = self._study.once(
      self._seed,
      f"{label}.kl",
      [checkpoint, step],
      lambda: self._study.models.divergence(
        checkpoint, step, self.sft, [x for x in answers if x["sample"] < 2]
      ),
    )
    counts = {"samples": num_samples, "updates": num_updates}
    return {**counts, **row, **of_reference, **more}

  def dpo(
    self,
    name: str,
    policy: str,
    begin: int,
    count: int,
    num_updates: int,
    beta: float = BETA,
  ) -> tuple[str, Row]:
    """Answer questions by a policy, and train it on their pairs.

    Returns:
      The parameters, and the columns of what was learned from: `pairs`, and
      `passes` over them.
    """
    asked = self._directory / f"{name}.questions.jsonl"
    pairs = self._directory / f"{name}.pairs.jsonl"
    lines = (self._data / "train.jsonl").read_text().splitlines()
    rows = paper_sums.read_rows(lines[begin : begin + count])
    paper_sums.write_rows(asked, rows)
    answers = self._study.answers(
      self._seed,
      f"{name}.answers",
      policy,
      None,
      questions=asked,
      num_questions=count,
      samples=self._sizes.samples,
    )
    found, counts = pairs_of(rows, answers)
    paper_sums.write_rows(pairs, found)
    fields = {
      "warm_start.checkpoint": policy,
      "task.dataset": f"jsonl:{pairs}",
      "preference.beta": beta,
      "preference.num_steps": num_updates,
      "preference.num_examples": len(found),
      "preference.rows_per_batch": self._sizes.pairs_per_update,
      "preference.eval_every": 0,
    }
    result = self._study.launch("prefer.py", self._seed, name, _VARIANT, fields)
    num_rows = num_updates * self._sizes.pairs_per_update
    return result["params"], {
      "pairs": counts["pairs"],
      "passes": num_rows / result["num_rows"],
    }

  def all_dpo(self, beta: float = BETA) -> Row:
    """Return the row of DPO on answers of the first policy alone."""
    name, count = f"dpo_{beta}", self._sizes.num_prompts
    updates = self._sizes.num_updates
    params, used = self.dpo(name, self.sft, 0, count, updates, beta)
    return self.row(
      name,
      params,
      num_samples=count * self._sizes.samples,
      num_updates=updates,
      **used,
    )

  def rounds(self) -> list[Row]:
    """Return a row for each round of iterative DPO."""
    num_rounds = self._sizes.rounds
    count = self._sizes.num_prompts // num_rounds
    updates = self._sizes.num_updates // num_rounds
    policy, rows, num_pairs = self.sft, [], 0
    for number in range(1, num_rounds + 1):
      name = f"dpo_iter_{number}"
      begin = (number - 1) * count
      policy, used = self.dpo(name, policy, begin, count, updates)
      num_pairs += used["pairs"]
      rows.append(
        self.row(
          name,
          policy,
          num_samples=number * count * self._sizes.samples,
          num_updates=number * updates,
          pairs=num_pairs,
          passes=used["passes"],
        )
      )
    return rows

  def ppo(self, name: str, batch: int, **options: Any) -> list[Row]:
    """Return the rows of a run of PPO: at equal updates, and at its end."""
    found = self._sizes
    fields = ppo_fields(found, batch=batch, **options)
    self._study.launch(
      "train.py",
      self._seed,
      name,
      _VARIANT,
      {"warm_start.checkpoint": self.sft, **fields},
    )
    steps = sorted({found.large_steps, fields["train.num_steps"]})
    return [
      self.row(
        name,
        str(self._directory / name),
        step=step,
        num_samples=step * batch,
        num_updates=step * _MINIBATCHES,
        **_NO_PAIRS,
      )
      for step in steps
    ]


def _ladder(study: paper_study.Study, seed: int) -> dict[str, Row]:
  """Return the rows of a seed, by their names."""
  stages, found = _Seed(study, seed), sizes(study)
  rows = {"sft": stages.row("sft", stages.sft, **_NO_PAIRS)}
  rows["dpo"] = stages.all_dpo()
  for number, row in enumerate(stages.rounds(), 1):
    rows[f"dpo_iter_{number}"] = row
  for name, batch, options in (
    ("ppo_64", found.small, {"is_normalised": False}),
    ("+norm", found.small, {"is_normalised": True}),
    ("+512", found.large, {"is_normalised": True}),
    ("+ema", found.large, {"is_normalised": True, "moves": True}),
  ):
    *early, last = stages.ppo(_PPO[name], batch, **options)
    for row in early:
      rows[f"{name} (equal updates)"] = row
    rows[name] = last
  return rows


def _by_beta(study: paper_study.Study, seed: int) -> dict[str, Row]:
  """Return the rows of each beta, with one seed."""
  stages, found = _Seed(study, seed), sizes(study)
  rows = {}
  for beta in found.betas:
    # That of the ladder is there already.
    name = _PPO["+512"] if beta == BETA else f"ppo_beta_{beta}"
    rows[f"+512, beta {beta}"] = stages.ppo(
      name, found.large, is_normalised=True, beta=beta
    )[-1]
    if beta not in (0, BETA):  # DPO has no loss with 0
      rows[f"dpo, beta {beta}"] = stages.all_dpo(beta)
  return rows


def run(study: paper_study.Study) -> tuple[list[Row], list[Row]]:
  """Make the stages that are missing; return the table and the claims."""
  ladders = [_ladder(study, seed) for seed in study.seeds]
  rows = [
    paper_study.mean_row(
      {"method": name}, [ladder[name] for ladder in ladders], "pass@5"
    )
    for name in ladders[0]
  ]
  for name, row in _by_beta(study, study.seeds[0]).items():
    rows.append(paper_study.mean_row({"method": name}, [row], "pass@5"))
  return paper_study.shown(rows), claims(rows)


def claims(rows: Sequence[Row]) -> list[Row]:
  """Return what the paper says, and whether it was seen.

  The numbers are pass@5, of which the paper's are those of APPS, introductory
  problems, with CodeLlama 34B.

  Args:
    rows: as `paper_study.mean_row` returns them, in the order of `run`.
  """
  by_name = {row["method"]: row for row in rows}
  dpo = [name for name in by_name if name.startswith("dpo")]
  rounds = [name for name in dpo if name.startswith("dpo_iter")]
  # The ends of both trainings.
  ends = ["dpo", rounds[-1]]
  betas = [name for name in by_name if name.startswith("+512, ")]
  named = f"+512, beta {BETA}"

  def of(*names: str) -> dict[str, float]:
    return {name: by_name[name]["pass@5"] for name in names}

  def better(name: str, than: str) -> paper_study.Condition:
    first, second = (
      by_name[x][paper_study.BY_QUESTION]["pass@5"] for x in (name, than)
    )
    return paper_study.difference(f"{name} - {than}", first, second, above=0.0)

  ladder = list(_PPO)
  return [
    paper_study.claim(
      "PPO with batches of 64 and advantages as they are is worse than SFT",
      "18.0 below 38.6",
      of("ppo_64", "sft"),
      [better("sft", "ppo_64")],
    ),
    paper_study.claim(
      "Normalised advantages, larger batches and a moving reference each help",
      "18.0, 38.1, 42.3, 44.4",
      of(*ladder),
      [better(x, than) for than, x in itertools.pairwise(ladder)],
    ),
    paper_study.claim(
      "With the same number of updates larger batches help",
      "not in the paper",
      of("+norm (equal updates)", "+512"),
      [better("+512", "+norm (equal updates)")],
    ),
    paper_study.claim(
      "DPO is worse than SFT, in one training and after all rounds",
      "34.2 below 38.6, with four rounds",
      of("sft", *ends),
      [better("sft", name) for name in ends],
    ),
    paper_study.claim(
      f"PPO with all of it, {_BEST_PPO}, is better than any DPO",
      "44.4 above 34.2",
      of(_BEST_PPO, *dpo),
      [better(_BEST_PPO, name) for name in dpo],
    ),
    paper_study.claim(
      f"Of the coefficients of the divergence {BETA} is the best (one seed)",
      "13.0, 14.1, 15.1, 14.9 for 0, 0.05, 0.1, 0.2; 13B, mean of APPS",
      of(*betas),
      [better(named, name) for name in betas if name != named],
    ),
  ]
