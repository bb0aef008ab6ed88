"""What single benchmarks measure, and what they print last."""

import json
import os
import subprocess
import sys
import threading

import benchmark_module
import pytest


@pytest.mark.usefixtures("unchecked")  # it has a stand-in for the worker
def test_books_and_buffer_are_measured_at_each_size():
  bookkeeping = benchmark_module.imported("bookkeeping")
  steps = bookkeeping.measure_steps([3, 120], repeats=2)
  assert steps.keys() >= {"step_ms", "totals_us", "memory_mb"}
  groups = bookkeeping.measure_buffer([10, 50], repeats=2)
  assert groups.keys() >= {"admit_us", "refuse_us", "poll_us", "state_ms"}
  for found, sizes in ((steps, {"3", "120"}), (groups, {"10", "50"})):
    for row in found.values():
      assert row.keys() == sizes and all(x > 0 for x in row.values())


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_run_of_a_large_batch_has_the_same_books():
  bookkeeping = benchmark_module.imported("bookkeeping")
  found = bookkeeping.measure_batches([1, 4], 512)
  assert found["survives"] == {"16": 0.0, "64": 1.0}
  for name in ("ledger_bytes", "timing_bytes", "message_mb", "memory_mb"):
    assert all(x > 0 for x in found[name].values())


def test_a_descriptor_that_is_about_to_be_closed_is_no_leak(monkeypatch):
  serve_load = benchmark_module.imported("serve_load")
  monkeypatch.setattr(serve_load, "_COUNT_S", 0.3)
  process = os.getpid()
  before = serve_load._held(process)["descriptors"]
  soon, stays = os.open(os.devnull, os.O_RDONLY), os.open("/", os.O_RDONLY)
  timer = threading.Timer(0.1, os.close, [soon])
  timer.start()
  assert serve_load._held(process)["descriptors"] == before + 1
  timer.join()
  os.close(stays)
  assert serve_load._held(process)["descriptors"] == before


def printed(script, *arguments):
  """Run a benchmark; return the JSON of its last line."""
  done = subprocess.run(
    [sys.executable, benchmark_module.BENCHMARKS / script, *arguments],
    capture_output=True,
    text=True,
    timeout=800,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_cost_of_exact_resume_is_measured():
  found = printed(
    *("exact_resume.py", "--repeats=1", "--steps=8", "--checkpoint_every=2"),
    *("--warm_start_steps=20", "--config=configs/tiny.py"),
  )
  assert found["ratio"] == found["ratio_min"] == found["ratio_max"] > 0
  assert found["ratio_of_cuts"] > 0
  # A checkpoint may wait for the one before.
  assert 1 <= found["cuts"] <= 3
  for kind in ("fast", "same_bits", "exact"):
    measured = found[kind]
    assert measured["tokens_per_s"] > 0 and measured["step_s"] > 0
    assert measured["prefill_per_token"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_coordinator_is_measured_with_each_number_of_replicas():
  found = printed(
    *("cluster.py", "--steps=12", "--groups_per_step=8", "--group_size=2"),
    *("--replicas=1,3", "--norun", "--weights=4", "--readers=1"),
  )
  measured = found["by_replicas"]
  assert [row["replicas"] for row in measured] == [1, 3]
  assert found["replicas"] == 3
  assert all(value > 0 for row in measured for value in row.values())
  assert found["fan_out"]
  assert found["wall_ratio_vs_local"] is None
