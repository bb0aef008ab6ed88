"""Where a server may listen is checked before there is one."""

import socket

import pytest

from jaxrl_async.config import sections
from jaxrl_async.serving import addresses


def test_without_a_key_only_loopback_is_served():
  for host in ("127.0.0.1", "::1", "localhost", "127.3.4.5"):
    addresses.check_key(host, None)
  for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
    addresses.check_key(host, "key")
    with pytest.raises(sections.ConfigError, match="^api_key_file: "):
      addresses.check_key(host, None)


@pytest.mark.parametrize("host", ["", "x" * 5_000, "a..b", "nu\0l", "ü" * 70])
def test_nonsense_is_no_host(host):
  with pytest.raises(sections.ConfigError, match="^host: ") as caught:
    addresses.check_host(host)
  assert len(str(caught.value)) < 300


def test_a_port_that_is_taken_is_told_and_a_free_one_stays_free():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(sections.ConfigError, match=f"^grpc_port: .*:{port} "):
      addresses.check_can_bind("grpc_port", "127.0.0.1", port)
  addresses.check_host("127.0.0.1")
  addresses.check_can_bind("port", "127.0.0.1", port)
  with socket.create_server(("127.0.0.1", port)):
    pass


def test_an_address_of_another_machine_cannot_be_bound():
  with pytest.raises(sections.ConfigError, match="^port: 192.0.2.1:1 "):
    addresses.check_can_bind("port", "192.0.2.1", 1)
