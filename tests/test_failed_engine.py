"""An engine that fails or hangs in a run of one process, and begins anew."""

import dataclasses
import json
import threading
import time

import jax
import pytest
import sampled
import test_run
import tiny
import waiting
import worker_world

from jaxrl_async.config import sections
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import row_check
from jaxrl_async.engine import sampling
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import engine_calls
from jaxrl_async.rollout import messages
from jaxrl_async.serving import client_request
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


def failing(monkeypatch, cls, name, calls, text="INTERNAL: it is\nbroken"):
  """These calls of a method raise, after they have done their work.

  Only those in threads of a run are counted: the main thread evaluates.
  """
  real, count = getattr(cls, name), iter(range(10**9))

  def fails(self, *arguments, **settings):
    result = real(self, *arguments, **settings)
    is_main = threading.current_thread() is threading.main_thread()
    if (threading.active_count() == 1 or not is_main) and next(count) in calls:
      raise jax.errors.JaxRuntimeError(text)
    return result

  monkeypatch.setattr(cls, name, fails)


class Hang:
  """The calls of a method at which a thread other than the main one hangs."""

  def __init__(self, monkeypatch, cls, name, calls):
    self.threads, self.may_go_on = [], threading.Event()
    real, count = getattr(cls, name), iter(range(10**9))

    def hangs(*arguments, **settings):
      thread = threading.current_thread()
      if thread is not threading.main_thread() and next(count) in calls:
        self.threads.append(thread)
        assert self.may_go_on.wait(300)
      return real(*arguments, **settings)

    monkeypatch.setattr(cls, name, hangs)

  def wait_for(self, num_threads):
    waiting.until(lambda: len(self.threads) == num_threads, "a hang")

  def end(self):
    self.may_go_on.set()
    for thread in self.threads:
      thread.join(60)
      assert not thread.is_alive()


def alike(world, other):
  """The finished groups that both have, which must have the same tokens."""
  groups = {g.index: g for g in world.buffer.state().finished}
  both = [g for g in other.buffer.state().finished if g.index in groups]
  for group in both:
    for one, two in zip(
      groups[group.index].trajectories, group.trajectories, strict=True
    ):
      for name in worker_world.ARRAYS:
        assert (getattr(one, name) == getattr(two, name)).all(), name
  return both


def run_in_thread(world, is_over):
  """`World.run_until` as in a run, whose main thread does not generate."""
  failures = []

  def run():
    try:
      world.run_until(is_over)
    except RuntimeError as error:
      failures.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join(120)
  assert not thread.is_alive()
  if failures:
    raise failures[0]


@pytest.mark.parametrize("name", ["generate", "insert", "read"])
def test_what_was_reported_goes_on_under_another_name(
  make_world, monkeypatch, name
):
  expected = make_world()
  expected.run_until(worker_world.finished(3))
  world = make_world()
  failing(monkeypatch, engine_lib.Engine, name, {2})
  run_in_thread(world, worker_world.finished(3))
  worker_world.check_balance(world)
  (note,) = world.notes
  assert note == (
    "WARNING: the engine failed and begins anew (JaxRuntimeError: INTERNAL: it"
    " is)"
  )
  assert world.replica.name == "replica 1"
  assert [m.replica for verb, m in world.link.said if verb == "drained"] == [
    "replica 0"
  ]
  assert world.adopted == [0, 0]
  assert alike(world, expected)
  generated = world.scheduler.stats.generated_tokens
  assert world.worker.generated_tokens <= generated
  if name == "read":  # its tokens are lost
    written = sum(g.num_completion_tokens for g in world.in_flight())
    assert written == world.worker.generated_tokens


