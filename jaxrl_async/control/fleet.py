"""The actors' processes: starts them, hears of them, ends them."""

from collections.abc import Callable, Sequence
import multiprocessing
import selectors
import socket
import threading

from jaxtyping import Int
import numpy as np

from jaxrl_async.control import actor as actor_lib
from jaxrl_async.control import settings as settings_lib
from jaxrl_async.processes import supervisor as supervisor_lib

_JOIN_S = 5.0
# More than that for processes that import Gymnasium and make environments.
_START_S = 60.0


class Patience:
  """How long actors may be silent while they owe a step.

  An environment is owed by its actor from the start or an answer on, until its
  observation comes. While none is owed, no time counts. Until each environment
  has been heard of once, the actors have `start_s` more, of which only time
  counts in which all of them are silent.

  Threads: any.
  """

  def __init__(
    self,
    timeout_s: float,
    *,
    num_actors: int,
    ring: int,
    start_s: float = _START_S,
    seconds: Callable[[], float] | None = None,
  ):
    """Begin to count: all actors start now.

    Args:
      timeout_s: of the silence of all actors.
      num_actors: how many there are.
      ring: how many environments each has.
      start_s: what the actors may take longer to start.
      seconds: a clock; None is that of the machine.
    """
    self._timeout_s = timeout_s
    self._seconds = seconds
    self._starting = [ring] * num_actors  # environments never heard of
    self._start = supervisor_lib.Deadline(start_s, seconds)
    self._num_owed = ring * num_actors
    self._lock = threading.Lock()
    self._left = supervisor_lib.Deadline(timeout_s, seconds)

  def answered(self, num_environments: int) -> None:
    """Count environments whose actions their actors are about to get."""
    with self._lock:
      self._num_owed += num_environments
      self._renew()

  def heard(self, actor: int, num_environments: int) -> None:
    """Count environments of an actor whose observations have come."""
    with self._lock:
      self._num_owed -= num_environments
      # An actor makes all of its environments before it steps any.
      self._starting[actor] = max(0, self._starting[actor] - num_environments)
      self._renew()

  def is_over(self) -> bool:
    """Return whether all actors have been silent for too long."""
    with self._lock:
      is_starting = self._start.next_wait_s() > 0 and any(self._starting)
      if is_starting or not self._num_owed:
        self._renew()
        return False
      return not self._left.next_wait_s()

  def _renew(self) -> None:
    self._left = supervisor_lib.Deadline(self._timeout_s, self._seconds)


class ActorFailed(supervisor_lib.RunError):
  """A process of environments has raised, died or hangs."""

  status = supervisor_lib.START_AGAIN


class Fleet:
  """All actors of a run.

  Threads: one at a time waits and receives, any number answer.

  Attributes:
    slots: the memory that is shared with the actors.
  """

  def __init__(
    self,
    section: settings_lib.ActorsSection,
    spaces: actor_lib.Spaces,
    *,
    columns: int,
    seeds: Sequence[int],
  ):
    """Start all processes.

    Args:
      section: which environments, and how many.
      spaces: of the environments.
      columns: of a row.
      seeds: of this start of the run.
    """
    self._section = section
    context = multiprocessing.get_context("spawn")
    slot_type = actor_lib.slot_type(spaces, columns)
    num_slots = section.num_actors * section.ring
    # It has no name that a killed run would leave behind.
    memory = context.RawArray("b", num_slots * slot_type.itemsize)
    self.slots = np.frombuffer(memory, slot_type)
    self._selector = selectors.DefaultSelector()
    self._processes, self._turns = [], []
    for actor in range(section.num_actors):
      here, there = socket.socketpair()
      own = range(actor * section.ring, (actor + 1) * section.ring)
      process = context.Process(
        target=actor_lib.run,
        name=f"actor-{actor}",
        daemon=True,
        args=(
          there,
          memory,
          slot_type,
          own,
          [*seeds, actor],
          section.environment,
          section.arguments.to_dict(),
        ),
      )
      process.start()
      there.close()  # so that the end of the process is the end of the socket
      self._selector.register(here, selectors.EVENT_READ, actor)
      self._processes.append(process)
      self._turns.append(here)
    self._patience = Patience(
      section.timeout_s,
      num_actors=section.num_actors,
      ring=section.ring,
    )

  def receive(self, timeout_s: float) -> Int[np.ndarray, "n"]:
    """Wait for actors, and return the environments whose observations came.

    Raises:
      ActorFailed: an actor has ended, or all say nothing for too long. If one
        hangs, the others soon wait too: the bound on staleness holds them.
    """
    arrived = [np.zeros(0, np.int32)]
    ready = self._selector.select(timeout_s)
    for actor in (key.data for key, _ in ready):
      try:
        said = self._turns[actor].recv(4 * self._section.ring)
      except ConnectionResetError:
        said = b""
      if not said:
        raise ActorFailed(f"actor {actor}: {self._reason(actor)}")
      arrived.append(np.frombuffer(said, np.int32))
      self._patience.heard(actor, len(arrived[-1]))
    if not ready and self._patience.is_over():
      raise ActorFailed(
        f"no actor said anything for {self._section.timeout_s:g} s"
        " (actors.timeout_s)"
      )
    return np.concatenate(arrived)

  def _reason(self, actor: int) -> str:
    """Return why a process has ended."""
    process = self._processes[actor]
    process.join(_JOIN_S)
    error = self.slots["error"][actor * self._section.ring]
    return error.decode(errors="replace") or (
      f"its process ended with status {process.exitcode}"
    )

  def answer(self, environments: Int[np.ndarray, "n"]) -> None:
    """Tell actors that the actions of these environments are in their slots."""
    self._patience.answered(len(environments))
    owners = environments // self._section.ring
    for actor in np.unique(owners).tolist():
      own = environments[owners == actor].astype(np.int32)
      try:
        self._turns[actor].send(own.tobytes())
      except (BrokenPipeError, ConnectionResetError):
        pass  # `receive` will see its end.

  def close(self) -> None:
    """End all processes."""
    for process, turns in zip(self._processes, self._turns, strict=True):
      process.kill()
      process.join(_JOIN_S)
      turns.close()
    self._selector.close()
