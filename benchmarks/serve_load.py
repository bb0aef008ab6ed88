"""Many streaming clients at once: wrong answers, leaked slots, latency.

    python benchmarks/serve_load.py

Starts the server of launch/serve.py in a process of its own, with a policy of
0.9 million random parameters, or with that of --workdir, and 200 clients, each
of which asks again as soon as it has been answered, for a minute. Lengths of
prompts and completions are lognormal; one request in ten is given up, after its
first tokens or before.
Afterwards every answer is compared with what a scheduler writes that serves
nobody else, token by token; of an abandoned one, as far as it came. Some of
them are written once more entirely alone.

On two CPU cores, beside the load itself, about a minute of processor time goes
into starting, compiling and writing everything again. The README has the
result. The clients share the cores with the server: `client_cpu_s` and
`server_cpu_s` of the `load_s` seconds on each core were theirs.

A request waits most of its time for one of the 32 slots: with 200 clients that
always want something, the latency is theirs as much as the server's. The time
to the first token holds that wait and one call of several decode steps.

Prints a table and, as the last line, one JSON object; exit status 1 if there
was a wrong answer, a leaked slot or a failed request.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any
import urllib.request

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

from jaxrl_async import config as config_lib
from jaxrl_async import serve
from jaxrl_async import supervisor
from jaxrl_async import tokenizer as tokenizer_lib
from jaxrl_async import types
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.rollout import sampling
from jaxrl_async.rollout import scheduler as scheduler_lib
from jaxrl_async.rollout import sequence as sequence_lib
from jaxrl_async.serving import chat_template
from jaxrl_async.serving import front

_SECONDS = flags.DEFINE_float("seconds", 60.0, "Of load.", lower_bound=0.0)
_CLIENTS = flags.DEFINE_integer("clients", 200, "At once.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", "", "Serve a run's policy instead.")
_NUM_SLOTS = flags.DEFINE_integer("num_slots", 32, "Of the engine.", 1)
_CACHE_TOKENS = flags.DEFINE_integer(
  "cache_tokens", 256, "Prompt and completion together.", 64
)
_ALONE = flags.DEFINE_integer("alone", 16, "Written again one by one.", 0)
_SERVER = flags.DEFINE_string(
  "server", "", "Internal: be the server, with XLA's cache in this directory."
)

_ABANDONED_FRAC = 0.1
_DEADLINE_S = 300.0
_SETTLE_S = 10.0  # until the server has noticed the last client's going
_MODEL = configs.ModelConfig(
  vocab_size=98,
  model_dim=144,
  num_layers=4,
  num_heads=6,
  num_kv_heads=2,
  head_dim=24,
  mlp_dim=384,
  has_qk_norm=True,
)


@dataclasses.dataclass(kw_only=True)
class Exchange:
  """A request, and what came back.

  Attributes:
    seed: with prompt and max_tokens all that the answer depends on.
    max_events: it is abandoned after so many; 0 waits for the end.
    patience_s: or after that time, perhaps before its first token.
    status: of HTTP; 0 before an answer.
    times_s: to the first tokens and to the end, from the start.
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
    """It was answered to the end."""
    return self.finish_reason is not None


# -- the policy ---------------------------------------------------------------


