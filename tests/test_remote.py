"""What coordinator and replica send each other between processes."""

import dataclasses
import pathlib
import pickle
import threading

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.cluster import hosts
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import wire


def test_a_file_that_comes_late_is_seen(tmp_path):
  path = tmp_path / "probe"
  path.write_text("of an earlier start")
  writer = threading.Timer(0.5, path.write_text, ["here"])
  writer.start()
  assert hosts.facts((path, "here")).probe == "here"
  writer.join(10)


def test_other_code_is_told_like_another_version(tmp_path):
  expected = hosts.versions()
  assert len(expected["source of jaxrl_async"]) == 16
  other = expected | {"source of jaxrl_async": "0" * 16}
  found = hosts.Facts(host="there", versions=other, probe=None)
  line = hosts.difference(found, (pathlib.Path("none"), ""), expected)
  assert f"has source of jaxrl_async {'0' * 16} instead of" in line


def work_of(*indices):
  return messages.Work(
    turns=tuple(
      messages.Turn(
        admission=types.Admission(index=i, birth=i + 1, deadline=i + 2),
        trajectory=types.Trajectory(
          member=i,
          tokens=np.arange(i + 1, dtype=np.int32),
          loss_mask=np.arange(i + 1) > 1,
          behavior_logprobs=np.linspace(-1, 0, i + 1, dtype=np.float32),
          policy_versions=np.full(i + 1, i, np.int32),
          writers=(("a", i),) if i else (),
          steered=tuple(range(2, i + 1)),
        ),
        limit=9 + i,
        temperature=0.5 * i,
        stop=("x",) * i,
        stop_token_ids=(i,),
        guide="g" * i,
      )
      for i in indices
    ),
    cancelled=indices,
  )


def same(one, other):
  """Whether two messages are equal, arrays and their types included."""
  if isinstance(one, np.ndarray):
    return one.dtype == other.dtype and one.tolist() == other.tolist()
  if dataclasses.is_dataclass(one):
    names = [field.name for field in dataclasses.fields(one)]
    return type(one) is type(other) and all(
      same(getattr(one, name), getattr(other, name)) for name in names
    )
  if isinstance(one, tuple):
    return len(one) == len(other) and all(map(same, one, other))
  return one == other


@pytest.mark.parametrize("indices", [(), (0,), (3, 0, 2)])
def test_packed_messages_are_what_was_packed(indices):
  work = work_of(*indices)
  packed = pickle.loads(pickle.dumps(wire.pack_work(work)))
  assert same(wire.unpack_work(packed), work)
  reasons = [None, *types.FinishReason]
  report = messages.Report(
    replica="a",
    written=tuple(
      messages.Written(
        group=2**40 + turn.admission.index,
        begin=turn.limit,
        trajectory=dataclasses.replace(
          turn.trajectory, finish_reason=reasons[i]
        ),
        num_cached=i,
      )
      for i, turn in enumerate(work.turns)
    ),
  )
  packed = pickle.loads(pickle.dumps(wire.pack_report(report)))
  assert same(wire.unpack_report(packed), report)


def test_work_is_taken_in_the_order_in_which_it_was_sent():
  link = remote.RemoteLink("a")

  def deliver(number, *indices, name="a"):
    link.deliver(
      remote.Delivery(
        name=name, number=number, work=wire.pack_work(work_of(*indices))
      )
    )

  def ask(room):
    work = link.admit(messages.Ask(replica="a", version=0, room=room))
    return [turn.admission.index for turn in work.turns]

  deliver(2, 5)
  deliver(1, 9, name="b")
  assert ask(4) == []
  assert link.collect(0.0)[1:] == (
    messages.Ask(replica="a", version=0, room=4),
    0,
  )
  deliver(1, 3, 4)
  assert ask(4) == [3, 4, 5]
  told, request, received = link.collect(0.0)
  assert not told and request.room == 1 and received == 2
  # The same request again is not worth a message.
  assert ask(1) == []
  assert link.collect(0.0)[1] is None
