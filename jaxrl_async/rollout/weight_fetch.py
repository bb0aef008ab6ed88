"""A version of the weights that is fetched while the engine decodes.

Reading a version, checking its digests and moving it to the devices takes
seconds for a large model. All of it happens in a thread, so that only the swap
and the caches are left to do between two decode calls.
"""

import threading
from typing import Any

from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.weights import weight_transfer


class WeightFetch:
  """One version on its way from the channel to the engine's devices.

  Its thread calls nothing of the engine but `load_params`. On several devices
  that runs no program on what a channel has placed: two programs that two
  threads start there could wait for each other for ever.

  Threads: the thread that drives the replica creates and reads it.
  """

  def __init__(
    self,
    channel: weight_transfer.WeightChannel,
    engine: engine_lib.Engine,
    newer_than: int,
  ):
    """Begin to fetch the newest version of the channel for an engine.

    Nothing is fetched if that version is not newer than `newer_than`.
    """
    self._result: tuple[Any, int] | None = None
    self._failure: BaseException | None = None
    self._done = threading.Event()

    def fetch() -> None:
      adopted = channel.adopt(newer_than)
      if adopted is not None:
        weights, version = adopted
        self._result = engine.load_params(weights, version), version
      self._done.set()

    def fail(error: BaseException) -> None:
      self._failure = error
      self._done.set()

    supervisor_lib.start_thread("weight-fetch", fetch, fail)

  @property
  def is_done(self) -> bool:
    """Whether `result` returns at once."""
    return self._done.is_set()

  def wait(self, timeout_s: float) -> bool:
    """Wait until the version is there, and return whether it is."""
    return self._done.wait(timeout_s)

  def result(self) -> tuple[Any, int] | None:
    """Wait for the engine's params and their version; None if none was newer.

    Raises:
      WeightTransferError: the version differs from what was published, or could
        not be published.
    """
    self._done.wait()
    if self._failure is not None:
      raise self._failure
    return self._result
