"""Builds a server of one policy, starts its threads, shuts it down.

The main thread waits for a signal or a failure. One thread drives the engine,
one the event loop of the HTTP server, one that of the gRPC server if there is
one; between them lies the request queue. A signal drains: nothing new is taken,
what was taken is finished within a bound.
"""

from collections.abc import Callable
import dataclasses
import ipaddress
import itertools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np

from jaxrl_async import assembly
from jaxrl_async import checkpoint
from jaxrl_async import config as config_lib
from jaxrl_async import config_json
from jaxrl_async import initial_params
from jaxrl_async import metrics as metrics_lib
from jaxrl_async import supervisor
from jaxrl_async import tokenizer as tokenizer_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import transformer
from jaxrl_async.rollout import requests
from jaxrl_async.rollout import sampling
from jaxrl_async.rollout import scheduler as scheduler_lib
from jaxrl_async.rollout import sequence as sequence_lib
from jaxrl_async.serving import app as app_lib
from jaxrl_async.serving import chat_template as chat_template_lib
from jaxrl_async.serving import prometheus
from jaxrl_async.serving import server as server_lib

_JOIN_S = 20.0
_SMALLEST_BUCKET = 64
_PUBLISHED_CACHE_TOKENS = 1024  # of a published model, unless told otherwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
  """How a policy is served.

  Attributes:
    grpc_port: of JetStream's interface; 0 is none.
    api_key: None needs none, and is refused on other addresses than loopback.
    max_waiting: requests at a time, running ones included.
    drain_s: how long requests may still take after a signal.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  grpc_port: int = 0
  api_key: str | None = None
  model_name: str = "policy"
  max_waiting: int = 256
  drain_s: float = 30.0
  limits: app_lib.Limits = dataclasses.field(default_factory=app_lib.Limits)


@dataclasses.dataclass(kw_only=True)
class Policy:
  """What is served.

  Attributes:
    config: its rollout section sizes the engine.
    params: stacked, as the trainer has them.
    version: of the policy; 0 where nobody counted.
  """

  config: config_lib.Config
  model: configs.ModelConfig
  params: Any
  version: int
  tokenizer: tokenizer_lib.Tokenizer
  chat_template: chat_template_lib.ChatTemplate


# -- what to serve ----------------------------------------------------------


def load_run(
  workdir: pathlib.Path, *, num_slots: int, cache_tokens: int
) -> Policy:
  """The newest checkpoint of a run.

  Args:
    workdir: of the run.
    num_slots: instead of the run's own; 0 keeps that.
    cache_tokens: likewise.

  Raises:
    ConfigError: the directory holds no such thing.
  """
  config = _read_config(workdir)
  _resize(config, num_slots, cache_tokens)
  directory = workdir / "checkpoints"
  step = checkpoint.latest(directory)
  if step is None:
    raise config_lib.ConfigError(
      f"workdir: {workdir} holds no checkpoint; launch/train.py writes the"
      " first one after the warm start"
    )
  tokenizer, chat_template = _load_tokenizer(config, workdir / "tokenizer")
  model = assembly.model_config(config, tokenizer.vocab_size)
  mesh, _ = assembly.cut_devices(config, jax.devices())
  trainer = assembly.make_trainer(config, model, mesh, metrics_lib.BusyClock())
  try:
    state, _, _ = checkpoint.restore(directory, step, trainer.abstract_state())
  except checkpoint.CheckpointError as error:
    raise config_lib.ConfigError(f"workdir: {error}") from error
  return Policy(
    config=config,
    model=model,
    params=state.params,
    version=step,
    tokenizer=tokenizer,
    chat_template=chat_template,
  )


def load_checkpoint(
  directory: pathlib.Path, *, num_slots: int, cache_tokens: int
) -> Policy:
  """Parameters alone: of launch/sft.py, or in Hugging Face's format.

  Args:
    directory: WORKDIR/params of the former, whose config.json and tokenizer
      lie beside it; or the latter, with its tokenizer.
    num_slots: as of `load_run`.
    cache_tokens: likewise.

  Raises:
    ConfigError: the directory holds no such thing.
  """
  if not directory.is_dir():
    raise config_lib.ConfigError(f"checkpoint: {directory} does not exist")
  if (directory / hf_config.CONFIG_FILE).is_file():
    config = config_lib.Config()
    config.model.name = str(directory)
    _resize(config, num_slots, cache_tokens or _PUBLISHED_CACHE_TOKENS)
    tokenizer = assembly.load_tokenizer(config)
    chat_template = _load_chat_template(directory)
  else:
    config = _read_config(directory.parent)
    _resize(config, num_slots, cache_tokens)
    beside = directory.parent / "tokenizer"
    tokenizer, chat_template = _load_tokenizer(config, beside)
  model = assembly.model_config(config, tokenizer.vocab_size)
  mesh, _ = assembly.cut_devices(config, jax.devices())
  try:
    shardings = initial_params.shardings(config, model, mesh)
    params = initial_params.load(str(directory), model, shardings)
  except config_lib.ConfigError as error:
    text = str(error).removeprefix("warm_start.")
    raise config_lib.ConfigError(text) from error
  return Policy(
    config=config,
    model=model,
    params=params,
    version=0,
    tokenizer=tokenizer,
    chat_template=chat_template,
  )


def _read_config(workdir: pathlib.Path) -> config_lib.Config:
  path = workdir / "config.json"
  try:
    return config_json.from_dict(json.loads(path.read_text()))
  except OSError as error:
    raise config_lib.ConfigError(
      f"workdir: {path} cannot be read ({error.strerror})"
    ) from error
  except json.JSONDecodeError as error:
    raise config_lib.ConfigError(
      f"workdir: {path} is damaged ({error})"
    ) from error


def _load_tokenizer(
  config: config_lib.Config, directory: pathlib.Path
) -> tuple[tokenizer_lib.Tokenizer, chat_template_lib.ChatTemplate]:
  """Of a workdir; the chat template stays with the model it came with."""
  try:
    tokenizer = tokenizer_lib.load(directory)
  except (OSError, ValueError) as error:
    raise config_lib.ConfigError(f"tokenizer: {error}") from error
  published = pathlib.Path(config.model.name)
  has_own = (published / hf_config.CONFIG_FILE).is_file()
  return tokenizer, _load_chat_template(published if has_own else directory)


def _load_chat_template(
  directory: pathlib.Path,
) -> chat_template_lib.ChatTemplate:
  try:
    return chat_template_lib.load(directory)
  except (OSError, ValueError) as error:
    raise config_lib.ConfigError(f"tokenizer: {error}") from error


def _resize(
  config: config_lib.Config, num_slots: int, cache_tokens: int
) -> None:
  """Other sizes of the engine than the run's; 0 keeps them."""
  rollout = config.rollout
  if num_slots:
    rollout.num_slots = num_slots
  if cache_tokens:
    sizes = []
    size = min(_SMALLEST_BUCKET, cache_tokens)
    while size < cache_tokens:
      sizes.append(size)
      size *= 2
    buckets = (*sizes, cache_tokens)
    rollout.cache_tokens = cache_tokens
    rollout.num_pages = rollout.prefill_chunk = 0
    rollout.prefill_buckets = rollout.window_buckets = buckets


