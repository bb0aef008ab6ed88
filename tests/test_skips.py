"""A skip that nobody expects fails the session; sessions of its own."""

import pathlib
import subprocess
import sys

import pytest

TESTS = """
import pytest

def test_runs():
  pass

@pytest.mark.skip(reason="for want of a file")
def test_skips():
  raise AssertionError

@pytest.mark.parametrize("name", ["a # b"])
def test_skips_inside(name):
  pytest.skip("for want of a device")

@pytest.mark.xfail
def test_fails_as_expected():
  raise AssertionError

@pytest.mark.skip(reason="not selected")
@pytest.mark.slow
def test_is_left_out():
  raise AssertionError
"""
MODULE = """
import pytest

pytest.importorskip("a_library_nobody_has")

def test_nothing():
  pass
"""
EXPECTED = """
# What this machine has not.
test_some.py::test_skips  # a file
test_some.py::test_skips_inside[a # b]  # a device

test_some.py::test_is_left_out  # it is slow
test_module.py  # a library
"""


def session(folder, expected, workers=0):
  """Exit status and output of pytest over the two files."""
  (folder / "test_some.py").write_text(TESTS)
  (folder / "test_module.py").write_text(MODULE)
  (folder / "expected.txt").write_text(expected)
  (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: left out")
  done = subprocess.run(
    [
      *(
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "skips",
        "-p",
        "no:cacheprovider",
      ),
      *("-m", "not slow", "--expected-skips=expected.txt", f"-n{workers}"),
    ],
    cwd=folder,
    env={"PYTHONPATH": str(pathlib.Path(__file__).parent)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
  "workers", [0, pytest.param(2, marks=pytest.mark.slow)]
)
def test_exactly_the_named_tests_may_skip(workers, tmp_path):
  status, output = session(tmp_path, EXPECTED, workers)
  assert status == 0, output
  assert "not expected" not in output


@pytest.mark.parametrize(
  "workers", [0, pytest.param(2, marks=pytest.mark.slow)]
)
def test_every_difference_is_listed_and_fails_the_session(workers, tmp_path):
  expected = """
test_some.py::test_skips_inside[a # b]  # a device
test_some.py::test_runs  # a device
test_some.py::test_gone  # a device
"""
  status, output = session(tmp_path, expected, workers)
  assert status == pytest.ExitCode.TESTS_FAILED
  _, _, listed = output.partition("skips that were not expected")
  for line in (
    "test_some.py::test_skips: Skipped: for want of a file",
    "test_module.py: Skipped: could not import 'a_library_nobody_has'",
    "test_some.py::test_runs: expected to skip, but ran",
    "test_some.py::test_gone: there is no such test",
  ):
    assert line in listed
  assert "test_skips_inside" not in listed
  assert "test_is_left_out" not in listed


def test_a_worker_that_crashes_fails_the_session_and_is_named(tmp_path):
  (tmp_path / "test_crash.py").write_text(
    "import os\n\ndef test_crashes():\n  os._exit(3)\n"
  )
  status, output = session(tmp_path, EXPECTED, workers=2)
  assert status == pytest.ExitCode.TESTS_FAILED, output
  assert "test_crash.py::test_crashes" in output
  assert "INTERNALERROR" not in output and "no such test" not in output


def test_a_skip_is_expected_for_a_reason(tmp_path):
  status, output = session(tmp_path, "test_some.py::test_skips\n")
  assert status == pytest.ExitCode.USAGE_ERROR
  assert "line 1: test_some.py::test_skips has no reason" in output
