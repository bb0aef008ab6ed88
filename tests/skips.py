"""`--fail-on-skip`, as `.ci/run` gives it: a session with a skip fails.

A test that skips for want of a library or a file proves nothing, and nobody
reads a summary that is green. Without the option, skips are only listed.
"""

import pytest


class Skips:
  """What skipped: reasons by the id of a test or of a whole module."""

  def __init__(self):
    self._reasons: dict[str, str] = {}

  def pytest_collectreport(self, report):
    """Note modules that skip as a whole."""
    if report.skipped:
      self._reasons[report.nodeid] = report.longrepr[2]

  def pytest_runtest_logreport(self, report):
    """Note tests that skip; an expected failure is no skip."""
    if report.skipped and not hasattr(report, "wasxfail"):
      self._reasons[report.nodeid] = report.longrepr[2]

  def pytest_sessionfinish(self, session):
    """Fail a session that would have passed."""
    if self._reasons and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter):
    """List what skipped."""
    if self._reasons:
      terminalreporter.section("tests that skipped fail this session")
      for name, reason in sorted(self._reasons.items()):
        terminalreporter.write_line(f"{name}: {reason}")


def pytest_addoption(parser):
  """Add the option."""
  parser.addoption(
    "--fail-on-skip", action="store_true", help="fail if any test skips"
  )


def pytest_configure(config):
  """Watch only where it was asked to, and not in the workers of xdist."""
  if config.getoption("--fail-on-skip") and not hasattr(config, "workerinput"):
    config.pluginmanager.register(Skips())
