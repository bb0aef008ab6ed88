"""Which tests may skip: `--expected-skips=FILE`, as `.ci/run` gives it.

A test that skips for want of a library or a file proves nothing, and nobody
reads a summary that is green. With the option a skip that FILE does not name
fails the session, and so does a named test that ran or that there is none of.
Without it skips are only listed.

A line of FILE is the id of a test, or of a module that skips as a whole, then
two spaces, `#` and the reason. Blank lines and lines that begin with `#` are
left out.
"""

import pathlib

import pytest


def read(path: pathlib.Path) -> dict[str, str]:
  """Reasons by id.

  Raises:
    UsageError: a line has no reason, or the file cannot be read.
  """
  try:
    lines = path.read_text().splitlines()
  except OSError as error:
    raise pytest.UsageError(f"--expected-skips: {error}") from error
  reasons = {}
  for number, line in enumerate(lines, 1):
    if not line.strip() or line.startswith("#"):
      continue
    name, _, reason = line.partition("  # ")
    if not reason.strip():
      raise pytest.UsageError(f"{path}, line {number}: {name} has no reason")
    reasons[name.strip()] = reason.strip()
  return reasons


class Skips:
  """What skipped, what ran, and what of it was not expected."""

  def __init__(self, expected: dict[str, str]):
    self._expected = expected
    self._existing: set[str] = set()
    self._skipped: dict[str, str] = {}
    self._ran: set[str] = set()

  @pytest.hookimpl(tryfirst=True)  # before markers leave tests out
  def pytest_collection_modifyitems(self, items):
    """Learns which tests there are."""
    self._existing |= {item.nodeid for item in items}

  def pytest_collectreport(self, report):
    """Notes modules that skip as a whole."""
    if report.skipped:
      self._skipped[report.nodeid] = report.longrepr[2]

  def pytest_runtest_logreport(self, report):
    """Notes what each test did; an expected failure is no skip."""
    if report.skipped and not hasattr(report, "wasxfail"):
      self._skipped[report.nodeid] = report.longrepr[2]
    elif report.when == "call":
      self._ran.add(report.nodeid)

  def wrong(self) -> list[str]:
    """A line for each difference."""
    skipped, expected = self._skipped, self._expected
    there = self._existing | skipped.keys()
    return [
      *(f"{x}: {skipped[x]}" for x in sorted(skipped.keys() - expected)),
      *(
        f"{x}: expected to skip, but ran"
        for x in sorted(expected.keys() & self._ran)
      ),
      *(f"{x}: there is no such test" for x in sorted(expected.keys() - there)),
    ]

  @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
  def pytest_testnodedown(self, node):
    """Learns which tests a worker found: only workers collect them."""
    # One that crashed has none.
    found = getattr(node, "workeroutput", {})
    self._existing |= set(found.get("existing_tests", ()))

  def pytest_sessionfinish(self, session):
    """Fails a session that would have passed; a worker only reports."""
    if hasattr(session.config, "workeroutput"):
      session.config.workeroutput["existing_tests"] = sorted(self._existing)
    elif self.wrong() and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter):
    """Lists the differences."""
    if wrong := self.wrong():
      terminalreporter.section("skips that were not expected")
      for line in wrong:
        terminalreporter.write_line(line)


def pytest_addoption(parser):
  """Adds the option."""
  parser.addoption(
    "--expected-skips",
    metavar="FILE",
    type=pathlib.Path,
    help="fail unless exactly the tests named in FILE skip",
  )


def pytest_configure(config):
  """Watches only where it was asked to."""
  path = config.getoption("--expected-skips")
  if path is not None:
    config.pluginmanager.register(Skips(read(path)))
