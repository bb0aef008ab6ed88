"""Requests beside a scheduler: every token arrives once, every end is told."""

import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.engine import sampling
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.serving import client_request
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

DEADLINE_S = 60.0


def make_queue(**options):
  return requests_lib.RequestQueue(
    tokenizer_lib.character_level(),
    **{
      "max_waiting": 8,
      "cache_tokens": 32,
      "vocab_size": tiny.MODEL.vocab_size,
    }
    | options,
  )


def make_scheduler(**options):
  scheduler = tiny.scheduler(**options)
  scheduler.adopt(tiny.engine_params(), 0)
  return scheduler


def request(length=5, *, seed=8, timeout_s=DEADLINE_S, **options):
  options = {
    "max_tokens": 18,
    "settings": sampling.SamplingSettings(),
  } | options
  return client_request.Request(
    prompts=(tiny.prompt(length, seed=seed),),
    seed=seed,
    deadline_s=time.monotonic() + timeout_s,
    **options,
  )


class Client:
  """Keeps what it is told."""

  def __init__(self, num_choices=1):
    self.updates = []
    self.ended = threading.Event()
    self._unfinished = num_choices

  def __call__(self, update):
    assert not self.ended.is_set(), "an update after the last"
    self.updates.append(update)
    self._unfinished -= update.finish_reason is not None
    if update.error is not None or not self._unfinished:
      self.ended.set()

  def written(self, choice=0):
    """Tokens, logprobs, versions and finish reason of a choice."""
    mine = [u for u in self.updates if u.choice == choice]
    arrays = (
      np.concatenate([getattr(u, name) for u in mine]).tolist()
      for name in ("tokens", "logprobs", "policy_versions")
    )
    return *arrays, mine[-1].finish_reason


def alone(request, choice=0):
  """What a scheduler of its own writes."""
  prompt = request.prompt_of(choice)
  n = len(prompt)
  scheduler = make_scheduler()
  sequence = sequence_lib.Sequence(
    prompt,
    limit=n + request.max_tokens,
    stream=sampling.Stream.SERVE,
    group=request.seed,
    member=choice,
    settings=request.settings,
  )
  scheduler.submit(sequence)
  tiny.finish(scheduler)
  t = sequence.trajectory()
  arrays = t.tokens, t.behavior_logprobs, t.policy_versions
  return *(a[n:].tolist() for a in arrays), t.finish_reason


def drive(queue, scheduler, max_steps=100):
  """What the loop does, until nothing is left."""
  for _ in range(max_steps):
    queue.feed(scheduler)
    if scheduler.is_idle:
      return
    queue.deliver(scheduler.step())
  raise AssertionError("requests do not end")


@contextlib.contextmanager
def serving(queue, scheduler):
  loop = requests_lib.ServeLoop(queue, scheduler)
  thread = threading.Thread(target=loop.run)
  thread.start()
  try:
    yield loop
  finally:
    loop.stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not loop.is_running


def test_each_client_gets_what_its_request_alone_would_get():
  queue, scheduler = make_queue(), make_scheduler()
  wanted = [request(3 + seed, seed=seed, num_choices=2) for seed in range(6)]
  clients = [Client(2) for _ in wanted]
  for one, client in zip(wanted, clients, strict=True):
    queue.submit(one, client)
  drive(queue, scheduler)
  for one, client in zip(wanted, clients, strict=True):
    assert client.ended.is_set()
    for choice in range(2):
      assert client.written(choice) == alone(one, choice)
  assert any(len(c.updates) > 4 for c in clients)
  assert queue.is_empty
  written = sum(len(u.tokens) for c in clients for u in c.updates)
  assert queue.stats.completion_tokens == queue.num_written() == written
  assert scheduler.stats.generated_tokens == written
  assert queue.stats.prompt_tokens == sum(range(3, 9))
  assert queue.stats.requests == queue.stats.finished == 6