def _policy() -> serve.Policy:
  """Random parameters, the same in every process, or the run's."""
  sizes = {"num_slots": _NUM_SLOTS.value, "cache_tokens": _CACHE_TOKENS.value}
  if _WORKDIR.value:
    return serve.load_run(pathlib.Path(_WORKDIR.value).absolute(), **sizes)
  config = config_lib.Config()
  half = _CACHE_TOKENS.value // 2
  buckets = (half // 2, half, _CACHE_TOKENS.value)
  config.rollout = config_lib.RolloutSection(
    prefill_buckets=buckets, window_buckets=buckets, **sizes
  )

  @jax.jit
  def init(key):
    # As after training: probabilities that depend on what was written before.
    leaves, tree = jax.tree.flatten(transformer.init_params(_MODEL, key))
    keys = jax.random.split(key, len(leaves))
    noisy = [
      x + 0.1 * jax.random.normal(k, x.shape)
      for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)

  return serve.Policy(
    config=config,
    model=_MODEL,
    params=init(jax.random.key(0)),
    version=0,
    tokenizer=tokenizer_lib.character_level(),
    chat_template=chat_template.ChatTemplate(None),
  )


def _be_the_server() -> None:
  """Serves until SIGTERM; says on stdout where."""
  stop = supervisor.StopRequest()
  with stop.on_signals(lambda text: None):
    serve.serve(
      _policy(),
      front.ServeSettings(port=0, max_waiting=_CLIENTS.value + 56),
      stop=stop,
      on_ready=lambda address: print(address, flush=True),
    )


# -- the load -----------------------------------------------------------------


def _exchange(seed: int, vocab_size: int) -> Exchange:
  """The request of that number."""
  rng = np.random.default_rng(seed)

  def length(median, most):
    return int(np.clip(rng.lognormal(np.log(median), 0.8), 1, most))

  room = _CACHE_TOKENS.value
  prompt_length = length(room / 10, room // 2)
  max_tokens = length(room / 5, room - prompt_length)
  exchange = Exchange(
    seed=seed,
    prompt=rng.integers(2, vocab_size, prompt_length).tolist(),
    max_tokens=max_tokens,
  )
  if rng.random() < _ABANDONED_FRAC:
    if rng.random() < 0.5:
      exchange.max_events = 1
    else:
      exchange.patience_s = rng.uniform(0.0, 2.0)
  return exchange


def _http_request(address: str, body: dict[str, Any]) -> bytes:
  data = json.dumps(body).encode()
  head = (
    "POST /v1/completions HTTP/1.1",
    f"host: {address}",
    "content-type: application/json",
    f"content-length: {len(data)}",
    "connection: close",
  )
  return "\r\n".join((*head, "", "")).encode() + data


async def _ask(address: str, exchange: Exchange) -> None:
  """Sends a request, and takes what comes until it is enough.

  By hand: httpx took 10 ms of a core for each exchange, this takes 0.6 ms.
  """
  body = {
    "model": "policy",
    "prompt": exchange.prompt,
    "max_tokens": exchange.max_tokens,
    "seed": exchange.seed,
    "stream": True,
    "return_token_ids": True,
    "deadline_s": _DEADLINE_S,
  }
  num_events = 0
  start_s = time.perf_counter()
  reader, writer = await asyncio.open_connection(*address.split(":"))
  try:
    writer.write(_http_request(address, body))
    head = await reader.readuntil(b"\r\n\r\n")
    exchange.status = int(head.split(maxsplit=2)[1])
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
  finally:
    writer.close()
  if not exchange.is_complete and not exchange.error:
    exchange.error = "the stream ended before its last event"


async def _load(address: str, vocab_size: int) -> list[Exchange]:
  """All clients, until the time is up and the last one has been answered."""
  exchanges: list[Exchange] = []
  end_s = time.perf_counter() + _SECONDS.value

  async def be_a_client():
    while time.perf_counter() < end_s:
      exchange = _exchange(len(exchanges), vocab_size)
      exchanges.append(exchange)
      try:
        async with asyncio.timeout(exchange.patience_s) as patience:
          await _ask(address, exchange)
      except (OSError, EOFError) as error:
        if not patience.expired():
          exchange.error = f"{type(error).__name__}: {error}"
      if exchange.error:
        await asyncio.sleep(1.0)  # what every refusal asks for

  await asyncio.gather(*(be_a_client() for _ in range(_CLIENTS.value)))
  return exchanges


def _gauges(address: str) -> dict[str, float]:
  """The lines of /metrics."""
  with urllib.request.urlopen(f"http://{address}/metrics") as page:
    lines = page.read().decode().splitlines()
  pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
  return {name: float(value) for name, value in pairs}


def _settled(address: str) -> dict[str, float]:
  """Metrics once nothing is in use, or after some time as they are."""
  end_s = time.perf_counter() + _SETTLE_S
  while True:
    gauges = _gauges(address)
    in_use = gauges["jaxrl_slots_in_use"] + gauges["jaxrl_queue_depth"]
    if not in_use or time.perf_counter() > end_s:
      return gauges
    time.sleep(0.1)


def _cpu_s(pid: int) -> float:
  """Processor time of a process so far; nan where /proc does not say."""
  path = pathlib.Path(f"/proc/{pid}/stat")
  if not path.exists():
    return float("nan")
  ticks = path.read_text().rpartition(")")[2].split()[11:13]
  return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


# -- what is right ------------------------------------------------------------


def _finish(scheduler: scheduler_lib.Scheduler, exchanges: list[Exchange], num):
  """What each answer should have been, `num` of them at a time."""
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


def _num_wrong(
  exchanges: list[Exchange], sequences: list[sequence_lib.Sequence]
) -> int:
  """How many answers are not what was written without other clients."""
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


def _check(exchanges: list[Exchange]) -> dict[str, int]:
  """Writes everything again without a server."""
  scheduler = serve.make_scheduler(_policy())
  some = exchanges[:: max(1, len(exchanges) // max(1, _ALONE.value))]
  some = some[: _ALONE.value]
  together = _finish(scheduler, exchanges, scheduler.engine.sizes.num_slots)
  return {
    "wrong_answers": _num_wrong(exchanges, together),
    "wrong_alone": _num_wrong(some, _finish(scheduler, some, 1)),
    "checked_alone": len(some),
  }


# -- both ---------------------------------------------------------------------


@contextlib.contextmanager
def _server(cache: str):
  """The server's process and address."""
  command = [
    sys.executable,
    __file__,
    f"--server={cache}",
    f"--clients={_CLIENTS.value}",
    f"--workdir={_WORKDIR.value}",
    f"--num_slots={_NUM_SLOTS.value}",
    f"--cache_tokens={_CACHE_TOKENS.value}",
  ]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    assert process.stdout is not None
    address = process.stdout.readline().strip().removeprefix("http://")
    if not address:
      sys.exit("error: the server did not start")
    yield process, address
    process.send_signal(signal.SIGTERM)
    if process.wait(_DEADLINE_S):
      sys.exit(f"error: the server exited with {process.returncode}")
  finally:
    process.kill()
    process.wait()


def _measure(cache: str) -> tuple[list[Exchange], dict[str, Any]]:
  """Loads a server; gives what was exchanged, and what it took."""
  vocab_size = _MODEL.vocab_size
  if _WORKDIR.value:
    directory = pathlib.Path(_WORKDIR.value) / "tokenizer"
    vocab_size = tokenizer_lib.load(directory).vocab_size
  with _server(cache) as (process, address):
    print(f"{_CLIENTS.value} clients at {address}", file=sys.stderr)
    start_s = time.perf_counter(), time.process_time(), _cpu_s(process.pid)
    exchanges = asyncio.run(_load(address, vocab_size))
    end_s = time.perf_counter(), time.process_time(), _cpu_s(process.pid)
    gauges = _settled(address)
  load_s, client_s, server_s = np.subtract(end_s, start_s).tolist()
  return exchanges, {
    "leaked_slots": int(gauges["jaxrl_slots_in_use"]),
    "queue_depth_after": int(gauges["jaxrl_queue_depth"]),
    "server_cancelled": int(gauges['jaxrl_requests_total{end="cancelled"}']),
    "tokens_per_s": gauges['jaxrl_tokens_total{direction="out"}'] / load_s,
    "load_s": load_s,
    "client_cpu_s": client_s,
    "server_cpu_s": server_s,
  }


def _percentiles(name: str, times_s: list[float]) -> dict[str, float | None]:
  if not times_s:
    return {f"{name}p50_s": None, f"{name}p99_s": None}
  p50, p99 = np.percentile(times_s, (50, 99)).tolist()
  return {f"{name}p50_s": p50, f"{name}p99_s": p99}


def _summary(exchanges: list[Exchange], load: dict[str, Any]) -> dict[str, Any]:
  """Counts and times."""
  complete = [e for e in exchanges if e.is_complete]
  first_s = [e.times_s["first"] for e in exchanges if "first" in e.times_s]
  return {
    **_check(exchanges),
    **load,
    **_percentiles("", [e.times_s["all"] for e in complete]),
    **_percentiles("first_token_", first_s),
    "answers": len(complete),
    "abandoned": sum(not e.is_complete and not e.error for e in exchanges),
    "refused": sum(e.status == 429 for e in exchanges),
    "failed": sum(bool(e.error) and e.status != 429 for e in exchanges),
    "eos_frac": sum(e.finish_reason == "stop" for e in complete)
    / max(1, len(complete)),
    "tokens_mean": sum(len(e.tokens) for e in complete) / max(1, len(complete)),
    "clients": _CLIENTS.value,
    "num_slots": _NUM_SLOTS.value,
  }


def main(argv: Sequence[str]) -> None:
  """Loads the server, checks its answers, prints what came out."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  logging.set_verbosity(logging.WARNING)
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  jax.config.update("jax_num_cpu_devices", 2)  # as launch/ has it
  with contextlib.ExitStack() as stack:
    cache = _SERVER.value or stack.enter_context(
      tempfile.TemporaryDirectory(prefix="serve_load_")
    )
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if _SERVER.value:
      _be_the_server()
      return
    exchanges, load = _measure(cache)
    for error in sorted({e.error for e in exchanges if e.error})[:5]:
      print(f"failed or refused: {error}", file=sys.stderr)
    summary = _summary(exchanges, load)
  print("| what | |\n| --- | --- |")
  for name, value in summary.items():
    shown = f"{value:.3f}" if isinstance(value, float) else value
    print(f"| {name} | {shown} |")
  print(json.dumps(summary))
  bad = ("wrong_answers", "wrong_alone", "leaked_slots", "queue_depth_after")
  sys.exit(any(summary[name] for name in (*bad, "failed")))


if __name__ == "__main__":
  app.run(main)
