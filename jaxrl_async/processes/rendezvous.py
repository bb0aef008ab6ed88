"""How the processes of a world find each other, and what they check first.

Process 0 listens at an address that all of them know, and all of them know a
key that nobody else can read. Ray brings it to the processes of a replica; for
those of a trainer, process 0 leaves it in the directories that they share. Both
ends of a connection prove that they know the key, with the challenges of
`multiprocessing.connection`. Nothing is unpickled before, and a thread for each
caller sees to it that one who is silent delays nobody.

After that, the processes trust each other. Each says who it is, and process 0
compares what has to be the same everywhere: versions of packages and of this
code, and the configuration. Whatever is wrong ends all processes, each with the
same line. What they send is not encrypted.
"""

from collections.abc import Container, Iterator, Mapping
import contextlib
import dataclasses
import errno
import functools
import hashlib
import ipaddress
import multiprocessing
from multiprocessing import connection as connection_lib
import os
import pathlib
import queue
import secrets
import socket
import tempfile
import threading
import time
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib

# For the other end to prove that it knows the key.
_PATIENCE_S = 10.0
_MOST_CALLERS = 256  # at a time
_LOOK_S = 0.1
_RETRY_S = 0.2
# A shared file system may show a file late.
_SHARED_S = 10.0
_FIELD = "coordinator_address"

# Seconds without a sign of life after which a host counts as lost.
_IDLE_S = 20
_PROBE_S = 5
_NUM_PROBES = 8
# JAX's own way to notice a host that stands still; connections are quicker.
_HEARTBEAT_S = 120
_SHUTDOWN_S = 20


