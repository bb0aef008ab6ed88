"""Predicted throughput: where the answer is known without a simulation."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
from simulation import areal_comparison
from simulation import presets
from simulation import slice_sizes
from simulation import throughput

pytestmark = pytest.mark.usefixtures("unchecked")

ROOT = pathlib.Path(__file__).resolve().parents[1]
SYNC, OVERLAPPED, ASYNC = throughput.Mode
# Six replicas and two training devices: 48 sequences of 1,000 tokens are a
# batch, and fill all slots; they take 10 s to write, and 24 s to train.
CLUSTER = throughput.Cluster(
  num_devices=8,
  groups_per_step=12,
  group_size=4,
  lengths=throughput.Lengths(median=1_000.0, sigma=0.0, limit=2_000),
  slots=8,
  step_s=0.01,
  cached_s=0.0,
  adopt_s=0.0,
  train_device_s=1e-3,
  call_tokens=100,
)
TOKENS = 48_000


def step_s(mode, bound=0, **changes):
  cluster = dataclasses.replace(CLUSTER, **changes)
  found = throughput.predict(cluster, mode, bound)
  assert found.tokens_per_s == pytest.approx(TOKENS / found.step_s)
  return found.step_s


def test_synchronous_steps_generate_and_then_train_on_all_devices():
  expected = 10 + TOKENS * 1e-3 / 8
  assert step_s(SYNC) == pytest.approx(expected, rel=0.01)
  assert step_s(SYNC, switch_s=5.0) == pytest.approx(expected + 5, rel=0.01)


def test_without_staleness_the_two_parts_take_turns():
  assert step_s(ASYNC, 0) == pytest.approx(10 + 24, rel=0.01)


@pytest.mark.parametrize("mode", [OVERLAPPED, ASYNC])
def test_with_staleness_the_slower_part_decides(mode):
  assert step_s(mode, 1) == pytest.approx(24, rel=0.01)
  assert step_s(mode, 1, train_device_s=1e-5) == pytest.approx(10, rel=0.06)


def test_a_bound_holds_back_what_takes_longer_than_its_steps():
  """A batch of a bound of 1 is two steps on its way, however short they are."""
  long = dataclasses.replace(CLUSTER, slots=64, train_device_s=1e-4)
  found = {
    bound: throughput.predict(long, ASYNC, bound).step_s
    for bound in (0, 1, 3, 20)
  }
  assert found[0] == pytest.approx(12.4, rel=0.01)
  assert found[1] == pytest.approx(12.4 / 2, rel=0.02)
  assert found[3] == pytest.approx(12.4 / 4, rel=0.05)
  assert found[20] == pytest.approx(2.4, rel=0.01)


def test_waiting_for_running_sequences_costs_slots():
  spread = throughput.Lengths(median=800.0, sigma=1.0, limit=8_000)
  changes = {
    "lengths": spread,
    "train_device_s": 1e-5,
    "slots": 8,
    "call_tokens": 50,
  }
  cluster = dataclasses.replace(CLUSTER, **changes)
  rates = [
    throughput.predict(cluster, ASYNC, 4, interrupts=interrupts).generated_per_s
    for interrupts in (True, False)
  ]
  assert rates[0] > 1.05 * rates[1]


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_a_cluster(name):
  kind, _, rest = name.partition("_")
  cluster = presets.areal(rest) if kind == "areal" else presets.tpu(rest, 64)
  assert cluster.slots >= 1
  assert 0 < cluster.step_s < 0.1


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_paper_is_predicted_within_15_percent():
  found = list(areal_comparison.rows())
  assert len(found) == 13
  for row in found:
    assert abs(row.difference) < 0.15, row
  predicted = [x for x in found if x.kind is areal_comparison.Kind.PREDICTED]
  assert len(predicted) == 7


def test_only_whole_replicas_generate_and_the_best_split_counts():
  # Eight chips share an engine of 32B, so that 16 chips have one split.
  found = slice_sizes.row("32b_v5p", 16, num_steps=12)
  assert found.generating == 8
  apart = dataclasses.replace(presets.tpu("32b_v5p", 16), rollout_frac=0.5)
  same = throughput.predict(apart, ASYNC, slice_sizes.BOUND, num_steps=12)
  assert found.asynchronous == same.tokens_per_s
  # All chips do both: where products are the limit, this is faster.
  assert found.synchronous > found.asynchronous


@pytest.mark.slow
def test_the_script_prints_a_table_and_a_line_of_json():
  command = [sys.executable, "launch/simulate.py", "--preset=areal_1p5b"]
  done = subprocess.run(
    [*command, "--staleness=1", "--steps=12", "--groups_per_step=64"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  *table, last = done.stdout.splitlines()
  found = json.loads(last)
  assert len(table) == 2 + 3 and found["devices"] == 128
  assert [row["staleness"] for row in found["rows"]] == [0, 1, 1]


def overlap_s(lanes):
  """Seconds in which a replica generates while a step trains."""
  return sum(
    max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s))
    for one in lanes.generating
    for other in lanes.training
  )


def test_the_slices_of_a_bound_of_zero_take_turns():
  spread = throughput.Lengths(median=800.0, sigma=1.0, limit=4_000)
  cluster = dataclasses.replace(CLUSTER, lengths=spread)
  for bound in (0, 2):
    found = throughput.lanes(cluster, bound, num_steps=6)
    assert len(found.training) in (6, 7)
    assert all(0 < span.share <= 1 for span in found.generating)
    trained_s = sum(span.end_s - span.start_s for span in found.training)
    if bound == 0:
      assert overlap_s(found) == pytest.approx(0.0, abs=1e-6)
    else:
      assert overlap_s(found) > 0.3 * trained_s
