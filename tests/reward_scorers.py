"""Rewards that misbehave, and simple ones. Imported by reward processes."""

import hashlib
import os
import sys
import time
import zlib


def length(item, answer):
  return 0.0 if answer is None else float(len(answer))


def tells_questions_apart(item, answer):
  """A number that is the question's own, whatever the answer."""
  return zlib.crc32(item["question"].encode()) / 2**32


def reports_jax(item, answer):
  return float("jax" in sys.modules)


def raises(item, answer):
  raise LookupError(f"no such\nanswer {answer}")


def raises_on_b(item, answer):
  return length(item, answer) if answer != "b" else raises(item, answer)


def hangs(item, answer):
  time.sleep(60)
  return 1.0


def hangs_and_swallows(item, answer):
  try:
    time.sleep(60)
  except:  # noqa: E722
    pass
  return 1.0


def hangs_in_c(item, answer):
  return float(sum(range(10**12)))


def returns_nan(item, answer):
  return float("nan")


def returns_text(item, answer):
  return "very good"


def exits(item, answer):
  sys.exit(3)


def dies(item, answer):
  os._exit(3)


def fails_first(item, answer):
  """Raise unless a file exists, and make it."""
  if not os.path.exists(item["path"]):
    with open(item["path"], "w"):
      raise RuntimeError("first attempt")
  return 1.0


def raises_in_training(item, answer):
  """Leave evaluations alone."""
  if _is_training(item):
    raise LookupError("no reward in training")
  return length(item, answer)


def raises_on_odd_training(item, answer):
  if _is_training(item) and item["index"] % 2:
    raise LookupError("odd item")
  return length(item, answer)


def raises_in_evaluation(item, answer):
  if not _is_training(item):
    raise LookupError("no reward in an evaluation")
  return length(item, answer)


def hangs_in_training(item, answer):
  return hangs(item, answer) if _is_training(item) else length(item, answer)


def _is_training(item):
  """As `prompts.split_of`, whose module imports more than a scorer should."""
  digest = hashlib.blake2b(item["question"].encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") % 10 > 4
