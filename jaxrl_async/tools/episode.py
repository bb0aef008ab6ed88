"""The episode of policies that call tools."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
import functools
import json
from typing import Any

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import calls
from jaxrl_async.tools import formats
from jaxrl_async.tools import replies
from jaxrl_async.tools import schema
from jaxrl_async.tools import toolbox
from jaxrl_async.types import Prompt

_SETTING = "task.episode_params"
_NO_CALLS_LEFT = "Error: no further call is allowed; answer without one"


async def use_tools(
  prompt: Prompt,
  context: Any,
  *,
  tools: Sequence[Any],
  format: str = "",
  max_calls: int = 8,
  max_result_tokens: int = 512,
  timeout_s: float = 10.0,
  retries: int = 0,
  describe: bool = True,
) -> AsyncGenerator[np.ndarray, np.ndarray]:
  """Let the policy call tools until it writes a turn without a call.

  Whatever goes wrong with a call is told to the policy as its result: that it
  is malformed, names no tool, has wrong arguments, raised or took too long.

  The trajectory ends as well after a turn with calls if none was left, or if
  the results and one more token do not fit into its budget.

  Args:
    prompt: in which a chat template has written the descriptions.
    context: a `rollout.episode.Context`.
    tools: as `toolbox.of` takes them.
    format: in which calls are written, "hermes" or "llama"; "" finds it in the
      chat template, and is hermes without one.
    max_calls: number of calls of a trajectory.
    max_result_tokens: of one result; what is longer is cut, with a note.
    timeout_s: of one call.
    retries: further attempts for a call that raised or took too long.
    describe: whether the chat template writes the descriptions of the tools.
  """
  del describe  # see `prepared`
  tokenizer = context.tokenizer
  box = toolbox.of(tools)
  form = format_of(format, context.template)
  reply = _replies(tokenizer, context.template, toolbox.key(tools))
  # So many characters may hold the tokens that are shown.
  max_characters = max_result_tokens * tokenizer.max_token_characters

  async def result_of(found: formats.Call | formats.Malformed) -> str:
    if isinstance(found, formats.Malformed):
      return f"Error: this is no call of a tool: {found.reason}"
    if (tool := box.get(found.name)) is None:
      return f"Error: there is no tool {found.name!r:.80}; use {', '.join(box)}"
    if reason := schema.reason_against(found.arguments, tool.parameters):
      return f"Error: wrong arguments: {reason}"
    try:
      return await context.call(
        tool.function,
        *tool.before,
        found.arguments,
        max_characters,
        timeout_s,
        timeout_s=timeout_s,
        retries=retries,
      )
    except RuntimeError as error:
      if (reason := getattr(error, "reason", None)) is None:
        raise
      return f"Error: {reason}"  # a CallError

  written = yield prompt.tokens
  num_calls = 0
  while num_calls < max_calls:
    found = form.parse(formats.text_of(written, tokenizer, form)).found
    if not found:
      return
    allowed = found[: max_calls - num_calls]
    num_calls += len(allowed)
    results = list(await asyncio.gather(*map(result_of, allowed)))
    results += [_NO_CALLS_LEFT] * (len(found) - len(allowed))
    shown = [reply.safe(result, max_result_tokens) for result in results]
    named = [getattr(each, "name", "") for each in found]
    # Templates may write the name, which must not end a turn either.
    names = [name if name in box else "unknown" for name in named]
    tokens = reply.tokens(written, names, shown)
    if len(tokens) >= context.room:
      return
    written = yield tokens


@functools.lru_cache(maxsize=8)  # thousands of trajectories have the same
def _replies(
  tokenizer: tokenizer_lib.Tokenizer,
  template: chat_template_lib.ChatTemplate | None,
  tools: str,
) -> replies.Replies:
  """Return what renders results, for tools with this key."""
  box = toolbox.of(json.loads(tools))
  descriptions = [tool.description for tool in box.values()]
  return replies.Replies(tokenizer, template, descriptions)


def check_sandbox(params: Mapping[str, Any]) -> None:
  """Check that programs of the policy can be run, if a tool runs them.

  Args:
    params: keyword arguments of `use_tools`.

  Raises:
    ConfigError: no sandbox works here, or a tool cannot be described.
  """
  for tool in toolbox.of(params.get("tools", ())).values():
    if tool.function is calls.run_python:
      try:
        sandbox_lib.find(allow_unsafe=tool.before[0])
      except sandbox_lib.SandboxError as error:
        raise sections.ConfigError(f"{_SETTING}: {error}") from error


def prepared(
  params: Mapping[str, Any],
  tokenizer: tokenizer_lib.Tokenizer,
  template: chat_template_lib.ChatTemplate | None,
) -> list[dict[str, Any]]:
  """Check the tools of a task, and return the descriptions for its prompts.

  Args:
    params: keyword arguments of `use_tools`.
    tokenizer: of the policy.
    template: of the policy, if the prompts are chats.

  Raises:
    ConfigError: a tool cannot be described, or the chat template has no place
      for results.
  """
  tools = params.get("tools", ())
  descriptions = [tool.description for tool in toolbox.of(tools).values()]
  format_of(params.get("format", ""), template)
  try:
    _replies(tokenizer, template, toolbox.key(tools))
  except chat_template_lib.ChatTemplateError as error:
    raise sections.ConfigError(f"{_SETTING}: {error}") from error
  is_shown = template is not None and params.get("describe", True)
  return descriptions if is_shown else []


def format_of(name: str, template: Any) -> formats.Format:
  """Return the format of calls with a name, or that of a chat template.

  Raises:
    ConfigError: there is none.
  """
  source = getattr(template, "source", None)
  if not name:
    name = "hermes" if source is None else formats.in_template(source) or ""
  sections.require(
    name in formats.FORMATS,
    _SETTING,
    f"the format of calls is {name or 'not known from the chat template'};"
    f" name one of {', '.join(formats.FORMATS)}",
  )
  return formats.FORMATS[name]
