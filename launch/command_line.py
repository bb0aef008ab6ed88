"""Flags, checks and error messages that the launch scripts share.

A script imports this module first, because it sets XLA's environment variables,
which JAX reads only once. The module imports neither JAX nor anything else that
is slow, so that a wrong flag or field is reported at once.
"""

from collections.abc import Callable
import functools
import os
import pathlib
import re
import shutil
import sys
import textwrap
from typing import Any, NoReturn

_HOST_DEVICES = "--xla_force_host_platform_device_count"
if _HOST_DEVICES not in os.environ.get("XLA_FLAGS", ""):
  # On a CPU the two slices are two virtual devices. Other platforms ignore
  # this setting.
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" {_HOST_DEVICES}=2"
  ).strip()

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.data import task_sources
from jaxrl_async.devices import memory_error
from jaxrl_async.devices import xla_flags
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.storage import directories
from jaxrl_async.storage import disk

xla_flags.use(xla_flags.of_gpus())

CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Python file with get_config(), such as configs/quickstart.py. A variant may"
  " follow after a colon. --config.SECTION.FIELD=VALUE, placed after it, sets"
  " one field. docs/reference/settings.md has all fields.",
)
WORKDIR = flags.DEFINE_string(
  "workdir", "", "Directory that holds everything the run writes."
)
_COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache",
  "",
  "Directory for XLA's compiled programs. By default"
  " JAX_COMPILATION_CACHE_DIR, else a folder of the workdir, and for a server a"
  " folder of the user's cache.",
)

_LONGEST_LINE = 600  # characters of an error; long values are cut
_CONFIG_MODULE = "config_config"  # ml_collections' name for a config file


def check_workdir() -> None:
  """Check that the directories named by the flags can be written to.

  Raises:
    ConfigError: the workdir was not given, or a directory cannot be written to.
  """
  if not WORKDIR.value:
    raise sections.ConfigError("workdir: missing; use --workdir=DIRECTORY")
  directories.check_can_write("workdir", WORKDIR.value)
  check_compile_cache()


def check_compile_cache() -> None:
  """Check that the directory of --compile_cache can be written to.

  Raises:
    ConfigError: it cannot be written to.
  """
  # JAX itself handles other places, such as gs://.
  if _COMPILE_CACHE.value and "://" not in _COMPILE_CACHE.value:
    directories.check_can_write("compile_cache", _COMPILE_CACHE.value)


def workdir() -> pathlib.Path:
  """Return the absolute workdir, and keep XLA's compiled programs in it."""
  path = pathlib.Path(WORKDIR.value).absolute()
  use_compile_cache(path)
  return path


def use_own_compile_cache() -> None:
  """Keep XLA's compiled programs in the user's cache directory.

  This is for scripts that only read a workdir. --compile_cache names another
  directory. If there is neither, no programs are kept.
  """
  caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  if _named_cache() or os.path.isabs(caches):
    use_compile_cache(pathlib.Path(caches) / "jaxrl_async")


