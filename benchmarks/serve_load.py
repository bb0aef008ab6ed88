"""Many streaming clients at once: wrong answers, leaked slots, latency.

    python benchmarks/serve_load.py

Starts the server of launch/serve.py in a process of its own, with a policy of
0.9 million random parameters, or with that of --workdir. First a single client
asks for one token at a time on one connection (`single_p50_s`, `single_p99_s`).
Then 200 clients send requests for a minute, each a new one as soon as the last
has been answered. Lengths of prompts and completions are lognormal. One request
in ten is given up, after its first tokens or before. /health is read meanwhile;
`health_max_s` is its slowest answer.

--hostile=4 adds four clients of each kind of hostile_clients.py, in a process
of their own. With --source=127.0.0.2 they come from a different address.

Afterwards every answer is compared, token by token, with what a scheduler
writes that has no other requests. An abandoned answer is compared as far as it
came. Some answers are written once more entirely alone.

On two CPU cores, besides the load itself, about a minute of processor time goes
into starting, compiling and writing everything again. docs/project/results.md
has the result. The clients share the cores with the server: of the `load_s`
seconds on each core, clients used `client_cpu_s` and the server used
`server_cpu_s`.

A request spends most of its time waiting for one of the 32 slots. With 200
clients that always have a request, the latency therefore depends on the number
of clients as much as on the server. The time to the first token includes that
wait and one call of several decode steps.

Prints a table and, as the last line, one JSON object. The exit status is 1 if
there was a wrong answer, a leaked slot or descriptor, an answer with status
500, or a failed request.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any
import urllib.request

from absl import app
from absl import flags
from absl import logging
import exchanges as exchange_lib
import http_exchange
import jax
import numpy as np

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.policies import serve
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

_SECONDS = flags.DEFINE_float(
  "seconds", 60.0, "Length of the load.", lower_bound=0.0
)
_CLIENTS = flags.DEFINE_integer(
  "clients", 200, "Clients at the same time.", lower_bound=1
)
_WORKDIR = flags.DEFINE_string(
  "workdir", "", "Serve the policy of this run instead."
)
_NUM_SLOTS = flags.DEFINE_integer("num_slots", 32, "Slots of the engine.", 1)
_CACHE_TOKENS = flags.DEFINE_integer(
  "cache_tokens", 256, "Prompt and completion together.", 64
)
_HOSTILE = flags.DEFINE_integer(
  "hostile", 0, "Hostile clients of each kind.", 0
)
_SOURCE = flags.DEFINE_string(
  "source", "127.0.0.1", "Address of the hostile clients."
)
_SINGLE = flags.DEFINE_integer(
  "single", 200, "Requests of the single client.", 1
)
_GRPC_PORT = flags.DEFINE_integer(
  "grpc_port", 0, "Internal: gRPC port of the server."
)
_ALONE = flags.DEFINE_integer(
  "alone", 16, "Answers that are written again one by one.", 0
)
_SERVER = flags.DEFINE_string(
  "server", "", "Internal: be the server, with XLA's cache in this directory."
)

_ABANDONED_FRAC = 0.1
_DEADLINE_S = 300.0
_SETTLE_S = 10.0  # for the server to notice that the last client left
_COUNT_S = 1.0
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


# -- the policy ---------------------------------------------------------------


def _policy() -> serve.Policy:
  """Return random parameters, equal in every process, or those of the run."""
  if _WORKDIR.value:
    return serve.load(
      stored_policy.of_run(pathlib.Path(_WORKDIR.value).absolute()),
      num_slots=_NUM_SLOTS.value,
      cache_tokens=_CACHE_TOKENS.value,
    )
  config = sections.Config()
  half = _CACHE_TOKENS.value // 2
  buckets = (half // 2, half, _CACHE_TOKENS.value)
  config.rollout = sections.RolloutSection(
    num_slots=_NUM_SLOTS.value,
    cache_tokens=_CACHE_TOKENS.value,
    prefill_buckets=buckets,
    window_buckets=buckets,
  )

  @jax.jit
  def init(key):
    # Noise makes probabilities depend on earlier tokens, as training does.
    leaves, tree = jax.tree.flatten(transformer.init_params(_MODEL, key))
    keys = jax.random.split(key, len(leaves))
    noisy = [
      x + 0.1 * jax.random.normal(k, x.shape)
      for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)

  setup = setup_lib.resolve(config, jax.devices())
  return serve.Policy(
    setup=dataclasses.replace(setup, model=_MODEL),
    params=init(jax.random.key(0)),
    version=0,
    chat_template=chat_template_lib.ChatTemplate(None),
  )


def _be_the_server() -> None:
  """Serve until SIGTERM; print the address on stdout."""
  stop = supervisor_lib.StopRequest()
  with stop.on_signals(lambda text: None):
    serve.serve(
      _policy(),
      front_lib.ServeSettings(
        port=0,
        grpc_port=_GRPC_PORT.value,
        max_waiting=2 * _CLIENTS.value + 56,
      ),
      stop=stop,
      on_ready=lambda address: print(address, flush=True),
    )


# -- the load -----------------------------------------------------------------


def _exchange(seed: int, vocab_size: int) -> exchange_lib.Exchange:
  """Return the request with that number."""
  rng = np.random.default_rng(seed)

  def length(median, most):
    return int(np.clip(rng.lognormal(np.log(median), 0.8), 1, most))

  room = _CACHE_TOKENS.value
  prompt_length = length(room / 10, room // 2)
  max_tokens = length(room / 5, room - prompt_length)
  exchange = exchange_lib.Exchange(
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


async def _load(
  address: str, vocab_size: int
) -> tuple[list[exchange_lib.Exchange], list[float]]:
  """Run all clients until the time is up and the last one has been answered.

  Returns: the exchanges, and the time of each answer of /health.
  """
  exchanges: list[exchange_lib.Exchange] = []
  health_s: list[float] = []
  watching = asyncio.ensure_future(
    http_exchange.watch_health(address, health_s)
  )
  end_s = time.perf_counter() + _SECONDS.value

  async def be_a_client():
    while time.perf_counter() < end_s:
      exchange = _exchange(len(exchanges), vocab_size)
      exchanges.append(exchange)
      try:
        async with asyncio.timeout(exchange.patience_s) as patience:
          await exchange_lib.ask(address, exchange, _DEADLINE_S)
      except (OSError, EOFError) as error:
        if not patience.expired():
          exchange.error = f"{type(error).__name__}: {error}"
      if exchange.error:
        await asyncio.sleep(1.0)  # as every refusal asks

  await asyncio.gather(*(be_a_client() for _ in range(_CLIENTS.value)))
  watching.cancel()
  return exchanges, health_s


async def _ask_alone(address: str) -> list[float]:
  """Time the requests of a single client."""
  body = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 1, "seed": 1}
  return await http_exchange.ask_repeatedly(
    address, "/v1/completions", body, _SINGLE.value
  )


@contextlib.contextmanager
def _hostile_clients(address: str, grpc_port: int, statuses: dict[str, int]):
  """Run hostile_clients.py, and add up the statuses of its answers."""
  if not _HOSTILE.value:
    yield
    return
  command = [
    sys.executable,
    str(pathlib.Path(__file__).with_name("hostile_clients.py")),
    f"--address={address}",
    f"--seconds={_SECONDS.value}",
    f"--each={_HOSTILE.value}",
    f"--source={_SOURCE.value}",
    f"--grpc=127.0.0.1:{grpc_port}",
  ]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    yield
    output, _ = process.communicate(timeout=_DEADLINE_S)
  finally:
    process.kill()
    process.wait()
  if process.returncode:
    sys.exit(f"error: hostile_clients.py exited with {process.returncode}")
  for counts in json.loads(output.splitlines()[-1]).values():
    for status, count in counts.items():
      statuses[status] = statuses.get(status, 0) + count


def _gauges(address: str) -> dict[str, float]:
  """Read the values of /metrics."""
  with urllib.request.urlopen(f"http://{address}/metrics") as page:
    lines = page.read().decode().splitlines()
  pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
  return {name: float(value) for name, value in pairs}


def _settled(address: str) -> dict[str, float]:
  """Read the metrics once nothing is in use, or when time is up."""
  end_s = time.perf_counter() + _SETTLE_S
  while True:
    gauges = _gauges(address)
    in_use = gauges["jaxrl_slots_in_use"] + gauges["jaxrl_queue_depth"]
    if not in_use or time.perf_counter() > end_s:
      return gauges
    time.sleep(0.1)


def _cpu_s(pid: int) -> float:
  """Return the processor time of a process; nan where /proc lacks it."""
  path = pathlib.Path(f"/proc/{pid}/stat")
  if not path.exists():
    return float("nan")
  ticks = path.read_text().rpartition(")")[2].split()[11:13]
  return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _held(pid: int) -> dict[str, int]:
  """Count descriptors and resident memory; 0 where there is no /proc.

  Descriptors are counted for a second, and the fewest are taken. The server
  closes a connection after the client has read the answer, so the one that has
  just asked for /metrics is often still there.
  """
  process = pathlib.Path(f"/proc/{pid}")
  if not process.exists():
    return {"descriptors": 0, "bytes": 0}
  counts = []
  end_s = time.perf_counter() + _COUNT_S
  while time.perf_counter() < end_s:
    counts.append(len(os.listdir(process / "fd")))
    time.sleep(0.02)
  pages = int((process / "statm").read_text().split()[1])
  return {
    "descriptors": min(counts),
    "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
  }


# -- what is right ------------------------------------------------------------


def _check(exchanges: list[exchange_lib.Exchange]) -> dict[str, int]:
  """Write all answers again without a server, and count differences."""
  scheduler = serve.make_scheduler(_policy())
  some = exchanges[:: max(1, len(exchanges) // max(1, _ALONE.value))]
  some = some[: _ALONE.value]
  num_slots = scheduler.engine.sizes.num_slots
  together = exchange_lib.finish(scheduler, exchanges, num_slots)
  return {
    "wrong_answers": exchange_lib.num_wrong(exchanges, together),
    "wrong_alone": exchange_lib.num_wrong(
      some, exchange_lib.finish(scheduler, some, 1)
    ),
    "checked_alone": len(some),
  }


# -- both ---------------------------------------------------------------------


@contextlib.contextmanager
def _server(cache: str, grpc_port: int):
  """Run the server; give its process and address."""
  command = [
    sys.executable,
    __file__,
    f"--server={cache}",
    f"--clients={_CLIENTS.value}",
    f"--workdir={_WORKDIR.value}",
    f"--num_slots={_NUM_SLOTS.value}",
    f"--cache_tokens={_CACHE_TOKENS.value}",
    f"--grpc_port={grpc_port}",
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


def _measure(cache: str) -> tuple[list[exchange_lib.Exchange], dict[str, Any]]:
  """Put load on a server; return the exchanges and the measurements."""
  vocab_size = _MODEL.vocab_size
  if _WORKDIR.value:
    directory = pathlib.Path(_WORKDIR.value) / "tokenizer"
    vocab_size = tokenizer_lib.load(directory).vocab_size
  statuses: dict[str, int] = {}
  with socket.create_server(("127.0.0.1", 0)) as free:
    grpc_port = free.getsockname()[1]
  with _server(cache, grpc_port) as (process, address):
    single_s = asyncio.run(_ask_alone(address))
    before, idle = _settled(address), _held(process.pid)
    print(f"{_CLIENTS.value} clients at {address}", file=sys.stderr)
    start_s = time.perf_counter(), time.process_time(), _cpu_s(process.pid)
    with _hostile_clients(address, grpc_port, statuses):
      exchanges, health_s = asyncio.run(_load(address, vocab_size))
      end_s = time.perf_counter(), time.process_time(), _cpu_s(process.pid)
    gauges, held = _settled(address), _held(process.pid)
  out = 'jaxrl_tokens_total{direction="out"}'
  load_s, client_s, server_s = np.subtract(end_s, start_s).tolist()
  return exchanges, {
    **_percentiles("single_", single_s),
    "health_max_s": max(health_s, default=None),
    "leaked_slots": int(gauges["jaxrl_slots_in_use"]),
    "leaked_descriptors": max(0, held["descriptors"] - idle["descriptors"]),
    "memory_growth_bytes": held["bytes"] - idle["bytes"],
    "queue_depth_after": int(gauges["jaxrl_queue_depth"]),
    "server_cancelled": int(gauges['jaxrl_requests_total{end="cancelled"}']),
    "tokens_per_s": (gauges[out] - before[out]) / load_s,
    "load_s": load_s,
    "client_cpu_s": client_s,
    "server_cpu_s": server_s,
    "hostile_statuses": statuses,
    "hostile_500": statuses.get("500", 0),
  }


def _percentiles(name: str, times_s: list[float]) -> dict[str, float | None]:
  if not times_s:
    return {f"{name}p50_s": None, f"{name}p99_s": None}
  p50, p99 = np.percentile(times_s, (50, 99)).tolist()
  return {f"{name}p50_s": p50, f"{name}p99_s": p99}


def _summary(
  exchanges: list[exchange_lib.Exchange], load: dict[str, Any]
) -> dict[str, Any]:
  """Return counts and times."""
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
  """Put load on the server, check its answers and print the results."""
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
  bad += ("leaked_descriptors", "hostile_500", "failed")
  sys.exit(any(summary[name] for name in bad))


if __name__ == "__main__":
  app.run(main)
