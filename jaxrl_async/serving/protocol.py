"""The requests that the HTTP server accepts: OpenAI's fields and some more.

Nothing that a client asks for is silently ignored. A field that OpenAI defines
but this server does not support is accepted only with a value that has no
effect, such as its default. A field that neither defines is refused. The only
fields that are read and ignored are those that identify the caller (`user`,
`safety_identifier`, `prompt_cache_key`).
"""

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from jaxrl_async.serving import bodies
from jaxrl_async.serving import errors

MAX_STOP_STRINGS = 16
_MAX_INT = 2**31 - 1  # the engine counts these in 32 bits
MAX_STOP_CHARACTERS = 256
_MAX_FIELDS = 100  # far more than any object of the interface has

# Unsupported field -> the values besides null with which it has no effect.
_ANYWHERE = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "logit_bias": ({},),
  "metadata": ({},),
  "store": (False,),
  "service_tier": ("auto", "default"),
}
_COMPLETION = {"echo": (False,), "suffix": ("",)}
_CHAT = {
  "audio": (),
  "function_call": ("none",),
  "functions": ([],),
  "modalities": (["text"],),
  "moderation": (),
  "parallel_tool_calls": (True,),
  "prediction": (),
  "prompt_cache_options": (),
  "prompt_cache_retention": (),
  "reasoning_effort": (),
  "response_format": ({"type": "text"},),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "verbosity": (),
  "web_search_options": (),
}
_MESSAGE = {
  "annotations": ([],),
  "audio": (),
  "function_call": (),
  "refusal": (),
  "tool_calls": ([],),
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

  include_usage: bool = False
  include_obfuscation: Literal[False] = False


class _Wanted(_Body):
  """The fields that completions and chats have in common."""

  model: str
  stream: bool = False
  stream_options: StreamOptions | None = None
  n: int = pydantic.Field(1, ge=1, le=_MAX_INT)
  stop: tuple[str, ...] = ()
  seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**63)
  max_tokens: int | None = pydantic.Field(None, ge=1, le=_MAX_INT)
  temperature: float = pydantic.Field(1.0, ge=0, le=2)
  top_p: float = pydantic.Field(1.0, gt=0, le=1)
  user: str = ""
  # Fields that OpenAI does not define.
  top_k: int = pydantic.Field(0, ge=-1, le=_MAX_INT)
  min_p: float = pydantic.Field(0.0, ge=0, le=1)
  min_tokens: int = pydantic.Field(0, ge=0, le=_MAX_INT)
  stop_token_ids: Annotated[list[int], pydantic.FailFast()] = []
  ignore_eos: bool = False
  return_token_ids: bool = False
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


class Message(_Body):
  """One message of a chat; text only."""

  neutral: ClassVar[dict[str, tuple]] = _MESSAGE
  role: Literal["system", "developer", "user", "assistant"]
  content: str
  name: str | None = None

  @pydantic.field_validator("content", mode="before")
  @classmethod
  def _join_parts(cls, value: Any) -> Any:
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


class Chat(_Wanted):
  """The body of POST /v1/chat/completions."""

  neutral: ClassVar[dict[str, tuple]] = _ANYWHERE | _CHAT
  messages: Annotated[list[Message], pydantic.FailFast()] = pydantic.Field(
    min_length=1
  )
  max_completion_tokens: int | None = pydantic.Field(None, ge=1, le=_MAX_INT)
  logprobs: bool = False
  top_logprobs: int = pydantic.Field(0, ge=0)
  safety_identifier: str = ""
  prompt_cache_key: str = ""

  @pydantic.model_validator(mode="after")
  def _check_tokens_and_alternatives(self):
    if self.top_logprobs:
      raise _unsupported(
        "top_logprobs", "logprobs returns those of the chosen tokens"
      )
    both = self.max_tokens, self.max_completion_tokens
    if None not in both and both[0] != both[1]:
      raise errors.ApiError(
        400,
        "max_completion_tokens: differs from max_tokens; set only one of them",
        param="max_completion_tokens",
      )
    return self


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
