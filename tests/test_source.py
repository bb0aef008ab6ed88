"""Sources of one's own: prompts, resuming, held-out questions, refusals."""

import dataclasses
import itertools

import pytest

from jaxrl_async.config import sections
from jaxrl_async.data import held_out
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.text import tokenizer as tokenizer_lib

ROWS = {
  "train": [f"{i}+1=" for i in range(20)],
  "eval": [f"{i}+2=" for i in range(8)] * 2,  # each question twice
}


# A source over rows that are in memory: all that a user has to write.
class Rows:
  name, params, versions = "rows", {}, {"rows": "1"}
  splits = ("train", "eval")

  def check(self):
    sections.require(bool(ROWS["train"]), "task.dataset", "there are no rows")

  def open(self, split, first_index, *, num_workers):
    rows = ROWS[split]
    places = (i % len(rows) for i in itertools.count(first_index))
    return source_lib.IteratorStream(
      {"index": i, "question": rows[i]} for i in places
    )


# A source of a generator function, whose items are a function of the index.
class Squares:
  name, params, versions = "squares", {"power": 2}, {}
  splits = ("train", "eval")

  def check(self):
    pass

  def open(self, split, first_index, *, num_workers):
    return source_lib.IteratorStream(self.items(split, first_index))

  def items(self, split, first_index):
    for i in itertools.count(first_index):
      n = 2 * i + (split == "eval")  # odd numbers are held out
      metadata = {"n": n, "power": 2}
      yield {"index": i, "question": f"{n}*{n}=", "metadata": metadata}


def source(items=None, *, template="{question}", max_prompt_tokens=24):
  return prompts.PromptSource(
    items=items or Rows(),
    task=sections.TaskSection(template=template),
    tokenizer=tokenizer_lib.character_level(),
    seed=0,
    max_prompt_tokens=max_prompt_tokens,
  )


def take(stream, count):
  return [stream.next() for _ in range(count)]


def test_what_runs_here_is_what_a_source_is():
  reasoning_gym = gym.ReasoningGym(name="chain_sum", params={}, seed=0)
  for items in (Rows(), Squares(), reasoning_gym):
    assert isinstance(items, source_lib.Source)
    assert {source_lib.Split.TRAIN, source_lib.Split.EVAL} <= {*items.splits}
    assert items.versions.keys() <= {"rows", "reasoning_gym"}
  stream = source_lib.IteratorStream(iter([]))
  assert isinstance(stream, source_lib.ItemStream)


@pytest.mark.parametrize(
  "items", [Rows(), Squares()], ids=["list", "generator"]
)
def test_its_items_become_prompts(items):
  prompts.validate_task(source(items))
  stream = prompts.PromptStream(source(items), source_lib.Split.TRAIN)
  assert stream.is_ready()
  decode = tokenizer_lib.character_level().decode
  for index, prompt in enumerate(take(stream, 15)):
    assert prompt.prompt_id == f"{items.name}/train/{index}"
    assert decode(prompt.tokens) == prompt.item["question"]


def test_a_template_may_name_the_metadata():
  stream = prompts.PromptStream(
    source(Squares(), template="{n}^{power}"), source_lib.Split.EVAL
  )
  prompt = take(stream, 4)[-1]
  assert tokenizer_lib.character_level().decode(prompt.tokens) == "7^2"


def test_items_of_other_splits_and_long_prompts_take_up_their_index():
  class Mixed(Rows):
    def open(self, split, first_index, *, num_workers):
      def items():
        for i in itertools.count(first_index):
          if i % 3 == 1:
            yield None
          else:
            yield {"index": i, "question": "x" * (30 if i % 3 else 3)}

      return source_lib.IteratorStream(items())

  stream = prompts.PromptStream(source(Mixed()), source_lib.Split.TRAIN)
  assert [p.item["index"] for p in take(stream, 4)] == [0, 3, 6, 9]
  assert stream.state() == {"next_index": 10, "num_too_long": 3}


def test_questions_that_a_run_evaluates_on_are_passed_over():
  stream = prompts.PromptStream(source(), source_lib.Split.TRAIN)
  stream.exclude(["0+1=", "2+1=", "no question"])
  assert [p.item["index"] for p in take(stream, 4)] == [1, 3, 4, 5]
  assert stream.state() == {"next_index": 6, "num_too_long": 0}
  # As questions of `eval.sets` are, in every split but the held-out one.
  evaluated = dataclasses.replace(
    source(), evaluated=frozenset({"1+1=", "0+2="})
  )
  stream = prompts.PromptStream(evaluated, source_lib.Split.TRAIN)
  stream.exclude(["0+1="])
  assert [p.item["index"] for p in take(stream, 2)] == [2, 3]
  first = prompts.PromptStream(evaluated, source_lib.Split.EVAL).next()
  assert first.item["index"] == 0


def test_held_out_questions_are_made_again_for_another_version(tmp_path):
  def load(items):
    notes = []
    path = tmp_path / "held_out.json"
    found = held_out.load_or_make(
      path, source(items), 4, note=notes.append, on_progress=lambda n: None
    )
    return [p.prompt_id for p in found], notes

  first, notes = load(Rows())
  assert not notes and load(Rows()) == (first, [])
  newer = Rows()
  newer.versions = {"rows": "2"}
  again, (note,) = load(newer)
  assert again == first and "rows changed" in note


class Broken(Rows):
  """Its items are whatever they are said to be."""

  def __init__(self, items):
    self.items = items

  def open(self, split, first_index, *, num_workers):
    return source_lib.IteratorStream(iter(self.items))


@pytest.mark.parametrize(
  ("items", "message"),
  [
    ([{"index": 0}], "task.dataset: an item of rows has no 'question'"),
    ([{"question": "a"}], "task.dataset: an item of rows has no 'index'"),
    ([], "a split ended, where it should have begun again"),
    (
      [{"index": 0, "question": "a", "metadata": {"x": object()}}],
      "task.dataset: rows cannot be used, because its items hold {} of"
      " type object, which a checkpoint cannot store",
    ),
  ],
)
def test_items_that_cannot_be_used_are_refused_in_one_line(items, message):
  with pytest.raises(sections.ConfigError) as raised:
    prompts.validate_task(source(Broken(items)))
  thing = items[0].get("metadata", {}).get("x") if items else None
  assert str(raised.value) == message.replace("{}", repr(thing))


def test_a_source_without_a_split_is_refused_by_its_name():
  class NoneHeldOut(Rows):
    splits = ("train", "test")

  for items, split in ((NoneHeldOut(), "eval"), (Rows(), "warm_start")):
    with pytest.raises(
      sections.ConfigError, match=f"^task.dataset: rows has no split '{split}'"
    ):
      prompts.validate_task(source(items))
      worked_examples_lib.validate(
        source(items), sections.WarmStartSection(), max_tokens=99
      )


def test_a_source_that_cannot_be_used_says_so_before_items_are_made(
  monkeypatch,
):
  monkeypatch.setitem(ROWS, "train", [])
  with pytest.raises(sections.ConfigError, match="task.dataset: there are no"):
    prompts.validate_task(source())


def test_splits_of_its_own_have_streams_too():
  class Hard(Rows):
    splits = ("train", "eval", "eval_hard")

    def open(self, split, first_index, *, num_workers):
      return super().open("eval", first_index, num_workers=num_workers)

  (prompt,) = take(prompts.PromptStream(source(Hard()), "eval_hard"), 1)
  assert prompt.prompt_id == "rows/eval_hard/0"
