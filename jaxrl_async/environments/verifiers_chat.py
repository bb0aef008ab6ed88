"""A harness of verifiers: a chat with the tools of a task, in the same process.

It does what the package's harness `null` does, which starts a program for every
turn of the user and so takes seconds where this takes milliseconds.
"""

import contextlib
import json
from typing import Any

import httpx
from verifiers import v1 as vf
from verifiers.v1.dialects import chat
from verifiers.v1.harnesses.utils import mcp
from verifiers.v1.types import Messages

# A longer result of a tool would fill the context of any policy.
_MOST_CHARACTERS = 2**18
_CONNECT_S = 30.0


class ChatConfig(vf.HarnessConfig):
  """Settings of `Chat`: those of every harness."""


class Chat(vf.Harness[ChatConfig]):
  """Asks the policy, and makes the calls that it writes, until it writes none.

  A conversation that no longer fits into the policy's context ends there.
  """

  APPENDS_SYSTEM_PROMPT = True
  SUPPORTS_MCP = True
  SUPPORTS_RESUME = True
  EXECUTES_CODE = False
  NEEDS_CONTAINER = False

  async def launch(
    self,
    ctx: vf.ModelContext,
    trace: vf.Trace,
    runtime: vf.Runtime,
    endpoint: str,
    secret: str,
    mcp_urls: dict[str, str],
    data: vf.TaskData,
  ) -> vf.ProgramResult:
    """Hold the conversation of a task."""
    messages = _messages(*self.resolve_prompt(data))
    servers = {
      name: {"url": url, "timeout": self.config.tool_timeout}
      for name, url in mcp_urls.items()
    }
    async with contextlib.AsyncExitStack() as stack:
      client = await stack.enter_async_context(
        httpx.AsyncClient(
          headers={"Authorization": f"Bearer {secret}"},
          timeout=httpx.Timeout(None, connect=_CONNECT_S),
          verify=False,  # the address is of this machine
        )
      )
      tools, dispatch, connected = [], {}, {}
      if servers:
        tools, dispatch, connected = await mcp.connect_mcp(
          {"mcpServers": servers}, stack, set()
        )
      body: dict[str, Any] = {"model": ctx.model, "messages": messages}
      if tools:
        body["tools"] = tools
      while True:
        said = await _ask(client, f"{endpoint}/chat/completions", body)
        if said is None:
          break
        messages.append(said)
        if not said.get("tool_calls"):
          break
        for call in said["tool_calls"]:
          messages.append(await _called(call, connected, dispatch))
    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _messages(
  system: str | None, prompt: str | Messages | None
) -> list[dict[str, Any]]:
  messages: list[dict[str, Any]] = []
  if system:
    messages.append({"role": "system", "content": system})
  if isinstance(prompt, str):
    messages.append({"role": "user", "content": prompt})
  elif prompt is not None:
    messages += [chat.message_to_wire(message) for message in prompt]
  return messages


async def _ask(
  client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> dict[str, Any] | None:
  """Return the policy's message; None if the context is full."""
  response = await client.post(url, json=body)
  if response.status_code in (400, 413):
    text = response.text.casefold()
    if "maximum context length" in text or "context_length_exceeded" in text:
      return None
  response.raise_for_status()
  message = response.json()["choices"][0]["message"]
  return {key: value for key, value in message.items() if value is not None}


async def _called(
  call: dict[str, Any], connected: dict[str, Any], dispatch: dict[str, Any]
) -> dict[str, Any]:
  """Return the message with the result of a call."""
  name = call["function"]["name"]
  try:
    arguments = json.loads(call["function"]["arguments"] or "{}")
  except ValueError as error:
    result: Any = f"error: the arguments are not JSON: {error}"
  else:
    if not isinstance(arguments, dict):
      result = "error: the arguments are no object"
    elif name not in dispatch:
      result = f"error: there is no tool {name!r}"
    else:
      result = await mcp.call_mcp(connected, dispatch, name, arguments)
  if isinstance(result, str):
    result = result[:_MOST_CHARACTERS]
  return {
    "role": "tool",
    "tool_call_id": call["id"],
    "name": name,
    "content": result,
  }


__all__ = ["Chat"]
