"""The queue of requests together with the servers that fill it."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import addresses
from jaxrl_async.serving import bodies
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
  """Settings of the servers.

  Attributes:
    grpc_port: port of JetStream's interface; 0 disables it.
    api_key: key that clients must send. None requires no key, and is allowed on
      loopback addresses only.
    max_waiting: most requests at a time, including those that run.
    drain_s: time that requests have left after a stop signal.
    adapters: names of further models, each an adapter of the policy.
    tool_format: how the policy writes calls of tools; "" finds it in the chat
      template.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  grpc_port: int = 0
  api_key: str | None = None
  model_name: str = "policy"
  max_waiting: int = 256
  drain_s: float = 30.0
  limits: bodies.Limits = dataclasses.field(default_factory=bodies.Limits)
  adapters: tuple[str, ...] = ()
  tool_format: str = ""


def load_chat_template(
  directory: pathlib.Path,
) -> chat_template_lib.ChatTemplate:
  """Return the chat template of a directory.

  Raises:
    ConfigError: the template cannot be used.
  """
  try:
    return chat_template_lib.load(directory)
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"tokenizer: {error}") from error


class Front:
  """The queue, the servers in front of it, and their threads.

  The owner of the scheduler takes requests from the queue and closes it. The
  threads of the servers have a supervisor of their own, and the owner decides
  what their failure means.
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
    """Bind the addresses.

    Args:
      settings: of the servers.
      tokenizer: of the policy.
      chat_template: of the policy.
      cache_tokens: most tokens of a prompt together with its completion.
      vocab_size: of the model.
      is_alive: returns whether the queue is being served.

    Raises:
      ConfigError: an address cannot be bound, or requires a key.
    """
    # These load web libraries, which most runs do not need.
    from jaxrl_async.serving import app as app_lib
    from jaxrl_async.serving import prometheus
    from jaxrl_async.serving import server as server_lib

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
      adapters=settings.adapters,
      tool_format=settings.tool_format,
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
      # Imported here, because it loads much that HTTP alone does not need.
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
    """Start one thread per server.

    Until the queue is served, clients are told to try again later.

    Args:
      note: is called in the thread of the first server that fails.
    """
    self._threads = supervisor_lib.Supervisor(
      lambda error: note(f"clients are no longer served: {error!r}")
    )
    for name, server in self._servers.items():
      self._threads.spawn(name, server.run)

  @property
  def is_ready(self) -> bool:
    """Whether requests are being completed."""
    return self._service.is_ready

  @property
  def has_started(self) -> bool:
    """Whether connections are accepted."""
    return all(server.has_started for server in self._servers.values())

  def check(self) -> None:
    """Raise the exception of a server's thread, if one failed."""
    if self._threads is not None:
      self._threads.check()

  def stop(self) -> None:
    """Stop the servers; answers in progress have a few seconds left."""
    for server in self._servers.values():
      server.stop()

  def join(self, timeout_s: float) -> list[str]:
    """Wait for the threads, and return the names of those still running."""
    return [] if self._threads is None else self._threads.join(timeout_s)

  def close(self, timeout_s: float, note: Callable[[str], None]) -> None:
    """Stop and wait; a server that does not end is only reported."""
    self.stop()
    for name in self.join(timeout_s):
      note(f"the {name} did not end within {timeout_s:g} s and is left running")


def of_a_run(
  settings: ServeSettings,
  config: sections.Config,
  model: configs.ModelConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  pretrained: pathlib.Path | None,
  is_alive: Callable[[], bool],
) -> Front:
  """Return the servers of a training run.

  The queue is served by the run's rollout worker.

  Args:
    settings: of the servers.
    config: of the run.
    model: the architecture of the policy.
    tokenizer: of the policy.
    pretrained: directory of the pretrained model that it began with, if any.
    is_alive: returns whether the rollout worker runs.

  Raises:
    ConfigError: an address cannot be bound, or the chat template is damaged.
  """
  directory = pretrained or config.model.tokenizer
  chat_template = chat_template_lib.ChatTemplate(None)
  if directory:
    chat_template = load_chat_template(pathlib.Path(directory))
  return Front(
    settings,
    tokenizer=tokenizer,
    chat_template=chat_template,
    cache_tokens=config.rollout.cache_tokens,
    vocab_size=model.vocab_size,
    is_alive=is_alive,
  )
