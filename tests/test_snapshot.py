"""Outstanding groups, as a checkpoint gets them."""

import dataclasses
from unittest import mock

import pytest
import test_ledger

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import checkpointing


@pytest.mark.parametrize("fate", ["failed", "finished"])
def test_a_group_that_ends_when_asked_for_is_stored_as_what_it_is(fate):
  buffer, running = buffer_lib.Buffer(2, 1), {}
  buffer.set_policy_version(0)
  for index in range(2):
    admission = buffer.try_admit(0)
    group = test_ledger.make_group(index, versions=((0,), (0,)))
    running[index] = dataclasses.replace(group, admission=admission)

  def groups():
    """The first one ends as the rollout side reports what it has."""
    ended = running.pop(0)
    if fate == "failed":
      buffer.drop(0)
    else:
      buffer.put(ended)
    return running

  rollout = mock.Mock(spec=rollout_side.RolloutSide, groups=groups)
  found = checkpointing.outstanding(buffer, rollout)
  expected = [("running", 1)]
  if fate == "finished":
    expected.append(("finished", 0))
  assert [(one.status, one.group.index) for one in found] == expected
