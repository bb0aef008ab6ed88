"""One writer a workdir; what a start finds there; files that move away."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import disks
import pytest

from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib

ROOT = pathlib.Path(__file__).parents[1]
DEADLINE_S = 60.0

# Holds the workdir, with children that were made in each of the usual ways.
HOLDER = """
import multiprocessing, os, pathlib, subprocess, sys, time
from jaxrl_async.storage import workdir

if __name__ == "__main__":
  with workdir.Claim(pathlib.Path(sys.argv[1]), print):
    children = [subprocess.Popen(["sleep", "600"]).pid]
    for method in ("fork", "forkserver", "spawn"):
      child = multiprocessing.get_context(method).Process(
        target=time.sleep, args=(600,), daemon=True
      )
      child.start()
      children.append(child.pid)
    print(*children, flush=True)
    time.sleep(600)
"""


def claim(path, note=pytest.fail):
  return workdir_lib.Claim(path, note)


@pytest.fixture
def holder(tmp_path):
  """A process that holds tmp_path/run, and the ids of its children."""
  script = tmp_path / "holder.py"
  script.write_text(textwrap.dedent(HOLDER))
  process = subprocess.Popen(
    [sys.executable, str(script), str(tmp_path / "run")],
    stdout=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  )
  assert process.stdout is not None
  children = [int(x) for x in process.stdout.readline().split()]
  yield process, children
  for pid in (*children, process.pid):
    try:
      os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
      pass
  process.wait(DEADLINE_S)
  process.stdout.close()


def test_a_second_writer_is_told_who_holds_the_workdir(tmp_path, holder):
  process, _ = holder
  before = sorted(tmp_path.rglob("*"))
  with (
    pytest.raises(workdir_lib.WorkdirError) as caught,
    claim(tmp_path / "run"),
  ):
    pytest.fail("two writers")
  message = str(caught.value)
  assert message.startswith("workdir: ") and "\n" not in message
  for word in (f"process {process.pid} on ", ", since 2", "holder.py"):
    assert word in message
  assert sorted(tmp_path.rglob("*")) == before


def test_a_killed_writer_leaves_no_lock_whatever_children_outlive_it(
  tmp_path, holder
):
  process, children = holder
  assert len(children) == 4
  os.kill(process.pid, signal.SIGKILL)
  process.wait(DEADLINE_S)
  # The first two do not notice that their parent is gone.
  for pid in children[:2]:
    os.kill(pid, 0)
  with claim(tmp_path / "run") as mine:
    mine.check()


def test_the_claim_is_given_back_and_taken_again(tmp_path):
  for _ in range(2):
    with claim(tmp_path / "a" / "b"):
      with pytest.raises(workdir_lib.WorkdirError, match=f"{os.getpid()}"):
        claim(tmp_path / "a" / "b").__enter__()


def test_a_file_system_that_does_not_answer_is_said_once(tmp_path, monkeypatch):
  notes = []
  with claim(tmp_path, notes.append) as mine:
    with monkeypatch.context() as patched:
      patched.setattr(workdir_lib, "check_in_place", disks.does_not_answer)
      for _ in range(3):
        mine.check()
    for _ in range(3):
      mine.check()
    assert notes == [
      f"WARNING: {tmp_path} is not reached (Stale file handle)",
      f"{tmp_path} is reached again",
    ]


def test_a_writer_whose_description_is_not_there_yet_is_another_process(
  tmp_path,
):
  with claim(tmp_path):
    (tmp_path / "lock").write_bytes(b"")
    with pytest.raises(workdir_lib.WorkdirError, match="by another process;"):
      claim(tmp_path).__enter__()


def test_a_lock_that_is_no_file_is_one_line(tmp_path):
  (tmp_path / "lock").mkdir()
  with pytest.raises(workdir_lib.WorkdirError, match="^workdir: .*lock cannot"):
    claim(tmp_path).__enter__()


def test_a_file_system_without_locks_is_said_in_one_line(tmp_path, monkeypatch):
  def refuse(file, how):
    raise OSError(95, "Operation not supported")

  monkeypatch.setattr(workdir_lib.fcntl, "flock", refuse)
  notes = []
  with claim(tmp_path, notes.append) as mine:
    mine.check()
  (note,) = notes
  assert "without locks (Operation not supported)" in note
  assert "\n" not in note


def move(path):
  path.rename(path.with_name("elsewhere"))


def remove(path):
  shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace(path):
  copy = path.with_name("copy")
  shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
  remove(path)
  copy.rename(path)


ERRORS = {remove: disk.StorageError, replace: workdir_lib.WorkdirError}
CHANGES = pytest.mark.parametrize("change", ERRORS)


@pytest.mark.parametrize("what", ["", "lock"])
def test_a_workdir_that_is_replaced_is_noticed_at_once(tmp_path, what):
  path = tmp_path / "run"
  with claim(path) as mine:
    mine.check()
    replace(path / what)
    with pytest.raises(workdir_lib.WorkdirError, match="lock was replaced"):
      mine.check()
    with pytest.raises(workdir_lib.WorkdirError, match="^workdir: .*lock"):
      mine.check_in_place()


@pytest.mark.parametrize("what", ["", "lock"])
def test_a_workdir_that_is_removed_is_told(tmp_path, what):
  path, notes = tmp_path / "run", []
  with claim(path, notes.append) as mine:
    remove(path / what)
    for _ in range(2):
      mine.check()
      with pytest.raises(FileNotFoundError, match="it was removed"):
        mine.check_in_place()
  assert notes == [f"WARNING: {path} is not reached (it was removed)"]


@pytest.mark.parametrize("what", ["", "lock"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_workdir_that_is_moved_may_be_put_back(tmp_path, what, is_replaced):
  path, notes = tmp_path / "run", []
  with workdir_lib.Claim(path, notes.append) as mine:
    move(path / what)
    if is_replaced:
      path.mkdir(exist_ok=True)
      (path / "lock").touch()
    for _ in range(2):
      mine.check()
      with pytest.raises(FileNotFoundError, match="it was moved; put it back"):
        mine.check_in_place()
    if is_replaced:
      remove(path / what)
    (path / what).with_name("elsewhere").rename(path / what)
    mine.check()
    mine.check_in_place()
  said = f"WARNING: {path} is not reached (it was moved; put it back)"
  assert notes == [said, f"{path} is reached again"]


@CHANGES
def test_a_ledger_that_is_gone_is_noticed(tmp_path, change):
  path = tmp_path / "ledger.jsonl"
  written = ledger_lib.Ledger(path, ledger_lib.LedgerState())
  written.state()
  change(path)
  with pytest.raises(ERRORS[change], match="ledger.jsonl (cannot|was repl)"):
    written.state()
  written.close()


@CHANGES
def test_metrics_that_are_gone_are_noticed(tmp_path, change):
  beside = side_outputs_lib.SideOutputs(pytest.fail)
  writer = metrics_lib.MetricsWriter(tmp_path, beside)
  writer.write(0, {"a": 1})
  change(tmp_path / "metrics.jsonl")
  with pytest.raises(ERRORS[change], match="metrics.jsonl (cannot|was repl)"):
    writer.write(1, {"a": 1})
    writer.state()
  writer.close()


def test_an_unused_workdir_may_hold_what_is_no_book(tmp_path):
  workdir_lib.check_unused(tmp_path / "new")
  for name in ("metrics.jsonl", "ledger.jsonl", "lock"):
    (tmp_path / name).touch()
  workdir_lib.check_unused(tmp_path)
  (tmp_path / "params").mkdir()
  (tmp_path / "config.json").write_text("{}")
  workdir_lib.check_unused(tmp_path)  # as launch/sft.py leaves it


@pytest.mark.parametrize(
  "name", ["metrics.jsonl", "ledger.jsonl", "config.json"]
)
@pytest.mark.parametrize("kind", ["text", "directory", "broken link"])
def test_books_without_a_checkpoint_are_not_begun_anew(tmp_path, name, kind):
  path = tmp_path / name
  if kind == "text":
    path.write_text("{}\n")
  elif kind == "directory":
    path.mkdir()
  else:
    path.symlink_to("/nowhere/at/all")
  with pytest.raises(
    workdir_lib.WorkdirError, match=f"holds {name} of a run, .*bring the"
  ):
    workdir_lib.check_unused(tmp_path)


def test_lines_up_to_the_checkpoint_have_to_be_there(tmp_path):
  path = tmp_path / "ledger.jsonl"
  workdir_lib.check_lines(path, 0)
  with pytest.raises(workdir_lib.WorkdirError, match="cannot be read .No such"):
    workdir_lib.check_lines(path, 16)
  path.write_text('{"a": 1}\n{"b": 2}\n{"torn')
  for num_bytes in (0, 9, 18):
    workdir_lib.check_lines(path, num_bytes)
  with pytest.raises(workdir_lib.WorkdirError, match="has 24 bytes, fewer"):
    workdir_lib.check_lines(path, 25)
  for num_bytes, text in ((17, None), (18, b"\0" * 24), (2, b"1\n"), (18, b"")):
    path.write_bytes(path.read_bytes() if text is None else text)
    with pytest.raises(workdir_lib.WorkdirError, match="^workdir: .*ledger"):
      workdir_lib.check_lines(path, num_bytes)
  path.unlink()
  path.mkdir()
  with pytest.raises(workdir_lib.WorkdirError, match="Is a directory"):
    workdir_lib.check_lines(path, 18)


@pytest.mark.parametrize("num_bytes", [2**16 - 1, 2**16, 2**16 + 1, 3_000_000])
def test_the_last_line_may_have_any_length(tmp_path, num_bytes):
  path = tmp_path / "timing.jsonl"
  line = b'{"a": "' + (num_bytes - 10) * b"x" + b'"}\n'
  assert len(line) == num_bytes
  for before in (b"", b'{"b": 2}\n', line):
    path.write_bytes(before + line + line[:-9])
    workdir_lib.check_lines(path, len(before + line))
    for wrong in (len(before + line) - 1, len(before + line) + 1):
      with pytest.raises(workdir_lib.WorkdirError, match="is not the file"):
        workdir_lib.check_lines(path, wrong)
