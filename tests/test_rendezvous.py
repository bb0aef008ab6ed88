"""Processes that meet: each is let in once, and strangers are not."""

import contextlib
import functools
import gc
import re
import socket
import stat
import threading
import time

import numpy as np
import pytest
import waiting

from jaxrl_async.config import sections
from jaxrl_async.coordination import rendezvous
from jaxrl_async.coordination import wire
from jaxrl_async.coordination import world as world_lib

FACTS = {"jax": "1.0", "train.num_steps": 4}
JOIN_S = 30.0


def free_address():
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return f"localhost:{free.getsockname()[1]}"


def meeting(processes, address=None, timeout_s=20.0):
  """Lets threads (rank, size, facts, shared) meet; gives results or errors."""
  address = address or free_address()
  results = [None] * len(processes)

  def run(i):
    rank, size, facts, shared = processes[i]
    place = rendezvous.Place(
      rank=rank, size=size, address=address, timeout_s=timeout_s
    )
    try:
      results[i] = rendezvous.meet(place, facts, shared, lambda: "service:1")
    except sections.ConfigError as error:
      results[i] = str(error)

  threads = [
    threading.Thread(target=run, args=(i,), name=f"process-{i}")
    for i in range(len(processes))
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(JOIN_S)
    assert not thread.is_alive()
  return results


def refused(processes, **more):
  """The one line that all of these processes end with."""
  found = set(meeting(processes, **more))
  assert len(found) == 1, found
  (line,) = found
  assert isinstance(line, str) and "\n" not in line
  return line


@pytest.fixture
def ends(monkeypatch):
  """The lines with which processes would have ended."""
  lines = []
  monkeypatch.setattr(
    world_lib, "end_process", lambda line, code=75: lines.append((line, code))
  )
  return lines


def close(worlds):
  threads = [threading.Thread(target=world.close) for world in worlds]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(JOIN_S)


def test_processes_meet_and_are_told_what_to_do(tmp_path, ends):
  shared = [tmp_path / "workdir", tmp_path / "versions"]
  results = meeting([(rank, 3, FACTS, shared) for rank in range(3)])
  assert [service for _, service in results] == ["service:1"] * 3
  leader, *followers = worlds = [world for world, _ in results]
  assert leader.leads and leader.is_one_host and followers[0].size == 3
  assert not [*shared[0].iterdir(), *shared[1].iterdir()]
  values = [np.arange(5, dtype=np.int32), np.ones(3, np.int32)]
  parts = [({"rank": rank}, {"x": values[:rank]}) for rank in range(1, 3)]
  leader.tell("batch", [({}, {}), *parts])
  leader.tell("step", step=7)
  for rank, follower in enumerate(followers, start=1):
    got = follower.follow(lambda message, arrays: arrays["x"])
    message, made = next(got)
    assert message == {"command": "batch", "rank": rank}
    np.testing.assert_array_equal(made, np.concatenate(values[:rank]))
    assert next(got) == ({"command": "step", "step": 7}, None)
    if rank == 2:
      leader.close()
      assert list(got) == []
  assert not ends and len(worlds) == 3


def test_a_follower_may_ask_to_stop(tmp_path, ends):
  results = meeting([(rank, 2, FACTS, [tmp_path]) for rank in range(2)])
  (leader, _), (follower, _) = results
  asked = threading.Event()
  leader.lead(asked.set)
  follower.ask_to_stop()
  assert asked.wait(JOIN_S)
  close([leader])
  assert not ends


@pytest.mark.parametrize("code", [1, 130])
def test_a_failure_of_process_0_ends_the_others(
  tmp_path, code, ends, monkeypatch
):
  monkeypatch.setattr(world_lib, "_LEAVE_S", 0.2)
  results = meeting([(rank, 2, FACTS, [tmp_path]) for rank in range(2)])
  (leader, _), (follower, _) = results
  leader.close("no more disk", code)
  waiting.until(lambda: ends)
  line = "process 0 of the trainer: no more disk" if code == 1 else ""
  assert ends == [(line, code)]
  del follower


def test_a_failure_of_a_follower_ends_process_0(tmp_path, ends, monkeypatch):
  monkeypatch.setattr(world_lib, "_GRACE_S", 0.01)
  results = meeting([(rank, 2, FACTS, [tmp_path]) for rank in range(2)])
  (leader, _), (follower, _) = results
  cleaned = []
  leader.lead(lambda: None, lambda: cleaned.append(True))
  follower.close("no more memory")
  waiting.until(lambda: ends)
  assert ends[0] == ("process 1 of the trainer: no more memory", 75)
  assert cleaned and leader.lost.is_set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_gone_is_noticed(rank, tmp_path, ends):
  results = meeting([(i, 2, FACTS, [tmp_path]) for i in range(2)])
  gone = results[rank][0]
  gone._leaving.set()
  for connection in gone._connections.values():
    connection.shutdown(socket.SHUT_RDWR)
  waiting.until(lambda: ends)
  assert ends == [(f"process {rank} of the trainer has ended", 75)]


# -- what does not fit together -----------------------------------------------


@pytest.mark.parametrize(
  ("name", "value"), [("jax", "1.1"), ("train.num_steps", 5), ("new", 1)]
)
def test_what_differs_is_named(name, value, tmp_path):
  other = FACTS | {name: value}
  line = refused([(0, 2, FACTS, [tmp_path]), (1, 2, other, [tmp_path])])
  assert line.startswith(f"{name}: process 1 on ")
  assert f"has {value!r}" in line and "they have to be the same" in line


def test_processes_that_are_missing_are_named(tmp_path):
  line = refused(
    [(0, 4, FACTS, [tmp_path]), (2, 4, FACTS, [tmp_path])], timeout_s=2.0
  )
  # A client of another program may have come to the port, which is told too.
  assert line.startswith(
    "cluster.trainer_processes: 2 of 4 processes came within 2 s"
    " (cluster.start_timeout_s); missing: process 1, 3"
  )


def test_a_number_is_given_once(tmp_path):
  start_s = time.monotonic()
  line = refused([(rank, 3, FACTS, [tmp_path]) for rank in (0, 1, 1)])
  assert line.startswith("process_id: process 1 on ")
  assert "in which it is there already" in line
  assert time.monotonic() - start_s < 10


def test_the_number_of_processes_is_one(tmp_path):
  line = refused([(0, 2, FACTS, [tmp_path]), (1, 3, FACTS, [tmp_path])])
  assert "process 1 on " in line and "of 3 came to a trainer of 2" in line


def test_a_process_0_that_does_not_come_is_an_error(tmp_path):
  line = refused([(1, 2, FACTS, [tmp_path])], timeout_s=0.5)
  assert line.startswith("coordinator_address: process 0 did not listen at ")


def test_an_address_in_use_is_an_error(tmp_path):
  with socket.create_server(("localhost", 0)) as taken:
    address = f"localhost:{taken.getsockname()[1]}"
    line = refused([(0, 2, FACTS, [tmp_path])], address=address)
  assert line.startswith("coordinator_address: process 0 cannot listen at ")
  assert "use a free port" in line


@pytest.mark.parametrize(
  "address", ["", "host", "host:", "host:0", "host:70000", ":1", "host:1x"]
)
def test_an_address_has_host_and_port(address):
  with pytest.raises(sections.ConfigError, match="is not HOST:PORT"):
    rendezvous.parse_address(address)


@pytest.mark.parametrize(("ahead_s", "is_refused"), [(7.0, True), (4.0, False)])
def test_clocks_that_are_apart_are_named(
  ahead_s, is_refused, tmp_path, monkeypatch
):
  now = time.time

  def skewed():
    name = threading.current_thread().name
    return now() + (ahead_s if name == "process-1" else 0.0)

  monkeypatch.setattr(rendezvous.time, "time", skewed)
  processes = [(rank, 2, FACTS, [tmp_path]) for rank in range(2)]
  if is_refused:
    line = refused(processes)
    assert "the clock of process 1 on " in line and re.search(
      r"is \+7\.\d s from", line
    )
  else:
    close([world for world, _ in meeting(processes)])


def test_a_directory_that_is_not_shared_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(rendezvous, "_SHARED_S", 0.5)
  here = [tmp_path / "workdir", tmp_path / "versions"]
  # What lies at this path on another host.
  there = [here[0], tmp_path / "other"]
  line = refused([(0, 2, FACTS, here), (1, 2, FACTS, there)])
  assert line.startswith(
    f"transfer.directory: {here[1]} is not the same directory"
  )
  assert not [*here[0].iterdir(), *here[1].iterdir()]


def test_a_workdir_that_is_not_shared_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(rendezvous, "_SHARED_S", 0.5)
  here, there = tmp_path / "workdir", tmp_path / "other"
  there.mkdir()
  leader, follower = meeting(
    [(0, 2, FACTS, [here]), (1, 2, FACTS, [there])], timeout_s=3.0
  )
  assert follower.startswith("workdir: process 0 at localhost:")
  assert f" has left no key in {there} as " in follower
  assert "missing: process 1; " in leader
  assert leader.endswith(" callers did not know the key in the workdir")
  assert not list(here.iterdir())


def test_only_this_user_can_read_the_key_and_it_does_not_stay(tmp_path):
  workdir = tmp_path / "workdir"
  with rendezvous._key_for_others(workdir) as key:
    (path,) = workdir.iterdir()
    assert path.read_bytes() == key and len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with rendezvous._key_for_others(workdir) as other:  # of the next start
      assert other != key and path.read_bytes() == other
  assert not list(workdir.iterdir())


def test_the_key_of_an_earlier_start_is_not_taken_for_long(tmp_path):
  address = free_address()
  (tmp_path / rendezvous._KEY).write_bytes(b"of a start that was killed")
  results = meeting(
    [(rank, 2, FACTS, [tmp_path]) for rank in range(2)], address=address
  )
  close([world for world, _ in results])
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "host, resolved, is_loopback, bound",
  [
    ("127.0.0.2", None, True, "127.0.0.2"),
    ("localhost", None, True, "localhost"),
    # Its own address, as far as `_is_loopback` says.
    ("trainer-0", "127.0.0.1", False, "127.0.0.1"),
    # A host that knows itself by another address than others do.
    ("trainer-0", "127.0.1.1", True, ""),
    # Of another host, or of a service that leads here.
    ("192.0.2.77", "192.0.2.77", False, ""),
  ],
)
def test_process_0_listens_only_where_it_was_told(
  host, resolved, is_loopback, bound, monkeypatch
):
  monkeypatch.setattr(rendezvous, "_is_loopback", lambda _: is_loopback)
  monkeypatch.setattr(
    socket,
    "getaddrinfo",
    lambda *_, **__: [(socket.AF_INET, 1, 6, "", (resolved, 0))],
  )
  assert rendezvous.bind_host(host) == bound


