"""Conversion of a trajectory to the `Completion` that a scorer gets."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.types import Completion, Trajectory, Turn


def of_group(
  trajectories: Sequence[Trajectory], tokenizer: tokenizer_lib.Tokenizer
) -> list[Completion]:
  """Decode the finished trajectories of a group, most of whose prompts agree.

  Raises:
    ValueError: a trajectory has not ended.
  """
  prompts: dict[bytes, str] = {}

  def of_prompt(tokens: np.ndarray) -> str:
    key = tokens.tobytes()
    if key not in prompts:
      prompts[key] = tokenizer.decode(tokens)
    return prompts[key]

  return [_of_trajectory(t, tokenizer, of_prompt) for t in trajectories]


def of_trajectory(
  trajectory: Trajectory, tokenizer: tokenizer_lib.Tokenizer
) -> Completion:
  """Decode a finished trajectory. The reward service adds the answer later.

  A turn is a run of tokens with a False `loss_mask` and the following run of
  tokens with a True one.

  Raises:
    ValueError: the trajectory has not ended.
  """
  return _of_trajectory(trajectory, tokenizer, tokenizer.decode)


def _of_trajectory(
  trajectory: Trajectory,
  tokenizer: tokenizer_lib.Tokenizer,
  of_prompt: Callable[[np.ndarray], str],
) -> Completion:
  if trajectory.finish_reason is None:
    raise ValueError(f"trajectory {trajectory.member} has not ended")
  mask, tokens = trajectory.loss_mask, trajectory.tokens
  written = tokens[mask]
  text = tokenizer.decode(written)
  begins = np.flatnonzero(~mask & np.append(True, mask[:-1]))
  turns = []
  for first, end in zip(
    begins, np.append(begins[1:], len(tokens)), strict=True
  ):
    middle = first + int((~mask[first:end]).sum())
    turns.append(
      Turn(
        prompt=of_prompt(tokens[first:middle]),
        # With a single turn, its completion is the text decoded above.
        completion=text
        if len(begins) == 1
        else tokenizer.decode(tokens[middle:end]),
        num_tokens=int(end - middle),
      )
    )
  return Completion(
    text=text,
    turns=tuple(turns),
    tokens=written,
    finish_reason=trajectory.finish_reason,
  )
