"""A replica of two processes writes what one of one process writes."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import led_engine
import numpy as np
import pytest

from jaxrl_async.cluster import led_replica
from jaxrl_async.cluster import replica_world
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.devices import mesh as mesh_lib

PROGRAM = pathlib.Path(__file__).parent / "led_engine.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Programs:
  """Processes of one replica, and a channel that brings them weights."""

  def __init__(self, directory, stack):
    self.directory = directory
    self.stack = stack
    directory.mkdir()
    weights = self.weights(0)
    self.channel = weight_transfer.OrbaxChannel(directory, "it", weights)
    stack.callback(self.channel.close)
    self.num_published = 0
    self.damaged = self.refused = None  # versions

  def weights(self, seed):
    where = mesh_lib.replicated(mesh_lib.make_mesh(jax.devices()[:1]))
    return mesh_lib.put(led_engine.weights_of(seed), where)

  def start(self, role, num_devices):
    process = self.stack.enter_context(
      subprocess.Popen(
        [sys.executable, PROGRAM, role, self.directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {
          "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
          "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
          "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        },
      )
    )
    self.stack.callback(process.kill)
    return process

  def publish(self, process):
    """Publish the next version for a process that asks for it."""
    while (line := process.stdout.readline()).startswith("[Gloo]"):
      pass  # a library says that the processes are connected
    if line.startswith("refused "):
      self.refused = line.split()[1]
      again = self.directory / "incarnation-it" / f"{self.refused}-2"
      while not (again / "manifest.json").exists():
        time.sleep(0.01)  # polls what the channel's thread writes
    elif line == "next version\n":
      version = self.num_published
      self.channel.publish(self.weights(version), version)
      assert self.channel.wait_for_version(version - 1, 30.0)
      self.num_published += 1
      if version == self.damaged:
        path = self.directory / "incarnation-it" / str(version) / "stranger"
        path.touch()
    else:
      return line
    process.stdin.write("published\n")
    process.stdin.flush()
    return None

  def written(self, process):
    while (line := self.publish(process)) is None:
      pass
    return line


@pytest.fixture
def begin(tmp_path):
  with contextlib.ExitStack() as stack:
    yield lambda name: Programs(tmp_path / name, stack)


def test_two_processes_write_what_one_writes(begin):
  one, two = begin("one"), begin("two")
  alone = json.loads(one.written(one.start("alone", 2)))
  two.damaged = 1
  lead = two.start("lead", 1)
  two.start("follow", 1)
  led = json.loads(two.written(lead))
  assert lead.wait(30) == 0 and two.refused == "1"
  assert len(led) == 12  # 12 sequences, less one cancelled, and a question
  for a, b in zip(alone, led, strict=True):
    assert [a[k] for k in ("group", "tokens", "versions", "reason")] == [
      b[k] for k in ("group", "tokens", "versions", "reason")
    ]
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-6)
  assert {v for one in led for v in one["versions"]} == {-1, 0, 1, 2}
  (question,) = (one for one in led if one["group"] == 20)
  assert set(question["versions"]) == {-1, 1}
  assert {"stop", "length"} <= {one["reason"] for one in led}


def test_a_process_that_writes_other_tokens_ends_the_replica(begin):
  programs = begin("stray")
  lead = programs.start("lead", 1)
  programs.start("stray", 1)
  assert "has generated other tokens than the first" in programs.written(lead)
  assert lead.wait(30) == 3


def test_a_process_that_is_killed_ends_the_others(begin):
  programs = begin("killed")
  lead = programs.start("lead", 1)
  follower = programs.start("follow", 1)
  assert programs.publish(lead) is None
  follower.kill()
  assert "a process of the replica has ended" in programs.written(lead)
  assert lead.wait(30) == 3


def test_a_version_is_adopted_once_all_processes_have_read_it():
  pairs = [multiprocessing.Pipe() for _ in range(2)]
  failures = []
  lead = led_replica.Lead(
    replica_world.Peers([ours for ours, _ in pairs]), 3, failures.append
  )
  first, second = (replica_world.Peers([theirs]) for _, theirs in pairs)
  lead.fetch("4")
  lead.fetch("4-2")
  waiting = threading.Thread(
    target=lead.wait_fetched, args=("4-2",), daemon=True
  )
  waiting.start()
  first.send("fetched", "4")
  first.send("fetched", "4-2")
  second.send("fetched", "4")
  waiting.join(0.5)
  assert waiting.is_alive()
  second.send("fetched", "4-2")
  waiting.join(30.0)
  assert not waiting.is_alive() and not failures


def test_without_the_key_nobody_is_let_in():
  listener = replica_world.Listener("127.0.0.1", 2, 5.0)
  meeting = threading.Thread(target=listener.meet, daemon=True)
  meeting.start()
  stranger = dataclasses.replace(listener.invitation, key=b"guessed")
  with pytest.raises(multiprocessing.AuthenticationError):
    replica_world.join(stranger, 1)
  assert meeting.is_alive()
  assert b"guessed" not in repr(stranger).encode()
