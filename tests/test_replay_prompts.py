"""The prompts of a timing record are found again, or missed soon."""

import contextlib
import dataclasses

import pytest
import test_rows

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import replay_prompts

TRAIN = source_lib.Split.TRAIN


def source(path, num_rows=12, **task):
  rows = test_rows.sums(range(num_rows))
  dataset = test_rows.write(path / f"{num_rows}.jsonl", rows)
  items = rows_lib.Rows(
    dataset=f"jsonl:{dataset}", eval_percent=10, label="a", seed=1
  )
  return test_rows.prompt_source(items, **task)


def scheduled(index, prompt):
  """The record of a group without its trajectories."""
  return recorded_timing.RecordedGroup(
    admission=types.Admission(index=index, birth=0, deadline=9),
    prompt_id=prompt.prompt_id,
    trajectories=(),
  )


@contextlib.contextmanager
def found(source, groups, excluded=(), host_state=None):
  tested = replay_prompts.RecordedPrompts(
    source,
    [group.prompt_id for group in groups],
    excluded=excluded,
    host_state=host_state or {},
    stop=supervisor_lib.StopRequest(),
  )
  with contextlib.closing(tested):
    yield tested


def test_groups_of_any_order_get_the_prompts_of_the_run(tmp_path):
  made_from = source(tmp_path)
  excluded = ["1 + 1 = ", "4 + 4 = "]
  stream = prompts.PromptStream(made_from, TRAIN)
  stream.exclude(excluded)
  drawn = []
  for index in range(40):
    if index == 17:
      state = {"stream": stream.state(), "next_index": index}
    drawn.append(stream.next())
  groups = [scheduled(i, prompt) for i, prompt in enumerate(drawn)]
  order = [i ^ 3 for i in range(40) if i % 5]  # some groups were not trained
  wanted = [groups[i] for i in order]
  with found(made_from, wanted, excluded) as tested:
    for group in wanted:
      prompt = tested.take(group)
      assert prompt.prompt_id == group.prompt_id
      assert prompt.tokens.tolist() == drawn[group.index].tokens.tolist()
    # Nothing is kept that is not needed any more.
    assert not tested._found
  # What has been drawn before a checkpoint is not drawn again.
  with found(made_from, groups[17:], excluded, state) as tested:
    for group in groups[17:]:
      assert tested.take(group).prompt_id == group.prompt_id
    assert tested._num_drawn <= 40 - 17


def test_a_prompt_that_is_gone_is_missed_after_few_draws(tmp_path):
  then = prompts.PromptStream(source(tmp_path), TRAIN)
  drawn = [then.next() for _ in range(6)]
  gone = dataclasses.replace(drawn[-1], prompt_id="a/train/99")
  groups = [scheduled(i, x) for i, x in enumerate([*drawn[:-1], gone])]
  with (
    found(source(tmp_path), groups) as tested,
    pytest.raises(sections.ConfigError, match="question a/train/99 of group 5"),
  ):
    for group in groups:
      tested.take(group)
  assert tested._num_drawn <= 7
