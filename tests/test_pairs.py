"""Pairs from columns of data and from solvers: which, and what is refused."""

import pytest
import test_prompts
import test_rows

from jaxrl_async.config import sections
from jaxrl_async.data import pairs as pairs_lib
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.run import preference_checks

TOKENIZER = test_prompts.TOKENIZER


def decoded(pair):
  """The prompts and the completions of a pair."""
  return [
    TOKENIZER.decode(x.tokens[x.loss_mask == part])
    for x in (pair.chosen, pair.rejected)
    for part in (False, True)
  ]


def pairs_of(tmp_path, rows, *, fields=None, max_tokens=200, **section):
  path = test_rows.write(tmp_path / "a.jsonl", rows)
  fields = {"question": "prompt", "answer": ""} if fields is None else fields
  items = rows_lib.Rows(dataset=f"jsonl:{path}", fields=fields)
  return pairs_lib.Pairs(
    test_rows.prompt_source(items),
    sections.PreferenceSection(**section),
    corrupted_frac=0.5,
    split=source_lib.Split.WARM_START,
    num_examples=30,
    max_tokens=max_tokens,
  )


def texts(count=40, **columns):
  return [
    {"prompt": f"{i}+1", "chosen": f"={i + 1}", "rejected": f"={i}", **columns}
    for i in range(count)
  ]


def test_columns_make_pairs_that_end_as_a_policy_ends_them(tmp_path):
  found = list(pairs_of(tmp_path, texts()))
  assert len(found) == 30
  for pair in found:
    prompt, chosen, same, rejected = decoded(pair)
    assert prompt == same
    number = int(prompt.split("+")[0])
    assert chosen.startswith(f"={number + 1}")
    assert rejected.startswith(f"={number}")
    for side in (pair.chosen, pair.rejected):
      assert side.tokens[-1] == TOKENIZER.eos_id and side.loss_mask[-1]


def chat(question, answer):
  return [
    {"role": "user", "content": question},
    {"role": "assistant", "content": answer},
  ]


def test_a_chat_is_its_last_answer_if_it_asks_what_the_prompt_asks(tmp_path):
  rows = [
    {
      "prompt": f"{i}+1",
      "chosen": chat(f"{i}+1", "right"),
      "rejected": chat(f"{i}+1", "wrong")[1:],  # the answer alone
    }
    for i in range(40)
  ]
  for pair in pairs_of(tmp_path, rows):
    _, chosen, _, rejected = decoded(pair)
    assert chosen.startswith("right") and rejected.startswith("wrong")
  other = [row | {"rejected": chat("2+2", "wrong")} for row in rows]
  with pytest.raises(sections.ConfigError, match="does not ask what the prom"):
    list(pairs_of(tmp_path, other))
  unanswered = [row | {"chosen": row["chosen"][:1]} for row in rows]
  with pytest.raises(sections.ConfigError, match="ends without an answer"):
    list(pairs_of(tmp_path, unanswered))


@pytest.mark.slow
def test_equal_completions_and_long_ones_are_left_out_and_counted(tmp_path):
  rows = [
    row | {"rejected": row["chosen"] if i % 4 == 0 else "x" * (i % 4)}
    for i, row in enumerate(texts(80))
  ]
  rows[1]["rejected"] = "x" * 300
  pairs = pairs_of(tmp_path, rows, max_tokens=40)
  for pair in pairs:
    assert len(pair) <= 40
    _, chosen, _, rejected = decoded(pair)
    assert chosen != rejected
  equal = [line for line in pairs.left_out() if "two equal completions" in line]
  assert len(equal) == 1 and int(equal[0].split()[0]) > 2
  with pytest.raises(
    sections.ConfigError, match="^train.tokens_per_row: 4, but the shortest of"
  ):
    list(pairs_of(tmp_path, texts(), max_tokens=4))
  same = [row | {"rejected": row["chosen"]} for row in texts()]
  with pytest.raises(
    sections.ConfigError, match="^task.dataset: nothing is to"
  ):
    list(pairs_of(tmp_path, same))


