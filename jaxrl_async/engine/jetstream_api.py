"""The only module that imports JetStream: its `Engine` and its gRPC service.

JetStream imports seqio for tokenizers that are not used here, and seqio
imports TensorFlow. Stubs take the place of seqio in `sys.modules` while
JetStream is imported. They are removed afterwards, whether or not seqio is
installed.

Importing the gRPC service has further side effects. Its orchestrator sets the
root logger to DEBUG and adds a handler on stdout, and its metrics are added to
Prometheus' global registry. All of this is undone. The service is imported only
when `grpc_api` is called, which only serving does.
"""

from collections.abc import Iterator
import contextlib
import functools
import logging
import sys
import types
from typing import Any, NamedTuple


@contextlib.contextmanager
def _importing() -> Iterator[None]:
  """Replace seqio with stubs, and undo this and changes to the root logger."""
  names = ("seqio", "seqio.vocabularies")
  saved = {name: sys.modules.pop(name, None) for name in names}
  package: Any = types.ModuleType(names[0])
  vocabularies: Any = types.ModuleType(names[1])
  for name in ("SentencePieceVocabulary", "Vocabulary"):
    setattr(vocabularies, name, type(name, (), {}))
  package.vocabularies = vocabularies
  sys.modules.update(zip(names, (package, vocabularies), strict=True))
  root = logging.getLogger()
  level, handlers = root.level, root.handlers.copy()
  try:
    yield
  finally:
    for handler in root.handlers.copy():
      if handler not in handlers:
        root.removeHandler(handler)
    root.setLevel(level)
    for name in names:
      del sys.modules[name]
      original = saved[name]
      if original is not None:
        sys.modules[name] = original


def _import_engine_api():
  with _importing():
    from jetstream.engine import engine_api
    from jetstream.engine import tokenizer_pb2
  return engine_api, tokenizer_pb2


engine_api, tokenizer_pb2 = _import_engine_api()
Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
TokenizerParameters = tokenizer_pb2.TokenizerParameters


class GrpcApi(NamedTuple):
  """The parts of JetStream's gRPC service that serving uses.

  Attributes:
    messages: the module of the protocol's messages.
    services: the module of the generated stub, servicer and registration
      function.
    LLMOrchestrator: JetStream's servicer class.
  """

  messages: Any
  services: Any
  LLMOrchestrator: Any


@functools.cache
def grpc_api() -> GrpcApi:
  """Import JetStream's gRPC service without its side effects."""
  import prometheus_client

  with _importing():
    from jetstream.core import orchestrator
    from jetstream.core.metrics import prometheus
    from jetstream.core.proto import jetstream_pb2
    from jetstream.core.proto import jetstream_pb2_grpc
  # The gauges belong to JetStream's own driver, which does not run here.
  for gauge in vars(prometheus.JetstreamMetricsCollector).values():
    if isinstance(gauge, prometheus_client.Gauge):
      prometheus_client.REGISTRY.unregister(gauge)
  return GrpcApi(
    jetstream_pb2, jetstream_pb2_grpc, orchestrator.LLMOrchestrator
  )
