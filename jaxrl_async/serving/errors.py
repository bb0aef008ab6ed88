"""Errors in the format of OpenAI's interface."""

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
  """An error of a client, or a reason why the server cannot answer now.

  Attributes:
    status: HTTP status of the response.
    message: what is wrong, for people.
    param: the field of the body that caused it, in dotted form.
    code: an identifier for programs.
    headers: further headers of the response.
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
    """Return the JSON object of the response."""
    return {
      "error": {
        "message": self.message,
        "type": _TYPES.get(self.status, "invalid_request_error"),
        "param": self.param,
        "code": self.code,
      }
    }

  def response(self) -> responses.Response:
    """Return the whole response."""
    return responses.Response(
      json.dumps(self.body()),
      status_code=self.status,
      headers=self.headers,
      media_type="application/json",
    )


async def on_api_error(
  request: http_requests.Request, error: Exception
) -> responses.Response:
  """Answer an `ApiError`, as a handler of Starlette."""
  del request
  assert isinstance(error, ApiError)
  return error.response()


async def on_http_exception(
  request: http_requests.Request, error: Exception
) -> responses.Response:
  """Answer Starlette's own errors: unknown paths and wrong methods."""
  assert isinstance(error, exceptions.HTTPException)
  path, method = request.url.path[:100], request.method
  messages = {
    404: f"unknown path {path}",
    405: f"{path} does not support {method}",
  }
  return ApiError(
    error.status_code,
    messages.get(error.status_code, error.detail),
    headers=dict(error.headers or {}),
  ).response()


async def on_defect(
  request: http_requests.Request, error: Exception
) -> responses.Response:
  """Answer any other exception, which is a bug; the traceback is logged."""
  del request, error
  return ApiError(500, "the server failed; its log says why").response()


# Of a Starlette application, by the kind of exception.
HANDLERS: dict[Any, Any] = {
  ApiError: on_api_error,
  exceptions.HTTPException: on_http_exception,
  Exception: on_defect,
}
