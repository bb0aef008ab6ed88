"""Runs that go on with other settings, begin again, or lose their workdir."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import threading
import time

import disks
from ml_collections import config_dict
import pytest
import test_critic_run
import test_run
import waiting

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.run import checkpointing
from jaxrl_async.run import first_stage
from jaxrl_async.run import loop as loop_lib
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import rollout_thread
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import disk
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.weights import transfer_directory
from jaxrl_async.weights import version_publisher

pytestmark = pytest.mark.slow
NIGHTLY = pytest.mark.nightly

# What a run is continued with, several fields at a time: a case is a start, and
# most of a start is compiling.
CASES = {
  "meshes": {
    "mesh": {"train_fsdp": 2, "rollout_data": 2},
    "model": {"max_positions": 4_096},
    "train.optimizer": {"offload": True},
    "cluster": {"start_timeout_s": 200.0},
  },
  "slots and pages": {
    "rollout": {
      "num_slots": 4,
      "cache_tokens": 32,
      "decode_steps_per_call": 2,
      "prefill_rows": 2,
      "prefill_buckets": (16, 32),
      "window_buckets": (16, 32),
      "num_pages": 20,
      "page_tokens": 8,
      "preemption": sections.Preemption.EXACT,
      "kv_on_adopt": sections.KvOnAdopt.KEEP,
      "attention": "xla",
    },
    "train": {"tokens_per_row": 64, "rows_per_microbatch": 2},
  },
  "a lower limit": {
    "rollout": {
      "max_completion_tokens": 2,
      "prefill_chunk": 8,
      "max_group_seconds": 600.0,
    },
    "train": {"attention": "blocks", "vocab_chunk": 40, "max_bad_updates": 1},
    "model": {"remat": sections.Remat.FULL},
    "task": {
      "reward_workers": 2,
      "question_workers": 1,
      "reward_timeout_s": 5.0,
      "reward_retries": 0,
      "max_failed_groups": 2,
      "episode_timeout_s": 30.0,
      "episode_workers": 1,
    },
  },
  "the direct channel, in step": {
    "transfer": {"channel": sections.Channel.DIRECT},
    "algorithm": {
      "max_staleness": 0,
      "clip_low": 0.1,
      "clip_high": 0.3,
      "dual_clip": 3.0,
      "behavior_weight_cap": 2.0,
      "behavior_weight_cap_mode": sections.BehaviorWeightCapMode.TRUNCATE,
      "proximal": sections.ProximalMode.LOGLINEAR,
      "advantage_scale": sections.AdvantageScale.NONE,
      "filter_zero_std": True,
    },
    "train": {"decay": 0.5},
    "train.optimizer": {
      "learning_rate": 3e-3,
      "warmup_steps": 8,
      "eps": 1e-6,
      "weight_decay": 0.1,
      "max_grad_norm": 0.5,
    },
    "eval": {
      "every": 2,
      "samples": 2,
      "sets": config_dict.ConfigDict(
        {
          "more": {
            "dataset": "chain_sum",
            "params": {"min_terms": 2, "max_terms": 2, "max_digits": 1},
            "num_items": 3,
          }
        }
      ),
    },
  },
  "other types and another directory": {
    "rollout": {
      "dtype": "bfloat16",
      "weights": sections.WeightFormat.INT8,
    },
    "algorithm": {
      "max_staleness": 4,
      "loss": "sapo",
      "sapo_positive": 0.9,
      "sapo_negative": 1.1,
      "aggregation": sections.Aggregation.SEQUENCE_SUM,
      "aggregation_tokens": 8,
      "behavior_weight_level": sections.BehaviorWeightLevel.SEQUENCE_MEAN,
      "behavior_weight_floor": 0.5,
      "second_moment_bound": 0.04,
      "sequence_kl_bound": 0.5,
      "advantage": "leave_one_out",
      "reward_bias": -0.5,
      "reward_scale": 2.0,
      "reward_clip": 20.0,
      "overlong_filter": True,
      "entropy_coef": 1e-3,
    },
    "train.optimizer": {
      "rate_schedule": config_dict.ConfigDict(
        {"schedule": "warmup_constant_schedule", "warmup_steps": 4}
      ),
    },
    "staleness_control": {"minimum": 1, "maximum": 3},
    "transfer": {"directory": "elsewhere"},
    "run": {"checkpoint_every": 1, "keep_checkpoints": 5},
  },
}


def make_config(num_steps=2, **sections):
  config = test_run.make_config(
    num_steps=num_steps,
    eval={"num_items": 4},
    rollout={"decode_steps_per_call": 1},
    run={"stall_timeout_s": 600.0, "join_timeout_s": 120.0},
  )
  for path, fields in sections.items():
    section = config
    for name in path.split("."):
      section = getattr(section, name)
    for name, value in fields.items():
      setattr(section, name, value)
  return config


def steps_of(workdir):
  return [line["step"] for line in test_run.lines(workdir, "metrics")]


def half_written(groups):
  """Lengths of the unfinished completions, by group and member."""
  return {
    (group.index, t.member): t.num_completion_tokens
    for group in groups
    for t in group.trajectories
    if t.finish_reason is None
  }


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """A run of two steps, stopped in the middle of trajectories.

  Returns: its workdir, and the outstanding groups by index.
  """
  workdir = tmp_path_factory.mktemp("stopped")
  save, publish = loop_lib.Loop.save, version_publisher.VersionPublisher.publish
  generate = engine_lib.Engine.generate
  # From the last weights on the worker draws ten tokens a second, or when told.
  is_last, may_draw = threading.Event(), threading.Event()

  def generate_in_turn(*args, **kwargs):
    if is_last.is_set() and threading.current_thread().name == (
      rollout_thread.NAME
    ):
      may_draw.wait(0.1)
      may_draw.clear()
    return generate(*args, **kwargs)

  def publish_and_hold(self, version, **kwargs):
    if version == 2:
      is_last.set()
    return publish(self, version, **kwargs)

  def save_in_the_middle(self, step, *rest):
    deadline = time.monotonic() + 60
    while is_last.is_set() and time.monotonic() < deadline:
      may_draw.set()
      with self.rollout_thread.paused():
        lengths = half_written(self.rollout.groups().values())
        if max(lengths.values(), default=0) > 4:
          return save(self, step, *rest)
      time.sleep(0.01)
    return save(self, step, *rest)

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(loop_lib.Loop, "save", save_in_the_middle)
    patched.setattr(
      version_publisher.VersionPublisher, "publish", publish_and_hold
    )
    patched.setattr(engine_lib.Engine, "generate", generate_in_turn)
    test_run.start(make_config(), workdir)
  groups = outstanding_lib.read(workdir / "checkpoints" / "2")
  return workdir, {g.group.index: g.group for g in groups}


def test_there_is_a_case_for_every_field_that_may_differ():
  changed = {
    f"{path}.{name}"
    for case in CASES.values()
    for path, fields in case.items()
    for name in fields
  } | {"train.num_steps"}
  # A section that may differ as a whole needs a case for one of its fields.
  whole = {
    field.name
    for field in dataclasses.fields(sections.Config())
    if field.metadata["setting"].free
  }
  free = {
    field.path
    for field in fields_lib.walk(sections.Config())
    if field.known.free
  }
  assert changed <= free
  wanted = {path for path in free if path.partition(".")[0] not in whole}
  wanted |= whole
  tried = changed | {path.partition(".")[0] for path in changed}
  # Runs with a critic are in a file of their own.
  tried |= {
    f"{path}.{name}"
    for path, fields in test_critic_run.CHANGES.items()
    for name in fields
  }
  # In test_reference.py.
  tried |= {"algorithm.reference_offload", "algorithm.kl_estimator"}
  tried |= {"algorithm.distill_coef"}  # in test_distillation.py
  # XLA's CPU backend lacks products that the trainer would need for it.
  assert wanted - tried == {"model.compute_dtype"}


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(name, marks=() if name == "a lower limit" else NIGHTLY)
    for name in CASES
  ],
)
def test_a_run_goes_on_with_other_settings(stopped, case, tmp_path, capsys):
  stored_in, outstanding = stopped
  workdir = shutil.copytree(stored_in, tmp_path / "run")
  lengths = half_written(outstanding.values())
  assert max(lengths.values()) > 2
  config = make_config(num_steps=4, **CASES[case])
  if config.transfer.directory:
    config.transfer.directory = str(tmp_path / "transfer")
    name = transfer_directory._name(workdir.resolve())
    left = pathlib.Path(config.transfer.directory) / name
    (left / "incarnation-killed" / "3").mkdir(parents=True)
    (left / "incarnation-killed" / "newest").symlink_to("3")
  before = test_run.lines(workdir, "ledger")
  summary = test_run.start(config, workdir)
  assert summary["train_steps"] == 4
  assert steps_of(workdir) == [0, 1, 2, 3, 4]
  entries = test_run.check_ledger(workdir, summary)
  assert entries[: len(before)] == before
  control, bound = config.staleness_control, config.algorithm.max_staleness
  bounds = [*range(control.minimum, control.maximum + 1)]
  if not control.maximum:
    bounds = [bound]
  for entry in entries[len(before) :]:
    stored = outstanding.get(entry["index"])
    if stored is None:
      assert entry["deadline"] - entry["birth"] in bounds
      assert max(entry["num_completion_tokens"]) <= (
        config.rollout.max_completion_tokens
      )
    else:
      assert entry["deadline"] == stored.admission.deadline
    assert entry["fate"] == "filtered" or entry["step"] <= entry["deadline"]
  ended = {entry["index"]: entry for entry in entries}
  for (index, member), length in lengths.items():
    if index in ended:
      assert ended[index]["num_completion_tokens"][member] >= length
  said = capsys.readouterr().err
  assert f"continuing {workdir} from step 2 with {len(outstanding)}" in said
  for path, fields in CASES[case].items():
    for name in fields:
      assert f"{path}.{name}: " in said
  if config.eval.sets:
    names = {"accuracy", "pass@1", "tokens_mean", "frac_truncated", "failed"}
    last = test_run.lines(workdir, "metrics")[-1]
    assert names == {
      name.removeprefix("eval/more/")
      for name in last
      if name.startswith("eval/more/")
    }
    assert {"eval/held_out/avg@2", "eval/held_out/pass@2"} <= last.keys()
  if config.transfer.directory:
    assert not any((tmp_path / "transfer").iterdir())


class Killed(BaseException):
  """As a SIGKILL: what is written stays, and nothing is added."""


@pytest.mark.nightly  # test_kill_resume.py kills one in its warm start
def test_a_run_killed_before_it_trains_begins_again_by_the_same_command(
  tmp_path, monkeypatch
):
  config = make_config(
    num_steps=1, warm_start={"num_steps": 2}, task={"answer_prefix": "="}
  )

  def kill(*args, **kwargs):
    raise Killed

  for place, name in (
    (first_stage, "_show_step"),
    (checkpoint.manifest, "write"),
    (checkpoint.places, "put_in_place"),
    # From here on there is a checkpoint.
    (loop_lib.config_json, "write"),
    (loop_lib.Loop, "_evaluate"),
    (metrics_lib.MetricsWriter, "write"),
    (recorder_lib.Recorder, "start_rl"),
  ):
    with monkeypatch.context() as patched, pytest.raises(Killed):
      patched.setattr(place, name, kill)
      test_run.start(config, tmp_path)
  assert steps_of(tmp_path) == [0]
  summary = test_run.start(config, tmp_path)
  assert steps_of(tmp_path) == [0, 1]
  assert "eval/held_out/avg@1" in test_run.lines(tmp_path, "metrics")[0]
  test_run.check_ledger(tmp_path, summary)
  assert json.loads((tmp_path / "config.json").read_text())["format"] == 1


def test_a_second_run_touches_nothing(stopped):
  workdir, _ = stopped
  before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
  with workdir_lib.Claim(workdir, pytest.fail):
    held = (workdir / "lock").stat().st_mtime_ns
    with pytest.raises(workdir_lib.WorkdirError, match="is in use by process"):
      test_run.start(make_config(num_steps=3), workdir)
  now = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
  assert now == before | {workdir / "lock": held}


def put_back(elsewhere, path):
  def is_back():
    # Orbax may have made it again for what it was writing.
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
      elsewhere.rename(path)
    return not elsewhere.exists()

  waiting.until(is_back)


@contextlib.contextmanager
def moved(path, elsewhere):
  path.rename(elsewhere)
  yield
  put_back(elsewhere, path)


@contextlib.contextmanager
def silent(path, elsewhere):
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(workdir_lib, "check_in_place", disks.does_not_answer)
    yield


def at_steps(monkeypatch, happens):
  """Steps are written down after what happens then."""
  write = recorder_lib.Recorder._step

  def recorded(self, pending, *rest):
    happens.get(pending.step, lambda: None)()
    write(self, pending, *rest)

  monkeypatch.setattr(recorder_lib.Recorder, "_step", recorded)


@pytest.mark.parametrize(
  ("away", "reason"),
  [
    (moved, "it was moved; put it back"),
    pytest.param(silent, "Stale file handle", marks=NIGHTLY),
  ],
)
def test_a_run_goes_on_while_its_files_are_out_of_reach(
  stopped, tmp_path, monkeypatch, capsys, away, reason
):
  workdir = shutil.copytree(stopped[0], tmp_path / "run")
  held, elsewhere = contextlib.ExitStack(), tmp_path / "elsewhere"

  def leave():
    held.enter_context(away(workdir, elsewhere))

  at_steps(monkeypatch, {4: leave, 7: held.close})
  with held:
    summary = test_run.start(make_config(num_steps=9), workdir)
  assert summary["train_steps"] == 9
  entries = test_run.check_ledger(workdir, summary)
  assert sorted({entry["step"] for entry in entries}) == [*range(9)]
  steps = [line["step"] for line in test_run.lines(workdir, "metrics")]
  assert steps == [*range(10)]
  said = capsys.readouterr().err
  assert f"WARNING: {workdir} is not reached ({reason})" in said
  assert f"{workdir} is reached again" in said
  assert f"{workdir / 'ledger.jsonl'} is written again" in said


@pytest.mark.parametrize(
  "is_removed", [True, pytest.param(False, marks=NIGHTLY)]
)
def test_a_run_whose_workdir_stays_away_ends_and_says_so(
  stopped, tmp_path, monkeypatch, capsys, is_removed
):
  workdir = shutil.copytree(stopped[0], tmp_path / "run")
  elsewhere = tmp_path / "elsewhere"
  monkeypatch.setattr(checkpointing, "FIRST_WAIT_S", 0.1)
  run = {"checkpoint_every": 1, "max_checkpoint_failures": 2}

  def leave():
    workdir.rename(elsewhere)
    if is_removed:
      shutil.copytree(elsewhere, tmp_path / "copy")
      shutil.rmtree(elsewhere)
      (tmp_path / "copy").rename(elsewhere)

  with monkeypatch.context() as patched:
    at_steps(patched, {4: leave})
    with pytest.raises(
      disk.StorageError, match="This was attempt 2 in a row that failed"
    ) as caught:
      test_run.start(make_config(num_steps=3000, run=run), workdir)
  assert f"{workdir}" in str(caught.value) and "\n" not in str(caught.value)
  said = capsys.readouterr().err
  assert f"WARNING: {workdir} is not reached" in said
  assert "attempt 1 of 2 (run.max_checkpoint_failures). The run goes on" in said
  put_back(elsewhere, workdir)
  summary = test_run.start(make_config(num_steps=6), workdir)
  assert summary["train_steps"] == 6
  test_run.check_ledger(workdir, summary)
