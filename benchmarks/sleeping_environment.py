"""An environment that sleeps; importing the module registers it."""

import time
from typing import Any

import gymnasium
import numpy as np


class Sleeping(gymnasium.Env):
  """Every step takes `step_s` seconds; episodes never end."""

  def __init__(self, step_s: float = 0.01):
    self.observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)
    self.action_space = gymnasium.spaces.Discrete(2)
    self._step_s = step_s

  def reset(
    self, *, seed: int | None = None, options: Any = None
  ) -> tuple[np.ndarray, dict[str, Any]]:
    """Return zeros, at once."""
    super().reset(seed=seed, options=options)
    return np.zeros(4, np.float32), {}

  def step(
    self, action: Any
  ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
    """Sleep."""
    time.sleep(self._step_s)
    return np.zeros(4, np.float32), 0.0, False, False, {}


gymnasium.register(
  "Sleeping-v0", "sleeping_environment:Sleeping", order_enforce=False
)
