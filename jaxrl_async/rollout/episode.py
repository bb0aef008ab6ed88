"""Episodes: generators that yield prompts and receive completions.

    def episode(prompt):
      completion = yield prompt.tokens          # first turn
      completion = yield environment(completion)  # next turn
      # returning ends the trajectory

The tokens that an episode yields are appended to the trajectory with a False
`loss_mask`. The completion that the policy generates after them is sent into
the generator. A group fails if one of its episodes raises, yields no tokens or
returns before its first turn.
"""

from collections.abc import Callable, Generator
import dataclasses

import numpy as np

from jaxrl_async import types

Turns = Generator[np.ndarray, np.ndarray, None]
Episode = Callable[[types.Prompt], Turns]


class EpisodeError(RuntimeError):
  """An episode failed, and its group with it.

  If the episode raised an exception, it is the `__cause__`.
  """


def single_turn(prompt: types.Prompt) -> Turns:
  """Yield the prompt and end after one completion."""
  yield prompt.tokens


def advance(turns: Turns, written: np.ndarray | None) -> np.ndarray | None:
  """Send a completion to an episode and return the tokens of its next prompt.

  None starts the first turn. None is returned if the episode has ended.

  Raises:
    EpisodeError: the episode raised, yielded no tokens, or returned before its
      first turn.
  """
  is_first = written is None
  try:
    # Before the first turn a generator takes None.
    tokens = turns.send(written)  # pyright: ignore[reportArgumentType]
  except StopIteration as end:
    if is_first:
      raise EpisodeError("returned before its first turn") from end
    return None
  # User code may raise anything. It counts as a failed group, never as a score.
  except Exception as error:
    raise EpisodeError(repr(error)) from error
  if len(tokens) == 0:
    raise EpisodeError("yielded a turn without tokens")
  return tokens


class First:
  """The first prompt of an episode, from which trajectories begin.

  The trajectories share its arrays, which are therefore read-only.
  """

  def __init__(self, tokens: np.ndarray):
    """Make the arrays."""
    n = len(tokens)
    self._arrays = (
      np.array(tokens, np.int32),
      np.zeros(n, bool),
      np.zeros(n, np.float32),
      np.full(n, -1, np.int32),
    )
    for array in self._arrays:
      array.setflags(write=False)
    self._content = self._arrays[0].tobytes()

  def is_equal(self, tokens: np.ndarray) -> bool:
    """Return whether these are the same tokens."""
    return np.asarray(tokens, np.int32).tobytes() == self._content

  def trajectory(self, member: int) -> types.Trajectory:
    """Return a trajectory that holds only the prompt."""
    tokens, loss_mask, behavior_logprobs, policy_versions = self._arrays
    return types.Trajectory(
      member=member,
      tokens=tokens,
      loss_mask=loss_mask,
      behavior_logprobs=behavior_logprobs,
      policy_versions=policy_versions,
    )


def extend(
  trajectory: types.Trajectory, tokens: np.ndarray
) -> types.Trajectory:
  """Return the trajectory with the prompt of its next turn appended.

  The result has no finish reason, so that a replica can continue it.
  """
  n = len(tokens)
  return dataclasses.replace(
    trajectory,
    tokens=_and(trajectory.tokens, np.asarray(tokens, np.int32)),
    loss_mask=_and(trajectory.loss_mask, np.zeros(n, bool)),
    behavior_logprobs=_and(
      trajectory.behavior_logprobs, np.zeros(n, np.float32)
    ),
    policy_versions=_and(trajectory.policy_versions, np.full(n, -1, np.int32)),
    finish_reason=None,
  )


def _and(array: np.ndarray, more: np.ndarray) -> np.ndarray:
  return np.concatenate([array, more], dtype=array.dtype)


def last_completion(trajectory: types.Trajectory) -> np.ndarray:
  """Return a copy of the tokens that the policy generated in the last turn."""
  # The last False, as a byte: it is called for every turn that ends, and bytes
  # are searched faster than arrays.
  start = trajectory.loss_mask.tobytes().rfind(b"\0") + 1
  return trajectory.tokens[start:].copy()


def replay(turns: Turns, trajectory: types.Trajectory) -> np.ndarray | None:
  """Advance a new episode to the point where a recorded trajectory stopped.

  Args:
    turns: an episode of the same prompt that has not started.
    trajectory: the record, whose completions are sent to the episode again.

  Returns:
    The tokens to append as the next prompt, or None if the episode has ended.
    They are empty if the trajectory stopped within a completion.

  Raises:
    EpisodeError: the episode failed, or its prompts differ from the recorded
      ones.
  """
  mask, tokens = trajectory.loss_mask, trajectory.tokens
  edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
  runs = np.split(np.arange(len(tokens)), edges)
  pending = advance(turns, None)
  for run in runs:
    if not mask[run[0]]:
      if pending is None or not np.array_equal(tokens[run], pending):
        raise EpisodeError("yielded other prompts than were recorded")
      pending = pending[:0]
    elif run[-1] + 1 < len(tokens) or trajectory.finish_reason is not None:
      pending = advance(turns, tokens[run])
  return pending
