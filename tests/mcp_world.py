"""A small MCP server for the tests, through its standard files or over HTTP.

python mcp_world.py stdio | http PORT
"""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
  """Add two numbers."""
  return a + b


@server.tool()
def fail() -> str:
  """Fail."""
  raise ValueError("it cannot be done")


@server.tool()
def repeat(text: str, times: int) -> str:
  """Repeat a text."""
  return text * times


@server.tool()
def die(marker: str) -> str:
  """End the server, unless a file is there already, which is made."""
  if os.path.exists(marker):
    return "alive"
  with open(marker, "w"):
    os._exit(1)


@server.tool()
def always_die() -> str:
  """End the server."""
  os._exit(1)


@server.tool()
async def process_id(wait_s: float = 0.0) -> int:
  """Return the id of the server's process."""
  await asyncio.sleep(wait_s)
  return os.getpid()


if __name__ == "__main__":
  if sys.argv[1] == "stdio":
    server.run()
  else:
    server.run("streamable-http", port=int(sys.argv[2]))
