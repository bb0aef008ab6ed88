"""Coordinator and replica as if apart: every message is encoded on its way."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import tiny
import worker_world

from jaxrl_async import types
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.text import tokenizer as tokenizer_lib


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


class Pickled(worker_world.Link):
  def carry(self, message):
    return pickle.loads(pickle.dumps(message))


KINDS = {
  kind.__name__: kind
  for kind in (
    messages.Ask,
    messages.Turn,
    messages.Work,
    messages.Written,
    messages.Report,
    messages.Adopted,
    types.Admission,
    types.Trajectory,
    types.CacheBuild,
  )
}


def plain(value):
  """A message as JSON has it."""
  if dataclasses.is_dataclass(value):
    fields = {
      field.name: plain(getattr(value, field.name))
      for field in dataclasses.fields(value)
    }
    return {"kind": type(value).__name__, **fields}
  if hasattr(value, "_fields"):  # a named tuple
    fields = {name: plain(one) for name, one in value._asdict().items()}
    return {"kind": type(value).__name__, **fields}
  if isinstance(value, np.ndarray):
    return {"dtype": value.dtype.str, "bytes": value.tobytes().hex()}
  if isinstance(value, types.FinishReason):
    return {"finish_reason": value.value}
  if isinstance(value, tuple):
    return [plain(one) for one in value]
  return value


def read(value):
  """The inverse of `plain`."""
  if isinstance(value, list):
    return tuple(map(read, value))
  if not isinstance(value, dict):
    return value
  if "dtype" in value:
    return np.frombuffer(bytes.fromhex(value["bytes"]), value["dtype"])
  if value.keys() == {"finish_reason"}:
    return types.FinishReason(value["finish_reason"])
  fields = {name: read(one) for name, one in value.items() if name != "kind"}
  return KINDS[value["kind"]](**fields)


class Json(worker_world.Link):
  def carry(self, message):
    return read(json.loads(json.dumps(plain(message))))


def two_turns(prompt):
  """Fails after the first turn of some members of every third group."""
  completion = yield prompt.tokens
  if prompt.item["number"] % 3 == 1 and len(completion) % 2:
    raise LookupError("no such page")
  yield np.concatenate([[50, 51], completion[-1:] + 20]).astype(np.int32)


def comparable(group):
  return [
    (
      *(getattr(t, name).tobytes() for name in worker_world.ARRAYS),
      t.finish_reason,
      t.reward,
    )
    for t in group.trajectories
  ]


def shown(completion):
  """A completion as values that can be compared."""
  names = [field.name for field in dataclasses.fields(completion)]
  values = {name: getattr(completion, name) for name in names}
  return values | {"tokens": values["tokens"].tolist()}


def books(world):
  """What was written, what was scored, and the ledger without its times."""
  state = world.buffer.state()
  return (
    {g.index: comparable(g) for g in state.finished},
    {i: comparable(g) for i, g in world.worker.groups().items()},
    [
      (item, list(map(shown, texts))) for item, texts in world.rewards.submitted
    ],
    [line | {"times_s": sorted(line["times_s"])} for line in world.lines()],
    dataclasses.asdict(world.scheduler.stats),
  )


@pytest.mark.parametrize("link", [Pickled, Json])
def test_sides_that_share_no_object_write_the_same_books(make_world, link):
  options = {"episode": two_turns, "max_completion_tokens": 24}
  together = make_world(**options)
  apart = make_world(link=link, **options)
  for world in (together, apart):
    world.run_until(worker_world.finished(4))
    worker_world.check_balance(world)
  assert books(apart) == books(together)
  assert apart.lines(), "no group failed"
  assert {"admit", "report", "adopted"} <= {verb for verb, _ in apart.link.said}
  reasons = {
    written.trajectory.finish_reason
    for verb, message in apart.link.said
    if verb == "report"
    for written in message.written
  }
  assert types.FinishReason.ABORTED in reasons


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_messages_cannot_be_changed_on_their_way(kind):
  if kind.__module__ == messages.__name__:
    assert issubclass(kind, tuple) or kind.__dataclass_params__.frozen


def test_a_group_whose_replica_left_is_written_on_by_another(make_world):
  expected = make_world()
  expected.run_until(worker_world.finished(4))
  world = make_world(link=Pickled)
  steps = []

  def leave(num_steps):
    steps.append(num_steps)
    if num_steps == 2:
      world.worker.stop()

  world.scheduler.after_step = leave
  world.worker.run()
  world.worker._gate = rollout_side.Gate()
  world.replica.give_back()
  world.coordinator.drained("replica 0")
  assert not world.scheduler.sequences()
  assert any(
    t.finish_reason is None and t.loss_mask.any()
    for group in world.coordinator.groups().values()
    for t in group.trajectories
  )
  before = world.scheduler.stats.generated_tokens
  world.replica = world.worker.replica = replica_lib.Replica(
    "replica 1",
    world.link,
    tiny.scheduler(cls=tiny.SteppedScheduler),
    channel=world.channel,
    tokenizer=tokenizer_lib.character_level(),
  )
  world.run_until(worker_world.finished(4))
  world.scheduler.stats.generated_tokens += before
  worker_world.check_balance(world)
  assert world.link.said[-1][1].replica == "replica 1"
  groups = {g.index: g for g in world.buffer.state().finished}
  for group in expected.buffer.state().finished:
    both = zip(
      groups[group.index].trajectories, group.trajectories, strict=True
    )
    for here, there in both:
      assert here.tokens.tolist() == there.tokens.tolist()
      assert (here.finish_reason, here.reward) == (
        there.finish_reason,
        there.reward,
      )


def test_owners_are_names_and_no_objects():
  owner = sequence_lib.Owner("group", 3)
  again = pickle.loads(pickle.dumps(owner))
  assert again is not owner
  scheduler = tiny.ready()
  scheduler.submit(tiny.sequence(tiny.prompt(5), owner=owner))
  assert scheduler.cancel(sequence_lib.Owner("request", 3)) == 0
  assert scheduler.cancel(again) == 1
