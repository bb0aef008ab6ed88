"""Generates recorded trajectories again, one version of the weights at a time.

What a trajectory consists of does not depend on when it was generated, but only
on the weights and on the caches with which it was continued. So a recorded
trajectory is cut into *stretches*. A stretch begins where a cache was made, and
ends where the next one was made or where the turn ended. All stretches of one
version are generated together, in any order, and the next version follows.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import dataclasses

import numpy as np

from jaxrl_async import types
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


class RewritingError(RuntimeError):
  """A recorded trajectory cannot be generated again; one line says why."""


class Rewritten:
  """A recorded member of a group as far as it has been generated again.

  Attributes:
    admission: of its group.
    branches: its trajectories, of which the last one may go on.
    is_done: whether its episode has ended.
  """

  def __init__(
    self,
    admission: types.Admission,
    prompt: types.Prompt,
    builds: Sequence[Sequence[types.CacheBuild]],
    environment: environment_lib.Environment,
    settings: coordinator_settings_lib.CoordinatorSettings,
    *,
    begun: Sequence[types.Trajectory] = (),
    events: Sequence[types.Event] = (),
    member: int,
  ):
    """Begin with the first prompt of the episode, or with what is written.

    Args:
      builds: the recorded caches of each branch, in order.
      environment: has the episode of this member.
      begun: what a checkpoint holds of the branches, if it does.
      events: the recorded calls of the episode.

    Raises:
      RewritingError: the record has no cache that continues what is written.
      EpisodeError: the episode failed.
    """
    self.admission = admission
    self.is_done = False
    self._settings = settings
    self._environment = environment
    limit = len(prompt.tokens) + settings.max_completion_tokens
    self._limit = min(limit, settings.max_tokens)
    self._episode = environment.open(
      prompt,
      key=(admission.index, member),
      limit=self._limit,
      recorded=begun,
      events=events,
    )
    answer = environment.settled(self._episode.begin())
    self._ends = answer.ends
    if begun and len(begun[0].tokens):
      self.branches = [dataclasses.replace(t, reward=None) for t in begun]
      self._continue(answer)
    else:
      assert answer.tokens is not None
      self.branches = [episode_lib.First(answer.tokens).trajectory(member)]
    self._of_branches = [*map(collections.deque, builds)]
    length = len(self.branches[-1].tokens)
    while self._builds and self._builds[0].length < length:
      self._builds.popleft()
    if not self.is_done:
      self._check_next()

  @property
  def _builds(self) -> collections.deque[types.CacheBuild]:
    """The recorded caches of the last branch, from its next stretch on."""
    number = len(self.branches) - 1
    if number < len(self._of_branches):
      return self._of_branches[number]
    return collections.deque()

  @property
  def version(self) -> int:
    """The version of the weights that its next stretch needs."""
    return self._builds[0].version

  @property
  def num_prefilled(self) -> int:
    """The number of tokens that were prefilled for its next stretch."""
    return self._builds[0].num_prefilled

  def sequence(
    self, tokenizer: tokenizer_lib.Tokenizer
  ) -> sequence_lib.Sequence:
    """Return a sequence that generates its next stretch."""
    settings = self._settings
    end = self._builds[1].length if len(self._builds) > 1 else self._limit
    turn = messages.Turn(
      admission=self.admission,
      trajectory=self.branches[-1],
      limit=min(end, self._limit),
      temperature=settings.temperature,
      stop=settings.stop,
      stop_token_ids=settings.stop_token_ids,
    ).until(self._ends)
    return replica_lib.sequence_of(turn, tokenizer)

  def take(self, sequence: sequence_lib.Sequence) -> None:
    """Take the stretch that was generated, and begin the next turn, if any.

    Raises:
      RewritingError: the trajectory goes on, and the record does not.
      EpisodeError: the episode failed.
    """
    last = self.branches[-1]
    begin = len(last.tokens)
    new = sequence.trajectory(begin)
    arrays = {
      name: np.concatenate([getattr(last, name), getattr(new, name)])
      for name in types.TOKEN_ARRAYS
    }
    last = self.branches[-1] = dataclasses.replace(
      last,
      **arrays,
      steered=(*last.steered, *new.steered),
      cache_builds=(*last.cache_builds, *new.cache_builds),
    )
    self._builds.popleft()
    reason = sequence.finish_reason
    is_cut = (
      reason is types.FinishReason.LENGTH
      and bool(self._builds)
      and self._builds[0].length == sequence.length
    )
    if not is_cut:
      last.finish_reason = reason
      answer = self._episode.send(episode_lib.last_completion(last))
      self._continue(self._environment.settled(answer))
    if not self.is_done:
      self._check_next()

  def _continue(self, answer: episode_lib.Answer) -> None:
    """Append the prompt of the next turn, if there is one, or end.

    The prompt is empty if the turn goes on.
    """
    last, self._ends = self.branches[-1], answer.ends
    if answer.tokens is None:
      self.is_done = True
    elif self._environment.may_go_on(self.branches, answer, self._limit):
      follows = episode_lib.followed(last, answer)
      if answer.is_anew:
        self.branches.append(follows)
      else:
        self.branches[-1] = follows
    else:
      last.finish_reason = types.FinishReason.LENGTH
      self.is_done = True
      self._episode.close()
    if self.is_done and (context := self._episode.context) is not None:
      # What is learned may depend on them (`types.learned`).
      first = dataclasses.replace(self.branches[0], events=context.events)
      self.branches[0] = first

  def _check_next(self) -> None:
    last = self.branches[-1]
    length = len(last.tokens)
    if not self._builds or self._builds[0].length != length:
      raise RewritingError(
        f"group {self.admission.index}, member {last.member} has {length}"
        " tokens, and the schedule says of no cache that continues them"
      )


class Rewriting:
  """Generates trajectories again, of the groups of a schedule.

  Invariant: a trajectory that is not done is in `_waiting`, under the version
  that its next stretch needs.

  Threads: one at a time.
  """

  def __init__(
    self,
    scheduler: scheduler_lib.Scheduler,
    tokenizer: tokenizer_lib.Tokenizer,
  ):
    """Prepare to generate trajectories; the scheduler must be idle."""
    self._scheduler = scheduler
    self._tokenizer = tokenizer
    sizes = scheduler.engine.sizes
    # A preemption would be a cache that the record does not have. So there is
    # always room for the longest sequences.
    self._most = sizes.num_slots + sizes.insert_rows
    if sizes.num_pages:
      self._most = max(1, sizes.num_pages // sizes.pages_per_slot)
    self._waiting: dict[int, list[Rewritten]] = collections.defaultdict(list)

  def add(self, trajectories: Iterable[Rewritten]) -> None:
    """Add trajectories, before any version that has to write them."""
    for one in trajectories:
      if not one.is_done:
        self._waiting[one.version].append(one)

  @property
  def num_tokens(self) -> int:
    """The tokens that have been generated."""
    return self._scheduler.stats.generated_tokens

  def write(
    self, params: decode_state_lib.EngineParams, version: int
  ) -> Iterator[int]:
    """Generate every stretch of a version, and yield tokens after each call.

    It is called for one version after the other.

    Raises:
      RewritingError: the record does not fit what is generated.
      EpisodeError: an episode failed.
    """
    ready = collections.deque(self._waiting.pop(version, ()))
    self._scheduler.adopt(params, version)
    running: dict[int, Rewritten] = {}
    while ready or running:
      while ready and len(running) < self._most:
        one = ready.popleft()
        sequence = one.sequence(self._tokenizer)
        self._scheduler.submit(sequence)
        running[id(sequence)] = one
        # What was fed through the decode program then is fed so again.
        sequence.num_prefilled = one.num_prefilled
      for sequence in self._scheduler.step():
        one = running.pop(id(sequence))
        one.take(sequence)
        if one.is_done:
          continue
        if one.version < version:
          member = one.branches[-1].member
          raise RewritingError(
            f"group {one.admission.index}, member {member} goes on with"
            f" version {one.version} after {version}"
          )
        waiting = (
          ready if one.version == version else self._waiting[one.version]
        )
        waiting.append(one)
      yield self.num_tokens
