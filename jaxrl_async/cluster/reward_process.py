"""A process with a pool of reward processes, whatever transport calls it.

It imports neither jax nor Ray. Its host needs this project and the modules of
the rewards, and nothing of a run but what it is attached with.
"""

import pickle
import queue
import socket
import sys

from jaxrl_async.cluster import hosts
from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rewards import remote_pools
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import trial

HEARTBEAT_S = 1.0
_START_S = 120.0


class RewardProcess:
  """A pool of reward processes for a coordinator in another process.

  Threads: those of the transport call the methods. Threads of the pool only
  add to the queue of outcomes. `attach` comes before all others but `facts`.
  """

  def __init__(self):
    """Create a process without a pool."""
    self._outcomes: queue.SimpleQueue[tuple[int, scoring.Outcome]]
    self._outcomes = queue.SimpleQueue()

  def facts(self) -> hosts.Facts:
    """Return what the caller has to know before it attaches the pool."""
    return hosts.facts()

  def attach(self, spec: remote_pools.PoolSpec) -> list[str]:
    """Start the reward processes; see `remote_pools.Handle`.

    Raises:
      PoolFailed: a reward cannot be imported here, or cannot score here.
    """
    host = socket.gethostname()
    sys.path += [path for path in spec.search_path if path not in sys.path]
    try:
      with user_code.told():
        scorers: scoring.Scorers = pickle.loads(spec.pickled)
    except user_code.UserCodeError as error:
      raise remote_pools.PoolFailed(
        f"a reward cannot be imported on {host}: {error}; put its module where"
        " all hosts see it, such as the shared directory"
      ) from error
    try:
      lines = trial.try_out(scorers.terms)
    except trial.TrialError as error:
      name = f" {error.term.name}" if error.term.name else ""
      raise remote_pools.PoolFailed(
        f"reward{name} on {host}: {error}"
      ) from error
    self._pool = pool_lib.LocalPool(scorers, spec.num_workers)
    try:
      self._pool.warm_up(_START_S)
    except (TimeoutError, RuntimeError, sections.ConfigError) as error:
      self._pool.close(_START_S)
      raise remote_pools.PoolFailed(f"on {host}: {error}") from error
    return [f"{line} on {host}" for line in lines]

  def collect(self) -> list[tuple[int, scoring.Outcome]]:
    """Return the outcomes that have arrived; see `remote_pools.Handle`."""
    try:
      found = [self._outcomes.get(timeout=HEARTBEAT_S)]
    except queue.Empty:
      return []
    # What others take meanwhile does not matter: there is one caller.
    found += [self._outcomes.get() for _ in range(self._outcomes.qsize())]
    return found

  def deliver(self, attempts: list[tuple[int, scoring.Attempt]]) -> None:
    """Start attempts."""
    for number, attempt in attempts:
      future = self._pool.score(attempt)
      future.add_done_callback(
        lambda done, number=number: self._outcomes.put((number, done.result()))
      )

  def end(self) -> None:
    """End the reward processes, for a transport within one process."""
    self._pool.close(_START_S)
