"""Rows of files as a source of prompts."""

import json
import pathlib

import jax
import pytest

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

ROOT = pathlib.Path(__file__).parents[1]
TRAIN, EVAL = source_lib.Split.TRAIN, source_lib.Split.EVAL


def write(path, values):
  lines = [x if isinstance(x, str) else json.dumps(x) for x in values]
  path.write_text("\n".join(lines) + "\n")
  return path


def sums(numbers):
  return [
    {"question": f"{i} + {i} = ", "answer": f"{2 * i}", "level": i % 3}
    for i in numbers
  ]


def prompt_source(items, **task):
  return prompts.PromptSource(
    items=items,
    task=sections.TaskSection(**task),
    tokenizer=tokenizer_lib.character_level(),
    seed=0,
    max_prompt_tokens=200,
  )


def take(source, split, count, first_index=0):
  stream = source.open(split, first_index, num_workers=2)
  return [stream.next() for _ in range(count)]


def test_rows_become_items(tmp_path):
  path = write(tmp_path / "sums.jsonl", ["", *sums(range(40)), "  "])
  source = rows_lib.Rows(dataset=f"jsonl:{path}")
  source.check()
  assert isinstance(source, source_lib.Source)
  for item in take(source, TRAIN, 60):
    i = item["index"]
    assert item == {
      "index": i,
      "question": f"{i} + {i} = ",
      "answer": f"{2 * i}",
      "metadata": {"level": i % 3},
    }


def test_each_pass_has_every_row_once_in_an_order_of_its_own(tmp_path):
  path = write(tmp_path / "sums.jsonl", sums(range(40)))
  source = rows_lib.Rows(dataset=f"jsonl:{path}", seed=3)
  held_out = {item["index"] for item in take(source, EVAL, 40)}
  num_trained = 40 - len(held_out)
  assert 0 < len(held_out) < 20
  indices = [item["index"] for item in take(source, TRAIN, 2 * num_trained)]
  passes = indices[:num_trained], indices[num_trained:]
  for one in passes:
    assert sorted(one) == sorted(set(range(40)) - held_out)
  assert passes[0] != passes[1] != sorted(passes[1])
  again = rows_lib.Rows(dataset=f"jsonl:{path}", seed=3)
  for first_index in (0, 1, num_trained, num_trained + 7):
    items = take(again, TRAIN, 5, first_index)
    expected = indices[first_index : first_index + 5]
    assert [item["index"] for item in items] == expected
  other = [
    i["index"]
    for i in take(rows_lib.Rows(dataset=f"jsonl:{path}", seed=4), TRAIN, 9)
  ]
  assert other != indices[:9]


def test_questions_of_the_evaluation_file_are_not_trained_on(tmp_path):
  train = write(tmp_path / "train.jsonl", sums(range(20)))
  test = write(tmp_path / "test.jsonl", sums(range(15, 25)))
  source = rows_lib.Rows(dataset=f"jsonl:{train}", eval_dataset=f"jsonl:{test}")
  trained = {item["question"] for item in take(source, TRAIN, 40)}
  held_out = [item["question"] for item in take(source, EVAL, 10)]
  assert trained == {x["question"] for x in sums(range(15))}
  assert held_out == [x["question"] for x in sums(range(15, 25))]
  assert source.versions.keys() == {f"jsonl:{train}", f"jsonl:{test}"}
  assert source.num_questions(EVAL) == 10
  assert source.is_held_out("16 + 16 = ") and not source.is_held_out("no")


# An answer as a file has it, and the text of it, or what is wrong with it.
ANSWERS = [
  ('" 5 "', " 5 "),
  ("5", "5"),
  ("-7", "-7"),
  ("42.0", "42"),
  ("1e-05", "0.00001"),
  ("0.1", "0.1"),
  ("1e22", "10000000000000000000000"),
  ("123456789012345678901", "123456789012345678901"),
  ("-0.0", "0"),
  ("NaN", ValueError("nan, neither a text nor a number")),
  ("Infinity", ValueError("inf, neither a text nor a number")),
  ("true", ValueError("True, neither a text nor a number")),
  ('["5"]', ValueError("['5'], neither a text nor a number")),
  ('{"value": "5"}', ValueError("neither a text nor a number; name a column")),
  ("[]", ValueError("[], neither a text nor a number")),
]