@pytest.mark.parametrize(
  "hello, clock",
  [
    ({"rank": "1"}, {"time_s": 0.0}),
    ({"facts": None}, {"time_s": 0.0}),
    ({}, {}),
  ],
)
def test_who_says_something_else_than_a_process_is_sent_away(
  tmp_path, ends, hello, clock
):
  address = free_address()
  results = []
  leader = threading.Thread(
    target=lambda: results.extend(
      meeting([(0, 2, FACTS, [tmp_path])], address=address)
    )
  )
  leader.start()
  connected = []
  waiting.until(lambda: entered(address, tmp_path, connected))
  with connected[0] as stranger:
    whole = {"hello": "jaxrl_async", "rank": 1, "size": 2, "host": "x"}
    wire.send(stranger, whole | {"facts": {}} | hello)
    with contextlib.suppress(OSError):
      if wire.receive(stranger) is not None:
        wire.send(stranger, clock)
  ((follower, _),) = meeting([(1, 2, FACTS, [tmp_path])], address=address)
  leader.join(JOIN_S)
  results[0][0].close()
  assert follower.size == 2 and not ends


def entered(address, workdir, connected):
  """Whether process 0 has let us in, as somebody who knows the key."""
  try:
    connection = socket.create_connection(
      rendezvous.parse_address(address), timeout=5
    )
  except OSError:
    return False
  if rendezvous._knows_the_key(connection, workdir):
    connected.append(connection)
    return True
  connection.close()
  return False


