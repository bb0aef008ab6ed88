"""Messages between processes over a socket: JSON, and arrays as raw bytes.

    8 bytes    length of the header
    header     {"message": {...}, "arrays": [[name, dtype, length], ...]}
    bytes      of each array, in this order

Nothing is pickled. The arrays have one axis, and hold numbers. A sender may
give each of them in pieces, which are sent one after the other without being
joined.

Messages come from processes that have proved who they are (see `handshake`).
What is no message is an error all the same, and takes no more memory than a
message may have.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import socket
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct("!Q")
_LONGEST_HEADER = 2**26
_MOST_BYTES = 2**34
_PIECE_BYTES = 2**20
_DTYPES = {
  np.dtype(name).str: np.dtype(name)
  for name in "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()
}


class WireError(ConnectionError):
  """What arrived is not a message."""


def send(
  connection: socket.socket,
  message: Mapping[str, Any],
  arrays: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> None:
  """Send a message.

  Args:
    connection: a stream.
    message: a JSON object.
    arrays: by name, each in pieces of one dtype. There is at least one piece.

  Raises:
    OSError: the connection is closed.
  """
  arrays = arrays or {}
  header = json.dumps(
    {
      "message": message,
      "arrays": [
        [name, pieces[0].dtype.str, sum(map(len, pieces))]
        for name, pieces in arrays.items()
      ],
    }
  ).encode()
  connection.sendall(_LENGTH.pack(len(header)) + header)
  for pieces in arrays.values():
    for joined in _in_blocks(pieces):
      connection.sendall(joined)


def _in_blocks(pieces: Sequence[np.ndarray]) -> Iterator[Any]:
  """Yield the bytes of all pieces, with small pieces joined."""
  small = bytearray()
  for piece in pieces:
    if piece.nbytes >= _PIECE_BYTES:
      if small:
        yield small
      small = bytearray()
      yield piece.data.cast("B")
    else:
      small += piece.tobytes()
      if len(small) >= _PIECE_BYTES:
        yield small
        small = bytearray()
  if small:
    yield small


def receive(
  connection: socket.socket, *, most_bytes: int = _MOST_BYTES
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
  """Wait for a message, and return it with its arrays.

  The result is None if the other side has closed the connection.

  Args:
    connection: a stream.
    most_bytes: that the message and its arrays may have together.

  Raises:
    WireError: something else arrived, or a message ends early or is too large.
    OSError: the connection is lost, or its timeout has passed.
  """
  prefix = bytearray(_LENGTH.size)
  if not _fill(connection, memoryview(prefix)):
    return None
  (length,) = _LENGTH.unpack(prefix)
  if length > min(_LONGEST_HEADER, most_bytes):
    raise WireError(f"a header of {length} bytes")
  header = bytearray(length)
  _fill(connection, memoryview(header), is_needed=True)
  try:
    message, described = _parsed(header)
    num_bytes = sum(
      dtype.itemsize * count for dtype, count in described.values()
    )
    if length + num_bytes > most_bytes:
      raise ValueError(f"it has more than {most_bytes} bytes")
    arrays = {
      name: np.empty(count, dtype) for name, (dtype, count) in described.items()
    }
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise WireError(f"not a message ({error})") from error
  except MemoryError as error:
    raise WireError("no memory for a message") from error
  for array in arrays.values():
    if array.nbytes:
      _fill(connection, array.data.cast("B"), is_needed=True)
  return message, arrays


def _parsed(
  header: bytearray,
) -> tuple[dict[str, Any], dict[str, tuple[np.dtype, int]]]:
  """Return the message of a header, and dtype and length of each array."""
  content = json.loads(header)
  message, described = content["message"], {}
  for name, dtype, count in content["arrays"]:
    if not isinstance(name, str) or type(count) is not int or count < 0:
      raise ValueError("an array without name and length")
    described[name] = _DTYPES[dtype], count
  if not isinstance(message, dict):
    raise TypeError("no JSON object")
  return message, described


def _fill(
  connection: socket.socket, buffer: memoryview, *, is_needed: bool = False
) -> bool:
  """Receive as many bytes as the buffer has; return False at the end."""
  done = 0
  while done < len(buffer):
    count = connection.recv_into(buffer[done:])
    if not count:
      if done or is_needed:
        raise WireError("a message that ends early")
      return False
    done += count
  return True