@pytest.mark.parametrize(("stored", "wanted"), ANSWERS)
def test_an_answer_is_a_text(tmp_path, stored, wanted):
  rows = [f'{{"question": "{i}", "answer": {stored}}}' for i in range(30)]
  source = rows_lib.Rows(dataset=f"jsonl:{write(tmp_path / 'a.jsonl', rows)}")
  if isinstance(wanted, str):
    source.check()
    assert {item["answer"] for item in take(source, TRAIN, 9)} == {wanted}
    return
  with pytest.raises(sections.ConfigError, match="30 of 30 rows") as refused:
    source.check()
  assert f"a.jsonl:1: the column 'answer' is {wanted}"[-40:] in str(
    refused.value
  )


def test_a_column_of_integers_with_a_null_has_answers_without_a_point(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  columns = {
    "question": [str(i) for i in range(30)],
    "answer": [None, *map(float, range(1, 30))],  # as pandas writes it
  }
  parquet.write_table(pyarrow.table(columns), tmp_path / "a")
  source = rows_lib.Rows(
    dataset=f"parquet:{tmp_path / 'a'}", skips_bad_rows=True
  )
  source.check()
  assert source.num_bad() == 1
  for item in take(source, TRAIN, 20):
    assert item["answer"] == item["question"]


def test_a_column_may_be_named_in_a_column(tmp_path):
  rows = [
    {
      "question": f"q{i}",
      "a.b": "0",
      "reward_model": {"ground_truth": i, "style": {"name": "rule"}},
    }
    for i in range(30)
  ]
  path = write(tmp_path / "a.jsonl", rows)

  def of(name):
    return rows_lib.Rows(dataset=f"jsonl:{path}", fields={"answer": name})

  for item in take(of("reward_model.ground_truth"), TRAIN, 9):
    assert item["question"] == f"q{item['answer']}"
    assert item["metadata"]["reward_model"]["style"] == {"name": "rule"}
  assert take(of("reward_model.style.name"), TRAIN, 1)[0]["answer"] == "rule"
  assert take(of("a.b"), TRAIN, 1)[0]["answer"] == "0"
  for name in ("reward_model.truth", "question.truth", "reward_model.style.a"):
    with pytest.raises(sections.ConfigError, match=f"no column '{name}' for"):
      of(name).check()
  with pytest.raises(sections.ConfigError, match="'reward_model' is {'ground"):
    of("reward_model").check()


@pytest.mark.parametrize(
  ("row", "words"),
  [
    ("{", "a.jsonl:3: not JSON"),
    ("[1]", "a.jsonl:3: not a JSON object"),
    ({"answer": "1"}, "a.jsonl:3: no column 'question' for the question"),
    ({"question": "1"}, "a.jsonl:3: no column 'answer' for the answer"),
    (
      {"question": " ", "answer": "1"},
      "a.jsonl:3: the column 'question' is empty",
    ),
    ({"question": "a", "answer": None}, "the column 'answer' is empty"),
    ('{"question": "\\ud800", "answer": "1"}', "is not valid Unicode"),
    ('{"question": "1", "answer": "\\udfff"}', "is not valid Unicode"),
    ("[" * 100_000, "a.jsonl:3: not JSON: "),
    ({"question": 1, "answer": "1"}, "is 1, not a text"),
  ],
)
def test_a_bad_row_is_named_with_its_line_or_left_out(tmp_path, row, words):
  values = sums(range(30))
  path = write(tmp_path / "a.jsonl", [*values[:2], row, *values[2:]])
  with pytest.raises(sections.ConfigError, match="^task.dataset: 1 of 31") as e:
    rows_lib.Rows(dataset=f"jsonl:{path}").check()
  assert words in str(e.value) and "\n" not in str(e.value)
  source = rows_lib.Rows(dataset=f"jsonl:{path}", skips_bad_rows=True)
  source.check()
  items = take(source, TRAIN, 100) + take(source, EVAL, 100)
  assert {i["question"] for i in items} == {x["question"] for x in values}


@pytest.mark.parametrize(
  ("values", "settings", "words"),
  [
    ([], {}, "^task.dataset: .* has no rows"),
    (None, {}, "^task.dataset: .* cannot be read: No such"),
    (["{"], {"skips_bad_rows": True}, "1 of 1 rows cannot be used"),
    (sums([0]), {}, "^task.eval_percent: .* has 1 row, none of which"),
    (sums([0]), {"eval_percent": 99}, "^task.eval_percent: .* all of which"),
    (sums(range(3)), {"eval_dataset": "same"}, "^task.dataset: .* held out"),
    (
      sums(range(30)),
      {"in_template": ("question", "levle")},
      "^task.template: .* no column 'levle'; did you mean level",
    ),
  ],
)
def test_data_that_leaves_a_split_empty_is_refused(
  tmp_path, values, settings, words
):
  path = tmp_path / "a.jsonl"
  if values is not None:
    write(path, values)
  if settings.get("eval_dataset"):
    settings = {"eval_dataset": f"jsonl:{path}"}
  with pytest.raises(sections.ConfigError, match=words) as raised:
    rows_lib.Rows(dataset=f"jsonl:{path}", **settings).check()
  assert "\n" not in str(raised.value)


def test_a_row_without_what_the_template_names_is_a_bad_row(tmp_path):
  values = sums(range(30))
  del values[4]["level"]
  path = write(tmp_path / "a.jsonl", values)
  with pytest.raises(sections.ConfigError, match=":5: no column 'level' for"):
    rows_lib.Rows(dataset=f"jsonl:{path}", in_template=("level",)).check()


def test_what_is_left_out_is_told(tmp_path):
  path = write(tmp_path / "a.jsonl", ["{", *sums(range(30)), *["[]"] * 5])
  source = rows_lib.Rows(dataset=f"jsonl:{path}", skips_bad_rows=True)
  source.check()
  rows, bad = source.describe()
  num_held_out = source.num_questions(EVAL)
  assert rows == (
    f"a: {30 - num_held_out} rows for training, {num_held_out} held out (by a"
    " hash)"
  )
  assert source.num_bad() == 6
  assert "6 rows of 36 cannot be used and are left out" in bad
  assert f"{path}:1: not JSON" in bad and bad.endswith("and 3 more")


def test_passes_are_counted(tmp_path):
  path = write(tmp_path / "a.jsonl", sums(range(30)))
  source = rows_lib.Rows(dataset=f"jsonl:{path}")
  stream = prompts.PromptStream(prompt_source(source), TRAIN)
  num_trained = 30 - source.num_questions(EVAL)
  expected = {"data/bad_rows": 0.0, "data/prompts_too_long": 0.0}
  assert stream.metrics() == {"data/epoch": 0.0, **expected}
  for _ in range(num_trained + num_trained // 2):
    stream.next()
  epoch = (num_trained + num_trained // 2) / num_trained
  assert stream.metrics() == {"data/epoch": pytest.approx(epoch), **expected}


def test_the_warm_start_reads_the_training_rows_in_another_order(tmp_path):
  path = write(tmp_path / "a.jsonl", sums(range(30)))
  source = rows_lib.Rows(dataset=f"jsonl:{path}")
  orders = [
    [item["index"] for item in take(source, split, 20)]
    for split in (TRAIN, source_lib.Split.WARM_START)
  ]
  assert orders[0] != orders[1]
  assert set(orders[1]) <= {item["index"] for item in take(source, TRAIN, 30)}


def test_a_config_names_files(tmp_path):
  path = write(tmp_path / "a.jsonl", sums(range(30)))
  config = sections.Config()
  config.task.dataset = f"jsonl:{path}"
  config.task.eval_dataset = f"jsonl:{path}"
  source = setup_lib.source_of(config)
  assert source.dataset == source.eval_dataset == f"jsonl:{path}"
  assert setup_lib.resolve(config, jax.devices()).source.name == "a"


def test_a_dataset_that_is_its_own_test_set_is_read_once(tmp_path):
  path = tmp_path / "rows.jsonl"
  good = [json.dumps({"question": f"{i}?", "answer": str(i)}) for i in range(5)]
  path.write_text("\n".join([*good, "not JSON"]))
  dataset = f"jsonl:{path}"
  source = rows_lib.Rows(
    dataset=dataset, eval_dataset=dataset, skips_bad_rows=True
  )
  assert source.num_questions(EVAL) == 5 and source.num_bad() == 1
  assert len(source.describe()) == 2
  path.unlink()
  lost = rows_lib.Rows(dataset=dataset, eval_dataset=dataset)
  with pytest.raises(sections.ConfigError, match=r"^task\.dataset: .* cannot"):
    lost.check()
