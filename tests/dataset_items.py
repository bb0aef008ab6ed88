"""Prints a digest of the first items of datasets, as JSON.

    python dataset_items.py NUM_PROCESSES NUM_ITEMS NAME...

A test calls it under other hash seeds, and in a world with another date.
"""

import contextlib
import hashlib
import json
import sys

from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.storage import item_json


def digests(names, *, num_processes, num_items):
  """Of what the first items say, by dataset; items of other splits are ""."""
  found = {}
  for name in names:
    stream = gym.QuestionStream(
      name,
      {},
      seed=3,
      split=source_lib.Split.TRAIN,
      first_index=0,
      num_processes=num_processes,
    )
    with contextlib.closing(stream):
      items = [stream.next() for _ in range(num_items)]
    texts = [
      json.dumps(item_json.encode(item)) if item else "" for item in items
    ]
    found[name] = [hashlib.blake2b(x.encode()).hexdigest()[:9] for x in texts]
  return found


if __name__ == "__main__":
  num_processes, num_items, *names = sys.argv[1:]
  print(
    json.dumps(
      digests(names, num_processes=int(num_processes), num_items=int(num_items))
    )
  )
