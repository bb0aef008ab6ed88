"""Errors as OpenAI's interface words them."""

import json
from typing import Any

from starlette import exceptions
from starlette import requests as http_requests
from starlette import responses

_TYPES = {
  401: "authentication_error",
  403: "permission_error",
  408: "timeout_error",
  429: "rate_limit_error",
  500: "server_error",
  503: "server_error",
  504: "timeout_error",
}


class ApiError(Exception):
  """What a client did wrong, or why the server cannot do it now.

  Attributes:
    param: the field of the body it is about, in dotted form.
    code: a word for programs.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.message = message
    self.param = param
    self.code = code
    self.headers = headers or {}

  def body(self) -> dict[str, Any]:
    """The JSON of the answer."""
    return {
      "error": {
        "message": self.message,
        "type": _TYPES.get(self.status, "invalid_request_error"),
        "param": self.param,
        "code": self.code,
      }
    }

  def response(self) -> responses.Response:
    """The whole answer."""
    return responses.Response(
      json.dumps(self.body()),
      status_code=self.status,
      headers=self.headers,
      media_type="application/json",
    )


async def on_api_error(
  request: http_requests.Request, error: Exception
) -> responses.Response:
  """Starlette's handler of `ApiError`."""
  del request
  assert isinstance(error, ApiError)
  return error.response()


async def on_http_exception(
  request: http_requests.Request, error: Exception
) -> responses.Response:
  """Starlette's own errors: no such path, or not with this method."""
  assert isinstance(error, exceptions.HTTPException)
  path, method = request.url.path[:100], request.method
  messages = {
    404: f"there is nothing at {path}",
    405: f"{path} does not answer {method}",
  }
  return ApiError(
    error.status_code,
    messages.get(error.status_code, error.detail),
    headers=dict(error.headers or {}),
  ).response()


async def on_defect(
  request: http_requests.Request, error: Exception
) -> responses.Response:
  """Anything else is a defect of the server; its log has the traceback."""
  del request, error
  return ApiError(500, "the server failed; its log says why").response()