def test_updates_arrive_while_the_request_is_being_written():
  queue, scheduler = make_queue(), make_scheduler()
  client = Client()
  queue.submit(request(seed=8), client)
  queue.feed(scheduler)
  lengths = []
  for _ in range(4):
    queue.deliver(scheduler.step())
    lengths.append(sum(len(u.tokens) for u in client.updates))
  assert len(set(lengths)) > 2
  assert not client.ended.is_set()


def test_a_cancelled_requests_slots_are_free_at_the_next_feed():
  queue, scheduler = make_queue(), make_scheduler()
  gone, stays = Client(6), Client()
  handle = queue.submit(request(seed=8, num_choices=6), gone)
  last = request(seed=9)
  queue.submit(last, stays)
  queue.feed(scheduler)
  assert scheduler.num_free == -2  # as many as one insertion takes wait
  for _ in range(2):
    queue.deliver(scheduler.step())
  num_updates = len(gone.updates)
  assert num_updates
  queue.cancel(handle)
  queue.cancel(handle)
  queue.feed(scheduler)
  assert [s.owner == handle.owner for s in scheduler.sequences()] == [False]
  drive(queue, scheduler)
  assert len(gone.updates) == num_updates
  assert stays.written() == alone(last)
  assert queue.stats.cancelled == 1
  assert queue.stats.finished == 1
  assert queue.is_empty
  assert queue.num_written() == scheduler.stats.generated_tokens
  queue.cancel(handle)
  queue.feed(scheduler)
  assert queue.stats.cancelled == 1


def begun_in_turn(queue, scheduler, most):
  """Group and member of all choices, in the order in which they enter."""
  seen = []
  while not queue.is_empty:
    queue.feed(scheduler, most=most)
    seen += [s for s in scheduler.sequences() if s not in seen]
    assert len(scheduler.sequences()) <= most
    queue.deliver(scheduler.step())
  return [(s.group, s.member) for s in seen]


def test_requests_take_turns_and_no_more_enter_than_there_is_room_for():
  queue, scheduler = make_queue(), make_scheduler()
  wanted = [request(seed=seed, num_choices=5) for seed in (8, 9)]
  clients = [Client(5) for _ in wanted]
  for one, client in zip(wanted, clients, strict=True):
    queue.submit(one, client)
  order = begun_in_turn(queue, scheduler, most=3)
  assert order[:3] == [(8, 0), (9, 0), (8, 1)]
  for seed in (8, 9):
    assert [m for s, m in order if s == seed] == list(range(5))
  for one, client in zip(wanted, clients, strict=True):
    assert client.written() == alone(one)


def test_a_request_does_not_wait_for_the_many_choices_of_others():
  queue, scheduler = make_queue(max_waiting=16), make_scheduler()
  for seed in range(4):
    queue.submit(
      request(seed=seed, num_choices=16, client="crowd"), lambda update: None
    )
  queue.feed(scheduler, most=4)
  # All slots are taken: the next to be free is the other client's, and the
  # crowd's own small request waits for one turn of its large ones.
  for seed, client in ((90, "crowd"), (91, "other")):
    queue.submit(request(seed=seed, client=client), lambda update: None)
  order = begun_in_turn(queue, scheduler, most=4)
  assert order[4] == (91, 0)
  assert order.index((90, 0)) <= 4 + 1 + 4


def test_equal_prompts_of_a_request_are_answered_differently():
  queue, scheduler = make_queue(), make_scheduler()
  one = request(num_choices=2)
  wanted = dataclasses.replace(one, prompts=one.prompts * 3)
  client = Client(6)
  queue.submit(wanted, client)
  drive(queue, scheduler)
  written = [client.written(choice)[0] for choice in range(6)]
  assert written == [alone(wanted, choice)[0] for choice in range(6)]
  assert len({tuple(tokens) for tokens in written}) == 6


