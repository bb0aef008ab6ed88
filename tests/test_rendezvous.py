"""Processes that meet: each is let in once, and strangers are not."""

import contextlib
import os
import queue
import socket
import stat
import threading
import time

import numpy as np
import pytest
import waiting

from jaxrl_async.config import sections
from jaxrl_async.processes import rendezvous
from jaxrl_async.processes import world as world_lib

FACTS = {"jax": "1.0", "train.num_steps": 4}
JOIN_S = 30.0


def free_address():
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return f"localhost:{free.getsockname()[1]}"


def invited(address, size, timeout_s=20.0):
  return rendezvous.Invitation(
    size=size,
    address=rendezvous.parse_address(address),
    key=b"",
    timeout_s=timeout_s,
  )


def meeting(processes, address=None, timeout_s=20.0):
  """Lets threads (rank, size, facts, shared) meet; gives worlds or errors."""
  address = address or free_address()
  results = [None] * len(processes)

  def run(i):
    rank, size, facts, shared = processes[i]
    if not isinstance(shared, dict):
      shared = {"workdir": shared}
    try:
      results[i] = rendezvous.meet(
        rank, invited(address, size, timeout_s), shared, facts
      )
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
  shared = {"workdir": tmp_path / "workdir", "transfer.directory": tmp_path}
  worlds = meeting([(rank, 3, FACTS, shared) for rank in range(3)])
  leader, *followers = worlds
  assert leader.leads and leader.is_one_host and followers[0].size == 3
  assert len({world.service for world in worlds}) == 1
  assert [*tmp_path.iterdir()] == [shared["workdir"]]
  assert not [*shared["workdir"].iterdir()]
  values = [np.arange(5, dtype=np.int32), np.ones(3, np.int32)]
  parts = [{"rank": rank, "x": values[:rank]} for rank in range(3)]
  leader.tell("batch", parts, step=6)
  leader.tell("step", step=7)
  for rank, follower in enumerate(followers, start=1):
    got = follower.follow(lambda name, found: {**found, "seen": name})
    command, found = next(got)
    assert (command, found["seen"]) == ("batch", "batch")
    assert (found["rank"], found["step"]) == (rank, 6)
    for here, there in zip(found["x"], values[:rank], strict=True):
      np.testing.assert_array_equal(here, there)
    assert next(got) == ("step", {"step": 7, "seen": "step"})
    if rank == 2:
      leader.close()
      assert list(got) == []
  assert not ends and len(worlds) == 3


def test_what_all_have_is_not_sent(tmp_path, ends):
  leader, follower = meeting([(rank, 2, FACTS, tmp_path) for rank in range(2)])
  leader.common, follower.common = {"it": threading.Lock()}, {"it": "mine"}
  leader.tell("use", it=leader.common["it"])
  assert next(follower.follow()) == ("use", {"it": "mine"})
  close([leader])
  assert not ends


def test_a_follower_may_report(tmp_path, ends):
  leader, follower = meeting([(rank, 2, FACTS, tmp_path) for rank in range(2)])
  reported = queue.SimpleQueue()
  leader.lead(lambda *report: reported.put(report))
  follower.report(world_lib.STOP, number=3)
  assert reported.get(timeout=JOIN_S) == (world_lib.STOP, {"number": 3})
  close([leader])
  assert not ends


@pytest.mark.parametrize("code", [1, 130])
def test_a_failure_of_process_0_ends_the_others(
  tmp_path, code, ends, monkeypatch
):
  monkeypatch.setattr(world_lib, "_LEAVE_S", 0.2)
  leader, follower = meeting([(rank, 2, FACTS, tmp_path) for rank in range(2)])
  leader.close("no more disk", code)
  waiting.until(lambda: ends)
  line = "process 0 of the trainer: no more disk" if code == 1 else ""
  assert ends == [(line, code)]
  del follower


def test_a_failure_of_a_follower_ends_process_0(tmp_path, ends, monkeypatch):
  monkeypatch.setattr(world_lib, "_GRACE_S", 0.01)
  leader, follower = meeting([(rank, 2, FACTS, tmp_path) for rank in range(2)])
  cleaned = []
  leader.lead(lambda name, arguments: None, cleaned.append)
  follower.close("no more memory")
  waiting.until(lambda: ends)
  assert ends[0] == ("process 1 of the trainer: no more memory", 75)
  assert cleaned == ["no more memory"] and leader.lost.is_set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_gone_is_noticed(rank, tmp_path, ends):
  worlds = meeting([(i, 2, FACTS, tmp_path) for i in range(2)])
  gone = worlds[rank]
  gone._leaving.set()
  for connection in gone._connections.values():
    with socket.socket(fileno=os.dup(connection.fileno())) as used:
      used.shutdown(socket.SHUT_RDWR)
  waiting.until(lambda: ends)
  assert ends == [(f"process {rank} of the trainer has ended", 75)]


