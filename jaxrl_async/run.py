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

from jaxrl_async import assembly
from jaxrl_async import batch_loader
from jaxrl_async import buffer as buffer_lib
from jaxrl_async import checkpoint
from jaxrl_async import config as config_lib
from jaxrl_async import config_json
from jaxrl_async import evaluate
from jaxrl_async import held_out
from jaxrl_async import ledger as ledger_lib
from jaxrl_async import metrics as metrics_lib
from jaxrl_async import progress as progress_lib
from jaxrl_async import prompts
from jaxrl_async import questions
from jaxrl_async import run_record
from jaxrl_async import serve
from jaxrl_async import snapshot
from jaxrl_async import supervisor
from jaxrl_async import trainer as trainer_lib
from jaxrl_async import weight_transfer
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import service
from jaxrl_async.rollout import worker as worker_lib


class StallError(RuntimeError):
  """Nothing moved for `run.stall_timeout_s`; says who waits for what."""


class Interrupted(RuntimeError):
  """The run was asked to end and has written a checkpoint."""


class Run:
  """All parts of one run and the loop that drives them.

  Threads: everything here belongs to the main thread.
  """

  def __init__(
    self,
    config: config_lib.Config,
    workdir: pathlib.Path,
    progress: progress_lib.Progress,
    stop: supervisor.StopRequest,
    *,
    initial_params: Any = None,
    scorer: service.Scorer = reasoning.score,
    serving: serve.ServeSettings | None = None,
  ):
    started_s = time.perf_counter()
    self.config, self.workdir = config, workdir
    self.progress, self.stop = progress, stop
    self.tokenizer = assembly.load_tokenizer(config)
    self.model = assembly.model_config(config, self.tokenizer.vocab_size)
    self._initial_params = initial_params
    self._checkpoints = workdir / "checkpoints"
    self.resumed_step = checkpoint.latest(self._checkpoints)
    self._stored: dict[str, Any] = {}
    if self.resumed_step is not None:
      self._stored = checkpoint.host_state(self._checkpoints, self.resumed_step)
    self.recorder: run_record.Recorder | None = None
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
      config, self.model, self.rollout_mesh, self.tokenizer.eos_id
    )
    self.buffer = buffer_lib.Buffer(
      config.algorithm.groups_per_step, config.algorithm.max_staleness
    )
    self.writer = metrics_lib.MetricsWriter(workdir)
    self.supervisor = supervisor.Supervisor(on_failure=self.buffer.close)
    self.source = assembly.prompt_source(config, self.tokenizer)
    self.stream = prompts.PromptStream(self.source, questions.Split.TRAIN)
    self.ledger: ledger_lib.Ledger | None = None
    self.channel: weight_transfer.WeightChannel | None = None
    self.loader: batch_loader.BatchLoader[trainer_lib.PreparedBatch] | None
    self.loader = None
    self._has_worker = False
    self.front = None
    if serving is not None:
      self.front = serve.front_of_a_run(
        serving, config, self.model, self.tokenizer, lambda: self._has_worker
      )
    # Last: from here on there is something to close.
    self.rewards = assembly.make_rewards(config.task, scorer)

  # -- assembly -------------------------------------------------------------

  def open(self) -> int:
    """Warm start or restore, first evaluation, threads; gives the step."""
    config = self.config
    config_json.write(config, self.workdir)
    self.held_out = held_out.load_or_make(
      self.workdir / "held_out.json",
      self.source,
      config.eval.num_items,
      note=self.progress.note,
      on_progress=self._show_held_out,
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
    self.channel = assembly.make_channel(
      config, self.workdir, self.trainer.published_shapes(), self.engine
    )
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
    self.recorder = run_record.Recorder(
      self.record,
      workdir=self.workdir,
      writer=self.writer,
      ledger=self.ledger,
      worker=self.worker,
      rewards=self.rewards,
      busy=self.busy,
      progress=self.progress,
      max_bad_updates=config.train.max_bad_updates,
    )
    params = self.trainer.published()
    if self.resumed_step is None:
      self.writer.write(0, self._evaluate(0, params))
      self._save(0)
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
    if self.front is not None:
      self.front.start(self.supervisor)
      self.progress.note(f"serving the policy at {self.front.address}")
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
    self.tokenizer.save(self.workdir / "tokenizer")
    self.record.warm_start_s = self.clock.now() - start_s

  def _show_held_out(self, num_made: int) -> None:
    if self.stop.is_set:
      raise Interrupted("stopped in the first stage; it will begin anew")
    num_items = self.config.eval.num_items
    self.progress.stage("held-out questions", num_made, num_items)

  def _show_warm_start(self, step: int, loss: float) -> None:
    if self.stop.is_set:
      raise Interrupted("stopped in the warm start; it will begin anew")
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
    self.progress.note(
      f"continuing {self.workdir} from step {step} with {len(groups)}"
      " outstanding groups"
    )
    return snapshot.running(groups)

  # -- the loop -------------------------------------------------------------

  def loop(self, step: int) -> int:
    """Trains until num_steps or until asked to stop; gives the step.

    Consumes batches of the loader; waits for the next one; is unblocked by the
    loader, by a failure (which closes the buffer and so ends the loader) and by
    a stop request.
    """
    assert self.recorder is not None and self.channel is not None
    every, num_steps = self.config.eval.every, self.config.train.num_steps
    if step >= num_steps:
      self.recorder.end_rl()
      _, last_step, _, greedy = self.record.evaluations[-1]
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
      start_s = time.perf_counter()
      self._publish(self.trainer.published(), step)
      done.times_s["publish_s"] = time.perf_counter() - start_s
      totals = self.recorder.totals()
      is_last = step == num_steps
      if is_last:
        self.recorder.end_rl()
      values: dict[str, int | float] = {
        "transfer/bytes": self.channel.num_bytes
      }
      if is_last or (every and step % every == 0):
        self.recorder.wait()
        values |= self._evaluate(step, self.trainer.published())
      self.recorder.begin(done, totals, values)
      if is_last or step % self.config.run.checkpoint_every == 0:
        self.recorder.wait()
        self._save(step)
    self.recorder.wait()
    self.supervisor.check()
    return step

  def _next_batch(
    self, step: int
  ) -> batch_loader.Loaded[trainer_lib.PreparedBatch] | None:
    assert self.loader is not None and self.recorder is not None
    timeout_s = self.config.run.stall_timeout_s
    watch, start_s = supervisor.StallWatch(timeout_s), time.monotonic()
    while not self.stop.is_set:
      loaded = self.loader.next(timeout_s=0.2)
      if loaded is not None:
        return loaded
      self.supervisor.check()
      self.recorder.check()
      state = (self.worker.group_tokens, self.scheduler.version)
      if watch.is_stalled((state, len(self.buffer.state().finished))):
        waited_s = time.monotonic() - start_s
        lines = [
          f"nothing moved for {timeout_s:g} s (run.stall_timeout_s)",
          f"training waits for a batch for step {step} since {waited_s:.1f} s",
          self.loader.status(),
          self.worker.status(),
          *self.buffer.waiting(),
        ]
        raise StallError("\n".join(lines))
    return None

  def _publish(self, params: Any, version: int) -> None:
    assert self.channel is not None
    self.channel.publish(params, version)
    self.buffer.set_policy_version(version)

  # -- evaluation, checkpoints, the end -------------------------------------

  def _evaluate(self, step: int, params: Any) -> dict[str, float]:
    """Held-out accuracies of these weights; both slices rest meanwhile."""
    config = self.config
    is_end = step == 0 or step >= config.train.num_steps
    start_s = self.clock.now()
    with self._paused():
      engine_params = self.engine.load_params(params, step)

      def accuracy(temperature):
        return evaluate.evaluate(
          self.engine,
          engine_params,
          self.held_out,
          temperature=temperature,
          max_completion_tokens=config.rollout.max_completion_tokens,
          tokenizer=self.tokenizer,
          rewards=self.rewards,
        )

      sampled = accuracy(config.eval.temperature)
      greedy = accuracy(0.0).accuracy if is_end else None
      if config.eval.temperature == config.rollout.temperature:
        kl = evaluate.mismatch_kl(sampled.trajectories, self.trainer.logprobs)
        self.record.evaluation_kls.append(kl)
    now_s = self.clock.now()
    self.record.windows.append((start_s, now_s))
    self.record.evaluations.append((now_s, step, sampled.accuracy, greedy))
    beside = "" if greedy is None else f", greedy {greedy:.3f}"
    self.progress.note(
      f"step {step}: held-out accuracy {sampled.accuracy:.3f}{beside}"
      f" ({len(self.held_out)} questions)"
    )
    # One answer a question: avg@1 and pass@1 are the same.
    values = {f"eval/held_out/{x}@1": sampled.accuracy for x in ("avg", "pass")}
    return values if greedy is None else {**values, "eval/greedy/avg@1": greedy}

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
    assert self.ledger is not None and self.recorder is not None
    with self._paused():
      groups = snapshot.outstanding(self.buffer, self.worker)
      self.recorder.tokens(snapshot.count_tokens(groups))
      host_state = {
        "groups_per_step": self.config.algorithm.groups_per_step,
        "next_index": self.buffer.state().next_index,
        "stream": self.stream.state(),
        "ledger": dataclasses.asdict(self.ledger.state()),
        "metrics": self.writer.state(),
        "record": self.recorder.state(),
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
    assert self.recorder is not None
    with self._paused():
      groups = snapshot.outstanding(self.buffer, self.worker)
      tokens = self.recorder.tokens(snapshot.count_tokens(groups))
      self.worker.stop()  # what it went on to write nobody would count
    return self.recorder.finish(
      step=step,
      tokens=tokens,
      max_staleness=self.config.algorithm.max_staleness,
      extra=extra,
    )

  def interrupt(self, step: int) -> None:
    """Writes a checkpoint and raises Interrupted."""
    self._save(step)
    raise Interrupted(
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
      self.front.stop()
    late = self.supervisor.join(timeout_s)
    try:
      with contextlib.ExitStack() as stack:  # all of them, whatever one raises
        stack.callback(self.writer.close)
        stack.callback(self.stream.close)
        if self.ledger is not None:
          stack.callback(self.ledger.close)
        if self.channel is not None:
          stack.callback(self.channel.close, timeout_s)
        stack.callback(self.rewards.close, timeout_s)
        if self.recorder is not None:  # the first: it writes to the others
          stack.callback(self.recorder.close, timeout_s)
      if late:
        raise TimeoutError(f"{', '.join(late)} did not end in {timeout_s} s")
    except (OSError, weight_transfer.WeightTransferError) as closing:
      if error is None:
        raise
      self.progress.note(f"while closing: {closing}")


def run(
  config: config_lib.Config,
  workdir: pathlib.Path,
  *,
  initial_params: Any = None,
  scorer: service.Scorer = reasoning.score,
  serving: serve.ServeSettings | None = None,
) -> str:
  """Runs or continues a whole run; gives its summary on one line.

  Args:
    config: validated.
    workdir: of this run alone; the same one continues from its newest
      checkpoint.
    initial_params: stacked float32 parameters instead of a warm start.
    scorer: a function of an importable module that scores an answer.
    serving: how clients reach the policy meanwhile; None is not at all.

  Raises:
    Interrupted: it was asked to end, and can be continued.
    ThreadFailed, StallError, run_record.BadUpdatesError: what they say.
  """
  assembly.check(config, jax.devices())
  if checkpoint.latest(workdir / "checkpoints") is not None:
    config_json.check_workdir(config, workdir)
  stop = supervisor.StopRequest()
  with (
    progress_lib.Progress(config.train.num_steps) as progress,
    metrics_lib.CompilationCounter() as compilations,
    stop.on_signals(progress.note),
    Run(
      config,
      workdir,
      progress,
      stop,
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
