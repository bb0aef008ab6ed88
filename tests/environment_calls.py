"""What the episodes of tests call: in processes by name, or on the loop."""

import asyncio
import os
import time

import numpy as np


def note(path, line):
  """Appends a line, which says that it was called; returns the count."""
  with open(path, "a") as file:
    file.write(line + "\n")
  with open(path) as file:
    return len(file.readlines())


async def note_there(path, line):
  """The same on the event loop."""
  return note(path, line)


def lines(path):
  return path.read_text().splitlines() if path.exists() else []


def returns(value):
  return value


def keys():
  return {"pair": (1, 2), 3: np.float32(0.5)}


def raises():
  raise LookupError("no such page")


def ends_its_process():
  os._exit(3)


def sleeps(seconds):
  time.sleep(seconds)


def returns_much(num_bytes):
  return "x" * num_bytes


def returns_an_object():
  return object()


def fails_until(path, count):
  """Raises until it was called so often."""
  if note(path, "called") < count:
    raise ConnectionError("not yet")
  return count


async def naps(seconds):
  await asyncio.sleep(seconds)
  return seconds
