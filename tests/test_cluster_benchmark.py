"""The benchmark of a coordinator of many replicas: what it prints."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARK = pathlib.Path(__file__).parents[1] / "benchmarks" / "cluster.py"
KEYS = {
  *("replicas", "groups_per_s", "reports_per_s", "admit_p99_ms"),
  *("report_p99_ms", "coordinator_cpu_per_group_ms", "by_replicas"),
  *("wall_ratio_vs_local", "adopt_idle_s", "fan_out"),
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_last_line_has_every_key():
  sizes = ("--steps=12", "--groups_per_step=8", "--group_size=2")
  done = subprocess.run(
    [
      *(sys.executable, BENCHMARK, *sizes, "--replicas=1,3"),
      *("--norun", "--weights=4", "--readers=1"),
    ],
    capture_output=True,
    text=True,
    timeout=500,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found.keys() == KEYS
  assert [row["replicas"] for row in found["by_replicas"]] == [1, 3]
  assert found["replicas"] == 3
  measured = found["by_replicas"]
  assert all(value > 0 for row in measured for value in row.values())
  assert found["fan_out"]
  assert found["wall_ratio_vs_local"] is None