@pytest.mark.parametrize(
  ("cls", "name"),
  [
    (engine_lib.Engine, "generate"),
    (engine_lib.Engine, "insert"),
    (engine_lib.Engine, "read"),
    (tiny.SteppedScheduler, "adopt"),
  ],
)
def test_what_was_reported_goes_on_in_another_thread(
  make_world, monkeypatch, cls, name
):
  expected = make_world()
  expected.run_until(worker_world.finished(3))
  world, failures = make_world(), []
  worker, busy = world.worker, world.coordinator.busy
  hang = Hang(monkeypatch, cls, name, {0 if name == "adopt" else 2})

  def start():
    return supervisor_lib.start_thread("rollout", worker.run, failures.append)

  start()
  hang.wait_for(1)
  before = worker.totals()
  assert worker.take_over() and not worker.take_over()
  thread = start()
  waiting.until(
    lambda: worker_world.finished(3)(world.buffer.state()), "three groups"
  )
  with worker.paused(60.0):
    worker_world.check_balance(world)
    said, state = list(world.link.said), world.ledger.state()
    times = {metrics_lib.read({"": busy}).busy_s[""] for _ in range(9)}
    assert len(times) == 1  # nobody is inside, and nothing is recorded
    hang.end()  # what it was in has ended, and changes nothing
    assert world.link.said == said and world.ledger.state() == state
    worker_world.check_balance(world)
    assert alike(world, expected)
  assert world.replica.name == "replica 1"
  names = [m.replica for verb, m in said if verb == "drained"]
  assert names == ["replica 0"]
  after = worker.totals()
  assert all(after[key] >= before[key] for key in before)
  worker.stop()
  thread.join(60)
  assert not thread.is_alive() and not failures


def test_a_thread_that_hangs_again_with_the_same_weights_is_left(
  make_world, monkeypatch
):
  world, failures = make_world(), []
  hang = Hang(monkeypatch, engine_lib.Engine, "generate", {2, 4})
  assert not world.worker.take_over()  # it is not in a program
  for num_threads, is_taken_over in ((1, True), (2, False)):
    supervisor_lib.start_thread("rollout", world.worker.run, failures.append)
    hang.wait_for(num_threads)
    assert world.worker.take_over() == is_taken_over
  world.worker.stop()
  hang.end()
  assert not failures


def test_a_failure_that_comes_too_late_is_none():
  calls = engine_calls.EngineCalls()
  broken = jax.errors.JaxRuntimeError("broken")
  with pytest.raises(engine_calls.EngineFailed, match="RuntimeError: broken"):
    with calls.inside():
      raise broken
  assert not calls.give_up()
  with pytest.raises(engine_calls.GivenUp):
    with calls.inside():
      assert calls.give_up()
      raise broken


@pytest.mark.parametrize(
  "bug", [RuntimeError("a bug"), NotImplementedError(), RecursionError()]
)
def test_a_bug_is_no_failure_of_the_engine(bug):
  with pytest.raises(type(bug)) as raised:
    with engine_calls.EngineCalls().inside():
      raise bug
  assert raised.value is bug


def test_a_slot_that_is_not_released_is_a_failure_of_the_engine(
  make_world, monkeypatch
):
  world = make_world()
  world.run_until(lambda state: world.scheduler.stats.decode_steps > 0)
  group = next(iter(world.replica._writing))[0]

  def fails(*_):
    raise jax.errors.JaxRuntimeError("INTERNAL: it is")

  monkeypatch.setattr(engine_lib.Engine, "release", fails)
  with pytest.raises(engine_calls.EngineFailed, match="RuntimeError: INTERNAL"):
    world.replica.take(messages.Work(cancelled=(group,)))


def test_weights_whose_adoption_failed_are_adopted_again(
  make_world, monkeypatch
):
  world = make_world()
  # Step 0 has its batch, so that version 1 may exist.
  world.run_until(worker_world.finished(2))
  assert world.buffer.get_batch(0, 0.0)
  failing(monkeypatch, tiny.SteppedScheduler, "adopt", {0})
  world.channel.publish(tiny.engine_params(1, 1).weights, 1)
  world.buffer.set_policy_version(1)
  run_in_thread(
    world,
    lambda state: any(
      (t.policy_versions == 1).any()
      for group in state.finished
      for t in group.trajectories
    ),
  )
  assert len(world.notes) == 1 and world.adopted == [0, 1]
  assert world.replica.version == 1


