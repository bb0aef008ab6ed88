"""An actor: a process that steps a ring of environments in turn; no JAX.

While one environment waits for its action, the actor steps those whose actions
have come (SRL, arXiv:2306.16688, section 3). Each environment has a slot in
memory that all processes share. A socket only carries whose turn it is: an
actor sends the number of an environment whose observation waits, and gets the
numbers of those whose actions are there.

A slot holds a row with a fixed number of columns. Column t has an observation,
and if an action was taken there, whose outcome is known, also that action, its
logprob, the version of the weights that drew it, and its reward; `loss_mask`
says where. Two columns have an observation alone, whose value is that of what
follows:

- the last column of a row, unless an episode ended right before it;
- the last observation of an episode that was cut off. The first observation of
  the next episode is in the column after it.

So a step never leads from one episode to the next, and each frame is in one row
only. An action whose outcome says that the episode ended for good is followed
by nothing: `cut_off` is 0. The actor writes observations and outcomes, and
inference writes actions. An episode that ends is reset at once.
"""

import collections
import dataclasses
import signal
import socket
import time
from typing import Any

import numpy as np

from jaxrl_async.config import refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spaces:
  """What an environment shows and takes.

  Attributes:
    num_actions: of discrete actions; 0 if an action is a vector.
  """

  observation_shape: tuple[int, ...]
  observation_dtype: str
  action_shape: tuple[int, ...]
  num_actions: int


def slot_type(spaces: Spaces, columns: int) -> np.dtype:
  """Return the type of a slot, in which `error` is why the actor has ended.

  In its row, 1 in `cut_off` means that the value of the next column is that of
  what follows the last action of an episode. `column` is where the newest
  observation is. If the row `is_full`, inference takes it, and begins one with
  `next_observation`. `busy_s` are seconds for which the actor stepped
  environments, and `idle_s` those for which it had none to step; these and
  `error` are in its first slot.
  """
  seen = spaces.observation_dtype, spaces.observation_shape
  act = "i4" if spaces.num_actions else "f4"
  row = [
    ("observations", seen[0], (columns, *seen[1])),
    ("actions", act, (columns, *spaces.action_shape)),
    ("behavior_logprobs", "f4", columns),
    ("policy_versions", "i4", columns),
    ("rewards", "f4", columns),
    ("cut_off", "f4", columns),
    ("loss_mask", "?", columns),
    ("episodes", "i4", columns),
  ]
  slot = [
    ("row", np.dtype(row, align=True)),
    ("next_observation", *seen),
    ("column", "i8"),
    ("is_full", "?"),
    ("has_ended", "?"),
    ("episode_return", "f8"),
    ("episode_length", "i8"),
    ("frames", "i8"),
    ("episodes", "i8"),
    ("busy_s", "f8"),
    ("idle_s", "f8"),
    ("error", "S300"),
  ]
  return np.dtype(slot, align=True)


def spaces_of(environment: str, arguments: dict[str, Any]) -> Spaces:
  """Return the spaces of an environment, which is made once for that.

  Raises:
    ConfigError: there is no such environment, or a policy here cannot act in
      it, or Gymnasium is not installed.
  """
  path = "actors.environment"
  try:
    import gymnasium
    from gymnasium import spaces as spaces_lib
  except ImportError as error:
    raise refusals.ConfigError(
      f"{path}: Gymnasium is missing; install the extra gym"
    ) from error
  try:
    made = gymnasium.make(environment, **arguments)
    made.close()
  except Exception as error:
    shown = refusals.shown(environment)
    raise refusals.ConfigError(
      f"{path}: {shown} cannot be made ({_text(error)})"
    ) from error
  seen: Any = made.observation_space
  acts: Any = made.action_space
  is_discrete = isinstance(acts, spaces_lib.Discrete)
  is_vector = isinstance(acts, spaces_lib.Box) and len(acts.shape) == 1
  refusals.require(
    isinstance(seen, spaces_lib.Box),
    path,
    f"observations are {seen}, and have to be a Box",
  )
  refusals.require(
    is_discrete or is_vector,
    path,
    f"actions are {acts}, and have to be Discrete or a Box of one axis",
  )
  return Spaces(
    observation_shape=seen.shape,
    observation_dtype="uint8" if seen.dtype == np.uint8 else "float32",
    action_shape=acts.shape or (),
    num_actions=int(acts.n) if is_discrete else 0,
  )


