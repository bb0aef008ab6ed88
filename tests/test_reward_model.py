"""Reward models: what they learn, their files, and what they say of texts."""

import json

import jax
from jax import numpy as jnp
import metrics_page
import numpy as np
import preference_world
import pytest
import test_fine_tune
import test_prefer
import test_preference_objectives
import test_preferences
import test_prompts
import test_rows
import tokenizers

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import labelled_steps
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.supervised import reward_model
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import reward_objectives

start = test_prefer.start  # a fixture
TOKENIZER = test_prompts.TOKENIZER
STEPS = sections.RewardLoss.STEPS


def microbatch(rows, values):
  nothing = jnp.zeros_like(values)
  return test_preference_objectives.microbatch(rows, nothing, values)


def test_a_completions_score_is_that_after_its_last_token():
  pairs = preference_world.counting(12)
  rows = reward_objectives.pack_pairs(
    pairs, tokens_per_row=test_preference_objectives.WIDTH
  )
  rng = np.random.default_rng(0)
  values = rng.normal(0, 3, rows.tokens.shape).astype(np.float32)
  ends = [
    values[row, columns[-1]]
    for _, _, row, columns in test_preference_objectives.segments(rows)
  ]
  margins = np.subtract(ends[::2], ends[1::2], dtype=np.float64)
  assert 0 < (margins > 0).mean() < 1
  found = reward_objectives.PAIRS.sums(microbatch(rows, jnp.asarray(values)))
  wanted = -sum(map(test_preferences.log_sigmoid, margins))
  assert float(found["loss"]) == pytest.approx(wanted, rel=1e-5)
  assert float(found["accuracy"]) == (margins > 0).sum()
  assert float(found["margin"]) == pytest.approx(margins.sum(), rel=1e-4)

  # No other state has an influence, and both ends of each pair have one.
  def loss(x):
    x = jnp.where(rows.loss_mask, x, jnp.nan)
    return reward_objectives.PAIRS.loss(microbatch(rows, x))[0]

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(values))
  assert float(value) == pytest.approx(wanted / 12, rel=1e-5)
  assert ((np.asarray(gradient) != 0) == rows.loss_mask).all()
  assert rows.loss_mask.sum() == 24


def labelled(tmp_path, rows, max_tokens=60, **section):
  path = test_rows.write(tmp_path / "a.jsonl", rows)
  fields = {"question": "prompt", "answer": ""}
  items = rows_lib.Rows(dataset=f"jsonl:{path}", fields=fields)
  return list(
    labelled_steps.Solutions(
      test_rows.prompt_source(items),
      sections.PreferenceSection(**section),
      split=source_lib.Split.WARM_START,
      num_examples=20,
      max_tokens=max_tokens,
    )
  )


def steps(count=40, **columns):
  return [
    {
      "prompt": f"{i}+1",
      "steps": ["a", "bb\n", "ccc"],
      "labels": [True, (i % 2) / 4, 0],
      **columns,
    }
    for i in range(count)
  ]


