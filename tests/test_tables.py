"""Tables of rows in each format, and the URIs that name them."""

import gzip
import json
import os
import pathlib
import sys
import time

import numpy as np
import pytest

from jaxrl_async.config import sections
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data.tables import hugging_face
from jaxrl_async.data.tables import opening
from jaxrl_async.data.tables import table as table_lib
from jaxrl_async.data.tables import uri as uri_lib

ROWS = [
  {"question": f"{i} + é = ", "answer": f"{i}", "tags": [i, None, "a"]}
  for i in range(23)
]
TEST = [{**row, "question": row["question"] + "?"} for row in ROWS[:7]]


def write_jsonl(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return f"jsonl:{path}"


def write_gzip(path, rows):
  path = path.with_suffix(".jsonl.gz")
  text = "\n\n".join(map(json.dumps, rows))  # no line break at the end
  path.write_bytes(gzip.compress(text.encode()))
  return f"jsonl:{path}"


def write_json(path, rows):
  path.write_text(json.dumps(rows))
  return f"json:{path}"


def write_array_record(path, rows):
  from array_record.python import array_record_module

  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for row in rows:
    writer.write(json.dumps(row).encode())
  writer.close()
  return f"arrayrecord:{path}"


def write_parquet(path, rows):
  import pyarrow
  from pyarrow import parquet

  table = pyarrow.Table.from_pylist(
    [{**row, "tags": [str(tag) for tag in row["tags"]]} for row in rows]
  )
  parquet.write_table(table, path, row_group_size=5)
  return f"parquet:{path}"


def write_datasets(path, rows):
  import datasets

  datasets.disable_progress_bars()
  each = {"tags": [str(tag) for tag in ROWS[0]["tags"]]}
  datasets.Dataset.from_list([{**r, **each} for r in rows]).save_to_disk(path)
  return f"datasets:{path}"


FORMATS = (
  write_jsonl,
  write_gzip,
  write_json,
  write_array_record,
  write_parquet,
  write_datasets,
)


def opened(uri):
  return opening.open_table(uri_lib.parse("task.dataset", uri))


def plain(row):
  return {**row, "tags": None}


@pytest.mark.parametrize("write", FORMATS)
def test_each_format_has_the_same_rows_in_any_order(tmp_path, write):
  table = opened(write(tmp_path / "rows.x", ROWS))
  assert len(table) == len(ROWS)
  for row in (22, 0, 7, 22, *range(23)):
    assert plain(table[row]) == plain(ROWS[row])
    assert str(tmp_path) in table.where(row)
  same = opened(write(tmp_path / "same.x", ROWS))
  other = opened(write(tmp_path / "other.x", [*ROWS[:-1], ROWS[0]]))
  assert table.digest == same.digest
  assert table.digest != other.digest


SPLITS = (("train", ROWS), ("test", TEST))


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_several_files_are_one_table_in_order_of_their_names(tmp_path, write):
  for first, end in ((0, 4), (4, 5), (5, 23)):
    suffix = "jsonl" if write is write_jsonl else "parquet"
    write(tmp_path / f"part-{first:02}.{suffix}", ROWS[first:end])
  kind = write(tmp_path / f"part-99.{suffix}", ROWS[:1]).partition(":")[0]
  for place in (tmp_path, tmp_path / "part-??.*"):
    table = opened(f"{kind}:{place}")
    assert len(table) == 24
    assert [table[i]["answer"] for i in range(24)] == [
      row["answer"] for row in [*ROWS, ROWS[0]]
    ]
    assert "part-04" in table.where(4) and "part-05" in table.where(5)
  with pytest.raises(table_lib.TableError, match="no file matches"):
    opened(f"{kind}:{tmp_path}/*.nothing")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrayrecord"])
def test_what_may_have_no_end_is_refused_in_one_line(tmp_path, kind):
  os.mkfifo(tmp_path / "pipe")
  for path in (tmp_path / "pipe", pathlib.Path("/dev/zero")):
    with pytest.raises(table_lib.TableError, match=f"^{path} is neither a fil"):
      opened(f"{kind}:{path}")


@pytest.mark.parametrize("write", FORMATS[1:])
def test_a_truncated_or_missing_file_is_refused_in_one_line(tmp_path, write):
  uri = write(tmp_path / "rows.x", ROWS * 40)
  path = pathlib.Path(uri.partition(":")[2])
  if path.is_dir():
    path = next(path.glob("*.arrow"))
  content = path.read_bytes()
  for short in (content[: len(content) // 2], content[:20], b""):
    path.write_bytes(short)
    hugging_face._of_directory.cache_clear()
    with pytest.raises(sections.ConfigError, match="^task.dataset: ") as raised:
      rows_lib.Rows(dataset=uri).check()
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
  path.unlink()
  hugging_face._of_directory.cache_clear()
  with pytest.raises(sections.ConfigError, match="^task.dataset: "):
    rows_lib.Rows(dataset=uri).check()


def test_a_dataset_brings_its_own_split_for_evaluations(tmp_path):
  import datasets

  both = datasets.DatasetDict(
    {
      name: datasets.Dataset.from_list([{**r, "tags": "a"} for r in rows])
      for name, rows in SPLITS
    }
  )
  both.save_to_disk(tmp_path / "both")
  source = rows_lib.Rows(dataset=f"datasets:{tmp_path}/both")
  source.check()
  stream = source.open("eval", 0, num_workers=1)
  found = [stream.next()["question"] for _ in TEST]
  assert found == [row["question"] for row in TEST]
  assert source.num_questions("train") == 23
  assert "split=test" in source.describe()[0]
  # Named, another split is the one that is trained on, and a hash cuts it.
  other = rows_lib.Rows(dataset=f"datasets:{tmp_path}/both?split=test")
  assert other.num_questions("train") + other.num_questions("eval") == 7
  wrong = rows_lib.Rows(dataset=f"datasets:{tmp_path}/both?split=tets")
  with pytest.raises(sections.ConfigError, match="'tets'; did you mean test"):
    wrong.check()


def test_a_dataset_of_the_hub_comes_from_the_cache(tmp_path, monkeypatch):
  import datasets
  import huggingface_hub

  # As the library leaves a dataset that it has downloaded.
  files = {name: write_jsonl(tmp_path / name, rows) for name, rows in SPLITS}
  datasets.load_dataset(
    "json",
    "main",
    data_files={name: uri[len("jsonl:") :] for name, uri in files.items()},
    cache_dir=str(tmp_path / "made"),
  )
  (info,) = (tmp_path / "made").glob("json/*/*/*/dataset_info.json")
  info.write_text(
    info.read_text().replace(
      f'"config_name": "{info.parts[-4]}"', '"config_name": "main"'
    )
  )
  cached = tmp_path / "cache" / "acme___sums" / "main" / "0.0.0" / "abc"
  cached.parent.mkdir(parents=True)
  info.parent.rename(cached)
  for name, _ in SPLITS:
    (cached / f"json-{name}.arrow").rename(cached / f"sums-{name}.arrow")
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
  # Nobody listens there.
  monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://[::1]:1")
  monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://[::1]:1")
  start_s = time.monotonic()
  source = rows_lib.Rows(dataset="hf:acme/sums?name=main")
  source.check()
  assert source.name == "sums" and source.num_questions("eval") == 7
  with pytest.raises(sections.ConfigError, match="hub cannot be reached") as e:
    rows_lib.Rows(dataset="hf:acme/nothing").check()
  assert time.monotonic() - start_s < 10  # the library alone takes twice that
  assert str(e.value).startswith("task.dataset: hf:acme/nothing")
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
  ("module", "uri", "words"),
  [
    ("pyarrow", "parquet:a", r"pip install jaxrl_async\[parquet\]"),
    ("datasets", "datasets:a", r"pip install jaxrl_async\[datasets\]"),
    ("datasets", "hf:a/b", r"pip install jaxrl_async\[datasets\]"),
  ],
)
def test_a_missing_library_is_named_with_its_extra(
  monkeypatch, module, uri, words
):
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(sections.ConfigError, match=words):
    rows_lib.Rows(dataset=uri).check()


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("csv:a.csv", "'csv:a.csv' is no dataset; use jsonl:PATH, "),
    ("jsonl:", "'jsonl:' is no dataset"),
    ("hf:?split=a", "names no NAME"),
    ("hf:a?splt=a", "has an option 'splt'; did you mean split"),
    ("datasets:a?split", "has options that cannot be read"),
  ],
)
def test_a_wrong_uri_is_refused(text, words):
  with pytest.raises(sections.ConfigError) as raised:
    uri_lib.parse("task.dataset", text)
  assert str(raised.value).startswith("task.dataset: ")
  assert words in str(raised.value)


