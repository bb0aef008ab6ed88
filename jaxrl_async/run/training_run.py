"""Builds a run, starts its threads, supervises it, shuts it down.

The main thread trains, on batches that another one prepares. One rollout thread
generates. The channel has a thread that writes weights, the recorder one that
writes steps down, rewards run in processes. The first failure anywhere closes
the buffer, everything is joined with a deadline, and the failure is raised with
the name of the thread it came from.
"""

import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import ledger as ledger_lib
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.data import held_out
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import run_record
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import worker as worker_lib
from jaxrl_async.run import assembly
from jaxrl_async.run import evaluate
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import resume
from jaxrl_async.run import snapshot
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import batch_loader
from jaxrl_async.training import trainer as trainer_lib


class Run:
  """All parts of one run and the loop that drives them.

  Threads: everything here belongs to the main thread.
  """

  def __init__(
    self,
    config: sections.Config,
    workdir: pathlib.Path,
    progress: progress_lib.Progress,
    stop: supervisor_lib.StopRequest,
    claim: workdir_lib.Claim,
    *,
    initial_params: Any = None,
    scorer: service_lib.Scorer = reasoning.score,
    serving: front_lib.ServeSettings | None = None,
  ):
    started_s = time.perf_counter()
    self.config, self.workdir = config, workdir
    self.progress, self.stop, self.claim = progress, stop, claim
    self.tokenizer = assembly.load_tokenizer(config)
    self.model = assembly.model_config(config, self.tokenizer.vocab_size)
    self._initial_params = initial_params
    self._checkpoints = workdir / workdir_lib.CHECKPOINTS
    found = resume.find(config, workdir, progress.note)
    self.resumed_step, self._stored = found
    self.record = run_record.RunRecord.from_json(self._stored.get("record", {}))
    origin_s = started_s - self.record.wall_s
    self.busy = {
      name: metrics_lib.BusyClock(origin_s) for name in ("rollout", "train")
    }
    self.clock = self.busy["train"]
    self.train_mesh, self.rollout_mesh = assembly.cut_devices(
      config, jax.devices()
    )
    self.trainer = assembly.make_trainer(
      config, self.model, self.train_mesh, self.busy["train"]
    )
    self.engine = assembly.make_engine(
      config, self.model, self.rollout_mesh, self.tokenizer.end_tokens
    )
    self.buffer = buffer_lib.Buffer(
      config.algorithm.groups_per_step, config.algorithm.max_staleness
    )
    self.side_outputs = side_outputs_lib.SideOutputs(progress.note)
    self.writer = metrics_lib.MetricsWriter(workdir, self.side_outputs)
    self.supervisor = supervisor_lib.Supervisor(on_failure=self.buffer.close)
    self.source = assembly.prompt_source(config, self.tokenizer)
    self.stream = prompts.PromptStream(self.source, source_lib.Split.TRAIN)
    self.loader: batch_loader.BatchLoader[trainer_lib.PreparedBatch] | None
    self.loader = None
    self._has_worker = False
    self.front = serving and front_lib.of_a_run(
      serving, config, self.model, self.tokenizer, lambda: self._has_worker
    )
    # Last: from here on there is something to close, the newest part first.
    self.rewards = assembly.make_rewards(config.task, scorer)
    self._closing = contextlib.ExitStack()
    self._closing.callback(self.writer.close)
    self._closing.callback(self.stream.close)
    self._closing.callback(self.rewards.close, config.run.join_timeout_s)

  # -- assembly -------------------------------------------------------------

  def open(self) -> int:
    """Warm start or restore, first evaluation, threads; gives the step."""
    config = self.config
    if self.front is not None:
      self.front.start(self.progress.note)
      self.progress.note(f"serving the policy at {self.front.address}")
    self.evaluator = evaluate.Evaluator(
      self.engine,
      held_out.load_or_make(
        self.workdir / "held_out.json",
        self.source,
        config.eval.num_items,
        note=self.progress.note,
        on_progress=self._show_held_out,
      ),
      max_completion_tokens=config.rollout.max_completion_tokens,
      tokenizer=self.tokenizer,
      rewards=self.rewards,
    )
    if self.resumed_step is None:
      self._warm_start()
      outstanding = []
    else:
      outstanding = self._restore()
    self.stream.prefetch()
    step = self.resumed_step or 0
    self.rewards.warm_up()
    self.ledger = ledger_lib.Ledger(
      self.workdir / "ledger.jsonl",
      ledger_lib.LedgerState(**self._stored.get("ledger", {})),
    )
    self._closing.callback(self.ledger.close)
    self.channel = assembly.make_channel(
      config,
      self.workdir,
      self.trainer.published_shapes(),
      self.engine,
      self.progress.note,
    )
    self._closing.callback(self.channel.close, config.run.join_timeout_s)
    self.stop.before_ending_now(self.channel.remove)
    self.stop.before_ending_now(self.progress.show_cursor)
    self.scheduler = assembly.make_scheduler(
      config, self.engine, self.tokenizer, self.busy["rollout"]
    )
    self.worker = worker_lib.RolloutWorker(
      assembly.worker_settings(config),
      scheduler=self.scheduler,
      stream=self.stream,
      buffer=self.buffer,
      channel=self.channel,
      rewards=self.rewards,
      ledger=self.ledger,
      tokenizer=self.tokenizer,
      busy=self.busy["rollout"],
      requests=None if self.front is None else self.front.queue,
    )
    self.worker.restore(outstanding)
    self.recorder = recorder_lib.Recorder(
      self.record,
      workdir=self.workdir,
      writer=self.writer,
      ledger=self.ledger,
      worker=self.worker,
      rewards=self.rewards,
      busy=self.busy,
      progress=self.progress,
      side_outputs=self.side_outputs,
      max_bad_updates=config.train.max_bad_updates,
    )
    self._closing.callback(self.recorder.close, config.run.join_timeout_s)
    params = self.trainer.published()
    # The checkpoint is first: books without one mean that it was lost.
    if self.resumed_step is None:
      self.writer.hold(0, {})
      self._save(0)
    config_json.write(config, self.workdir)
    if self.writer.held_step is not None:
      self._complete_step(step, params)
    self.recorder.start_rl()
    self._publish(params, step)
    self._has_worker = True
    self.supervisor.spawn("rollout worker", self.worker.run)
    self.loader = batch_loader.BatchLoader(
      self.buffer,
      self.trainer.prepare,
      first_step=step,
      end_step=config.train.num_steps,
    )
    self.supervisor.spawn("batch loader", self.loader.run)
    return step

  def _warm_start(self) -> None:
    start_s = self.clock.now()
    params = self._initial_params
    if params is None:
      params = assembly.warm_start(
        self.config,
        self.model,
        self.train_mesh,
        self.tokenizer,
        self._show_warm_start,
      )
    self.trainer.start(params)
    with self.side_outputs.attempt("tokenizer/"):
      self.tokenizer.save(self.workdir / "tokenizer")
    self.record.warm_start_s = self.clock.now() - start_s

  def _show_held_out(self, num_made: int) -> None:
    self.stop.check("stopped in the first stage; it will begin anew")
    num_items = self.config.eval.num_items
    self.progress.stage("held-out questions", num_made, num_items)

  def _show_warm_start(self, step: int, loss: float) -> None:
    self.stop.check("stopped in the warm start; it will begin anew")
    self.progress.stage(
      "warm start", step, self.config.warm_start.num_steps, f"loss {loss:.3f}"
    )

  def _restore(self) -> list:
    """Takes up the newest checkpoint; gives what the worker goes on with."""
    step, stored = self.resumed_step, self._stored
    assert step is not None
    self.trainer.state, _, groups = checkpoint.restore(
      self._checkpoints,
      step,
      self.trainer.abstract_state(),
    )
    self.stream.restore(stored["stream"])
    self.writer.restore(stored["metrics"])
    self.buffer.restore(
      snapshot.buffer_state(
        groups,
        groups_per_step=stored["groups_per_step"],
        next_step=step,
        next_index=stored["next_index"],
      )
    )
    return snapshot.running(groups)

  # -- the loop -------------------------------------------------------------

  def loop(self, step: int) -> int:
    """Trains until num_steps or until asked to stop; gives the step.

    Consumes batches of the loader; waits for the next one; is unblocked by the
    loader, by a failure (which closes the buffer and so ends the loader) and by
    a stop request.
    """
    every, num_steps = self.config.eval.every, self.config.train.num_steps
    if step >= num_steps:
      self.recorder.end_rl()
      _, last_step, _, greedy = self.record.evaluations.last
      if last_step != step or greedy is None:  # num_steps was lowered
        self._evaluate(step, self.trainer.published())
    while step < num_steps and not self.stop.is_set:
      wait_start_s = time.perf_counter()
      loaded = self._next_batch(step)
      if loaded is None:
        break
      ready_s = time.perf_counter()
      taken_s = max(wait_start_s, loaded.taken_s)
      done = self.trainer.step(step, loaded.batch)
      done.times_s["wait_for_rollouts_s"] = taken_s - wait_start_s
      done.times_s["prepare_batch_s"] = ready_s - taken_s
      step += 1
      self.claim.check()
      start_s = time.perf_counter()
      self._publish(self.trainer.published(), step)
      done.times_s["publish_s"] = time.perf_counter() - start_s
      totals = self.recorder.totals()
      is_last = step == num_steps
      if is_last:
        self.recorder.end_rl()
      is_evaluated = is_last or bool(every and step % every == 0)
      is_saved = is_last or step % self.config.run.checkpoint_every == 0
      self._wait_for_recorder()
      more = {"transfer/bytes": self.channel.num_bytes}
      self.recorder.begin(done, totals, more, is_evaluated=is_evaluated)
      if is_saved:  # first: an evaluation that fails must not cost the steps
        self._save(step)
      if is_evaluated:
        self._complete_step(step, self.trainer.published())
    self._wait_for_recorder()
    self.supervisor.check()
    return step

  def _next_batch(
    self, step: int
  ) -> batch_loader.Loaded[trainer_lib.PreparedBatch] | None:
    assert self.loader is not None
    watch = supervisor_lib.StallWatch(self.config.run.stall_timeout_s)
    while not self.stop.is_set:
      loaded = self.loader.next(timeout_s=0.2)
      if loaded is not None:
        return loaded
      self.recorder.wait(timeout_s=0.0)  # raises what ended it
      self._look(watch, f"a batch for step {step}")
    return None

  def _wait_for_recorder(self) -> None:
    """Returns when the last step is written down."""
    watch = supervisor_lib.StallWatch(self.config.run.stall_timeout_s)
    while not self.recorder.wait(timeout_s=0.2):
      self._look(watch, "the recorder")

  def _look(self, watch: supervisor_lib.StallWatch, awaited: str) -> None:
    """Raises the first failure, or a StallError; part of every wait."""
    assert self.loader is not None
    self.supervisor.check()
    parts = (self.loader, self.recorder, self.worker)
    moving = self.worker.group_tokens, self.scheduler.version
    watch.check(
      (*moving, self.buffer.num_finished),
      lambda: [
        f"training waits for {awaited} since {watch.age_s:.1f} s",
        *(part.status() for part in parts),
        *self.buffer.waiting(),
      ],
    )

  def _publish(self, params: Any, version: int) -> None:
    self.channel.publish(params, version)
    self.buffer.set_policy_version(version)

  # -- evaluation, checkpoints, the end -------------------------------------

  def _complete_step(self, step: int, params: Any) -> None:
    """Evaluates a step whose metrics are held for it, and writes them.

    A checkpoint from before it carries them: a continuation evaluates first.
    """
    self._wait_for_recorder()
    self.writer.write(step, self._evaluate(step, params))
    if step >= self.config.train.num_steps:
      self._save(step)  # with the evaluation, for whoever starts it again

  def _evaluate(self, step: int, params: Any) -> dict[str, float]:
    """Held-out accuracies of these weights; both slices rest meanwhile."""
    is_end = step == 0 or step >= self.config.train.num_steps
    with self.recorder.evaluating(), self._paused():
      engine_params = self.engine.load_params(params, step)
      temperature = self.config.eval.temperature
      sampled = self.evaluator.evaluate(engine_params, temperature)
      greedy = self.evaluator.evaluate(engine_params, 0.0) if is_end else None
      if temperature == self.config.rollout.temperature:
        kl = evaluate.mismatch_kl(sampled.trajectories, self.trainer.logprobs)
        self.record.mismatch_kl.add(kl)
    of_greedy = None if greedy is None else greedy.accuracy
    self.record.evaluations.append(
      (self.clock.now(), step, sampled.accuracy, of_greedy)
    )
    self.progress.note(f"step {step}: {evaluate.describe(sampled, greedy)}")
    return evaluate.metrics_of(sampled, greedy)

  @contextlib.contextmanager
  def _paused(self):
    if not self._has_worker:
      yield
      return
    with self.worker.paused(self.config.run.join_timeout_s):
      self.supervisor.check()  # a worker that ended by itself has failed
      yield

  def _save(self, step: int) -> None:
    """A checkpoint of everything; the worker stands still for the copy."""
    self.claim.check()
    self._wait_for_recorder()
    with self._paused():
      groups = snapshot.outstanding(self.buffer, self.worker)
      self.recorder.tokens(snapshot.count_tokens(groups))
      host_state = {
        "groups_per_step": self.config.algorithm.groups_per_step,
        "max_staleness": self._stored["max_staleness"],
        "next_index": self.buffer.state().next_index,
        "stream": self.stream.state(),
        "ledger": dataclasses.asdict(self.ledger.state()),
        "metrics": self.writer.state(),
        "record": self.recorder.state(),
        "config": config_json.to_stored(self.config),
      }
    checkpoint.save(
      self._checkpoints,
      step,
      self.trainer.state,
      host_state,
      groups,
      keep=self.config.run.keep_checkpoints,
    )

  def finish(self, step: int, extra: dict[str, Any]) -> str:
    """Writes summary.json and summary.png; gives the summary's line."""
    with self._paused():
      groups = snapshot.outstanding(self.buffer, self.worker)
      tokens = self.recorder.tokens(snapshot.count_tokens(groups))
      self.worker.stop()  # what it went on to write nobody would count
    return self.recorder.finish(
      step=step,
      tokens=tokens,
      max_staleness=self._stored["max_staleness"],
      extra=extra,
    )

  def interrupt(self, step: int) -> None:
    """Writes a checkpoint and raises Interrupted."""
    self._save(step)
    raise supervisor_lib.Interrupted(
      f"stopped after step {step}; the same command on {self.workdir} goes on"
    )

  def __enter__(self) -> "Run":
    return self

  def __exit__(
    self, kind: Any, error: BaseException | None, where: Any
  ) -> None:
    """Ends threads and processes; raises only if nothing was raised before."""
    del kind, where
    timeout_s = self.config.run.join_timeout_s
    self.buffer.close(error)
    if self.loader is not None:
      self.loader.stop()
    if self._has_worker:
      self.worker.stop()
    if self.front is not None:
      self.front.close(timeout_s, self.progress.note)
    late = self.supervisor.join(timeout_s)
    try:
      self._closing.close()  # all of them, whatever one raises
      if late:
        raise TimeoutError(f"{', '.join(late)} did not end in {timeout_s} s")
    except (OSError, weight_transfer.WeightTransferError) as closing:
      if error is None:
        raise
      if closing is not error:
        self.progress.note(f"while closing: {closing}")