def test_a_client_that_leaves_with_its_last_token_is_counted_once():
  queue, scheduler = make_queue(), make_scheduler()
  handles = []

  def on_update(update):
    if update.finish_reason is not None:
      queue.cancel(handles[-1])

  for _ in range(3):
    handles.append(queue.submit(request(), on_update))
    while not (queue.is_empty and scheduler.is_idle):
      queue.feed(scheduler)
      queue.deliver(scheduler.step())
  queue.feed(scheduler)
  assert (queue.stats.finished, queue.stats.cancelled) == (3, 0)
  assert queue.num_written() == scheduler.stats.generated_tokens > 0


def test_a_request_cancelled_before_it_was_fed_never_starts():
  queue, scheduler = make_queue(), make_scheduler()
  client = Client()
  queue.cancel(queue.submit(request(), client))
  queue.feed(scheduler)
  assert scheduler.is_idle and queue.is_empty and not client.updates


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_passed_deadline_ends_a_request_and_says_so(num_steps):
  queue, scheduler = make_queue(), make_scheduler()
  late, other = Client(2), Client()
  handle = queue.submit(request(num_choices=2), late)
  queue.submit(request(seed=9), other)
  for _ in range(num_steps):
    queue.feed(scheduler)
    queue.deliver(scheduler.step())
  handle.request = dataclasses.replace(handle.request, deadline_s=0.0)
  drive(queue, scheduler)
  assert late.updates[-1].error == client_request.RequestError.DEADLINE
  assert (late.updates[0].error is None) == (num_steps > 0)
  assert other.written() == alone(request(seed=9))
  assert queue.stats.expired == 1
  assert queue.is_empty


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_client_was_told_is_already_counted(is_late):
  queue, scheduler = make_queue(), make_scheduler()
  counts = []

  def on_update(update):
    if update.error is not None or update.finish_reason is not None:
      counts.append((queue.stats.finished, queue.stats.expired))

  handle = queue.submit(request(), on_update)
  if is_late:
    handle.request = dataclasses.replace(handle.request, deadline_s=0.0)
  drive(queue, scheduler)
  assert counts == [(0, 1) if is_late else (1, 0)]


def full_of(num_requests, num_choices, client="a"):
  """A queue of 16 places and 20 further choices, with requests in it."""
  queue = make_queue(max_waiting=16, max_further_choices=20, max_choices=20)
  handles = [
    queue.submit(request(num_choices=num_choices, client=client), Client())
    for _ in range(num_requests)
  ]
  return queue, handles


def refused(queue, words, **options):
  with pytest.raises(client_request.QueueFull, match=words):
    queue.submit(request(**options), Client())


def test_many_choices_leave_room_for_a_single_one():
  queue, (handle, _) = full_of(2, 11)
  refused(queue, "no room for 2 more", num_choices=2, client="b")
  for _ in range(12):
    queue.submit(request(client="a"), Client())
  handle.num_unfinished -= 1  # one has ended
  queue.submit(request(num_choices=2, client="b"), Client())
  refused(queue, "no room for 2 more", num_choices=2, client="c")


def test_the_last_places_are_for_clients_that_hold_none():
  queue, (first, *_) = full_of(14, 1)
  refused(queue, "14 requests", client="a")
  for client in ("b", "c"):
    queue.submit(request(client=client), Client())
  refused(queue, "16 requests", client="d")
  queue.cancel(first)
  queue.feed(make_scheduler())
  queue.submit(request(client="d"), Client())


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"length": 0}, "prompt: has no tokens"),
    ({"length": 20}, "prompt: 20 tokens and up to 18"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": 2**31}, "seed"),
    ({"num_choices": 0}, "n: 0"),
    ({"num_choices": 129}, "n: 129"),
    ({"stop_strings": ("a", "")}, "stop"),
    ({"stop_strings": ("\ufffd",)}, "stop"),
  ],
)
def test_what_can_never_be_served_is_refused(options, words):
  queue = make_queue()
  with pytest.raises(ValueError, match=words):
    queue.submit(request(**options), Client())
  assert queue.is_empty


