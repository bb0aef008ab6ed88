"""A lock of several processes, which the kernel opens when one is killed."""

import multiprocessing
import subprocess
import sys

import pytest

from jaxrl_async.rewards import file_lock
from jaxrl_async.rewards import scoring

DEADLINE_S = 60.0


def hold(lock, held, release):
  """Of another process: takes the lock twice, as pebble does."""
  assert lock.acquire() and lock.acquire(timeout=1.0)
  lock.release()
  held.send(True)
  release.poll(DEADLINE_S)
  lock.release()


@pytest.fixture
def holder():
  """A lock, the process that holds it, and the pipe that ends that."""
  # As the service does, which comes after this in the same process.
  multiprocessing.set_forkserver_preload([scoring.PRELOAD])
  context = file_lock.ForkServerContext()
  lock = context.RLock()
  (held, tell), (wait, release) = context.Pipe(False), context.Pipe(False)
  process = context.Process(target=hold, args=(lock, tell, wait), daemon=True)
  process.start()
  assert held.poll(DEADLINE_S)
  yield lock, process, release
  process.kill()
  process.join(DEADLINE_S)


@pytest.mark.slow
def test_one_process_has_it_at_a_time(holder):
  lock, process, release = holder
  assert not lock.acquire(block=False)
  assert not lock.acquire(timeout=0.01)
  release.send(True)
  assert lock.acquire(timeout=DEADLINE_S)
  lock.release()
  process.join(DEADLINE_S)
  assert process.exitcode == 0


def test_a_killed_process_holds_it_no_more(holder):
  lock, process, _ = holder
  process.kill()
  assert lock.acquire(timeout=DEADLINE_S)
  lock.release()


SERVICE = """
import _multiprocessing
from jaxrl_async.rewards import service
from jaxrl_async.rewards import term
import reward_groups
import reward_scorers

class None_(_multiprocessing.SemLock):
  def __new__(cls, *arguments):
    raise OSError(28, "/dev/shm is full, or is not there")

if __name__ == "__main__":
  _multiprocessing.SemLock = None_
  only = term.Term(scorer=reward_scorers.length, timeout_s=5.0, num_retries=0)
  rewards = service.RewardService(reward_groups.scorers(only), num_workers=2)
  rewards.warm_up()
  print(reward_groups.submit(rewards, {}, ["=ab"]).result()[0].score)
  rewards.close()
"""


@pytest.mark.slow
def test_the_reward_service_needs_no_semaphore(tmp_path):
  script = tmp_path / "main.py"
  script.write_text(SERVICE)
  ran = subprocess.run(
    [sys.executable, str(script)],
    env={"PYTHONPATH": str(__file__).rpartition("/")[0], "PATH": ""},
    capture_output=True,
    text=True,
    timeout=150,
  )
  assert ran.stdout == "2.0\n", ran.stderr


def test_without_it_there_would_be_a_name(monkeypatch):
  """What the service is spared: multiprocessing's own has one."""
  lock = multiprocessing.get_context("forkserver").RLock()
  assert lock._semlock.name
