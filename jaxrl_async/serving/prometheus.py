"""The contents of `/metrics` in Prometheus' text format."""

from collections.abc import Iterator

import prometheus_client
from prometheus_client import core
from prometheus_client import registry

from jaxrl_async.serving import requests as requests_lib

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
  """Counters of one server, in a registry of its own.

  Threads: any. The counters lock themselves, and the counts of the queue are
  plain integers that only one thread writes.
  """

  def __init__(self):
    self._registry = prometheus_client.CollectorRegistry()
    self._answers = prometheus_client.Counter(
      "jaxrl_http_requests",
      "Answers by path and status.",
      ("path", "code"),
      registry=self._registry,
    )
    self._times = {
      name: prometheus_client.Histogram(
        f"jaxrl_{name}_seconds", text, buckets=_SECONDS, registry=self._registry
      )
      for name, text in {
        "first_token": "From submission to the first token.",
        "latency": "From submission to the last token.",
      }.items()
    }

  def add_answer(self, path: str, code: int) -> None:
    """Count an answered HTTP request."""
    self._answers.labels(path, str(code)).inc()

  def observe(self, name: str, seconds: float) -> None:
    """Record a duration; this is `RequestQueue`'s `on_time`."""
    self._times[name].observe(seconds)

  def watch(self, queue: requests_lib.RequestQueue) -> None:
    """Include the counts of a queue, read at each scrape."""
    self._registry.register(_QueueCollector(queue))

  def text(self) -> bytes:
    """Return the page."""
    return prometheus_client.generate_latest(self._registry)


class _QueueCollector(registry.Collector):
  """The counts of a queue as metrics."""

  def __init__(self, queue: requests_lib.RequestQueue):
    self._queue = queue

  def collect(self) -> Iterator[core.Metric]:
    stats = self._queue.stats
    ended = core.CounterMetricFamily(
      "jaxrl_requests",
      "Requests to the engine, by how they ended.",
      None,
      ["end"],
    )
    for end in ("finished", "cancelled", "expired", "failed", "refused"):
      ended.add_metric([end], getattr(stats, end))
    yield ended
    tokens = core.CounterMetricFamily(
      "jaxrl_tokens", "Tokens read and written.", None, ["direction"]
    )
    tokens.add_metric(["in"], stats.prompt_tokens)
    tokens.add_metric(["out"], stats.completion_tokens)
    yield tokens
    for name, text, value in (
      ("queue_depth", "Requests waiting or running.", self._queue.depth),
      ("slots", "Sequences that fit side by side.", stats.num_slots),
      ("slots_in_use", "Slots that write.", stats.slots_in_use),
      ("policy_version", "Of the weights in use.", stats.policy_version),
    ):
      yield core.GaugeMetricFamily(f"jaxrl_{name}", text, value)
