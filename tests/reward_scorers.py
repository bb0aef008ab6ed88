"""Rewards that misbehave, and simple ones. Imported by reward processes."""

import hashlib
import os
import sys
import time
import zlib

from jaxrl_async import types


def length(item, completion):
  return 0.0 if completion.answer is None else float(len(completion.answer))


def begins_odd(item, completion):
  return float(ord(completion.text[:1] or " ") % 2)


def has_odd_length(item, completion):
  return float(len(completion.text) % 2)


def reports_jax(item, completion):
  return float("jax" in sys.modules)


def reports_verifiers(item, completion):
  return float({"math_verify", "reasoning_gym"} <= sys.modules.keys())


def raises(item, completion):
  raise LookupError(f"no such\nanswer {completion.answer}")


def floods(item, completion):
  print("flood" * 1_000_000)
  raise ValueError("flood " * 1_000_000 + completion.answer)


def hangs(item, completion):
  time.sleep(60)
  return 1.0


def hangs_and_swallows(item, completion):
  try:
    time.sleep(60)
  except:  # noqa: E722
    pass
  return 1.0


def hangs_in_c(item, completion):
  return float(sum(range(10**12)))


def returns_nan(item, completion):
  return float("nan")


def returns_text(item, completion):
  return "very good"


def adds_up(item, completion):
  """A point for an answer, half a one for each line; scores line ends."""
  lines = completion.text.count("\n")
  parts = {"answered": float(completion.answer is not None), "lines": lines / 2}
  ends = [i for i, c in enumerate(completion.text) if c == "\n"]
  return types.Reward(
    score=sum(parts.values()),
    parts=parts,
    token_scores={i: 0.5 for i in ends},  # a token a character
  )


def scores_the_first(item, completion):
  return types.Reward(score=1.0, token_scores={0: 0.5})


def fails_on_two(item, completion):
  if completion.answer == "2":
    raise ValueError("two")
  return float(completion.answer == item["answer"])


def returns(item, completion):
  """What the item says; a dict is what to make a reward from."""
  returned = item["returned"]
  return types.Reward(**returned) if isinstance(returned, dict) else returned


def describes(item, completion):
  """What it is shown, in the form of a failure's reason."""
  raise LookupError(repr(completion))


def exits(item, completion):
  sys.exit(3)


def dies(item, completion):
  os._exit(3)


def on_b(item, completion):
  """Misbehave as the item says, on one answer."""
  if completion.answer == "b":
    return globals()[item["misbehaves"]](item, completion)
  return length(item, completion)


def counts_and_fails_first(item, completion):
  """The number of the call; the second one fails."""
  with open(item["path"], "a") as file:
    file.write("x")
    number = file.tell()
  if number == 2:
    raise RuntimeError("second call")
  return number


def fails_first(item, completion):
  """Raise unless a file exists, and make it."""
  if not os.path.exists(item["path"]):
    with open(item["path"], "w"):
      raise RuntimeError("first attempt")
  return 1.0


def raises_on_some(item, completion):
  """Raise for a third of all texts."""
  if zlib.crc32(completion.text.encode()) % 3 == 0:
    raise LookupError("no reward for this text")
  return length(item, completion)


def raises_in_training(item, completion):
  """Leave evaluations alone."""
  if _is_training(item):
    raise LookupError("no reward in training")
  return length(item, completion)


def raises_on_odd_training(item, completion):
  if _is_training(item) and item["index"] % 2:
    raise LookupError("odd item")
  return length(item, completion)


def raises_in_evaluation(item, completion):
  if not _is_training(item):
    raise LookupError("no reward in an evaluation")
  return length(item, completion)


def hangs_in_training(item, completion):
  return (
    hangs(item, completion) if _is_training(item) else length(item, completion)
  )


def _is_training(item):
  """As `questions.split_of`, whose module imports more than a scorer should."""
  digest = hashlib.blake2b(item["question"].encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") % 10 > 4
