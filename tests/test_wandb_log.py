"""Weights & Biases: offline, over a restart, and where it does not work."""

import json
import subprocess
import sys

import pytest

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.reporting import wandb_log as wandb_log_lib

# In a process of its own: the library leaves a service and handlers behind, and
# its dependencies warn.
LOG = """
import pathlib, sys
from jaxrl_async.reporting import metrics, side_outputs, wandb_log

workdir, steps = pathlib.Path(sys.argv[1]), map(int, sys.argv[2:])
log = wandb_log.WandbLog(workdir, "tests", {"seed": 3, "task": {"a": [1]}})
notes = []
beside = side_outputs.SideOutputs(notes.append)
writer = metrics.MetricsWriter(workdir, beside, log)
for step in steps:
  writer.write(step, {
    "reward/mean": step / 2,
    "policy/loss": float("nan"),
    "staleness/histogram": [4, 0, 1],
    "reward/histogram": metrics.histogram_of([0.0, 1.0, 1.0]),
  })
writer.write_evaluation(1, {"eval/held_out/avg@1": 0.25})
writer.close()
for note in notes:
  print(note)
print(beside.num_failures)
"""
READ = '''
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def records(data):
  """The file is a log of LevelDB after a header of seven bytes."""
  at, whole = 7, b""
  while at + 7 <= len(data):
    if 32_768 - at % 32_768 < 7:  # a block has no room for another record
      at += 32_768 - at % 32_768
      continue
    _, size, kind = struct.unpack_from("<IHB", data, at)
    whole += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # all of it, or its end
      yield whole
      whole = b""

for path in sys.argv[1:]:
  for data in records(open(path, "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "history":
      items = {
        item.key or "|".join(item.nested_key): json.loads(item.value_json)
        for item in record.history.item
      }
      print(json.dumps([record.history.step.num, items]))
    elif kind == "run":
      config = {item.key: item.value_json for item in record.run.config.update}
      print(json.dumps([record.run.run_id, record.run.project, config]))
'''


def python(code, workdir, *arguments, **environment):
  ran = subprocess.run(
    [
      *(sys.executable, "-W", "ignore", "-c", code),
      *map(str, (workdir, *arguments)),
    ],
    # Nobody is logged in there.
    env={"PATH": "/usr/bin:/bin", "HOME": str(workdir.parent), **environment},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=150,
  )
  assert ran.returncode == 0, ran.stderr
  return ran.stdout


@pytest.mark.slow
def test_all_starts_of_a_run_log_to_one_run_with_every_metric(tmp_path):
  for steps in ((1, 2), (3,)):
    said = python(LOG, tmp_path, *steps, WANDB_MODE="offline")
    assert said == "0\n"
  files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
  assert len(files) == 2
  lines = [json.loads(x) for x in python(READ, *files).splitlines()]
  runs = [x for x in lines if isinstance(x[0], str)]
  run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
  assert {(found, project) for found, project, _ in runs} == {(run_id, "tests")}
  assert json.loads(runs[0][2]["task"]) == {"a": [1]}
  steps = {x[0]: x[1] for x in lines if isinstance(x[0], int)}
  assert [steps[i]["reward/mean"] for i in (1, 2, 3)] == [0.5, 1.0, 1.5]
  assert steps[1]["staleness/histogram|values"] == [4, 0, 1]
  assert steps[1]["staleness/histogram|bins"] == [-0.5, 0.5, 1.5, 2.5]
  assert sum(steps[1]["reward/histogram|values"]) == 3
  # An evaluation of an earlier step comes with the newest one.
  assert all(
    (steps[i]["eval/step"], steps[i]["eval/held_out/avg@1"]) == (1, 0.25)
    for i in (2, 3)
  )


@pytest.mark.slow
def test_without_an_account_the_run_goes_on_and_says_so_once(tmp_path):
  said = python(LOG, tmp_path, 1, 2, WANDB_MODE="online").splitlines()
  assert said[0].startswith("WARNING: the log at W&B could not be written")
  assert "API key" in said[0] and said[1:] == ["3"]
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


class Broken(wandb_log_lib.WandbLog):
  """A library that raises whatever it likes."""

  def _begin(self):
    raise LookupError("no\nservice")


def test_a_log_that_fails_is_counted_and_the_metrics_are_written(tmp_path):
  notes = []
  beside = side_outputs_lib.SideOutputs(notes.append)
  log = Broken(tmp_path, "tests", {})
  writer = metrics_lib.MetricsWriter(tmp_path, beside, log)
  writer.write(1, {"a": 1})
  writer.write(2, {"a": 1})
  writer.close()
  assert beside.num_failures == 2
  (note,) = notes
  assert "the log at W&B could not be written" in note and "no service" in note
