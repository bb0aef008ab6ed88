"""Environments that tests and benchmarks need: they count, sleep and fail.

Importing the module registers them, as "control_environments:Counting-v0" does.
"""

import os
import time

import numpy as np

try:
  import gymnasium
except ImportError:
  import pytest

  pytest.skip("Gymnasium is not installed", allow_module_level=True)


class Counting(gymnasium.Env):
  """Shows the number of the episode and of the step; the reward is the step.

  Episodes have `length` steps. Every other one ends for good, the others are
  cut off.
  """

  def __init__(self, length=5, step_s=0.0, fails="", at=20, marker=""):
    """Begin before the first episode.

    Args:
      length: of each episode.
      step_s: seconds for which each step sleeps.
      fails: "raise", "exit", "hang" or "nan" (as a reward), in the step with
        the number `at`.
      at: counted over all episodes.
      marker: a file that exists once it has failed: it fails once. Without
        this name it always fails.
    """
    self.observation_space = gymnasium.spaces.Box(0, 1e6, (3,), np.float32)
    self.action_space = gymnasium.spaces.Discrete(2)
    self._length, self._step_s = length, step_s
    self._fails, self._at, self._marker = fails, at, marker
    self._episode, self._step, self._total = -1, 0, 0

  def _seen(self):
    return np.array([self._episode, self._step, self._id], np.float32)

  def reset(self, *, seed=None, options=None):
    """Begin the next episode."""
    super().reset(seed=seed, options=options)
    if seed is not None:
      self._id = seed % 1000
    self._episode += 1
    self._step = 0
    return self._seen(), {}

  def step(self, action):
    """Count."""
    time.sleep(self._step_s)
    self._step += 1
    self._total += 1
    reward = float(self._step)
    if self._fails and self._total == self._at and self._is_first():
      reward = self._fail()
    ends = self._step == self._length
    is_terminated = ends and self._episode % 2 == 0
    is_truncated = ends and not is_terminated
    return self._seen(), reward, is_terminated, is_truncated, {}

  def _is_first(self):
    if not self._marker:
      return True
    try:
      os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
      return False
    return True

  def _fail(self):
    if self._fails == "raise":
      raise RuntimeError("this environment fails")
    if self._fails == "exit":
      os._exit(3)
    if self._fails == "nan":
      return float("nan")
    time.sleep(3600)


gymnasium.register("Counting-v0", Counting, order_enforce=False)
