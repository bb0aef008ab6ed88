"""The requests that the HTTP server accepts: OpenAI's fields and some more.

Nothing that a client asks for is silently ignored. A field that OpenAI defines
but this server does not support is accepted only with a value that has no
effect, such as its default, and so is a field of vLLM's server. A field that
none of them defines is refused. The only fields that are read and ignored are
those that label a request or identify the caller (`user`, `metadata`,
`safety_identifier`, `prompt_cache_key`, `session_id`).
"""

import contextlib
import json
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import pydantic_core

from jaxrl_async.serving import bodies
from jaxrl_async.serving import errors

MAX_STOP_STRINGS = 16
_MAX_INT = 2**31 - 1  # the engine counts these in 32 bits
MAX_STOP_CHARACTERS = 256
_MAX_FIELDS = 100  # far more than any object of the interface has

# Unsupported field -> the values besides null with which it has no effect.
_ANYWHERE = {
  "echo": (False,),
  "frequency_penalty": (0,),
  "logit_bias": ({},),
  "presence_penalty": (0,),
  "service_tier": ("auto", "default"),
  "store": (False,),
  # Fields of vLLM's server.
  "allowed_token_ids": (),
  "bad_words": ([],),
  "cache_salt": (),
  "include_stop_str_in_output": (False,),
  "kv_transfer_params": (),
  "length_penalty": (1,),
  "logits_processors": ([],),
  "priority": (0,),
  "prompt_logprobs": (),
  "repetition_penalty": (1,),
  "request_id": (),
  "skip_special_tokens": (True,),
  "spaces_between_special_tokens": (True,),
  "structured_outputs": (),
  "truncate_prompt_tokens": (),
  "use_beam_search": (False,),
  "vllm_xargs": ({},),
}
_COMPLETION = {
  "add_special_tokens": (True,),
  "prompt_embeds": (),
  "suffix": ("",),
}
# What vLLM's server passes to a chat template.
_TEMPLATE = {
  "chat_template": (),
  "chat_template_kwargs": ({},),
  "continue_final_message": (False,),
  "media_io_kwargs": ({},),
  "mm_processor_kwargs": ({},),
}
_CHAT = {
  **_TEMPLATE,
  "add_generation_prompt": (True,),
  "add_special_tokens": (False,),
  "audio": (),
  "documents": ([],),
  "function_call": ("none",),
  "functions": ([],),
  "include_reasoning": (True,),
  "modalities": (["text"],),
  "moderation": (),
  "prediction": (),
  "prompt_cache_options": (),
  "prompt_cache_retention": (),
  "reasoning_effort": (),
  "verbosity": (),
  "web_search_options": (),
}
_MESSAGE = {
  "annotations": ([],),
  "audio": (),
  "function_call": (),
  "refusal": (),
}


def _is_same(value: Any, default: Any) -> bool:
  is_bool = isinstance(value, bool), isinstance(default, bool)
  return is_bool[0] == is_bool[1] and value == default


class _Body(pydantic.BaseModel):
  """A strict JSON object: unknown fields are refused, types not converted.

  A null is the same as leaving the field out.
  """

  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, frozen=True
  )
  neutral: ClassVar[dict[str, tuple]] = {}

  @pydantic.model_validator(mode="before")
  @classmethod
  def _drop_what_changes_nothing(cls, body: Any) -> Any:
    if not isinstance(body, dict):
      return body
    if len(body) > _MAX_FIELDS:
      raise ValueError(f"has {len(body)} fields; at most {_MAX_FIELDS}")
    kept = {}
    for name, value in body.items():
      if name in cls.neutral:
        values = cls.neutral[name]
        if value is not None and not any(_is_same(value, v) for v in values):
          raise errors.ApiError(
            400,
            f"{name}: not supported by this server; leave it out",
            param=name,
            code="unsupported_parameter",
          )
      elif value is not None or name not in cls.model_fields:
        kept[name] = value
    return kept


class StreamOptions(_Body):
  """Options of a streamed answer."""

  neutral: ClassVar[dict[str, tuple]] = {"continuous_usage_stats": (False,)}
  include_usage: bool = False
  include_obfuscation: Literal[False] = False


class JsonSchema(_Body):
  """A schema that an answer has to fit; it does so whatever `strict` says."""

  name: str = ""
  description: str = ""
  strict: bool = True
  fields: dict[str, Any] = pydantic.Field(alias="schema")


class ResponseFormat(_Body):
  """What an answer is: any text, an object in JSON, or JSON of a schema."""

  type: Literal["text", "json_object", "json_schema"]
  json_schema: JsonSchema | None = None

  @pydantic.model_validator(mode="after")
  def _check_schema(self):
    if (self.type == "json_schema") != (self.json_schema is not None):
      raise ValueError("json_schema: belongs to the type json_schema")
    return self

  @property
  def schema_of_answer(self) -> dict[str, Any] | None:
    """The JSON schema, or None for any text."""
    if self.json_schema is not None:
      return self.json_schema.fields
    return None if self.type == "text" else {"type": "object"}


