"""The controller of a run on the virtual clock.

Buffer, ledger, coordinator, fleet or rollout worker, replicas, schedulers and
batch loader are the real ones, and so are the files of a checkpoint's groups.
Engines, the trainer, rewards, questions and the way of messages are models,
which take random times and have faults.
"""

import collections
from collections.abc import Generator
import itertools
import pathlib
import random

import jax

from jaxrl_async import types
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.rollout import worker as worker_lib
from jaxrl_async.run import checkpointing
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.training import batch_loader
from simulation import case as case_lib
from simulation import checkpoint as checkpoint_lib
from simulation import event_loop
from simulation import invariants as invariants_lib
from simulation import modelled_replica
from simulation import modelled_trainer
from simulation import surroundings
from simulation import watched_buffer

_LOOK_S = 0.3
_MOST_EVENTS = 100_000
# From the end of the trainer's process to the next one. No message takes so
# long.
_RESTART_S = 1.0
_MAX_STALENESS = 3
# A process that has started is given up if it is not attached after so long.
_START_S = 20.0

Batch = modelled_trainer.Batch


class World:
  """One run of a case: starts of the trainer, and replicas.

  Attributes:
    directory: for the ledger and the groups of the last checkpoint.
    faults: how often each kind of fault has happened.
    seen: how many trained groups were of interest, and why.
  """

  def __init__(self, case: case_lib.Case, directory: pathlib.Path):
    """Create a world; nothing happens before `run`.

    Args:
      case: what happens.
      directory: an empty one, or that of an earlier run.
    """
    self.case = case
    self.directory = directory
    self.loop = event_loop.Loop(random.Random(case.seed))
    self.faults: collections.Counter[str] = collections.Counter()
    self.seen: collections.Counter[str] = collections.Counter()
    self.processes: dict[int, modelled_replica.ReplicaProcess] = {}
    self.absence_s = {case.num_replicas - 1: case.late_s}
    self.checkpoint = checkpoint_lib.Checkpoint()
    outstanding_lib.write(directory, [])
    self._faults: dict[int, list[case_lib.Fault]] = {}
    for fault in case.faults:
      self._faults.setdefault(fault.step, []).append(fault)
    self.start: Start  # the present one, or the last one while there is none
    self._moved: tuple[object, float] = None, 0.0
    self._longest_stall_s = case.longest_wait_s(2)

  def run(self) -> int:
    """Run until all steps are trained, and return how many groups ended.

    Raises:
      Violation: an invariant does not hold.
    """
    self.start = Start(self, self.checkpoint)
    self.schedule_faults(0)
    try:
      while self.start.trainer.num_completed < self.case.num_steps:
        if not self.loop.step() or self.loop.num_events > _MOST_EVENTS:
          raise watched_buffer.Violation("deadlock", self.start.status())
        self._look_for_stall()
      self.start.check_balance()
      content = self.ledger_bytes()
      self.seen["overdue"] += content.count(invariants_lib.OVERDUE.encode())
      return self.start.invariants.check_ledger(
        content, self.start.buffer.state().next_index
      )
    finally:
      self.start.end()

  def ledger_bytes(self) -> bytes:
    """Return the content of the ledger."""
    return (self.directory / "ledger.jsonl").read_bytes()

  def schedule_faults(self, version: int) -> None:
    """Let the faults after a version happen, if it is the first time."""
    for fault in self._faults.pop(version, ()):
      self.loop.after(fault.delay_s, self._happen, fault)

  def _look_for_stall(self) -> None:
    """Check that tokens or versions still come."""
    moving = self.start.moving()
    if moving != self._moved[0]:
      self._moved = moving, self.loop.now
    elif self.loop.now - self._moved[1] > self._longest_stall_s:
      raise watched_buffer.Violation("deadlock", self.start.status())

  def _happen(self, fault: case_lib.Fault) -> None:
    """Let something go wrong."""
    place = fault.place
    if place is None:
      place = modelled_replica.newest(self.processes)
    process = self.processes.get(place)
    if fault.kind == "restart":
      if self.start.has_ended:
        return
      self.stop()
    elif fault.kind == "slow" and not self.case.is_fleet:
      self.start.pace = case_lib.SLOW
    elif fault.kind == "fail" and not self.case.is_fleet:
      modelled_replica.fail_next_call(self.start._worker.replica)
    elif process is None or process.is_dead:
      return
    elif fault.kind == "slow":
      process.pace = max(process.pace, case_lib.SLOW)
    elif fault.kind == "silence":
      longest = modelled_replica.MOST_SILENCE_S
      process.silence_s = self.loop.rng.uniform(
        modelled_replica.LEASE_S, longest
      )
    elif fault.kind == "fail":
      if not self.start.may_replicas_fail:
        return
      process.has_failed = True
    elif fault.kind == "hang":
      process.hang()
    else:
      if fault.kind == "leave":
        absence_s = modelled_replica.MOST_ABSENCE_S
        self.absence_s[place] = absence_s * self.loop.rng.random()
      process.die()
    self.faults[fault.kind] += 1

  def stop(self) -> None:
    """End the trainer's process; another one starts later."""
    self.start.end()
    if not self.case.survives:
      for process in self.processes.values():
        process.die()
      self.processes.clear()
    self.loop.after(_RESTART_S, self._restart)

  def _restart(self) -> None:
    self.start = Start(self, self.checkpoint)

  def launch(self, place: int) -> modelled_replica.Handle:
    """Start the replica of a place, or find the one that is there."""
    process = self.processes.get(place)
    if process is None or process.is_dead:
      process = modelled_replica.ReplicaProcess(self.loop, self.case)
      self.processes[place] = process
    start = self.start
    return modelled_replica.Handle(
      self.loop,
      self.case,
      process,
      absence_s=self.absence_s.pop(place, 0.0),
      wake=start.wake,
      has_ended=lambda: start.has_ended,
    )


