"""The processes that make questions: order, failures, and how they end."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import waiting

from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.data.reasoning_gym import questions

ROOT = pathlib.Path(__file__).parents[1]
TIMEOUT_S = 120.0
# Starts a stream of three processes and says who their server is; asked to,
# takes more than pipes hold; waits until it is killed.
OWNER = """
import signal, sys
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.data import source as source_lib
stream = gym.QuestionStream(
  "chain_sum", {}, seed=0, split=source_lib.Split.TRAIN, first_index=0,
  num_processes=3,
)
for _ in range(6):
  stream.next()
print(gym._server()._process.pid, flush=True)
input()
for _ in range(6_000):
  stream.next()
print("went on", flush=True)
signal.pause()
"""


def make_stream(dataset="chain_sum", *, first_index=0, num_processes=1, **more):
  return gym.QuestionStream(
    dataset,
    more,
    seed=0,
    split=source_lib.Split.TRAIN,
    first_index=first_index,
    num_processes=num_processes,
  )


def children(pid):
  """Processes whose parent it is, but zombies."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      state, parent = path.read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
      continue
    if int(parent) == pid and state != "Z":
      found.append(int(path.parent.name))
  return found


def is_alive(pid):
  path = pathlib.Path(f"/proc/{pid}/stat")
  try:
    return path.read_text().rpartition(")")[2].split()[0] != "Z"
  except (FileNotFoundError, ProcessLookupError):
    return False


def test_items_come_in_order_from_any_place_and_any_number_of_processes():
  one, other = make_stream(), make_stream(first_index=3, num_processes=2)
  items = [one.next() for _ in range(300)]
  assert [other.next() for _ in range(297)] == items[3:]
  ours = [item for item in items if item is not None]
  assert [item["index"] for item in ours] == [
    index for index, item in enumerate(items) if item is not None
  ]
  assert {questions.split_of(item["question"]) for item in ours} == {"train"}
  assert 100 < len(ours) < 200
  one.close()
  other.close()


def test_a_stream_is_ready_when_the_next_item_is_there():
  # A puzzle of this size takes a while, and is never in the pipe at once.
  stream = make_stream("knight_swap")
  assert not stream.is_ready()
  waiting.until(lambda: stream.is_ready(timeout_s=0.1))
  assert stream.is_ready()
  stream.next()
  stream.close()


def test_a_closed_stream_leaves_no_process_even_in_the_middle_of_an_item():
  server = gym._server()._process.pid
  before = set(children(server))
  # Its first item takes seconds; of the other the pipe is full.
  streams = [make_stream("sokoban"), make_stream(num_processes=3)]
  streams[1].next()
  waiting.until(lambda: len(set(children(server)) - before) == 4)
  for stream in streams:
    stream.close()
  waiting.until(lambda: not set(children(server)) - before)


def test_a_dataset_that_fails_is_named_with_its_traceback():
  stream = make_stream("word_sorting", min_words=10**6, max_words=10**6)
  with pytest.raises(
    source_lib.SourceError,
    match="^task.dataset: word_sorting failed to make item 0: ValueError: Sam",
  ) as raised:
    stream.next()
  assert "in sample" in raised.value.__notes__[0]
  stream.close()


def test_a_killed_process_is_an_error_and_no_wait():
  server = gym._server()._process.pid
  before = set(children(server))
  stream = make_stream()
  stream.next()
  waiting.until(lambda: set(children(server)) - before)
  for pid in set(children(server)) - before:
    os.kill(pid, signal.SIGKILL)
  with pytest.raises(source_lib.SourceError, match="was killed"):
    for _ in range(10_000):  # what was in the pipe is there
      stream.next()
  stream.close()


def test_the_modules_of_the_processes_import_without_jax():
  code = (
    "import sys; from jaxrl_async.data.reasoning_gym import gym;"
    "print(sorted({'jax', 'flax', 'grain'} & set(sys.modules)))"
  )
  ran = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=TIMEOUT_S,
  )
  assert ran.stdout == "[]\n", ran.stderr


@pytest.mark.slow
def test_processes_end_with_the_process_that_started_them():
  owner = subprocess.Popen(
    [sys.executable, "-c", OWNER],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert owner.stdin is not None and owner.stdout is not None
  try:
    server = int(owner.stdout.readline())
    processes = [server, *children(server)]
    assert len(processes) == 4
    # What asks a run to end leaves them: it still finishes its step.
    for pid in processes:
      os.kill(pid, signal.SIGTERM)
      os.kill(pid, signal.SIGINT)
    owner.stdin.write("go on\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "went on\n"
    assert [server, *children(server)] == processes
    owner.kill()
    owner.wait(TIMEOUT_S)
    waiting.until(lambda: not any(map(is_alive, processes)))
  finally:
    owner.kill()
    owner.wait(TIMEOUT_S)
    owner.stdin.close()
    owner.stdout.close()
