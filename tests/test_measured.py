"""What the simulator takes from runs, and what it advises."""

import dataclasses
import json
import subprocess
import sys

import pytest
from simulation import measured

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.storage import config_json

pytestmark = pytest.mark.usefixtures("unchecked")

STEP_S, SLOT_S, TRAIN_DEVICE_S = 0.004, 0.0001, 0.0002


def a_config(slots=32, **fields):
  config = sections.Config()
  settings = {
    "mesh.train_fsdp": 2,
    "mesh.rollout_data": 2,
    "rollout.num_slots": slots,
    "train.rows_per_microbatch": 12,
    "warm_start.num_steps": 0,
    "algorithm.groups_per_step": 8,
    "algorithm.group_size": 4,
  }
  for path, value in (settings | fields).items():
    fields_lib.set_at(config, path, value)
  return config


def a_run(slots=32, num_steps=8, **fields):
  """A run whose engines and trainer have the rates above."""
  occupancy, busy = 0.75, 0.5
  sequences = slots / 2 * occupancy  # of each of two replicas
  tokens_per_busy_s = 2 * sequences / (STEP_S + SLOT_S * sequences)
  step = {
    "completion/tokens_mean": 50.0,
    "completion/tokens_histogram": {
      "limits": [0, 40, 80, 120],
      "counts": [20, 40, 10],
    },
    "rollout/busy_frac": busy,
    "rollout/tokens_per_s": busy * tokens_per_busy_s,
    "rollout/decode_steps": busy / (STEP_S + SLOT_S * sequences),
    "time/step_s": 1.0,
    "time/adopt_s": 0.01,
    "train/busy_frac": 0.8,
    "train/tokens_per_s": 0.8 * 2 / TRAIN_DEVICE_S,
  }
  return measured.Run(
    config=a_config(slots, **fields), steps=[step] * num_steps
  )


def test_a_run_tells_the_rates_of_its_devices():
  found = measured.cluster(a_run())
  assert found.num_devices == 4 and found.rollout_frac == 0.5
  assert found.slots == 16
  assert found.step_s == pytest.approx(STEP_S + 12 * SLOT_S)
  assert found.slot_s == 0
  assert found.train_device_s == pytest.approx(TRAIN_DEVICE_S)
  assert found.adopt_s == 0.01


def test_steps_that_differ_in_their_time_count_by_it():
  run = a_run()
  (step, *_) = run.steps
  short = dict(step)
  for name in ("train/tokens_per_s", "rollout/tokens_per_s"):
    short[name] = 10 * step[name]  # the same tokens in a tenth of the time
  for name in ("train/busy_frac", "rollout/busy_frac"):
    short[name] = 1.0
  short["time/step_s"] = 0.1
  short["rollout/decode_steps"] = 3 * step["rollout/decode_steps"]
  found = dataclasses.replace(run, steps=[step, short] * 4)
  per_s = 2 * step["train/tokens_per_s"] / 1.1
  assert measured.tokens_per_s(found) == pytest.approx(per_s)
  made = measured.cluster(found)
  busy_s = (0.8 + 0.1) / 1.1
  assert made.train_device_s == pytest.approx(2 * busy_s / per_s)
  assert made.step_s == pytest.approx(
    (0.5 + 0.1) / (4 * step["rollout/decode_steps"])
  )


def test_engines_of_a_cluster_have_steps_of_their_own():
  run, settings = a_run(), {"cluster.kind": sections.ClusterKind.RAY}
  settings |= {"cluster.replicas": 2, "mesh.rollout_data": 1}
  step = dict(run.steps[0])
  step["rollout/decode_steps"] *= 2
  found = measured.cluster(
    dataclasses.replace(run, config=a_config(16, **settings), steps=[step] * 8)
  )
  here = measured.cluster(run)
  assert found.slots == here.slots and found.step_s == here.step_s


def test_two_runs_tell_what_a_slot_costs():
  found = measured.cluster(a_run(), a_run(128))
  assert found.step_s == pytest.approx(STEP_S)
  assert found.slot_s == pytest.approx(SLOT_S)
  assert measured.slots_between(a_run(), a_run(128)) == [16, 25, 40, 64]


@pytest.mark.parametrize(
  "other, error",
  [
    (a_run(32), "both runs have 32 slots"),
    (a_run(64, **{"mesh.train_fsdp": 1}), "the runs differ in mesh"),
  ],
)
def test_runs_that_do_not_tell_it_are_refused(other, error):
  with pytest.raises(sections.ConfigError, match=f"other_workdir: {error}"):
    measured.cluster(a_run(), other)


def advised(cluster, run, slots=(16,)):
  return measured.advise(cluster, run.config, [2], slots, num_steps=12)[0]


def test_the_split_follows_the_slower_half():
  run = a_run()
  found = dataclasses.replace(
    measured.cluster(run), num_devices=7, groups_per_step=64
  )
  slow = dataclasses.replace(found, train_device_s=100 * TRAIN_DEVICE_S)
  quick = dataclasses.replace(found, train_device_s=TRAIN_DEVICE_S / 10)
  assert advised(slow, run).num_training == 6
  assert advised(quick, run).num_training < 4


def test_advice_is_flags_that_a_run_accepts():
  run = a_run()
  found = dataclasses.replace(measured.cluster(run), num_devices=7)
  for rate in (0.1, 1, 10):
    one = advised(
      dataclasses.replace(found, train_device_s=rate * TRAIN_DEVICE_S), run
    )
    assert 12 % one.num_training == 0, "the rows of a microbatch"
    config = a_config()
    for flag in one.flags:
      path, _, value = flag.removeprefix("--config.").partition("=")
      fields_lib.set_at(config, path, int(value))
    config_checks.validate(config, 7)
    assert config.mesh.train_fsdp == one.num_training
    assert config.rollout.num_slots == 16 * config.mesh.rollout_data
  with pytest.raises(sections.ConfigError, match="mesh.train_"):
    # None of the numbers of training devices divides 7 rows.
    rows = a_run(**{"train.rows_per_microbatch": 7, "mesh.train_data": 2})
    measured.advise(found, rows.config, [2], [16], num_steps=12)


def test_slots_are_as_few_as_are_nearly_as_good():
  run = a_run()
  found = dataclasses.replace(
    measured.cluster(run), step_s=0.1, slot_s=0.0, train_device_s=1e-9
  )
  assert advised(found, run, (8, 16, 64)).slots == 64
  constant = dataclasses.replace(found, step_s=0.0, slot_s=0.01)
  assert advised(constant, run, (8, 16, 64)).slots == 8


def test_the_script_reads_a_run_whose_last_line_is_being_written(tmp_path):
  run = a_run()
  config_json.write(run.config, tmp_path)
  lines = [json.dumps(step) for step in run.steps]
  text = "\n".join([*lines, lines[-1][:20]])
  (tmp_path / "metrics.jsonl").write_text(text)
  command = [sys.executable, "launch/simulate.py", f"--workdir={tmp_path}"]
  done = subprocess.run(
    [*command, "--staleness=1,4", "--steps=12"],
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert done.returncode == 0, done.stderr
  *_, best, last = done.stdout.splitlines()
  found = json.loads(last)
  assert best == " ".join(["best:", *found["rows"][0]["flags"]])
  assert {row["staleness"] for row in found["rows"]} == {1, 4}
  refused = subprocess.run(
    [*command, "--slots=8"], capture_output=True, text=True, timeout=100
  )
  assert refused.returncode == 1
  assert refused.stderr.startswith("error: slots: one run does not tell")
