"""The processes that train together: one decides, and the others follow it.

The device programs of a trainer of several processes have to be started by all
of them, in one order. Process 0 holds everything else of a run and decides what
comes next. Before it starts a program, it tells the others which one. They wait
for that, for hours if need be, in a blocking read of a socket. No device waits
and no processor core is busy meanwhile.

The same connections show when a process ends. Its socket is closed by the
kernel, so all others know at once, even where their main thread is inside a
program that will never end. They then end with one line. Losing a host without
a word is noticed by the keepalive of the connections.

`rendezvous` connects the processes. `alone` is the world of one process, in
which telling does nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import os
import queue
import socket
import sys
import threading
from typing import Any

import numpy as np

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import wire

Pieces = Mapping[str, Sequence[np.ndarray]]
# (what it is about, its arrays), for each process.
Parts = Sequence[tuple[Mapping[str, Any], Pieces]]

Receive = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]

# Exit code after another process was lost: to start all of them again helps.
LOST = supervisor_lib.START_AGAIN

# Seconds without a sign of life after which a host counts as lost.
_IDLE_S = 20
_PROBE_S = 5
_NUM_PROBES = 8
_LEAVE_S = 5.0
_GRACE_S = 2.0
_INTERRUPTED = 130

_END = "end"
_FAILED = "failed"
_STOP = "stop"


def keep_alive(connection: socket.socket) -> None:
  """Have the kernel notice when the host at the other end is gone."""
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  for name, value in (
    ("TCP_KEEPIDLE", _IDLE_S),
    ("TCP_KEEPINTVL", _PROBE_S),
    ("TCP_KEEPCNT", _NUM_PROBES),
  ):
    if hasattr(socket, name):  # they have other names on some systems
      connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def end_process(line: str, code: int = LOST) -> None:
  """Print an error of one line, if there is one, and end this process at once.

  The interpreter is not shut down. A thread may be inside a program that waits
  for a process that is gone.
  """
  if line:
    print(f"error: {line}", file=sys.stderr, flush=True)
  sys.stdout.flush()
  os._exit(code)


class World:
  """The processes that train together, as one of them sees them.

  Invariant: all followers get the same messages in the same order. A message is
  sent under a lock, to every follower, so that two threads of process 0 cannot
  tell different followers different orders.

  Attributes:
    rank: number of this process. Process 0 leads.
    size: number of processes.
    is_one_host: whether all of them are on one host.
    lost: is set when another process has ended before its time. A thread then
      ends this process too.

  Threads: `tell` may be called from any thread. The programs that messages
  announce are started by the main thread of each process, which has to announce
  them too. A thread for each connection reads.
  """

  def __init__(
    self,
    rank: int,
    size: int,
    connections: Mapping[int, socket.socket],
    *,
    is_one_host: bool = True,
  ):
    """Take over the connections, and watch them from now on.

    Args:
      rank: number of this process.
      size: number of processes.
      connections: to each follower, or from a follower to process 0.
      is_one_host: whether all processes are on one host.
    """
    self.rank = rank
    self.size = size
    self.is_one_host = is_one_host
    self._connections = dict(connections)
    self.lost = threading.Event()
    self._sending = threading.Lock()
    self._leaving = threading.Event()
    self._on_stop: Callable[[], None] = lambda: None
    self._before_ending: Callable[[], None] = lambda: None
    self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._receive: Receive = lambda message, arrays: None
    self._can_receive = threading.Event()
    self._threads = [
      supervisor_lib.start_thread(
        f"process {other} of the trainer",
        functools.partial(self._read, other),
        self._messages.put if rank else lambda error: self._lost(str(error)),
      )
      for other in self._connections
    ]

  @property
  def leads(self) -> bool:
    """Whether this is process 0, which decides."""
    return self.rank == 0

  # -- process 0 ------------------------------------------------------------

  def lead(
    self,
    on_stop: Callable[[], None],
    before_ending: Callable[[], None] = lambda: None,
  ) -> None:
    """Say what to do about the followers.

    Args:
      on_stop: is called when a follower was asked to stop.
      before_ending: is called before this process ends because a follower has.
    """
    self._on_stop = on_stop
    self._before_ending = before_ending

  def tell(
    self, command: str, parts: Parts | None = None, **arguments: Any
  ) -> None:
    """Tell all followers what comes next. Only process 0 tells anything.

    Args:
      command: what they shall do.
      parts: for each process of the world what it gets beside the command.
      **arguments: the same for all; JSON.
    """
    if not self.leads:
      return
    with self._sending:
      for rank, connection in self._connections.items():
        about, arrays = parts[rank] if parts else ({}, {})
        try:
          wire.send(
            connection, {"command": command, **arguments, **about}, arrays
          )
        except OSError:
          # The thread that reads from it ends this process.
          self._leaving.wait()
          return

  def close(self, failure: str = "", code: int = 1) -> None:
    """End the world, as process 0 or as a follower that fails.

    Args:
      failure: why this process ends without the others, on one line. They end
        at once then, whatever they do. Without one, followers end after what
        they were told before.
      code: the exit code of followers after a failure of process 0.
    """
    if failure and not self.leads:
      # What fails in every process is for process 0 to report.
      self._leaving.wait(_GRACE_S)
    if self._leaving.is_set() or not self._connections:
      return
    self._leaving.set()
    if failure:
      self._fail_others(failure, code)
    elif self.leads:
      self.tell(_END)
    if failure and self.leads:
      # It stays until the others are gone, which would miss what it holds.
      deadline = supervisor_lib.Deadline(_LEAVE_S)
      for thread in self._threads:
        deadline.join(thread)

  # -- followers ------------------------------------------------------------

  def follow(self, receive: Receive) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the commands of process 0 until it ends the world.

    Args:
      receive: turns a message that brings arrays into what is yielded with it.
        A thread calls it while the main thread does what came before.
    """
    self._receive = receive
    self._can_receive.set()
    while True:
      found = self._messages.get()
      if isinstance(found, BaseException):
        raise found
      if found[0]["command"] == _END:
        self._leaving.set()
        return
      yield found

  def ask_to_stop(self) -> None:
    """Ask process 0 to end the run, as a follower that got a signal."""
    self._send_quietly(self._connections[0], {"command": _STOP})

  # -- both -----------------------------------------------------------------

  def _read(self, other: int) -> None:
    """Take messages until one of them is the last, or nobody sends any."""
    take = self._from_follower if self.leads else self._from_leader
    with self._connections[other] as connection:
      try:
        while (found := wire.receive(connection)) is not None:
          if not take(other, *found):
            return
      except OSError:
        pass
    self._lost(f"process {other} of the trainer has ended")

  def _from_follower(self, rank: int, message: Any, arrays: Any) -> bool:
    del arrays
    if message["command"] == _FAILED:
      self._lost(f"process {rank} of the trainer: {message['line']}")
      return False
    self._on_stop()
    return True

  def _from_leader(self, rank: int, message: Any, arrays: Any) -> bool:
    del rank
    if message["command"] == _FAILED:
      if self._leaving.is_set():
        return False  # it is about the failure of this process
      self._leaving.set()
      code = message["code"]
      line = f"process 0 of the trainer: {message['line']}"
      end_process("" if code == _INTERRUPTED else line, code)
    made = None
    if arrays:
      self._can_receive.wait()
      made = self._receive(message, arrays)
    self._messages.put((message, made))
    return message["command"] != _END

  def _lost(self, line: str) -> None:
    """End this process, because another one has ended before its time."""
    if self._leaving.is_set():
      return
    self.lost.set()
    self._fail_others(line, LOST)
    supervisor_lib.start_thread(
      "clean-up", self._before_ending, lambda error: None
    ).join(1.0)
    end_process(line)

  def _fail_others(self, line: str, code: int) -> None:
    self._leaving.set()
    message = {"command": _FAILED, "line": line, "code": code}
    for connection in self._connections.values():
      self._send_quietly(connection, message)

  def _send_quietly(
    self, connection: socket.socket, message: Mapping[str, Any]
  ) -> None:
    # A batch may be on its way to a process that does not read any more.
    if not self._sending.acquire(timeout=1.0):
      return
    try:
      wire.send(connection, message)
    except OSError:
      pass
    finally:
      self._sending.release()


def alone() -> World:
  """Return the world of a single process."""
  return World(0, 1, {})
