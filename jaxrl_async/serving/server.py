"""The HTTP server in its thread: uvicorn on a socket of our own."""

import asyncio
import logging
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http import h11_impl

_HEADER_TIMEOUT_S = 20.0
_KEEP_ALIVE_S = 30.0
_SHUTDOWN_S = 5
_BACKLOG = 2048


class _Protocol(h11_impl.H11Protocol):
  """Uvicorn's, which alone would wait for a request's headers for ever."""

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._last_look: Any = None
    self._look_later()

  def connection_lost(self, exc: Exception | None) -> None:
    super().connection_lost(exc)
    self._timer.cancel()

  def _look_later(self) -> None:
    self._timer = self.loop.call_later(_HEADER_TIMEOUT_S / 2, self._look)

  def _look(self) -> None:
    # Between two requests uvicorn's keep-alive timer runs. Without it, and with
    # the last answer sent, headers are on their way: for the second time?
    cycle = self.cycle
    is_answered = cycle is None or cycle.response_complete
    is_waiting = is_answered and self.timeout_keep_alive_task is None
    look = (is_waiting, id(cycle))
    if is_waiting and look == self._last_look:
      self.transport.close()
      return
    self._last_look = look
    self._look_later()


class HttpServer:
  """Serves an application until stopped.

  Threads: `run` belongs to a thread of its own (uvicorn leaves signals alone
  there); the rest is for any other.
  """

  def __init__(self, app: Any, *, host: str, port: int, max_connections: int):
    """Binds the address, so that a port in use is an error here.

    Args:
      app: ASGI.
      host: name or address.
      port: 0 takes a free one, see `port`.
      max_connections: beyond them a 503 is all that is said.

    Raises:
      OSError: the address cannot be bound.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # With the protocol's number, without which asyncio leaves out TCP_NODELAY:
    # each answer on a connection that stays open then waits for a delayed ACK.
    self._socket = socket.socket(family, kind, protocol)
    try:
      self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      self._socket.bind(address)
      # Only who listens has the port: two may be bound to it until then.
      self._socket.listen(_BACKLOG)
    except OSError:
      self._socket.close()
      raise
    self.port = self._socket.getsockname()[1]
    self._ended = threading.Event()
    # Not a line for each client that is gone while it is being answered.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    self._server = uvicorn.Server(
      uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",  # not a line for each client that speaks no HTTP
        server_header=False,
        timeout_keep_alive=int(_KEEP_ALIVE_S),
        timeout_graceful_shutdown=_SHUTDOWN_S,
        limit_concurrency=max_connections,
      )
    )

  def run(self) -> None:
    """Serves until `stop`."""
    try:
      asyncio.run(self._server.serve(sockets=[self._socket]))
    finally:
      self._socket.close()
      self._ended.set()

  @property
  def has_started(self) -> bool:
    """Connections are accepted."""
    return self._server.started

  def stop(self) -> None:
    """No new connections; answers under way have some seconds left."""
    self._server.should_exit = True

  def wait(self, timeout_s: float) -> bool:
    """Waits for the end of `run`; False if that did not come."""
    return self._ended.wait(timeout_s)
