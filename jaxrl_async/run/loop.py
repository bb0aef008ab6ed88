"""The loop of a training run: batch, step, publish, record, save, evaluate.

The algorithm is that of AReaL (arXiv:2505.24298): generation goes on in another
thread, under the bound on staleness that the buffer keeps, while this loop
trains on what is finished and publishes each new version of the weights.
"""

from collections.abc import Callable
import dataclasses
import time
from typing import NoReturn

from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.data import prompts
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import timing_start
from jaxrl_async.reporting import profile as profile_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import checkpointing
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import resume
from jaxrl_async.run import rollout_start
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import run_evaluations
from jaxrl_async.run import session as session_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import batch_loader
from jaxrl_async.training import step_metrics
from jaxrl_async.training import trainer as trainer_lib
from jaxrl_async.weights import version_publisher
from jaxrl_async.weights import weight_transfer

_LOOK_S = 0.2
_PARTS_OF_THE_END = 3  # after a failure: write down, pause, copy


@dataclasses.dataclass(kw_only=True)
class Loop:
  """The loop: batch, train step, publish, record, checkpoint, evaluate.

  Threads: everything here belongs to the main thread. A thread that takes a
  last checkpoint uses it while the main thread waits.

  Attributes:
    setup: of the run.
    session: of this start.
    found: what this start continues from.
    step: the number of completed train steps.
    base_record: where the base of a run with LoRA is; None without one.
    is_whole: whether the weights are those of `step`, all of which is recorded.
      While it is False, the run cannot be saved.
  """

  setup: setup_lib.Setup
  session: session_lib.Session
  found: resume.Found
  base_record: frozen_base.Record | None
  buffer: buffer_lib.Buffer
  trainer: trainer_lib.Trainer
  stream: prompts.PromptStream
  recorder: recorder_lib.Recorder
  rollout: rollout_side.RolloutSide
  channel: weight_transfer.WeightChannel
  questions: dict[str, list[questions_lib.Question]]
  is_whole: bool = True

  def __post_init__(self):
    """Make what the loop alone uses."""
    self.step = self.found.first_step
    self.config, self.stop = self.setup.config, self.session.stop
    self.num_steps = self.config.train.num_steps
    shutdown = self.session.shutdown
    self.rollout_thread = rollout_thread.RolloutThread(
      rollout=self.rollout,
      session=self.session,
      join_timeout_s=self.config.run.join_timeout_s,
      stall_timeout_s=rollout_start.stall_timeout_s(self.config, self.channel),
    )
    self.evaluations = run_evaluations.RunEvaluations(
      setup=self.setup,
      session=self.session,
      questions=self.questions,
      thread=self.rollout_thread,
      rollout=self.rollout,
      channel=self.channel,
      buffer=self.buffer,
      trainer=self.trainer,
      recorder=self.recorder,
    )
    shutdown.stops(self.evaluations.close)
    self.loader = batch_loader.BatchLoader(
      self.buffer,
      self.trainer.prepare,
      first_step=self.step,
      end_step=self.num_steps,
    )
    self.publisher = version_publisher.VersionPublisher(
      self.trainer.published, self.channel, self.buffer
    )
    self.profiler = profile_lib.Profiler(
      self.session.workdir,
      self.session.profile_steps,
      self.recorder.side_outputs,
    )
    self.checkpoints = checkpointing.Checkpointing(
      self.save, self.config.run, self.stop, self.session.progress.note
    )
    # What is being written was taken whole, so it may use its time.
    shutdown.closes(self.checkpoints.close, self.config.run.stall_timeout_s)
    self.stop.before_ending_now(self.channel.remove)
    self.stop.before_ending_now(self.session.progress.show_cursor)

  def start(self) -> None:
    """Save and evaluate a new run, publish its weights, and start threads."""
    # The checkpoint is written first. In a workdir that has metrics or a ledger
    # but no checkpoint, the checkpoint was lost.
    if self.found.is_new:
      self.checkpoints.take_first()
    config_json.write(self.config, self.session.workdir)
    self.channel.publish(self.trainer.published(), self.step)
    is_evaluated = self.evaluations.begin_first(self.step)
    self.rollout_thread.start()
    if is_evaluated:
      self._evaluate()
    self.recorder.start_rl()
    self.buffer.set_policy_version(self.step)
    self.session.shutdown.spawn(
      "batch loader", self.loader.run, stop=self.loader.stop
    )

  def run(self) -> None:
    """Train until `train.num_steps`.

    A failure anywhere ends the loop, with a last checkpoint if the run can be
    saved.

    Raises:
      Interrupted: the run was asked to end; a checkpoint was saved.
    """
    try:
      self._run()
    except (supervisor_lib.Interrupted, workdir_lib.WorkdirError):
      raise  # it was asked to end at once, or its workdir was replaced
    except (RuntimeError, OSError, ValueError):
      self.rollout_thread.is_ending = True
      if self.is_whole:
        timeout_s = _PARTS_OF_THE_END * self.config.run.join_timeout_s
        self.checkpoints.rescue(self.step, timeout_s)
      raise

  def _run(self) -> None:
    if self.step >= self.num_steps:
      self.recorder.end_rl()
    while self.step < self.num_steps and not self.stop.is_set:
      with self.profiler.step(self.step + 1):
        if not self._train():
          break
      # Saved before the evaluation, whose failure must not lose the steps.
      if self.checkpoints.is_due(self.step) or self.step == self.num_steps:
        self.checkpoints.take(self.step)
      if self.evaluations.waits_for(self.step):
        self._evaluate()
    self._wait_for_recorder()
    self.session.shutdown.supervisor.check()
    if self.stop.is_set and self.step < self.num_steps:
      self._interrupt()

  def _train(self) -> bool:
    """Make a train step, publish its weights, and begin to record it.

    Returns:
      False if the run was asked to stop before there was a batch.
    """
    wait_start_s = time.perf_counter()
    loaded = self._next_batch()
    if loaded is None:
      return False
    ready_s = time.perf_counter()
    self.is_whole = False
    done = self.trainer.step(self.step, loaded.batch)
    taken_s = max(wait_start_s, loaded.taken_s)
    done.times_s["wait_for_rollouts_s"] = taken_s - wait_start_s
    done.times_s["prepare_batch_s"] = ready_s - taken_s
    self._wait_for_recorder()  # of the step before
    self.session.claim.check()
    try:
      if self.recorder.staleness is not None:
        # What the step before has measured decides from this version on.
        self.buffer.set_max_staleness(self.recorder.staleness.bound)
      # Its questions wait for this version.
      is_evaluated = self.evaluations.begin(self.step + 1)
      start_s = time.perf_counter()
      self.publisher.publish(self.step + 1, is_urgent=is_evaluated)
      done.times_s["publish_s"] = time.perf_counter() - start_s
    finally:
      # Also if the weights cannot be published, so that the run can be saved.
      self._record(done)
    return True

  def _record(self, done: step_metrics.Pending) -> None:
    """Complete a step: begin to write it down."""
    step = done.step + 1
    # Its groups are trained, so the buffer must not keep them any more.
    self.buffer.set_policy_version(step)
    totals = self.recorder.totals()
    if step == self.num_steps:
      self.recorder.end_rl()
    more = {"transfer/bytes": self.channel.num_bytes}
    more |= self.checkpoints.metrics()
    self.recorder.begin(done, totals, more)
    self.step, self.is_whole = step, True

  def _next_batch(
    self,
  ) -> batch_loader.Loaded[trainer_lib.PreparedBatch] | None:
    watch = self.rollout_thread.watch()
    while not self.stop.is_set:
      loaded = self.loader.next(timeout_s=_LOOK_S)
      if loaded is not None:
        return loaded
      self.publisher.catch_up()
      self.recorder.wait(timeout_s=0.0)  # raises the recorder's failure
      self._look(watch, f"a batch for step {self.step}")
    return None

  def _wait_for_recorder(self) -> None:
    """Wait until the last step is written down."""
    if self.rollout_thread.is_ending:  # whatever else has failed
      if not self.recorder.wait(self.config.run.join_timeout_s):
        raise TimeoutError(self.recorder.status())
      return
    watch = self.rollout_thread.watch()
    while not self.recorder.wait(timeout_s=_LOOK_S):
      self._look(watch, "the recorder")

  def _look(self, watch: supervisor_lib.StallWatch, awaited: str) -> None:
    """Check for failures and stalls; every wait calls this repeatedly."""
    self.session.shutdown.supervisor.check()
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

  def _evaluate(self) -> None:
    """Wait for the evaluation of this step, which pauses the run."""
    self._wait_for_recorder()
    if not self.evaluations.in_a_pause():
      self._interrupt()
    if self.step >= self.num_steps:
      # Another start on the workdir then finds the evaluation.
      self.checkpoints.take_now(self.step)

  def save(self, step: int) -> Callable[[], None]:
    """Copy the whole run for a checkpoint, and return what writes the copy.

    The rollout side is paused while its state is copied. A workdir that is not
    reached must not be made anew.
    """
    with disk.writing(self.session.workdir):
      self.session.claim.check_in_place()
    if not self.rollout_thread.is_ending:
      self.publisher.catch_up()
    self._wait_for_recorder()
    with self.rollout_thread.paused():
      if self.config.run.exact_resume and not self.rollout_thread.is_hung:
        self.rollout.cut(step)
      groups = checkpointing.outstanding(self.buffer, self.rollout)
      self.recorder.check_tokens(checkpointing.count_tokens(groups))
      host_state = {
        "groups_per_step": self.config.algorithm.groups_per_step,
        "max_staleness": self.found.host_state["max_staleness"],
        "next_index": self.buffer.state().next_index,
        "stream": self.stream.state(),
        "data": dict(self.setup.source.versions),
        "ledger": dataclasses.asdict(self.recorder.ledger.state()),
        "metrics": self.recorder.state(),
        timing_start.KEY: self.recorder.timing.num_bytes(),
        "config": config_json.to_stored(self.config),
      }
      if self.rollout_thread.is_hung:
        # It may have gone on meanwhile.
        self.recorder.check_tokens(checkpointing.count_tokens(groups))
    if self.recorder.staleness is not None:
      host_state["staleness_control"] = self.recorder.staleness.state()
    state = self.trainer.state
    if self.base_record is not None:
      host_state[frozen_base.KEY] = self.base_record
      state = frozen_base.without_base(state)
    return checkpoint.begin(
      self.session.workdir / workdir_lib.CHECKPOINTS,
      step,
      state,
      host_state,
      groups,
      keep=self.config.run.keep_checkpoints,
      announce=frozen_base.announce(
        self.trainer.world, "save", frozen_base.STATE
      ),
    )

  def finish(self) -> str:
    """Write summary.json and summary.png; return the summary on one line."""
    with self.rollout_thread.paused():
      groups = checkpointing.outstanding(self.buffer, self.rollout)
      self.recorder.check_tokens(checkpointing.count_tokens(groups))
      self.rollout.stop()  # tokens written after this would not be counted
    return self.recorder.finish(self.step)

  def _interrupt(self) -> NoReturn:
    """Save a checkpoint, and raise Interrupted."""
    self._wait_for_recorder()
    self.evaluations.look()
    self.evaluations.close()
    kept = self.checkpoints.take_before_stop(self.step)
    where = "" if kept == self.step else f" from step {kept}"
    raise supervisor_lib.Interrupted(
      f"stopped after step {self.step}; the same command on"
      f" {self.session.workdir} goes on{where}"
    )