def test_a_second_failure_in_a_version_ends_the_run(make_world, monkeypatch):
  world = make_world()
  failing(monkeypatch, engine_lib.Engine, "generate", {2, 4})
  with pytest.raises(engine_calls.EngineFailed, match="RuntimeError: INTERNAL"):
    run_in_thread(world, worker_world.finished(3))
  assert len(world.notes) == 1


def test_an_engine_without_enough_memory_does_not_begin_anew(
  make_world, monkeypatch
):
  world = make_world()
  text = "RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes."
  failing(monkeypatch, engine_lib.Engine, "generate", {2}, text)
  with pytest.raises(engine_calls.EngineFailed, match="RESOURCE_EXHAUSTED"):
    run_in_thread(world, worker_world.finished(3))
  assert not world.notes


def test_clients_are_told_and_may_ask_again(make_world, monkeypatch):
  queue = requests_lib.RequestQueue(
    tokenizer_lib.character_level(),
    max_waiting=8,
    cache_tokens=tiny.SIZES.cache_tokens,
    vocab_size=tiny.MODEL.vocab_size,
  )
  request = client_request.Request(
    prompts=(tiny.prompt(5, seed=8),),
    max_tokens=18,
    settings=sampling.SamplingSettings(),
    seed=8,
    deadline_s=time.monotonic() + 60.0,
  )
  first, second = [], []

  def ask_again(update):
    first.append(update)
    if update.error is not None:
      again.start()

  again = threading.Thread(
    target=lambda: queue.submit(
      dataclasses.replace(request, deadline_s=time.monotonic() + 60.0),
      second.append,
    )
  )
  queue.submit(request, ask_again)
  world = make_world(requests=queue)
  failing(monkeypatch, engine_lib.Engine, "generate", {2})
  run_in_thread(
    world,
    lambda state: worker_world.finished(3)(state) and second and queue.is_empty,
  )
  again.join(10)
  assert first[-1].error == client_request.RequestError.FAILED
  assert second[-1].finish_reason is not None
  assert queue.stats.failed == 1 and queue.stats.finished == 1
  worker_world.check_balance(world)


def test_rows_are_compared(monkeypatch):
  sizes, model = tiny.SIZES, tiny.MODEL
  assert not row_check.depends_on_row(model, sizes, "float32", num_parts=1)

  class Product:
    def __init__(self, function):
      self.function = function

    def __call__(self, rows, matrix):
      result = self.function(rows, matrix)
      return result.at[-1, -1].multiply(1 + 2**-22)

  monkeypatch.setattr(row_check.jax, "jit", Product)
  assert row_check.depends_on_row(model, sizes, "float32", num_parts=1)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("how", [failing, Hang])
def test_a_run_whose_engine_fails_or_hangs_is_complete_and_is_replayed(
  tmp_path, monkeypatch, capsys, how
):
  import test_replay

  config = test_run.make_config(
    num_steps=8,
    rollout={"decode_steps_per_call": 1},
    transfer={"channel": sections.Channel.DIRECT},
    eval={"num_items": 4, "every": 3},
    run={"exact_resume": True, "checkpoint_every": 4, "stall_timeout_s": 3.0},
  )
  with monkeypatch.context() as patched:
    hang = how(patched, engine_lib.Engine, "generate", {25, 150})
    summary = test_run.start(config, tmp_path)
    if hang:
      hang.end()
  said = capsys.readouterr().err
  assert said.count("ngine begins anew") + said.count("failed and begins") == 2
  entries = test_run.check_ledger(tmp_path, summary)
  assert summary["train_steps"] == 8
  sampled.check(tmp_path, entries)
  writers = json.dumps([entry["writers"] for entry in entries])
  assert all(f"replica {number}" in writers for number in range(3))
  found = test_replay.play(tmp_path)
  assert found.last_step == 8 and found.record()["state_bit_exact"]