def run(
  config: sections.Config,
  workdir: pathlib.Path,
  *,
  initial_params: Any = None,
  scorer: service_lib.Scorer = reasoning.score,
  serving: front_lib.ServeSettings | None = None,
) -> str:
  """Runs or continues a whole run; gives its summary on one line.

  Args:
    config: validated.
    workdir: of this run alone; the same one continues from its newest
      checkpoint, also with other settings where `resume.MAY_DIFFER` has them.
    initial_params: stacked float32 parameters instead of a warm start.
    scorer: a function of an importable module; see `service.Scorer`.
    serving: how clients reach the policy meanwhile; None is not at all.

  Raises:
    Interrupted: it was asked to end, and can be continued.
    StorageError: the disk took no checkpoint, or no line of the books.
    ConfigError, ThreadFailed, StallError, BadUpdatesError: what they say.
  """
  assembly.check(config, jax.devices())
  stop = supervisor_lib.StopRequest()
  with (
    progress_lib.Progress(config.train.num_steps) as progress,
    metrics_lib.CompilationCounter() as compilations,
    stop.on_signals(progress.note),
    workdir_lib.Claim(workdir, progress.note) as claim,
    Run(
      config,
      workdir,
      progress,
      stop,
      claim,
      initial_params=initial_params,
      scorer=scorer,
      serving=serving,
    ) as this,
  ):
    step = this.loop(this.open())
    if stop.is_set and step < config.train.num_steps:
      this.interrupt(step)
    return this.finish(
      step,
      {
        "num_programs": compilations.num_programs,
        "num_compilations": compilations.num_compiled,
        "compile_s": compilations.total_s,
      },
    )
