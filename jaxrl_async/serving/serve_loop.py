"""The loop that drives a scheduler for client requests, without training."""

from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.serving import requests as requests_lib


class ServeLoop:
  """Drives a scheduler for client requests alone.

  The loop waits while there are no requests. `submit` and `cancel` of the queue
  and `stop` wake it.

  Threads: `run` belongs to one thread, which owns the scheduler. `stop` and
  `is_running` are for any thread. If the scheduler fails, `run` ends all
  requests and raises the exception.
  """

  def __init__(
    self, queue: requests_lib.RequestQueue, scheduler: scheduler_lib.Scheduler
  ):
    """Create a loop; a thread of the caller has to call `run`."""
    self.queue = queue
    self.scheduler = scheduler
    self.is_running = False
    self._is_stopping = False

  def stop(self) -> None:
    """End `run` before its next step, and all unfinished requests with it."""
    self._is_stopping = True
    self.queue.wake()

  def run(self) -> None:
    """Serve requests until the loop is stopped."""
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