class Start:
  """One start of the trainer's process, with all that lives in it.

  Attributes:
    has_ended: whether the process has ended.
    version: the newest version that was published.
    trainer: the loop that trains.
    pace: times as long as usual take the calls of a replica that is in it.
  """

  def __init__(self, world: World, checkpoint: checkpoint_lib.Checkpoint):
    """Continue from a checkpoint, and publish its version."""
    case, loop = world.case, world.loop
    self.world, self.case, self.loop = world, case, loop
    self.has_ended = False
    self.version = checkpoint.version
    self.pace = 1.0
    self._base_tokens = checkpoint.num_tokens
    self._rollout_process = (
      event_loop.Process(loop, self._fleet_turn, poll_s=_LOOK_S)
      if case.is_fleet
      else event_loop.Process(
        loop,
        self._worker_turn,
        is_looping=True,
        # The real one looks for groups that are overdue, and for questions.
        poll_s=_LOOK_S if case.max_group_s or case.eval_every else None,
      )
    )
    self._loader_process = event_loop.Process(loop, self._load)
    self._condition = loop.condition()  # of the buffer
    if case.is_fleet:
      # The real one looks every few milliseconds.
      self._condition.watch(self._rollout_process)
    groups = outstanding_lib.read(world.directory)
    self.buffer = self._make_buffer(checkpoint, groups)
    self.ledger = ledger_lib.Ledger(
      world.directory / "ledger.jsonl", checkpoint.ledger
    )
    self.stream = surroundings.Prompts(
      loop, checkpoint.num_prompts, case.no_prompt_frac, self.wake
    )
    self.coordinator = self._make_coordinator()
    self.coordinator.restore(checkpointing.running(groups))
    self.channel = surroundings.Channel(loop)
    self.rollout = self._make_rollout()
    self.invariants = invariants_lib.Invariants(
      self.buffer,
      self.coordinator,
      case.script,
      groups_per_step=case.groups_per_step,
      group_size=case.group_size,
      max_group_s=case.max_group_s,
      # In a long round of a worker not all seconds of a deadline count.
      most_group_s=(1 if case.is_fleet else 3) * case.max_group_s + 1,
      longest_wait_s=case.longest_wait_s,
      # Faults and cuts interrupt what is being written.
      is_whole=case.kv_on_adopt is sections.KvOnAdopt.WAIT
      and not case.faults
      and not case.is_exact,
      trained=checkpoint.trained,
      cuts=checkpoint.cuts,
    )
    steps = itertools.count(self.version)
    loader: batch_loader.BatchLoader[Batch] = batch_loader.BatchLoader(
      self.buffer,
      lambda groups: (next(steps), groups),
      first_step=self.version,
      end_step=case.num_steps,
      new_condition=loop.condition,
    )
    self._loading: Generator[None, None, None] = loader.waits()
    self.trainer = modelled_trainer.ModelledTrainer(
      loop,
      case,
      self,
      loader,
      self.invariants,
      first_step=self.version,
      seen=world.seen,
    )
    self.channel.publish(self.version)
    self.buffer.set_policy_version(self.version)
    for process in self._processes():
      process.wake()

  def _processes(self) -> tuple[event_loop.Process, ...]:
    return self._rollout_process, self.trainer.process, self._loader_process

  def _make_buffer(
    self,
    checkpoint: checkpoint_lib.Checkpoint,
    groups: list[outstanding_lib.OutstandingGroup],
  ) -> watched_buffer.WatchedBuffer:
    buffer = watched_buffer.WatchedBuffer(
      self.case.groups_per_step,
      self.case.max_staleness,
      clock=self.loop.seconds,
      new_condition=lambda: self._condition,
    )
    buffer.bounds.update(checkpoint.bounds)
    buffer.admitted_s |= {one.group.index: self.loop.now for one in groups}
    buffer.restore(
      checkpointing.buffer_state(
        groups,
        groups_per_step=self.case.groups_per_step,
        next_step=checkpoint.version,
        next_index=checkpoint.next_index,
      )
    )
    return buffer

  def _make_coordinator(self) -> coordinator_lib.Coordinator:
    case, loop = self.case, self.loop
    return coordinator_lib.Coordinator(
      coordinator_settings_lib.CoordinatorSettings(
        group_size=case.group_size,
        max_completion_tokens=case_lib.MAX_TOKENS,
        max_tokens=case_lib.MAX_TOKENS,
        num_slots=case.sizes.num_slots,
        temperature=1.0,
        filter_zero_std=True,
        reads_token_scores=False,
        max_failed_groups=1000,
        max_filtered_groups=1000,
        max_group_s=case.max_group_s,
      ),
      stream=self.stream,
      buffer=self.buffer,
      rewards=surroundings.Rewards(loop, case.script, case.reward_s, self.wake),
      ledger=self.ledger,
      busy=metrics_lib.BusyClock(seconds=loop.seconds),
      environment=environment_lib.Environment(case.script.episode),
      new_deadline=lambda timeout_s: supervisor_lib.Deadline(
        timeout_s, loop.seconds
      ),
    )

  def _make_rollout(self) -> rollout_side.RolloutSide:
    busy = metrics_lib.BusyClock(seconds=self.loop.seconds)
    if self.case.is_fleet:
      self._fleet = fleet_lib.Fleet(
        self.coordinator,
        self.world.launch,
        self.channel,
        num_replicas=self.case.num_replicas,
        replica_timeout_s=modelled_replica.LEASE_S,
        start_timeout_s=_START_S,
        hang_timeout_s=modelled_replica.HANG_S,
        busy=busy,
        note=lambda line: None,
        seconds=self.loop.seconds,
        poll_s=0.0,
      )
      return self._fleet
    self._worker = worker_lib.RolloutWorker(
      self.coordinator,
      modelled_replica.make_replica(
        self.loop, self.case, "replica 0", self.coordinator, self.channel, busy
      ),
    )
    return self._worker

  # -- what others ask ------------------------------------------------------

  @property
  def may_replicas_fail(self) -> bool:
    """Whether the run goes on if one fails; not before one has worked."""
    return self.has_ended or self._fleet._roster.may_fail

  def wake(self) -> None:
    """Wake the process that drives the rollout side."""
    self._rollout_process.wake()

  def end(self) -> None:
    """End the process of the trainer, with all its threads."""
    self.has_ended = True
    for process in self._processes():
      process.end()
    self.trainer.end()
    self._loading.close()
    self.ledger.close()

  def moving(self) -> tuple[object, ...]:
    """Return what changes as long as the run goes on."""
    return self.coordinator.recorded_tokens, self.version, id(self)

  def status(self) -> str:
    """Return what everything waits for."""
    state = self.buffer.state()
    finished = [group.admission for group in state.finished]
    return (
      f"step {self.version}; {self.rollout.status()}; next step"
      f" {state.next_step}, running {state.running}, finished {finished}"
    )

  # -- the processes --------------------------------------------------------

  def _fleet_turn(self) -> None:
    self._fleet.round()
    self._check_groups()
    members = self._fleet._members
    self.invariants.check_members(members)
    # With WAIT, slots are free on purpose until the last sequence has ended.
    self.invariants.check_replicas(
      members,
      self.world.processes,
      self.loop.now,
      looks_at_slots=self.case.kv_on_adopt is not sections.KvOnAdopt.WAIT,
    )

  def _worker_turn(self) -> float | None:
    try:
      has_stepped = self._worker.round()
    except jax.errors.JaxRuntimeError:
      self._end_with_engine()
      return None
    self._check_groups()
    replica = self._worker.replica
    self.invariants.check_room(replica)
    if self.case.kv_on_adopt is not sections.KvOnAdopt.WAIT:
      self.invariants.check_slots(
        replica,
        is_well=True,
        now_s=self.loop.now,
        grace_s=_LOOK_S + 2 * self.case.call_s * self.pace,
      )
    if has_stepped:
      return self.case.call_s * self.loop.rng.random() * self.pace
    is_done = replica.scheduler.is_idle and replica.version == self.version
    if is_done and self.invariants.can_get_group(replica.version):
      raise watched_buffer.Violation("slot", "the worker waits for admission")
    return None

  def _end_with_engine(self) -> None:
    """End after the engine has failed, if possible with a last checkpoint."""
    self.world.seen["an engine that failed"] += 1
    self._worker.abandon()
    if self.trainer.is_between_steps:
      self.save(self.version)
    self.world.stop()

  def _check_groups(self) -> None:
    self.invariants.check_groups(self.loop.now)
    if self._condition.has(self._loader_process):
      self.invariants.check_wakeup()

  def _load(self) -> None:
    next(self._loading, None)

  # -- a train step ---------------------------------------------------------

  def publish(self, version: int) -> None:
    """Publish a version; the bound may move."""
    rng = self.loop.rng
    if rng.random() < self.case.tune_frac:
      self.buffer.set_max_staleness(rng.randint(0, _MAX_STALENESS))
    self.version = version
    self.channel.publish(version)
    self.buffer.set_policy_version(version)

  def record(self, step: int, groups: list[types.RolloutGroup]) -> None:
    """Write down that groups were trained."""
    self.ledger.add_trained(groups, step=step, skipped_update=False)

  @property
  def questions(self) -> questions_lib.Questions:
    """Those of the coordinator."""
    return self.coordinator.questions

  def completed(self, version: int) -> None:
    """Let the faults of a train step happen."""
    self.world.schedule_faults(version)

  # -- the books ------------------------------------------------------------

  def check_balance(self) -> list[outstanding_lib.OutstandingGroup]:
    """Check that all tokens are accounted for; return outstanding groups."""
    groups = checkpointing.outstanding(self.buffer, self.rollout)
    state = self.ledger.state()
    try:
      ledger_lib.check_balance(
        generated=self._base_tokens + self.rollout.generated_tokens,
        trained=state.trained_tokens,
        filtered=state.filtered_tokens,
        failed=state.failed_tokens,
        in_flight=checkpointing.count_tokens(groups),
      )
    except RuntimeError as error:
      raise watched_buffer.Violation("balance", str(error)) from error
    return groups

  def save(self, version: int) -> None:
    """Take a checkpoint, which is a cut for this run too if it is exact."""
    if self.case.is_exact:
      self.rollout.cut(version)
    groups = self.check_balance()
    outstanding_lib.write(self.world.directory, groups)
    # A start from here is a cut, whether or not this run goes on with one.
    there = [one.group for one in groups]
    cuts = *self.invariants.cuts, invariants_lib.cut_at(version, there)
    if self.case.is_exact:
      self.invariants.cuts = list(cuts)
    self.world.checkpoint = checkpoint_lib.Checkpoint(
      version=version,
      next_index=self.buffer.state().next_index,
      ledger=self.ledger.state(),
      num_tokens=self._base_tokens + self.rollout.generated_tokens,
      num_prompts=self.stream.count,
      trained=frozenset(self.invariants.trained),
      bounds=tuple(self.buffer.bounds.items()),
      cuts=cuts,
    )
