"""Calls of an engine's programs, from which a thread may never come back.

A thread cannot be ended from outside. One that hangs in a program of the engine
can be given up, because it touches nothing of the coordinator until it is back.
"""

from collections.abc import Iterator
import contextlib
import threading

import jax


class EngineFailed(RuntimeError):
  """The engine of a replica has failed; `__cause__` is its error."""


class GivenUp(RuntimeError):
  """The program has ended after all, and another thread has taken over."""


@contextlib.contextmanager
def failures() -> Iterator[None]:
  """Turn an error of a device program into an EngineFailed.

  Other errors, also other RuntimeErrors, are bugs, which would only be hidden
  by an engine that begins anew.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    raise EngineFailed(f"{type(error).__name__}: {error}") from error


class EngineCalls:
  """The calls that one thread makes, one after the other.

  Invariant: a thread that was given up leaves `inside` only by GivenUp.

  Threads: `inside` belongs to the thread that drives the replica, and `give_up`
  to another one.
  """

  def __init__(self):
    """Begin outside of all programs."""
    self._lock = threading.Lock()
    self._is_inside = False
    self._is_given_up = False

  @contextlib.contextmanager
  def inside(self) -> Iterator[None]:
    """Mark a block that uses an engine, and nothing of the coordinator.

    Raises:
      EngineFailed: a program failed.
      GivenUp: the thread was given up meanwhile.
    """
    with self._lock:
      self._is_inside = True
    try:
      with failures():
        yield
    finally:
      with self._lock:
        self._is_inside = False
        if self._is_given_up:
          raise GivenUp

  def give_up(self) -> bool:
    """Give the thread up if it is inside, and return whether it was."""
    with self._lock:
      self._is_given_up = self._is_inside
      return self._is_given_up