# -- what does not fit together -----------------------------------------------


@pytest.mark.parametrize(
  ("name", "value"), [("jax", "1.1"), ("train.num_steps", 5), ("new", 1)]
)
def test_what_differs_is_named(name, value, tmp_path):
  other = FACTS | {name: value}
  line = refused([(0, 2, FACTS, tmp_path), (1, 2, other, tmp_path)])
  assert line.startswith(f"{name}: process 1 on ")
  assert f"has {value!r}" in line and "they have to be the same" in line


def test_processes_that_are_missing_are_named(tmp_path):
  line = refused(
    [(0, 4, FACTS, tmp_path), (2, 4, FACTS, tmp_path)], timeout_s=2.0
  )
  # A client of another program may have come to the port, which is told too.
  assert line.startswith(
    "cluster.trainer_processes: 2 of 4 processes came within 2 s"
    " (cluster.start_timeout_s); missing: process 1, 3"
  )


def test_a_number_is_given_once(tmp_path):
  start_s = time.monotonic()
  line = refused([(rank, 3, FACTS, tmp_path) for rank in (0, 1, 1)])
  assert line.startswith("process_id: process 1 on ")
  assert "in which it is there already" in line
  assert time.monotonic() - start_s < 10


def test_the_number_of_processes_is_one(tmp_path):
  line = refused([(0, 2, FACTS, tmp_path), (1, 3, FACTS, tmp_path)])
  assert "process 1 on " in line and "of 3 came to a trainer of 2" in line


def test_a_process_0_that_does_not_come_is_an_error(tmp_path):
  line = refused([(1, 2, FACTS, tmp_path)], timeout_s=0.5)
  assert line.startswith("coordinator_address: process 0 did not listen at ")


def test_an_address_in_use_is_an_error(tmp_path):
  with socket.create_server(("localhost", 0)) as taken:
    address = f"localhost:{taken.getsockname()[1]}"
    line = refused([(0, 2, FACTS, tmp_path)], address=address)
  assert line.startswith("coordinator_address: process 0 cannot listen at ")
  assert "use a free port" in line


@pytest.mark.parametrize(
  "address", ["", "host", "host:", "host:0", "host:70000", ":1", "host:1x"]
)
def test_an_address_has_host_and_port(address):
  with pytest.raises(sections.ConfigError, match="is not HOST:PORT"):
    rendezvous.parse_address(address)


@pytest.mark.parametrize("field", ["workdir", "transfer.directory"])
def test_a_directory_that_is_not_shared_is_named(field, tmp_path, monkeypatch):
  monkeypatch.setattr(rendezvous, "_SHARED_S", 0.5)
  here = {
    "workdir": tmp_path / "workdir",
    "transfer.directory": tmp_path / "versions",
  }
  there = here | {field: tmp_path / "other"}
  there[field].mkdir()
  leader, follower = meeting(
    [(0, 2, FACTS, here), (1, 2, FACTS, there)], timeout_s=3.0
  )
  assert follower.startswith(f"{field}: process 0 at localhost:")
  assert f" has left no key in {there[field]} as " in follower
  assert "missing: process 1; " in leader
  assert leader.endswith(" callers did not know the key in the workdir")
  assert not any([*path.iterdir()] for path in here.values())


def test_only_this_user_can_read_the_key_and_it_does_not_stay(tmp_path):
  workdir = tmp_path / "workdir"
  directories = {"workdir": workdir, "transfer.directory": tmp_path}
  paths = rendezvous._places_of_key(directories).values()
  with rendezvous.key_for_others(directories) as key:
    assert b"".join(path.read_bytes() for path in paths) == key
    assert len(key) == 64
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    with rendezvous.key_for_others(directories) as other:  # of the next start
      assert other != key
  assert not list(workdir.iterdir())
  # Other runs use the same directory for their versions.
  theirs = {"workdir": tmp_path / "another", "transfer.directory": tmp_path}
  assert not {*paths} & {*rendezvous._places_of_key(theirs).values()}


def test_the_key_of_an_earlier_start_is_not_taken_for_long(tmp_path):
  (path,) = rendezvous._places_of_key({"workdir": tmp_path}).values()
  path.write_bytes(b"of a start that was killed")
  close(meeting([(rank, 2, FACTS, tmp_path) for rank in range(2)]))
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


