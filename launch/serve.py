"""Serve a policy over HTTP with OpenAI's interface, and over gRPC.

uv run launch/serve.py --workdir=/tmp/quickstart

This serves the newest checkpoint of a run. --checkpoint=DIRECTORY serves
parameters alone. Weights are quantised as the run's config says
(`rollout.weights`); a pretrained model is not quantised. With --grpc_port=PORT,
the same engine also serves JetStream's clients, with the same key. The first
line on stdout gives the address. --adapter=NAME=DIRECTORY, which may be given
several times, also serves adapters in PEFT's format, each by its name. After
SIGTERM or Ctrl-C, the server finishes the accepted requests within --drain_s
and ends. A second signal ends it at once.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import math
import os
import pathlib
import sys
from typing import Any

from absl import flags

from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.models import hub
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import addresses
from jaxrl_async.storage import directories
from jaxrl_async.tools import formats

# Slow imports are made where they are used, after all checks.

_MAX_S = 1e9  # seconds; longer waits overflow
_MAX_NAME = 256

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  "",
  "Directory of parameters to serve, or hf:ORG/NAME of the hub, instead of"
  " --workdir.",
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = flags.DEFINE_integer(
  "port", 8000, "Port of the HTTP server; 0 takes a free one.", 0, 65535
)
_GRPC_PORT = flags.DEFINE_integer(
  "grpc_port", 0, "Port of JetStream's gRPC service; 0 is off.", 0, 65535
)
_API_KEY_FILE = flags.DEFINE_string(
  "api_key_file", "", "File that holds the key; or set JAXRL_API_KEY."
)
_MODEL_NAME = flags.DEFINE_string(
  "model_name", "policy", "Name of the model in requests."
)
_ADAPTERS = flags.DEFINE_multi_string(
  "adapter", [], "NAME=DIRECTORY of an adapter to serve beside the policy."
)
_TOOL_FORMAT = flags.DEFINE_enum(
  "tool_format",
  "",
  ["", *formats.FORMATS],
  "How the policy writes calls of tools; empty finds it in the chat template.",
)
_NUM_SLOTS = flags.DEFINE_integer(
  "num_slots",
  0,
  "Sequences decoded side by side; 0 takes the run's number.",
  0,
  setting_lib.MAX_INT,
)
_CACHE_TOKENS = flags.DEFINE_integer(
  "cache_tokens",
  0,
  "Longest prompt and completion together, 2 or more; 0 takes the run's.",
  0,
  setting_lib.MAX_INT,
)
_KEPT_TOKENS = flags.DEFINE_integer(
  "kept_tokens",
  0,
  "Tokens of caches that are kept after requests; 0 takes the run's.",
  0,
  setting_lib.MAX_INT,
)
_MAX_POSITIONS = flags.DEFINE_integer(
  "max_positions",
  0,
  "Largest --cache_tokens that the model may get; 0 takes the"
  " max_position_embeddings of its config.json.",
  0,
  setting_lib.MAX_INT,
)
_MAX_WAITING = flags.DEFINE_integer(
  "max_waiting",
  256,
  "Requests that may wait or run at a time; others get status 429.",
  1,
  100_000,
)
_DEADLINE_S = flags.DEFINE_float(
  "deadline_s", 120.0, "Deadline of a request without one.", 0.1, _MAX_S
)
_MAX_DEADLINE_S = flags.DEFINE_float(
  "max_deadline_s", 600.0, "Latest deadline of a request.", 0.1, _MAX_S
)
_DRAIN_S = flags.DEFINE_float(
  "drain_s",
  30.0,
  "Seconds that requests which have begun get to finish after a signal.",
  0.0,
  _MAX_S,
)


def _api_key() -> str | None:
  """Return the key, from the file or the environment."""
  if _API_KEY_FILE.value:
    path = sections.shown(_API_KEY_FILE.value)
    try:
      key = pathlib.Path(_API_KEY_FILE.value).read_text().strip()
    except OSError as error:
      reason = error.strerror
      raise sections.ConfigError(
        f"api_key_file: {path} cannot be read ({reason})"
      ) from error
    except ValueError as error:  # a NUL in the name, or no text in the file
      raise sections.ConfigError(
        f"api_key_file: {path} is not a file of text"
      ) from error
    sections.require(bool(key), "api_key_file", f"{path} is empty")
    return key
  return os.environ.get("JAXRL_API_KEY", "").strip() or None


def _check_policy() -> None:
  """Check that the policy to serve exists where the flags say."""
  checkpoint, workdir = _CHECKPOINT.value, command_line.WORKDIR.value
  if checkpoint and workdir:
    raise sections.ConfigError("checkpoint: not together with workdir")
  if not (checkpoint or workdir):
    raise sections.ConfigError(
      "workdir: missing; use --workdir=DIRECTORY or --checkpoint=DIRECTORY"
    )
  if checkpoint.startswith(hub.PREFIX):
    return
  if checkpoint:
    directories.check_can_read(
      "checkpoint",
      checkpoint,
      "use WORKDIR/params of launch/sft.py, or a pretrained model's",
    )
  else:
    directories.check_can_read(
      "workdir", workdir, "use that of launch/train.py"
    )


def _adapters() -> dict[str, pathlib.Path]:
  """Return the directory of each adapter by its name, after checking both."""
  found: dict[str, pathlib.Path] = {}
  for given in _ADAPTERS.value:
    name, _, directory = given.partition("=")
    sections.require(
      0 < len(name) <= _MAX_NAME and name.isprintable() and bool(directory),
      "adapter",
      f"{sections.shown(given)} is not NAME=DIRECTORY",
    )
    sections.require(
      name not in found and name != _MODEL_NAME.value,
      "adapter",
      f"{sections.shown(name)} is the name of another model; use a new one",
    )
    directories.check_can_read(
      "adapter", directory, "use an adapter in PEFT's format"
    )
    found[name] = pathlib.Path(directory)
  return found


def _check() -> None:
  for flag in (_DEADLINE_S, _MAX_DEADLINE_S, _DRAIN_S):
    # absl's bounds let nan pass.
    sections.require(not math.isnan(flag.value), flag.name, "nan is not a time")
  sections.require(
    _CACHE_TOKENS.value != 1,
    "cache_tokens",
    "1 holds a prompt and nothing after it; use 2 or more",
  )
  name = _MODEL_NAME.value
  sections.require(
    0 < len(name) <= _MAX_NAME and name.isprintable(),
    "model_name",
    f"{sections.shown(name)} is not 1 to {_MAX_NAME} printable characters",
  )
  host, port, grpc_port = _HOST.value, _PORT.value, _GRPC_PORT.value
  addresses.check_ports(port, grpc_port)
  addresses.check_host(host)
  addresses.check_key(host, _api_key())
  addresses.check_can_bind("port", host, port)
  if grpc_port:
    addresses.check_can_bind("grpc_port", host, grpc_port)
  command_line.check_compile_cache()
  _adapters()
  _check_policy()


def _policy() -> Any:
  from jaxrl_async.policies import serve
  from jaxrl_async.policies import stored_policy

  command_line.use_own_compile_cache()
  if _CHECKPOINT.value:
    stored = stored_policy.find(_CHECKPOINT.value)
  else:
    workdir = pathlib.Path(command_line.WORKDIR.value)
    stored = stored_policy.of_run(workdir.absolute())
  return serve.load(
    stored,
    num_slots=_NUM_SLOTS.value,
    cache_tokens=_CACHE_TOKENS.value,
    kept_tokens=_KEPT_TOKENS.value,
    max_positions=_MAX_POSITIONS.value,
  )


def main() -> None:
  """Serve the policy until a signal arrives."""
  from jaxrl_async.policies import serve
  from jaxrl_async.serving import bodies
  from jaxrl_async.serving import front as front_lib

  settings = front_lib.ServeSettings(
    host=_HOST.value,
    port=_PORT.value,
    grpc_port=_GRPC_PORT.value,
    api_key=_api_key(),
    model_name=_MODEL_NAME.value,
    max_waiting=_MAX_WAITING.value,
    drain_s=_DRAIN_S.value,
    adapters=tuple(_adapters()),
    tool_format=_TOOL_FORMAT.value,
    limits=bodies.Limits(
      deadline_s=min(_DEADLINE_S.value, _MAX_DEADLINE_S.value),
      max_deadline_s=_MAX_DEADLINE_S.value,
    ),
  )
  stop = supervisor_lib.StopRequest()
  try:
    policy = _policy()
    serve.add_adapters(policy, _adapters())
    with stop.on_signals(
      lambda text: print(text, file=sys.stderr),
      "finishing what was begun; once more ends it now",
      "ended at once",
    ):
      serve.serve(
        policy,
        settings,
        stop=stop,
        on_ready=lambda address: print(
          f"serving {settings.model_name}, policy version {policy.version}, at"
          f" {address}",
          flush=True,
        ),
      )
  # Threads are still running, and there is no reason to wait for their work.
  # The interpreter's own shutdown is skipped, because some threads would crash
  # during it.
  except TimeoutError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
  command_line.start_without_config(main, _check)
