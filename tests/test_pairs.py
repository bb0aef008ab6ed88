"""Pairs from columns of data and from solvers: which, and what is refused."""

import dataclasses

import chat_templates
import numpy as np
import pytest
import test_prompts
import test_rows

from jaxrl_async.config import sections
from jaxrl_async.data import pairs as pairs_lib
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib

TOKENIZER = test_prompts.TOKENIZER
CALLING = chat_templates.CALLED[1]  # a message with a call


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


def test_a_pair_of_messages_is_learned_as_the_template_writes_it(tmp_path):
  tokenizer, template = chat_templates.load(chat_templates.QWEN)
  rows = [
    {
      "chat": [*chat(f"{i}?", "x")[:1], CALLING],
      "rejected": [{"role": "assistant", "content": "No.", "name": None}],
      "tools": chat_templates.TOOLS,
    }
    for i in range(40)
  ]
  pairs = pairs_of(
    tmp_path,
    rows,
    fields={"messages": "chat", "answer": ""},
    chosen="field:reply",
  )
  pairs.source = dataclasses.replace(
    pairs.source,
    tokenizer=tokenizer,
    chat_template=template,
    max_prompt_tokens=999,
  )
  pairs._max_tokens = 2_000
  backend = tokenizer._tokenizer
  for pair in pairs:
    prompt, chosen, same, rejected = (
      backend.decode(x.tokens[x.loss_mask == part], skip_special_tokens=False)
      for x in (pair.chosen, pair.rejected)
      for part in (False, True)
    )
    assert prompt == same and '"name": "weather"' in prompt
    assert chosen.startswith("<tool_call>") and "Zürich" in chosen
    assert chosen.endswith("</tool_call><|im_end|>")
    assert rejected == "No.<|im_end|>"
    assert np.isin(pair.chosen.tokens, tokenizer.eos_id).sum() == 3


def test_a_message_with_a_call_is_no_completion_of_a_plain_prompt(tmp_path):
  rows = [row | {"chosen": [CALLING]} for row in texts()]
  with pytest.raises(sections.ConfigError, match="calls or thoughts needs"):
    list(pairs_of(tmp_path, rows))


def test_an_example_longer_than_the_model_was_made_for_is_refused(tmp_path):
  pairs = pairs_of(tmp_path, texts())
  lengths = [max(len(p.chosen), len(p.rejected)) for p in pairs]
  assert max(map(len, pairs)) > 2 * max(lengths) - 3
  for most, is_refused in ((max(lengths), False), (max(lengths) - 1, True)):
    pairs = pairs_of(tmp_path, texts())
    pairs.source = dataclasses.replace(pairs.source, max_positions=most)
    if not is_refused:
      assert len(list(pairs)) == 30
      continue
    with pytest.raises(
      sections.ConfigError, match=f"^train.tokens_per_row: .* made for {most} "
    ):
      list(pairs)
