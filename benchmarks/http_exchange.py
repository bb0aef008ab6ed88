"""Plain HTTP for benchmarks whose clients share the cores with the server.

httpx took 10 ms of a core for each exchange. This takes 0.6 ms.
"""

import asyncio
from collections.abc import Awaitable
import contextlib
import json
import time
from typing import Any


@contextlib.asynccontextmanager
async def connection(address: str, *, source: str = ""):
  """Open a connection for the length of a block; give its reader and writer.

  Args:
    address: host and port.
    source: address that the connection comes from; any if empty.
  """
  host, _, port = address.rpartition(":")
  reader, writer = await asyncio.open_connection(
    host, int(port), local_addr=(source, 0) if source else None
  )
  try:
    yield reader, writer
  finally:
    writer.close()


def post(
  address: str, path: str, body: bytes, *, is_last: bool = True
) -> bytes:
  """Return the bytes of a request.

  Args:
    address: host and port.
    path: path on the server.
    body: sent as JSON, whatever it is.
    is_last: whether the server may close the connection after its answer.
  """
  head = (
    f"POST {path} HTTP/1.1",
    f"host: {address}",
    "content-type: application/json",
    f"content-length: {len(body)}",
    f"connection: {'close' if is_last else 'keep-alive'}",
  )
  return "\r\n".join((*head, "", "")).encode() + body


async def status(reader: asyncio.StreamReader) -> int:
  """Return the status of the answer whose head comes next."""
  head = await reader.readuntil(b"\r\n\r\n")
  return int(head.split(maxsplit=2)[1])


async def whole(reader: asyncio.StreamReader) -> tuple[int, bytes]:
  """Return status and body of an answer that states its length."""
  head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
  (length,) = (
    line.partition(":")[2]
    for line in head.split("\r\n")
    if line.startswith("content-length:")
  )
  return int(head.split(maxsplit=2)[1]), await reader.readexactly(int(length))


async def ask_repeatedly(
  address: str, path: str, fields: dict[str, Any], num_times: int
) -> list[float]:
  """Time equal requests, one after the other on one connection."""
  request = post(address, path, json.dumps(fields).encode(), is_last=False)
  times_s = []
  async with connection(address) as (reader, writer):
    for _ in range(num_times):
      start_s = time.perf_counter()
      writer.write(request)
      code, body = await whole(reader)
      times_s.append(time.perf_counter() - start_s)
      if code != 200:
        raise OSError(f"{code}: {body.decode()}")
  return times_s


async def wait_for_server(address: str, ended: Awaitable[Any]) -> None:
  """Return when the server accepts connections, or when its process has ended.

  It tries only twice a second. A client that tries a free port of its own
  machine very often is at some time given that port for its own end of the
  connection.
  """
  end = asyncio.ensure_future(ended)
  while not end.done():
    with contextlib.suppress(OSError):
      async with connection(address):
        break
    await asyncio.wait({end}, timeout=0.5)
  end.cancel()


async def watch_health(address: str, times_s: list[float]) -> None:
  """Append the time of each answer of /health, until it is cancelled."""
  request = f"GET /health HTTP/1.1\r\nhost: {address}\r\n\r\n".encode()
  while True:
    start_s = time.perf_counter()
    try:
      async with connection(address) as (reader, writer):
        writer.write(request)
        await whole(reader)
      times_s.append(time.perf_counter() - start_s)
    except (OSError, EOFError):
      pass  # the server has not started yet, or has ended
    await asyncio.sleep(0.05)