# -- serving it -------------------------------------------------------------


def check_key(host: str, api_key: str | None) -> None:
  """Refuses to serve without a key where others could come.

  Raises:
    ConfigError: says how to give one.
  """
  try:
    is_loopback = ipaddress.ip_address(host).is_loopback
  except ValueError:
    is_loopback = host == "localhost"
  if api_key is None and not is_loopback:
    raise config_lib.ConfigError(
      f"api_key_file: {host} can be reached from elsewhere; give a key, in a"
      " file or in JAXRL_API_KEY, or use --host=127.0.0.1"
    )


def _make_scheduler(policy: Policy) -> scheduler_lib.Scheduler:
  """An engine with the policy's weights, in the rollout dtype."""
  config, model = policy.config, policy.model
  _, mesh = assembly.cut_devices(config, jax.devices())
  engine = assembly.make_engine(config, model, mesh, policy.tokenizer.eos_id)

  @jax.jit
  def publish(params):
    cast = jax.tree.map(lambda x: x.astype(engine.dtype), params)
    return transformer.unstack(cast, model.num_layers)

  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  params = engine.load_params(publish(policy.params), policy.version)
  scheduler.adopt(params, policy.version)
  return scheduler


def _compile(scheduler: scheduler_lib.Scheduler) -> None:
  """Writes a token at each padded length, so that no client waits for XLA."""
  sizes = scheduler.engine.sizes
  buckets = sorted({*sizes.prefill_buckets, *sizes.window_buckets})
  for bucket, top_p in itertools.product(buckets, (1.0, 0.5)):
    length = max(1, bucket - sizes.decode_steps_per_call)
    sequence = sequence_lib.Sequence(
      np.zeros((length,), np.int32),
      limit=length + 1,
      stream=sampling.Stream.SERVE,
      group=0,
      member=0,
      settings=sampling.SamplingSettings(top_p=top_p),
    )
    scheduler.submit(sequence)
    while not scheduler.is_idle:
      scheduler.step()


