"""Waiting for what another thread or process does."""

import time

DEADLINE_S = 120.0


def until(holds, what="", timeout_s=DEADLINE_S):
  """Polls until something holds; fails if it does not in time."""
  deadline_s = time.monotonic() + timeout_s
  while not holds():
    assert time.monotonic() < deadline_s, what
    time.sleep(0.005)