class StrangerError(ConnectionError):
  """The other end of a connection does not know the key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invitation:
  """How the processes of a world find the one that leads.

  Attributes:
    size: number of processes.
    address: host and port at which process 0 listens.
    key: that all of them know; or the directories in which it lies, see
      `key_for_others`.
    timeout_s: deadline for all processes to come.
    of: what the processes form, for errors.
  """

  size: int
  address: tuple[str, int]
  key: bytes | Mapping[str, pathlib.Path] = dataclasses.field(repr=False)
  timeout_s: float
  of: str = "trainer"

  @property
  def where(self) -> str:
    """HOST:PORT of process 0."""
    host, port = self.address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
  """Return host and port.

  Raises:
    ConfigError: it is not HOST:PORT.
  """
  host, _, port = address.rpartition(":")
  is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
  sections.require(
    bool(host) and is_port,
    _FIELD,
    f"{sections.shown(address)} is not HOST:PORT, such as 10.0.0.1:8476",
  )
  return host.strip("[]"), int(port)


def bind_host(host: str) -> str:
  """Return the address at which process 0 listens; "" is all interfaces.

  It is the given one, unless that belongs to no interface of this host. Such an
  address may lead here all the same, as that of a service does.

  Raises:
    OSError: nobody knows the host's name.
  """
  if host == "localhost" or host.startswith("127.") or host == "::1":
    return host
  (family, _, _, _, address), *_ = socket.getaddrinfo(
    host, 0, type=socket.SOCK_STREAM
  )
  # A host may know itself by a loopback address, and others by the real one.
  if _is_loopback(str(address[0])):
    return ""
  with socket.socket(family) as tried:
    try:
      tried.bind(address)
    except OSError as error:
      if error.errno != errno.EADDRNOTAVAIL:
        raise
      return ""
  return str(address[0])


def _is_loopback(address: str) -> bool:
  return ipaddress.ip_address(address).is_loopback


def listen(address: tuple[str, int]) -> socket.socket:
  """Return a socket of process 0 that listens at an address.

  Raises:
    ConfigError: it cannot.
  """
  host, port = address
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    return socket.create_server((bind_host(host), port), family=family)
  except OSError as error:
    raise sections.ConfigError(
      f"{_FIELD}: process 0 cannot listen at {host}:{port} ({error.strerror});"
      " use a free port of its host"
    ) from error


def new_key() -> bytes:
  """Return a key that nobody can guess."""
  return secrets.token_bytes(32)


def free_port() -> int:
  """Return a port of this host that is free now."""
  with socket.socket() as free:
    free.bind(("", 0))
    return free.getsockname()[1]


def connect_jax(world: world_lib.World, timeout_s: float) -> None:
  """Make the devices of all processes known to each.

  Raises:
    ConfigError: JAX could not.
  """
  # JAX listens at all interfaces unless it is told where.
  host = world.service.rpartition(":")[0].strip("[]")
  bound = world.leads and bind_host(host)
  import jax  # slow, and not needed before

  try:
    jax.distributed.initialize(
      world.service,
      world.size,
      world.rank,
      coordinator_bind_address=world.service if bound else None,
      cluster_detection_method="deactivate",
      **jax_timeouts(timeout_s),
    )
  except RuntimeError as error:
    raise sections.ConfigError(
      f"{_FIELD}: JAX's service at {world.service} cannot be used"
      f" ({' '.join(str(error).split())})"
    ) from error


def jax_timeouts(timeout_s: float) -> dict[str, Any]:
  """Return arguments of `jax.distributed.initialize`."""
  return {
    "initialization_timeout": int(timeout_s),
    "heartbeat_timeout_seconds": _HEARTBEAT_S,
    "shutdown_timeout_seconds": _SHUTDOWN_S,
  }


# -- the key -------------------------------------------------------------------


def _places_of_key(
  directories: Mapping[str, pathlib.Path],
) -> dict[str, pathlib.Path]:
  """Return files in shared directories, which other runs may use too."""
  first = str(next(iter(directories.values())))
  name = f".key-{hashlib.sha256(first.encode()).hexdigest()[:16]}"
  return {field: path / name for field, path in directories.items()}


@contextlib.contextmanager
def key_for_others(directories: Mapping[str, pathlib.Path]) -> Iterator[bytes]:
  """Leave a key in shared directories for the length of the block, and give it.

  Each directory has a part of it, so who knows the key sees all of them.

  Args:
    directories: by the names of the settings that name them. The first one
      belongs to this run alone.

  Raises:
    ConfigError: it cannot be written.
  """
  parts = []
  with contextlib.ExitStack() as stack:
    for field, path in _places_of_key(directories).items():
      parts.append(new_key())
      try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Only this user can read it, from the first moment on.
        descriptor, written = tempfile.mkstemp(
          prefix=path.name, dir=path.parent
        )
        with open(descriptor, "wb") as file:
          file.write(parts[-1])
        os.replace(written, path)
      except OSError as error:
        raise sections.ConfigError(
          f"{field}: {path} cannot be written ({error.strerror})"
        ) from error
      stack.callback(path.unlink, missing_ok=True)
    yield b"".join(parts)


def _read_key(directories: Mapping[str, pathlib.Path]) -> bytes | str:
  """Return the key that process 0 has left, or the setting where it is not."""
  parts = []
  for field, path in _places_of_key(directories).items():
    try:
      os.listdir(path.parent)  # asks the server of the files
      parts.append(path.read_bytes())
    except OSError:
      return field
  return b"".join(parts)


def recognised(
  connected: socket.socket, key: bytes, *, listens: bool
) -> connection_lib.Connection:
  """Return a connection to a process that proves that it knows the key.

  The kernel notices when the host at its other end is gone.

  Args:
    connected: the socket, which is closed.
    key: of the world.
    listens: whether this process is the one that listens.

  Raises:
    StrangerError: it has not done so within some seconds.
  """
  steps = [connection_lib.deliver_challenge, connection_lib.answer_challenge]
  with connected:
    connected.settimeout(None)
    connection = connection_lib.Connection(os.dup(connected.fileno()))
    cut = threading.Timer(_PATIENCE_S, _cut_off, [connected])
    cut.daemon = True
    cut.start()
    try:
      _keep_alive(connected)
      for step in steps if listens else reversed(steps):
        step(connection, key)
    except (
      OSError,
      EOFError,
      AssertionError,  # Python 3.11, for what is no challenge
      multiprocessing.AuthenticationError,
    ) as error:
      connection.close()
      raise StrangerError(f"it does not know the key ({error})") from error
    finally:
      cut.cancel()
  return connection


def _cut_off(connected: socket.socket) -> None:
  with contextlib.suppress(OSError):  # it has just been closed
    connected.shutdown(socket.SHUT_RDWR)


def _keep_alive(connected: socket.socket) -> None:
  connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  for name, value in (
    ("TCP_KEEPIDLE", _IDLE_S),
    ("TCP_KEEPINTVL", _PROBE_S),
    ("TCP_KEEPCNT", _NUM_PROBES),
  ):
    if hasattr(socket, name):  # they have other names on some systems
      connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -- process 0 -----------------------------------------------------------------


def _callers(
  listener: socket.socket, key: bytes, timeout_s: float
) -> Iterator[Any]:
  """Yield connections with what the caller says, until the time is up.

  A caller who does not get so far is an exception instead.
  """
  arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
  threads: list[threading.Thread] = []

  def greet(caller: socket.socket) -> None:
    connection = recognised(caller, key, listens=True)
    arrived.put((connection, connection.recv()))

  listener.settimeout(_LOOK_S)
  end_s = time.monotonic() + timeout_s
  while time.monotonic() < end_s:
    threads = [thread for thread in threads if thread.is_alive()]
    if len(threads) < _MOST_CALLERS:
      with contextlib.suppress(OSError):  # nobody has come
        caller, _ = listener.accept()
        threads.append(
          supervisor_lib.start_thread(
            "caller", functools.partial(greet, caller), arrived.put
          )
        )
    else:
      time.sleep(_LOOK_S)
    while not arrived.empty():
      yield arrived.get()


def gather(
  listener: socket.socket, invitation: Invitation, facts: Mapping[str, Any]
) -> world_lib.World:
  """Wait for the other processes, as the one that leads them.

  Args:
    listener: listens at the address of the invitation; it is closed.
    invitation: of the world, with the key.
    facts: values by name that have to be the same in each process.

  Raises:
    ConfigError: one line; the processes cannot work together.
  """
  size, of, key = invitation.size, invitation.of, invitation.key
  assert isinstance(key, bytes)
  connections: list[connection_lib.Connection] = []
  found: dict[int, connection_lib.Connection] = {}
  hosts = {socket.gethostname()}
  num_strangers = 0
  try:
    with listener:
      for came in _callers(listener, key, invitation.timeout_s):
        if isinstance(came, BaseException):
          num_strangers += isinstance(came, StrangerError)
          continue
        connection, hello = came
        connections.append(connection)
        hosts.add(hello["host"])
        _check_hello(hello, facts, size, found)
        found[hello["rank"]] = connection
        if len(found) == size - 1:
          break
    if missing := sorted(set(range(1, size)) - found.keys()):
      line = (
        f"cluster.{of}_processes: {len(found) + 1} of {size} processes came"
        f" within {invitation.timeout_s:g} s (cluster.start_timeout_s);"
        f" missing: process {', '.join(map(str, missing))}"
      )
      if num_strangers:
        line += f"; {num_strangers} callers did not know the key in the workdir"
      raise sections.ConfigError(line)
    about = {
      "service": f"{invitation.where.rpartition(':')[0]}:{free_port()}",
      "is_one_host": len(hosts) == 1,
    }
    for connection in connections:
      connection.send(about)
  except (sections.ConfigError, OSError) as error:
    line = str(error)
    if not isinstance(error, sections.ConfigError):
      line = f"{_FIELD}: a process was lost while the {of} started ({error})"
    for connection in connections:
      with contextlib.suppress(OSError):
        connection.send(line)
        connection.close()
    raise sections.ConfigError(line) from error
  return world_lib.World(0, size, found, of=of, **about)


def _check_hello(
  hello: Mapping[str, Any],
  facts: Mapping[str, Any],
  size: int,
  found: Container[int],
) -> None:
  """Check what a process says of itself.

  Raises:
    ConfigError: it cannot work with process 0.
  """
  rank = hello["rank"]
  who = f"process {rank} on {hello['host']}"
  is_new = 0 < rank < size and rank not in found
  sections.require(
    is_new and hello["size"] == size,
    "process_id",
    f"{who} of {hello['size']} came to a trainer of {size}"
    f" processes{'' if is_new else ', in which it is there already'}; give"
    f" each process a number of its own from 0 to {size - 1}",
  )
  for name in sorted(facts.keys() | hello["facts"].keys()):
    here, there = facts.get(name), hello["facts"].get(name)
    sections.require(
      here == there,
      name,
      f"{who} has {sections.shown(there)}, process 0 has"
      f" {sections.shown(here)}; they have to be the same",
    )


# -- the others ----------------------------------------------------------------


def join(
  invitation: Invitation, rank: int, facts: Mapping[str, Any]
) -> world_lib.World:
  """Connect to the process that leads, as process `rank` of 1 or more.

  Raises:
    ConfigError: one line; the processes cannot work together.
  """
  size, of = invitation.size, invitation.of
  host = socket.gethostname()
  hello = {"rank": rank, "size": size, "host": host, "facts": dict(facts)}
  connection = _connected(invitation)
  try:
    connection.send(hello)
    said = connection.recv()
  except (EOFError, OSError) as error:
    connection.close()
    raise sections.ConfigError(
      f"{_FIELD}: process 0 at {invitation.where} was lost while the {of}"
      f" started ({error or 'it has ended'})"
    ) from error
  if isinstance(said, str):
    connection.close()
    raise sections.ConfigError(said)
  return world_lib.World(rank, size, {0: connection}, of=of, **said)


def _connected(invitation: Invitation) -> connection_lib.Connection:
  """Connect to process 0, which may not listen yet.

  Raises:
    ConfigError: it does not come, or has left its key in another directory.
  """
  where, key = invitation.where, invitation.key
  end_s = time.monotonic() + invitation.timeout_s
  while True:
    try:
      connected = socket.create_connection(
        invitation.address, timeout=_PATIENCE_S
      )
    except OSError as error:
      line = (
        f"{_FIELD}: process 0 did not listen at {where} within"
        f" {invitation.timeout_s:g} s (cluster.start_timeout_s): {error}"
      )
    else:
      known = key if isinstance(key, bytes) else _read_key(key)
      with connected, contextlib.suppress(StrangerError):
        if isinstance(known, bytes):
          return recognised(connected, known, listens=False)
      line = f"{_FIELD}: process 0 at {where} does not know the key"
      if not isinstance(key, bytes):
        field = known if isinstance(known, str) else next(iter(key))
        line = (
          f"{field}: process 0 at {where} has left no key in {key[field]} as"
          f" {socket.gethostname()} sees it; use one that all hosts share"
        )
      end_s = min(end_s, time.monotonic() + _SHARED_S)
    if time.monotonic() > end_s:
      raise sections.ConfigError(line)
    time.sleep(_RETRY_S)


def meet(
  rank: int,
  invitation: Invitation,
  directories: Mapping[str, pathlib.Path],
  facts: Mapping[str, Any],
) -> world_lib.World:
  """Connect processes that share directories; whoever starts them has no key.

  Args:
    rank: number of this process.
    invitation: of the world; its key is not read.
    directories: as in `key_for_others`.
    facts: as in `gather`.

  Raises:
    ConfigError: one line; the processes cannot work together.
  """
  if rank:
    invitation = dataclasses.replace(invitation, key=directories)
    return join(invitation, rank, facts)
  with listen(invitation.address) as listener:
    with key_for_others(directories) as key:
      invitation = dataclasses.replace(invitation, key=key)
      return gather(listener, invitation, facts)
