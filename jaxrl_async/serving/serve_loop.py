"""Drives a scheduler for requests of clients alone, where nothing trains."""

from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.serving import requests as requests_lib


class ServeLoop:
  """Drives a scheduler for requests alone.

  Waits for requests; is woken by `submit`, `cancel` and `stop`.

  Threads: `run` belongs to one thread, which owns the scheduler; `stop` and
  `is_running` are for any thread. A failure ends every request and is raised.
  """

  def __init__(
    self, queue: requests_lib.RequestQueue, scheduler: scheduler_lib.Scheduler
  ):
    self.queue = queue
    self.scheduler = scheduler
    self.is_running = False
    self._is_stopping = False

  def stop(self) -> None:
    """Ends `run` before its next step; unfinished requests are told so."""
    self._is_stopping = True
    self.queue.wake()

  def run(self) -> None:
    """Serves until stopped."""
    self.is_running = True
    has_failed = True
    try:
      while not self._is_stopping:
        self.queue.feed(self.scheduler)
        if self.scheduler.is_idle:
          self.queue.wait(timeout_s=60.0)
        else:
          self.queue.deliver(self.scheduler.step())
      has_failed = False
    finally:
      self.is_running = False
      self.queue.close(has_failed=has_failed)
