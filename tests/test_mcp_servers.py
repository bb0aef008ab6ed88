"""Tools of MCP servers: over both transports, and servers that die."""

import asyncio
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxrl_async.config import sections
from jaxrl_async.tools import mcp_servers
from jaxrl_async.tools import toolbox

mcp_types = pytest.importorskip("mcp.types")
PROGRAM = str(pathlib.Path(__file__).with_name("mcp_world.py"))
STDIO = {"command": sys.executable, "args": [PROGRAM, "stdio"]}


def http_server(port):
  process = subprocess.Popen(
    [sys.executable, PROGRAM, "http", str(port)],
    stderr=subprocess.DEVNULL,
  )
  deadline = time.monotonic() + 200
  while time.monotonic() < deadline:
    try:
      socket.create_connection(("127.0.0.1", port), 1.0).close()
      return process
    except OSError:
      time.sleep(0.1)
  raise TimeoutError("the server did not start")


def end(process):
  process.kill()
  process.wait(20)


@pytest.fixture
def port():
  with socket.create_server(("127.0.0.1", 0)) as server:
    return server.getsockname()[1]


@pytest.fixture(params=["stdio", "http"])
def server(request, port):
  if request.param == "stdio":
    yield STDIO
    return
  process = http_server(port)
  yield {"url": f"http://127.0.0.1:{port}/mcp"}
  end(process)


async def call(server, name, max_characters=1_000, **arguments):
  return await mcp_servers.call(server, name, arguments, max_characters, 60.0)


def run(play):
  async def played():
    try:
      async with asyncio.timeout(300):
        return await play
    finally:
      await mcp_servers.close_all()

  return asyncio.run(played())


@pytest.mark.slow
def test_the_tools_of_a_server_are_described_and_called(server):
  tools = toolbox.of([{"mcp": server}])
  assert set(tools) >= {"add", "fail", "repeat"}
  add = tools["add"]
  assert add.description["function"]["description"] == "Add two numbers."
  assert add.parameters["required"] == ["a", "b"]

  async def play():
    assert add.before == (server, "add")
    assert await add.function(*add.before, {"a": 2, "b": 3}, 99, 60.0) == "5"
    with pytest.raises(mcp_servers.McpError, match="executing tool fail"):
      await call(server, "fail")
    with pytest.raises(mcp_servers.McpError, match="no_such"):
      await call(server, "no_such")
    text = await call(server, "repeat", 5, text="x", times=1_000_000)
    assert text.startswith("xxxxx\n[the rest")
    ids = await asyncio.gather(
      *(call(server, "process_id", wait_s=0.1) for _ in range(4))
    )
    assert len(set(ids)) == 1  # one session, and no call waits for another
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(0.2):
        await call(server, "process_id", wait_s=60)
    assert await call(server, "process_id") == ids[0]

  run(play())


@pytest.mark.slow
def test_a_server_that_died_is_started_again_once(tmp_path):
  async def play():
    first = await call(STDIO, "process_id")
    assert await call(STDIO, "die", marker=str(tmp_path / "died")) == "alive"
    second = await call(STDIO, "process_id")
    assert second != first
    os.kill(int(second), signal.SIGKILL)
    assert await call(STDIO, "process_id") not in (first, second)
    with pytest.raises(mcp_servers.McpError, match="the MCP server is lost"):
      await call(STDIO, "always_die")
    assert await call(STDIO, "add", a=1, b=1) == "2"

  run(play())


@pytest.mark.slow
def test_a_server_over_http_that_was_started_again_is_found_again(port):
  server = {"url": f"http://127.0.0.1:{port}/mcp"}

  async def play():
    process = http_server(port)
    try:
      first = await call(server, "process_id")
      end(process)
      process = http_server(port)
      assert await call(server, "process_id") != first
    finally:
      end(process)
    with pytest.raises(mcp_servers.McpError, match="the MCP server is lost"):
      await call(server, "process_id")

  run(play())


def test_a_result_is_its_texts_and_the_kinds_of_what_is_no_text():
  parts = [
    mcp_types.TextContent(type="text", text="so"),
    mcp_types.TextContent(type="text", text=""),
    mcp_types.ImageContent(type="image", data="eA==", mime_type="image/png"),
  ]
  result = mcp_types.CallToolResult(content=parts)
  assert mcp_servers._answer(result, 99) == "so\n\n[image]"
  nothing = mcp_types.CallToolResult(content=parts[1:2])
  assert mcp_servers._answer(nothing, 99) == ""


@pytest.mark.slow
def test_a_server_that_is_not_there_is_one_line(port):
  servers = (
    {"url": f"http://127.0.0.1:{port}/mcp"},
    {"command": "no_such_program"},
    {"command": sys.executable, "args": ["-c", "pass"]},
  )
  for server in servers:
    with pytest.raises(sections.ConfigError, match="does not list") as caught:
      toolbox.of([{"mcp": server}])
    assert "\n" not in str(caught.value)
    with pytest.raises(mcp_servers.McpError):
      run(call(server, "add", a=1, b=2))


def test_without_the_package_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "mcp", None)
  with pytest.raises(sections.ConfigError, match="install the extra `tools`"):
    mcp_servers.describe(STDIO)
