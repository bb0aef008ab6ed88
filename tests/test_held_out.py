"""Held-out questions: which they are, and how a workdir keeps them."""

import disks
import pytest
import test_prompts
import test_rows

from jaxrl_async.config import sections
from jaxrl_async.data import held_out
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import questions


def test_held_out_questions_are_distinct_and_in_no_other_split():
  counts = []
  found = held_out.make(test_prompts.source(), 64, counts.append)
  texts = [prompt.item["question"] for prompt in found]
  assert len(set(texts)) == len(texts) == 64
  assert {questions.split_of(text) for text in texts} == {source_lib.Split.EVAL}
  assert counts == sorted(counts) and counts[-1] == 64
  fewer = held_out.make(test_prompts.source(), 16)
  assert [p.prompt_id for p in fewer] == [p.prompt_id for p in found[:16]]


def test_too_few_held_out_questions_is_an_error():
  few = test_prompts.chain_sum(min_terms=2, max_terms=2, max_digits=1)
  with pytest.raises(sections.ConfigError, match="eval.num_items: 999, but"):
    held_out.make(test_prompts.source(few), 999, patience_s=60.0)
  held_out.make(test_prompts.source(few), 999, patience_s=0.0)


def test_rows_for_evaluations_are_counted(tmp_path):
  path = test_rows.write(tmp_path / "a.jsonl", test_rows.sums(range(30)) * 2)
  rows = rows_lib.Rows(
    dataset=f"jsonl:{path}", eval_dataset=f"jsonl:{path}", eval_percent=50
  )
  source = test_rows.prompt_source(rows)
  held_out.make(source, 30, patience_s=60.0)
  with pytest.raises(
    sections.ConfigError, match="eval.num_items: 31, but a has 30 distinct"
  ):
    held_out.make(source, 31, patience_s=0.0)


class Kept:
  """Loads or makes, and says which."""

  def __init__(self, path):
    self.path = path
    self.notes = []

  def get(self, num_items=5, **changes):
    """The prompts and whether they were made."""
    self.notes.clear()
    progress = []
    task = test_prompts.chain_sum(**changes.pop("task", {}))
    found = held_out.load_or_make(
      self.path,
      test_prompts.source(task, **changes),
      num_items,
      note=self.notes.append,
      on_progress=progress.append,
    )
    assert len(found) == num_items
    return found, bool(progress)


@pytest.fixture
def kept(tmp_path):
  return Kept(tmp_path / "run" / "held_out.json")


def test_held_out_questions_are_made_once(kept):
  made, was_made = kept.get()
  read, was_made_again = kept.get()
  assert was_made and not was_made_again and not kept.notes
  for one, other in zip(made, read, strict=True):
    assert one.prompt_id == other.prompt_id and one.item == other.item
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.tokens.dtype == other.tokens.dtype
  assert [p.name for p in kept.path.parent.iterdir()] == ["held_out.json"]


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"seed": 1}, "seed"),
    ({"num_items": 4}, "num_items"),
    ({"max_prompt_tokens": 20}, "max_prompt_tokens"),
    ({"task": {"template": "{question}\n"}, "max_prompt_tokens": 99}, "templ"),
    ({"task": {"min_terms": 2, "max_terms": 3}}, "params"),
  ],
)
def test_they_are_made_again_when_what_they_depend_on_changes(
  kept, changes, field
):
  kept.get()
  _, was_made = kept.get(**changes)
  assert was_made
  (note,) = kept.notes
  assert field in note and "changed" in note
  assert not kept.get(**changes)[1]


def test_a_damaged_file_is_made_again_with_a_note(kept):
  made, _ = kept.get()
  content = kept.path.read_bytes()
  cut = content[: len(content) // 2]
  for bad in (cut, b"", b"[]", b'{"items": []}', b"\xff" + content):
    kept.path.write_bytes(bad)
    again, was_made = kept.get()
    assert was_made and "damaged" in kept.notes[0]
    assert [p.prompt_id for p in again] == [p.prompt_id for p in made]
    assert kept.path.read_bytes() == content


def test_a_file_that_cannot_be_written_does_not_stop_the_run(kept):
  with disks.files_of_at_most(10):
    _, was_made = kept.get()
  assert was_made and "cannot be kept" in kept.notes[0]
  assert not list(kept.path.parent.iterdir())