def test_the_labels_lie_at_the_last_tokens_of_the_steps(tmp_path):
  solutions = labelled(tmp_path, steps())
  for solution in solutions:
    example = solution.example
    ends = np.flatnonzero(example.loss_mask)
    assert len(ends) == 3
    assert TOKENIZER.decode(example.tokens[: ends[-1] + 1]).endswith(
      "+1\na\nbb\nccc\n"
    )
    assert TOKENIZER.decode(example.tokens[ends]) == "\n\n\n"
    assert solution.labels[ends[0]] == 1 and solution.labels[ends[2]] == 0
    assert not solution.labels[~example.loss_mask].any()
  assert {x.labels[x.example.loss_mask][1] for x in solutions} == {0.0, 0.25}
  rows = reward_objectives.pack_steps(solutions, tokens_per_row=60)
  rng = np.random.default_rng(0)
  values = rng.normal(0, 2, rows.tokens.shape).astype(np.float32)
  labels = rows.fields[reward_objectives.LABELS]
  wanted, right = 0.0, 0
  for row, column in np.argwhere(rows.loss_mask):
    r, y = values[row, column], labels[row, column]
    wanted -= y * test_preferences.log_sigmoid(r)
    wanted -= (1 - y) * test_preferences.log_sigmoid(-r)
    right += (r > 0) == (y > 0.5)
  found = reward_objectives.STEPS.sums(microbatch(rows, jnp.asarray(values)))
  assert float(found["loss"]) == pytest.approx(wanted, rel=1e-5)
  assert float(found["accuracy"]) == right
  assert labels.sum() == sum(x.labels.sum() for x in solutions) > 20

  def loss(x):
    x = jnp.where(rows.loss_mask, x, jnp.nan)
    return reward_objectives.STEPS.loss(microbatch(rows, x))[0]

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(values))
  assert float(value) == pytest.approx(wanted / rows.loss_mask.sum(), rel=1e-5)
  assert ((np.asarray(gradient) != 0) == rows.loss_mask).all()


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("a\nbb\n", ["a\n", "bb\n"]),
    ("a\n\n \nbb⟨eos⟩", ["a\n", "\n \nbb⟨eos⟩"]),
    ("a\n⟨eos⟩", ["a\n"]),
    ("a\nbb", ["a\n", "bb"]),
    ("\n\n⟨eos⟩", []),
    ("⟨eos⟩", []),
    ("", []),
  ],
)
def test_steps_of_a_completion_are_its_lines(text, expected):
  tokens = TOKENIZER.encode(text.removesuffix("⟨eos⟩"))
  if text.endswith("⟨eos⟩"):
    tokens = np.append(tokens, np.int32(TOKENIZER.eos_id))
  found = labelled_steps.ends(tokens, TOKENIZER)
  begins = [0, *(end + 1 for end in found)]
  assert [
    TOKENIZER.decode_all(tokens[begin : end + 1].tolist())
    for begin, end in zip(begins[:-1], found, strict=True)
  ] == expected
  # It is scored where a row with these steps has its labels.
  prompt = types.Prompt(prompt_id="", tokens=TOKENIZER.encode("1+1"), item={})
  example, ends = labelled_steps.completed(prompt, tokens, TOKENIZER)
  assert ends == found and example.loss_mask.sum() == len(found)
  if expected:
    of_row = labelled_steps.tokenized(
      prompt, [x.removesuffix("⟨eos⟩") for x in expected], TOKENIZER
    )
    length = len(of_row)
    assert example.tokens[:length].tolist() == of_row.tokens.tolist()
    assert example.loss_mask[:length].tolist() == of_row.loss_mask.tolist()


def test_the_last_step_is_encoded_with_its_line_break():
  vocabulary = {"3": 0, ".": 1, "Ċ": 2, ".Ċ": 3, "<e>": 4, "<p>": 5}
  library = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocabulary, [(".", "Ċ")])
  )
  library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  library.decoder = tokenizers.decoders.ByteLevel()
  library.add_special_tokens(["<e>", "<p>"])
  tokenizer = tokenizer_lib.Tokenizer(library, eos_token="<e>", pad_token="<p>")
  prompt = types.Prompt(prompt_id="", tokens=np.array([2], np.int32), item={})
  written = np.array([0, 3, 0, 1, 4], np.int32)  # "3.", a break, "3.", the end
  example, ends = labelled_steps.completed(prompt, written, tokenizer)
  assert ends == [1, 4]
  assert example.tokens.tolist() == [2, 0, 3, 0, 3]
  of_row = labelled_steps.tokenized(prompt, ["3.", "3."], tokenizer)
  assert example.tokens.tolist() == of_row.tokens.tolist()
  assert example.loss_mask.tolist() == of_row.loss_mask.tolist()


