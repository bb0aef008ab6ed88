"""Clients that try to harm a server, in a process of their own.

    python benchmarks/hostile_clients.py --address=127.0.0.1:8000 --seconds=30

Each kind of attack has some clients, who repeat it until the time is up. The
attacks are: bodies that are expensive to parse, to check or to tokenise, bodies
that are not JSON, requests for many choices, bodies that arrive a byte at a
time, clients that leave in the middle of a stream, and pipelined requests. With
--grpc, messages that are not protobuf are sent there.

Use it only against your own server on this machine: any address that is not
loopback is refused.

The last line is one JSON object: how often each status was returned, by kind of
attack. `none` means that the server ended a connection without an answer.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Sequence
import ipaddress
import itertools
import json
import sys
import time
from typing import Any

from absl import app
from absl import flags
import grpc
import http_exchange

_ADDRESS = flags.DEFINE_string("address", "", "Host and port of the server.")
_GRPC = flags.DEFINE_string("grpc", "", "Host and port of its gRPC service.")
_SECONDS = flags.DEFINE_float(
  "seconds", 30.0, "Length of the attack.", lower_bound=0.0
)
_EACH = flags.DEFINE_integer("each", 4, "Clients of each kind.", 1)
_ONLY = flags.DEFINE_list("only", [], "Kinds of attack; by default all.")
_FROM = flags.DEFINE_string(
  "source", "127.0.0.1", "Loopback address that the clients use."
)

_PATIENCE_S = 60.0
_MEGABYTE = 1_000_000
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"

Statuses = collections.Counter


def _json(**fields: Any) -> bytes:
  return json.dumps({"model": "policy", **fields}).encode()


def _bodies() -> dict[str, tuple[str, bytes]]:
  """Return path and body of the attacks that consist of a body only."""
  many = _MEGABYTE // 12
  return {
    "messages": (_CHAT, _json(messages=[{}] * (_MEGABYTE // 4 - 20))),
    "parts": (
      _CHAT,
      _json(
        messages=[
          {
            "role": "user",
            "content": [{"type": "text", "text": ""}] * (_MEGABYTE // 30),
          }
        ]
      ),
    ),
    "long text": (_COMPLETIONS, _json(prompt="1" * (_MEGABYTE - 100))),
    "long chat": (
      _CHAT,
      _json(messages=[{"role": "user", "content": "1 + 2 " * (many * 2 - 50)}]),
    ),
    "token ids": (_COMPLETIONS, _json(prompt=[5] * (_MEGABYTE // 3 - 50))),
    "texts": (_COMPLETIONS, _json(prompt=["1"] * (_MEGABYTE // 5 - 50))),
    "fields": (_COMPLETIONS, _json(**{f"x{i}": 1 for i in range(many)})),
    "stop ids": (
      _COMPLETIONS,
      _json(prompt="1", stop_token_ids=["a"] * (_MEGABYTE // 5 - 50)),
    ),
    "nesting": (_COMPLETIONS, b"[" * _MEGABYTE),
    "no JSON": (_COMPLETIONS, _json(prompt="1" * 1000)[:-2]),
    "equal names": (_COMPLETIONS, b'{"a": 1' + b', "a": 1' * 20_000 + b"}"),
    "a name twice": (
      _COMPLETIONS,
      b"{"
      + b"".join(b'"%x": 1, ' % i for i in range(many))
      + b'"%x": 1}' % (many - 1),
    ),
    "large number": (_COMPLETIONS, b'{"seed": ' + b"9" * 900_000 + b"}"),
  }


async def _send(
  address: str, path: str, body: bytes, statuses: Statuses
) -> None:
  async with _connection(address) as (reader, writer):
    writer.write(http_exchange.post(address, path, body))
    statuses[await http_exchange.status(reader)] += 1
    while await reader.read(1 << 16):
      pass


def _connection(address: str):
  return http_exchange.connection(address, source=_FROM.value)


async def _storm(address: str, statuses: Statuses) -> None:
  """Request as many choices as allowed, and read to the end."""
  body = _json(prompt="1 + 2\n", n=128, max_tokens=16, stream=True)
  await _send(address, _COMPLETIONS, body, statuses)


async def _vanish(address: str, statuses: Statuses) -> None:
  """Leave when the first tokens have arrived."""
  body = _json(prompt="1 + 2\n", n=8, max_tokens=16, stream=True)
  async with _connection(address) as (reader, writer):
    writer.write(http_exchange.post(address, _COMPLETIONS, body))
    statuses[await http_exchange.status(reader)] += 1


async def _dribble(address: str, statuses: Statuses) -> None:
  """Announce a body and send it a byte at a time."""
  request = http_exchange.post(address, _COMPLETIONS, b" " * 8000)
  async with _connection(address) as (reader, writer):
    writer.write(request[:-8000])
    answer = asyncio.ensure_future(http_exchange.status(reader))
    while not answer.done():
      writer.write(b" ")
      await asyncio.wait({answer}, timeout=0.5)
    statuses[answer.result()] += 1


async def _pipeline(address: str, statuses: Statuses) -> None:
  """Send fifty requests at once on one connection."""
  body = _json(prompt="1 + 2\n", max_tokens=1)
  one = http_exchange.post(address, _COMPLETIONS, body, is_last=False)
  async with _connection(address) as (reader, writer):
    writer.write(one * 50)
    writer.write_eof()
    text = await reader.read(1 << 20)
    statuses["pipelined"] += text.count(b"HTTP/1.1 ")


async def _noise(address: str, statuses: Statuses) -> None:
  """Send bytes that are not HTTP."""
  async with _connection(address) as (reader, writer):
    writer.write(bytes(range(256)) * 100 + b"\r\n\r\n")
    statuses[await http_exchange.status(reader)] += 1


async def _no_protobuf(stub: Any, statuses: Statuses) -> None:
  """Send bytes that are not a message of JetStream's."""
  try:
    async for _ in stub(b"\xff" * 40, timeout=_PATIENCE_S):
      pass
  except grpc.aio.AioRpcError as error:
    statuses[error.code().name] += 1


