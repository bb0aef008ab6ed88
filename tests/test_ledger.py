"""Lines, totals and what a resume keeps."""

import contextlib
import json
import math
import sys
import threading

import disks
import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.storage import disk

JOIN_S = 20.0
EMPTY = ledger_lib.LedgerState()


def make_group(index, *, versions=((3, 3, 4), (5,)), rewards=(1.0, 0.5)):
  """Return a group whose trajectories have two prompt tokens each."""
  trajectories = []
  for member, (written, reward) in enumerate(
    zip(versions, rewards, strict=True)
  ):
    length = 2 + len(written)
    trajectories.append(
      types.Trajectory(
        member=member,
        tokens=np.zeros(length, np.int32),
        loss_mask=np.arange(length) >= 2,
        behavior_logprobs=np.zeros(length, np.float32),
        policy_versions=np.array([-1, -1, *written], np.int32),
        finish_reason=None if reward is None else types.FinishReason.EOS,
        reward=None if reward is None else tiny.reward(reward),
        writers=(("a", 1), ("b", len(written) - 1))[: len(written)],
      )
    )
  return types.RolloutGroup(
    admission=types.Admission(index=index, birth=3, deadline=7),
    prompt=types.Prompt(
      prompt_id=f"t/train/{index}", tokens=np.zeros(2, np.int32), item={}
    ),
    trajectories=trajectories,
    times_s={"admitted": 0.5, "scored": 2.0},
  )


@pytest.fixture
def open_ledger(tmp_path):
  """Open the ledger of one test; all are closed at its end."""
  with contextlib.ExitStack() as stack:

    def open_ledger(state=EMPTY):
      ledger = ledger_lib.Ledger(tmp_path / "ledger.jsonl", state)
      stack.callback(ledger.close)
      return ledger

    yield open_ledger


def read(path):
  """Return the lines, refusing what JSON does not know."""

  def refuse(name):
    raise AssertionError(f"{name} is not JSON")

  text = path.read_text()
  assert text == "" or text.endswith("\n")
  return [json.loads(s, parse_constant=refuse) for s in text.splitlines()]


def test_a_line_says_everything_about_its_group(tmp_path, open_ledger):
  path = tmp_path / "ledger.jsonl"
  ledger = open_ledger()
  ledger.add_trained(
    [make_group(8), make_group(7)], step=6, skipped_update=True
  )
  ledger.add_filtered(make_group(9))
  ledger.add_failed(make_group(10), "reward: TimeoutError")
  shared = {
    "birth": 3,
    "deadline": 7,
    "policy_version_min": 3,
    "policy_version_max": 5,
    "num_policy_versions": 3,
    "num_prompt_tokens": 2,
    "num_completion_tokens": [3, 1],
    "finish_reasons": ["eos", "eos"],
    "writers": [[["a", 3, 1], ["b", 3, 1], ["b", 4, 1]], [["a", 5, 1]]],
    "rewards": [1.0, 0.5],
    "reward_parts": {},
    "dropped": [],
    "times_s": {"admitted": 0.5, "scored": 2.0},
  }
  # Read while the ledger is open: every line is flushed.
  trained = {"fate": "trained", "step": 6, "staleness_max": 3}
  trained |= {"skipped_update": True}
  assert read(path) == [
    {"index": 8, "prompt_id": "t/train/8", **shared, **trained},
    {"index": 7, "prompt_id": "t/train/7", **shared, **trained},
    {"index": 9, "prompt_id": "t/train/9", **shared, "fate": "filtered"},
    {"index": 10, "prompt_id": "t/train/10", **shared}
    | {"fate": "failed", "reason": "reward: TimeoutError"},
  ]


def test_what_was_not_trained_is_told(tmp_path):
  told = []
  ledger = ledger_lib.Ledger(
    tmp_path / "ledger.jsonl",
    ledger_lib.LedgerState(),
    on_untrained=lambda *what: told.append(what),
  )
  trained, filtered, failed = map(make_group, range(3))
  ledger.add_trained([trained], step=5, skipped_update=False)
  ledger.add_filtered(filtered)
  ledger.add_failed(failed, "no slot")
  ledger.close()
  assert told == [
    (filtered, types.Fate.FILTERED, ""),
    (failed, types.Fate.FAILED, "no slot"),
  ]


def test_rewards_that_json_cannot_say_are_null(tmp_path, open_ledger):
  path = tmp_path / "ledger.jsonl"
  ledger = open_ledger()
  rewards = (math.nan, math.inf, None, 2.0)
  group = make_group(0, versions=((3,), (3,), (3,), ()), rewards=rewards)
  ledger.add_failed(group, 'said "no"\nand stopped')
  (line,) = read(path)
  assert line["rewards"] == [None, None, None, 2.0]
  assert line["finish_reasons"] == ["eos", "eos", None, "eos"]
  assert line["reason"] == 'said "no"\nand stopped'


def test_a_group_without_a_written_token_has_no_version(tmp_path, open_ledger):
  path = tmp_path / "ledger.jsonl"
  ledger = open_ledger()
  ledger.add_failed(make_group(0, versions=((),), rewards=(None,)), "no slot")
  ledger.add_failed(make_group(1, versions=(), rewards=()), "no slot")
  ledger.add_trained(
    [make_group(2, versions=((),), rewards=(0.0,))],
    step=3,
    skipped_update=False,
  )
  for line in read(path):
    assert line["policy_version_min"] is line["policy_version_max"] is None
    assert line["num_policy_versions"] == 0
  assert line["staleness_max"] is None
  assert ledger.state().trained_tokens == ledger.state().failed_tokens == 0