def headed(content):
  """A message with any content, as `wire` frames it."""
  return len(content).to_bytes(8) + content


# What a stranger may say: each ended process 0, or took its time or memory.
HOSTILE = [
  b"GET / HTTP/1.1\r\n\r\n",
  b"\0" * 7 + b"\2{}",
  b"\xff" * 8,
  headed(b'{"message": {}, "arrays": [["x", "f8", 9000000000000000]]}'),
  headed(b"[" * 100_000),
  headed(b'{"message": {}, "arrays": [["x", "f8", Infinity]]}'),
  headed(b'{"message": {}, "arrays": [["x", "f8", -1]]}'),
  headed(b'{"message": {}, "arrays": [["x", "(999999999,)f8", 9999]]}'),
  headed(b'{"message": {}, "arrays": [["x", [["a", "O"]], 1]]}'),
  headed(b'{"message": {}, "arrays": [["x", "f8", ' + b"9" * 4300 + b"]]}"),
  headed(b'{"message": {}, "arrays": 3}'),
  headed(b'{"message": [[1, 2]], "arrays": []}'),
  b"",
]


@pytest.mark.parametrize("has_said_all", [True, False])
def test_a_stranger_at_the_address_is_sent_away(tmp_path, ends, has_said_all):
  address = free_address()
  host, port = rendezvous.parse_address(address)
  strangers = []

  def knock():
    for words in HOSTILE:
      waiting.until(functools.partial(tried, words))

  def tried(words):
    try:
      stranger = socket.create_connection((host, port), timeout=5)
    except OSError:
      return False
    strangers.append(stranger)
    with contextlib.suppress(OSError):  # it is closed already
      stranger.sendall(words)
      if has_said_all:
        stranger.shutdown(socket.SHUT_WR)
    return True

  results = []
  leader = threading.Thread(
    target=lambda: results.extend(
      meeting([(0, 2, FACTS, [tmp_path])], address=address)
    )
  )
  leader.start()
  start_s = time.monotonic()
  knock()
  ((follower, _),) = meeting([(1, 2, FACTS, [tmp_path])], address=address)
  leader.join(JOIN_S)
  results[0][0].close()
  assert follower.size == 2 and not ends
  # Nobody waits for those who say nothing more, ten seconds for each.
  assert time.monotonic() - start_s < 60.0
  for stranger in strangers:
    stranger.close()


