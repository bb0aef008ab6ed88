"""The launcher of several processes, with small programs as processes."""

import json
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
import waiting

from jaxrl_async.processes import world as world_lib

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.slow
DEADLINE_S = 30.0


# A launcher forks, which a process with JAX's threads must not.
RUN = """
import json, os, pathlib, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/launch"]
import trainer_world

trainer_world._GRACE_S = 1.0
directory, program, logs = sys.argv[2:]
starts, notes = [0, 0], []

def command(rank, address):
  own = {"RANK": str(rank), "START": str(starts[rank]), "ADDRESS": address}
  starts[rank] += 1
  return [sys.executable, "-c", program], os.environ | own

code = trainer_world.run(
  command,
  2,
  max_restarts=2,
  note=notes.append,
  logs=pathlib.Path(logs) if logs else None,
)
print(json.dumps([code, notes, starts]))
"""


@pytest.fixture
def run(tmp_path):
  """Runs a program in two processes; gives exit code, notes and starts.

  It knows its rank, its start (from 0), and a directory.
  """

  def call(program, logs=""):
    text = f"""
import os, sys, time
rank, start = int(os.environ["RANK"]), int(os.environ["START"])
directory = {str(tmp_path)!r}
{textwrap.dedent(program)}
"""
    line = [sys.executable, "-c", RUN, str(ROOT), str(tmp_path), text, logs]
    done = subprocess.run(
      line, capture_output=True, text=True, timeout=DEADLINE_S
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))

  return call


def test_what_ends_well_is_not_started_again(run):
  assert run("") == (0, [], [1, 1])


@pytest.mark.parametrize("code", [1, 130])
def test_an_error_of_its_own_ends_all_with_its_code(code, run):
  program = f"sys.exit({code}) if rank == 0 else time.sleep(60)"
  assert run(program) == (code, [], [1, 1])


def test_an_error_of_another_process_alone_ends_all(run):
  assert run("sys.exit(3) if rank else time.sleep(60)") == (3, [], [1, 1])


def test_a_process_that_dies_starts_all_again(run):
  code, notes, starts = run(
    f"""
    if start == 0 and rank == 1:
      os.kill(os.getpid(), 9)
    if start == 0:
      time.sleep(0.3)
      sys.exit({world_lib.LOST})
    """
  )
  assert (code, starts) == (0, [2, 2])
  assert notes == [
    "process 1 was ended by SIGKILL; starting all 2 processes again (1)"
  ]


def test_restarts_are_bounded(run):
  code, notes, starts = run("os.kill(os.getpid(), 6) if rank == 0 else None")
  assert (code, starts) == (128 + signal.SIGABRT, [3, 3])
  assert notes[-1] == (
    "error: process 0 was ended by SIGABRT, after 2 restarts (max_restarts)"
  )


def test_each_start_has_an_address_of_its_own(run, tmp_path):
  run(
    f"""
    path = os.path.join(directory, f"{{start}}-{{rank}}")
    open(path, "w").write(os.environ["ADDRESS"])
    sys.exit({world_lib.LOST} if start < 2 else 0)
    """
  )
  found = {
    path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()
  }
  assert len(found) == 6
  addresses = [found[f"{start}-0"] for start in range(3)]
  assert addresses == [found[f"{start}-1"] for start in range(3)]
  assert len({*addresses}) == 3


def test_others_print_to_their_own_files(run, tmp_path):
  run("print('here', rank); time.sleep(rank)", logs=str(tmp_path / "logs"))
  (log,) = (tmp_path / "logs").iterdir()
  assert (log.name, log.read_text()) == ("process-1.log", "here 1\n")


LAUNCHER = """
import os, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/launch"]
import trainer_world

trainer_world._GRACE_S = 0.5
PROGRAM = '''
import os, signal, sys, time
rank = int(sys.argv[1])
stopped = []
if rank == 0:
  signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
open(os.path.join(sys.argv[2], f"pid-{rank}"), "w").write(str(os.getpid()))
while not stopped:
  time.sleep(0.02)
sys.exit(130)
'''

def command(rank, address):
  return [sys.executable, "-c", PROGRAM, str(rank), sys.argv[2]], os.environ

sys.exit(trainer_world.run(
  command, 2, max_restarts=2, note=print
))
"""


def started(tmp_path):
  launcher = subprocess.Popen(
    [sys.executable, "-c", LAUNCHER, str(ROOT), str(tmp_path)]
  )
  paths = [tmp_path / f"pid-{rank}" for rank in range(2)]
  waiting.until(
    lambda: all(path.exists() and path.read_text() for path in paths)
  )
  return launcher, [int(path.read_text()) for path in paths]


def is_gone(pid):
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except FileNotFoundError:
    return True
  return text.rpartition(")")[2].split()[0] == "Z"


def test_a_signal_is_passed_to_process_0_and_nothing_is_left(tmp_path):
  launcher, pids = started(tmp_path)
  launcher.terminate()
  try:
    assert launcher.wait(DEADLINE_S) == 130
  finally:
    launcher.kill()
    launcher.wait()
  assert all(map(is_gone, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")
def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path):
  launcher, pids = started(tmp_path)
  launcher.kill()
  launcher.wait(DEADLINE_S)
  waiting.until(lambda: all(map(is_gone, pids)))
