"""Labels of solutions: of whole ones, and of steps by completing them."""

import json

import pytest
import test_fine_tune

from jaxrl_async.config import sections
from jaxrl_async.data import labelled_steps
from jaxrl_async.supervised import fine_tune
from jaxrl_async.supervised import reward_model
from jaxrl_async.supervised import step_labels
from jaxrl_async.supervised import supervised


def in_lines(item, rng):
  """A solution of a few short lines; a solver of the warm start."""
  lines = rng.integers(1, 100, rng.integers(2, 5))
  return "".join(f"{line}\n" for line in lines) + f"={item['answer']}"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """A policy that writes lines."""
  config = test_fine_tune.make_config(num_steps=30, eval_every=0)
  config.warm_start.solver = f"{__name__}:{in_lines.__name__}"
  workdir = tmp_path_factory.mktemp("policy")
  fine_tune.fine_tune(config, workdir)
  return str(workdir / supervised.PARAMS)


def make_config(start, reward):
  config = test_fine_tune.make_config()
  config.warm_start.checkpoint = start
  config.task.reward = f"reward_scorers:{reward}"
  config.rollout.max_completion_tokens = 56
  config.rollout.cache_tokens = config.train.tokens_per_row = 96
  config.rollout.prefill_buckets = config.rollout.window_buckets = (96,)
  config.preference.reward_loss = sections.RewardLoss.STEPS
  return config


def written(config, workdir, **options):
  options = {"num_prompts": 24, "completions": 4} | options
  summary = step_labels.write(config, workdir, **options)
  lines = (workdir / step_labels.FILE).read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert summary["rows"] == len(rows)
  assert summary["without_label"] == options["num_prompts"] - len(rows)
  assert summary["steps"] == sum(len(row["labels"]) for row in rows)
  return rows


@pytest.mark.slow
def test_labels_are_shares_of_right_solutions_from_each_step(tmp_path, start):
  config = make_config(start, "begins_odd")
  whole = written(config, tmp_path / "outcome", kind="outcome")
  assert {row["labels"][0] for row in whole} == {0.0, 1.0}
  for row in whole:
    (text,) = row["steps"]
    assert row["labels"] == [ord(text[0]) % 2]
    assert {"question", "answer", "expression"} <= row.keys()
  # The same solutions. How they begin decides, however they are completed.
  steps = written(config, tmp_path / "steps", kind="monte_carlo")
  texts = {"".join(row["steps"]) for row in steps}
  assert texts == {row["steps"][0] for row in whole}
  assert max(len(row["steps"]) for row in steps) > 1
  for row in steps:
    assert set(row["labels"]) == {ord(row["steps"][0][0]) % 2}
  # With another reward the steps of a solution differ.
  config = make_config(start, "has_odd_length")
  config.task.fields.question = "problem"  # of the file that is written
  shares = written(config, tmp_path / "shares", kind="monte_carlo")
  labels = [x for row in shares for x in row["labels"][:-1]]
  assert set(labels) <= {0.0, 0.25, 0.5, 0.75, 1.0}
  assert len(set(labels)) > 2
  for row in shares:
    assert row["labels"][-1] == len("".join(row["steps"])) % 2

  # A reward model reads them with the template of the run.
  config.task.dataset = f"jsonl:{tmp_path / 'shares' / step_labels.FILE}"
  config.task.params = type(config.task.params)()
  config.eval.num_items = config.preference.num_steps = 2
  config.preference.num_examples = config.preference.num_eval_examples = 8
  summary = reward_model.train(config, tmp_path / "model")
  assert summary["validation_loss"] < 1


@pytest.mark.slow
def test_prompts_whose_solutions_have_no_step_are_counted(
  tmp_path, start, monkeypatch
):
  config = make_config(start, "begins_odd")
  ends = labelled_steps.ends
  monkeypatch.setattr(
    labelled_steps,
    "ends",
    lambda tokens, tokenizer: ends(tokens, tokenizer) * (tokens[0] % 2),
  )
  rows = written(config, tmp_path, kind="monte_carlo", completions=1)
  assert 0 < len(rows) < 24
  monkeypatch.setattr(labelled_steps, "ends", lambda tokens, tokenizer: [])
  with pytest.raises(sections.ConfigError, match="^labels: no solution has"):
    written(config, tmp_path, kind="monte_carlo")
