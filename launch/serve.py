"""Serves a policy over HTTP, as OpenAI's interface does, and over gRPC.

python launch/serve.py --workdir=/tmp/quickstart

serves the newest checkpoint of a run; --checkpoint=DIRECTORY serves parameters
alone. With --grpc_port=PORT JetStream's clients are served too, by the same
engine and with the same key. The first line on stdout says where. SIGTERM or
Ctrl-C finishes what was begun; a second one ends it at once.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import os
import pathlib
import sys

from absl import flags

from jaxrl_async import config as config_lib
from jaxrl_async import serve
from jaxrl_async import supervisor
from jaxrl_async.serving import bodies
from jaxrl_async.serving import front

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "", "Directory of parameters, instead of --workdir."
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
_PORT = flags.DEFINE_integer("port", 8000, "0 takes a free one.", 0, 65535)
_GRPC_PORT = flags.DEFINE_integer(
  "grpc_port", 0, "Of JetStream's gRPC interface; 0 is off.", 0, 65535
)
_API_KEY_FILE = flags.DEFINE_string(
  "api_key_file", "", "Its content is the key; or set JAXRL_API_KEY."
)
_MODEL_NAME = flags.DEFINE_string("model_name", "policy", "What clients say.")
_NUM_SLOTS = flags.DEFINE_integer("num_slots", 0, "0 is the run's.", 0)
_CACHE_TOKENS = flags.DEFINE_integer(
  "cache_tokens", 0, "Prompt and completion together; 0 is the run's.", 0
)
_MAX_WAITING = flags.DEFINE_integer(
  "max_waiting", 256, "Requests at a time; more get a 429.", 1
)
_DEADLINE_S = flags.DEFINE_float(
  "deadline_s", 120.0, "Of a request that names none.", 0.0
)
_MAX_DEADLINE_S = flags.DEFINE_float(
  "max_deadline_s", 600.0, "The latest a request may name.", 0.0
)
_DRAIN_S = flags.DEFINE_float(
  "drain_s", 30.0, "What was begun has so long after a signal.", 0.0
)


def _api_key() -> str | None:
  """The key, from the file or the environment."""
  if _API_KEY_FILE.value:
    try:
      key = pathlib.Path(_API_KEY_FILE.value).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
      raise config_lib.ConfigError(f"api_key_file: {error}") from error
    if not key:
      raise config_lib.ConfigError("api_key_file: the file is empty")
    return key
  return os.environ.get("JAXRL_API_KEY", "").strip() or None


def _policy() -> serve.Policy:
  sizes = {"num_slots": _NUM_SLOTS.value, "cache_tokens": _CACHE_TOKENS.value}
  if _CHECKPOINT.value:
    if command_line.WORKDIR.value:
      raise config_lib.ConfigError("checkpoint: not together with workdir")
    path = pathlib.Path(_CHECKPOINT.value).absolute()
    return serve.load_checkpoint(path, **sizes)
  if not command_line.WORKDIR.value:
    raise config_lib.ConfigError(
      "workdir: missing; use --workdir=DIRECTORY or --checkpoint=DIRECTORY"
    )
  path = pathlib.Path(command_line.WORKDIR.value).absolute()
  command_line.use_compile_cache(path)
  return serve.load_run(path, **sizes)


def main():
  settings = front.ServeSettings(
    host=_HOST.value,
    port=_PORT.value,
    grpc_port=_GRPC_PORT.value,
    api_key=_api_key(),
    model_name=_MODEL_NAME.value,
    max_waiting=_MAX_WAITING.value,
    drain_s=_DRAIN_S.value,
    limits=bodies.Limits(
      deadline_s=min(_DEADLINE_S.value, _MAX_DEADLINE_S.value),
      max_deadline_s=_MAX_DEADLINE_S.value,
    ),
  )
  # Before anything is read.
  front.check_key(settings.host, settings.api_key)
  front.check_ports(settings.port, settings.grpc_port)
  stop = supervisor.StopRequest()
  try:
    policy = _policy()
    with stop.on_signals(
      lambda text: print(text, file=sys.stderr),
      "finishing what was begun; once more ends it now",
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
  # Threads are still at work, and nothing they do is worth waiting for: not
  # even the interpreter's own end, which some of them would not survive.
  except KeyboardInterrupt:
    print("ended at once", file=sys.stderr, flush=True)
    os._exit(130)
  except TimeoutError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
  command_line.start_without_config(main)