class Front:
  """What clients reach: the queue, the servers before it, their threads.

  Whoever owns the scheduler feeds and closes the queue.
  """

  def __init__(
    self,
    settings: ServeSettings,
    *,
    tokenizer: tokenizer_lib.Tokenizer,
    chat_template: chat_template_lib.ChatTemplate,
    cache_tokens: int,
    vocab_size: int,
    is_alive: Callable[[], bool],
  ):
    """Binds the addresses.

    Args:
      settings: see there.
      tokenizer: of the policy.
      chat_template: likewise.
      cache_tokens: the most tokens of a prompt with its completion.
      vocab_size: of the model.
      is_alive: whether somebody serves the queue.

    Raises:
      ConfigError: an address cannot be had, or needs a key.
    """
    check_key(settings.host, settings.api_key)
    metrics = prometheus.Metrics()
    self.queue = requests.RequestQueue(
      tokenizer,
      max_waiting=settings.max_waiting,
      cache_tokens=cache_tokens,
      vocab_size=vocab_size,
      on_time=metrics.observe,
    )
    service = app_lib.Service(
      queue=self.queue,
      tokenizer=tokenizer,
      chat_template=chat_template,
      metrics=metrics,
      model_name=settings.model_name,
      is_alive=is_alive,
      api_key=settings.api_key,
      limits=settings.limits,
    )
    max_connections = 4 * settings.max_waiting + 64
    try:
      http = server_lib.HttpServer(
        app_lib.make_app(service),
        host=settings.host,
        port=settings.port,
        max_connections=max_connections,
      )
    except OSError as error:
      raise config_lib.ConfigError(
        f"port: {settings.host}:{settings.port} cannot be bound"
        f" ({error.strerror})"
      ) from error
    self.address = f"http://{settings.host}:{http.port}"
    self._servers: dict[str, Any] = {"http server": http}
    if settings.grpc_port:
      # Not above: it imports much that serving HTTP alone does not need.
      from jaxrl_async.serving import jetstream_grpc

      try:
        self._servers["grpc server"] = jetstream_grpc.GrpcServer(
          jetstream_grpc.Orchestrator(service),
          host=settings.host,
          port=settings.grpc_port,
          max_calls=max_connections,
        )
      except RuntimeError as error:
        raise config_lib.ConfigError(
          f"grpc_port: {settings.host}:{settings.grpc_port} cannot be bound"
        ) from error

  def start(self, threads: supervisor.Supervisor) -> None:
    """Starts a thread for each server."""
    for name, server in self._servers.items():
      threads.spawn(name, server.run)

  @property
  def has_started(self) -> bool:
    """Connections are accepted."""
    return all(server.has_started for server in self._servers.values())

  def stop(self) -> None:
    """Ends the servers; what is still running has some seconds left."""
    for server in self._servers.values():
      server.stop()


def front_of_a_run(
  settings: ServeSettings,
  config: config_lib.Config,
  model: configs.ModelConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  is_alive: Callable[[], bool],
) -> Front:
  """Beside a training, whose rollout worker serves the queue."""
  published = pathlib.Path(config.model.name)
  return Front(
    settings,
    tokenizer=tokenizer,
    chat_template=chat_template_lib.load(published),
    cache_tokens=config.rollout.cache_tokens,
    vocab_size=model.vocab_size,
    is_alive=is_alive,
  )


def serve(
  policy: Policy,
  settings: ServeSettings,
  *,
  stop: supervisor.StopRequest,
  on_ready: Callable[[str], None],
) -> None:
  """Serves until asked to stop; then drains.

  Args:
    policy: its `params` are let go of.
    settings: see there.
    stop: set by a signal.
    on_ready: told the address, once requests are answered.

  Raises:
    ConfigError: it cannot be served like that.
    ThreadFailed: a thread failed, and every request with it.
  """
  loop: requests.ServeLoop | None = None
  front = Front(
    settings,
    tokenizer=policy.tokenizer,
    chat_template=policy.chat_template,
    cache_tokens=policy.config.rollout.cache_tokens,
    vocab_size=policy.model.vocab_size,
    is_alive=lambda: loop is not None and loop.is_running,
  )
  scheduler = _make_scheduler(policy)
  policy.params = None
  _compile(scheduler)
  loop = requests.ServeLoop(front.queue, scheduler)
  this = supervisor.Supervisor(on_failure=lambda error: stop.set())
  this.spawn("serve loop", loop.run)
  front.start(this)
  try:
    while not (stop.is_set or (loop.is_running and front.has_started)):
      stop.wait(0.01)
    if not stop.is_set:
      on_ready(front.address)
    while not stop.is_set:
      stop.wait(1.0)
    front.queue.drain()
    end_s = time.monotonic() + settings.drain_s
    while not front.queue.is_empty and time.monotonic() < end_s:
      time.sleep(0.02)
  finally:
    loop.stop()  # what is left gets an error, then its connection ends
    front.stop()
    late = this.join(_JOIN_S)
  this.check()
  if late:
    raise TimeoutError(f"{', '.join(late)} did not end in {_JOIN_S} s")
