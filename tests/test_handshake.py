"""Who knows the key is let in, whatever strangers do meanwhile."""

import contextlib
import socket
import threading
import time

import pytest
import waiting

from jaxrl_async.coordination import handshake

KEY = b"k" * 32
DEADLINE_S = 30.0


@contextlib.contextmanager
def door(key=KEY):
  """A door that collects whom it lets in, and the address to knock at."""
  arrived = []
  with socket.create_server(("127.0.0.1", 0)) as listener:
    opened = handshake.Door(listener, key)
    arrivals = opened.arrivals(DEADLINE_S)
    closing = threading.Event()

    def wait():
      for connection in arrivals:
        if closing.is_set():
          connection.close()
          return
        arrived.append(connection)

    thread = threading.Thread(target=wait)
    thread.start()
    yield opened, listener.getsockname(), arrived
    closing.set()
    enter(listener.getsockname(), key).close()
    thread.join(DEADLINE_S)
    arrivals.close()
  for connection in arrived:
    connection.close()


def enter(address, key=KEY):
  connection = socket.create_connection(address, timeout=DEADLINE_S)
  try:
    handshake.join(connection, key)
  except OSError:
    connection.close()
    raise
  return connection


def is_closed(connection):
  """Whether the other end closes; what it has sent before is left out."""
  connection.settimeout(DEADLINE_S)
  try:
    while connection.recv(1024):
      pass
  except ConnectionError:
    pass
  connection.close()
  return True


def test_who_knows_the_key_is_let_in_and_can_talk():
  with door() as (opened, address, arrived):
    ours = [enter(address) for _ in range(3)]
    waiting.until(lambda: len(arrived) == 3)
    for number, connection in enumerate(ours):
      connection.sendall(b"%d" % number)
    assert [theirs.recv(1) for theirs in arrived] == [b"0", b"1", b"2"]
    assert all(theirs.gettimeout() is None for theirs in arrived)
    assert not opened.num_refused
    for connection in ours:
      connection.close()


@pytest.mark.parametrize("key", [b"", KEY[:-1], KEY + b"k", b"x" * 32])
def test_who_knows_another_key_is_not(key):
  with door() as (opened, address, arrived):
    with pytest.raises(handshake.StrangerError):
      enter(address, key)
    assert opened.num_refused == 1 and not arrived


def test_who_listens_has_to_know_the_key_too():
  with socket.create_server(("127.0.0.1", 0)) as listener:

    def pretend():
      with listener.accept()[0] as connection:
        connection.sendall(bytes(32))
        told = connection.recv(64)
        connection.sendall(told[32:])  # the other one's own proof

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(handshake.StrangerError, match="does not know the key"):
      enter(listener.getsockname())
    thread.join(DEADLINE_S)


@pytest.mark.parametrize(
  "said", [b"", b"x", b"x" * 63, b"x" * 64, b"GET / HTTP/1.1\r\n\r\n" * 9999]
)
def test_what_a_stranger_says_is_not_read_beyond_64_bytes(said):
  with door() as (_, address, arrived):
    stranger = socket.create_connection(address)
    # It may be refused before it has said all.
    with contextlib.suppress(OSError):
      stranger.sendall(said)
      stranger.shutdown(socket.SHUT_WR)
    assert is_closed(stranger) and not arrived


def test_a_slow_caller_holds_up_nobody(monkeypatch):
  monkeypatch.setattr(handshake, "_PATIENCE_S", 1e6)
  with door() as (opened, address, arrived):
    slow = [socket.create_connection(address) for _ in range(50)]
    for connection in slow:
      connection.sendall(b"x")
    enter(address).close()
    waiting.until(lambda: arrived)
    assert not opened.num_refused
  assert all(map(is_closed, slow))


def test_who_says_a_little_now_and_then_has_no_more_time(monkeypatch):
  monkeypatch.setattr(handshake, "_PATIENCE_S", 1.0)
  with door() as (opened, address, arrived):
    slow = socket.create_connection(address)
    num_said = 0
    while not opened.num_refused:
      with contextlib.suppress(ConnectionError):
        slow.sendall(b"x")
      num_said += 1
      time.sleep(0.1)
    assert num_said < 64  # after which it would have been refused anyway
    assert is_closed(slow) and not arrived


def test_further_callers_take_the_places_of_the_first(monkeypatch):
  monkeypatch.setattr(handshake, "_MOST_CALLERS", 3)
  with door() as (opened, address, arrived):
    callers = [socket.create_connection(address) for _ in range(5)]
    assert is_closed(callers[0]) and is_closed(callers[1])
    enter(address).close()
    waiting.until(lambda: arrived)
    assert opened.num_refused == 3
    for caller in callers[2:]:
      caller.close()


def test_the_time_is_up_when_nobody_comes(monkeypatch):
  monkeypatch.setattr(handshake, "_LOOK_S", 0.05)
  with socket.create_server(("127.0.0.1", 0)) as listener:
    opened = handshake.Door(listener, KEY)
    silent = socket.create_connection(listener.getsockname())
    assert list(opened.arrivals(0.3)) == [] and is_closed(silent)
