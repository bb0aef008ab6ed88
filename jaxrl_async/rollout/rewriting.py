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
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


class RewritingError(RuntimeError):
  """A recorded trajectory cannot be generated again; one line says why."""


class Rewritten:
  """A recorded trajectory as far as it has been generated again.

  Attributes:
    admission: of its group.
    trajectory: what there is.
    is_done: whether its episode has ended.
  """

  def __init__(
    self,
    admission: types.Admission,
    prompt: types.Prompt,
    builds: Sequence[types.CacheBuild],
    episode: episode_lib.Turns,
    settings: coordinator_settings_lib.CoordinatorSettings,
    *,
    begun: types.Trajectory | None = None,
    member: int,
  ):
    """Begin with the first prompt of the episode, or with what is written.

    Args:
      builds: the recorded caches, in order.
      episode: of this member, not started.
      begun: what a checkpoint holds of the trajectory, if it does.

    Raises:
      RewritingError: the record has no cache that continues what is written.
      EpisodeError: the episode failed.
    """
    self.admission = admission
    self.is_done = False
    self._settings = settings
    self._episode = episode
    limit = len(prompt.tokens) + settings.max_completion_tokens
    self._limit = min(limit, settings.max_tokens)
    if begun is None:
      tokens = episode_lib.advance(episode, None)
      assert tokens is not None
      self.trajectory = episode_lib.First(tokens).trajectory(member)
    else:
      pending = episode_lib.replay(episode, begun)
      self.trajectory = dataclasses.replace(begun, reward=None)
      self._continue(pending)
    length = len(self.trajectory.tokens)
    self._builds = collections.deque(b for b in builds if b.length >= length)
    if not self.is_done:
      self._check_next()

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
      trajectory=self.trajectory,
      limit=min(end, self._limit),
      temperature=settings.temperature,
      stop=settings.stop,
      stop_token_ids=settings.stop_token_ids,
    )
    return replica_lib.sequence_of(turn, tokenizer)

  def take(self, sequence: sequence_lib.Sequence) -> None:
    """Take the stretch that was generated, and begin the next turn, if any.

    Raises:
      RewritingError: the trajectory goes on, and the record does not.
      EpisodeError: the episode failed.
    """
    begin = len(self.trajectory.tokens)
    new = sequence.trajectory(begin)
    arrays = {
      name: np.concatenate([getattr(self.trajectory, name), getattr(new, name)])
      for name in types.TOKEN_ARRAYS
    }
    self.trajectory = dataclasses.replace(
      self.trajectory,
      **arrays,
      cache_builds=(*self.trajectory.cache_builds, *new.cache_builds),
    )
    self._builds.popleft()
    reason = sequence.finish_reason
    is_cut = (
      reason is types.FinishReason.LENGTH
      and bool(self._builds)
      and self._builds[0].length == sequence.length
    )
    if not is_cut:
      self.trajectory.finish_reason = reason
      self._continue(
        episode_lib.advance(
          self._episode, episode_lib.last_completion(self.trajectory)
        )
      )
    if not self.is_done:
      self._check_next()

  def _continue(self, prompt: np.ndarray | None) -> None:
    """Append the prompt of the next turn, if there is one, or end.

    The prompt is empty if the turn goes on.
    """
    if prompt is None:
      self.is_done = True
    elif len(self.trajectory.tokens) + len(prompt) < self._limit:
      self.trajectory = episode_lib.extend(self.trajectory, prompt)
    else:
      self.trajectory.finish_reason = types.FinishReason.LENGTH
      self.is_done = True

  def _check_next(self) -> None:
    length = len(self.trajectory.tokens)
    if not self._builds or self._builds[0].length != length:
      raise RewritingError(
        f"group {self.admission.index}, member {self.trajectory.member} has"
        f" {length} tokens, and the schedule says of no cache that continues"
        " them"
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
          raise RewritingError(
            f"group {one.admission.index}, member {one.trajectory.member} goes"
            f" on with version {one.version} after {version}"
          )
        waiting = (
          ready if one.version == version else self._waiting[one.version]
        )
        waiting.append(one)
      yield self.num_tokens