# -- messages -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["i4", "f4", "f8", "?", "i8"])
def test_arrays_arrive_as_they_were_sent(dtype):
  rng = np.random.default_rng(0)
  sizes = [0, 3, 400_000, 1, 2, 700_000]
  pieces = [rng.integers(0, 2, size).astype(dtype) for size in sizes]
  here, there = socket.socketpair()
  sender = threading.Thread(
    target=wire.send, args=(here, {"a": [1]}, {"x": pieces, "y": pieces[:1]})
  )
  sender.start()
  message, arrays = wire.receive(there)
  sender.join(JOIN_S)
  assert message == {"a": [1]} and arrays["y"].shape == (0,)
  assert arrays["x"].dtype == np.dtype(dtype)
  np.testing.assert_array_equal(arrays["x"], np.concatenate(pieces))
  here.close()
  assert wire.receive(there) is None
  there.close()


@pytest.mark.parametrize(
  "data",
  [
    *(b"\0", b"\xff" * 8, b"\0" * 7 + b"\5{", b"\0" * 7 + b"\2[]"),
    *(words for words in HOSTILE if words),
  ],
  ids=lambda data: repr(data[:60]),
)
def test_what_is_no_message_is_an_error(data):
  here, there = socket.socketpair()
  here.sendall(data)
  here.close()
  with pytest.raises(wire.WireError):
    wire.receive(there)
  there.close()


@pytest.mark.parametrize(
  "message, pieces",
  [({"a": "x" * 2000}, 0), ({}, 250), ({"a": "x" * 500}, 100)],
)
def test_a_message_has_a_largest_size(message, pieces):
  sent = {"x": [np.zeros(pieces)]}
  for most_bytes in (3000, 1000):
    here, there = socket.socketpair()
    wire.send(here, message, sent)
    if most_bytes == 3000:
      assert wire.receive(there, most_bytes=most_bytes)
    else:
      with pytest.raises(wire.WireError):
        wire.receive(there, most_bytes=most_bytes)
    here.close()
    there.close()


# (what a header contains that many times, and what is around it)
PARTS = {
  "lists": ("[]", '{"message": {"a": [%s]}, "arrays": []}'),
  "names": ('"%d": 0', '{"message": {%s}, "arrays": []}'),
  "arrays": ('["%d", "<f4", 0]', '{"message": {}, "arrays": [%s]}'),
}


@pytest.mark.parametrize("part, around", PARTS.values(), ids=PARTS)
def test_the_time_for_a_message_grows_with_its_size_only(part, around):
  def seconds(count):
    """The processor time for a message with so many parts."""
    parts = (part % i if "%" in part else part for i in range(count))
    sent, times_s = headed((around % ",".join(parts)).encode()), []
    for _ in range(3):
      here, there = socket.socketpair()
      thread = threading.Thread(target=here.sendall, args=(sent,))
      thread.start()
      start_s = time.thread_time()
      assert wire.receive(there)
      times_s.append(time.thread_time() - start_s)
      thread.join(JOIN_S)
      here.close()
      there.close()
    return min(times_s)

  gc.disable()  # it would look through what all tests hold
  try:
    times_s = [seconds(4_000 * 4**i) for i in range(4)]
  finally:
    gc.enable()
  # 64 times as much. A cost that is quadratic would be 4,096 times as high;
  # memory that no longer fits into the caches costs some of the rest.
  assert times_s[-1] < 1_000 * times_s[0], times_s


def test_objects_are_not_received():
  here, there = socket.socketpair()
  wire.send(here, {}, {"x": [np.zeros(0, object)]})
  here.close()
  with pytest.raises(wire.WireError, match="O'"):
    wire.receive(there)
  there.close()