@pytest.mark.parametrize(
  "settings",
  [
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": 1e-35},
    {"temperature": float("inf")},
    {"top_k": -1},
    {"top_k": 2**31},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"min_p": -0.1},
    {"min_tokens": 19},
    {"end_tokens": (97,)},
    {"end_tokens": tuple(range(9))},
  ],
)
def test_settings_out_of_range_are_refused(settings):
  with pytest.raises(ValueError, match="is|end tokens"):
    make_queue().submit(
      request(settings=sampling.SamplingSettings(**settings)), Client()
    )


def test_tokens_outside_the_vocabulary_are_refused():
  with pytest.raises(ValueError, match=r"in \[0, 8\)"):
    make_queue(vocab_size=8).submit(request(), Client())


def test_a_stop_string_ends_a_choice_at_the_token_that_completes_it():
  plain, _, _, _ = alone(request())
  text = tokenizer_lib.character_level().decode(plain)
  stop = text[5:8]
  queue, scheduler = make_queue(), make_scheduler()
  client = Client()
  queue.submit(request(stop_strings=("never", stop)), client)
  drive(queue, scheduler)
  tokens, _, _, reason = client.written()
  assert reason == types.FinishReason.STOP
  assert tokens == plain[: text.index(stop) + 3]
  assert queue.num_written() == scheduler.stats.generated_tokens


def test_times_are_reported_once_a_request():
  times = []
  queue = make_queue(
    on_time=lambda name, seconds: times.append((name, seconds))
  )
  scheduler = make_scheduler()
  for seed in (1, 2):
    queue.submit(request(seed=seed, num_choices=2), Client(2))
  drive(queue, scheduler)
  names = [name for name, _ in times]
  assert sorted(names) == ["first_token"] * 2 + ["latency"] * 2
  assert all(0 < seconds < DEADLINE_S for _, seconds in times)


# -- the loop in its thread ------------------------------------------------


def test_many_threads_are_served_and_some_of_them_go_away():
  queue, scheduler = make_queue(max_waiting=64), make_scheduler()
  wanted = [request(3 + n % 6, seed=n) for n in range(24)]
  clients = [Client() for _ in wanted]

  def submit(numbers):
    for n in numbers:
      handle = queue.submit(wanted[n], clients[n])
      if n % 4 == 3:
        queue.cancel(handle)

  with serving(queue, scheduler):
    threads = [
      threading.Thread(target=submit, args=(range(start, 24, 6),))
      for start in range(6)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(DEADLINE_S)
    for n, client in enumerate(clients):
      assert n % 4 == 3 or client.ended.wait(DEADLINE_S)
  assert queue.is_empty
  assert queue.stats.finished + queue.stats.cancelled == 24
  for n in (0, 9, 22):
    assert clients[n].written() == alone(wanted[n])


def test_an_idle_loop_waits_and_is_woken_by_a_request():
  queue, scheduler = make_queue(), make_scheduler(cls=tiny.SteppedScheduler)
  waits = []
  wait = queue.wait

  def counted(timeout_s):
    waits.append(timeout_s)
    wait(timeout_s)

  queue.wait = counted
  with serving(queue, scheduler):
    client = Client()
    queue.submit(request(), client)
    assert client.ended.wait(DEADLINE_S)
    assert len(waits) <= 2
  assert client.written() == alone(request())
  assert len(waits) <= 3


def test_stopping_the_loop_ends_unfinished_requests_with_an_error():
  queue, scheduler = make_queue(), make_scheduler(cls=tiny.SteppedScheduler)
  running, waiting = Client(4), Client()
  loop = requests_lib.ServeLoop(queue, scheduler)
  scheduler.after_step = lambda num_steps: loop.stop()
  queue.submit(request(num_choices=4), running)
  queue.submit(request(seed=9), waiting)
  loop.run()
  for client in (running, waiting):
    assert client.updates[-1].error == client_request.RequestError.SHUT_DOWN
  assert queue.is_empty
  with pytest.raises(client_request.Draining):
    queue.submit(request(), Client())