# -- strangers ----------------------------------------------------------------

KEY = b"k" * 32


class Door:
  """Process 0 while it waits for process 1; a context manager."""

  def __init__(self):
    self.listener = rendezvous.listen(("127.0.0.1", 0))
    self.address = self.listener.getsockname()
    self.invitation = rendezvous.Invitation(
      size=2, address=self.address, key=KEY, timeout_s=JOIN_S
    )
    self.worlds = []
    self.thread = threading.Thread(
      target=lambda: self.worlds.append(
        rendezvous.gather(self.listener, self.invitation, FACTS)
      )
    )

  def __enter__(self):
    self.thread.start()
    return self

  def __exit__(self, *_):
    """Process 1 is let in, whatever has come before."""
    self.worlds.append(rendezvous.join(self.invitation, 1, FACTS))
    self.thread.join(JOIN_S)
    assert not self.thread.is_alive()
    close(sorted(self.worlds, key=lambda world: world.rank))

  def knock(self):
    return socket.create_connection(self.address, timeout=JOIN_S)


def is_closed(connection):
  """Whether the other end closes; what it has sent before is left out."""
  connection.settimeout(JOIN_S)
  try:
    while connection.recv(1024):
      pass
  except ConnectionError:
    pass
  connection.close()
  return True


@pytest.mark.parametrize("key", [b"", KEY[:-1], b"x" * 32])
def test_who_knows_another_key_is_not_let_in(key, ends):
  with Door() as door:
    with pytest.raises(rendezvous.StrangerError):
      rendezvous.recognised(door.knock(), key, listens=False)
    assert door.thread.is_alive()
  assert not ends


@pytest.mark.parametrize("said", [b"", b"\0" * 256, b"#WELCOME#"])
def test_who_listens_has_to_know_the_key_too(said, monkeypatch):
  monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.5)
  with socket.create_server(("127.0.0.1", 0)) as listener:
    here = socket.create_connection(listener.getsockname())
    there, _ = listener.accept()
  with there:
    for part in (b"#CHALLENGE#" + bytes(20), said):
      there.sendall(len(part).to_bytes(4, "big") + part)
    with pytest.raises(rendezvous.StrangerError, match="does not know the key"):
      rendezvous.recognised(here, KEY, listens=False)


@pytest.mark.parametrize(
  "said", [b"", b"x", bytes(64), b"GET / HTTP/1.1\r\n\r\n" * 9999]
)
def test_a_stranger_is_refused_whatever_it_says(said, ends):
  with Door() as door:
    stranger = door.knock()
    # It may be refused before it has said all.
    with contextlib.suppress(OSError):
      stranger.sendall(said)
      stranger.shutdown(socket.SHUT_WR)
    assert is_closed(stranger) and door.thread.is_alive()
  assert not ends


def test_a_slow_caller_holds_up_nobody(ends, monkeypatch):
  monkeypatch.setattr(rendezvous, "_PATIENCE_S", 3 * JOIN_S)
  with Door() as door:
    slow = [door.knock() for _ in range(50)]
  for connection in slow:
    connection.close()
  assert not ends


def test_who_says_a_little_now_and_then_has_no_more_time(ends, monkeypatch):
  monkeypatch.setattr(rendezvous, "_PATIENCE_S", 1.0)
  with Door() as door:
    slow = door.knock()
    start_s = time.monotonic()
    with contextlib.suppress(ConnectionError):
      slow.sendall(b"\0\0\0\x64")  # a message of 100 bytes
      for _ in range(60):
        slow.sendall(b"x")
        time.sleep(0.1)
    assert time.monotonic() - start_s < 5.0
    assert is_closed(slow)
  assert not ends


def test_further_callers_wait_until_others_have_left(ends, monkeypatch):
  monkeypatch.setattr(rendezvous, "_PATIENCE_S", 1.0)
  monkeypatch.setattr(rendezvous, "_MOST_CALLERS", 2)
  with Door() as door:
    callers = [door.knock() for _ in range(3)]
  assert all(map(is_closed, callers))
  assert not ends


def test_the_time_is_up_when_only_strangers_come():
  with rendezvous.listen(("127.0.0.1", 0)) as listener:
    address = listener.getsockname()
    with socket.create_connection(address):
      invitation = rendezvous.Invitation(
        size=2, address=address, key=KEY, timeout_s=0.3
      )
      with pytest.raises(sections.ConfigError, match="missing: process 1"):
        rendezvous.gather(listener, invitation, FACTS)