def test_solvers_make_right_and_wrong_solutions():
  pairs = pairs_lib.Pairs(
    test_prompts.source(None),
    sections.PreferenceSection(chosen="chain_sum", rejected="chain_sum"),
    corrupted_frac=0.4,
    split=source_lib.Split.WARM_START,
    num_examples=40,
    max_tokens=400,
  )
  for pair in pairs:
    prompt, chosen, _, rejected = decoded(pair)
    end = len(chosen) - len(TOKENIZER.decode([TOKENIZER.eos_id]))
    assert int(chosen[:end].split("=")[-1]) == eval(prompt)
    assert chosen != rejected
  assert pairs.left_out()  # where no mistake was made


def test_data_without_pairs_is_named_with_both_fields(tmp_path):
  rows = [{"prompt": row["prompt"], "better": "x"} for row in texts()]
  with pytest.raises(sections.ConfigError) as refused:
    list(pairs_of(tmp_path, rows))
  message = str(refused.value)
  assert message.startswith("preference.chosen: ") and "\n" not in message
  assert "'chosen'" in message and "preference.rejected" in message


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (
      {"preference.chosen": "field:chosen"},
      ["preference.chosen", "task.dataset", "chain_sum"],
    ),
    (
      {"preference.rejected": "nobody"},
      ["preference.rejected: 'nobody' is none of"],
    ),
    (
      {"preference.rejected": "m:f", "preference.chosen": "m:f"},
      ["preference.rejected", "preference.chosen"],
    ),
    (
      {"preference.chosen": "messages"},
      ["preference.chosen: 'messages'", "field:reply"],
    ),
    (
      {"preference.label_smoothing": 0.1, "preference.loss": "ipo"},
      ["preference.label_smoothing: 0.1", "preference.loss is ipo"],
    ),
    (
      {"warm_start.checkpoint": ""},
      ["warm_start.checkpoint", "model.name 'tiny' has no weights"],
    ),
    (
      {"warm_start.checkpoint": "", "model.name": "/tmp"},
      ["warm_start.num_steps: 300", "warm_start.checkpoint"],
    ),
    (
      {"model.lora.rank": 2, "preference.optimizer.name": "muon"},
      ["preference.optimizer.name: muon", "model.lora.rank"],
    ),
    (
      {"preference.rows_per_batch": 6},
      ["preference.rows_per_batch: 6", "train.rows_per_microbatch 4"],
    ),
    (
      {"warm_start.corrupted_frac": 0.0},
      ["preference.rejected: 'chain_sum'", "warm_start.corrupted_frac is 0"],
    ),
    (
      {"preference.patience": 2, "preference.eval_every": 0},
      ["preference.patience: 2", "preference.eval_every is 0"],
    ),
    (
      {"preference.reward_loss": "steps"},
      ["preference.reward_loss: steps", "launch/reward_model.py"],
    ),
    (
      {"preference.labels": "marks"},
      ["preference.labels: marks", "launch/reward_model.py", "use labels"],
    ),
  ],
)
def test_settings_that_contradict_each_other_are_one_line(changes, words):
  is_refused_in_one_line(preference_checks.check, changes, words)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"preference.loss": "ipo"}, ["preference.loss: ipo", "use dpo"]),
    ({"preference.beta": 0.2}, ["preference.beta: 0.2", "use 0.1"]),
    ({"preference.label_smoothing": 0.1}, ["preference.label_smoothing: 0.1"]),
    (
      {"preference.length_normalised": True},
      ["preference.length_normalised: True", "use False"],
    ),
  ],
)
def test_a_reward_model_has_no_loss_of_a_policy(changes, words):
  check = preference_checks.check_reward_model
  is_refused_in_one_line(check, changes, [*words, "launch/prefer.py"])


def is_refused_in_one_line(check, changes, words):
  import config_values

  config = config_values.get_config()
  config.warm_start.checkpoint = "/tmp"
  config.warm_start.corrupted_frac = 0.5
  config.preference.chosen = config.preference.rejected = "chain_sum"
  check(config)
  enums = {
    "preference.loss": sections.PreferenceLoss,
    "preference.reward_loss": sections.RewardLoss,
    "preference.optimizer.name": sections.OptimizerName,
  }
  for path, value in changes.items():
    kind = enums.get(path, lambda x: x)
    config_values.put(config, path, kind(value))
  with pytest.raises(sections.ConfigError) as refused:
    check(config)
  for word in words:
    assert word in str(refused.value)
  assert "\n" not in str(refused.value)