@pytest.mark.parametrize(
  ("rows", "words"),
  [
    (
      steps(labels=[True]),
      ["preference.labels", "1 for 3", "preference.steps"],
    ),
    (steps(labels=[True, 1.5, 0]), ["preference.labels", "true and false"]),
    (steps(steps="a"), ["preference.steps", "not a list of texts"]),
    (
      [{"prompt": f"{i}"} for i in range(40)],
      ["preference.steps: the data has no column 'steps'", "preference.labels"],
    ),
  ],
)
def test_data_without_labelled_steps_is_named(tmp_path, rows, words):
  with pytest.raises(sections.ConfigError) as refused:
    labelled(tmp_path, rows)
  for word in words:
    assert word in str(refused.value)
  assert "\n" not in str(refused.value)


def make_config(tmp_path, start, **fields):
  config = test_prefer.make_config(tmp_path, start, **fields)
  config.preference.optimizer.learning_rate = 1e-2
  return config


def metrics(workdir):
  lines = test_fine_tune.metrics(workdir)
  for line in lines:
    line.pop("reward_model/step_s", None)
  return lines


@pytest.mark.slow
def test_it_learns_scores_and_scores_texts_of_a_file(tmp_path, start):
  config = make_config(tmp_path, start, num_steps=30, eval_every=10)
  workdir = tmp_path / "model"
  summary = reward_model.train(config, workdir)
  lines = metrics(workdir)
  assert lines[0]["reward_model/validation_loss"] == pytest.approx(np.log(2))
  assert summary["validation_loss"] < 0.3
  assert lines[-1]["reward_model/validation_accuracy"] > 0.9
  named = {name for line in lines for name in line} - {"step"}
  in_page = {x for x in metrics_page.entries() if x.startswith("reward_model")}
  assert named == in_page - {"reward_model/step_s"}
  # Each row's score, whatever row of tokens it was packed into.
  uri = config.task.dataset
  found = list(reward_model.scores(config, workdir, uri))
  assert [line["row"] for line in found] == list(range(60))
  values = np.array([line["score"] for line in found])
  assert np.mean(values[1::2]) > np.mean(values[::2]) + 1
  one = tmp_path / "one.jsonl"
  text = (tmp_path / "pairs.jsonl").read_text().splitlines()[7]
  one.write_text(text + "\n")
  (alone,) = reward_model.scores(config, workdir, f"jsonl:{one}")
  assert alone["score"] == pytest.approx(values[7], rel=1e-4)
  without = json.loads(text)
  del without["completion"]
  one.write_text(json.dumps(without) + "\n")
  with pytest.raises(sections.ConfigError, match="'completion'"):
    list(reward_model.scores(config, workdir, f"jsonl:{one}"))
  # The same command on what is finished changes nothing.
  again = reward_model.train(config, workdir)
  assert test_fine_tune.without_time(again) == test_fine_tune.without_time(
    summary
  )


@pytest.mark.slow
@pytest.mark.nightly
def test_it_learns_which_steps_are_right(tmp_path, start):
  config = make_config(
    tmp_path, start, num_steps=30, eval_every=0, reward_loss=STEPS
  )
  config.model.lora.rank = 4
  config.model.lora.base_dtype = "float32"
  workdir = tmp_path / "model"
  reward_model.train(config, workdir)
  lines = metrics(workdir)
  assert lines[0]["reward_model/loss"] == pytest.approx(np.log(2))
  assert lines[-1]["reward_model/accuracy"] > 0.9
  found = list(reward_model.scores(config, workdir, config.task.dataset))
  right = np.array([line["steps"] for line in found])
  assert right.shape == (60, 2)
  labels = np.arange(60) % 2
  assert ((right[:, 1] > 0.5) == labels).mean() > 0.9


def test_without_a_model_nothing_is_scored(tmp_path):
  config = make_config(tmp_path, "never read")
  with pytest.raises(sections.ConfigError, match="^workdir: .*no reward model"):
    list(reward_model.scores(config, tmp_path / "new", config.task.dataset))
