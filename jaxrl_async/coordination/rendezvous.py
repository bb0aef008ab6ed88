"""How the processes of a trainer find each other, and what they check first.

Process 0 listens at an address that all of them know, and leaves a key in the
workdir, which only this user can read. Each other process connects, proves that
it knows the key (see `handshake`), and says who it is. Before anything else
happens, process 0 compares what has to be the same everywhere: the versions of
packages and of this code, the configuration, and the clocks. Then each side
writes a file into the directories that all of them share, and looks for those
of the others. Whatever is wrong ends all processes, each with the same line.

Processes that know the key trust each other. What they send is not encrypted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import errno
import ipaddress
import os
import pathlib
import secrets
import socket
import tempfile
import time
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.coordination import handshake
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import wire
from jaxrl_async.coordination import world as world_lib

# Clocks of hosts may be so far apart.
MAX_CLOCK_S = 5.0
# A shared file system may show a file late.
_SHARED_S = 10.0
_RETRY_S = 0.2
_HELLO_S = 10.0
_FIELD = "coordinator_address"
_KEY = ".key-of-this-start"
_KEY_BYTES = 32
# Of a message before the world begins. Settings and versions are the longest.
_MOST_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """A process of the world, and where the world begins.

  Attributes:
    rank: number of the process.
    size: number of processes.
    address: HOST:PORT at which process 0 listens.
    timeout_s: deadline for all processes to come, and to be found alike.
  """

  rank: int
  size: int
  address: str
  timeout_s: float


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


def meet(
  place: Place,
  facts: Mapping[str, Any],
  shared: Sequence[pathlib.Path],
  service: Callable[[], str] = lambda: "",
) -> tuple[world_lib.World, str]:
  """Connect all processes, and check that they can work together.

  Args:
    place: of this process.
    facts: JSON values by name that have to be the same in each process.
    shared: directories that every process has to see. They are created.
    service: is called in process 0; what it returns reaches all processes.

  Returns:
    The world, and the result of `service`.

  Raises:
    ConfigError: one line; the processes cannot work together.
  """
  parse_address(place.address)
  if place.rank == 0:
    return _Leader(place, facts, shared).meet(service)
  return _join(place, facts, shared)


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


class _Leader:
  """Process 0 while the others arrive."""

  def __init__(
    self,
    place: Place,
    facts: Mapping[str, Any],
    shared: Sequence[pathlib.Path],
  ):
    self._place = place
    self._facts = facts
    self._shared = shared
    self._found: dict[int, socket.socket] = {}
    self._hosts = {0: socket.gethostname()}

  def meet(self, service: Callable[[], str]) -> tuple[world_lib.World, str]:
    host, port = parse_address(self._place.address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
      listener = socket.create_server((bind_host(host), port), family=family)
    except OSError as error:
      raise sections.ConfigError(
        f"{_FIELD}: process 0 cannot listen at {self._place.address}"
        f" ({error.strerror}); use a free port of its host"
      ) from error
    try:
      with listener, _key_for_others(self._shared[0]) as key:
        self._accept_all(handshake.Door(listener, key))
      self._check_shared()
      about = service()
      hosts = set(self._hosts.values())
      for connection in self._found.values():
        wire.send(
          connection, {"welcome": about, "is_one_host": len(hosts) == 1}
        )
        connection.settimeout(None)
    except (sections.ConfigError, OSError) as error:
      line = (
        str(error)
        if isinstance(error, sections.ConfigError)
        else f"{_FIELD}: a process was lost while the trainer started ({error})"
      )
      self._refuse(line)
      raise sections.ConfigError(line) from error
    world = world_lib.World(
      0, self._place.size, self._found, is_one_host=len(hosts) == 1
    )
    return world, about

  def _refuse(self, line: str) -> None:
    """Tell all that came why nothing begins."""
    for connection in self._found.values():
      try:
        connection.settimeout(1.0)
        wire.send(connection, {"refused": line})
        connection.close()
      except OSError:
        pass

  def _accept_all(self, door: handshake.Door) -> None:
    size, timeout_s = self._place.size, self._place.timeout_s
    with contextlib.closing(door.arrivals(timeout_s)) as arrivals:
      for connection in arrivals:
        self._admit(connection)
        if len(self._found) == size - 1:
          return
    missing = sorted(set(range(1, size)) - self._found.keys())
    refused = (
      f"; {door.num_refused} callers did not know the key in the workdir"
    )
    raise sections.ConfigError(
      f"cluster.trainer_processes: {len(self._found) + 1} of {size} processes"
      f" came within {timeout_s:g} s (cluster.start_timeout_s); missing:"
      f" process {', '.join(map(str, missing))}"
      + refused
      * bool(door.num_refused)
    )

  def _admit(self, connection: socket.socket) -> None:
    """Check a process that has connected, and remember its connection."""
    world_lib.keep_alive(connection)
    connection.settimeout(_HELLO_S)
    try:
      found = _receive(connection)
      hello: Mapping[str, Any] = found[0] if found else {}
      if not _is_hello(hello):
        connection.close()
        return  # a stranger
      offset_s, uncertain_s = self._clock_of(connection)
    except OSError:
      connection.close()
      return
    rank, host = hello["rank"], hello["host"]
    who = f"process {rank} on {host}"
    is_new = 0 < rank < self._place.size and rank not in self._found
    self._found[rank if is_new else -1 - len(self._found)] = connection
    sections.require(
      is_new and hello["size"] == self._place.size,
      "process_id",
      f"{who} of {hello['size']} came to a trainer of {self._place.size}"
      f" processes{'' if is_new else ', in which it is there already'}; give"
      f" each process a number of its own from 0 to {self._place.size - 1}",
    )
    self._hosts[rank] = host
    for name in sorted(self._facts.keys() | hello["facts"].keys()):
      here, there = self._facts.get(name), hello["facts"].get(name)
      sections.require(
        here == there,
        name,
        f"{who} has {sections.shown(there)}, process 0 has"
        f" {sections.shown(here)}; they have to be the same",
      )
    sections.require(
      abs(offset_s) - uncertain_s <= MAX_CLOCK_S,
      "cluster.trainer_processes",
      f"the clock of {who} is {offset_s:+.1f} s from that of process 0, more"
      f" than {MAX_CLOCK_S:g} s; set the clocks of the hosts",
    )

  def _clock_of(self, connection: socket.socket) -> tuple[float, float]:
    """Return by how much another clock is ahead, and how uncertain that is."""
    start_s = time.time()
    wire.send(connection, {"clock": True})
    found = _receive(connection)
    end_s = time.time()
    time_s = found and found[0].get("time_s")
    if not isinstance(time_s, float):
      raise wire.WireError("closed")
    return time_s - (start_s + end_s) / 2, (end_s - start_s) / 2

  def _check_shared(self) -> None:
    """Check that all processes see the same directories."""
    token = secrets.token_hex(4)
    probes = []
    try:
      for directory in self._shared:
        probes.append(
          _write_probe(directory, token, 0, _field_of(directory, self._shared))
        )
      for rank, connection in self._found.items():
        connection.settimeout(_SHARED_S + _HELLO_S)
        wire.send(connection, {"probe": token})
        found = _receive(connection)
        if found is None:
          raise wire.WireError("closed")
        unseen = found[0]["unseen"]
        for directory in self._shared:
          wanted = _probe(directory, token, rank)
          is_seen = str(directory) not in unseen and _sees(wanted)
          sections.require(
            is_seen,
            _field_of(directory, self._shared),
            f"{directory} is not the same directory for process 0 on"
            f" {self._hosts[0]} and process {rank} on {self._hosts[rank]}; use"
            " one that all hosts share",
          )
    finally:
      for probe in probes:
        for written in probe.parent.glob(_probe(probe.parent, token, "*").name):
          written.unlink(missing_ok=True)


def _receive(connection: socket.socket) -> Any:
  return wire.receive(connection, most_bytes=_MOST_BYTES)


@contextlib.contextmanager
def _key_for_others(workdir: pathlib.Path) -> Iterator[bytes]:
  """Leave a key in the workdir for the length of the block, and give it.

  Raises:
    ConfigError: it cannot be written.
  """
  key, path = secrets.token_bytes(_KEY_BYTES), workdir / _KEY
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    # Only this user can read it, from the first moment on.
    descriptor, written = tempfile.mkstemp(prefix=_KEY, dir=workdir)
    with open(descriptor, "wb") as file:
      file.write(key)
    os.replace(written, path)
  except OSError as error:
    raise sections.ConfigError(
      f"workdir: {path} cannot be written ({error.strerror})"
    ) from error
  try:
    yield key
  finally:
    path.unlink(missing_ok=True)


def _is_hello(message: Mapping[str, Any]) -> bool:
  """Return whether a message is the first one of a process of a trainer."""
  kinds = {"rank": int, "size": int, "host": str, "facts": dict}
  return message.get("hello") == "jaxrl_async" and all(
    isinstance(message.get(name), kind) for name, kind in kinds.items()
  )


def _probe(
  directory: pathlib.Path, token: str, rank: int | str
) -> pathlib.Path:
  return directory / f".shared-{token}-{rank}"


def _field_of(directory: pathlib.Path, shared: Sequence[pathlib.Path]) -> str:
  """Return what names a shared directory for the user."""
  return "workdir" if directory == shared[0] else "transfer.directory"


def _write_probe(
  directory: pathlib.Path, token: str, rank: int, field: str
) -> pathlib.Path:
  path = _probe(directory, token, rank)
  try:
    directory.mkdir(parents=True, exist_ok=True)
    path.touch()
  except OSError as error:
    raise sections.ConfigError(
      f"{field}: {path} cannot be written ({error.strerror})"
    ) from error
  return path


def _sees(path: pathlib.Path) -> bool:
  """Whether a file is there, or comes within some seconds."""
  deadline = supervisor_lib.Deadline(_SHARED_S)
  while deadline.next_wait_s() > 0:
    try:
      if path.name in os.listdir(path.parent):  # asks the server of the files
        return True
    except OSError:
      pass
    time.sleep(_RETRY_S)
  return False


def _join(
  place: Place, facts: Mapping[str, Any], shared: Sequence[pathlib.Path]
) -> tuple[world_lib.World, str]:
  """Connect to process 0 and do what it asks for."""
  with contextlib.ExitStack() as stack:
    connection = stack.enter_context(_connect(place, shared[0]))
    found = _answer(connection, place, facts, shared)
    stack.pop_all()
  world = world_lib.World(
    place.rank,
    place.size,
    {0: connection},
    is_one_host=found["is_one_host"],
  )
  return world, found["welcome"]


def _answer(
  connection: socket.socket,
  place: Place,
  facts: Mapping[str, Any],
  shared: Sequence[pathlib.Path],
) -> dict[str, Any]:
  """Answer process 0 until it has seen enough, and return its last message."""
  world_lib.keep_alive(connection)
  connection.settimeout(place.timeout_s + 2 * _SHARED_S)
  hello = {
    "hello": "jaxrl_async",
    "rank": place.rank,
    "size": place.size,
    "host": socket.gethostname(),
    "facts": dict(facts),
  }
  written = []
  try:
    wire.send(connection, hello)
    while (found := _receive(connection)) is not None:
      message = found[0]
      if "clock" in message:
        wire.send(connection, {"time_s": time.time()})
      elif "probe" in message:
        token = message["probe"]
        unseen = []
        for directory in shared:
          if _sees(_probe(directory, token, 0)):
            field = _field_of(directory, shared)
            written.append(_write_probe(directory, token, place.rank, field))
          else:
            unseen.append(str(directory))
        wire.send(connection, {"unseen": unseen})
      elif "refused" in message:
        raise sections.ConfigError(message["refused"])
      else:
        connection.settimeout(None)
        return message
  except OSError as error:
    raise sections.ConfigError(
      f"{_FIELD}: process 0 at {place.address} was lost while the trainer"
      f" started ({error})"
    ) from error
  finally:
    for probe in written:
      probe.unlink(missing_ok=True)
  raise sections.ConfigError(
    f"{_FIELD}: process 0 at {place.address} has ended while the trainer"
    " started"
  )


def _connect(place: Place, workdir: pathlib.Path) -> socket.socket:
  """Connect to process 0, which may not listen yet.

  Raises:
    ConfigError: it does not come, or has left its key in another directory.
  """
  end_s = time.monotonic() + place.timeout_s
  while True:
    try:
      connection = socket.create_connection(
        parse_address(place.address), timeout=_HELLO_S
      )
    except OSError as error:
      line = (
        f"{_FIELD}: process 0 did not listen at {place.address} within"
        f" {place.timeout_s:g} s (cluster.start_timeout_s): {error}"
      )
    else:
      if _knows_the_key(connection, workdir):
        return connection
      connection.close()
      line = (
        f"workdir: process 0 at {place.address} has left no key in {workdir} as"
        f" {socket.gethostname()} sees it; use one that all hosts share"
      )
      end_s = min(end_s, time.monotonic() + _SHARED_S)
    if time.monotonic() > end_s:
      raise sections.ConfigError(line)
    time.sleep(_RETRY_S)


def _knows_the_key(connection: socket.socket, workdir: pathlib.Path) -> bool:
  """Return whether the other end knows the key that lies in the workdir."""
  try:
    os.listdir(workdir)  # asks the server of the files
    handshake.join(connection, (workdir / _KEY).read_bytes())
  except OSError:
    return False
  return True
