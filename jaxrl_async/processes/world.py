"""Processes whose devices work together: one leads, and the others follow it.

The processes of a trainer form a world, and so do those of a replica. A device
program of several processes has to be started by all of them, in one order. The
process that leads holds everything else and decides what comes next. Before it
starts a program, it tells the others which one, as a command: a name and
arguments. They wait for that, for hours if need be, in a blocking read of a
socket. No device waits and no processor core is busy meanwhile.

The same connections show when a process ends. Its socket is closed by the
kernel, so all others know at once, even where their main thread is inside a
program that will never end. They then end with exit code 75, and whoever
started them may start all of them again. Losing a host without a word is
noticed by the keepalive of the connections.

Messages are pickled, so a connection is made only with who knows the key of the
world: see `rendezvous`, which connects the processes. `alone` is the world of
one process, in which telling does nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import io
from multiprocessing import connection as connection_lib
import pickle
import queue
import sys
import threading
from typing import Any

from jaxrl_async.processes import supervisor as supervisor_lib

Arguments = Mapping[str, Any]
# Takes a command or a report: its name and its arguments.
Take = Callable[[str, Arguments], Any]

# Exit code after another process was lost: to start all of them again helps.
LOST = supervisor_lib.START_AGAIN
# What a follower of a trainer reports that was asked to stop.
STOP = "stop"

_INTERRUPTED = 130
_LEAVE_S = 5.0
_GRACE_S = 2.0

_END = "end"
_FAILED = "failed"


def end_process(line: str, code: int = LOST) -> None:
  """Print an error of one line, if there is one, and end this process at once.

  The interpreter is not shut down. A thread may be inside a program that waits
  for a process that is gone.
  """
  if line:
    print(f"error: {line}", file=sys.stderr, flush=True)
  sys.stdout.flush()
  supervisor_lib.end_now(code)


class World:
  """The processes that work together, as one of them sees them.

  Invariant: all followers get the same commands in the same order. A command is
  sent under a lock, to every follower, so that two threads of the process that
  leads cannot tell different followers different orders.

  Attributes:
    rank: number of this process. Process 0 leads.
    size: number of processes.
    is_one_host: whether all of them are on one host.
    service: HOST:PORT for JAX's own service in process 0.
    lost: is set when another process has ended before its time. A thread then
      ends this process too.
    common: objects by name that every process has. They are not sent; each
      process has its own in their places.

  Threads: `tell` and `report` may be called from any thread. A thread for each
  connection reads.
  """

  def __init__(
    self,
    rank: int,
    size: int,
    connections: Mapping[int, connection_lib.Connection],
    *,
    of: str = "trainer",
    is_one_host: bool = True,
    service: str = "",
  ):
    """Take over the connections, and watch them from now on.

    Args:
      connections: to each follower, or from a follower to process 0.
      of: what the processes form, for errors.
    """
    self.rank = rank
    self.size = size
    self.is_one_host = is_one_host
    self.service = service
    self.common: dict[str, Any] = {}
    self.lost = threading.Event()
    self._of = of
    self._connections = dict(connections)
    self._sending = threading.Lock()
    self._leaving = threading.Event()
    self._on_report: Take = lambda name, arguments: None
    self._before_ending: Callable[[str], None] = lambda line: None
    self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._receive: Take = lambda name, arguments: arguments
    self._can_receive = threading.Event()
    self._threads = [
      supervisor_lib.start_thread(
        f"process {other} of the {of}",
        functools.partial(self._read, other),
        self._commands.put if rank else lambda error: self._lost(str(error)),
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
    on_report: Take,
    before_ending: Callable[[str], None] = lambda line: None,
  ) -> None:
    """Say what to do about the followers.

    Args:
      on_report: takes what a follower reports.
      before_ending: is called before this process ends because a follower has,
        with why that one failed, or "" if it has not said so. It has some
        seconds.
    """
    self._on_report = on_report
    self._before_ending = before_ending

  def tell(
    self, command: str, parts: Sequence[Arguments] | None = None, **same: Any
  ) -> None:
    """Tell all followers what comes next. Only process 0 tells anything.

    The arguments are the same for all, but for those in `parts`, which holds
    some for each process of the world.
    """
    if not self.leads:
      return
    with self._sending:
      data = b"" if parts else self._pickled(command, same)
      for rank, connection in self._connections.items():
        if parts:
          data = self._pickled(command, {**same, **parts[rank]})
        try:
          connection.send_bytes(data)
        except OSError:
          # The thread that reads from it ends this process.
          self._leaving.wait()
          return

  def close(self, failure: str = "", code: int = 1) -> None:
    """End the world, as process 0 or as a follower that fails.

    Args:
      failure: why this process ends without the others, on one line. They end
        at once then, whatever they do. Without one, followers end after what
        they have been told.
      code: with which followers end if process 0 fails.
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

  def follow(
    self, receive: Take = lambda name, arguments: arguments
  ) -> Iterator[tuple[str, Any]]:
    """Yield the commands of process 0 until it ends the world.

    Args:
      receive: turns the arguments of a command into what is yielded with it. A
        thread calls it while the caller does what came before.
    """
    self._receive = receive
    self._can_receive.set()
    while True:
      found = self._commands.get()
      if isinstance(found, BaseException):
        raise found
      if found[0] == _END:
        self._leaving.set()
        return
      yield found

  def report(self, name: str, **arguments: Any) -> None:
    """Report something to process 0, which may be gone already."""
    self._send_quietly(self._connections[0], name, arguments)

  # -- both -----------------------------------------------------------------

  def _pickled(self, name: str, arguments: Arguments) -> memoryview:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    names = {id(value): name for name, value in self.common.items()}
    pickler.persistent_id = lambda obj: names.get(id(obj))
    pickler.dump((name, arguments))
    return file.getbuffer()

  def _read(self, other: int) -> None:
    """Take messages until one of them is the last, or nobody sends any."""
    take = self._from_follower if self.leads else self._from_leader
    with self._connections[other] as connection:
      while True:
        try:
          data = connection.recv_bytes()
        except (EOFError, OSError):
          break
        reader = pickle.Unpickler(io.BytesIO(data))
        reader.persistent_load = self.common.__getitem__
        del data
        if not take(other, *reader.load()):
          return
    self._lost(f"process {other} of the {self._of} has ended")

  def _from_follower(self, rank: int, name: str, arguments: Arguments) -> bool:
    if name == _FAILED:
      line = arguments["line"]
      self._lost(f"process {rank} of the {self._of}: {line}", line)
      return False
    self._on_report(name, arguments)
    return True

  def _from_leader(self, rank: int, name: str, arguments: Arguments) -> bool:
    del rank
    if name == _FAILED:
      if self._leaving.is_set():
        return False  # it is about the failure of this process
      self._leaving.set()
      code = arguments["code"]
      line = f"process 0 of the {self._of}: {arguments['line']}"
      end_process("" if code == _INTERRUPTED else line, code)
    if name == _END:
      self._commands.put((name, None))
      return False
    self._can_receive.wait()
    self._commands.put((name, self._receive(name, arguments)))
    return True

  def _lost(self, line: str, failure: str = "") -> None:
    """End this process, because another one has ended before its time."""
    if self._leaving.is_set():
      return
    self.lost.set()
    self._fail_others(line, LOST)
    supervisor_lib.start_thread(
      "clean-up", lambda: self._before_ending(failure), lambda error: None
    ).join(_LEAVE_S)
    end_process(line)

  def _fail_others(self, line: str, code: int) -> None:
    self._leaving.set()
    for connection in self._connections.values():
      self._send_quietly(connection, _FAILED, {"line": line, "code": code})

  def _send_quietly(
    self, connection: connection_lib.Connection, name: str, arguments: Arguments
  ) -> None:
    # A batch may be on its way to a process that does not read any more.
    if not self._sending.acquire(timeout=1.0):
      return
    try:
      connection.send_bytes(self._pickled(name, arguments))
    except OSError:
      pass
    finally:
      self._sending.release()


def alone() -> World:
  """Return the world of a single process."""
  return World(0, 1, {})
