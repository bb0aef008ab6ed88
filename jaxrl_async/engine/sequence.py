"""A trajectory being written, in host memory.

Everything written so far survives whatever happens on device: to continue
after an interruption, a preemption or a crash is to cache again what is there.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import sampling

# Told the tokens of each call in order; says how many of them belong to the
# completion (at least 1) once a stop string is there, else None.
StopCheck = Callable[[np.ndarray], int | None]


class Owner(NamedTuple):
  """Whom a sequence is written for: a name that can be sent and compared.

  Attributes:
    kind: what the number counts, so that those who share a scheduler do not
      take each other's numbers.
    number: of the owner. All its sequences are cancelled together.
  """

  kind: str
  number: int


class Sequence:
  """Growing arrays of one fixed capacity.

  Attributes:
    stream, group, member: what its randomness is a function of.
    limit: it ends when it has that many tokens.
    settings: how its tokens are drawn.
    stop: looks for stop strings in what is written.
    deadline: when pages run out, the latest deadline is preempted first.
    owner: whom it is written for; None is nobody who would cancel it.
    num_prefilled: how many of its tokens its cache was prefilled with; the
      others went through the decode program one by one.
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
  ):
    self.stream, self.group, self.member = stream, group, member
    self.settings = settings
    self.stop = stop
    self.limit = limit
    self.deadline = deadline
    self.owner = owner
    self.length = 0
    self.num_prefilled = 0
    self.tokens = np.zeros((limit,), np.int32)
    self.loss_mask = np.zeros((limit,), bool)
    self.behavior_logprobs = np.zeros((limit,), np.float32)
    self.policy_versions = np.full((limit,), -1, np.int32)
    self.finish_reason: types.FinishReason | None = None
    self.extend_prompt(prompt_tokens)

  def extend_prompt(self, tokens: Int[np.ndarray, "T"]) -> None:
    """Appends tokens the policy did not write."""
    end = self.length + len(tokens)
    self.tokens[self.length : end] = tokens
    self.length = end

  def resume(self, trajectory: types.Trajectory) -> None:
    """Takes over what was recorded of the tokens that it begins with."""
    n = len(trajectory.tokens)
    self.loss_mask[:n] = trajectory.loss_mask
    self.behavior_logprobs[:n] = trajectory.behavior_logprobs
    self.policy_versions[:n] = trajectory.policy_versions

  def append(
    self,
    tokens: Int[np.ndarray, "T"],
    logprobs: Float[np.ndarray, "T"],
    versions: Int[np.ndarray, "T"],
  ) -> None:
    """Appends tokens the policy wrote."""
    end = self.length + len(tokens)
    self.tokens[self.length : end] = tokens
    self.loss_mask[self.length : end] = True
    self.behavior_logprobs[self.length : end] = logprobs
    self.policy_versions[self.length : end] = versions
    self.length = end

  def describe(
    self, insertion: decode_state_lib.Insertion, i: int, eos: tuple[int, ...]
  ) -> None:
    """Fills in how the sequence is to be written.

    The caller fills in the rest: its ticket and pages, the slot where it goes,
    and the row that it was prefilled in.

    Args:
      insertion: with an unused entry.
      i: that entry.
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
    if self.num_prefilled < self.length:  # what is known is not drawn again
      rows.replay[i, : self.length] = self.written()
      rows.replay_lengths[i] = self.length

  def take(
    self, result: decode_state_lib.StepResult, slot: int, eos: tuple[int, ...]
  ) -> tuple[int, int]:
    """Takes over what a call wrote in its slot, up to a stop string.

    Sets `finish_reason` if that was its end.

    Args:
      result: of the call.
      slot: where it sat.
      eos: the engine's end tokens.

    Returns:
      How many tokens were written, and how many of them are kept.
    """
    new = np.flatnonzero(result.is_valid[slot])  # replayed ones are left out
    tokens = result.tokens[slot, new]
    kept = self.stop(tokens) if self.stop is not None and len(new) else None
    num_kept = len(new) if kept is None else kept
    self.append(
      tokens[:num_kept],
      result.logprobs[slot, new[:num_kept]],
      result.policy_versions[slot, new[:num_kept]],
    )
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
    """Tokens before the completion that is being written."""
    written = self.loss_mask[: self.length]
    if written.all():
      return 0
    return self.length - int((~written[::-1]).argmax())

  def written(self) -> np.ndarray:
    """All tokens that are there, the prompt's included; not a copy."""
    return self.tokens[: self.length]

  def trajectory(self) -> types.Trajectory:
    """A copy of what is there."""
    n = self.length
    return types.Trajectory(
      member=self.member,
      tokens=self.tokens[:n].copy(),
      loss_mask=self.loss_mask[:n].copy(),
      behavior_logprobs=self.behavior_logprobs[:n].copy(),
      policy_versions=self.policy_versions[:n].copy(),
      finish_reason=self.finish_reason,
    )
