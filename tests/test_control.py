"""Environments, rings, rows and inference of `control`, and whole runs."""

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time

import control_environments as environments
import jax
from jax import numpy as jnp
from ml_collections import config_dict
import numpy as np
import pytest
import waiting

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import optimizer_section
from jaxrl_async.config import refusals
from jaxrl_async.control import actor as actor_lib
from jaxrl_async.control import fleet as fleet_lib
from jaxrl_async.control import inference as inference_lib
from jaxrl_async.control import learner
from jaxrl_async.control import policies
from jaxrl_async.control import settings as settings_lib
from jaxrl_async.control import train
from jaxrl_async.storage import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[1]
COUNTING = "control_environments:Counting-v0"
SPACES = actor_lib.Spaces(
  observation_shape=(3,),
  observation_dtype="float32",
  action_shape=(),
  num_actions=2,
)
VECTOR = actor_lib.Spaces(
  observation_shape=(3,),
  observation_dtype="float32",
  action_shape=(2,),
  num_actions=0,
)


# -- rows ---------------------------------------------------------------------


def recorded(length, columns, num_steps):
  """Step one counting environment in this process; return its full rows."""
  slots = np.zeros(1, actor_lib.slot_type(SPACES, columns))
  made = environments.Counting(length=length)
  environment = actor_lib.Environment(made, slots, 0, seed=0)
  row, found = slots["row"], []
  for step in range(num_steps):
    column = slots["column"][0]
    row["actions"][0, column] = step % 2
    row["behavior_logprobs"][0, column] = -step
    row["policy_versions"][0, column] = step
    environment.step()
    if slots["is_full"][0]:
      found.append(row.copy())
      row[:] = np.zeros((), row.dtype)
      row["observations"][0, 0] = slots["next_observation"][0]
      slots["is_full"] = False
  return found, int(row["loss_mask"].sum())


def check(row, length, columns):
  """Check what a row of a counting environment says of each frame."""
  assert len(row["loss_mask"]) == columns and not row["loss_mask"][-1]
  for t in np.flatnonzero(row["loss_mask"]):
    episode, step = row["observations"][t, :2]
    assert row["rewards"][t] == step + 1
    ends_for_good = step + 1 == length and episode % 2 == 0
    is_same = row["episodes"][t + 1 :] == row["episodes"][t]
    is_last = not (row["loss_mask"][t + 1 :] & is_same).any()
    # What follows is in the next column, unless nothing does.
    assert row["cut_off"][t] == (is_last and not ends_for_good)
    if not ends_for_good:
      after = row["observations"][t + 1, :2].tolist()
      assert after == [episode, step + 1]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 50])
