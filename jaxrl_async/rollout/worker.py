"""The rollout worker: admits groups, writes them, has them scored.

One thread a worker. Its loop consumes prompts, new weights and finished
scores; it waits for admission (training is behind) or for weights; it is
unblocked by the buffer and the channel. Between two decode calls it looks for
newer weights, which is all there is to interruption.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import threading
import time
import traceback as traceback_lib

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import ledger as ledger_lib
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.data import prompts
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.serving import client_request
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

_IDLE_S = 0.005


class RewardError(RuntimeError):
  """Too many groups in a row failed, or none had rewards to learn from.

  Of failures the message holds the first traceback.
  """


class Running:
  """A group that has not reached the buffer: being written or scored."""

  def __init__(self, admission: buffer_lib.Admission, prompt: types.Prompt):
    self.admission = admission
    self.prompt = prompt
    self.turns: dict[int, episode_lib.Turns] = {}
    self.writing: dict[int, sequence_lib.Sequence] = {}
    self.finished: dict[int, types.Trajectory] = {}
    self.score: service_lib.ScoreHandle | None = None
    self.times_s: dict[str, float] = {}

  def group(self) -> types.RolloutGroup:
    """What is there now, members in order, partial ones included."""
    members = {m: s.trajectory() for m, s in self.writing.items()}
    members |= self.finished
    return types.RolloutGroup(
      index=self.admission.index,
      birth=self.admission.birth,
      deadline=self.admission.deadline,
      prompt=self.prompt,
      trajectories=[members[m] for m in sorted(members)],
      times_s=dict(self.times_s),
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkerSettings:
  """What a worker needs of the configuration.

  Attributes:
    max_filtered_groups: in a row, after which the run ends: nobody waits for
      the one group in so many that is not filtered.
  """

  group_size: int
  max_completion_tokens: int
  temperature: float
  filter_zero_std: bool
  max_failed_groups: int
  max_filtered_groups: int = 1_000


class RolloutWorker:
  """Drives one scheduler with training groups.

  Requests of clients, if there are any, are served by the same scheduler: fed
  before each step, told of what was written after it.

  Invariant: every group it has admitted is in exactly one place: in `_running`
  (being written or scored), or handed to the buffer, or ended in the ledger;
  all moves between them happen in the worker's thread.

  Threads: `run` belongs to the worker's thread, and so does every attribute
  while it runs. Others may call `paused`, `stop` and `status`; inside `paused`
  the worker stands between two decode calls and may be read and used.
  """

  def __init__(
    self,
    settings: WorkerSettings,
    *,
    scheduler: scheduler_lib.Scheduler,
    stream: prompts.PromptStream,
    buffer: buffer_lib.Buffer,
    channel: weight_transfer.WeightChannel,
    rewards: service_lib.RewardService,
    ledger: ledger_lib.Ledger,
    tokenizer: tokenizer_lib.Tokenizer,
    busy: metrics_lib.BusyClock,
    episode: episode_lib.Episode = episode_lib.single_turn,
    on_adopt: Callable[[int], None] = lambda version: None,
    requests: requests_lib.RequestQueue | None = None,
  ):
    self.settings = settings
    self.scheduler = scheduler
    self.stream = stream
    self.wait_for_admission_s = 0.0
    self.adopt_s = 0.0
    self.served_tokens = 0  # of the scheduler's, those written for requests
    self.group_tokens = 0  # and the others, as of the last step
    self._requests = requests
    self._buffer = buffer
    self._channel = channel
    self._rewards = rewards
    self._ledger = ledger
    self._tokenizer = tokenizer
    self._busy = busy
    self._episode = episode
    self._on_adopt = on_adopt
    self._running: dict[int, Running] = {}
    self._failures: list[str] = []  # of the last groups in a row
    self._num_filtered = 0  # since the last group for the buffer
    self._status = "not started", time.perf_counter()
    self._gate = threading.Condition()
    self._num_pausers = 0
    self._is_parked = False
    self._is_stopping = False
    self._has_ended = False

  # -- other threads --------------------------------------------------------

  def status(self) -> str:
    """What the worker is doing, for the stall report."""
    text, since_s = self._status
    return (
      f"rollout worker: {text} since {time.perf_counter() - since_s:.1f} s,"
      f" holding version {self.scheduler.version},"
      f" {len(self._running)} groups running"
    )

  def _show(self, status: str) -> None:
    if status != self._status[0]:
      self._status = status, time.perf_counter()

  def stop(self) -> None:
    """Ends `run` at the next call boundary."""
    with self._gate:
      self._is_stopping = True
      self._gate.notify_all()

  @contextlib.contextmanager
  def paused(self, timeout_s: float):
    """Holds the worker between two decode calls.

    Raises:
      TimeoutError: it did not get there in time.
    """
    with self._gate:
      self._num_pausers += 1
    try:
      with self._gate:
        deadline = supervisor_lib.Deadline(timeout_s)
        while not (self._is_parked or self._has_ended):
          if (wait_s := deadline.next_wait_s()) == 0:
            raise TimeoutError(f"no pause in {timeout_s} s; {self.status()}")
          self._gate.wait(wait_s)
      yield
    finally:
      with self._gate:
        self._num_pausers -= 1
        self._gate.notify_all()

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Copies of the groups being written or scored. Only while paused."""
    return {index: r.group() for index, r in self._running.items()}

  def restore(
    self, groups: list[tuple[buffer_lib.Admission, types.RolloutGroup]]
  ) -> None:
    """Takes up groups of a checkpoint, partial trajectories included.

    Call it before `run`.
    """
    for admission, group in groups:
      running = Running(admission, group.prompt)
      running.times_s = dict(group.times_s)
      self._running[admission.index] = running
      try:
        for trajectory in group.trajectories:
          self._restore_member(running, trajectory)
      except episode_lib.EpisodeError as error:
        for trajectory in group.trajectories:  # the ledger counts all tokens
          if trajectory.member not in running.writing:
            running.finished[trajectory.member] = trajectory
        self._fail_episode(running, error)
      else:
        self._score_if_done(running)

  # -- the worker's thread --------------------------------------------------

  def run(self) -> None:
    """Generates until stopped; a closed buffer ends it without an error."""
    ended_by = client_request.RequestError.FAILED
    try:
      while self._pass_gate():
        self._adopt()
        self._collect_scores()
        if self._requests is not None:  # before groups take the free slots
          self._requests.feed(self.scheduler, self._share_of_requests())
        self._admit()
        # After a resume there is work before there are weights.
        if self.scheduler.is_idle or self.scheduler.version < 0:
          self._wait()
        else:
          self._show("decoding")
          ended = self.scheduler.step()
          if self._requests is not None:
            self._requests.deliver(ended)
            self.served_tokens = self._requests.num_written()
          written = self.scheduler.stats.generated_tokens
          self.group_tokens = written - self.served_tokens
          for sequence in ended:
            if isinstance(sequence.owner, Running):
              self._advance(sequence)
      ended_by = client_request.RequestError.SHUT_DOWN
    except buffer_lib.BufferClosed:
      ended_by = client_request.RequestError.SHUT_DOWN
    finally:
      if self._requests is not None:
        self._requests.close(ended_by)
      with self._gate:
        self._has_ended = True
        self._show("ended")
        self._gate.notify_all()

  def _share_of_requests(self) -> int:
    """Half of the slots: however many clients there are, training goes on."""
    return max(1, self.scheduler.engine.sizes.num_slots // 2)

  def _pass_gate(self) -> bool:
    with self._gate:
      while self._num_pausers and not self._is_stopping:
        self._is_parked = True
        self._show("paused")
        self._gate.notify_all()
        self._gate.wait()
      self._is_parked = False
      return not self._is_stopping

  def _adopt(self) -> None:
    version = self.scheduler.version
    if self._channel.newest_version() <= version:
      return
    self._show("adopting")
    start_s = time.perf_counter()
    adopted = self._channel.adopt(version)
    if adopted is None:
      return
    weights, version = adopted
    params = self.scheduler.engine.load_params(weights, version)
    self.scheduler.adopt(params, version)
    self.adopt_s += time.perf_counter() - start_s
    self._on_adopt(version)

  def _admit(self) -> None:
    if self.scheduler.version < 0:
      return
    while self.scheduler.has_room and self.stream.is_ready():
      admission = self._buffer.try_admit(self.scheduler.version)
      if admission is None:
        return
      self._start(Running(admission, self.stream.next()))

  def _wait(self) -> None:
    """Nothing to decode: wait for admission, weights or scores."""
    start_s = time.perf_counter()
    version = self.scheduler.version
    seen = self._buffer.policy_version
    if version >= 0 and not self.stream.is_ready():
      self._show("waiting for a question")
      self.stream.is_ready(timeout_s=_IDLE_S)
      return
    is_scoring = any(r.score is not None for r in self._running.values())
    is_short = is_scoring or self._requests is not None
    timeout_s = _IDLE_S if is_short else 10 * _IDLE_S
    if version < seen:
      self._show(f"waiting for weights of version {seen}")
      self._channel.wait_for_version(version, timeout_s)
    else:
      self._show("waiting for admission or scores")
      self._buffer.wait_for_admission(version, seen, timeout_s)
    if not is_scoring:
      self.wait_for_admission_s += time.perf_counter() - start_s

  def _start(self, running: Running) -> None:
    running.times_s["admitted"] = self._busy.now()
    self._running[running.admission.index] = running
    try:
      for member in range(self.settings.group_size):
        self._start_member(running, member)
    except episode_lib.EpisodeError as error:
      self._fail_episode(running, error)

  def _start_member(self, running: Running, member: int) -> None:
    turns = self._episode(running.prompt)
    running.turns[member] = turns
    tokens = episode_lib.advance(turns, None)
    assert tokens is not None
    limit = self._limit(running)
    if len(tokens) >= limit:
      raise episode_lib.EpisodeError(
        f"its first turn of {len(tokens)} tokens leaves nothing of {limit}"
      )
    self._submit(running, self._sequence(running, member, tokens))

  def _limit(self, running: Running) -> int:
    limit = len(running.prompt.tokens) + self.settings.max_completion_tokens
    return min(limit, self.scheduler.engine.sizes.cache_tokens)

  def _sequence(self, running: Running, member: int, tokens):
    return sequence_lib.Sequence(
      tokens,
      limit=self._limit(running),
      stream=sampling.Stream.TRAIN,
      group=running.admission.index,
      member=member,
      settings=sampling.SamplingSettings(temperature=self.settings.temperature),
      deadline=running.admission.deadline,
      owner=running,
    )

  def _submit(self, running: Running, sequence) -> None:
    running.writing[sequence.member] = sequence
    self.scheduler.submit(sequence)

  def _restore_member(
    self, running: Running, trajectory: types.Trajectory
  ) -> None:
    """Takes up one member: finished, in the middle, or between two turns."""
    member = trajectory.member
    turns = self._episode(running.prompt)
    running.turns[member] = turns
    pending = episode_lib.replay(turns, trajectory)
    if pending is None:
      running.finished[member] = dataclasses.replace(trajectory, reward=None)
      return
    n = len(trajectory.tokens)
    # As in `_advance`; the limit may be a lower one than it was written under.
    if n + len(pending) >= self._limit(running):
      running.finished[member] = dataclasses.replace(
        trajectory, finish_reason=types.FinishReason.LENGTH, reward=None
      )
      return
    sequence = self._sequence(running, member, trajectory.tokens)
    sequence.loss_mask[:n] = trajectory.loss_mask
    sequence.behavior_logprobs[:n] = trajectory.behavior_logprobs
    sequence.policy_versions[:n] = trajectory.policy_versions
    sequence.extend_prompt(pending)
    self._submit(running, sequence)

  def _advance(self, sequence: sequence_lib.Sequence) -> None:
    """A sequence ended its turn: tell its episode, go on or finish."""
    running = sequence.owner
    assert isinstance(running, Running)
    if self._running.get(running.admission.index) is not running:
      return  # its group failed meanwhile
    written = sequence.loss_mask[: sequence.length]
    start = sequence.length - int((~written[::-1]).argmax())
    try:
      more = episode_lib.advance(
        running.turns[sequence.member],
        sequence.tokens[start : sequence.length].copy(),
      )
    except episode_lib.EpisodeError as error:
      self._fail_episode(running, error)
      return
    if more is not None and sequence.length + len(more) < sequence.limit:
      sequence.extend_prompt(more)
      sequence.finish_reason = None
      self.scheduler.submit(sequence)
      return
    if more is not None:
      sequence.finish_reason = types.FinishReason.LENGTH
    del running.writing[sequence.member]
    running.finished[sequence.member] = sequence.trajectory()
    self._score_if_done(running)

  def _score_if_done(self, running: Running) -> None:
    if running.writing or running.score is not None:
      return
    running.times_s["generated"] = self._busy.now()
    completions = [
      completion_lib.of_trajectory(trajectory, self._tokenizer)
      for _, trajectory in sorted(running.finished.items())
    ]
    running.score = self._rewards.submit(running.prompt.item, completions)

  def _collect_scores(self) -> None:
    scored = [
      r
      for r in self._running.values()
      if r.score is not None and r.score.done()
    ]
    for running in scored:
      self._finish(running)

  def _finish(self, running: Running) -> None:
    assert running.score is not None
    outcome = running.score.result()
    if isinstance(outcome, service_lib.RewardFailure):
      self._fail(running, outcome.reason, outcome.traceback)
      return
    self._failures.clear()
    running.times_s["scored"] = self._busy.now()
    group = running.group()
    for trajectory, reward in zip(group.trajectories, outcome, strict=True):
      trajectory.reward = reward
    index = running.admission.index
    del self._running[index]
    if self.settings.filter_zero_std and types.teach_nothing(outcome):
      self._ledger.add_filtered(group)
      self._buffer.drop(index)
      self._num_filtered += 1
      if self._num_filtered >= self.settings.max_filtered_groups:
        raise RewardError(
          f"{self._num_filtered} groups in a row had equal rewards and were"
          " left out (algorithm.filter_zero_std); the last reward was"
          f" {outcome[0].score:g}: the questions are too easy or too hard"
        )
    else:
      self._num_filtered = 0
      self._buffer.put(group)

  def _fail_episode(
    self, running: Running, error: episode_lib.EpisodeError
  ) -> None:
    text = "".join(traceback_lib.format_exception(error.__cause__ or error))
    self._fail(running, f"episode: {error}", text)

  def _fail(self, running: Running, reason: str, traceback: str) -> None:
    self.scheduler.cancel(running)
    for sequence in running.writing.values():
      sequence.finish_reason = types.FinishReason.ABORTED
    index = running.admission.index
    del self._running[index]
    self._ledger.add_failed(running.group(), reason)
    self._buffer.drop(index)
    self._failures.append(f"group {index}: {reason}\n{traceback}".rstrip())
    if len(self._failures) >= self.settings.max_failed_groups:
      raise RewardError(
        f"{len(self._failures)} groups in a row failed"
        f" (task.max_failed_groups); the first: {self._failures[0]}"
      )
