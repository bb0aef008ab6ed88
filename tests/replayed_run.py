"""One process of a run whose groups are made up instead of generated.

    python replayed_run.py --workdir=DIRECTORY --num_steps=N [--slow_s=S]
      [--num_processes=2 --process_id=I --coordinator_address=HOST:PORT]

There are four devices in any number of processes. Process 0 drives buffer,
loader, trainer, channel and checkpoints as a run does, and prints a line of
JSON for each step. It continues from the newest checkpoint.
"""

import dataclasses
import json
import os
import pathlib
import sys
import threading

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "launch")]

import trainer_process  # noqa: E402

from configs import tiny as tiny_config  # noqa: E402
from jaxrl_async import types  # noqa: E402
from jaxrl_async.assembly import assembly  # noqa: E402
from jaxrl_async.assembly import frozen_base  # noqa: E402
from jaxrl_async.assembly import initial_params  # noqa: E402
from jaxrl_async.assembly import setup as setup_lib  # noqa: E402
from jaxrl_async.buffer import buffer as buffer_lib  # noqa: E402
from jaxrl_async.config import sections  # noqa: E402
from jaxrl_async.devices import mesh as mesh_lib  # noqa: E402
from jaxrl_async.processes import supervisor as supervisor_lib  # noqa: E402
from jaxrl_async.reporting import metrics as metrics_lib  # noqa: E402
from jaxrl_async.run import checkpointing  # noqa: E402
from jaxrl_async.run import follower  # noqa: E402
from jaxrl_async.run import session as session_lib  # noqa: E402
from jaxrl_async.storage import checkpoint  # noqa: E402
from jaxrl_async.storage import workdir as workdir_lib  # noqa: E402
from jaxrl_async.training import batch_loader  # noqa: E402
from jaxrl_async.weights import weight_transfer  # noqa: E402

NUM_DEVICES = 4
SHAPE = mesh_lib.MeshShape(fsdp=2, tensor=2)
INCARNATION = "replayed"
VERSIONS = "versions"

_WORKDIR = flags.DEFINE_string("workdir", "", "")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 4, "")
_SLOW_S = flags.DEFINE_float("slow_s", 0.0, "wait before each step")
_SFT_STEPS = flags.DEFINE_integer("sft_steps", 0, "")
_RANK = flags.DEFINE_integer("lora_rank", 0, "")
_CRITIC = flags.DEFINE_string("critic", "", "its trunk, if there is one")
_MODEL = flags.DEFINE_string("model", "", "directory of a pretrained model")


def get_config(size, num_steps, sft_steps=0, lora_rank=0, critic="", model=""):
  """configs/tiny.py for so many processes."""
  config = tiny_config.get_config()
  config.model.name = model or config.model.name
  config.model.lora.rank = lora_rank
  config.warm_start.num_steps = sft_steps
  config.train.num_steps = num_steps
  config.cluster.trainer_processes = size
  config.cluster.kind = sections.ClusterKind.RAY
  config.cluster.start_timeout_s = 60.0
  if critic:
    algorithm = config.algorithm
    algorithm.advantage = "gae"
    algorithm.advantage_scale = sections.AdvantageScale.BATCH_STD
    algorithm.kl_coef = 0.1
    algorithm.kl_estimator = sections.KlEstimator.K1
    algorithm.kl_in_reward = True
    config.critic.trunk = sections.CriticTrunk(critic)
  return config


def make_setup(config, num_devices=NUM_DEVICES):
  """A setup with the devices of all processes in its train mesh."""
  setup = setup_lib.resolve(config, jax.devices()[:2])
  mesh = mesh_lib.make_mesh(jax.devices()[:num_devices], SHAPE)
  return dataclasses.replace(setup, train_mesh=mesh)


def group(admission, vocab_size):
  """The group of this admission: a function of its index alone.

  As in an asynchronous run, a trajectory has tokens of several versions, up to
  two older than the step that trains it, and groups have lost some members.
  """
  rng = np.random.default_rng(admission.index)
  step = admission.index // 4
  prompt = rng.integers(6, vocab_size, 3).astype(np.int32)
  trajectories = []
  for member in range(admission.index % 4, 4):
    n = 3 + int(rng.integers(1, 24))
    mask = np.arange(n) >= 3
    logprobs = np.where(mask, rng.normal(-4.0, 0.3, n), 0)
    ages = np.sort(rng.integers(0, 3, n))[::-1]
    versions = np.where(mask, np.maximum(step - ages, 0), -1)
    trajectories.append(
      types.Trajectory(
        member=member,
        tokens=np.append(prompt, rng.integers(6, vocab_size, n - 3)).astype(
          np.int32
        ),
        loss_mask=mask,
        behavior_logprobs=logprobs.astype(np.float32),
        policy_versions=versions.astype(np.int32),
        finish_reason=types.FinishReason.LENGTH,
        reward=types.Reward(score=float(rng.random())),
      )
    )
  return types.RolloutGroup(
    admission=admission,
    prompt=types.Prompt(prompt_id="", tokens=prompt, item={}),
    trajectories=trajectories,
  )


