"""What the launch scripts share: devices, flags, one-line errors.

Import it first: it sets XLA's environment, which JAX reads once.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import sys
from typing import Any

_HOST_DEVICES = "--xla_force_host_platform_device_count"
if _HOST_DEVICES not in os.environ.get("XLA_FLAGS", ""):
  # Two slices on a CPU are two virtual devices; other platforms ignore it.
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" {_HOST_DEVICES}=2"
  ).strip()

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from jaxrl_async import config as config_lib
from jaxrl_async import config_checks
from jaxrl_async import evaluate
from jaxrl_async import storage
from jaxrl_async import supervisor

# JAX sets it where there is no TPU. libtpu, if it is installed to compile for
# one, would then complain of that, and keep other processes from compiling.
if os.environ.get("TPU_SKIP_MDS_QUERY"):
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-8")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Python file with get_config(); fields can be overridden."
)
WORKDIR = flags.DEFINE_string("workdir", "", "Where the run writes.")
_COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache", "", "Persistent XLA cache; by default in the workdir."
)


def workdir() -> pathlib.Path:
  """The flag's directory, absolute; XLA's cache goes there too.

  Raises:
    ConfigError: it was not given, or cannot be written to.
  """
  if not WORKDIR.value:
    raise config_lib.ConfigError("workdir: missing; use --workdir=DIRECTORY")
  path = pathlib.Path(WORKDIR.value).absolute()
  there = next(p for p in (path, *path.parents) if p.exists())
  if not (there.is_dir() and os.access(there, os.W_OK)):
    raise config_lib.ConfigError(
      f"workdir: {there} is not a directory that can be written to"
    )
  use_compile_cache(path)
  return path


def use_compile_cache(path: pathlib.Path) -> None:
  """XLA's programs are kept in the workdir, or where the flag says."""
  cache = _COMPILE_CACHE.value or str(path / "compile_cache")
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _one_line(error: BaseException) -> str:
  """The last ConfigError inside a message, or its first line."""
  text = str(error.args[0]) if error.args else str(error)
  inner = re.findall(r"ConfigError: (.*)", text)
  missing = re.fullmatch(r"[\"']*(\w+)[\"']*", text)
  unknown = re.search(r"Field (\w+) not found on dataclass .*\.(\w+)'", text)
  if inner:
    return inner[-1]
  if unknown:
    return f"{unknown[1]}: there is no such field in {unknown[2]}"
  if missing:
    return f"{missing[1]}: there is no such field"
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if "Failed loading config" in text:
    return f"config: {lines[-1]} ({lines[-2]})"
  return lines[0] if lines else type(error).__name__


def _parse(argv: list[str], has_config: bool = True) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
    if has_config and CONFIG.value is None:
      raise config_lib.ConfigError("config: missing; use --config=FILE")
    if has_config:
      # A file that could not be loaded raises at the first look inside.
      dataclasses.fields(CONFIG.value)
    elif CONFIG.value is not None:
      raise config_lib.ConfigError("config: not used here; leave it out")
  except (
    flags.Error,
    config_lib.ConfigError,
    KeyError,
    AttributeError,
    TypeError,
    OSError,
  ) as error:
    sys.exit(f"error: {_one_line(error)}")
  if rest[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(rest[1:])}")
  return rest


@contextlib.contextmanager
def errors_in_one_line():
  """Ends the process without a traceback where the program is not to blame."""
  try:
    yield
  except (
    config_lib.ConfigError,
    evaluate.EvaluationError,
    storage.StorageError,
    supervisor.StallError,
  ) as error:
    sys.exit(f"error: {error}")
  except supervisor.Interrupted as error:
    print(error, file=sys.stderr)
    sys.exit(130)
  except KeyboardInterrupt:  # before the run answers signals itself
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def start(
  main: Callable[[config_lib.Config], None],
  devices: Callable[[], Sequence[Any]] = jax.devices,
) -> None:
  """Parses the flags and calls main(config) with errors in one line.

  Args:
    main: of a script.
    devices: that the config is for, once flags are parsed.
  """

  def checked(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    # With it on, two slices of one CPU wait for each other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with errors_in_one_line():
      config_checks.validate(CONFIG.value, len(devices()))
      main(CONFIG.value)

  app.run(checked, flags_parser=_parse)


def start_without_config(main: Callable[[], None]) -> None:
  """Parses the flags of a script that takes no config, and calls main()."""

  def checked(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with errors_in_one_line():
      main()

  app.run(checked, flags_parser=functools.partial(_parse, has_config=False))
