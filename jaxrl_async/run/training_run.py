"""The loop of a training run, and its supervision.

The main thread trains on batches that another thread prepares. One rollout
thread generates. The channel has a thread that writes weights, and the recorder
has one that writes steps down. A further one writes a checkpoint. Rewards are
computed in processes. The first failure anywhere closes the buffer. Then all
threads are joined within a deadline, and the failure is raised with the name of
the thread that failed.

`start_up` builds the parts of a run, and `Run` is the loop over them.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
import time
from typing import Any, NoReturn

import jax

from jaxrl_async.config import sections
from jaxrl_async.coordination import compile_clock
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import world as world_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import checkpointing
from jaxrl_async.run import checks
from jaxrl_async.run import device_checks
from jaxrl_async.run import frozen_base
from jaxrl_async.run import last_checkpoint
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import run_evaluations
from jaxrl_async.run import schedule_start
from jaxrl_async.run import session as session_lib
from jaxrl_async.run import snapshot
from jaxrl_async.run import start_up
from jaxrl_async.run import trainer_facts
from jaxrl_async.run import version_publisher
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import background_write
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import batch_loader
from jaxrl_async.training import objectives
from jaxrl_async.training import step_metrics
from jaxrl_async.training import trainer as trainer_lib

_HELD_S = 0.005


class Run:
  """The loop of one run, over parts that `start_up` has built.

  Threads: everything here belongs to the main thread.
  """

  def __init__(self, parts: start_up.Parts):
    """Take over the parts; nothing is started."""
    self.config = parts.setup.config
    self.workdir = parts.session.workdir
    self.progress = parts.session.progress
    self.stop = parts.session.stop
    self.claim = parts.session.claim
    self.shutdown = parts.shutdown
    self.supervisor = parts.shutdown.supervisor
    self.record = parts.record
    self.trainer = parts.trainer
    self.buffer = parts.buffer
    self.writer = parts.writer
    self.stream = parts.stream
    self.ledger = parts.ledger
    self.channel = parts.channel
    self.rollout = parts.rollout
    self.recorder = parts.recorder
    self.profiler = parts.profiler
    self.loader = parts.loader
    self._data = dict(parts.setup.source.versions)
    self._is_new = parts.is_new
    self._first_step = parts.first_step
    self._base_record = parts.base_record
    self._max_staleness = parts.max_staleness
    self._ahead = parts.ahead
    self._staleness = parts.staleness
    self.checkpoints = checkpointing.Checkpointing(
      self._save, self.config.run, self.stop, self.progress.note
    )
    # What is being written was taken whole, so it may use its time.
    self.shutdown.closes(
      self.checkpoints.close, self.config.run.stall_timeout_s
    )
    self.last = last_checkpoint.LastCheckpoint(parts, self.checkpoints)
    self.publisher = version_publisher.VersionPublisher(
      parts.trainer, parts.channel, parts.buffer
    )
    self.rollout_thread = rollout_thread.RolloutThread(
      parts, lambda: self.last.is_ending
    )
    self.evaluations = run_evaluations.RunEvaluations(
      parts, self.publisher, self.rollout_thread
    )
    self.shutdown.stops(self.evaluations.close)

  def start(self) -> int:
    """Save and evaluate a new run, publish its weights, and start the threads.

    Returns:
      The number of completed train steps.
    """
    step = self._first_step
    # The checkpoint is written first. In a workdir that has metrics or a ledger
    # but no checkpoint, the checkpoint was lost.
    if self._is_new:
      self.writer.hold(0, {})
      self.checkpoints.take_first()
    config_json.write(self.config, self.workdir)
    self._ahead.rollout.wait(lambda: self.stop.is_set)
    self.channel.publish(self.trainer.published(), step)
    if self.evaluations.catch_up(step):
      self._complete_step(step)
    self.recorder.start_rl()
    self.buffer.set_policy_version(step)
    self.rollout_thread.start()
    self.shutdown.spawn("batch loader", self.loader.run, stop=self.loader.stop)
    return step

  # -- the loop -------------------------------------------------------------

  def loop(self, step: int) -> int:
    """Train until `num_steps`; after a stop request, raise Interrupted.

    The loop takes batches from the loader and waits for the next one. A wait
    ends when there is a batch, on a stop request, or on a failure, which closes
    the buffer and with it the loader.

    Args:
      step: the number of completed train steps.

    Returns:
      The number of train steps completed at the end.
    """
    self.last.is_between(step)
    try:
      return self._loop(step)
    except (supervisor_lib.Interrupted, workdir_lib.WorkdirError):
      raise  # it was asked to end at once, or its workdir was replaced
    except (RuntimeError, OSError, ValueError):
      self.last.take()
      raise

  def _loop(self, step: int) -> int:
    every, num_steps = self.config.eval.every, self.config.train.num_steps
    if step >= num_steps:
      self.recorder.end_rl()
      _, last_step, _, greedy = self.record.evaluations.last
      # Without a final evaluation at this step, num_steps was lowered.
      if last_step != step or greedy is None:
        self._evaluate(step)
    while step < num_steps and not self.stop.is_set:
      with self.profiler.step(step + 1):
        done = self._train(step)
      if done is None:
        break
      step += 1
      totals = self.recorder.totals()
      is_last = step == num_steps
      if is_last:
        self.recorder.end_rl()
      is_evaluated = is_last or bool(every and step % every == 0)
      is_saved = self.checkpoints.is_due(step) or is_last
      self._wait_for_recorder()
      # One evaluation at a time. The next one waits for that under way.
      self.evaluations.finish(step, is_awaited=is_evaluated)
      more = {"transfer/bytes": self.channel.num_bytes}
      more |= self.checkpoints.metrics()
      self.recorder.begin(done, totals, more, is_evaluated=is_evaluated)
      self.last.is_between(step)
      # Saved before the evaluation, whose failure must not lose the steps.
      if is_saved:
        self.checkpoints.take(step)
      if is_evaluated:
        self._complete_step(step)
    self._wait_for_recorder()
    self.supervisor.check()
    if self.stop.is_set and step < num_steps:
      self.interrupt(step)
    return step

  def _train(self, step: int) -> step_metrics.Pending | None:
    """Make a train step and publish its weights; None if there is no batch."""
    wait_start_s = time.perf_counter()
    loaded = self._next_batch(step)
    if loaded is None:
      return None
    ready_s = time.perf_counter()
    taken_s = max(wait_start_s, loaded.taken_s)
    self._ahead.train.wait(lambda: self.stop.is_set)
    if self.stop.is_set:
      return None  # the buffer still has the batch
    self.last.is_training()
    done = self.trainer.step(step, loaded.batch)
    self.last.has_trained(done)
    done.times_s["wait_for_rollouts_s"] = taken_s - wait_start_s
    done.times_s["prepare_batch_s"] = ready_s - taken_s
    self.claim.check()
    if self._staleness is not None:
      # What the step before has measured decides from this version on.
      self._wait_for_recorder()
      self.buffer.set_max_staleness(self._staleness.bound)
    start_s = time.perf_counter()
    self._wait_until_held(step)
    self.publisher.publish(step + 1)
    done.times_s["publish_s"] = time.perf_counter() - start_s
    return done

  def _wait_until_held(self, step: int) -> None:
    """Wait until the rollout side has the version that it evaluates."""
    watch = self.rollout_thread.watch()
    while not self.evaluations.is_held() and not self.stop.is_set:
      self.stop.wait(_HELD_S)
      self._look(watch, f"version {step} to be held for its evaluation")

  def _next_batch(
    self, step: int
  ) -> batch_loader.Loaded[trainer_lib.PreparedBatch] | None:
    watch = self.rollout_thread.watch()
    while not self.stop.is_set:
      loaded = self.loader.next(timeout_s=0.2)
      if loaded is not None:
        return loaded
      self.publisher.catch_up()
      self.recorder.wait(timeout_s=0.0)  # raises the recorder's failure
      self._look(watch, f"a batch for step {step}")
    return None

  def _wait_for_recorder(self) -> None:
    """Wait until the last step is written down."""
    if self.last.is_ending:
      self.last.wait_for_recorder()
      return
    watch = self.rollout_thread.watch()
    while not self.recorder.wait(timeout_s=0.2):
      self._look(watch, "the recorder")

  def _look(self, watch: supervisor_lib.StallWatch, awaited: str) -> None:
    """Check for failures and stalls; every wait calls this repeatedly.

    Raises:
      ThreadFailed: a thread has failed.
      ConfigError, StorageError: a thread has failed with this error.
      StallError: nothing has moved for `run.stall_timeout_s`.
    """
    self.supervisor.check()
    parts = (self.loader, self.recorder, self.rollout)
    self.rollout_thread.check(
      watch,
      self.buffer.num_finished,
      lambda: [
        f"training waits for {awaited} since {watch.age_s:.1f} s",
        *(part.status() for part in parts),
        *self.buffer.waiting(),
      ],
    )

  # -- evaluation, checkpoints, the end -------------------------------------

  def _complete_step(self, step: int) -> None:
    """Evaluate a step whose metrics are held back, and write them.

    An evaluation beside training is only begun here. A checkpoint that was
    saved before the evaluation contains these metrics. A run that continues
    from it starts with this evaluation.
    """
    self.publisher.catch_up(is_urgent=True)
    if self.evaluations.is_beside(step):
      if not self.stop.is_set:
        self.evaluations.begin(step)
      return
    self._wait_for_recorder()
    self.writer.write(step, self._evaluate(step))
    if step >= self.config.train.num_steps:
      # Another start on the workdir then finds the evaluation.
      self.checkpoints.take_now(step)

  def _evaluate(self, step: int) -> dict[str, float]:
    """Evaluate the current weights in a pause, and return the metrics.

    Raises:
      Interrupted: the run was asked to end; a checkpoint was saved.
    """
    try:
      return self.evaluations.in_a_pause(step)
    except supervisor_lib.Interrupted:
      self.interrupt(step)

  def _save(self, step: int) -> background_write.Write:
    """Copy the whole run for a checkpoint, and return what writes the copy.

    The rollout side is paused while its state is copied. A workdir that is not
    reached must not be made anew.
    """
    with disk.writing(self.workdir):
      self.claim.check_in_place()
    if not self.last.is_ending:  # when weights may be newer than what is due
      self.publisher.catch_up()
    self._wait_for_recorder()
    with self.rollout_thread.paused():
      if self.config.run.exact_resume and not self.rollout_thread.is_hung:
        self.rollout.cut(step)
      groups = snapshot.outstanding(self.buffer, self.rollout)
      self.recorder.tokens(snapshot.count_tokens(groups))
      host_state = {
        "groups_per_step": self.config.algorithm.groups_per_step,
        "max_staleness": self._max_staleness,
        "next_index": self.buffer.state().next_index,
        "stream": self.stream.state(),
        "data": self._data,
        "ledger": dataclasses.asdict(self.ledger.state()),
        "metrics": self.writer.state(),
        "record": self.recorder.state(),
        schedule_start.KEY: self.recorder.schedule_bytes(),
        "config": config_json.to_stored(self.config),
      }
      if self.rollout_thread.is_hung:
        # It may have gone on meanwhile.
        self.recorder.tokens(snapshot.count_tokens(groups))
    if self._staleness is not None:
      host_state["staleness_control"] = self._staleness.state()
    state = self.trainer.state
    if self._base_record is not None:
      host_state[frozen_base.KEY] = self._base_record
      state = frozen_base.without_base(state)
    return checkpoint.begin(
      self.workdir / workdir_lib.CHECKPOINTS,
      step,
      state,
      host_state,
      groups,
      keep=self.config.run.keep_checkpoints,
      announce=frozen_base.announce(
        self.trainer.world, "save", frozen_base.STATE
      ),
    )

  def finish(self, step: int, extra: dict[str, Any]) -> str:
    """Write summary.json and summary.png.

    Args:
      step: the number of completed train steps.
      extra: further fields of the summary.

    Returns:
      The summary on one line.
    """
    with self.rollout_thread.paused():
      groups = snapshot.outstanding(self.buffer, self.rollout)
      tokens = self.recorder.tokens(snapshot.count_tokens(groups))
      self.rollout.stop()  # tokens written after this would not be counted
    return self.recorder.finish(
      step=step,
      tokens=tokens,
      max_staleness=self._max_staleness,
      extra=extra,
    )

  def interrupt(self, step: int) -> NoReturn:
    """Save a checkpoint, and raise Interrupted."""
    self._wait_for_recorder()
    self.evaluations.drop(step)
    kept = self.checkpoints.take_before_stop(step)
    where = "" if kept == step else f" from step {kept}"
    raise supervisor_lib.Interrupted(
      f"stopped after step {step}; the same command on {self.workdir} goes"
      f" on{where}"
    )


def run(
  config: sections.Config,
  workdir: pathlib.Path,
  *,
  initial_params: transformer.Params | None = None,
  source: source_lib.Source | None = None,
  scorer: service_lib.Scorer | None = None,
  loss: objectives.Loss | None = None,
  episode: episode_lib.Episode = episode_lib.single_turn,
  serving: front_lib.ServeSettings | None = None,
  profile_steps: Sequence[int] = (),
  world: world_lib.World | None = None,
  xla_flags: str = "",
) -> str:
  """Start or continue a training run, and return its summary.

  Args:
    config: of the run.
    workdir: directory of this run alone. If it holds a checkpoint, the run
      continues from the newest one. Settings that are not `fixed`
      (`config.setting`) may then be different ones.
    initial_params: float32 parameters of the policy with stacked layers, used
      instead of a warm start. With LoRA they are those of the base.
    source: the source of the prompts; None is the dataset of `task.dataset`.
    scorer: a function of an importable module; see `service.Scorer`. None is
      that of `task.reward`.
    loss: the loss to minimise; see `objectives`. None is the loss of decoupled
      PPO with the config's settings.
    episode: decides how the turns of a trajectory follow from its prompt.
    serving: settings of a server that gives clients access to the policy during
      the run; None starts no server.
    profile_steps: train steps to trace, into WORKDIR/profile.
    world: the processes that train together; None is this one alone. This one
      leads. The others call `follower.follow`, and the caller closes the world.
    xla_flags: the options that XLA was started with, for the schedule; "" takes
      those of the environment.

  Returns:
    The summary on one line.

  Raises:
    Interrupted: the run was asked to stop. It can be continued.
    StorageError: the metrics or the ledger could not be written, or
      `run.max_checkpoint_failures` attempts in a row to write a checkpoint
      have failed.
    ConfigError: a setting is wrong, or the workdir cannot be used with it.
    ThreadFailed: a thread failed.
    StallError: nothing moved for `run.stall_timeout_s`.
    BadUpdatesError: too many updates in a row were not finite.
  """
  extensions = session_lib.Extensions(
    initial_params=initial_params,
    source=source,
    scorer=scorer,
    loss=loss,
    episode=episode,
    serving=serving,
    xla_flags=xla_flags,
  )
  device_checks.check_repeats(config, jax.devices()[0].platform)
  setup = checks.checked(config, jax.devices(), source=source, scorer=scorer)
  stop = supervisor_lib.StopRequest(grace_s=config.run.preemption_grace_s)
  world = world or world_lib.alone()
  trainer_facts.check_size(config, world.size)
  trainer_facts.check_mesh(setup.train_mesh, world.size)
  world.lead(stop.set, stop.clean_up)
  stop.before_ending_now(lambda: world.close("ended at once", 130))
  with (
    progress_lib.Progress(config.train.num_steps) as progress,
    metrics_lib.CompilationCounter() as compilations,
    compile_clock.CompileClock() as clock,
    stop.on_signals(progress.note),
    workdir_lib.Claim(workdir, progress.note) as claim,
    start_up.parts(
      setup,
      session_lib.Session(
        workdir=workdir,
        progress=progress,
        stop=stop,
        claim=claim,
        seconds=clock,
        profile_steps=tuple(profile_steps),
        world=world,
      ),
      extensions,
    ) as parts,
  ):
    this = Run(parts)
    step = this.loop(this.start())
    return this.finish(
      step,
      {
        "num_programs": compilations.num_programs,
        "num_compilations": compilations.num_compiled,
        "compile_s": compilations.total_s,
      },
    )
