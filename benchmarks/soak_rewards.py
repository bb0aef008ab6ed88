"""The rewards of soak.py. Imported by reward processes."""

import os
import random
import sys
import time

_RNG = random.Random()  # of each process its own, so that a retry may succeed
_FLOOD_BYTES = 1 << 20


def ones(item, completion):
  """Return how often a 1 was written, which a policy learns to do."""
  del item
  return float(completion.text.count("1"))


def faulty_ones(item, completion):
  """Do the same, or in one of 100 scores what a reward must not do."""
  if _RNG.random() < 1 / 100:
    return _RNG.choice(_FAULTS)(item, completion)
  return ones(item, completion)


def _raises(item, completion):
  raise LookupError(f"no reward for {completion.text!r} of {item}")


def _hangs(item, completion):
  time.sleep(600)
  return ones(item, completion)


def _dies(item, completion):
  os._exit(3)


def _floods(item, completion):
  sys.stdout.write("flood " * (_FLOOD_BYTES // 6))
  sys.stdout.flush()
  raise ValueError("x" * _FLOOD_BYTES)


def _returns_nan(item, completion):
  return float("nan")


def _returns_garbage(item, completion):
  return {"score": [completion]}


_FAULTS = (_raises, _hangs, _dies, _floods, _returns_nan, _returns_garbage)
