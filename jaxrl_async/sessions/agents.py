"""Agents: functions and programs, and how they are started."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import signal
import threading
from typing import Any

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.sessions import session as session_lib
from jaxrl_async.storage import item_json
from jaxrl_async.types import Reward

_SETTING = "task.episode_params"
_KEPT_BYTES = 4096  # of the last output, for the reason of a failure
_READ_BYTES = 1 << 16
_CLOSE_S = 5.0
_END_S = 2.0  # between two signals
_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
  """How an agent calls the policy.

  Attributes:
    base_url: of OpenAI's interface, ending in /v1.
    api_key: of this session.
    model: the name of the policy.
  """

  base_url: str
  api_key: str
  model: str = "policy"


def check(agent: Any) -> None:
  """Check what a config names as an agent.

  Args:
    agent: "module:function", or the command of a program with its arguments.

  Raises:
    ConfigError: it is none.
  """
  if isinstance(agent, str):
    _function(agent)
    return
  sections.require(
    isinstance(agent, Sequence)
    and len(agent) > 0
    and all(isinstance(word, str) for word in agent),
    _SETTING,
    f"the agent {sections.shown(agent)} is neither module:function nor a"
    " command with its arguments",
  )


@functools.cache
def _function(name: str) -> Any:
  module_name, _, function_name = name.partition(":")
  sections.require(
    bool(module_name and function_name),
    _SETTING,
    f"the agent {sections.shown(name)} is not module:function",
  )
  try:
    module = user_code.module(module_name)
  except user_code.UserCodeError as error:
    raise sections.ConfigError(
      f"{_SETTING}: the agent {sections.shown(name)} cannot be imported:"
      f" {error}"
    ) from error
  function = getattr(module, function_name, None)
  yields = inspect.isgeneratorfunction, inspect.isasyncgenfunction
  sections.require(
    callable(function) and not any(is_kind(function) for is_kind in yields),
    _SETTING,
    f"the agent {sections.shown(name)} is no function that returns a reward",
  )
  return function


async def run(
  agent: str | Sequence[str],
  access: Access,
  item: Mapping[str, Any],
  params: Mapping[str, Any],
) -> Reward | None:
  """Run an agent to its end, and return its reward if it gives one.

  Raises:
    AgentError: the program ended with an error, the reward is no number, or it
      has fields that an agent cannot give.
  """
  if isinstance(agent, str):
    function = functools.partial(_function(agent), access, item, **params)
    if inspect.iscoroutinefunction(function):
      return _reward(await function())
    given = await _in_thread(function)
    # Such as an object that is called, or a function in a wrapper.
    return _reward(await given if inspect.isawaitable(given) else given)
  await _run_program(agent, access, item, params)
  return None


async def _in_thread(function: Callable[[], Any]) -> Any:
  """Call a function in a thread of its own, and return what it returns.

  Threads of a pool would let agents wait for each other. A thread cannot be
  ended: one that nobody waits for any more goes on until its next call of the
  policy, which is refused.
  """
  ended: futures.Future[tuple[Any, BaseException | None]] = futures.Future()
  ended.set_running_or_notify_cancel()

  def call() -> None:
    try:
      outcome = function(), None
    except BaseException as error:  # user code
      outcome = None, error
    ended.set_result(outcome)

  threading.Thread(target=call, name="agent", daemon=True).start()
  given, error = await asyncio.wrap_future(ended)
  if error is not None:
    raise error
  return given


def _reward(given: Any) -> Reward | None:
  if given is None:
    return None
  score, parts = given, {}
  if isinstance(given, Reward):
    score, parts = given.score, given.parts
    if given.token_scores is not None:
      raise session_lib.AgentError(
        "the agent returned a Reward with token_scores; of an agent's Reward,"
        " only score and parts are read"
      )
  for number in (score, *parts.values()):
    is_number = isinstance(number, int | float | np.floating | np.integer)
    if not is_number or not math.isfinite(number):
      raise session_lib.AgentError(
        f"the agent returned {number!r:.100}, which is no finite number"
      )
  return Reward(
    score=float(score), parts={k: float(v) for k, v in parts.items()}
  )


async def _run_program(
  command: Sequence[str],
  access: Access,
  item: Mapping[str, Any],
  params: Mapping[str, Any],
) -> None:
  try:
    program = await asyncio.create_subprocess_exec(
      *command,
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.STDOUT,
      env={
        **os.environ,
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "SESSION_URL": access.base_url.removesuffix("/v1"),
      },
      start_new_session=True,
    )
  except OSError as error:
    raise session_lib.AgentError(
      f"the agent {command[0]} cannot be started: {error.strerror}"
    ) from error
  given = {"item": item_json.encode(dict(item)), "params": dict(params)}
  talking = asyncio.create_task(_talk(program, json.dumps(given).encode()))
  try:
    code = await _ended(program)
    _signal(program, signal.SIGKILL)  # children that hold its output
    last = ""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_CLOSE_S):
        last = await talking
    if code:
      raise session_lib.AgentError(
        f"the agent ended with exit code {code}: {last}".rstrip(": ")
      )
  finally:
    talking.cancel()
    # A client of containers ends its container only if it is asked to.
    for number in (signal.SIGTERM, signal.SIGKILL):
      _signal(program, number)
      with contextlib.suppress(BaseException):
        async with asyncio.timeout(_END_S):
          await _ended(program)


async def _ended(program: asyncio.subprocess.Process) -> int:
  """Wait for the end of a program, and return its exit code.

  `wait` also waits for the children that hold its output.
  """
  while program.returncode is None:
    await asyncio.sleep(_LOOK_S)
  return program.returncode


def _signal(program: asyncio.subprocess.Process, number: int) -> None:
  """Send a signal to a program and its children, which may outlive it."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(program.pid, number)


async def _talk(program: asyncio.subprocess.Process, given: bytes) -> str:
  """Write the item to a program, and return its last line of output."""
  assert program.stdin is not None and program.stdout is not None
  with contextlib.suppress(ConnectionError):
    program.stdin.write(given)
    await program.stdin.drain()
    program.stdin.close()
  kept = b""
  while more := await program.stdout.read(_READ_BYTES):
    kept = (kept + more)[-_KEPT_BYTES:]
  lines = kept.decode("utf-8", "replace").strip().splitlines()
  return lines[-1][-300:] if lines else ""
