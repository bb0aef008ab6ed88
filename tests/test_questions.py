"""Questions: ranges of seeds, hash seeds, what a checkpoint stores of them."""

import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys

import dataset_items
import numpy as np
import pytest

from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import questions
from jaxrl_async.rewards import reasoning
from jaxrl_async.storage import item_json

TESTS = pathlib.Path(__file__).parent

# Those that iterate over sets of strings, one that asks for the date, one that
# draws from a global generator, and two with rare types.
DELICATE = (
  "isomorphic_strings",
  "polynomial_multiplication",
  "ransom_note",
  "word_ladder",
  "time_intervals",
  "list_functions",
  "graph_color",
  "knights_knaves",
)
# Every process and its server import this, if it is in the path.
ANOTHER_DAY = """
import datetime


class date(datetime.date):
  @classmethod
  def today(cls):
    return cls(2031, 3, 5)


class datetime_(datetime.datetime):
  @classmethod
  def now(cls, tz=None):
    return cls(2031, 3, 5, 7, 8, 9, tzinfo=tz)


datetime.date, datetime.datetime = date, datetime_
"""


def source(dataset="chain_sum", *, seed=3, split=source_lib.Split.TRAIN):
  return questions.QuestionSource(dataset, {}, seed=seed, split=split)


def test_ranges_of_seed_plus_index_are_disjoint_and_below_two_to_the_32():
  starts = sorted(
    questions.first_dataset_seed(seed, split)
    for seed in range(questions.MAX_SEED + 1)
    for split in source_lib.Split
  )
  gaps = np.diff(np.array(starts, np.int64))
  assert (gaps >= questions.ITEMS_PER_SPLIT).all()
  assert starts[0] == 0
  assert starts[-1] + questions.ITEMS_PER_SPLIT <= 2**32
  assert questions.MAX_SEED == 255


def test_an_item_has_the_text_of_its_dataset_seed_plus_index():
  # What makes disjoint ranges necessary.
  first = questions.first_dataset_seed(3, source_lib.Split.WARM_START)
  items = source(split=source_lib.Split.WARM_START)
  shifted = reasoning.create_dataset("chain_sum", {}, seed=first + 5, size=1)
  assert items[5]["question"] == shifted[0]["question"]
  assert len(items) == questions.ITEMS_PER_SPLIT


def test_a_small_dataset_begins_again():
  small = source("word_ladder")
  assert len(small) == 20_000
  assert small[20_003] == small[3]


def test_items_do_not_depend_on_the_global_generators():
  items = source("list_functions")
  random.seed(1)
  item = items[13]  # draws from one
  random.seed(2)
  assert items[13] == item


@contextlib.contextmanager
def in_another_process(tmp_path, names, *, num_processes, num_items):
  """`dataset_items` under another hash seed, on another day, meanwhile.

  Yields a function that waits for what it found.
  """
  (tmp_path / "sitecustomize.py").write_text(ANOTHER_DAY)
  path = os.pathsep.join((str(tmp_path), str(TESTS.parent)))
  process = subprocess.Popen(
    [
      sys.executable,
      str(TESTS / "dataset_items.py"),
      str(num_processes),
      str(num_items),
      *names,
    ],
    env=os.environ | {"PYTHONHASHSEED": "12", "PYTHONPATH": path},
    cwd=tmp_path,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    yield lambda: json.loads(process.communicate(timeout=160)[0])
  finally:
    process.kill()
    process.communicate()


def usable():
  return sorted(reasoning.datasets().keys() - questions.REFUSED.keys())


def check_items(tmp_path, names, num_items):
  """One process makes all items in turn, or each one is the first it makes."""
  with in_another_process(
    tmp_path, names, num_processes=num_items, num_items=num_items
  ) as found_there:
    here = dataset_items.digests(names, num_processes=1, num_items=num_items)
    assert found_there() == here


@pytest.mark.slow
def test_items_of_delicate_datasets_are_the_same_under_another_hash_seed(
  tmp_path,
):
  check_items(tmp_path, DELICATE, 4)


@pytest.mark.slow
@pytest.mark.nightly
def test_items_of_every_dataset_are_the_same_under_another_hash_seed(tmp_path):
  names = usable()
  assert len(names) > 100
  check_items(tmp_path, names, 2)


def scored(item, answer):
  """The score, or what a scorer raises that expects another kind of text."""
  try:
    return reasoning.score_answer(item, answer)
  except (ValueError, AttributeError) as error:
    return repr(error)


def check_stored_form(name, num_items):
  """Items and their stored forms are equal, and score answers alike."""
  items = source(name)
  for index in range(num_items):
    item = items[index]
    stored = item_json.decode(json.loads(json.dumps(items.stored(index))))
    assert repr(stored) == repr(item) or stored == item
    answer = str(item["answer"])
    for text in (answer, answer + "1", "", "no", "[1, 2]"):
      assert scored(stored, text) == scored(item, text)


@pytest.mark.parametrize("name", DELICATE)
def test_the_stored_form_of_a_delicate_item_scores_as_the_item(name):
  check_stored_form(name, 5)


# Some datasets leave files of theirs open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.nightly
def test_the_stored_form_of_any_datasets_items_scores_as_the_item():
  for name in usable():
    check_stored_form(name, 1)


def test_an_item_that_cannot_be_stored_refuses_its_dataset_by_name():
  items = source()
  original = items._dataset[0]

  class Dataset:
    def __len__(self):
      return 1

    def __getitem__(self, index):
      return original | {"metadata": {"a": [object()]}}

  items._dataset = Dataset()
  with pytest.raises(
    sections.ConfigError, match="^task.dataset: chain_sum .* of type object"
  ):
    items.stored(0)
