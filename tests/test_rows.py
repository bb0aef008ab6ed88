"""Rows of files as a source of prompts."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxrl_async.config import sections
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.run import setup as setup_lib

ROOT = pathlib.Path(__file__).parents[1]
GSM8K = ROOT / "../shared/data/gsm8k"
TRAIN, EVAL = source_lib.Split.TRAIN, source_lib.Split.EVAL
TIMEOUT_S = 600


def write(path, values):
  lines = [x if isinstance(x, str) else json.dumps(x) for x in values]
  path.write_text("\n".join(lines) + "\n")
  return path


def sums(numbers):
  return [
    {"question": f"{i} + {i} = ", "answer": f"{2 * i}", "level": i % 3}
    for i in numbers
  ]


def take(source, split, count, first_index=0):
  stream = source.open(split, first_index, num_workers=2)
  return [stream.next() for _ in range(count)]


def test_rows_become_items(tmp_path):
  path = write(tmp_path / "sums.jsonl", ["", *sums(range(40)), "  "])
  source = rows_lib.Rows(path=path)
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
  source = rows_lib.Rows(path=path, seed=3)
  held_out = {item["index"] for item in take(source, EVAL, 40)}
  num_trained = 40 - len(held_out)
  assert 0 < len(held_out) < 20
  indices = [item["index"] for item in take(source, TRAIN, 2 * num_trained)]
  passes = indices[:num_trained], indices[num_trained:]
  for one in passes:
    assert sorted(one) == sorted(set(range(40)) - held_out)
  assert passes[0] != passes[1] != sorted(passes[1])
  again = rows_lib.Rows(path=path, seed=3)
  for first_index in (0, 1, num_trained, num_trained + 7):
    items = take(again, TRAIN, 5, first_index)
    expected = indices[first_index : first_index + 5]
    assert [item["index"] for item in items] == expected
  other = [i["index"] for i in take(rows_lib.Rows(path=path, seed=4), TRAIN, 9)]
  assert other != indices[:9]


def test_questions_of_the_evaluation_file_are_not_trained_on(tmp_path):
  train = write(tmp_path / "train.jsonl", sums(range(20)))
  test = write(tmp_path / "test.jsonl", sums(range(15, 25)))
  source = rows_lib.Rows(path=train, eval_path=test)
  trained = {item["question"] for item in take(source, TRAIN, 40)}
  held_out = [item["question"] for item in take(source, EVAL, 10)]
  assert trained == {x["question"] for x in sums(range(15))}
  assert held_out == [x["question"] for x in sums(range(15, 25))]
  assert source.versions.keys() == {"train.jsonl", "test.jsonl"}


def test_columns_may_have_other_names(tmp_path):
  path = write(
    tmp_path / "a.jsonl", [{"problem": f"p{i}", "gold": i} for i in range(30)]
  )
  fields = {"question": "problem", "answer": "gold"}
  (item,) = take(rows_lib.Rows(path=path, fields=fields), EVAL, 1)
  assert item["question"] == f"p{item['answer']}" and item["metadata"] == {}


@pytest.mark.parametrize(
  ("row", "words"),
  [
    ("{", "a.jsonl:3: not JSON"),
    ("[1]", "a.jsonl:3: not a JSON object"),
    ({"answer": "1"}, "a.jsonl:3: no column 'question' for the question"),
    ({"question": "1"}, "a.jsonl:3: no column 'answer' for the answer"),
    ({"question": " ", "answer": "1"}, "a.jsonl:3: the column 'question' is"),
    ({"question": 1, "answer": "1"}, "is 1, not a text"),
  ],
)
def test_a_bad_row_is_named_with_its_line_or_left_out(tmp_path, row, words):
  values = sums(range(30))
  path = write(tmp_path / "a.jsonl", [*values[:2], row, *values[2:]])
  with pytest.raises(sections.ConfigError, match="^task.dataset: 1 of 31") as e:
    rows_lib.Rows(path=path).check()
  assert words in str(e.value) and "\n" not in str(e.value)
  source = rows_lib.Rows(path=path, skips_bad_rows=True)
  source.check()
  items = take(source, TRAIN, 100) + take(source, EVAL, 100)
  assert {i["question"] for i in items} == {x["question"] for x in values}


@pytest.mark.parametrize(
  ("values", "words"),
  [([], "has no rows for the split train"), (None, "cannot be read: No such")],
)
def test_a_file_without_rows_is_refused(tmp_path, values, words):
  path = tmp_path / "a.jsonl"
  if values is not None:
    write(path, values)
  with pytest.raises(sections.ConfigError, match=words):
    rows_lib.Rows(path=path).check()


def test_a_config_names_files(tmp_path):
  path = write(tmp_path / "a.jsonl", sums(range(30)))
  config = sections.Config()
  config.task.dataset = f"jsonl:{path}"
  config.task.eval_dataset = f"jsonl:{path}"
  source = setup_lib.source_of(config)
  assert (source.path, source.eval_path) == (path, path)
  assert setup_lib.resolve(config, jax.devices()).source.name == "a"
  config.task.dataset = "csv:a.csv"
  with pytest.raises(sections.ConfigError, match="^task.dataset: 'csv:a.csv'"):
    setup_lib.source_of(config)
  config.task.dataset = "chain_sum"
  with pytest.raises(sections.ConfigError, match="^task.eval_dataset: "):
    setup_lib.source_of(config)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_a_run_trains_on_a_file_and_goes_on_with_its_next_row(tmp_path):
  path = write(tmp_path / "sums.jsonl", sums(range(10)))
  for num_steps in (2, 4):
    ran = subprocess.run(
      [
        sys.executable,
        str(ROOT / "launch" / "train.py"),
        f"--config={ROOT / 'configs' / 'tiny.py'}",
        f"--workdir={tmp_path / 'run'}",
        "--config.task.dataset=jsonl:sums.jsonl",
        "--config.task.template={question}",
        "--config.task.reward=numeric",
        "--config.task.answer_prefix=",
        "--config.task.eval_percent=30",
        "--config.eval.num_items=1",
        "--config.warm_start.num_steps=0",
        f"--config.train.num_steps={num_steps}",
      ],
      cwd=tmp_path,
      env={**os.environ, "XLA_FLAGS": ""},
      capture_output=True,
      text=True,
      timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
  source = rows_lib.Rows(path=path, eval_percent=30)
  expected = [item["index"] for item in take(source, TRAIN, 200)]
  ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
  entries = {e["index"]: e for e in map(json.loads, ledger)}
  assert len(entries) >= 16
  for index, entry in entries.items():
    assert entry["prompt_id"] == f"sums/train/{expected[index]}"


@pytest.mark.nightly
@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not there")
def test_gsm8k_is_read_as_it_is():
  source = rows_lib.Rows(
    path=GSM8K / "train.jsonl", eval_path=GSM8K / "test.jsonl"
  )
  source.check()
  (item,) = take(source, TRAIN, 1)
  assert "####" in item["answer"]
  assert len(take(source, EVAL, 1319)) == 1319