def test_a_uri_is_read_as_it_is_written():
  for text, kind, place, label in (
    ("chain_sum", "reasoning_gym", "chain_sum", "chain_sum"),
    ("jsonl:a/b?.jsonl", "jsonl", "a/b?.jsonl", "b_"),
    ("jsonl:a/v1.5.jsonl.gz", "jsonl", "a/v1.5.jsonl.gz", "v1.5"),
    ("hf:openai/gsm8k?name=main", "hf", "openai/gsm8k", "gsm8k"),
  ):
    uri = uri_lib.parse("task.dataset", text)
    assert (uri.kind, uri.place, uri.label) == (kind, place, label)
    assert str(uri) in (text, f"reasoning_gym:{text}")


def test_values_of_columns_become_those_of_json(tmp_path):
  import datetime
  import decimal

  import pyarrow
  from pyarrow import parquet

  row = {
    "day": datetime.date(2024, 2, 3),
    "cost": decimal.Decimal("1.50"),
    "nested": [{"a": [1.5, None]}],
  }
  parquet.write_table(
    pyarrow.Table.from_pylist([row, {**row, "cost": None}]), tmp_path / "a"
  )
  table = opened(f"parquet:{tmp_path}/a")
  assert table[0] == {
    "day": "2024-02-03",
    "cost": "1.5",
    "nested": [{"a": [1.5, None]}],
  }
  parquet.write_table(
    pyarrow.Table.from_pylist([{"image": b"\xff"}]), tmp_path / "b"
  )
  with pytest.raises(table_lib.RowError, match="b: row 0: .* type bytes"):
    opened(f"parquet:{tmp_path}/b")[0]


