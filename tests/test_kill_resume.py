"""A run that is killed over and over, and what its books have to hold."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import benchmark_module
import jax
import marked_processes
import numpy as np
import pytest
import surviving_books
import tiny
import waiting

from jaxrl_async import types
from jaxrl_async.storage import manifest
from jaxrl_async.storage import outstanding as outstanding_lib


def entry(index, **changes):
  """A line of the ledger: two groups a step, two tokens each."""
  return {
    "index": index,
    "prompt_id": f"prompt {index}",
    "birth": index // 2,
    "deadline": index // 2 + 1,
    "step": index // 2,
    "policy_version_min": index // 2,
    "policy_version_max": index // 2,
    "staleness_max": 0,
    "num_completion_tokens": [1, 1],
    "dropped": [],
    "fate": "trained",
  } | changes


def outstanding(index):
  """A group of three tokens that is in no line yet."""
  admission = types.Admission(index=index, birth=2, deadline=3)
  prompt = dataclasses.replace(
    tiny.Prompts().next(), prompt_id=f"prompt {index}"
  )
  mask = np.array([False, True, True, True])
  trajectory = types.Trajectory(
    member=0,
    tokens=np.arange(4, dtype=np.int32),
    loss_mask=mask,
    behavior_logprobs=np.zeros(4, np.float32),
    policy_versions=np.where(mask, 2, -1).astype(np.int32),
  )
  return outstanding_lib.OutstandingGroup(
    status="running",
    group=types.RolloutGroup(
      admission=admission, prompt=prompt, trajectories=[trajectory]
    ),
  )


def write(workdir, entries, groups, *, generated=11, torn="{torn"):
  """A workdir after a kill: two steps, five groups, one of them outstanding."""
  text = "".join(json.dumps(line) + "\n" for line in entries)
  workdir.mkdir(exist_ok=True)
  (workdir / "ledger.jsonl").write_text(text + torn)
  path = workdir / "checkpoints" / "2"
  path.mkdir(parents=True)
  trained = sum(sum(line["num_completion_tokens"]) for line in entries)
  host_state = {
    "groups_per_step": 2,
    "max_staleness": 1,
    "next_index": 5,
    "ledger": {
      "offset_bytes": len(text),
      "trained_tokens": trained,
      "filtered_tokens": 0,
      "failed_tokens": sum(len(line["dropped"]) for line in entries),
    },
    "metrics": {"totals": {"ledger/generated_tokens": generated}},
  }
  (path / "host_state.json").write_text(json.dumps(host_state))
  outstanding_lib.write(path, groups)
  manifest.write(path, {})
  (workdir / "checkpoints" / "4.incomplete").mkdir()


# The second one lost a member of one token.
DROPPED = {
  "num_completion_tokens": [1],
  "dropped": [{"num_completion_tokens": 1}],
}
ENTRIES = [entry(i, **(DROPPED if i == 1 else {})) for i in range(4)]
PROMPTS = [f"prompt {i}" for i in range(9)]


def test_books_that_hold_each_group_once_are_whole(tmp_path):
  assert surviving_books.read(tmp_path) is None
  write(tmp_path, ENTRIES, [outstanding(4)])
  books = surviving_books.read(tmp_path, PROMPTS)
  assert books.are_whole and books.prefix.step == 2
  assert surviving_books.changed_since(tmp_path, [books.prefix]) == []
  ledger = tmp_path / "ledger.jsonl"
  ledger.write_text(ledger.read_text().replace("trained", "TRAINED", 1))
  assert surviving_books.changed_since(tmp_path, [books.prefix]) == [2]
  lines = [{"step": 0}, *({"step": i, "reward/mean": 0} for i in (1, 1, 3))]
  (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
  assert surviving_books.repeated_metrics(tmp_path) == [2, 1]


def fourth(**changes):
  return [*ENTRIES[:3], entry(3, **changes)]


@pytest.mark.parametrize(
  ("entries", "groups", "expected"),
  [
    (ENTRIES[:3], [4], {"lost": [3, "prompt 3"], "wrong_steps": [1]}),
    (ENTRIES, [], {"lost": [4, "prompt 4"], "unaccounted_tokens": 3}),
    (ENTRIES, [3, 4], {"duplicated": [3], "unaccounted_tokens": -3}),
    (
      fourth(prompt_id="prompt 2"),
      [4],
      {"lost": ["prompt 3"], "duplicated": ["prompt 2"]},
    ),
    (fourth(staleness_max=2), [4], {"out_of_bound": [3]}),
    (fourth(deadline=0), [4], {"out_of_bound": [3]}),
    (fourth(policy_version_min=0), [4], {"out_of_bound": [3]}),
    (fourth(num_completion_tokens=[1, 2]), [4], {"unaccounted_tokens": -1}),
    (fourth(step=2, deadline=2), [4], {"wrong_steps": [1, 2]}),
  ],
)
def test_what_is_wrong_with_books_is_named(tmp_path, entries, groups, expected):
  write(tmp_path, entries, [outstanding(i) for i in groups])
  books = surviving_books.read(tmp_path, PROMPTS)
  assert not books.are_whole
  found = dataclasses.asdict(books)
  for name in ("lost", "duplicated", "out_of_bound", "wrong_steps"):
    assert found[name] == expected.get(name, []), name
  if len(entries) == 4:
    assert found["unaccounted_tokens"] == expected.get("unaccounted_tokens", 0)


def test_a_damaged_checkpoint_is_an_error(tmp_path):
  write(tmp_path, ENTRIES, [outstanding(4)])
  path = tmp_path / "checkpoints" / "2" / "groups.json"
  path.write_text(path.read_text().replace("running", "Running"))
  with pytest.raises(manifest.ManifestError, match="corrupted"):
    surviving_books.read(tmp_path)


CRITIC = (
  "algorithm.advantage=gae",
  "algorithm.advantage_scale=batch_std",
  "critic.warmup_steps=2",
)


def test_processes_with_the_mark_of_a_run_are_seen():
  mark = marked_processes.new_mark()
  assert marked_processes.find(mark) == {}
  # In a session of its own, and without the parent that was marked.
  code = (
    "import subprocess, sys;"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " start_new_session=True)"
  )
  subprocess.run(
    [sys.executable, "-c", code],
    env=marked_processes.environment(mark),
    check=True,
  )
  (pid,) = marked_processes.find(mark)
  os.kill(pid, signal.SIGKILL)
  waiting.until(lambda: marked_processes.find(mark) == {}, "its end")


NIGHTLY = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
  ("options", "num_kills"),
  [
    ({"mode": "exact"}, 4),
    pytest.param({"mode": "exact", "further": CRITIC}, 6, marks=NIGHTLY),
    pytest.param({"mode": "fast"}, 12, marks=NIGHTLY),
    pytest.param({"mode": "exact", "replicas": 2}, 6, marks=NIGHTLY),
  ],
  ids=["exact", "critic", "fast", "replicas"],
)
def test_a_run_that_is_killed_anywhere_loses_and_repeats_nothing(
  options, num_kills, tmp_path
):
  if options.get("replicas"):
    pytest.importorskip("ray")
  kill_resume = benchmark_module.imported("kill_resume")
  result = kill_resume.measure(
    tmp_path,
    num_kills,
    compile_cache=pathlib.Path(jax.config.jax_compilation_cache_dir),
    **options,
  )
  assert result["lost"] == result["duplicated"] == 0
  assert result["ledger_balanced"] and result["bound_held"]
  assert result["whole_steps"] and not result["rewritten_checkpoints"]
  assert result["left_in_memory"] == []
  assert result["bit_exact"] is True
  assert result["train_steps"] >= 4 and "warm start" in result["stages"]
  assert result["missed"] <= num_kills // 3
  assert result["orphans_s_max"] < 20  # one or two seconds on a quiet machine
