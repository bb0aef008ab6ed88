"""The start of a training run, up to the point where its loop can begin.

The order matters. Parts that need no thread and no process are built first, in
`_foundation`, so that an error there leaves nothing to clean up. Then the first
stage runs: a new run does its warm start, a continued run restores its
checkpoint. The parts of the loop follow, because some of them need the result
of the first stage. Every part that has to be closed is registered with
`Shutdown` when it is built.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import ledger as ledger_lib
from jaxrl_async.coordination import staleness_control
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import profile as profile_lib
from jaxrl_async.reporting import run_record
from jaxrl_async.reporting import samples as samples_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import assembly
from jaxrl_async.run import cluster_checks
from jaxrl_async.run import compile_ahead
from jaxrl_async.run import evaluate
from jaxrl_async.run import evaluators as evaluators_lib
from jaxrl_async.run import frozen_base
from jaxrl_async.run import initial_params
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import resume
from jaxrl_async.run import rollout_start
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.run import schedule_start
from jaxrl_async.run import schedules
from jaxrl_async.run import session as session_lib
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.run import shutdown as shutdown_lib
from jaxrl_async.run import snapshot
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import batch_loader
from jaxrl_async.training import trainer as trainer_lib

ROLLOUT = "rollout worker"  # thread that drives the rollout side


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Foundation:
  """The parts that exist before the first stage.

  Attributes:
    resumed_step: step of the checkpoint that the run continues from; None for a
      new run.
    engine: of the rollout slice; None if it is in other processes.
    stored: host state of the run in that checkpoint.
    verified: that checkpoint.
  """

  resumed_step: int | None
  stored: dict[str, Any]
  verified: checkpoint.Verified | None
  record: run_record.RunRecord
  busy: dict[str, metrics_lib.BusyClock]
  trainer: trainer_lib.Trainer
  engine: engine_lib.Engine | None
  staleness: staleness_control.StalenessControl | None
  buffer: buffer_lib.Buffer
  side_outputs: side_outputs_lib.SideOutputs
  writer: metrics_lib.MetricsWriter
  source: prompts.PromptSource
  stream: prompts.PromptStream
  rewards: service_lib.RewardService
  shutdown: shutdown_lib.Shutdown
  front: front_lib.Front | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """All parts of a run, ready for the loop. The loop's threads do not run yet.

  Attributes:
    setup: of the run.
    session: of this start.
    is_new: whether the run has no checkpoint yet.
    first_step: number of train steps that are already completed.
    set_evaluators: those of `eval.sets`, by name.
    base_record: where the base of a run with LoRA is; None without one.
    max_staleness: the largest bound that any start of the run has had.
    ahead: compiles the programs of the loop.
    staleness: moves the bound; None if it is fixed.
    shutdown: starts the threads, and closes everything.
  """

  setup: setup_lib.Setup
  session: session_lib.Session
  is_new: bool
  first_step: int
  base_record: frozen_base.Record | None
  max_staleness: int
  ahead: compile_ahead.RunPrograms
  staleness: staleness_control.StalenessControl | None
  record: run_record.RunRecord
  clock: metrics_lib.BusyClock
  trainer: trainer_lib.Trainer
  buffer: buffer_lib.Buffer
  writer: metrics_lib.MetricsWriter
  stream: prompts.PromptStream
  evaluator: evaluate.Evaluator
  set_evaluators: dict[str, evaluate.Evaluator]
  ledger: ledger_lib.Ledger
  channel: weight_transfer.WeightChannel
  rollout: rollout_side.RolloutSide
  recorder: recorder_lib.Recorder
  sampler: sampler_lib.Sampler
  profiler: profile_lib.Profiler
  loader: batch_loader.BatchLoader[trainer_lib.PreparedBatch]
  shutdown: shutdown_lib.Shutdown

  @property
  def stall_timeout_s(self) -> float:
    """How long nothing may move."""
    return rollout_start.stall_timeout_s(self.setup.config, self.channel)


@contextlib.contextmanager
def parts(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  extensions: session_lib.Extensions,
) -> Iterator[Parts]:
  """Build the parts of a run, and close them when the block ends.

  An error while closing is raised only if the block raised none.

  Args:
    setup: a setup that `checks.checked` returned.
    session: of this start.
    extensions: parts that the caller provides.

  Raises:
    Interrupted: the run was asked to end during the first stage.
    ConfigError: the run in the workdir cannot be continued with this config.
  """
  base = _foundation(setup, session, extensions)
  with base.shutdown:
    if base.front is not None:
      base.front.start(session.progress.note)
      session.progress.note(f"serving the policy at {base.front.address}")
    if isinstance(setup.source, source_lib.Counted):
      for line in setup.source.describe():
        session.progress.note(line)
    remote = rollout_start.connect(
      setup,
      session,
      trainer=base.trainer,
      is_new=base.resumed_step is None,
      shutdown=base.shutdown,
    )
    evaluators = evaluators_lib.make(
      setup,
      session,
      source=base.source,
      stream=base.stream,
      rewards=base.rewards,
    )
    ahead = compile_ahead.RunPrograms(
      base.trainer, base.engine, is_alone=session.world.size == 1
    )
    base.shutdown.closes(ahead.close, setup.config.run.join_timeout_s)
    if base.resumed_step is None:
      _warm_start(setup, session, base, extensions.initial_params, ahead)
      running = []
    else:
      ahead.compile()
      running = _restore(setup, session.workdir, base, base.resumed_step)
      resume.tell_changed_data(
        base.stored.get("data"),
        dict(setup.source.versions),
        session.progress.note,
      )
    base.stream.prefetch()
    base.rewards.warm_up()
    yield _of_the_loop(
      setup, session, extensions, base, evaluators, running, remote, ahead
    )


def _foundation(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  extensions: session_lib.Extensions,
) -> _Foundation:
  """Build the parts that need no thread and no result of the first stage."""
  started_s = time.perf_counter()
  config, note = setup.config, session.progress.note
  found = resume.find(config, session.workdir, note)
  resumed_step, stored = found.step, found.host_state
  record = run_record.RunRecord.from_json(stored.get("record", {}))
  origin_s = started_s - record.wall_s
  busy = {
    name: metrics_lib.BusyClock(origin_s) for name in ("rollout", "train")
  }
  trainer = assembly.make_trainer(
    setup, busy["train"], loss=extensions.loss, world=session.world
  )
  engine = None
  if not cluster_checks.has_remote_replicas(config):
    engine = assembly.make_engine(setup)
  staleness, bound = None, config.algorithm.max_staleness
  if config.staleness_control.maximum:
    staleness = staleness_control.StalenessControl(
      config.staleness_control,
      stored.get("staleness_control"),
      note,
      oldest=0 if resumed_step is None else stored["max_staleness"],
    )
    bound = staleness.bound
  buffer = buffer_lib.Buffer(config.algorithm.groups_per_step, bound)
  shutdown = shutdown_lib.Shutdown(
    buffer, timeout_s=config.run.join_timeout_s, note=note
  )
  side_outputs = side_outputs_lib.SideOutputs(note)
  if config.run.sample_groups and not samples_lib.can_be_written():
    note(samples_lib.NOT_WRITTEN)
  writer = metrics_lib.MetricsWriter(
    session.workdir,
    side_outputs,
    assembly.make_wandb_log(config, session.workdir),
    note,
  )
  source = assembly.prompt_source(setup)
  stream = prompts.PromptStream(source, source_lib.Split.TRAIN)
  front = extensions.serving and front_lib.of_a_run(
    extensions.serving,
    config,
    setup.model,
    setup.tokenizer,
    lambda: shutdown.supervisor.has_spawned(ROLLOUT),
  )
  # This comes last because it starts processes, which have to be closed.
  scorers = assembly.make_scorers(
    config.task, setup.tokenizer, extensions.scorer
  )
  rewards = service_lib.RewardService(scorers, config.task.reward_workers)
  shutdown.closes(writer.close)
  shutdown.closes(stream.close)
  shutdown.closes(rewards.close, config.run.join_timeout_s)
  if front is not None:
    shutdown.stops(front.close, config.run.join_timeout_s, note)
  return _Foundation(
    resumed_step=resumed_step,
    stored=stored,
    verified=found.verified,
    record=record,
    busy=busy,
    trainer=trainer,
    engine=engine,
    staleness=staleness,
    buffer=buffer,
    side_outputs=side_outputs,
    writer=writer,
    source=source,
    stream=stream,
    rewards=rewards,
    shutdown=shutdown,
    front=front,
  )


# -- the first stage ----------------------------------------------------------


def _warm_start(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  base: _Foundation,
  params: transformer.Params | None,
  ahead: compile_ahead.RunPrograms,
) -> None:
  """Start the trainer of a new run, and store the tokenizer in the workdir.

  Args:
    setup: of the run.
    session: of this start.
    base: the trainer and the record.
    params: the first parameters. If None, a warm start makes them.
    ahead: compiles the programs of this stage and of the loop.
  """
  clock = base.busy["train"]
  start_s = clock.now()
  if params is None:
    session.world.tell("start", evaluated=sorted(setup.evaluated))
    show = functools.partial(
      _show_warm_start, session, setup.config.warm_start.num_steps
    )
    params = assembly.warm_start(
      setup, show, session.progress.note, ahead.compile_warm_start
    )
  ahead.compile()
  if setup.model.lora is not None:
    params = initial_params.with_adapters(params, setup)
  base.trainer.start(initial_params.of_models(setup, params))
  with base.side_outputs.attempt("tokenizer/"):
    setup.tokenizer.save(session.workdir / "tokenizer")
  base.record.warm_start_s = clock.now() - start_s


def _show_warm_start(
  session: session_lib.Session, num_steps: int, step: int, loss: float
) -> None:
  """Show the progress of the warm start, or end it if the user asked to stop.

  Raises:
    Interrupted: there is a stop request.
  """
  session.stop.check("stopped in the warm start; it will begin anew")
  session.progress.stage("warm start", step, num_steps, f"loss {loss:.3f}")


def _restore(
  setup: setup_lib.Setup, workdir: pathlib.Path, base: _Foundation, step: int
) -> list[types.RolloutGroup]:
  """Restore a checkpoint, and return the groups that the worker continues."""
  base.trainer.state, _, groups = frozen_base.restore(
    setup,
    workdir,
    step,
    base.trainer.abstract_state(),
    base.trainer.world,
    base.verified,
  )
  base.stream.restore(base.stored["stream"])
  base.writer.restore(base.stored["metrics"])
  base.buffer.restore(
    snapshot.buffer_state(
      groups,
      groups_per_step=base.stored["groups_per_step"],
      next_step=step,
      next_index=base.stored["next_index"],
    )
  )
  return snapshot.running(groups)


def _records_of_groups(
  setup: setup_lib.Setup, session: session_lib.Session, base: _Foundation
) -> tuple[sampler_lib.Sampler, ledger_lib.Ledger]:
  """Open samples.jsonl and ledger.jsonl."""
  sampler = sampler_lib.Sampler(
    session.workdir,
    num_groups=setup.config.run.sample_groups,
    tokenizer=setup.tokenizer,
    answer_prefix=setup.config.task.answer_prefix,
    side_outputs=base.side_outputs,
    first_step=base.resumed_step or 0,
  )
  base.shutdown.closes(sampler.close)
  ledger = ledger_lib.Ledger(
    session.workdir / "ledger.jsonl",
    ledger_lib.LedgerState(**base.stored.get("ledger", {})),
    on_untrained=sampler.add_untrained,
    note=session.progress.note,
  )
  base.shutdown.closes(ledger.close)
  return sampler, ledger


def _base_record(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  base: _Foundation,
  extensions: session_lib.Extensions,
) -> frozen_base.Record | None:
  """Return where the base of a run with LoRA is; a new run keeps it first."""
  if base.resumed_step is not None or not base.trainer.has_base:
    return base.stored.get(frozen_base.KEY)
  return frozen_base.keep(
    setup,
    session.workdir,
    base.trainer.state,
    is_given=extensions.initial_params is not None,
    world=session.world,
  )


def _of_the_loop(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  extensions: session_lib.Extensions,
  base: _Foundation,
  evaluators: tuple[evaluate.Evaluator, dict[str, evaluate.Evaluator]],
  running: list[types.RolloutGroup],
  remote: rollout_start.Remote | None,
  ahead: compile_ahead.RunPrograms,
) -> Parts:
  """Build the parts that drive and record the asynchronous loop."""
  config, workdir = setup.config, session.workdir
  step = base.resumed_step or 0
  sampler, ledger = _records_of_groups(setup, session, base)
  schedule = schedule_start.open_schedule(
    setup, session, extensions, base.stored, step
  )
  base.shutdown.closes(schedule.close)
  base_record = _base_record(setup, session, base, extensions)
  coordinator = coordinator_lib.Coordinator(
    assembly.coordinator_settings(
      config, has_own_loss=extensions.loss is not None
    ),
    stream=base.stream,
    buffer=base.buffer,
    rewards=base.rewards,
    ledger=ledger,
    busy=base.busy["rollout"],
    episode=extensions.episode,
    new_deadline=lambda timeout_s: supervisor_lib.Deadline(
      timeout_s, session.seconds
    ),
  )
  coordinator.restore(running)
  rollout = rollout_start.build(
    setup,
    session,
    coordinator,
    trainer=base.trainer,
    engine=base.engine,
    remote=remote,
    busy=base.busy["rollout"],
    requests=None if base.front is None else base.front.queue,
    shutdown=base.shutdown,
  )
  session.stop.before_ending_now(rollout.channel.remove)
  session.stop.before_ending_now(session.progress.show_cursor)
  recorder = recorder_lib.Recorder(
    base.record,
    workdir=workdir,
    writer=base.writer,
    ledger=ledger,
    rollout=rollout.side,
    rewards=base.rewards,
    busy=base.busy,
    progress=session.progress,
    side_outputs=base.side_outputs,
    sampler=sampler,
    schedule=schedule,
    max_bad_updates=config.train.max_bad_updates,
    solved_score=config.task.solved_score,
    staleness=base.staleness,
    scheduled=schedules.make(config),
  )
  base.shutdown.closes(recorder.close, config.run.join_timeout_s)
  return Parts(
    setup=setup,
    session=session,
    is_new=base.resumed_step is None,
    first_step=step,
    base_record=base_record,
    max_staleness=base.stored["max_staleness"],
    ahead=ahead,
    staleness=base.staleness,
    record=base.record,
    clock=base.busy["train"],
    trainer=base.trainer,
    buffer=base.buffer,
    writer=base.writer,
    stream=base.stream,
    evaluator=evaluators[0],
    set_evaluators=evaluators[1],
    ledger=ledger,
    channel=rollout.channel,
    rollout=rollout.side,
    recorder=recorder,
    sampler=sampler,
    profiler=profile_lib.Profiler(
      workdir, session.profile_steps, base.side_outputs
    ),
    loader=batch_loader.BatchLoader(
      base.buffer,
      base.trainer.prepare,
      first_step=step,
      end_step=config.train.num_steps,
    ),
    shutdown=base.shutdown,
  )