@pytest.mark.parametrize("columns", [2, 3, 4, 9, 16])
def test_each_frame_is_in_one_row_with_the_observation_that_follows(
  length, columns
):
  num_steps = 200
  found, num_left = recorded(length, columns, num_steps)
  frames = []
  for (row,) in found:
    check(row, length, columns)
    for t in np.flatnonzero(row["loss_mask"]):
      frames.append((*row["observations"][t, :2], row["policy_versions"][t]))
      assert row["behavior_logprobs"][t] == -row["policy_versions"][t]
      assert row["actions"][t] == row["policy_versions"][t] % 2
  assert len(frames) + num_left == num_steps
  assert [f[2] for f in frames] == list(range(len(frames)))
  expected = [(n // length, n % length) for n in range(len(frames))]
  assert [f[:2] for f in frames] == expected


# -- advantages ---------------------------------------------------------------


def segment(row):
  admission = types.Admission(index=0, birth=0, deadline=9)
  return inference_lib.Segment(admission=admission, row=row)


def test_advantages_are_those_of_a_loop_over_the_episodes():
  section = settings_lib.PpoSection(gamma=0.9, gae_lambda=0.7)
  found, _ = recorded(5, 9, 64)
  rows = learner.rows_of([segment(row) for row in found])
  mask, observations = rows["loss_mask"], rows["observations"]
  rng = np.random.default_rng(0)
  values = rng.normal(size=mask.shape).astype(np.float32)
  batch, _, _ = learner.with_advantages(
    section,
    jax.tree.map(jnp.asarray, rows),
    jnp.zeros(values.shape),
    # Their mean is 1 and their deviation 2.
    (jnp.asarray(values) - 1) / 2,
    {"mean": jnp.ones(()), "square": jnp.float32(5), "weight": jnp.ones(())},
  )
  expected = np.zeros(values.shape)
  kinds = set()
  for row in range(len(values)):
    following = 0.0
    for t in reversed(range(values.shape[1])):
      if not mask[row, t]:
        following = 0.0
        continue
      episode, step = observations[row, t, :2]
      is_terminated = step == 4 and episode % 2 == 0
      is_truncated = step == 4 and episode % 2 == 1
      is_row_end = t == values.shape[1] - 2
      kinds.add((bool(is_terminated), bool(is_truncated), is_row_end))
      after = 0.0 if is_terminated else float(values[row, t + 1])
      if is_terminated or is_truncated or is_row_end:
        following = 0.0
      delta = float(rows["rewards"][row, t]) + 0.9 * after - values[row, t]
      following = delta + 0.9 * 0.7 * following
      expected[row, t] = following
  # Every way in which a frame can be followed is in the sample.
  assert {kind[:2] for kind in kinds} == {
    (False, False),
    (True, False),
    (False, True),
  }
  assert (False, False, True) in kinds
  # The targets are in the unit of the statistics with these returns.
  own = (expected + values)[mask]
  mean = 0.99 + 0.01 * own.mean()
  square = 0.99 * 5 + 0.01 * (own**2).mean()
  np.testing.assert_allclose(
    np.asarray(batch["targets"])[mask],
    (own - mean) / np.sqrt(square - mean**2),
    rtol=1e-4,  # differences of numbers ten times as large
    atol=1e-5,
  )
  own = expected[mask]
  np.testing.assert_allclose(
    np.asarray(batch["advantages"])[mask],
    (own - own.mean()) / (own.std() + 1e-6),
    rtol=1e-4,  # likewise
    atol=1e-5,
  )


# -- policies -----------------------------------------------------------------


def test_logprobs_of_vectors_are_those_of_a_normal_distribution():
  network = policies.Network(VECTOR, 8)
  mean, log_std = np.array([[0.3, -1.0]]), np.array([0.2, -0.4])
  action = np.array([[0.5, 0.5]])
  outputs = policies.Outputs(
    jnp.float32(mean), jnp.float32(log_std), jnp.zeros(1)
  )
  logprobs, entropy = network.logprobs(outputs, jnp.float32(action))
  std = np.exp(log_std)
  density = np.exp(-(((action[0] - mean[0]) / std) ** 2) / 2)
  density /= std * np.sqrt(2 * np.pi)
  np.testing.assert_allclose(logprobs, [np.log(density).sum()], rtol=1e-5)
  of_each = np.log(std * np.sqrt(2 * np.pi * np.e))
  np.testing.assert_allclose(entropy, [of_each.sum()], rtol=1e-5)


def test_the_first_policy_is_nearly_uniform_and_its_layers_are_orthogonal():
  network = policies.Network(SPACES, 8)
  params = network.init_params(jax.random.key(0))
  kernel = np.asarray(params["trunk"]["second"]["kernel"])
  np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(8), atol=1e-5)
  outputs = network.outputs(params, jnp.ones((4, 3)))
  assert outputs.head.shape == (4, 2) and outputs.values.shape == (4,)
  assert np.abs(outputs.head).max() < 0.05


@pytest.mark.slow
def test_images_go_through_convolutions():
  spaces = actor_lib.Spaces(
    observation_shape=(84, 84, 4),
    observation_dtype="uint8",
    action_shape=(),
    num_actions=6,
  )
  network = policies.Network(spaces, 16)
  params = network.init_params(jax.random.key(0))
  assert params["trunk"]["last"]["kernel"].shape == (3136, 16)
  images = np.random.default_rng(0).integers(0, 256, (2, 84, 84, 4), np.uint8)
  outputs = network.outputs(params, jnp.asarray(images))
  assert outputs.head.shape == (2, 6)
  assert not np.allclose(outputs.values[0], outputs.values[1])


# -- actors and inference -----------------------------------------------------


class Scripted(policies.Policy):
  """A policy without weights."""

  def __init__(self, seconds=0.0):
    self.version, self.seconds = 0, seconds

  def adopt(self):
    """Return the version."""
    return self.version

  def act(self, observations):
    """Sleep, and take the first action."""
    version, count = self.version, len(observations)
    time.sleep(self.seconds)
    return np.zeros(count, np.int32), np.zeros(count, np.float32), version


class World:
  """Actors and inference, with the test as the trainer."""

  def __init__(self, policy, *, columns=9, rows=4, max_staleness=1, **fields):
    section = settings_lib.ActorsSection(environment=COUNTING, **fields)
    self.buffer = buffer_lib.Buffer(rows, max_staleness)
    self.buffer.set_policy_version(0)
    self.fleet = fleet_lib.Fleet(section, SPACES, columns=columns, seeds=(0,))
    self.inference = inference_lib.Inference(self.fleet, self.buffer, policy)
    self._threads = [
      threading.Thread(target=self._run, daemon=True)
      for _ in range(section.inference_threads)
    ]

  def _run(self):
    try:
      self.inference.run()
    except BaseException as error:
      self.buffer.close(error)

  def __enter__(self):
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(self, *_):
    self.inference.stop()
    self.buffer.close()
    for thread in self._threads:
      thread.join(10)
      assert not thread.is_alive()
    self.fleet.close()


def arguments(**values):
  return config_dict.ConfigDict(values)


@pytest.mark.parametrize(
  "max_staleness,threads", [(0, 1), (1, 1), (3, 1), (1, 3)]
)
def test_no_frame_is_older_than_the_bound_and_each_is_trained_once(
  max_staleness, threads
):
  policy = Scripted()
  world = World(
    policy,
    max_staleness=max_staleness,
    num_actors=2,
    ring=4,
    rows=4,
    inference_threads=threads,
  )
  seen = set()
  with world:
    for step in range(12):
      batch = world.buffer.get_batch(step, 60.0)
      assert len(batch) == 4
      for each in batch:
        staleness = step - each.written_versions()
        assert 0 <= staleness.min() and staleness.max() <= max_staleness
        (row,) = each.row
        check(row, 5, 9)
        for observation in row["observations"][row["loss_mask"]].tolist():
          frame = tuple(observation)
          assert frame not in seen
          seen.add(frame)
      # Where the bound allows it, the policy is one version behind.
      policy.version = step + (max_staleness == 0)
      world.buffer.set_policy_version(step + 1)
  slots, waiting_rows = world.fleet.slots, world.buffer.state().finished
  left = [*slots["row"], *(row for each in waiting_rows for row in each.row)]
  num_left = sum(np.count_nonzero(row["loss_mask"]) for row in left)
  assert slots["frames"].sum() == len(seen) + num_left
  assert world.inference.counters()["frames"] == len(seen) + num_left


def idle_frac(ring):
  """Return the idle part of an actor's time; steps of 20, calls of 100 ms."""
  world = World(
    Scripted(0.1),
    columns=1000,
    rows=ring,
    ring=ring,
    inference_threads=ring,
    arguments=arguments(step_s=0.02),
  )
  counters = world.inference.counters
  with world:
    waiting.until(lambda: counters()["frames"] >= 2 * ring)
    before = counters()
    waiting.until(lambda: counters()["frames"] >= 2 * ring + 24)
    return inference_lib.rates(before, counters())["actor_idle_frac"]


@pytest.mark.slow
def test_a_ring_keeps_its_actor_busy_while_actions_are_awaited():
  # Of a ring of R, the limit is 1 - R T_env / (T_env + T_inf), or 0.
  assert idle_frac(1) > 0.7
  # In step with all of them it would be 100 / (100 + 8 * 20) = 0.38.
  assert idle_frac(8) < 0.25


class Clock:
  """A clock that a test moves, looking at a patience every second."""

  def __init__(self, **values):
    self.now_s = 0.0
    self.patience = fleet_lib.Patience(
      10.0, seconds=lambda: self.now_s, **({"start_s": 60.0} | values)
    )

  def lasts(self, seconds):
    """Return whether the patience lasts for so many seconds."""
    for _ in range(seconds):
      self.now_s += 1.0
      if self.patience.is_over():
        return False
    return True


def test_silence_counts_only_while_actors_owe_a_step():
  clock = Clock(num_actors=2, ring=2)
  for actor in range(2):
    clock.patience.heard(actor, 2)
  assert clock.lasts(100)  # all wait for the policy, or are in its calls
  clock.patience.answered(1)
  assert clock.lasts(9)
  clock.patience.answered(1)
  assert clock.lasts(9)
  clock.patience.heard(0, 1)
  assert clock.lasts(9)
  clock.patience.heard(0, 1)
  assert clock.lasts(100)
  clock.patience.answered(2)
  assert not clock.lasts(11)


def test_an_actor_may_start_later_than_the_others_are_heard_of():
  clock = Clock(num_actors=2, ring=2)
  clock.patience.heard(0, 2)
  clock.patience.answered(2)
  clock.patience.heard(0, 2)  # and again, which starts no other
  clock.patience.heard(1, 1)
  assert clock.lasts(65)  # 60 for the start, and then 10
  assert not clock.lasts(6)
  clock = Clock(num_actors=2, ring=2)
  for actor in range(2):
    clock.patience.heard(actor, 2)
  clock.patience.answered(4)
  assert not clock.lasts(11)  # all have started


def test_a_call_longer_than_the_patience_ends_nothing():
  is_held = threading.Event()

  class Held(Scripted):
    def act(self, observations):
      is_held.wait(60.0)
      return super().act(observations)

  # One thread at least listens while the others call for four environments.
  world = World(Held(), num_actors=2, ring=2, rows=2, inference_threads=5)
  patience, looks = world.fleet._patience, []
  is_over = patience.is_over

  def look():
    if not patience._num_owed:
      patience._timeout_s = 0.0
      patience._renew()
      looks.append(is_over())
    return False

  patience.is_over = look
  with world:
    waiting.until(lambda: len(looks) > 3)
    patience._timeout_s = 60.0
    is_held.set()
    assert world.buffer.get_batch(0, 60.0) is not None
  assert not any(looks)


@pytest.mark.parametrize(
  "values,reason",
  [
    ({"fails": "raise"}, "RuntimeError: this environment fails"),
    ({"fails": "exit"}, "its process ended with status 3"),
    ({"fails": "nan"}, "a number that is not finite"),
    ({"nonsense": 1}, "nonsense"),  # at its start
    pytest.param(
      {"fails": "hang"}, "no actor said anything", marks=pytest.mark.slow
    ),
  ],
)
def test_a_process_that_fails_ends_the_run_with_its_reason(values, reason):
  policy = Scripted()
  world = World(
    policy,
    num_actors=2,
    ring=2,
    rows=2,
    max_staleness=3,
    timeout_s=8.0,
    arguments=arguments(**values),
  )
  with world, pytest.raises(buffer_lib.BufferClosed) as raised:
    for step in range(40):
      assert world.buffer.get_batch(step, 120.0) is not None
      world.buffer.set_policy_version(step + 1)
      policy.version = step + 1
  cause = raised.value.__cause__
  assert isinstance(cause, fleet_lib.ActorFailed) and reason in str(cause)


def test_actors_do_not_import_jax():
  code = (
    "import sys, jaxrl_async.control.actor as a; print('jax' in sys.modules)"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == "False"


def test_spaces_are_read_and_refused_in_one_line():
  spaces = actor_lib.spaces_of("Pendulum-v1", {})
  assert spaces.action_shape == (1,) and spaces.num_actions == 0
  with pytest.raises(refusals.ConfigError, match="CartPole-v9"):
    actor_lib.spaces_of("CartPole-v9", {})
  with pytest.raises(refusals.ConfigError, match="have to be a Box"):
    actor_lib.spaces_of("FrozenLake-v1", {})


def test_without_gymnasium_the_error_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "gymnasium", None)
  with pytest.raises(refusals.ConfigError, match="install the extra gym"):
    actor_lib.spaces_of("CartPole-v1", {})


# -- settings -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["cartpole", "lunar_lander"])
def test_the_configs_pass_the_checks_and_keep_every_environment_busy(name):
  config = runpy.run_path(ROOT / "configs" / f"{name}.py")["get_config"]()
  settings_lib.check(config)
  most = (config.ppo.max_staleness + 1) * config.ppo.rows_per_step
  assert config.actors.num_actors * config.actors.ring <= most


@pytest.mark.parametrize(
  "path,value",
  [
    ("ppo.num_minibatches", 5),
    ("ppo.clip", 2.0),
    ("actors.ring", 0),
    ("optimizer.name", "muon"),
    ("optimizer.weight_decay", 0.1),
  ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(path, value):
  config = small_config()
  fields_lib.set_at(config, path, value)
  with pytest.raises(refusals.ConfigError, match=path):
    settings_lib.check(config)


# -- whole runs ---------------------------------------------------------------


def small_config(**fields):
  values = {
    "num_steps": 4,
    "actors": settings_lib.ActorsSection(environment="CartPole-v1", ring=4),
    "ppo": settings_lib.PpoSection(
      columns_per_row=17, rows_per_step=4, num_minibatches=2, num_epochs=2
    ),
    "hidden_size": 16,
  } | fields
  return settings_lib.ControlConfig(**values)


def lines(workdir):
  text = (workdir / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_from_its_newest_checkpoint_that_is_whole(tmp_path):
  # Actions are vectors here.
  actors = settings_lib.ActorsSection(environment="Pendulum-v1", ring=4)
  config = small_config(actors=actors, checkpoint_every=2)
  assert train.train(config, tmp_path)["step"] == 4
  (tmp_path / "checkpoints" / "4" / "host_state.json").write_text("{}")
  config.num_steps = 6
  last = train.train(config, tmp_path)
  assert last["step"] == 6 and last["frames_trained"] == 6 * 4 * 16
  assert (tmp_path / "checkpoints" / "4.damaged").exists()
  found = lines(tmp_path)
  assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
  for line in found:
    assert line["bad_updates"] == 0 and line["max_staleness"] <= 1
  # Those under way when it ended.
  assert found[2]["frames_dropped"] == found[1]["frames"] - 2 * 4 * 16
  assert found[2]["frames"] > found[1]["frames"]
  assert found[2]["elapsed_s"] > found[1]["elapsed_s"]


@pytest.mark.slow
def test_a_run_goes_on_after_an_environment_that_failed_once(tmp_path):
  actors = settings_lib.ActorsSection(
    environment=COUNTING,
    ring=4,
    arguments=arguments(fails="raise", at=60, marker=str(tmp_path / "failed")),
  )
  config = small_config(actors=actors, num_steps=8)
  with pytest.raises(fleet_lib.ActorFailed, match="this environment fails"):
    train.train(config, tmp_path / "run")
  done = len(lines(tmp_path / "run"))
  assert 0 < done < 8
  assert (tmp_path / "run" / "checkpoints" / str(done)).exists()
  assert train.train(config, tmp_path / "run")["step"] == 8
  assert [x["step"] for x in lines(tmp_path / "run")] == [*range(1, 9)]


def test_a_workdir_of_something_else_is_left_as_it_is(tmp_path):
  lost = tmp_path / "lost"
  lost.mkdir()
  (lost / "metrics.jsonl").write_text('{"step": 1}\n')
  other = tmp_path / "other"
  host = {"metrics": {}, "found": {}}
  checkpoint.save(other / "checkpoints", 3, {"x": jnp.ones(2)}, host, [])
  for workdir, why in ((lost, "no checkpoint"), (other, "step 3")):
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    with pytest.raises(refusals.ConfigError, match=why):
      train.train(small_config(), workdir)
    (workdir / "lock").unlink()
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} | {
      workdir: 0
    } == before | {workdir: 0}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_a_signal_ended_goes_on_from_its_checkpoint(
  tmp_path, number
):
  command = [
    sys.executable,
    str(ROOT / "launch" / "control.py"),
    f"--config={ROOT / 'configs' / 'cartpole.py'}",
    f"--workdir={tmp_path}",
    "--config.checkpoint_every=2",
    "--config.ppo.columns_per_row=33",
  ]
  process = subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  checkpoints = tmp_path / "checkpoints"
  try:
    waiting.until((checkpoints / "4").exists, "no checkpoint")
    if number == signal.SIGKILL:
      process.kill()
    else:
      os.killpg(process.pid, number)  # as a terminal does
    _, errors = process.communicate(timeout=60)
  finally:
    process.kill()
  assert "Traceback" not in errors
  newest = max(int(p.name) for p in checkpoints.iterdir() if p.name.isdecimal())
  assert 4 <= newest < 300
  if number == signal.SIGINT:
    assert process.returncode == 130
    assert f"interrupted after step {newest}" in errors
  done = subprocess.run(
    [*command, f"--config.num_steps={newest + 3}"],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1])["step"] == newest + 3
  steps = [line["step"] for line in lines(tmp_path)]
  assert steps == list(range(1, newest + 4))


@pytest.mark.slow
def test_cartpole_is_learned(tmp_path, unchecked):
  config = small_config(
    num_steps=60,
    actors=settings_lib.ActorsSection(environment="CartPole-v1", ring=8),
    ppo=settings_lib.PpoSection(columns_per_row=129, rows_per_step=8),
    hidden_size=64,
    optimizer=optimizer_section.OptimizerSection(
      learning_rate=1e-3, eps=1e-5, max_grad_norm=0.5
    ),
  )
  last = train.train(
    config,
    tmp_path,
    is_enough=lambda found: (found["episode_return"] or 0) > 150,
  )
  assert last["episode_return"] > 150
  assert lines(tmp_path)[0]["episode_return"] < 50