async def _repeat(
  attack: Callable[[Statuses], Awaitable[None]],
  statuses: Statuses,
  end_s: float,
) -> None:
  while time.monotonic() < end_s:
    try:
      async with asyncio.timeout(_PATIENCE_S):
        await attack(statuses)
    except (OSError, EOFError, ValueError):
      statuses["none"] += 1
      await asyncio.sleep(0.05)  # while there is no server


async def _attack(address: str) -> dict[str, Statuses]:
  """Run all kinds of attack at the same time."""
  kinds: dict[str, Callable[[Statuses], Awaitable[None]]] = {}
  for name, (path, body) in _bodies().items():
    kinds[name] = lambda statuses, path=path, body=body: _send(
      address, path, body, statuses
    )
  for one in (_storm, _vanish, _dribble, _pipeline, _noise):
    kinds[one.__name__.strip("_")] = lambda statuses, one=one: one(
      address, statuses
    )
  if _GRPC.value:
    stub = grpc.aio.insecure_channel(_GRPC.value).unary_stream(
      "/jetstream_proto.Orchestrator/Decode"
    )
    kinds["no protobuf"] = lambda statuses: _no_protobuf(stub, statuses)
  if unknown := set(_ONLY.value) - kinds.keys():
    sys.exit(f"error: only: {sorted(unknown)}; there are {sorted(kinds)}")
  chosen = {k: v for k, v in kinds.items() if k in (_ONLY.value or kinds)}
  end_s = time.monotonic() + _SECONDS.value
  seen = {name: Statuses() for name in chosen}
  clients = itertools.product(chosen.items(), range(_EACH.value))
  await asyncio.gather(
    *(_repeat(attack, seen[name], end_s) for (name, attack), _ in clients)
  )
  return seen


def main(argv: Sequence[str]) -> None:
  """Attack until the time is up, and print how the server answered."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  for address in filter(None, (_ADDRESS.value, _GRPC.value)):
    host = address.rpartition(":")[0]
    if not ipaddress.ip_address(host).is_loopback:
      sys.exit(f"error: address: {host} is no loopback address")
  seen = asyncio.run(_attack(_ADDRESS.value))
  print(json.dumps({name: dict(counts) for name, counts in seen.items()}))


if __name__ == "__main__":
  app.run(main)