def test_writers_are_the_runs_of_replica_and_version(tmp_path, open_ledger):
  rng = np.random.default_rng(3)
  versions = [rng.integers(3, 6, n).tolist() for n in (6, 1, 0, 9, 9, 5, 9)]
  group = make_group(0, versions=versions, rewards=[1.0] * len(versions))
  group.trajectories[4].writers = ()  # of a checkpoint that had none
  open_ledger().add_filtered(group)
  expected = []
  for trajectory, written in zip(group.trajectories, versions, strict=True):
    names = [name for name, n in trajectory.writers for _ in range(n)]
    runs = []
    for name, version in zip(names, written, strict=False):
      if not runs or runs[-1][:2] != [name, version]:
        runs.append([name, version, 0])
      runs[-1][2] += 1
    expected.append(runs)
  (line,) = read(tmp_path / "ledger.jsonl")
  assert line["writers"] == expected
  assert sum(len(runs) for runs in expected) > 15


def test_a_resume_drops_what_came_after_the_checkpoint(tmp_path, open_ledger):
  path = tmp_path / "ledger.jsonl"
  ledger = open_ledger()
  ledger.add_trained([make_group(0)], step=3, skipped_update=False)
  ledger.add_filtered(make_group(1))
  state = ledger.state()
  ledger.add_failed(make_group(2), "lost")
  ledger.close()
  with open(path, "ab") as file:
    file.write(b'{"index": 3, "prom')
  ledger = open_ledger(state)
  assert ledger.state() == state
  ledger.add_failed(make_group(4), "again")
  assert [line["index"] for line in read(path)] == [0, 1, 4]
  assert ledger.state() == ledger_lib.LedgerState(
    offset_bytes=path.stat().st_size,
    trained_tokens=4,
    filtered_tokens=4,
    failed_tokens=4,
  )


def test_a_file_shorter_than_its_checkpoint_is_refused(tmp_path, open_ledger):
  path = tmp_path / "ledger.jsonl"
  path.write_text("{}\n")
  with pytest.raises(ValueError, match="has 3 bytes, fewer than the 4 "):
    open_ledger(ledger_lib.LedgerState(offset_bytes=4))


def test_totals_are_known_while_the_disk_refuses_lines(tmp_path):
  notes = []
  ledger = ledger_lib.Ledger(tmp_path / "ledger", EMPTY, note=notes.append)
  ledger.add_filtered(make_group(0))
  with disks.files_of_at_most(100):
    ledger.add_trained([make_group(1)], step=3, skipped_update=False)
    totals = ledger.totals()
    assert (totals.trained_tokens, totals.filtered_tokens) == (4, 4)
    with pytest.raises(disk.StorageError):
      ledger.state()
  assert ledger.state() == totals and len(notes) == 1
  assert totals.offset_bytes == (tmp_path / "ledger").stat().st_size
  ledger.close()


@pytest.fixture
def hasty_threads():
  """Switch threads every few bytecodes, so that a missing lock shows."""
  interval_s = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  yield
  sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("hasty_threads")
def test_lines_of_many_threads_are_whole_and_add_up(tmp_path, open_ledger):
  path = tmp_path / "ledger.jsonl"
  ledger = open_ledger()
  start = threading.Barrier(4)

  def write(first):
    start.wait(JOIN_S)
    for index in range(first, first + 100):
      if index % 2:
        ledger.add_failed(make_group(index), "x")
      else:
        ledger.add_trained([make_group(index)], step=3, skipped_update=False)

  threads = [
    threading.Thread(target=write, args=(100 * i,), daemon=True)
    for i in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(JOIN_S)
    assert not thread.is_alive()
  assert sorted(line["index"] for line in read(path)) == [*range(400)]
  assert ledger.state() == ledger_lib.LedgerState(
    offset_bytes=path.stat().st_size, trained_tokens=800, failed_tokens=800
  )


def test_tokens_that_do_not_balance_are_an_error():
  counts = {"trained": 4, "filtered": 3, "failed": 2, "in_flight": 1}
  ledger_lib.check_balance(generated=10, **counts)
  for wrong in (9, 11):
    with pytest.raises(RuntimeError, match=f"generated {wrong}, trained 4"):
      ledger_lib.check_balance(generated=wrong, **counts)


def test_named_parts_are_lists_in_the_order_of_the_members(
  tmp_path, open_ledger
):
  group = make_group(0, versions=((3,), (3,), (3,)), rewards=(1.0, 0.5, None))
  first, second, _ = group.trajectories
  first.reward = types.Reward(score=1.0, parts={"correct": 0.5, "format": 0.25})
  second.reward = types.Reward(score=0.5, parts={"correct": math.nan})
  open_ledger().add_filtered(group)
  (line,) = read(tmp_path / "ledger.jsonl")
  assert line["rewards"] == [1.0, 0.5, None]
  assert line["reward_parts"] == {
    "correct": [0.5, None, None],
    "format": [0.25, None, None],
  }
