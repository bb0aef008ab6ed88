"""Runs environments of the package verifiers, in a process of its own.

    python -m jaxrl_async.environments.verifiers_worker SYS_PATH

It reads a request in JSON from each line of its standard input, and writes the
answer as a line, in any order. What environments print goes to standard error.
Every request has an `id`, which its answer has too:

    rows      {"taskset": NAME, "options": {...}, "params": {...}}
              -> {"rows": [{...}]}, or {"refused": reason} for bad settings
    rollout   the same with "task", of a row, and "policy"
              -> {"reward": number, "parts": {name: number}}
    cancel    {"of": id of a rollout}, which answers then; no answer of its own

An answer may be {"error": reason} instead. Requests are handled at the same
time on one event loop.
"""

import asyncio
import collections
from collections.abc import AsyncIterator, Mapping
import contextlib
import importlib.metadata
import json
import math
import os
import sys
from typing import Any

# What a run gives to `task.params` beside the settings of the environment.
_SELECT, _SAMPLING = "select", "sampling"
# Standard input has lines as long as a task.
_MAX_LINE = 2**28
# The package keeps a client of each session for as long as it serves.
_MOST_ROLLOUTS = 256
# Name of `verifiers_chat` as a harness: modules of folders are not found.
_CHAT = "jaxrl_async_chat"
_ON_THIS_MACHINE = {"type": "subprocess"}


class RolloutFailedError(Exception):
  """A rollout has no reward; the message is the reason in one line."""


def env_config(
  taskset: str, options: Mapping[str, Any], params: Mapping[str, Any]
) -> Any:
  """Return the `EnvConfig` of an environment.

  Agents whose settings do not say otherwise run on this machine, and chat
  without tools but those of the task.

  Raises:
    ImportError: there is no such environment.
    ValueError: the settings do not fit it.
  """
  from verifiers.v1.configs import agent as agent_lib
  from verifiers.v1.utils import loaders

  from jaxrl_async.environments import verifiers_chat

  sys.modules[_CHAT] = verifiers_chat
  given = {k: v for k, v in params.items() if k not in (_SELECT, _SAMPLING)}
  own = {**given.get("taskset", {}), **options, "id": taskset}
  loaders.taskset_class(taskset)  # which says best what is wrong
  settings: dict[str, Any] = {**given, "taskset": own}
  kind = loaders.env_config_type(taskset, settings.get("id", ""))
  has_harness = loaders.default_harness_id(taskset) == taskset
  for name, field in kind.model_fields.items():
    if not isinstance(field.default, agent_lib.AgentConfig):
      continue
    seat = dict(settings.get(name, {}))
    if "runtime" not in field.default.model_fields_set:
      seat.setdefault("runtime", _ON_THIS_MACHINE)
    if field.default.harness is None and not has_harness:
      seat["harness"] = {"id": _CHAT, **seat.get("harness", {})}
    settings[name] = seat
  return loaders.resolve_env_config(settings)