class _Wanted(_Body):
  """The fields that completions and chats have in common."""

  model: str
  stream: bool = False
  stream_options: StreamOptions | None = None
  n: int = pydantic.Field(1, ge=1, le=_MAX_INT)
  stop: tuple[str, ...] = ()
  seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**63)
  max_tokens: int | None = pydantic.Field(None, ge=1, le=_MAX_INT)
  response_format: ResponseFormat = ResponseFormat(type="text")
  temperature: float = pydantic.Field(1.0, ge=0, le=2)
  top_p: float = pydantic.Field(1.0, gt=0, le=1)
  user: str = ""
  metadata: dict[str, str] = {}
  # Fields that OpenAI does not define.
  top_k: int = pydantic.Field(0, ge=-1, le=_MAX_INT)
  min_p: float = pydantic.Field(0.0, ge=0, le=1)
  min_tokens: int = pydantic.Field(0, ge=0, le=_MAX_INT)
  stop_token_ids: Annotated[list[int], pydantic.FailFast()] = []
  ignore_eos: bool = False
  return_token_ids: bool = False
  return_tokens_as_token_ids: bool = False
  session_id: str = ""
  deadline_s: float | None = pydantic.Field(None, gt=0)

  @pydantic.field_validator("stop", mode="before")
  @classmethod
  def _one_or_several(cls, value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(
      isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in strings
    ):
      raise ValueError(
        f"must be a string of 1 to {MAX_STOP_CHARACTERS} characters, or a list"
        " of them"
      )
    if len(strings) > MAX_STOP_STRINGS:
      raise ValueError(f"at most {MAX_STOP_STRINGS} strings")
    return tuple(strings)

  @pydantic.model_validator(mode="after")
  def _check_stream_options(self):
    if self.stream_options is not None and not self.stream:
      raise errors.ApiError(
        400,
        "stream_options: only allowed if stream is true",
        param="stream_options",
      )
    return self


class Completion(_Wanted):
  """The body of POST /v1/completions."""

  neutral: ClassVar[dict[str, tuple]] = _ANYWHERE | _COMPLETION
  # The type is str | list[str] | list[int] | list[list[int]]. It is checked by
  # the validator below, because pydantic would try each member of the union and
  # collect every error.
  prompt: Any
  best_of: int | None = None
  logprobs: int | None = pydantic.Field(None, ge=0)

  @pydantic.field_validator("prompt", mode="before")
  @classmethod
  def _any_of_four(cls, value: Any) -> Any:
    def are_tokens(items: list[Any]) -> bool:
      return all(type(item) is int for item in items)

    is_list = isinstance(value, list) and bool(value)
    if not (
      isinstance(value, str)
      or (is_list and all(isinstance(item, str) for item in value))
      or (is_list and are_tokens(value))
      or (is_list and all(isinstance(x, list) and are_tokens(x) for x in value))
    ):
      raise ValueError(
        "must be a text, a list of texts, a list of token ids or a list of"
        " such lists, and not an empty list"
      )
    return value

  @pydantic.model_validator(mode="after")
  def _check_alternatives(self):
    if self.best_of not in (None, self.n):
      raise _unsupported("best_of", "use n")
    if self.logprobs:
      raise _unsupported(
        "logprobs", "0 returns those of the chosen tokens, without alternatives"
      )
    return self

  @property
  def prompts(self) -> list[str] | list[list[int]]:
    """The prompts as a list, even if there is one only."""
    prompt: Any = self.prompt
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: Any = [prompt] if is_one else prompt
    return prompts


class CalledFunction(_Body):
  """The function that an assistant called, and with which arguments."""

  name: str = pydantic.Field(min_length=1)
  arguments: str

  @pydantic.field_validator("arguments")
  @classmethod
  def _check_object(cls, value: str) -> str:
    arguments = None
    with contextlib.suppress(ValueError, RecursionError):
      arguments = json.loads(value)
    if not isinstance(arguments, dict):
      raise ValueError("must be an object in JSON")
    return value


class ToolCall(_Body):
  """One call in an assistant's message."""

  neutral: ClassVar[dict[str, tuple]] = {"index": tuple(range(128))}
  id: str = ""
  type: Literal["function"] = "function"
  function: CalledFunction


class Message(_Body):
  """One message of a chat; text only."""

  neutral: ClassVar[dict[str, tuple]] = _MESSAGE
  role: Literal["system", "developer", "user", "assistant", "tool"]
  tool_calls: list[ToolCall] = []
  tool_call_id: str | None = None
  content: str = pydantic.Field(None, validate_default=True)
  name: str | None = None

  @pydantic.field_validator("content", mode="before")
  @classmethod
  def _join_parts(cls, value: Any, info: Any) -> Any:
    if value is None:  # left out, which only a message with calls may do
      if not info.data.get("tool_calls"):
        raise pydantic_core.PydanticCustomError("missing", "")
      return ""
    if not isinstance(value, list):
      return value
    for part in value:
      if (
        not isinstance(part, dict)
        or part.keys() != {"type", "text"}
        or part["type"] != "text"
        or not isinstance(part["text"], str)
      ):
        raise ValueError('parts must be {"type": "text", "text": …}')
    return "".join(part["text"] for part in value)

  @pydantic.model_validator(mode="after")
  def _check_role(self):
    if self.tool_calls and self.role != "assistant":
      raise ValueError("tool_calls: only an assistant calls tools")
    if self.tool_call_id is not None and self.role != "tool":
      raise ValueError("tool_call_id: only for messages of the role 'tool'")
    return self

  def for_template(self) -> dict[str, Any]:
    """Return the message as chat templates take it."""
    given = self.model_dump(exclude_unset=True)
    for call in given.get("tool_calls", ()):
      function = call["function"]
      function["arguments"] = json.loads(function["arguments"])
    return {**given, "content": self.content}


class Function(_Body):
  """What a tool does, and the schema of its arguments."""

  name: str = pydantic.Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
  description: str = ""
  parameters: dict[str, Any] = {}
  strict: bool = False


class Tool(_Body):
  """A tool that the policy may call."""

  type: Literal["function"]
  function: Function


class NamedFunction(_Body):
  """The function that has to be called."""

  name: str


class NamedTool(_Body):
  """A choice of one tool, which has to be called."""

  type: Literal["function"]
  function: NamedFunction


_Tools = Annotated[list[Tool], pydantic.FailFast()]


class Chat(_Wanted):
  """The body of POST /v1/chat/completions."""

  neutral: ClassVar[dict[str, tuple]] = _ANYWHERE | _CHAT
  messages: Annotated[list[Message], pydantic.FailFast()] = pydantic.Field(
    min_length=1
  )
  max_completion_tokens: int | None = pydantic.Field(None, ge=1, le=_MAX_INT)
  logprobs: bool = False
  top_logprobs: int = pydantic.Field(0, ge=0)
  tools: _Tools = []
  tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
  parallel_tool_calls: bool = True
  safety_identifier: str = ""
  prompt_cache_key: str = ""

  @property
  def shown_tools(self) -> list[Tool]:
    """The tools that the policy may call."""
    if isinstance(self.tool_choice, NamedTool):
      name = self.tool_choice.function.name
      return [tool for tool in self.tools if tool.function.name == name]
    return [] if self.tool_choice == "none" else self.tools

  @pydantic.model_validator(mode="after")
  def _check_tokens_and_alternatives(self):
    if self.top_logprobs:
      raise _unsupported(
        "top_logprobs", "logprobs returns those of the chosen tokens"
      )
    names = [tool.function.name for tool in self.tools]
    choice = self.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
      raise ValueError(
        f"tool_choice: {choice.function.name!r} is none of tools"
      )
    if choice == "required" and not names:
      raise ValueError("tool_choice: requires a call, but there are no tools")
    if len(set(names)) < len(names):
      raise errors.ApiError(
        400, "tools: two of them have the same name", param="tools"
      )
    both = self.max_tokens, self.max_completion_tokens
    if None not in both and both[0] != both[1]:
      raise errors.ApiError(
        400,
        "max_completion_tokens: differs from max_tokens; set only one of them",
        param="max_completion_tokens",
      )
    return self


class Tokenize(_Body):
  """The body of POST /tokenize: a text or a chat, as vLLM's server takes it."""

  neutral: ClassVar[dict[str, tuple]] = _TEMPLATE
  model: str | None = None
  prompt: str | None = None
  messages: Annotated[list[Message], pydantic.FailFast()] = []
  tools: _Tools = []
  add_generation_prompt: bool = True
  add_special_tokens: bool | None = None
  return_token_strs: bool = False

  @pydantic.model_validator(mode="after")
  def _check_one(self):
    if (self.prompt is None) == (not self.messages):
      raise ValueError("needs either a prompt or messages")
    return self


class Detokenize(_Body):
  """The body of POST /detokenize, as vLLM's server takes it."""

  model: str | None = None
  tokens: Annotated[list[int], pydantic.FailFast()]


def _unsupported(name: str, instead: str) -> errors.ApiError:
  return errors.ApiError(
    400,
    f"{name}: not supported by this server; {instead}",
    param=name,
    code="unsupported_parameter",
  )


def parse(kind: type[_Body], data: bytes, bounds: bodies.Bounds) -> Any:
  """Parse a body as an object of `kind`.

  Raises:
    ApiError: the body does not fit; the message names the field.
  """
  body = bodies.from_json(data)
  if isinstance(body, dict):  # checked before each message is parsed
    messages = body.get("messages")
    if isinstance(messages, list):
      bounds.check_messages(len(messages))
  try:
    return kind.model_validate(body)
  except pydantic.ValidationError as error:
    first = error.errors(
      include_url=False, include_context=False, include_input=False
    )[0]
  path = ".".join(str(part)[:100] for part in first["loc"])
  message = first["msg"].removeprefix("Value error, ")
  code = None
  if first["type"] == "extra_forbidden":
    message, code = "unknown field", "unknown_parameter"
  elif first["type"] == "missing":
    message, code = "is required", "missing_required_parameter"
  raise errors.ApiError(
    400, f"{path or 'body'}: {message}", param=path or None, code=code
  )
