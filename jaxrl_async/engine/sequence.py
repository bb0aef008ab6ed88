"""A trajectory that is being generated, in host memory.

All tokens read so far are kept, whatever happens on the device. To continue
after an interruption, a preemption or a crash, these tokens are cached again.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import sampling

# Takes the new tokens of each call, in order. Once there is a stop string it
# returns how many of these tokens belong to the completion (at least 1). Until
# then it returns None.
StopCheck = Callable[[np.ndarray], int | None]


@runtime_checkable
class Guide(Protocol):
  """Decides which token a sequence may have next, from those it has.

  Attributes:
    error: why it can decide nothing more, or "".
  """

  @property
  def error(self) -> str: ...

  def allow(self, row: Int[np.ndarray, "W"]) -> None:
    """Set the bits of the tokens that are allowed, and no others.

    At least one is allowed.
    """

  def take(self, tokens: Int[np.ndarray, "T"]) -> None:
    """Take the tokens that were drawn since the last call."""


class Owner(NamedTuple):
  """The owner of sequences: a name that can be sent and compared.

  Attributes:
    kind: what the number counts. It keeps apart the owners of different kinds
      that share a scheduler.
    number: the owner's number. All sequences of an owner are cancelled
      together.
  """

  kind: str
  number: int


class Lineage(NamedTuple):
  """What cached keys and values depend on, besides their tokens.

  Attributes:
    adapter: number of the adapter that they were made with.
    version: sequences that began with other weights have another lineage. It
      is the current version for all sequences whose caches are of it alone.
  """

  adapter: int = 0
  version: int = 0


class Sequence:
  """The tokens of a sequence and what is recorded for each of them.

  Attributes:
    stream, group, member: determine the sequence's random numbers, together
      with the seed of the run.
    settings: how its tokens are drawn.
    stop: looks for stop strings in the completion.
    guide: decides which tokens may be drawn; None allows all.
    limit: number of tokens at which the sequence ends.
    deadline: when pages run out, the sequence with the latest deadline is
      preempted first.
    owner: for whom it is generated; None if no owner may cancel it.
    adapter: number of the adapter that generates it, if the model has a stack.
    length: number of tokens so far. The arrays below have a fixed capacity of
      `limit` tokens.
    num_prefilled: number of its tokens that are cached by prefill. The others
      go through the decode program one by one.
    tokens: prompt and completion.
    loss_mask: True for the tokens that the policy wrote.
    behavior_logprobs: logprobs of these tokens when they were drawn.
    policy_versions: version of the weights that drew them; -1 for other tokens.
    finish_reason: why the completion ended; None while it has not.
    steered: positions of the tokens that were drawn from another distribution
      than the policy's, because of a guide.
    cache_builds: how its caches were made, by increasing length.
    began: version of the weights that made the first cache from which a token
      was drawn, in an earlier turn if there was one; -1 if no token was drawn.
    num_cached: number of its tokens that its first prefill did not compute,
      because they were in kept pages; None before this prefill.
  """

  def __init__(
    self,
    prompt_tokens: np.ndarray,
    *,
    limit: int,
    stream: sampling.Stream,
    group: int,
    member: int,
    settings: sampling.SamplingSettings,
    stop: StopCheck | None = None,
    deadline: int = 0,
    owner: Owner | None = None,
    adapter: int = 0,
    guide: Guide | None = None,
  ):
    """Create a sequence that consists of its prompt, of at most `limit` tokens.

    The other arguments are the attributes of these names.
    """
    self.stream, self.group, self.member = stream, group, member
    self.settings = settings
    self.stop = stop
    self.guide = guide
    self.limit = limit
    self.deadline = deadline
    self.owner = owner
    self.adapter = adapter
    self.length = 0
    self.num_prefilled = 0
    self.tokens = np.zeros((limit,), np.int32)
    self.loss_mask = np.zeros((limit,), bool)
    self.behavior_logprobs = np.zeros((limit,), np.float32)
    self.policy_versions = np.full((limit,), -1, np.int32)
    self.finish_reason: types.FinishReason | None = None
    self.steered: list[int] = []
    self.cache_builds: list[types.CacheBuild] = []
    self.began = -1
    self.num_cached: int | None = None
    self.extend_prompt(prompt_tokens)

  def extend_prompt(self, tokens: Int[np.ndarray, "T"]) -> None:
    """Append tokens that the policy did not write."""
    end = self.length + len(tokens)
    self.tokens[self.length : end] = tokens
    self.length = end

  def resume(self, trajectory: types.Trajectory) -> None:
    """Copy what a trajectory recorded for the tokens this sequence begins with.

    The tokens themselves must already be there.
    """
    n = len(trajectory.tokens)
    self.loss_mask[:n] = trajectory.loss_mask
    self.behavior_logprobs[:n] = trajectory.behavior_logprobs
    self.policy_versions[:n] = trajectory.policy_versions
    self.steered = list(trajectory.steered)
    builds = trajectory.cache_builds
    if builds and trajectory.loss_mask.any():
      self.began = builds[0].version

  def record_cache(self, version: int) -> None:
    """Record that its tokens so far are cached with a version of the weights.

    A cache from which nothing was drawn is forgotten.
    """
    builds = self.cache_builds
    while builds and builds[-1].length >= self.length:
      builds.pop()
    builds.append(types.CacheBuild(self.length, self.num_prefilled, version))

  def append(
    self,
    tokens: Int[np.ndarray, "T"],
    logprobs: Float[np.ndarray, "T"],
    versions: Int[np.ndarray, "T"],
  ) -> None:
    """Append tokens that the policy wrote, with their logprobs and versions."""
    end = self.length + len(tokens)
    self.tokens[self.length : end] = tokens
    self.loss_mask[self.length : end] = True
    self.behavior_logprobs[self.length : end] = logprobs
    self.policy_versions[self.length : end] = versions
    self.length = end

  def describe(
    self, insertion: decode_state_lib.Insertion, i: int, eos: tuple[int, ...]
  ) -> None:
    """Fill in an entry of an insertion: how the sequence is to be generated.

    The caller fills in the rest: the ticket and the pages, the slot, and the
    row in which the sequence was prefilled.

    Args:
      insertion: an insertion with an unused entry.
      i: index of that entry.
      eos: the engine's end tokens.
    """
    insertion.streams[i] = self.stream
    insertion.groups[i] = self.group
    insertion.members[i] = self.member
    settings, rows = self.settings, insertion.settings
    rows.limits[i] = self.limit
    rows.temperature[i] = settings.temperature
    rows.top_k[i] = settings.top_k
    rows.top_p[i] = settings.top_p
    rows.min_p[i] = settings.min_p
    rows.min_lengths[i] = self.turn_start + settings.min_tokens
    ends = () if settings.ignore_eos else eos
    ends += settings.end_tokens
    rows.end_tokens[i, : len(ends)] = ends
    if rows.adapters is not None:
      rows.adapters[i] = self.adapter
    if self.num_prefilled < self.length:  # known tokens are not drawn again
      rows.replay[i, : self.length] = self.written()
      rows.replay_lengths[i] = self.length

  def take(
    self,
    result: decode_state_lib.StepResult,
    slot: int,
    eos: tuple[int, ...],
    decode_step: int,
  ) -> tuple[int, int]:
    """Append what a call generated in the sequence's slot, up to a stop string.

    If the sequence ended, `finish_reason` is set.

    Args:
      result: result of the call.
      slot: the slot that the sequence was in.
      eos: the engine's end tokens.
      decode_step: number of decode steps that the engine had made before it.

    Returns:
      The number of tokens that were drawn, and the number of them that were
      kept.
    """
    builds = self.cache_builds
    if builds[-1].decode_step < 0:
      builds[-1] = builds[-1]._replace(decode_step=decode_step)
    new = np.flatnonzero(result.is_valid[slot])  # without replayed tokens
    if self.began < 0 and len(new):
      self.began = builds[0].version
    tokens = result.tokens[slot, new]
    kept = self.stop(tokens) if self.stop is not None and len(new) else None
    num_kept = len(new) if kept is None else kept
    if result.is_steered is not None:
      (places,) = result.is_steered[slot, new[:num_kept]].nonzero()
      self.steered += (self.length + places).tolist()
    self.append(
      tokens[:num_kept],
      result.logprobs[slot, new[:num_kept]],
      result.policy_versions[slot, new[:num_kept]],
    )
    if self.guide is not None and num_kept:
      self.guide.take(tokens[:num_kept])
    if kept is not None:
      self.finish_reason = types.FinishReason.STOP
    elif result.has_ended[slot]:
      last = int(self.tokens[self.length - 1])
      if last in eos and not self.settings.ignore_eos:
        self.finish_reason = types.FinishReason.EOS
      elif last in self.settings.end_tokens:
        self.finish_reason = types.FinishReason.STOP
      else:
        self.finish_reason = types.FinishReason.LENGTH
    return len(new), num_kept

  @property
  def turn_start(self) -> int:
    """The number of tokens before the completion that is being generated."""
    written = self.loss_mask[: self.length]
    if written.all():
      return 0
    return self.length - int((~written[::-1]).argmax())

  def written(self) -> np.ndarray:
    """Return all tokens so far, including the prompt, without a copy."""
    return self.tokens[: self.length]

  def trajectory(self, begin: int = 0) -> types.Trajectory:
    """Return a copy of what is there so far, as a trajectory.

    Args:
      begin: number of tokens to leave out at the beginning.
    """
    part = slice(begin, self.length)
    return types.Trajectory(
      member=self.member,
      **{name: getattr(self, name)[part].copy() for name in types.TOKEN_ARRAYS},
      finish_reason=self.finish_reason,
      steered=tuple(at for at in self.steered if at >= begin),
      cache_builds=tuple(b for b in self.cache_builds if b.length >= begin),
    )
