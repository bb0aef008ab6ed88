"""The unit of work: a generator that yields prompts and receives completions.

    def episode(prompt):
      completion = yield prompt.tokens          # first turn
      completion = yield environment(completion)  # tokens of the next one
      # returning ends the trajectory

What it yields is appended to the trajectory with a False `loss_mask`; what the
policy writes after it is sent in. An episode that raises, yields nothing to
append or returns before its first turn fails its group.
"""

from collections.abc import Callable, Generator
import dataclasses

import numpy as np

from jaxrl_async import types

Turns = Generator[np.ndarray, np.ndarray, None]
Episode = Callable[[types.Prompt], Turns]


class EpisodeError(RuntimeError):
  """An episode failed, and with it its group; the cause is what it raised."""


def single_turn(prompt: types.Prompt) -> Turns:
  """One prompt, one completion."""
  yield prompt.tokens


def advance(turns: Turns, written: np.ndarray | None) -> np.ndarray | None:
  """Tells an episode what was written; gives its next prompt, None at its end.

  Args:
    turns: of the episode.
    written: the completion of the last turn; None begins the first one.

  Raises:
    EpisodeError: it raised, or did not say what to append.
  """
  is_first = written is None
  try:
    # Before the first turn a generator takes None.
    tokens = turns.send(written)  # pyright: ignore[reportArgumentType]
  except StopIteration as end:
    if is_first:
      raise EpisodeError("returned before its first turn") from end
    return None
  except Exception as error:  # user code: counted, reported, never a score
    raise EpisodeError(repr(error)) from error
  if len(tokens) == 0:
    raise EpisodeError("yielded a turn without tokens")
  return tokens


def begin(member: int, tokens: np.ndarray) -> types.Trajectory:
  """A trajectory that consists of its first prompt alone."""
  nothing = types.Trajectory(
    member=member,
    tokens=np.zeros((0,), np.int32),
    loss_mask=np.zeros((0,), bool),
    behavior_logprobs=np.zeros((0,), np.float32),
    policy_versions=np.zeros((0,), np.int32),
  )
  return extend(nothing, tokens)


def extend(
  trajectory: types.Trajectory, tokens: np.ndarray
) -> types.Trajectory:
  """The trajectory with the prompt of its next turn, ready to be written on."""
  n = len(tokens)
  return dataclasses.replace(
    trajectory,
    tokens=np.concatenate([trajectory.tokens, np.asarray(tokens, np.int32)]),
    loss_mask=np.pad(trajectory.loss_mask, (0, n)),
    behavior_logprobs=np.pad(trajectory.behavior_logprobs, (0, n)),
    policy_versions=np.pad(
      trajectory.policy_versions, (0, n), constant_values=-1
    ),
    finish_reason=None,
  )


def last_completion(trajectory: types.Trajectory) -> np.ndarray:
  """A copy of what the policy wrote in the last turn."""
  mask = trajectory.loss_mask
  start = len(mask) - int((~mask[::-1]).argmax())
  return trajectory.tokens[start:].copy()


def replay(turns: Turns, trajectory: types.Trajectory) -> np.ndarray | None:
  """Brings a fresh episode to where a recorded trajectory stopped.

  Args:
    turns: of the same prompt, not started.
    trajectory: with the completions to be sent again.

  Returns:
    Tokens still to be appended as the next prompt (empty when the policy was
    in the middle of writing), or None when the episode is over.

  Raises:
    EpisodeError: it failed, or yielded other prompts than were recorded.
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