class Run:
  """Process 0 of a run, without a rollout side."""

  def __init__(self, setup, world, workdir):
    self.setup, self.world, self.workdir = setup, world, workdir
    self.trainer = assembly.make_trainer(
      setup, metrics_lib.BusyClock(), world=world
    )
    algorithm = setup.config.algorithm
    self.buffer = buffer_lib.Buffer(
      algorithm.groups_per_step, algorithm.max_staleness
    )
    self.stop = supervisor_lib.StopRequest()
    world.lead(lambda report, arguments: self.stop.set())
    self.base_record = None
    self.feeding = threading.Lock()  # held while a group is running

  def begin(self):
    """Restores the newest checkpoint, or starts; gives the first step."""
    trainer, directory = self.trainer, self.workdir / workdir_lib.CHECKPOINTS
    step = checkpoint.latest(directory)
    if step is None:
      self.world.tell("start", evaluated=[])
      params = assembly.warm_start(self.setup, lambda step, loss: None)
      params = initial_params.with_adapters(params, self.setup)
      trainer.start(self.setup.first_params(params))
      if trainer.has_base:
        self.base_record = frozen_base.keep(
          self.setup,
          self.workdir,
          trainer.state,
          is_given=False,
          world=self.world,
        )
      self.save(0)
      return 0
    trainer.state, host_state, groups = frozen_base.restore(
      self.setup, self.workdir, step, trainer.abstract_state(), self.world
    )
    self.base_record = host_state.get(frozen_base.KEY)
    self.buffer.restore(
      checkpointing.buffer_state(
        groups,
        groups_per_step=self.setup.config.algorithm.groups_per_step,
        next_step=step,
        next_index=host_state["next_index"],
      )
    )
    return step

  def save(self, step):
    """Saves a checkpoint as a run does."""
    state = self.trainer.state
    if self.base_record is not None:
      state = frozen_base.without_base(state)
    with self.feeding:
      groups = checkpointing.outstanding(self.buffer, self)
      host_state = {"next_index": self.buffer.state().next_index}
    if self.base_record is not None:
      host_state[frozen_base.KEY] = self.base_record
    checkpoint.save(
      self.workdir / workdir_lib.CHECKPOINTS,
      step,
      state,
      host_state,
      groups,
      keep=9,
      announce=frozen_base.announce(self.world, "save", frozen_base.STATE),
    )

  def groups(self):
    """The running groups: none, since they are finished when admitted."""
    return {}

  def feed(self):
    """Puts a group into the buffer whenever one may be admitted."""
    vocab_size = self.setup.model.vocab_size
    try:
      while True:
        version = self.buffer.policy_version
        with self.feeding:
          admission = self.buffer.try_admit(version) if version >= 0 else None
          if admission is not None:
            self.buffer.put(group(admission, vocab_size))
        if admission is None:
          self.buffer.wait_for_admission(version, version, 0.2)
    except buffer_lib.BufferClosed:
      pass

  def run(self):
    """Trains until the last step, or until a signal."""
    config, trainer = self.setup.config, self.trainer
    with workdir_lib.Claim(self.workdir, print):
      self.loop(config, trainer, self.begin())

  def loop(self, config, trainer, step):
    """Trains from a step on."""
    target = trainer.published_shapes()
    channel = weight_transfer.OrbaxChannel(
      self.workdir / VERSIONS, INCARNATION, target, world=self.world
    )
    loader = batch_loader.BatchLoader(
      self.buffer,
      trainer.prepare,
      first_step=step,
      end_step=config.train.num_steps,
    )
    shutdown = session_lib.Shutdown(
      20.0, note=lambda line: print(line, flush=True)
    )
    shutdown.guards(self.buffer)
    with shutdown, self.stop.on_signals(lambda line: None):
      shutdown.closes(channel.close)
      channel.publish(trainer.published(), step)
      self.buffer.set_policy_version(step)
      shutdown.spawn("feed", self.feed, stop=lambda: None)
      shutdown.spawn("batch loader", loader.run, stop=loader.stop)
      while step < config.train.num_steps and not self.stop.is_set:
        shutdown.supervisor.check()
        self.stop.wait(_SLOW_S.value)
        loaded = loader.next(timeout_s=0.2)
        if loaded is None:
          continue
        done = trainer.step(step, loaded.batch)
        step += 1
        channel.publish(trainer.published(), step)
        self.buffer.set_policy_version(step)
        sums = {name: np.asarray(x).tolist() for name, x in done.sums.items()}
        indices = [x.admission.index for x in loaded.batch.groups]
        print(json.dumps({"step": step, "groups": indices, **sums}), flush=True)
        if step % 2 == 0:
          self.save(step)
      if self.stop.is_set:
        self.save(step)
        raise supervisor_lib.Interrupted(f"stopped after step {step}")
      admission = types.Admission(index=0, birth=0, deadline=2)
      first = group(admission, self.setup.model.vocab_size)
      logprobs = trainer.logprobs(first.trajectories)
      print(json.dumps({"logprobs": np.concatenate(logprobs).tolist()}))
      self.wait_for_reader(channel)

  def wait_for_reader(self, channel):
    """Stays until the test has adopted the last version, if it wants to."""
    if (self.workdir / "reader").exists():
      channel.wait_for_version(self.setup.config.train.num_steps - 1, 60.0)
      for _ in range(600):
        if (self.workdir / "adopted").exists():
          return
        threading.Event().wait(0.1)


def main(argv):
  """Runs one process."""
  del argv
  workdir = pathlib.Path(_WORKDIR.value)
  size = max(1, flags.FLAGS.num_processes)
  logging.set_verbosity(logging.WARNING)
  jax.config.update("jax_num_cpu_devices", NUM_DEVICES // size)
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  config = get_config(
    size,
    _NUM_STEPS.value,
    _SFT_STEPS.value,
    _RANK.value,
    _CRITIC.value,
    _MODEL.value,
  )
  try:
    world = trainer_process.begin(config, workdir)
  except sections.ConfigError as error:
    sys.exit(f"error: {error}")
  with trainer_process.ending(world):
    setup = make_setup(config)
    (workdir / f"pid-{world.rank}").write_text(str(os.getpid()))
    if world.leads:
      Run(setup, world, workdir).run()
    else:
      follower.follow(setup, world)


if __name__ == "__main__":
  app.run(main)
