"""Whole runs of configs/tiny.py.

Most of them start from fresh weights and are rewarded by the length of what
they write, so that every step has a gradient and many trajectories span
several versions.

`python tests/test_run.py` writes golden_losses.txt anew: only after a change
that is meant to alter the numbers.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import threading
import time

import conftest  # noqa: F401  session settings, also as a script
import jax
import metrics_page
import numpy as np
import pytest
import reward_scorers
import sampled

from configs import tiny
from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import transformer
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import extraction
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import train as train_lib
from jaxrl_async.training import train_state

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden_losses.txt"
EVALUATIONS = {
  *("eval/held_out/avg@1", "eval/held_out/pass@1", "eval/held_out/failed"),
  *("eval/held_out/tokens_mean", "eval/held_out/frac_truncated"),
  *("eval/greedy/avg@1", "eval/greedy/failed"),
}
LOSSES = ("policy/loss", "policy/grad_norm", "policy/entropy")


def make_config(variant="", *, num_steps=4, **sections):
  """configs/tiny.py without a warm start; `algorithm={"group_size": 2}`."""
  config = tiny.get_config(variant)
  config.warm_start.num_steps = 0
  config.task.answer_prefix = ""
  config.train.num_steps = num_steps
  for name, fields in sections.items():
    section = getattr(config, name)
    setattr(config, name, dataclasses.replace(section, **fields))
  config_checks.validate(config, len(jax.devices()))
  return config


def start(config, workdir, *, scorer=reward_scorers.length, **more):
  return json.loads(train_lib.run(config, workdir, scorer=scorer, **more))


def lines(workdir, name):
  """Of metrics, what all lines of a step say."""
  if name == "metrics":
    return metrics_lib.by_step(workdir)
  text = (workdir / f"{name}.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def losses(workdir):
  _, *steps = lines(workdir, "metrics")  # the first is an evaluation
  return [[line[name] for name in LOSSES] for line in steps]


def content(entry):
  """What of a ledger line does not depend on time."""
  names = "index prompt_id rewards num_completion_tokens finish_reasons fate"
  return {name: entry[name] for name in names.split()}


SOMETIMES = {"offpolicy/mismatch_kl", "eval/mismatch_kl"}
# The names of what each line has besides its own values.
TOTALS = ("run/", "ledger/")


def check_ledger(workdir, summary):
  """Each group once, and every token somewhere."""
  entries = lines(workdir, "ledger")
  indices = [entry["index"] for entry in entries]
  assert len(set(indices)) == len(indices)
  tokens = summary["tokens"]
  for fate in ("trained", "filtered", "failed"):
    written = [e["num_completion_tokens"] for e in entries if e["fate"] == fate]
    assert tokens[fate] == sum(map(sum, written))
  assert tokens["generated"] == sum(
    tokens[x] for x in ("trained", "filtered", "failed", "in_flight")
  )
  return entries


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
  """One run with max_staleness 2: its workdir and summary."""
  workdir = tmp_path_factory.mktemp("asynchronous")
  return workdir, start(make_config(num_steps=8), workdir)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("synchronous")
  return workdir, start(make_config("sync"), workdir)


def test_an_asynchronous_run_keeps_its_bound_its_books_and_its_names(
  asynchronous,
):
  workdir, summary = asynchronous
  start_line, *steps = lines(workdir, "metrics")
  assert start_line.keys() >= EVALUATIONS | {"step"}
  assert start_line["step"] == 0
  assert all(x.startswith(("step", "eval/", *TOTALS)) for x in start_line)
  assert [line["step"] for line in steps] == list(range(1, 9))
  for line in (start_line, steps[-1]):
    assert all(0 <= line[name] <= 16 for name in EVALUATIONS)
  written = set().union(*steps)
  assert not metrics_page.unexplained(written)
  assert not metrics_page.unwritten(written)
  for line in steps:
    missing = {x for x in written - set(line) if not x.startswith("eval/")}
    assert not missing - SOMETIMES
    assert line["staleness/max"] <= 2
    assert line.get("offpolicy/mismatch_kl", 0.0) <= 1e-6
    assert line["train/bad_updates"] == 0
    assert 0 < line["train/mfu"] < 1
    tokens = [line[f"ledger/{x}_tokens"] for x in ("filtered", "failed")]
    assert tokens == [0, 0]
    assert line["ledger/in_flight_tokens"] >= 0
  assert any("offpolicy/mismatch_kl" in line for line in steps)
  assert summary["staleness_max"] == max(s["staleness/max"] for s in steps)
  assert 1 <= summary["staleness_max"] <= 2
  entries = check_ledger(workdir, summary)
  assert [e["step"] for e in entries] == sorted(e["step"] for e in entries)
  for entry in entries:
    assert entry["fate"] == "trained" and not entry["skipped_update"]
    assert entry["deadline"] == entry["birth"] + 2
    assert entry["birth"] <= entry["policy_version_min"]
    assert entry["policy_version_max"] <= entry["step"] <= entry["deadline"]
    assert entry["staleness_max"] == entry["step"] - entry["policy_version_min"]
  sampled.check(workdir, entries)
  for name in ("config.json", "summary.json", "summary.png", "tokenizer"):
    assert (workdir / name).exists(), name
  assert json.loads((workdir / "summary.json").read_text()) == summary
  # As many as there are programs, whatever the number of steps.
  assert summary["num_compilations"] <= summary["num_programs"]
  assert 0 < summary["num_programs"] <= 30


@pytest.mark.slow
def test_trajectories_that_span_several_versions_occur(tmp_path):
  # A slow disk must not decide: it would hold every version up until all the
  # groups that are admitted before it are complete.
  config = make_config(
    num_steps=20,
    rollout={"decode_steps_per_call": 1},
    transfer={"channel": sections.Channel.DIRECT},
    eval={"num_items": 4},
    run={"checkpoint_every": 20},
  )
  summary = start(config, tmp_path)
  check_ledger(tmp_path, summary)
  assert summary["versions_per_trajectory_mean"] > 1
  assert summary["staleness_max"] <= 2


def straight_loop(config):
  """Generate, score, update; gives the losses of each step."""
  setup = setup_lib.resolve(config, jax.devices())
  tokenizer, model = setup.tokenizer, setup.model
  clock = metrics_lib.BusyClock()
  trainer = assembly.make_trainer(setup, clock)
  engine = assembly.make_engine(setup)
  scheduler = scheduler_lib.Scheduler(engine, busy=clock)
  stream = prompts.PromptStream(
    assembly.prompt_source(setup), source_lib.Split.TRAIN
  )
  init = jax.jit(lambda key: transformer.init_params(model, key))
  params = init(jax.random.key(config.seed))
  trainer.start({train_state.POLICY: params})
  found = []
  for step in range(config.train.num_steps):
    scheduler.adopt(engine.load_params(trainer.published(), step), step)
    groups = []
    for i in range(config.algorithm.groups_per_step):
      index = step * config.algorithm.groups_per_step + i
      group = types.RolloutGroup(
        admission=types.Admission(index=index, birth=step, deadline=step),
        prompt=stream.next(),
        trajectories=[],
      )
      groups.append(group)
      limit = len(group.prompt.tokens) + config.rollout.max_completion_tokens
      for member in range(config.algorithm.group_size):
        scheduler.submit(
          sequence_lib.Sequence(
            group.prompt.tokens,
            limit=limit,
            stream=sampling.Stream.TRAIN,
            group=index,
            member=member,
            settings=sampling.SamplingSettings(
              temperature=config.rollout.temperature
            ),
            owner=sequence_lib.Owner("group", i),
          )
        )
    while not scheduler.is_idle:
      for sequence in scheduler.step():
        trajectory = sequence.trajectory()
        completion = completion_lib.of_trajectory(trajectory, tokenizer)
        answer = extraction.extract_answer(
          completion.text, config.task.answer_prefix
        )
        completion = dataclasses.replace(completion, answer=answer)
        score = reward_scorers.length({}, completion)
        trajectory.reward = types.Reward(score=score)
        groups[sequence.owner.number].trajectories.append(trajectory)
    for group in groups:
      group.trajectories.sort(key=lambda t: t.member)
    values, _ = trainer.step(step, trainer.prepare(groups)).metrics()
    found.append([values[name] for name in LOSSES])
  return found


@pytest.mark.slow
def test_max_staleness_0_is_the_straight_loop(synchronous):
  workdir, summary = synchronous
  assert summary["staleness_max"] == 0
  found = np.array(losses(workdir))
  assert (np.abs(found) > 1e-4).all(), "losses that prove nothing"
  np.testing.assert_allclose(
    found, straight_loop(make_config("sync")), rtol=1e-5
  )


@pytest.mark.slow
def test_golden_losses(synchronous):
  # The loss itself is a difference: its rounding is that of its terms.
  np.testing.assert_allclose(
    losses(synchronous[0]), np.loadtxt(GOLDEN), rtol=1e-5, atol=1e-7
  )


@pytest.mark.slow
def test_both_channels_give_the_same_bits(synchronous, tmp_path):
  direct = {"channel": sections.Channel.DIRECT}
  start(make_config("sync", transfer=direct), tmp_path)
  assert losses(tmp_path) == losses(synchronous[0])


@pytest.mark.slow
def test_stopped_and_continued_equals_uninterrupted(synchronous, tmp_path):
  start(make_config("sync", num_steps=2), tmp_path)
  summary = start(make_config("sync"), tmp_path)
  assert summary["train_steps"] == 4
  np.testing.assert_allclose(
    losses(tmp_path), losses(synchronous[0]), rtol=1e-5
  )
  entries = check_ledger(tmp_path, summary)
  assert list(map(content, entries)) == list(
    map(content, lines(synchronous[0], "ledger"))
  )
  uninterrupted = sampled.check(synchronous[0], lines(synchronous[0], "ledger"))
  assert sampled.check(tmp_path, entries) == uninterrupted


def until(holds, is_over=lambda: False, timeout_s=120):
  """Waits for something to hold; False if it never will."""
  deadline = time.monotonic() + timeout_s
  while time.monotonic() < deadline and not is_over():
    if holds():
      return True
    time.sleep(0.01)  # polls what another process or thread does
  return False


def until_lines(path, count, is_over):
  """Waits for a file to have that many lines; False if it never will."""
  return until(
    lambda: path.exists() and path.read_text().count("\n") >= count, is_over
  )


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_that_goes_on(tmp_path):
  config = make_config(num_steps=2000, run={"checkpoint_every": 1000})
  ended = threading.Event()

  def interrupt():
    if until_lines(tmp_path / "metrics.jsonl", 4, ended.is_set):
      os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  try:
    with pytest.raises(supervisor_lib.Interrupted, match="the same command"):
      start(config, tmp_path)
  finally:
    ended.set()
    thread.join(10)
  step = len(lines(tmp_path, "metrics")) - 1
  assert step >= 3
  assert (tmp_path / "checkpoints" / str(step) / "manifest.json").exists()
  stored = json.loads(
    (tmp_path / "checkpoints" / str(step) / "groups.json").read_text()
  )
  # Whether any of them is half-written depends on the moment;
  # test_continued_runs waits for one that has some that are.
  before = lines(tmp_path, "ledger")
  config.train.num_steps = step + 3
  summary = start(config, tmp_path)
  entries = check_ledger(tmp_path, summary)
  assert entries[: len(before)] == before
  assert [m["step"] for m in lines(tmp_path, "metrics")] == list(
    range(step + 4)
  )
  resumed = {g["group"]["index"] for g in stored}
  assert resumed <= {e["index"] for e in entries}
  steps = lines(tmp_path, "metrics")[1:]
  assert max(m["staleness/max"] for m in steps) <= 2


@pytest.mark.slow
def test_a_reward_that_raises_now_and_then_fails_its_groups_only(tmp_path):
  config = make_config(task={"max_failed_groups": 1000, "reward_retries": 0})
  summary = start(
    config, tmp_path, scorer=reward_scorers.raises_on_odd_training
  )
  entries = check_ledger(tmp_path, summary)
  failed = [e for e in entries if e["fate"] == "failed"]
  assert failed and summary["train_steps"] == 4
  assert all("odd" in e["reason"] for e in failed)
  assert all(e["rewards"] == [None] * 4 for e in failed)
  assert summary["tokens"]["failed"] > 0
  rows = sampled.failed(tmp_path)
  assert {row["group"] for row in rows} <= {e["index"] for e in failed}
  assert len(rows) >= 4 and all("odd" in row["failure"] for row in rows)


@pytest.mark.slow
def test_rewards_that_always_raise_end_the_run_with_the_first_traceback(
  tmp_path,
):
  config = make_config(task={"max_failed_groups": 3, "reward_retries": 0})
  with pytest.raises(
    supervisor_lib.ThreadFailed,
    match="rollout worker failed: 3 groups in a row",
  ) as raised:
    start(config, tmp_path, scorer=reward_scorers.raises_in_training)
  text = str(raised.value)
  assert "task.max_failed_groups" in text
  assert "Traceback" in text and "raises_in_training" in text
  assert isinstance(raised.value.__cause__, Exception)


@pytest.mark.nightly
def test_updates_that_are_never_finite_end_the_run(tmp_path):
  config = make_config("sync", train={"max_bad_updates": 3})
  model = setup_lib.resolve(config, jax.devices()).model
  init = jax.jit(lambda key: transformer.init_params(model, key))
  params = jax.tree.map(np.array, init(jax.random.key(0)))
  params["final_norm"][0] = np.nan
  with pytest.raises(
    recorder_lib.BadUpdatesError, match=r"step 1: 3 updates.*\[4, 5, 6, 7\]"
  ):
    start(config, tmp_path, initial_params=params)
  entries = lines(tmp_path, "ledger")
  assert [e["skipped_update"] for e in entries] == [True] * 8


@pytest.mark.slow
def test_a_stall_names_who_waits(tmp_path):
  config = make_config(
    run={"stall_timeout_s": 10.0}, task={"reward_timeout_s": 100.0}
  )
  with pytest.raises(supervisor_lib.StallError) as raised:
    start(config, tmp_path, scorer=reward_scorers.hangs_in_training)
  text = str(raised.value)
  assert "run.stall_timeout_s" in text
  assert "waits for a batch for step 0" in text
  assert "rollout worker: " in text and "holding version 0" in text


@pytest.mark.slow
def test_a_program_that_compiles_for_long_is_no_stall(
  tmp_path, monkeypatch, capsys
):
  """At first a group and training wait for it, then a checkpoint does."""
  generate, calls = engine_lib.Engine.generate, iter(range(10**9))

  def compiles(*arguments, **settings):
    is_rollout = threading.current_thread().name == rollout_thread.NAME
    if is_rollout and next(calls) in (3, 4, 30):

      def traced(x):
        time.sleep(4.0)
        return x

      jax.jit(traced)(0)
    return generate(*arguments, **settings)

  monkeypatch.setattr(engine_lib.Engine, "generate", compiles)
  config = make_config(
    rollout={"max_group_seconds": 3.0},
    run={"stall_timeout_s": 2.0, "checkpoint_every": 1},
  )
  summary = start(config, tmp_path)
  said = capsys.readouterr().err
  assert "WARNING" not in said, said
  assert {e["fate"] for e in check_ledger(tmp_path, summary)} == {"trained"}
  assert next(calls) > 30


def test_a_workdir_of_another_config_is_refused(asynchronous):
  workdir, _ = asynchronous
  before = (workdir / "config.json").read_text()
  config = make_config(algorithm={"group_size": 8})
  with pytest.raises(
    sections.ConfigError, match="algorithm.group_size: 4 and 8"
  ):
    start(config, workdir)
  assert (workdir / "config.json").read_text() == before


def test_a_finished_run_started_again_only_says_what_it_was(
  asynchronous, tmp_path
):
  summary = asynchronous[1]
  workdir = shutil.copytree(asynchronous[0], tmp_path / "run")
  entries = lines(workdir, "ledger")
  again = start(make_config(num_steps=8), workdir)
  for name in ("eval_before", "eval_after", "train_steps", "staleness_mean"):
    assert again[name] == summary[name], name
  assert lines(workdir, "ledger") == entries
  check_ledger(workdir, again)


@pytest.mark.nightly
def test_a_run_that_is_to_end_where_it_stands_is_evaluated_there(
  asynchronous, tmp_path
):
  workdir = shutil.copytree(asynchronous[0], tmp_path / "run")
  checkpoints = workdir / "checkpoints"
  *_, stands_at, newest = sorted(int(p.name) for p in checkpoints.iterdir())
  shutil.rmtree(checkpoints / str(newest))
  summary = start(make_config(num_steps=stands_at), workdir)
  assert summary["train_steps"] == stands_at
  assert summary["eval_after_greedy"] is not None
  check_ledger(workdir, summary)


if __name__ == "__main__":
  import tempfile

  with tempfile.TemporaryDirectory() as directory:
    start(make_config("sync"), pathlib.Path(directory))
    np.savetxt(GOLDEN, losses(pathlib.Path(directory)), fmt="%.9e")
