"""A training run, from its configuration to its summary.

`run` checks the configuration, builds the parts of the run, makes its first
stage, and hands them to the loop (`loop`).

The main thread trains on batches that another thread prepares. One thread
generates. The channel has a thread that writes weights, and the recorder has
one that writes steps down. A further one writes a checkpoint. Rewards are
computed in processes. The first failure anywhere closes the buffer. Then all
threads are joined within a deadline, and the failure is raised with the name of
the thread that failed.
"""

from collections.abc import Sequence
import pathlib
import time

import jax

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import given as given_lib
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.buffer import staleness_control
from jaxrl_async.cluster import trainer_facts
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.models import transformer
from jaxrl_async.processes import compile_clock
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.replay import timing_record
from jaxrl_async.replay import timing_start
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import samples as samples_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import client_requests
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import first_stage
from jaxrl_async.run import loop as loop_lib
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import resume
from jaxrl_async.run import rollout_start
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.run import session as session_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import objectives


def run(
  config: sections.Config,
  workdir: pathlib.Path,
  *,
  initial_params: transformer.Params | None = None,
  source: source_lib.Source | None = None,
  scorer: service_lib.Scorer | None = None,
  loss: objectives.Loss | None = None,
  episode: episode_lib.Episode | None = None,
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
    episode: decides how the turns of a trajectory follow from its prompt; None
      is that of `task.episode`.
    serving: settings of a server that gives clients access to the policy during
      the run; None starts no server.
    profile_steps: train steps to trace, into WORKDIR/profile.
    world: the processes that train together; None is this one alone. This one
      leads. The others call `follower.follow`, and the caller closes the world.
    xla_flags: the options that XLA was started with, for the record; "" takes
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
  given = given_lib.Given(
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
  world.lead(lambda report, arguments: stop.set(), lambda why: stop.clean_up())
  stop.before_ending_now(lambda: world.close("ended at once", 130))
  with (
    progress_lib.Progress(config.train.num_steps) as progress,
    metrics_lib.CompilationCounter() as compilations,
    compile_clock.CompileClock() as clock,
    stop.on_signals(progress.note),
    workdir_lib.Claim(workdir, progress.note) as claim,
    session_lib.Shutdown(config.run.join_timeout_s, progress.note) as shutdown,
  ):
    session = session_lib.Session(
      workdir=workdir,
      progress=progress,
      stop=stop,
      claim=claim,
      seconds=clock,
      compilations=compilations,
      side_outputs=side_outputs_lib.SideOutputs(progress.note),
      profile_steps=tuple(profile_steps),
      world=world,
      shutdown=shutdown,
    )
    loop = _build(setup, session, given)
    loop.start()
    loop.run()
    return loop.finish()


def _build(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  given: given_lib.Given,
) -> loop_lib.Loop:
  """Build the parts of a run, stage by stage, and make its first stage.

  Whatever has to be closed is registered as soon as it exists. The threads of
  the loop do not run yet.
  """
  started_s = time.perf_counter()
  config, shutdown = setup.config, session.shutdown
  found = resume.find(
    config, setup.model, session.workdir, session.progress.note
  )
  if found.is_new and given.initial_params is None:
    initial_params.check_is_there(setup)
  totals = found.totals()
  origin_s = started_s - totals.get("run/wall_s", 0.0)
  rollout_busy = metrics_lib.BusyClock(origin_s)
  train_busy = metrics_lib.BusyClock(origin_s)

  # The buffer keeps the bound on staleness.
  buffer, staleness = _buffer(config, session, found)

  # Prompts come from a source, and rewards from other processes.
  source, stream = _prompts(setup, session)
  scorers = assembly.make_scorers(config.task, setup.tokenizer, given.scorer)
  rewards = service_lib.RewardService(scorers, config.task.reward_workers)
  shutdown.closes(rewards.close, config.run.join_timeout_s)

  # One slice trains, and the other one generates.
  trainer = assembly.make_trainer(
    setup, train_busy, loss=given.loss, world=session.world
  )
  generator = rollout_start.generator(
    setup, session, trainer=trainer, is_new=found.is_new
  )
  requests = _client_requests(setup, session, given)

  # The first weights: of a warm start, or of a checkpoint.
  questions = first_stage.questions(setup, session, source, stream)
  start_s = train_busy.now()
  base_record, running = first_stage.begin(
    setup, session, found, given, trainer=trainer, buffer=buffer, stream=stream
  )
  totals.setdefault("run/warm_start_s", train_busy.now() - start_s)
  stream.prefetch()
  rewards.warm_up()

  # Episodes call their environments from other threads and processes.
  environment = assembly.make_environment(setup, given.episode)
  shutdown.closes(environment.close, config.run.join_timeout_s)

  # Generation under the bound, with books of every token.
  writer, sampler, ledger, timing = _books(setup, session, given, found)
  coordinator = coordinator_lib.Coordinator(
    assembly.coordinator_settings(config, has_own_loss=given.loss is not None),
    stream=stream,
    buffer=buffer,
    rewards=rewards,
    ledger=ledger,
    busy=rollout_busy,
    environment=environment,
    new_deadline=session.deadline,
  )
  coordinator.restore(running)
  rollout, channel = rollout_start.build(
    setup, session, coordinator, trainer, generator, rollout_busy, requests
  )

  # The loop, and what it writes down.
  recorder = recorder_lib.Recorder(
    totals,
    workdir=session.workdir,
    writer=writer,
    ledger=ledger,
    rollout=rollout,
    rewards=rewards,
    busy={"rollout": rollout_busy, "train": train_busy},
    compilations=session.compilations,
    progress=session.progress,
    side_outputs=session.side_outputs,
    sampler=sampler,
    timing=timing,
    max_bad_updates=config.train.max_bad_updates,
    solved_score=config.task.solved_score,
    staleness=staleness,
  )
  shutdown.closes(recorder.close, config.run.join_timeout_s)
  return loop_lib.Loop(
    setup=setup,
    session=session,
    found=found,
    base_record=base_record,
    buffer=buffer,
    trainer=trainer,
    stream=stream,
    questions=questions,
    recorder=recorder,
    rollout=rollout,
    channel=channel,
  )


def _buffer(
  config: sections.Config, session: session_lib.Session, found: resume.Found
) -> tuple[buffer_lib.Buffer, staleness_control.StalenessControl | None]:
  """Return the buffer, and what moves its bound; None if the bound is fixed."""
  control, bound = None, config.algorithm.max_staleness
  if config.staleness_control.maximum:
    control = staleness_control.StalenessControl(
      config.staleness_control,
      found.host_state.get("staleness_control"),
      session.progress.note,
      oldest=0 if found.is_new else found.host_state["max_staleness"],
    )
    bound = control.bound
  buffer = buffer_lib.Buffer(config.algorithm.groups_per_step, bound)
  session.shutdown.guards(buffer)
  return buffer, control


def _prompts(
  setup: setup_lib.Setup, session: session_lib.Session
) -> tuple[prompts.PromptSource, prompts.PromptStream]:
  """Return the source of all prompts, and the stream of those to train on."""
  source = assembly.prompt_source(setup)
  stream = prompts.PromptStream(source, source_lib.Split.TRAIN)
  session.shutdown.closes(stream.close)
  if isinstance(setup.source, source_lib.Counted):
    for line in setup.source.describe():
      session.progress.note(line)
  return source, stream


def _client_requests(
  setup: setup_lib.Setup, session: session_lib.Session, given: given_lib.Given
) -> client_requests.ClientRequests | None:
  """Start the servers of a run, and return the queue of what clients ask."""
  if given.serving is None:
    return None
  note = session.progress.note
  front = front_lib.of_a_run(
    given.serving,
    setup.config,
    setup.model,
    setup.tokenizer,
    setup.pretrained,
    lambda: session.shutdown.supervisor.has_spawned(rollout_thread.NAME),
  )
  session.shutdown.stops(front.close, setup.config.run.join_timeout_s, note)
  front.start(note)
  note(f"serving the policy at {front.address}")
  return front.queue


def _books(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  given: given_lib.Given,
  found: resume.Found,
) -> tuple[
  metrics_lib.MetricsWriter,
  sampler_lib.Sampler,
  ledger_lib.Ledger,
  timing_record.TimingRecord,
]:
  """Open the metrics, the samples, the ledger and the timing record."""
  config, workdir = setup.config, session.workdir
  note, stored = session.progress.note, found.host_state
  writer = metrics_lib.MetricsWriter(
    workdir,
    session.side_outputs,
    assembly.make_wandb_log(config, workdir),
    note,
  )
  if not found.is_new:
    writer.restore(stored["metrics"])
  if config.run.sample_groups and not samples_lib.can_be_written():
    note(samples_lib.NOT_WRITTEN)
  sampler = sampler_lib.Sampler(
    workdir,
    num_groups=config.run.sample_groups,
    tokenizer=setup.tokenizer,
    answer_prefix=config.task.answer_prefix,
    side_outputs=session.side_outputs,
    first_step=found.first_step,
  )
  ledger = ledger_lib.Ledger(
    workdir / workdir_lib.LEDGER,
    ledger_lib.LedgerState(**stored.get("ledger", {})),
    on_untrained=sampler.add_untrained,
    note=note,
  )
  timing = timing_start.open_record(
    setup, workdir, given, stored, found.first_step, note
  )
  for book in (writer, sampler, ledger, timing):
    session.shutdown.closes(book.close)
  return writer, sampler, ledger, timing