def use_compile_cache(path: pathlib.Path) -> None:
  """Keep XLA's compiled programs below a directory.

  The flag --compile_cache and JAX's variable take precedence over `path`.
  """
  import jax

  jax.config.update("jax_compilation_cache_dir", compile_cache(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _prepare_jax() -> None:
  """Import JAX and make the settings that all scripts share."""
  import jax

  # JAX sets this variable where there is no TPU. If libtpu is installed for
  # compiling, it would then print errors about the missing TPU, and it would
  # keep other processes from compiling.
  if os.environ.get("TPU_SKIP_MDS_QUERY"):
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  logging.set_verbosity(logging.WARNING)
  # A failure in a thread of Orbax is raised where its result is awaited. The
  # pages that Orbax also logs would hide the one line that says what to do.
  logging.get_absl_logger().addFilter(
    lambda record: "_SignalingThread" not in record.getMessage()
  )
  # With asynchronous dispatch the two slices of a CPU wait for each other.
  jax.config.update("jax_cpu_enable_async_dispatch", False)


def compile_cache(path: pathlib.Path) -> str:
  """Return where XLA's compiled programs are kept, by default below a path.

  It may be a place that JAX handles, such as gs://.
  """
  return _named_cache() or str(path / "compile_cache")


def _named_cache() -> str:
  return _COMPILE_CACHE.value or os.environ.get("JAX_COMPILATION_CACHE_DIR", "")


# -- errors -----------------------------------------------------------------


def _fail(text: str) -> NoReturn:
  """End the process with an error of one line."""
  line = " ".join(text.split())
  if len(line) > _LONGEST_LINE:
    half = _LONGEST_LINE // 2
    line = f"{line[:half]} ... {line[-half:]}"
  sys.exit(f"error: {line}")


def _causes(error: BaseException | None) -> list[BaseException]:
  """Return the error and its chain of causes, the first cause last."""
  causes = []
  while error is not None and error not in causes:
    causes.append(error)
    error = error.__cause__ or error.__context__
  return causes


def _of_config_file(error: BaseException) -> str:
  """Describe an error that a config file raised; "" for any other error."""
  for cause in reversed(_causes(error)):
    if isinstance(cause, sections.ConfigError):
      return str(cause)
    # A config file may have run another one with runpy.
    if place := user_code.place(cause, _CONFIG_MODULE, "<run_path>"):
      return f"config: {place}{user_code.reason(cause)}"
  return ""


def _of_platform(error: BaseException) -> str:
  """Describe an error of JAX's search for devices; "" for any other error."""
  where = error.__traceback__
  while where is not None:
    code = where.tb_frame.f_code
    if code.co_name == "backends" and "xla_bridge" in code.co_filename:
      name = os.environ.get("JAX_PLATFORMS", "")
      reason = str(error) or "there is none, or its plugin is not installed"
      return f"JAX_PLATFORMS: {sections.shown(name)} gives no devices: {reason}"
    where = where.tb_next
  return ""


def _one_line(error: BaseException) -> str:
  """Describe in one line what was wrong with the flags."""
  text = str(error.args[0]) if error.args else str(error)
  missing = re.fullmatch(r"[\"']*(\w+)[\"']*", text)
  if alike := re.search(r"Did you mean \W+(\w+)\W+ instead of \W+(\w+)", text):
    return f"{alike[2]}: there is no such field; did you mean {alike[1]}?"
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


def _unknown_field(argv: list[str], kind: type) -> str:
  """Describe the first --config.FIELD that no config has; "" without one."""
  config = kind()
  for argument in argv[1:]:
    flag, path = argument.partition("=")[0].partition("config.")[::2]
    if flag in ("-", "--", "-no", "--no") and not fields_lib.has_field(
      config, path
    ):
      return fields_lib.no_field(config, path, prefix="--config.")
  return ""


def use_config_of(flag: str, file: str) -> None:
  """Add --config to the arguments, unless there is one.

  Args:
    flag: names the directory whose config it is.
    file: in launch/, returns that config.
  """
  directory = ""
  for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
    name, has_value, value = argument.lstrip("-").partition("=")
    if name == "config":
      return
    if name == flag:
      directory = value if has_value else following
  path = pathlib.Path(__file__).parent / file
  sys.argv.insert(1, f"--config={path}:{directory}")


# -- starting ---------------------------------------------------------------


def _help(has_config: bool) -> str:
  """Return the script's docstring and a list of its flags."""
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


def _check_is_config(value: Any, kind: type) -> None:
  if not isinstance(value, kind):
    # The placeholder of a file that could not be read raises its error when
    # an attribute is read.
    getattr(value, "seed", None)
    raise sections.ConfigError(
      f"config: get_config() of the file gives {sections.shown(value)}, not a"
      f" config.{kind.__name__}"
    )


def _parse(
  argv: list[str], kind: type = sections.Config, has_config: bool = True
) -> list[str]:
  if {"--help", "-help", "-h", "-?", "--helpshort"} & set(argv[1:]):
    print(_help(has_config))
    sys.exit(0)
  # Leave out what the library logs about a config besides the error.
  logging.set_verbosity(logging.ERROR)
  try:
    with user_code.announced("the config file"):
      rest = flags.FLAGS(argv)
    if has_config and not CONFIG.present:
      raise sections.ConfigError("config: missing; use --config=FILE")
    if has_config:
      _check_is_config(CONFIG.value, kind)
    elif CONFIG.value is not None:
      raise sections.ConfigError("config: not used here; leave it out")
  # A config file is code of the user, which may raise anything, and exit.
  except (Exception, SystemExit) as error:
    if text := _of_config_file(error):
      _fail(text)
    known = (flags.Error, KeyError, AttributeError, TypeError, OSError)
    if not isinstance(error, known):
      raise
    _fail(_unknown_field(argv, kind) or _one_line(error))
  if rest[1:]:
    _fail(f"unexpected arguments {' '.join(rest[1:])}")
  return rest


def _run(
  check: Callable[[], None], main: Callable[[], None], needs_jax: bool = True
) -> None:
  """Call `check` and `main`, and report expected errors without a traceback."""
  try:
    check()
    if needs_jax:
      _prepare_jax()
    main()
  except sections.ConfigError as error:
    _fail(str(error))
  except supervisor_lib.RunError as error:
    if error.status == supervisor_lib.START_AGAIN:
      # What hangs would keep the interpreter from shutting down.
      print(f"error: {error}", file=sys.stderr, flush=True)
      sys.stdout.flush()
      supervisor_lib.end_now(error.status)
    sys.exit(f"error: {error}")
  except disk.StorageError as error:
    sys.exit(f"error: {error}")
  except supervisor_lib.Interrupted as error:
    print(error, file=sys.stderr)
    sys.exit(130)
  # JAX asserts that there is a device.
  except (RuntimeError, AssertionError) as error:
    if text := memory_error.explained(error) or _of_platform(error):
      _fail(text)
    raise


def _run_app(
  checked: Callable[[list[str]], None],
  parse: Callable[[list[str]], list[str]],
) -> None:
  try:
    app.run(checked, flags_parser=parse)
  except KeyboardInterrupt:  # before the run handles signals itself
    print("interrupted", file=sys.stderr)
    sys.exit(130)


def start(
  main: Callable[[Any], None],
  check: Callable[[], None],
  *,
  check_config: Callable[[Any], None] = config_checks.check,
  kind: type = sections.Config,
) -> None:
  """Parse the flags and call `main` with the config; report errors in one line.

  Args:
    main: the script. It makes slow imports in its body, so that the checks come
      before them.
    check: checks the script's own flags.
    check_config: checks the config, before `check`.
    kind: the class of the config.
  """

  def check_all() -> None:
    check_config(CONFIG.value)
    check()
    if kind is sections.Config and task_sources.asks_reasoning_gym(
      CONFIG.value.task
    ):
      from jaxrl_async.data.reasoning_gym import gym

      # It imports a library for seconds, in a process of its own, while JAX is
      # imported here.
      gym.start_server()

  def checked(argv: list[str]) -> None:
    del argv
    # After all others: a config may name a function of a module that lies here.
    sys.path.append(os.getcwd())
    _run(check_all, lambda: main(CONFIG.value))

  _run_app(checked, functools.partial(_parse, kind=kind))


def start_without_config(
  main: Callable[[], None],
  check: Callable[[], None],
  *,
  needs_jax: bool = True,
) -> None:
  """Parse the flags of a script that takes no config, and call `main`.

  Args:
    main: see `start`.
    check: checks the script's flags.
    needs_jax: whether the script uses JAX, whose import takes seconds.
  """

  def checked(argv: list[str]) -> None:
    del argv
    _run(check, main, needs_jax)

  _run_app(checked, functools.partial(_parse, has_config=False))
