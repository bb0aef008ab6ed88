"""What the launch scripts share: flags, checks, devices, one-line errors.

Import it first: it sets XLA's environment, which JAX reads once. It imports
nothing that takes long, JAX included: a wrong flag or field is told first.
"""

from collections.abc import Callable
import functools
import os
import pathlib
import re
import shutil
import sys
import textwrap
import types
from typing import Any, NoReturn

_HOST_DEVICES = "--xla_force_host_platform_device_count"
if _HOST_DEVICES not in os.environ.get("XLA_FLAGS", ""):
  # Two slices on a CPU are two virtual devices; other platforms ignore it.
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" {_HOST_DEVICES}=2"
  ).strip()

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from jaxrl_async.config import directories
from jaxrl_async.config import sections
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.run import config_checks
from jaxrl_async.storage import disk

CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Python file with get_config(), as configs/quickstart.py; a variant may"
  " follow after a colon. --config.SECTION.FIELD=VALUE, after it, sets one"
  " field; the fields are listed in jaxrl_async/config/sections.py.",
)
WORKDIR = flags.DEFINE_string(
  "workdir", "", "Directory of the run, where everything is kept."
)
_COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache",
  "",
  'Where XLA\'s programs are kept; "" is in the workdir, for a server in the'
  " user's cache directory.",
)

_LONGEST_LINE = 600  # of an error; what is cut is a value that was given
_CONFIG_MODULE = "config_config"  # what ml_collections calls a config file


def check_workdir() -> None:
  """Checks that the flags' directories can be written to.

  Raises:
    ConfigError: the workdir was not given, or one of them cannot be.
  """
  if not WORKDIR.value:
    raise sections.ConfigError("workdir: missing; use --workdir=DIRECTORY")
  directories.check_can_write("workdir", WORKDIR.value)
  check_compile_cache()


def check_compile_cache() -> None:
  """Checks that the flag's directory can be written to.

  Raises:
    ConfigError: it cannot be.
  """
  # Elsewhere, as gs://, is for JAX to find.
  if _COMPILE_CACHE.value and "://" not in _COMPILE_CACHE.value:
    directories.check_can_write("compile_cache", _COMPILE_CACHE.value)


def workdir() -> pathlib.Path:
  """The flag's directory, absolute; XLA's cache goes there too."""
  path = pathlib.Path(WORKDIR.value).absolute()
  use_compile_cache(path)
  return path


def use_own_compile_cache() -> None:
  """As `use_compile_cache`, for a script that only reads a workdir.

  It uses the user's cache directory; without one nothing is kept.
  """
  caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  if _COMPILE_CACHE.value or os.path.isabs(caches):
    use_compile_cache(pathlib.Path(caches) / "jaxrl_async")


def use_compile_cache(path: pathlib.Path) -> None:
  """XLA's programs are kept in that directory, or where the flag says."""
  import jax

  cache = _COMPILE_CACHE.value or str(path / "compile_cache")
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _prepare_jax() -> None:
  """Settings that hold for every script; from here on JAX is imported."""
  import jax

  # JAX sets it where there is no TPU. libtpu, if it is installed to compile for
  # one, would then complain of that, and keep other processes from compiling.
  if os.environ.get("TPU_SKIP_MDS_QUERY"):
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  logging.set_verbosity(logging.WARNING)
  # What fails in a thread of Orbax is raised where its result is awaited; the
  # pages that it also logs would hide the one line that says what to do.
  logging.get_absl_logger().addFilter(
    lambda record: "_SignalingThread" not in record.getMessage()
  )
  # With it on, two slices of one CPU wait for each other.
  jax.config.update("jax_cpu_enable_async_dispatch", False)


# -- errors -----------------------------------------------------------------


def _fail(text: str) -> NoReturn:
  """Ends the process with an error of one line."""
  line = " ".join(text.split())
  if len(line) > _LONGEST_LINE:
    half = _LONGEST_LINE // 2
    line = f"{line[:half]} ... {line[-half:]}"
  sys.exit(f"error: {line}")


def _causes(error: BaseException | None) -> list[BaseException]:
  """The error and what led to it, the first cause last."""
  causes = []
  while error is not None and error not in causes:
    causes.append(error)
    error = error.__cause__ or error.__context__
  return causes


def _place_in_config(error: BaseException) -> str:
  """File and line of a config file that raised it, "" if none did."""
  if isinstance(error, SyntaxError):
    return f"{error.filename}, line {error.lineno}: "
  place, where = "", error.__traceback__
  while where is not None:
    frame: types.FrameType = where.tb_frame
    # A config file may have run another by runpy.
    if frame.f_globals.get("__name__") in (_CONFIG_MODULE, "<run_path>"):
      place = f"{frame.f_code.co_filename}, line {where.tb_lineno}: "
    where = where.tb_next
  return place


def _of_config_file(error: BaseException) -> str:
  """What went wrong inside of a config file, "" if it was something else."""
  for cause in reversed(_causes(error)):
    if isinstance(cause, sections.ConfigError):
      return str(cause)
    if place := _place_in_config(cause):
      message = cause.msg if isinstance(cause, SyntaxError) else str(cause)
      return f"config: {place}{type(cause).__name__}: {message}"
  return ""


