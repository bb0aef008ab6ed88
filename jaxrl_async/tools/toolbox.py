"""The tools of a task: their descriptions, and how each of them is called."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import inspect
import json
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.tools import calls
from jaxrl_async.tools import mcp_servers
from jaxrl_async.tools import schema

PYTHON, UNSAFE_PYTHON = "python", "unsafe_python"
_SETTING = "task.episode_params"


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool that a policy may call.

  Attributes:
    description: as chat templates and OpenAI's interface take it.
    function: makes a call: it takes `before`, the arguments of the policy's
      call, the most characters of its result, and the seconds that it may take.
    before: the first arguments of the function.
  """

  description: dict[str, Any]
  function: Callable[..., Any]
  before: tuple[Any, ...]

  @property
  def name(self) -> str:
    """The name of the tool."""
    return self.description["function"]["name"]

  @property
  def parameters(self) -> dict[str, Any]:
    """The schema of the arguments."""
    return self.description["function"]["parameters"]


def of(entries: Sequence[Any]) -> dict[str, Tool]:
  """Return tools by name; a server is asked for its tools only once.

  Args:
    entries: each of them "module:function", {"mcp": {...}}, "python", or
      "unsafe_python", which needs no sandbox.

  Raises:
    ConfigError: an entry is wrong, or names no tool.
  """
  return _made(key(entries))


def key(entries: Sequence[Any]) -> str:
  """Return text that is equal for equal tools."""
  return json.dumps([_plain(entry) for entry in entries])


def _plain(entry: Any) -> Any:
  to_dict = getattr(entry, "to_dict", None)  # of a ConfigDict
  return to_dict() if to_dict else entry


@functools.cache
def _made(entries: str) -> dict[str, Tool]:
  """Return the tools of a key."""
  tools: dict[str, Tool] = {}
  for entry in json.loads(entries):
    for tool in _of_entry(entry):
      sections.require(
        tool.name not in tools,
        _SETTING,
        f"there are two tools with the name {tool.name!r}",
      )
      tools[tool.name] = tool
  sections.require(bool(tools), _SETTING, "there is no tool")
  return tools


def _of_entry(entry: Any) -> list[Tool]:
  if entry in (PYTHON, UNSAFE_PYTHON):
    description = schema.of_function(calls.python)
    return [Tool(description, calls.run_python, (entry == UNSAFE_PYTHON,))]
  if isinstance(entry, Mapping) and entry.keys() == {"mcp"}:
    server = entry["mcp"]
    return [
      Tool(each, mcp_servers.call, (server, each["function"]["name"]))
      for each in mcp_servers.describe(server)
    ]
  try:
    function = calls.find(str(entry))
    description = schema.of_function(function)
  except ValueError as error:
    raise sections.ConfigError(
      f"{_SETTING}: {sections.shown(entry)} is no tool: {error}"
    ) from error
  is_async = inspect.iscoroutinefunction(function)
  how = calls.call_async if is_async else calls.call
  return [Tool(description, how, (entry,))]
