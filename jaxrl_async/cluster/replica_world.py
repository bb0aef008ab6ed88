"""The processes of one replica: one of them leads, and the others follow.

Weights that do not fit into the devices of one host are split over several, and
an engine then has a process on each of them. All of these processes have to
start the same programs in the same order. The one that leads is the replica, as
the coordinator knows it. It tells the others what it is about to do, see
`led_replica`, and they do the same.

Messages are Python objects that are pickled, so a connection is made only with
a key that the processes get from whoever starts them. When a process ends, the
kernel closes its connections. The others then end too, even where one of their
threads is inside a program that will never end.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import io
import itertools
from multiprocessing import connection as connection_lib
import pickle
import secrets
import socket
import threading
from typing import Any

import jax

from jaxrl_async.coordination import handshake
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import world as world_lib

# JAX's own way to notice a host that stands still; connections are quicker.
_HEARTBEAT_S = 120
_SHUTDOWN_S = 20
_FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invitation:
  """How the processes of a replica find the one that leads.

  Attributes:
    size: number of processes.
    address: host and port at which the first process listens.
    service: HOST:PORT for JAX's own service in the first process.
    key: that a process has to know in order to connect.
    timeout_s: deadline for JAX's service to connect them.
  """

  size: int
  address: tuple[str, int]
  service: str
  key: bytes = dataclasses.field(repr=False)
  timeout_s: float


class LostError(ConnectionError):
  """Another process of the replica has ended."""


class _Pickler(pickle.Pickler):
  """Pickles objects that all processes have as their names."""

  def __init__(self, file: io.BytesIO, names: Mapping[int, str]):
    super().__init__(file)
    self._names = names

  def persistent_id(self, obj: Any) -> str | None:
    return self._names.get(id(obj))


class _Unpickler(pickle.Unpickler):
  """Reads what `_Pickler` wrote."""

  def __init__(self, file: io.BytesIO, common: Mapping[str, Any]):
    super().__init__(file)
    self._common = common

  def persistent_load(self, pid: str) -> Any:
    return self._common[pid]


class Peers:
  """Connections to the other processes of a replica.

  Objects in `common` are not sent: every process has its own.

  Threads: any thread may send. One thread reads from each connection.
  """

  def __init__(self, connections: list[connection_lib.Connection]):
    """Take over the connections."""
    self.common: dict[str, Any] = {}
    self._connections = connections
    self._sending = threading.Lock()

  def send(self, *message: Any) -> None:
    """Send a message to all peers; all of them get messages in one order.

    Raises:
      LostError: a peer has ended.
    """
    file = io.BytesIO()
    names = {id(value): name for name, value in self.common.items()}
    _Pickler(file, names).dump(message)
    try:
      with self._sending:
        for connection in self._connections:
          connection.send_bytes(file.getbuffer())
    except OSError as error:
      raise LostError(f"a process of the replica has ended: {error}") from error

  def fail(self, error: BaseException) -> None:
    """Tell the peers, if they are still there, why this process ends."""
    try:
      self.send(_FAILED, f"{type(error).__name__}: {error}")
    except LostError:
      pass

  def watch(
    self,
    receive: Callable[[tuple[Any, ...]], None],
    on_failure: Callable[[BaseException], None],
  ) -> None:
    """Read messages in threads of their own, until a peer ends.

    Args:
      receive: takes a message.
      on_failure: is called with a `LostError` when a peer has ended, with a
        RuntimeError when it has said why it will, and with what `receive`
        raised.
    """
    for connection in self._connections:
      supervisor_lib.start_thread(
        "peers of the replica",
        functools.partial(self._read, connection, receive),
        on_failure,
      )

  def _read(
    self,
    connection: connection_lib.Connection,
    receive: Callable[[tuple[Any, ...]], None],
  ) -> None:
    while True:
      try:
        data = connection.recv_bytes()
      except (EOFError, OSError) as error:
        raise LostError("a process of the replica has ended") from error
      message = _Unpickler(io.BytesIO(data), self.common).load()
      if message[0] == _FAILED:
        raise RuntimeError(message[1])
      receive(message)


class Listener:
  """The process that leads, while the others arrive."""

  def __init__(self, host: str, size: int, timeout_s: float):
    """Listen at a free port.

    Args:
      host: address of this process that the others can reach.
      size: number of processes.
      timeout_s: deadline for JAX's service to connect them.
    """
    key = secrets.token_bytes(32)
    self._listener = socket.create_server((host, 0), backlog=size)
    with socket.socket() as free:
      free.bind((host, 0))
      service = f"{host}:{free.getsockname()[1]}"
    port = self._listener.getsockname()[1]
    self.invitation = Invitation(
      size=size,
      address=(host, int(port)),
      service=service,
      key=key,
      timeout_s=timeout_s,
    )

  def meet(self) -> Peers:
    """Wait for the others, and let JAX connect all of them.

    Whoever starts the processes has to end this one if another never comes.

    Raises:
      RuntimeError: JAX could not.
    """
    door = handshake.Door(self._listener, self.invitation.key)
    with self._listener, contextlib.closing(door.arrivals()) as arrivals:
      connections = [
        _kept_alive(connection)
        for connection in itertools.islice(arrivals, self.invitation.size - 1)
      ]
    _initialize(self.invitation, 0)
    return Peers(connections)


def join(invitation: Invitation, rank: int) -> Peers:
  """Connect to the process that leads, as one of the others.

  Args:
    invitation: of that process.
    rank: number of this process, from 1.

  Raises:
    RuntimeError: JAX could not connect the processes.
    OSError: the process that leads cannot be reached.
  """
  with socket.create_connection(
    invitation.address, timeout=invitation.timeout_s
  ) as connection:
    handshake.join(connection, invitation.key)
    connection.settimeout(None)
    peers = Peers([_kept_alive(connection)])
  _initialize(invitation, rank)
  return peers


def _kept_alive(connection: socket.socket) -> connection_lib.Connection:
  """Return a connection that notices when the other host is gone."""
  world_lib.keep_alive(connection)
  return connection_lib.Connection(connection.detach())


def _initialize(invitation: Invitation, rank: int) -> None:
  """Make the devices of all processes known to each."""
  jax.distributed.initialize(
    invitation.service,
    invitation.size,
    rank,
    coordinator_bind_address=invitation.service,
    cluster_detection_method="deactivate",
    initialization_timeout=int(invitation.timeout_s),
    heartbeat_timeout_seconds=_HEARTBEAT_S,
    shutdown_timeout_seconds=_SHUTDOWN_S,
  )
