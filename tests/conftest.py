"""Session settings: CPU, 8 virtual devices, strict types, shapes checked."""

import collections
import os
import pathlib
import tempfile

from jaxrl_async.devices import xla_flags  # imports no JAX

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    xla_flags.of_same_bits(),
  ]
)
# Programs that tests start keep what they compile in the same place.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
  pathlib.Path(tempfile.gettempdir()) / "jaxrl_async_test_cache"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jaxtyping
import other_user
import pytest
import three_hosts

pytest_plugins = ["skips"]
_SLOWEST = 20

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_cpu_enable_async_dispatch", False)

jaxtyping.install_import_hook("jaxrl_async", "beartype.beartype")


@pytest.fixture
def unchecked():
  """Switch off shape checks, where most of the time would be theirs."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


@pytest.hookimpl(trylast=True)  # after markers have left tests out
def pytest_collection_modifyitems(config, items):
  """Leave tests out for which something cannot be made here, and say so."""
  _leave_out(config, items, "sandbox", _no_sandbox)
  _leave_out(config, items, "namespaces", three_hosts.why_not)
  _leave_out(config, items, "other_user", other_user.why_not)


def pytest_terminal_summary(terminalreporter):
  """Print which files took the longest, so that a change sees what it costs."""
  seconds = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if isinstance(report, pytest.TestReport):
        seconds[report.nodeid.partition("::")[0]] += report.duration
  if len(seconds) > 1:
    terminalreporter.section("slowest files")
  for path, taken_s in (
    seconds.most_common(_SLOWEST) if len(seconds) > 1 else ()
  ):
    terminalreporter.write_line(f"{taken_s:7.1f} s  {path}")


def _leave_out(config, items, marker, why_not):
  tests = [item for item in items if item.get_closest_marker(marker)]
  if not tests or not (reason := why_not()):
    return
  print(f"{len(tests)} tests of the {marker} are left out: {reason}")
  items[:] = [item for item in items if item not in tests]
  config.hook.pytest_deselected(items=tests)


def _no_sandbox():
  from jaxrl_async.rewards import (
    sandbox as sandbox_lib,
  )  # after the import hook above

  try:
    sandbox_lib.find()
  except sandbox_lib.SandboxError as error:
    return str(error)
  return ""
