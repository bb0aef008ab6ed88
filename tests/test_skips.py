"""A skip fails a session of `--fail-on-skip`; sessions of its own."""

import pathlib
import subprocess
import sys

import pytest

NO_SKIPS = """
import pytest

def test_runs():
  pass

@pytest.mark.xfail
def test_fails_as_expected():
  raise AssertionError

@pytest.mark.skip(reason="not selected")
@pytest.mark.slow
def test_is_left_out():
  raise AssertionError
"""
SKIPS = """
import pytest

@pytest.mark.skip(reason="for want of a file")
def test_skips():
  raise AssertionError

def test_skips_inside():
  pytest.skip("for want of a device")
"""
MODULE = """
import pytest

pytest.importorskip("a_library_nobody_has")

def test_nothing():
  pass
"""


def session(folder, workers, *texts):
  """Return the exit status and the output of pytest over files of tests."""
  for number, text in enumerate(texts):
    (folder / f"test_{number}.py").write_text(text)
  (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: left out")
  plugins = ("-p", "skips", "-p", "no:cacheprovider")
  done = subprocess.run(
    [
      *(sys.executable, "-m", "pytest", *plugins, "-m", "not slow"),
      *("--fail-on-skip", f"-n{workers}"),
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
def test_every_skip_is_listed_and_fails_the_session(workers, tmp_path):
  status, output = session(tmp_path, workers, NO_SKIPS, SKIPS, MODULE)
  assert status == pytest.ExitCode.TESTS_FAILED
  _, _, listed = output.partition("skipped fail this session")
  for line in (
    "test_1.py::test_skips: Skipped: for want of a file",
    "test_1.py::test_skips_inside: Skipped: for want of a device",
    "test_2.py: Skipped: could not import 'a_library_nobody_has'",
  ):
    assert line in listed
  assert "test_0.py" not in listed


def test_a_session_in_which_nothing_skips_passes(tmp_path):
  status, output = session(tmp_path, 0, NO_SKIPS)
  assert status == 0, output
