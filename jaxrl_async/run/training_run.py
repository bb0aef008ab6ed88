"""Drives a training run, and supervises it.

The main thread trains, on batches that another thread prepares. One rollout
thread generates. The channel has a thread that writes weights, the recorder has
one that writes steps down, and rewards are computed in processes. The first
failure anywhere closes the buffer. Then everything is joined within a deadline,
and the failure is raised with the name of the thread that it came from.

`start_up` builds the parts of a run, and `Run` is the loop over them.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import checks
from jaxrl_async.run import evaluate
from jaxrl_async.run import snapshot
from jaxrl_async.run import start_up
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import batch_loader
from jaxrl_async.training import objectives
from jaxrl_async.training import trainer as trainer_lib


class Run:
  """The loop of one run over its finished parts.

  Threads: everything here belongs to the main thread.
  """

  def __init__(self, parts: start_up.Parts):
    self.config = parts.setup.config
    self.workdir = parts.session.workdir
    self.progress = parts.session.progress
    self.stop = parts.session.stop
    self.claim = parts.session.claim
    self.shutdown = parts.shutdown
    self.supervisor = parts.shutdown.supervisor
    self.record = parts.record
    self.clock = parts.clock
    self.trainer = parts.trainer
    self.engine = parts.engine
    self.buffer = parts.buffer
    self.writer = parts.writer
    self.stream = parts.stream
    self.evaluator = parts.evaluator
    self.ledger = parts.ledger
    self.channel = parts.channel
    self.scheduler = parts.scheduler
    self.worker = parts.worker
    self.recorder = parts.recorder
    self.loader = parts.loader
    self._is_new = parts.is_new
    self._first_step = parts.first_step
    self._max_staleness = parts.max_staleness

  def start(self) -> int:
    """First checkpoint and evaluation, then the threads; gives the step."""
    step = self._first_step
    params = self.trainer.published()
    # The checkpoint is first: books without one mean that it was lost.
    if self._is_new:
      self.writer.hold(0, {})
      self._save(0)
    config_json.write(self.config, self.workdir)
    if self.writer.held_step is not None:
      self._complete_step(step, params)
    self.recorder.start_rl()
    self._publish(params, step)
    self.shutdown.spawn(start_up.WORKER, self.worker.run, stop=self.worker.stop)
    self.shutdown.spawn("batch loader", self.loader.run, stop=self.loader.stop)
    return step

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
    self.supervisor.check()
    parts = (self.loader, self.recorder, self.worker)
    moving = self.worker.replica.group_tokens, self.scheduler.version
    watch.check(
      (*moving, self.buffer.num_finished),
      lambda: [
        f"training waits for {awaited} since {watch.age_s:.1f} s",
        *(part.status() for part in parts),
        *self.buffer.waiting(),
      ],
    )

  def _publish(self, params: transformer.Params, version: int) -> None:
    self.channel.publish(params, version)
    self.buffer.set_policy_version(version)

  # -- evaluation, checkpoints, the end -------------------------------------

  def _complete_step(self, step: int, params: transformer.Params) -> None:
    """Evaluates a step whose metrics are held for it, and writes them.

    A checkpoint from before it carries them: a continuation evaluates first.
    """
    self._wait_for_recorder()
    self.writer.write(step, self._evaluate(step, params))
    if step >= self.config.train.num_steps:
      self._save(step)  # with the evaluation, for whoever starts it again

  def _evaluate(
    self, step: int, params: transformer.Params
  ) -> dict[str, float]:
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
  def _paused(self) -> Iterator[None]:
    """Lets the worker stand still inside the block, if it runs already."""
    if not self.supervisor.has_spawned(start_up.WORKER):
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
        "max_staleness": self._max_staleness,
        "next_index": self.buffer.state().next_index,
        "stream": self.stream.state(),
        "ledger": dataclasses.asdict(self.ledger.state()),
        "metrics": self.writer.state(),
        "record": self.recorder.state(),
        "config": config_json.to_stored(self.config),
      }
    checkpoint.save(
      self.workdir / workdir_lib.CHECKPOINTS,
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
      max_staleness=self._max_staleness,
      extra=extra,
    )

  def interrupt(self, step: int) -> None:
    """Writes a checkpoint and raises Interrupted."""
    self._save(step)
    raise supervisor_lib.Interrupted(
      f"stopped after step {step}; the same command on {self.workdir} goes on"
    )


def run(
  config: sections.Config,
  workdir: pathlib.Path,
  *,
  initial_params: transformer.Params | None = None,
  source: source_lib.Source | None = None,
  scorer: service_lib.Scorer = reasoning.score,
  loss: objectives.Loss | None = None,
  episode: episode_lib.Episode = episode_lib.single_turn,
  serving: front_lib.ServeSettings | None = None,
) -> str:
  """Runs or continues a whole run; gives its summary on one line.

  Args:
    config: of the run.
    workdir: of this run alone; the same one continues from its newest
      checkpoint, also with other settings where `resume.MAY_DIFFER` has them.
    initial_params: stacked float32 parameters instead of a warm start.
    source: where prompts come from; None is the dataset of `task.dataset`.
    scorer: a function of an importable module; see `service.Scorer`.
    loss: what is minimised, see `objectives`. None is the loss of decoupled PPO
      with the config's settings.
    episode: how the turns of a trajectory follow from its prompt.
    serving: how clients reach the policy meanwhile; None is not at all.

  Raises:
    Interrupted: it was asked to end, and can be continued.
    StorageError: the disk took no checkpoint, or no line of the books.
    ConfigError, ThreadFailed, StallError, BadUpdatesError: what they say.
  """
  extensions = start_up.Extensions(
    initial_params=initial_params,
    scorer=scorer,
    loss=loss,
    episode=episode,
    serving=serving,
  )
  setup = checks.checked(config, jax.devices(), source=source)
  stop = supervisor_lib.StopRequest()
  with (
    progress_lib.Progress(config.train.num_steps) as progress,
    metrics_lib.CompilationCounter() as compilations,
    stop.on_signals(progress.note),
    workdir_lib.Claim(workdir, progress.note) as claim,
    start_up.parts(
      setup,
      start_up.Session(
        workdir=workdir, progress=progress, stop=stop, claim=claim
      ),
      extensions,
    ) as parts,
  ):
    this = Run(parts)
    step = this.loop(this.start())
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
