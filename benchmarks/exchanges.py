"""A request for a streamed completion, its answer, and the right answer."""

from collections.abc import Sequence
import dataclasses
import json
import time

import http_exchange
import numpy as np

from jaxrl_async import types
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib


@dataclasses.dataclass(kw_only=True)
class Exchange:
  """A request and its answer.

  Attributes:
    seed: seed of the request. The answer depends only on seed, prompt and
      max_tokens.
    max_events: the client leaves after this many events; 0 waits for the end.
    patience_s: the client leaves after this time, perhaps before any token.
    status: HTTP status; 0 before there is an answer.
    times_s: from the start to the first tokens and to the end.
  """

  seed: int
  prompt: list[int]
  max_tokens: int
  max_events: int = 0
  patience_s: float | None = None
  status: int = 0
  tokens: list[int] = dataclasses.field(default_factory=list)
  finish_reason: str | None = None
  times_s: dict[str, float] = dataclasses.field(default_factory=dict)
  error: str = ""

  @property
  def is_complete(self) -> bool:
    """Whether it was answered to the end."""
    return self.finish_reason is not None


async def ask(address: str, exchange: Exchange, deadline_s: float) -> None:
  """Send a request, and read the answer until the client has enough."""
  body = {
    "model": "policy",
    "prompt": exchange.prompt,
    "max_tokens": exchange.max_tokens,
    "seed": exchange.seed,
    "stream": True,
    "return_token_ids": True,
    "deadline_s": deadline_s,
  }
  num_events = 0
  start_s = time.perf_counter()
  content = json.dumps(body).encode()
  async with http_exchange.connection(address) as (reader, writer):
    writer.write(http_exchange.post(address, "/v1/completions", content))
    exchange.status = await http_exchange.status(reader)
    if exchange.status != 200:
      exchange.error = (await reader.read()).decode()
    # Each event is a chunk of its own, so it begins a line.
    while exchange.status == 200 and (line := await reader.readline()):
      if not line.startswith(b"data: {"):
        continue
      event = json.loads(line.removeprefix(b"data: "))
      if "error" in event:
        exchange.error = event["error"]["message"]
        return
      (choice,) = event["choices"]
      exchange.times_s.setdefault("first", time.perf_counter() - start_s)
      exchange.tokens += choice["token_ids"]
      exchange.finish_reason = choice["finish_reason"]
      num_events += 1
      if exchange.is_complete:
        exchange.times_s["all"] = time.perf_counter() - start_s
      elif num_events == exchange.max_events:
        return
  if not exchange.is_complete and not exchange.error:
    exchange.error = "the stream ended before its last event"


def finish(
  scheduler: scheduler_lib.Scheduler, exchanges: Sequence[Exchange], num: int
) -> list[sequence_lib.Sequence]:
  """Write the right answers, `num` of them at a time."""
  sequences = [
    sequence_lib.Sequence(
      np.asarray(exchange.prompt, np.int32),
      limit=len(exchange.prompt) + exchange.max_tokens,
      stream=sampling.Stream.SERVE,
      group=exchange.seed,
      member=0,
      settings=sampling.SamplingSettings(),
    )
    for exchange in exchanges
  ]
  waiting = list(reversed(sequences))
  while waiting or not scheduler.is_idle:
    while waiting and len(scheduler.sequences()) < num:
      scheduler.submit(waiting.pop())
    scheduler.step()
  return sequences


def num_wrong(
  exchanges: Sequence[Exchange], sequences: Sequence[sequence_lib.Sequence]
) -> int:
  """Count the answers that differ from those written without other clients."""
  wrong = 0
  for exchange, sequence in zip(exchanges, sequences, strict=True):
    n = len(exchange.prompt)
    expected = sequence.trajectory().tokens[n:].tolist()
    if exchange.is_complete:
      is_length = sequence.finish_reason is types.FinishReason.LENGTH
      is_right = exchange.tokens == expected and (
        exchange.finish_reason == ("length" if is_length else "stop")
      )
    else:
      is_right = exchange.tokens == expected[: len(exchange.tokens)]
    wrong += not is_right
  return wrong
