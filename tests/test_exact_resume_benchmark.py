"""The benchmark of exact resume: what it measures, and what it prints."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
KINDS = {"fast", "same_bits", "exact"}
KEYS = {
  *("ratio", "ratio_min", "ratio_max", "ratio_of_cuts", "compilations"),
  *("cuts", "cut_trajectories", "cut_tokens", "cut_s", *KINDS),
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_last_line_has_every_key():
  sizes = ("--steps=8", "--checkpoint_every=2", "--warm_start_steps=20")
  done = subprocess.run(
    [
      *(sys.executable, BENCHMARKS / "exact_resume.py", "--repeats=1", *sizes),
      "--config=configs/tiny.py",
    ],
    capture_output=True,
    text=True,
    timeout=800,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found.keys() == KEYS
  assert found["ratio"] == found["ratio_min"] == found["ratio_max"] > 0
  assert found["ratio_of_cuts"] > 0
  # A checkpoint may wait for the one before.
  assert 1 <= found["cuts"] <= 3
  for kind in KINDS:
    measured = found[kind]
    assert measured["tokens_per_s"] > 0 and measured["step_s"] > 0
    assert measured["prefill_per_token"] > 0
