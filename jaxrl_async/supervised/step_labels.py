"""Labels of solutions that the policy writes itself, for a reward model.

The policy from which a reward model starts solves problems of the task, and the
reward of the run says which solutions are right:

  outcome      a solution is one step, whose label is 1 if it is right.
  monte_carlo  the label of a step is the share of right solutions among those
               that the policy completes from there: the soft estimate of
               Math-Shepherd, arXiv:2312.08935, section 3.3. The last step has
               the label of the solution itself.

The result is a file of rows with the columns of the items, the steps and their
labels, which the reward model reads with the template of the run.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import labelled_steps
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.storage import disk
from jaxrl_async.supervised import prefer

OUTCOME, MONTE_CARLO = KINDS = ("outcome", "monte_carlo")
FILE = "labels.jsonl"
_NAME = "labels"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Solution:
  """A solution of the policy.

  Attributes:
    ends: position of the last token of each step, in the completion.
    is_right: by the reward of the run.
  """

  prompt: types.Prompt
  completion: np.ndarray
  ends: list[int]
  is_right: bool


def write(
  config: sections.Config,
  workdir: pathlib.Path,
  *,
  kind: str,
  num_prompts: int,
  completions: int,
) -> dict[str, Any]:
  """Write WORKDIR/labels.jsonl, and return a summary.

  Args:
    config: of the reward model and of the run. Its task has the prompts and the
      reward, its rollout how the policy is sampled.
    kind: one of `KINDS`.
    num_prompts: of the split that is trained on. Each gets one solution.
    completions: from each step of a solution, for monte_carlo.

  Raises:
    ConfigError: one line that names the field.
    EvaluationError: no solution could be scored.
  """
  config_checks.check_preference(config)
  setup = setup_lib.resolve(config, jax.devices())
  with _Answers(setup) as answers:
    solutions = list(_solved(answers, _prompts(setup, num_prompts)))
    labels = [[float(x.is_right)] * min(len(x.ends), 1) for x in solutions]
    if kind == MONTE_CARLO:
      labels = _shares(answers, solutions, completions)
  rows = [
    json.dumps(_row(config, setup.tokenizer, solution, of_steps), default=str)
    for solution, of_steps in zip(solutions, labels, strict=True)
    if of_steps
  ]
  sections.require(bool(rows), _NAME, "no solution has a step with a label")
  with disk.writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
  disk.replace_text(workdir / FILE, "".join(f"{row}\n" for row in rows))
  values = [x for of_steps in labels for x in of_steps]
  return {
    "labels": str(workdir / FILE),
    "rows": len(rows),
    "without_label": num_prompts - len(rows),
    "steps": len(values),
    "right": float(np.mean([x.is_right for x in solutions])),
    "mean_label": float(np.mean(values)),
  }


def _prompts(setup: setup_lib.Setup, count: int) -> list[types.Prompt]:
  stream = prompts.PromptStream(
    assembly.prompt_source(setup), source_lib.Split.TRAIN
  )
  with contextlib.closing(stream):
    return [stream.next() for _ in range(count)]


class _Answers(contextlib.ExitStack):
  """Answers of the starting policy, scored by the reward of the run."""

  def __init__(self, setup: setup_lib.Setup):
    """Load the policy, and start the processes that score."""
    super().__init__()
    self.setup = setup
    config = setup.config
    self._rewards = self.enter_context(
      contextlib.closing(
        service_lib.RewardService(
          assembly.make_scorers(config.task, setup.tokenizer),
          num_workers=config.task.reward_workers,
        )
      )
    )
    self._rewards.warm_up()
    engine, params = assembly.engine_with(
      setup, prefer.starting_policy(setup), 0
    )
    self._num_slots = engine.sizes.num_slots
    self._scheduler = assembly.make_scheduler(
      setup, engine, metrics_lib.BusyClock()
    )
    self._scheduler.adopt(params, 0)

  def of(
    self, questions: Sequence[questions_lib.Question], begins: Sequence[int]
  ) -> Iterator[answers_lib.Answer]:
    """Yield scored answers, in any order.

    Args:
      questions: numbered from 0.
      begins: where the completion of each question begins. What stands between
        that and the end of the question's prompt is scored with the answer.
    """
    written = answers_lib.write(
      self._scheduler, questions, self.setup.tokenizer
    )
    found = answers_lib.scored(
      ([_from(x, begins[x.question.number]) for x in step] for step in written),
      rewards=self._rewards,
      num_slots=self._num_slots,
    )
    num_scored = 0
    for count, answer in enumerate(found, 1):
      num_scored += answer.failure is None
      if not num_scored and count == len(questions):
        raise answers_lib.give_up(count, answer)
      yield answer


def _from(answer: answers_lib.Answer, begin: int) -> answers_lib.Answer:
  """Return an answer whose completion begins at a token."""
  trajectory = answer.trajectory
  mask = np.arange(len(trajectory.tokens)) >= begin
  return answer._replace(
    trajectory=dataclasses.replace(trajectory, loss_mask=mask)
  )


def _asked(
  answers: _Answers, asked: Iterable[types.Prompt], begins: Sequence[int]
) -> Iterator[questions_lib.Question]:
  """Yield one question for each prompt, with as many tokens as are left."""
  config = answers.setup.config
  settings = assembly.answer_settings(config, 1)
  settings = dataclasses.replace(
    settings, temperature=config.rollout.temperature
  )
  for number, (prompt, begin) in enumerate(zip(asked, begins, strict=True)):
    left = settings.max_completion_tokens - (len(prompt.tokens) - begin)
    yield questions_lib.Question(
      _NAME,
      number,
      0,
      prompt,
      dataclasses.replace(settings, max_completion_tokens=max(left, 1)),
    )


def _is_right(answers: _Answers, answer: answers_lib.Answer) -> bool:
  score = answer.trajectory.score
  return score >= answers.setup.config.task.solved_score


def _solved(
  answers: _Answers, asked: list[types.Prompt]
) -> Iterator[_Solution]:
  """Yield the solutions that could be scored."""
  begins = [len(prompt.tokens) for prompt in asked]
  for answer in answers.of(list(_asked(answers, asked, begins)), begins):
    if answer.failure is None:
      trajectory = answer.trajectory
      completion = trajectory.tokens[trajectory.loss_mask]
      yield _Solution(
        prompt=answer.question.prompt,
        completion=completion,
        ends=labelled_steps.ends(completion, answers.setup.tokenizer),
        is_right=_is_right(answers, answer),
      )


def _shares(
  answers: _Answers, solutions: Sequence[_Solution], completions: int
) -> list[list[float]]:
  """Return the label of each step, [] where a step has no scored completion."""
  owners = [
    (number, step)
    for number, solution in enumerate(solutions)
    for step in range(len(solution.ends) - 1)
    for _ in range(completions)
  ]
  asked, begins = [], []
  for number, step in owners:
    solution = solutions[number]
    part = solution.completion[: solution.ends[step] + 1]
    tokens = np.append(solution.prompt.tokens, part)
    asked.append(dataclasses.replace(solution.prompt, tokens=tokens))
    begins.append(len(solution.prompt.tokens))
  counts = [np.zeros((max(len(x.ends) - 1, 0), 2)) for x in solutions]
  if owners:
    for answer in answers.of(list(_asked(answers, asked, begins)), begins):
      if answer.failure is None:
        number, step = owners[answer.question.number]
        counts[number][step] += (_is_right(answers, answer), 1)
  return [
    [*(count[:, 0] / count[:, 1]).tolist(), float(solution.is_right)]
    if solution.ends and count[:, 1].all()
    else []
    for solution, count in zip(solutions, counts, strict=True)
  ]


def _row(
  config: sections.Config,
  tokenizer: Any,
  solution: _Solution,
  labels: Sequence[float],
) -> dict[str, Any]:
  """Return the columns of an item, with the steps and their labels."""
  item, fields = solution.prompt.item, config.task.fields.to_dict()
  kept = {
    fields.get(name) or name: value
    for name, value in item.items()
    if name not in ("index", "metadata", "source")
  }
  if len(labels) == len(solution.ends):
    begins = [0, *(end + 1 for end in solution.ends[:-1])]
    parts = zip(begins, solution.ends, strict=True)
    steps = [
      tokenizer.decode(solution.completion[begin : end + 1])
      for begin, end in parts
    ]
  else:
    steps = [tokenizer.decode(solution.completion)]
  return {
    **item.get("metadata", {}),
    **kept,
    config.preference.steps: steps,
    config.preference.labels: list(labels),
  }
