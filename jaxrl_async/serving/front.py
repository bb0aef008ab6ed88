"""What clients of a policy reach: the queue, and the servers before it."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.models import configs
from jaxrl_async.serving import addresses
from jaxrl_async.serving import app as app_lib
from jaxrl_async.serving import bodies
from jaxrl_async.serving import prometheus
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.serving import server as server_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


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
  limits: bodies.Limits = dataclasses.field(default_factory=bodies.Limits)


def load_chat_template(
  directory: pathlib.Path,
) -> chat_template_lib.ChatTemplate:
  """The chat template in a directory.

  Raises:
    ConfigError: what is there cannot be used.
  """
  try:
    return chat_template_lib.load(directory)
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"tokenizer: {error}") from error


class Front:
  """What clients reach: the queue, the servers before it, their threads.

  Whoever owns the scheduler feeds and closes the queue. The threads are
  supervised apart from the owner's, who decides what their failure means.
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
    addresses.check_key(settings.host, settings.api_key)
    addresses.check_ports(settings.port, settings.grpc_port)
    self._threads: supervisor_lib.Supervisor | None = None
    metrics = prometheus.Metrics()
    self.queue = requests_lib.RequestQueue(
      tokenizer,
      max_waiting=settings.max_waiting,
      cache_tokens=cache_tokens,
      vocab_size=vocab_size,
      on_time=metrics.observe,
    )
    self._service = service = app_lib.Service(
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
      raise sections.ConfigError(
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
        raise sections.ConfigError(
          f"grpc_port: {settings.host}:{settings.grpc_port} cannot be bound"
        ) from error

  def start(self, note: Callable[[str], None]) -> None:
    """Starts a thread for each server.

    Until somebody serves the queue, requests are told to come again.

    Args:
      note: told of the first thread that fails, in that thread.
    """
    self._threads = supervisor_lib.Supervisor(
      lambda error: note(f"clients are not served any more: {error!r}")
    )
    for name, server in self._servers.items():
      self._threads.spawn(name, server.run)

  @property
  def is_ready(self) -> bool:
    """Requests are written."""
    return self._service.is_ready

  @property
  def has_started(self) -> bool:
    """Connections are accepted."""
    return all(server.has_started for server in self._servers.values())

  def check(self) -> None:
    """Raises what a server's thread raised."""
    if self._threads is not None:
      self._threads.check()

  def stop(self) -> None:
    """Ends the servers; what is still running has some seconds left."""
    for server in self._servers.values():
      server.stop()

  def join(self, timeout_s: float) -> list[str]:
    """Waits for their threads; returns who did not come home."""
    return [] if self._threads is None else self._threads.join(timeout_s)

  def close(self, timeout_s: float, note: Callable[[str], None]) -> None:
    """Stops and waits; a server that does not end is only reported."""
    self.stop()
    for name in self.join(timeout_s):
      note(f"the {name} did not end in {timeout_s:g} s and is left behind")


def of_a_run(
  settings: ServeSettings,
  config: sections.Config,
  model: configs.ModelConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  is_alive: Callable[[], bool],
) -> Front:
  """Beside a training, whose rollout worker serves the queue."""
  published = pathlib.Path(config.model.name)
  return Front(
    settings,
    tokenizer=tokenizer,
    chat_template=load_chat_template(published),
    cache_tokens=config.rollout.cache_tokens,
    vocab_size=model.vocab_size,
    is_alive=is_alive,
  )
