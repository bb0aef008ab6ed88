"""The HTTP server: uvicorn in a thread, on a socket opened here."""

import asyncio
import logging
from typing import Any

import uvicorn
from uvicorn.protocols.http import h11_impl

from jaxrl_async.serving import addresses

_HEADER_TIMEOUT_S = 20.0
_KEEP_ALIVE_S = 30.0
_SHUTDOWN_S = 5
_BACKLOG = 2048


class _Protocol(h11_impl.H11Protocol):
  """Uvicorn's protocol with a timeout for the headers of a request.

  Uvicorn alone would wait for them forever.
  """

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
    # Between two requests uvicorn's keep-alive timer runs. If it does not run
    # and the last answer has been sent, a request's headers are arriving. A
    # connection found in this state twice in a row is closed.
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
  """An HTTP server that runs until it is stopped.

  Threads: `run` belongs to a thread of its own, where uvicorn leaves signals
  alone; any thread may call the other methods.
  """

  def __init__(self, app: Any, *, host: str, port: int, max_connections: int):
    """Bind the address, so that a port in use is an error here.

    Args:
      app: the ASGI application.
      host: name or address.
      port: 0 takes a free one, see the attribute.
      max_connections: further connections get a 503.

    Raises:
      OSError: the address cannot be bound.
    """
    self._socket = addresses.bound_socket(host, port)
    try:
      # Two sockets may be bound to a port until one of them listens.
      self._socket.listen(_BACKLOG)
    except OSError:
      self._socket.close()
      raise
    self.port = self._socket.getsockname()[1]
    # Otherwise asyncio logs every client that disconnects while it is answered.
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
        log_level="error",  # do not log clients that do not speak HTTP
        server_header=False,
        timeout_keep_alive=int(_KEEP_ALIVE_S),
        timeout_graceful_shutdown=_SHUTDOWN_S,
        limit_concurrency=max_connections,
      )
    )

  def run(self) -> None:
    """Serve until `stop` is called."""
    asyncio.run(self.serve())

  async def serve(self) -> None:
    """Serve on the running event loop until `stop` is called."""
    try:
      await self._server.serve(sockets=[self._socket])
    finally:
      self._socket.close()

  @property
  def has_started(self) -> bool:
    """Whether connections are accepted."""
    return self._server.started

  def stop(self) -> None:
    """Accept no new connections; running answers have a few seconds left."""
    self._server.should_exit = True
