"""How two processes of a run recognise each other before they say anything.

Both know a key, which nobody else can read. Neither sends it: each proves that
it knows it, by a digest of the key and of random bytes of both.

    who listens      its random bytes                        32 bytes
    who connects     its random bytes, and its proof         64 bytes
    who listens      its proof                               32 bytes

So nothing is read from a stranger but 64 bytes, and nothing of them is parsed.
"""

from collections.abc import Generator
import dataclasses
import hmac
import math
import secrets
import selectors
import socket
import time
from typing import Any

_SIZE = 32  # of random bytes, and of a proof
_LOOK_S = 0.5
_PATIENCE_S = 10.0
# Further callers take the places of those who have waited longest.
_MOST_CALLERS = 256


class StrangerError(ConnectionError):
  """The other end does not know the key."""


def _proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
  """Return the digest with which an end of a connection proves itself.

  Args:
    key: of the run.
    role: of that end, so that neither can send back what the other one sent.
    first: the random bytes of who listens.
    second: the random bytes of who connects.
  """
  return hmac.digest(key, role + first + second, "sha256")


def join(connection: socket.socket, key: bytes) -> None:
  """Recognise the process that listens, as the one that has connected.

  Raises:
    StrangerError: it does not know the key, or has refused this one.
    OSError: the connection is lost, or its timeout has passed.
  """
  theirs = _exactly(connection, _SIZE)
  ours = secrets.token_bytes(_SIZE)
  connection.sendall(ours + _proof(key, b"connects", theirs, ours))
  proof = _exactly(connection, _SIZE)
  if not hmac.compare_digest(proof, _proof(key, b"listens", theirs, ours)):
    raise StrangerError("it does not know the key")


def _exactly(connection: socket.socket, size: int) -> bytes:
  data = b""
  while len(data) < size:
    if not (more := connection.recv(size - len(data))):
      raise StrangerError("it has closed the connection")
    data += more
  return data


@dataclasses.dataclass(frozen=True)
class _Caller:
  """Who has connected and has not proved anything yet.

  Attributes:
    until_s: how long it may take, on the monotonic clock.
    sent: the random bytes that it was sent.
    said: what it has answered so far.
  """

  until_s: float
  sent: bytes
  said: bytearray = dataclasses.field(default_factory=bytearray)


class Door:
  """Lets in who knows the key. Nobody waits for a caller who is slow.

  Threads: one.

  Attributes:
    num_refused: callers who have not proved that they know the key.
  """

  def __init__(self, listener: socket.socket, key: bytes):
    """Open a door; `arrivals` closes it.

    Args:
      listener: a socket that listens, which stays with the caller.
      key: of the run.
    """
    listener.setblocking(False)
    self._listener = listener
    self._key = key
    self._callers: dict[socket.socket, _Caller] = {}
    self._selector = selectors.DefaultSelector()
    self._selector.register(listener, selectors.EVENT_READ)
    self.num_refused = 0

  def arrivals(
    self, timeout_s: float = math.inf
  ) -> Generator[socket.socket, None, None]:
    """Yield connections to those who know the key, until the time is up.

    The connections block, and have no timeout.
    """
    end_s = time.monotonic() + timeout_s
    try:
      while time.monotonic() < end_s:
        for ready, _ in self._selector.select(_LOOK_S):
          connection: Any = ready.fileobj
          if connection is self._listener:
            self._greet()
          elif self._is_known(connection):
            yield connection
        now_s = time.monotonic()
        for connection, caller in list(self._callers.items()):
          if caller.until_s < now_s:
            self._refuse(connection)
    finally:
      for connection in self._callers:
        connection.close()
      self._selector.close()

  def _greet(self) -> None:
    """Accept a caller, and send it random bytes."""
    try:
      connection, _ = self._listener.accept()
    except OSError:  # it has left already
      return
    connection.setblocking(False)
    sent = secrets.token_bytes(_SIZE)
    self._callers[connection] = _Caller(time.monotonic() + _PATIENCE_S, sent)
    self._selector.register(connection, selectors.EVENT_READ)
    try:
      connection.send(sent)  # there is room for so few bytes
    except OSError:
      self._refuse(connection)
    if len(self._callers) > _MOST_CALLERS:
      self._refuse(next(iter(self._callers)))

  def _is_known(self, connection: socket.socket) -> bool:
    """Read more of what a caller says; True once it has proved itself."""
    if (caller := self._callers.get(connection)) is None:
      return False  # it was refused a moment ago
    try:
      more = connection.recv(2 * _SIZE - len(caller.said))
      caller.said.extend(more)
      if more and len(caller.said) < 2 * _SIZE:
        return False
      theirs, proof = bytes(caller.said[:_SIZE]), caller.said[_SIZE:]
      wanted = _proof(self._key, b"connects", caller.sent, theirs)
      if not hmac.compare_digest(proof, wanted):
        raise StrangerError
      connection.send(_proof(self._key, b"listens", caller.sent, theirs))
      connection.setblocking(True)
    except OSError:
      self._refuse(connection)
      return False
    self._forget(connection)
    return True

  def _refuse(self, connection: socket.socket) -> None:
    self.num_refused += 1
    self._forget(connection)
    connection.close()

  def _forget(self, connection: socket.socket) -> None:
    self._selector.unregister(connection)
    del self._callers[connection]