def rows(
  taskset: str, options: Mapping[str, Any], params: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Return the tasks of an environment as rows of a dataset.

  Raises:
    ValueError: the environment has no end, or its tasks cannot be stored.
  """
  from verifiers.v1.configs import select
  from verifiers.v1.utils import loaders

  config = env_config(taskset, options, params)
  tasks = loaders.load_taskset(config.taskset).select(
    select.SelectConfig.model_validate(params.get(_SELECT, {}))
  )
  if not tasks.bounded:
    raise ValueError("it has tasks without end; set task.params.select.limit")
  found = [(task.data, task.data.prompt_text) for task in tasks]
  count = collections.Counter(text for _, text in found)
  version = _version_of(taskset)
  return [
    {
      # Games may all begin with the same text, and are different questions.
      "question": text if count[text] == 1 else f"{text} ({data.idx})".strip(),
      "verifiers": {
        "taskset": taskset,
        "options": dict(options),
        "params": dict(params),
        "version": version,
        "task": data.model_dump(mode="json", exclude_defaults=True),
      },
    }
    for data, text in found
  ]


def _version_of(taskset: str) -> str:
  name = taskset.rsplit("/", 1)[-1].split("@", 1)[0]
  try:
    return importlib.metadata.version(name)
  except (importlib.metadata.PackageNotFoundError, ValueError):
    return ""


class _Served:
  """An environment that is served: its tool servers, and that of its agents.

  Rollouts share them.
  """

  def __init__(self, config: Any):
    self.left = _MOST_ROLLOUTS
    self.users = 0
    self._ready: asyncio.Future[Any] = (
      asyncio.get_running_loop().create_future()
    )
    self._is_unused = asyncio.Event()
    self._task = asyncio.create_task(self._serve(config))

  async def _serve(self, config: Any) -> None:
    from verifiers.v1.utils import loaders

    try:
      env = loaders.load_environment(config)
      async with env.serving():
        self._ready.set_result(env)
        await self._is_unused.wait()
    except Exception as error:  # of the environment's code
      if not self._ready.done():
        self._ready.set_exception(error)

  @contextlib.asynccontextmanager
  async def used(self) -> AsyncIterator[Any]:
    self.left -= 1
    self.users += 1
    try:
      yield await asyncio.shield(self._ready)
    except Exception:
      if not self._ready.done() or self._ready.exception() is not None:
        self.left = 0  # the next rollout tries again
      raise
    finally:
      self.users -= 1
      if not self.users and self.left <= 0:
        self._is_unused.set()


class Environments:
  """The environments that rollouts have asked for."""

  def __init__(self):
    """Start none yet."""
    self._served: dict[str, _Served] = {}

  def used(self, config: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    """Return a block of one rollout that uses the environment of a config."""
    key = config.model_dump_json()
    served = self._served.get(key)
    if served is None or served.left <= 0:
      served = self._served[key] = _Served(config)
    return served.used()


async def rollout(
  environments: Environments, request: Mapping[str, Any]
) -> dict[str, Any]:
  """Run one rollout, and return its reward and the parts of it.

  Raises:
    RolloutFailedError: it has no reward.
  """
  config = env_config(request["taskset"], request["options"], request["params"])
  async with environments.used(config) as env:
    return await _reward(env, config, request)


async def _reward(
  env: Any, config: Any, request: Mapping[str, Any]
) -> dict[str, Any]:
  from verifiers.v1 import clients
  from verifiers.v1.configs import client as client_lib
  from verifiers.v1.types import SamplingConfig

  policy, params = request["policy"], request["params"]
  kind = type(env.taskset).task_type()
  task = kind(
    kind.data_type().model_validate(request["task"]), config.taskset.task
  )
  # The package takes keys from the environment, and keeps those whose names
  # contain this from the programs that it starts.
  variable = f"SESSION_API_KEY_{request['id']}"
  access = {"base_url": policy["base_url"], "api_key_var": variable}
  if policy["renderer"] is None:
    client = client_lib.EvalClientConfig(**access)
  else:
    client = client_lib.TrainClientConfig(
      **access,
      renderer=policy["renderer"],
      renderer_model_name=policy["tokenizer"],
    )
  context = clients.ModelContext(
    model=policy["model"],
    client=client,
    sampling=SamplingConfig.model_validate(params.get(_SAMPLING, {})),
  )
  os.environ[variable] = policy["api_key"]
  try:
    episode = await env.run_episode(task, context)
  finally:
    del os.environ[variable]
  return reward_of(episode, policy["base_url"])


def reward_of(episode: Any, base_url: str) -> dict[str, Any]:
  """Return the reward of an episode for the policy at an address.

  Its parts are the metrics, without those that are not finite, and the rewards
  of which it is the sum, without their weights.

  Raises:
    RolloutFailedError: something failed, took too long, or gave no reward.
  """
  failed = [*episode.errors]
  for trace in episode.traces:
    if trace.is_timeout:
      raise RolloutFailedError(f"timeout: {trace.stop_condition}")
    if not trace.ok:
      failed += trace.errors[-1:]
  if failed:
    raise RolloutFailedError(f"{failed[0].type}: {failed[0].message}")
  if not episode.ok:
    raise RolloutFailedError("the episode did not end as it should")
  ours = [
    trace
    for trace in episode.traces
    if trace.agent.config.client.base_url == base_url
  ]
  if len(ours) != 1:
    raise RolloutFailedError(
      f"{len(ours)} of its agents are the policy, and it can only be one;"
      " give the others a client of their own"
    )
  (trace,) = ours
  missing = [name for name, part in trace.rewards.items() if part is None]
  if missing:
    raise RolloutFailedError(f"the reward {missing[0]} was not given")
  if not trace.rewards:
    raise RolloutFailedError("it gives no reward")
  for name, part in trace.rewards.items():
    if not math.isfinite(part.value):
      raise RolloutFailedError(f"the reward {name} is {part.value}")
  parts = {
    **{k: v for k, v in trace.metrics.items() if v is not None},
    **{name: part.score for name, part in trace.rewards.items()},
  }
  return {
    "reward": float(trace.reward),
    "parts": {k: float(v) for k, v in parts.items() if math.isfinite(v)},
  }


class _Server:
  """Answers the requests of a reader."""

  def __init__(self, output: Any):
    self._output = output
    self._environments = Environments()
    self._running: dict[int, asyncio.Task[None]] = {}

  async def serve(self, reader: asyncio.StreamReader) -> None:
    """Answer until the input ends."""
    while line := await reader.readline():
      request = json.loads(line)
      if request["what"] == "cancel":
        if (task := self._running.get(request["of"])) is not None:
          task.cancel()
          # At once: what an environment does when it ends may take long.
          self._write({"id": request["of"], "error": "cancelled"})
        continue
      task = asyncio.create_task(self._answer(request))
      self._running[request["id"]] = task
    for task in self._running.values():
      task.cancel()
    await asyncio.gather(*self._running.values(), return_exceptions=True)

  async def _answer(self, request: dict[str, Any]) -> None:
    try:
      answer = await self._answer_to(request)
    except asyncio.CancelledError:
      answer = {"error": "cancelled"}
    except RolloutFailedError as error:
      answer = {"error": _line(str(error))}
    # Code of an environment may raise anything.
    except (Exception, SystemExit) as error:
      answer = {"error": _line(f"{type(error).__name__}: {error}")}
    finally:
      del self._running[request["id"]]
    self._write({"id": request["id"], **answer})

  def _write(self, answer: dict[str, Any]) -> None:
    self._output.write(json.dumps(answer).encode() + b"\n")
    self._output.flush()

  async def _answer_to(self, request: dict[str, Any]) -> dict[str, Any]:
    if request["what"] == "rollout":
      return await rollout(self._environments, request)
    try:
      found = await asyncio.to_thread(
        rows, request["taskset"], request["options"], request["params"]
      )
    except (ImportError, ValueError, TypeError, AttributeError) as error:
      # The package says that a module is missing whose import fails.
      cause = f"{error.__cause__}: " if error.__cause__ else ""
      return {"refused": _line(f"{cause}{error}")}
    return {"rows": found}


def _line(text: str) -> str:
  return " ".join(text.split())[:1000]


async def _main(input_fd: int, output_fd: int) -> None:
  reader = asyncio.StreamReader(limit=_MAX_LINE)
  await asyncio.get_running_loop().connect_read_pipe(
    lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(input_fd, "rb")
  )
  with os.fdopen(output_fd, "wb") as output:
    await _Server(output).serve(reader)


def _find_modules(sys_path: list[str]) -> None:
  """Find environments where the run finds modules, in tool servers as well."""
  own = [os.path.abspath(p) for p in sys_path if p not in sys.path]
  sys.path.extend(own)
  given = os.environ.get("PYTHONPATH")
  os.environ["PYTHONPATH"] = os.pathsep.join(
    [*own, *([given] if given else [])]
  )


def main() -> None:
  """Serve standard input and output, which environments cannot disturb."""
  input_fd, output_fd = os.dup(0), os.dup(1)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  _find_modules(json.loads(sys.argv[1]))
  with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
    asyncio.run(_main(input_fd, output_fd))


if __name__ == "__main__":
  main()
