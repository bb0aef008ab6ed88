"""Requests of clients that a training's worker serves beside its groups."""

import threading
import time

import pytest
import tiny
import worker_world

from jaxrl_async.engine import sampling
from jaxrl_async.serving import client_request
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

DEADLINE_S = 60.0


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


def make_requests():
  return requests_lib.RequestQueue(
    tokenizer_lib.character_level(),
    max_waiting=8,
    cache_tokens=tiny.SIZES.cache_tokens,
    vocab_size=tiny.MODEL.vocab_size,
  )


def wanted(seed):
  return client_request.Request(
    prompts=(tiny.prompt(5, seed=seed),),
    max_tokens=18,
    settings=sampling.SamplingSettings(),
    seed=seed,
    num_choices=2,
    deadline_s=time.monotonic() + DEADLINE_S,
  )


def test_requests_are_served_beside_the_groups_and_change_none(make_world):
  expected = make_world()
  expected.run_until(worker_world.finished(3))
  queue = make_requests()
  world = make_world(requests=queue)
  updates = []
  for seed in (8, 9, 10):
    queue.submit(wanted(seed), updates.append)
  world.run_until(
    lambda state: worker_world.finished(3)(state) and queue.is_empty
  )
  reasons = [u.finish_reason for u in updates if u.finish_reason is not None]
  assert len(reasons) == 6
  assert {v for u in updates for v in u.policy_versions.tolist()} == {0}
  groups = {g.index: g for g in world.buffer.state().finished}
  for group in expected.buffer.state().finished:
    if group.index in groups:
      both = zip(
        groups[group.index].trajectories, group.trajectories, strict=True
      )
      for here, there in both:
        assert here.tokens.tolist() == there.tokens.tolist()
        assert here.finish_reason == there.finish_reason
  assert world.replica.served_tokens == sum(len(u.tokens) for u in updates)
  worker_world.check_balance(world)


def test_clients_that_always_ask_again_do_not_keep_groups_from_starting(
  make_world,
):
  queue = make_requests()
  world = make_world(requests=queue)
  num_asked = 0

  def ask_again(state):
    nonlocal num_asked
    while queue.depth < 7:  # the eighth place is for another client
      num_asked += 1
      queue.submit(wanted(num_asked), lambda update: None)
    return worker_world.finished(4)(state)

  ask_again(world.buffer.state())
  world.run_until(ask_again)
  assert queue.stats.completion_tokens
  worker_world.check_balance(world)


def test_what_clients_are_written_is_no_progress_of_a_training(make_world):
  queue = make_requests()
  world = make_world(requests=queue)
  for seed in (8, 9, 10):
    queue.submit(wanted(seed), lambda update: None)
  world.run_until(
    lambda state: worker_world.finished(3)(state) and queue.is_empty
  )
  groups = [*world.worker.groups().values(), *world.buffer.state().finished]
  assert world.replica.group_tokens == sum(
    t.num_completion_tokens for g in groups for t in g.trajectories
  )


def test_a_worker_without_work_notices_a_request(make_world):
  queue = make_requests()
  world = make_world(requests=queue, prompts=tiny.Prompts())
  updates, ended = [], threading.Event()

  def note(update):
    updates.append(update)
    if sum(u.finish_reason is not None for u in updates) == 2:
      ended.set()

  thread = threading.Thread(target=world.worker.run)
  thread.start()
  try:
    # Version 0 may begin four groups; after them it waits for the trainer.
    assert wait_until(lambda: len(world.buffer.state().finished) == 4)
    queue.submit(wanted(8), note)
    assert ended.wait(DEADLINE_S)
  finally:
    world.worker.stop()
    thread.join(DEADLINE_S)
  assert not thread.is_alive()
  with pytest.raises(client_request.Draining):
    queue.submit(wanted(9), note)


def wait_until(is_over):
  """Polls, since the buffer tells nobody but the trainer."""
  deadline_s = time.monotonic() + DEADLINE_S
  while not is_over():
    if time.monotonic() > deadline_s:
      return False
    time.sleep(0.01)
  return True