def number_columns():
  """Columns of numbers, with the text of an answer and its path in them."""
  import decimal

  import pyarrow as pa

  def decimals(text, scale):
    return pa.array([decimal.Decimal(text)] * 20, pa.decimal128(30, scale))

  short = pa.float32()
  return [
    (pa.array([0.1] * 20, short), "0.1", ""),
    (pa.array([1e-05] * 20, short), "0.00001", ""),
    (pa.array(np.full(20, 3.14, np.float16)), "3.14", ""),
    (pa.array([0.1] * 20, short).dictionary_encode(), "0.1", ""),
    (pa.array([{"b": 0.7}] * 20, pa.struct({"b": short})), "0.7", ".b"),
    (decimals("42.00", 2), "42", ""),
    (decimals("0", 10), "0", ""),
    (decimals("1e-9", 9), "0.000000001", ""),
    (pa.array([2**64 - 1] * 20, pa.uint64()), "18446744073709551615", ""),
  ]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_an_answer_of_a_typed_column_is_its_shortest_text(tmp_path, kind):
  import pyarrow as pa
  from pyarrow import parquet

  numbers = number_columns()
  lists = pa.array([[0.7]] * 20, pa.list_(pa.float32()))
  columns = pa.table(
    {"question": [f"{i}" for i in range(20)], "lists": lists}
    | {f"c{i}": values for i, (values, *_) in enumerate(numbers)}
  )
  place = tmp_path / "a"
  if kind == "parquet":
    parquet.write_table(columns, place)
  else:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset(columns).save_to_disk(place)
  uri = f"{kind}:{place}"
  assert opened(uri)[0]["lists"] == [0.7]
  for i, (_, text, path) in enumerate(numbers):
    fields = {"answer": f"c{i}{path}"}
    rows = rows_lib.Rows(dataset=uri, eval_dataset=uri, fields=fields)
    assert rows.open("eval", 0, num_workers=1).next()["answer"] == text


# Times that Python has no value for, or only with pandas: beyond the year 9999,
# before the year 1, a day beyond the year 9999, an interval of many years,
# nanoseconds of a day.
TIMES = [
  ("timestamp[s]", 2**40),
  ("timestamp[s]", -(2**40)),
  ("date32", 2**30),
  ("duration[s]", 2**60),
  ("time64[ns]", 1_001),
]


def test_a_time_without_a_value_is_an_error_of_its_row(tmp_path):
  import pyarrow
  from pyarrow import parquet

  count = 30
  columns = {
    "question": [f"{i}" for i in range(count)],
    "answer": ["1"] * count,
  }
  for row, (kind, value) in enumerate(TIMES):
    numbers = [value if i == row else 1_000 * i for i in range(count)]
    size = "int32" if kind == "date32" else "int64"
    columns[f"when {row}"] = pyarrow.array(numbers, size).view(kind)
  path = tmp_path / "a"
  parquet.write_table(pyarrow.table(columns), path)
  with pytest.raises(sections.ConfigError, match="5 of 30.*a: row 0: cannot"):
    rows_lib.Rows(dataset=f"parquet:{path}").check()
  source = rows_lib.Rows(dataset=f"parquet:{path}", skips_bad_rows=True)
  source.check()
  assert source.num_bad() == len(TIMES)
