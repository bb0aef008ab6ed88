"""Tools of servers that speak the Model Context Protocol.

A server is a program that is started here and speaks through its standard
files, or an address:

    {"mcp": {"command": "python", "args": ["server.py"], "env": {"KEY": "x"}}}
    {"mcp": {"url": "http://localhost:8000/mcp"}}

There is one session with each server on an event loop, which all episodes on
that loop share. It ends when the loop's tasks are cancelled. If a server has
died, a call connects once more and is repeated, so a server that dies in a call
may see that call twice.
"""

import asyncio
from collections.abc import Mapping
from concurrent import futures
import json
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.tools import calls
from jaxrl_async.tools import schema

_KINDS = {"command": {"args", "env", "cwd"}, "url": set()}
# Codes of errors: the connection is closed, and the server, which was started
# again, does not know the session.
_LOST = (-32000, -32600)
_LIST_S = 60.0
_MAX_PAGES = 100
_CLOSE_S = 5.0
_SETTING = "task.episode_params"


class McpError(RuntimeError):
  """A server cannot be reached, or its tool failed."""


class _LostError(Exception):
  """A server cannot be reached."""


def check(server: Mapping[str, Any]) -> None:
  """Check the form of a server's entry, and that the package is there."""
  kinds = [kind for kind in _KINDS if kind in server]
  sections.require(
    len(kinds) == 1,
    _SETTING,
    f"an MCP server needs a command or a url: {sections.shown(dict(server))}",
  )
  (kind,) = kinds
  unknown = server.keys() - {kind, *_KINDS[kind]}
  sections.require(
    not unknown,
    _SETTING,
    f"an MCP server with {kind} takes no {', '.join(sorted(unknown))}",
  )
  _package()


def _package() -> Any:
  try:
    import mcp
  except ImportError as error:
    raise sections.ConfigError(
      f"{_SETTING}: tools of MCP servers need the package mcp; install the"
      " extra `tools`"
    ) from error
  return mcp


def _client(server: Mapping[str, Any]) -> Any:
  """Return a client that is not connected yet."""
  mcp = _package()
  if "url" in server:
    return mcp.Client(server["url"])
  return mcp.Client(mcp.StdioServerParameters(**server))


class _Session:
  """A connection, which one task of the loop opens and closes."""

  def __init__(self, server: Mapping[str, Any]):
    self.client: Any = None
    self._is_open = asyncio.Event()
    self._is_over = asyncio.Event()
    self._keeper = asyncio.create_task(self._keep(server))

  async def _keep(self, server: Mapping[str, Any]) -> None:
    async with _client(server) as client:
      self.client = client
      self._is_open.set()
      await self._is_over.wait()

  async def opened(self) -> Any:
    """Return the client when it is connected.

    Raises:
      _LostError: it cannot be, or it is no longer.
    """
    waiting = asyncio.create_task(self._is_open.wait())
    try:
      await asyncio.wait(
        [waiting, self._keeper], return_when=asyncio.FIRST_COMPLETED
      )
    finally:
      waiting.cancel()
    if self._keeper.done():
      error = None if self._keeper.cancelled() else self._keeper.exception()
      raise _LostError(_line(error))
    return self.client

  async def close(self) -> None:
    """End the connection, and the program of the server."""
    self._is_over.set()
    done, _ = await asyncio.wait([self._keeper], timeout=_CLOSE_S)
    for task in done:
      if not task.cancelled():
        task.exception()  # of a server that has died: it was seen elsewhere


def _line(error: BaseException | None) -> str:
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  message = str(error).strip().partition("\n")[0]
  return message if message else type(error).__name__


# By loop and server. Only the loop's thread touches its sessions.
_sessions: dict[tuple[int, str], _Session] = {}


async def call(
  server: Mapping[str, Any],
  name: str,
  arguments: dict[str, Any],
  max_characters: int,
  timeout_s: float,
) -> str:
  """Call a tool of a server, and return what it answers as text.

  Raises:
    McpError: the tool failed, or the server died twice.
  """
  del timeout_s  # whoever makes the call keeps it
  mcp = _package()
  key = (id(asyncio.get_running_loop()), json.dumps(server, sort_keys=True))
  for is_last in (False, True):
    session = _sessions.get(key)
    if session is None:
      session = _sessions[key] = _Session(server)
    try:
      client = await session.opened()
      result = await client.call_tool(name, arguments)
      return _answer(result, max_characters)
    except _LostError as error:
      failure = error
    except mcp.MCPError as error:
      if error.code not in _LOST:
        raise McpError(_line(error)) from error
      failure = error
    # Others may have found it out before.
    if _sessions.get(key) is session:
      del _sessions[key]
    await session.close()
    if is_last:
      raise McpError(f"the MCP server is lost: {_line(failure)}") from failure
  raise AssertionError


def _answer(result: Any, max_characters: int) -> str:
  """Return the texts of a result; of other content only its kind."""
  parts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
  text = calls.shortened("\n".join(parts), max_characters)
  if result.is_error:
    raise McpError(text)
  return text


async def _listed(server: Mapping[str, Any]) -> list[dict[str, Any]]:
  async with asyncio.timeout(_LIST_S), _client(server) as client:
    tools, cursor = [], None
    for _ in range(_MAX_PAGES):
      page = await client.list_tools(cursor=cursor)
      tools += page.tools
      if not (cursor := page.next_cursor):
        break
  return [
    schema.of_parameters(tool.name, tool.description or "", tool.input_schema)
    for tool in tools
  ]


def describe(server: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Return the descriptions of a server's tools.

  Raises:
    ConfigError: the server cannot be reached.
  """
  check(server)
  try:
    # The caller's thread may run an event loop.
    with futures.ThreadPoolExecutor(1) as thread:
      return thread.submit(asyncio.run, _listed(server)).result()
  except (_package().MCPError, OSError, TimeoutError, ExceptionGroup) as error:
    raise sections.ConfigError(
      f"{_SETTING}: the MCP server {sections.shown(dict(server))} does not list"
      f" its tools: {_line(error)}"
    ) from error


async def close_all() -> None:
  """End the sessions of the running loop."""
  here = id(asyncio.get_running_loop())
  for key in [key for key in _sessions if key[0] == here]:
    await _sessions.pop(key).close()
