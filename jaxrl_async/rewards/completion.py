"""Conversion of trajectories to the `Completion`s that scorers get.

The coordinator packs the tokens of a group (`pack`), and the process that
scores the group turns them into text (`of_group`). Text for people is made
where it is shown, with `of_trajectory`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

from jaxtyping import Bool, Int32
import numpy as np

from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.types import Completion, FinishReason, Trajectory, Turn


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unscored:
  """N finished trajectories with T tokens in all, end to end.

  Attributes:
    lengths: number of tokens of each trajectory.
    loss_mask: True for tokens that the policy generated.
    rewards: what episodes gave for turns, of each trajectory by turn; () if
      none gave any.
    parts: of these rewards, of each trajectory by name; () if none gave any.
  """

  lengths: tuple[int, ...]
  rewards: tuple[dict[int, float], ...] = ()
  parts: tuple[dict[str, float], ...] = ()
  finish_reasons: tuple[FinishReason, ...]
  tokens: Int32[np.ndarray, "T"]
  loss_mask: Bool[np.ndarray, "T"]


def pack(trajectories: Sequence[Trajectory]) -> Unscored:
  """Return what scorers are shown of these trajectories.

  Raises:
    ValueError: a trajectory has not ended.
  """
  reasons = []
  for trajectory in trajectories:
    if trajectory.finish_reason is None:
      raise ValueError(f"trajectory {trajectory.member} has not ended")
    reasons.append(trajectory.finish_reason)
  empty = np.zeros(0, np.int32), np.zeros(0, bool)
  has_events = any(t.events for t in trajectories)
  return Unscored(
    lengths=tuple([len(t.tokens) for t in trajectories]),
    finish_reasons=tuple(reasons),
    rewards=tuple([t.turn_rewards() for t in trajectories]) * has_events,
    parts=tuple([t.reward_parts() for t in trajectories]) * has_events,
    tokens=np.concatenate([empty[0], *[t.tokens for t in trajectories]]),
    loss_mask=np.concatenate([empty[1], *[t.loss_mask for t in trajectories]]),
  )


def of_group(
  unscored: Unscored, tokenizer: tokenizer_lib.Tokenizer
) -> list[Completion]:
  """Decode the trajectories of a group, most of whose prompts agree."""
  prompts: dict[bytes, str] = {}

  def of_prompt(tokens: np.ndarray) -> str:
    key = tokens.tobytes()
    if key not in prompts:
      prompts[key] = tokenizer.decode(tokens)
    return prompts[key]

  found, start = [], 0
  nothing = ({},) * len(unscored.lengths)
  for length, reason, rewards, of_rewards in zip(
    unscored.lengths,
    unscored.finish_reasons,
    unscored.rewards or nothing,
    unscored.parts or nothing,
    strict=True,
  ):
    part = slice(start, start + length)
    tokens, mask = unscored.tokens[part], unscored.loss_mask[part]
    found.append(
      dataclasses.replace(
        _completion(tokens, mask, reason, tokenizer, of_prompt, rewards),
        parts=of_rewards,
      )
    )
    start += length
  return found


def of_trajectory(
  trajectory: Trajectory, tokenizer: tokenizer_lib.Tokenizer
) -> Completion:
  """Decode a finished trajectory, without the answer.

  A turn is a run of tokens with a False `loss_mask` and the following run of
  tokens with a True one.

  Raises:
    ValueError: the trajectory has not ended.
  """
  (found,) = of_group(pack([trajectory]), tokenizer)
  return found


def _completion(
  tokens: Int32[np.ndarray, "T"],
  mask: Bool[np.ndarray, "T"],
  finish_reason: FinishReason,
  tokenizer: tokenizer_lib.Tokenizer,
  of_prompt: Callable[[np.ndarray], str],
  rewards: Mapping[int, float],
) -> Completion:
  written = tokens[mask]
  text = tokenizer.decode(written)
  begins = np.flatnonzero(~mask & np.append(True, mask[:-1]))
  turns = []
  # An episode that failed early has shown nothing, and there is no turn.
  ends = np.append(begins, len(tokens))[1:]
  for first, end in zip(begins, ends, strict=True):
    middle = first + int((~mask[first:end]).sum())
    turns.append(
      Turn(
        prompt=of_prompt(tokens[first:middle]),
        # With a single turn, its completion is the text decoded above.
        completion=text
        if len(begins) == 1
        else tokenizer.decode(tokens[middle:end]),
        num_tokens=int(end - middle),
        reward=rewards.get(len(turns), 0.0),
      )
    )
  return Completion(
    text=text,
    turns=tuple(turns),
    tokens=written,
    finish_reason=finish_reason,
  )
