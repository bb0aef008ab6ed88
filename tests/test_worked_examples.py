"""Worked solutions as examples of the warm start: which, how many, refusals."""

import numpy as np
import pytest
import test_prompts
import test_rows

from jaxrl_async.config import sections
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import reasoning

TOKENIZER = test_prompts.TOKENIZER
chain_sum, source = test_prompts.chain_sum, test_prompts.source


def worked_examples(task=None, max_tokens=120, **kwargs):
  return list(
    worked_examples_lib.WorkedExamples(
      source(task), sections.WarmStartSection(**kwargs), max_tokens=max_tokens
    )
  )


@pytest.mark.slow
def test_few_questions_make_many_worked_examples_as_corrupted_as_asked():
  # 200 questions, of which 4 of 10 belong to the warm start: leaving out
  # repetitions would leave right solutions out first.
  task = chain_sum(min_terms=2, max_terms=2, max_digits=1)
  examples = worked_examples(task, num_examples=2_000, corrupted_frac=0.3)
  num_wrong = sum(
    int(extraction.extract_answer(TOKENIZER.decode(e.tokens[e.loss_mask]), "="))
    != eval(TOKENIZER.decode(e.tokens[~e.loss_mask]))
    for e in examples
  )
  assert len(examples) == 2_000
  assert abs(num_wrong / 2_000 - 0.3) < 0.04  # four standard deviations


def test_worked_examples_are_solved_and_reproducible():
  examples = worked_examples(num_examples=200, corrupted_frac=0.0)
  assert len(examples) == 200
  for example in examples:
    assert example.tokens[example.loss_mask].dtype == np.int32
    assert example.tokens[example.loss_mask][-1] == TOKENIZER.eos_id
    prompt = TOKENIZER.decode(example.tokens[~example.loss_mask])
    solution = TOKENIZER.decode(example.tokens[example.loss_mask])
    answer = extraction.extract_answer(solution, "=")
    assert int(answer) == eval(prompt)
  again = worked_examples(num_examples=200, corrupted_frac=0.0)
  for one, other in zip(examples, again, strict=True):
    np.testing.assert_array_equal(
      one.tokens[one.loss_mask], other.tokens[other.loss_mask]
    )


def test_a_solution_longer_than_a_row_is_skipped_and_counted():
  few = sections.WarmStartSection(num_examples=50)
  examples = worked_examples_lib.WorkedExamples(source(), few, max_tokens=30)
  fitting = list(examples)
  # Counted anew from all examples, up to the last one that fits.
  num_long, expected = 0, []
  for one in worked_examples(num_examples=400):
    if len(one.tokens) <= 30:
      expected.append(one.tokens[one.loss_mask].tolist())
    elif len(expected) < 50:
      num_long += 1
  assert [e.tokens[e.loss_mask].tolist() for e in fitting] == expected[:50]
  assert examples.num_too_long == num_long > 50


def validate_warm_start(task, *, max_tokens=128, **settings):
  worked_examples_lib.validate(
    source(task, max_prompt_tokens=400),
    sections.WarmStartSection(**settings),
    max_tokens=max_tokens,
  )


@pytest.mark.parametrize(
  ("task", "solver", "message"),
  [
    (chain_sum(), "chain_sun", "warm_start.solver: .*did you mean chain_sum"),
    (
      chain_sum("{question}", dataset="leg_counting", max_animals=3),
      "chain_sum",
      "warm_start.solver: .*cannot solve leg_counting",
    ),
    (
      sections.TaskSection(answer_prefix="answer:"),
      "chain_sum",
      "task.answer_prefix: 'answer:' finds None",
    ),
  ],
)
def test_a_warm_start_that_cannot_work_is_named(task, solver, message):
  with pytest.raises(sections.ConfigError, match=message):
    validate_warm_start(task, solver=solver)


def test_a_right_warm_start_passes():
  validate_warm_start(chain_sum())


def test_a_solution_longer_than_a_row_is_named_before_anything_is_made():
  with pytest.raises(
    sections.ConfigError, match="train.tokens_per_row: 20, but .*; use more"
  ):
    validate_warm_start(chain_sum(), max_tokens=20)


def rows_with_solutions(tmp_path, **columns):
  values = [
    {
      "question": f"What is {i} + 1?",
      "answer": f"We add 1 to {i}.\n#### {i + 1}",
      **{name: value for name, value in columns.items()},
    }
    for i in range(40)
  ]
  path = test_rows.write(tmp_path / "a.jsonl", values)
  return rows_lib.Rows(dataset=f"jsonl:{path}")


def of_rows(items, solver, *, scorer=mathematics.score, max_tokens=200):
  made = test_rows.prompt_source(items, answer_prefix="####")
  section = sections.WarmStartSection(solver=solver, num_examples=30)
  worked_examples_lib.validate(
    made, section, max_tokens=max_tokens, scorer=scorer
  )
  return [
    (
      TOKENIZER.decode(e.tokens[~e.loss_mask]),
      TOKENIZER.decode(e.tokens[e.loss_mask]),
    )
    for e in worked_examples_lib.WorkedExamples(
      made, section, max_tokens=max_tokens
    )
  ]


def add_one(item, rng):
  """A solver of one's own."""
  number = int(item["question"].split()[2])
  return f"The {rng.choice(['sum', 'result'])} is\n#### {number + 1}"


def add_two(item, rng):
  """Solves nothing."""
  return 3


def test_solutions_come_from_a_column_of_the_data(tmp_path):
  # Its answer is not the extracted one, but the run's reward accepts it.
  items = rows_with_solutions(tmp_path)
  for prompt, solution in of_rows(items, "field:answer"):
    number = int(prompt.split()[2])
    assert solution == f"We add 1 to {number}.\n#### {number + 1}"
  items = rows_with_solutions(tmp_path, solution="no number at all")
  with pytest.raises(
    sections.ConfigError, match="^task.answer_prefix: '####' finds None"
  ):
    of_rows(items, "field:solution")


def test_solutions_come_from_a_function_of_ones_own(tmp_path):
  items = rows_with_solutions(tmp_path)
  found = of_rows(items, "test_worked_examples:add_one")
  assert {text.split()[1] for _, text in found} == {"sum", "result"}
  assert of_rows(items, "test_worked_examples:add_one") == found


@pytest.mark.parametrize(
  ("solver", "words"),
  [
    ("field:solutoin", "no text in 'solutoin'; did you mean solution"),
    ("field:number", "no text in 'number'"),
    ("no_such_module:f", "cannot be imported: ModuleNotFoundError: No"),
    ("test_worked_examples:none", "has no function 'none'"),
    ("test_worked_examples:add_two", "returned 3 for a/warm_start/"),
    ("field:", "is none of chain_sum, number_sorting, countdown, messages"),
  ],
)
def test_a_solver_that_cannot_be_used_is_named(tmp_path, solver, words):
  items = rows_with_solutions(tmp_path, solution="#### 1", number=3)
  with pytest.raises(sections.ConfigError) as raised:
    of_rows(items, solver, scorer=None, max_tokens=400)
  assert str(raised.value).startswith("warm_start.solver: ")
  assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_reward_that_fails_for_a_solution_is_named(tmp_path):
  items = rows_with_solutions(tmp_path)
  with pytest.raises(
    sections.ConfigError, match="the reward of the run fails .* KeyError"
  ):
    of_rows(items, "field:answer", scorer=reasoning.score)