def _one_line(error: BaseException) -> str:
  """What an error of parsing flags says, for who typed them."""
  text = str(error.args[0]) if error.args else str(error)
  missing = re.fullmatch(r"[\"']*(\w+)[\"']*", text)
  unknown = re.search(r"Field (\w+) not found on dataclass .*\.(\w+)'", text)
  if unknown:
    return f"{unknown[1]}: there is no such field in {unknown[2]}"
  if missing:
    return f"{missing[1]}: there is no such field"
  if "has no attribute 'get_config'" in text:
    return "config: the file defines no get_config()"
  if early := re.search(r"Found (--config\.\S+) in argv before", text):
    return f"config: --config=FILE has to come before {early[1]}"
  text = text.removeprefix(
    "Configuration is not available because of an earlier failure to load: "
  )
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  if "Failed loading config" in text:
    return f"config: {lines[-1]} ({lines[-2]})"
  if isinstance(error, OSError):
    return f"config: {lines[0]}"
  return lines[0] if lines else type(error).__name__


# -- starting ---------------------------------------------------------------


def _help(has_config: bool) -> str:
  """The script's docstring, then its flags."""
  main = sys.modules["__main__"]
  script = pathlib.Path(sys.argv[0]).name
  own = flags.FLAGS.get_key_flags_for_module(main)
  shared = flags.FLAGS.get_key_flags_for_module(sys.modules[__name__])
  taken = [flag for flag in shared if has_config or flag.name != "config"]
  width = min(80, shutil.get_terminal_size().columns)
  lines = [(main.__doc__ or script).strip(), "", "Flags:"]
  for flag in (*taken, *own):
    is_switch = isinstance(flag, flags.BooleanFlag)
    kind = flag.parser.flag_type().upper()
    kind = {"STRING": "TEXT", "CONFIG OBJECT": "FILE[:VARIANT]"}.get(kind, kind)
    default = (
      f" [{flag.default}]" if flag.default not in (None, "", False) else ""
    )
    lines.append(f"  --{flag.name}" + ("" if is_switch else f"={kind}"))
    text = " ".join(f"{flag.help}{default}".split())
    indent = " " * 6
    lines += textwrap.wrap(
      text, width, initial_indent=indent, subsequent_indent=indent
    )
  lines += ["", "--helpfull lists the flags of the libraries too."]
  return "\n".join(lines)


def _check_is_config(value: Any) -> None:
  if not isinstance(value, sections.Config):
    # What stands for a file that cannot be read raises at a look inside.
    getattr(value, "seed", None)
    raise sections.ConfigError(
      f"config: get_config() of the file gives {sections.shown(value)}, not a"
      " config.Config"
    )


def _parse(argv: list[str], has_config: bool = True) -> list[str]:
  if {"--help", "-help", "-h", "-?", "--helpshort"} & set(argv[1:]):
    print(_help(has_config))
    sys.exit(0)
  # What a library says of a config beside the error is left out.
  logging.set_verbosity(logging.ERROR)
  try:
    rest = flags.FLAGS(argv)
    if has_config and not CONFIG.present:
      raise sections.ConfigError("config: missing; use --config=FILE")
    if has_config:
      _check_is_config(CONFIG.value)
    elif CONFIG.value is not None:
      raise sections.ConfigError("config: not used here; leave it out")
  # A config file is a user's code, and may raise anything.
  except Exception as error:
    if text := _of_config_file(error):
      _fail(text)
    known = (flags.Error, KeyError, AttributeError, TypeError, OSError)
    if not isinstance(error, known):
      raise
    _fail(_one_line(error))
  if rest[1:]:
    _fail(f"unexpected arguments {' '.join(rest[1:])}")
  return rest


def _run(check: Callable[[], None], main: Callable[[], None]) -> None:
  """Ends without a traceback where the program itself is not to blame."""
  try:
    check()
    _prepare_jax()
    main()
  except sections.ConfigError as error:
    _fail(str(error))
  except (disk.StorageError, supervisor_lib.RunError) as error:
    sys.exit(f"error: {error}")
  except supervisor_lib.Interrupted as error:
    print(error, file=sys.stderr)
    sys.exit(130)
  except KeyboardInterrupt:  # before the run answers signals itself
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def start(
  main: Callable[[sections.Config], None], check: Callable[[], None]
) -> None:
  """Parses the flags and calls main(config) with errors in one line.

  Args:
    main: of a script; what takes long to import it imports itself, because
      `check` comes before.
    check: of the script's own flags.
  """

  def check_all() -> None:
    config_checks.check(CONFIG.value)
    check()

  def checked(argv: list[str]) -> None:
    del argv
    _run(check_all, lambda: main(CONFIG.value))

  app.run(checked, flags_parser=_parse)


def start_without_config(
  main: Callable[[], None], check: Callable[[], None]
) -> None:
  """Parses the flags of a script that takes no config, and calls main().

  Args:
    main: as of `start`.
    check: of the script's flags.
  """

  def checked(argv: list[str]) -> None:
    del argv
    _run(check, main)

  app.run(checked, flags_parser=functools.partial(_parse, has_config=False))
