"""A replica of two processes writes what one of one process writes."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading

import jax
import led_engine
import numpy as np
import pytest

from jaxrl_async.cluster import led_replica
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.weights import weight_transfer

PROGRAM = pathlib.Path(__file__).parent / "led_engine.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Programs:
  """Processes of one replica, and a channel that brings them weights."""

  def __init__(self, directory, stack, has_lora):
    self.directory = directory
    self.stack = stack
    self.more = ["lora"] if has_lora else []
    self.weights_of = led_engine.weights_of
    directory.mkdir()
    if has_lora:
      self.weights_of = led_engine.adapters_of
      base = self.placed(led_engine.base_of_lora())
      self.new_channel(directory / "base", base).publish(base, 0)
    self.channel = self.new_channel(directory, self.placed(self.weights_of(0)))
    self.num_published = 0

  def new_channel(self, directory, weights):
    channel = weight_transfer.OrbaxChannel(directory, "it", weights)
    self.stack.callback(channel.close)
    return channel

  def placed(self, weights):
    where = mesh_lib.replicated(mesh_lib.make_mesh(jax.devices()[:1]))
    return mesh_lib.put(weights, where)

  def start(self, role, num_devices):
    process = self.stack.enter_context(
      subprocess.Popen(
        [sys.executable, PROGRAM, role, self.directory, *self.more],
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
    if line != "next version\n":
      return line
    version = self.num_published
    self.channel.publish(self.placed(self.weights_of(version)), version)
    assert self.channel.wait_for_version(version - 1, 30.0)
    self.num_published += 1
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
    yield lambda name, has_lora=False: Programs(
      tmp_path / name, stack, has_lora
    )


@pytest.mark.parametrize(
  "has_lora", [False, pytest.param(True, marks=pytest.mark.nightly)]
)
def test_two_processes_write_what_one_writes(begin, has_lora):
  one, two = begin("one", has_lora), begin("two", has_lora)
  alone = json.loads(one.written(one.start("alone", 2)))
  lead = two.start("lead", 1)
  two.start("follow", 1)
  led = json.loads(two.written(lead))
  assert lead.wait(30) == 0
  assert len(led) == 11  # 12 sequences, less one cancelled
  for a, b in zip(alone, led, strict=True):
    assert [a[k] for k in ("group", "tokens", "versions", "reason")] == [
      b[k] for k in ("group", "tokens", "versions", "reason")
    ]
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-6)
  assert {v for one in led for v in one["versions"]} == {-1, 0, 1, 2}
  reasons = {one["reason"] for one in led}
  assert {"length", "eos" if has_lora else "stop"} <= reasons


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("role", "words"),
  [
    ("blind", "version 1 is damaged here"),
    ("stray", "has generated other tokens than the first"),
  ],
)
def test_a_process_that_does_something_else_ends_the_replica(
  begin, role, words
):
  programs = begin(role)
  lead = programs.start("lead", 1)
  programs.start(role, 1)
  assert words in programs.written(lead)
  assert lead.wait(30) == world_lib.LOST


def test_a_process_that_is_killed_ends_the_others(begin):
  programs = begin("killed")
  lead = programs.start("lead", 1)
  follower = programs.start("follow", 1)
  assert programs.publish(lead) is None
  follower.kill()
  assert programs.written(lead) == "lost: \n"  # it had no time to say why
  assert lead.wait(30) == world_lib.LOST


def world_of(size):
  """A process that leads, and its followers, all of them here."""
  pairs = [multiprocessing.Pipe() for _ in range(1, size)]
  ours = {i: pair[0] for i, pair in enumerate(pairs, 1)}
  return world_lib.World(0, size, ours), [
    world_lib.World(i, size, {0: pair[1]}) for i, pair in enumerate(pairs, 1)
  ]


def test_a_version_is_adopted_once_all_processes_have_read_it():
  leading, (first, second) = world_of(3)
  lead = led_replica.Lead(leading, lambda failure: None)
  lead.fetch(4)
  waiting = threading.Thread(target=lambda: lead.wait(4), daemon=True)
  waiting.start()
  first.report("fetched", version=4)
  waiting.join(0.5)
  assert waiting.is_alive()
  second.report("fetched", version=4)
  waiting.join(30.0)
  assert not waiting.is_alive()


def test_a_follower_tells_while_it_compiles(monkeypatch):
  monkeypatch.setattr(led_replica, "_TELL_S", 0.05)
  leading, (world,) = world_of(2)
  follower = led_replica.Follower(world)
  told = threading.Event()
  led_replica.Lead(leading, lambda failure: None, told.set)

  def trace(x):
    assert told.wait(30)
    return x

  is_traced = threading.Event()

  def compile_program():
    jax.jit(trace)(1.0)
    is_traced.set()

  follower._on_compile = compile_program
  leading.tell("compile")
  assert is_traced.wait(60)