class Environment:
  """An environment of the ring, and its slot."""

  def __init__(self, made: Any, slots: np.ndarray, n: int, seed: int):
    """Show the first observation."""
    self._made, self._slot = made, slots[n]
    self._next = slots["next_observation"][n : n + 1]
    rows = slots["row"]
    self._row = {name: rows[name][n] for name in rows.dtype.names or ()}
    self._return, self._length = 0.0, 0
    _put(self._row["observations"], 0, made.reset(seed=seed)[0])

  def step(self) -> None:
    """Take the action of the slot, and write its outcome."""
    slot, row = self._slot, self._row
    t = int(slot["column"])
    seen, reward, is_terminated, is_truncated, _ = self._made.step(
      self._action(row["actions"][t])
    )
    has_ended = is_terminated or is_truncated
    # An episode that ended at its limit of time and for good has ended.
    is_cut_off = is_truncated and not is_terminated
    after = t + 1 + is_cut_off
    is_full = after >= len(row["rewards"]) - 1
    _put(row["rewards"], t, reward)
    row["cut_off"][t] = is_cut_off or (is_full and not has_ended)
    row["episodes"][t] = slot["episodes"]
    row["loss_mask"][t] = True
    self._return += float(reward)
    self._length += 1
    slot["frames"] += 1
    if not is_terminated:
      _put(row["observations"], t + 1, seen)
    if has_ended:
      slot["episode_return"] = self._return
      slot["episode_length"] = self._length
      slot["episodes"] += 1
      self._return, self._length = 0.0, 0
      seen, _ = self._made.reset()
    if is_full:
      _put(self._next, 0, seen)
    elif has_ended:
      _put(row["observations"], after, seen)
    slot["has_ended"], slot["is_full"] = has_ended, is_full
    slot["column"] = 0 if is_full else after

  def _action(self, action: Any) -> Any:
    """Return an action as the environment takes it."""
    space = self._made.action_space
    if self._row["actions"].dtype == np.int32:
      return int(action) + int(space.start)
    return np.clip(action, space.low, space.high)


def _put(array: np.ndarray, index: int, value: Any) -> None:
  """Write what an environment returned; one NaN would spoil whole train steps.

  The running statistics of the returns, and so all later steps, would hold it.
  """
  array[index] = value
  if not np.isfinite(array[index]).all():
    raise ValueError("the environment returned a number that is not finite")


def run(
  turns: socket.socket,
  memory: Any,
  slots_type: np.dtype,
  own: range,
  seed: list[int],
  environment: str,
  arguments: dict[str, Any],
) -> None:
  """Step the environments of the slots `own` until the socket is closed."""
  # Ctrl-C reaches every process of a terminal. The run ends this one.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  import gymnasium  # with the extra gym

  slots = np.frombuffer(memory, slots_type)
  first = slots[own.start]
  try:
    ring = {}
    seeds = np.random.SeedSequence(seed).generate_state(len(own)) >> 1
    for n, each in zip(own, seeds.tolist(), strict=True):
      ring[n] = Environment(
        gymnasium.make(environment, **arguments), slots, n, each
      )
      turns.send(n.to_bytes(4, "little"))
    # Each environment waits for an action, or is in `ready`, in the order in
    # which the actions came. Under a steady policy this is the ring.
    ready: collections.deque[int] = collections.deque()
    end_s = time.perf_counter()
    while True:
      if not ready:
        answered = turns.recv(4 * len(own))
        if not answered:
          return  # The run has ended.
        ready.extend(np.frombuffer(answered, np.int32).tolist())
      start_s = time.perf_counter()
      first["idle_s"] += start_s - end_s
      n = ready.popleft()
      ring[n].step()
      turns.send(n.to_bytes(4, "little"))
      end_s = time.perf_counter()
      first["busy_s"] += end_s - start_s
  except Exception as error:  # the environment's, or the run has ended
    first["error"] = _text(error).encode()[:300]


def _text(error: Exception) -> str:
  return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
