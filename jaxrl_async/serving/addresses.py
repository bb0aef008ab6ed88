"""Checks of addresses, made before anything is loaded."""

import ipaddress
import socket

from jaxrl_async.config import sections


def check_key(host: str, api_key: str | None) -> None:
  """Refuse to serve other machines without an API key.

  Raises:
    ConfigError: the address is not loopback and there is no key.
  """
  try:
    is_loopback = ipaddress.ip_address(host).is_loopback
  except ValueError:
    is_loopback = host == "localhost"
  if api_key is None and not is_loopback:
    raise sections.ConfigError(
      f"api_key_file: {host} can be reached from other machines; give a key, in"
      " a file or in JAXRL_API_KEY, or use --host=127.0.0.1"
    )


def check_ports(port: int, grpc_port: int) -> None:
  """Refuse the same port for both servers.

  Raises:
    ConfigError: the ports are equal.
  """
  sections.require(
    not port or port != grpc_port,
    "grpc_port",
    f"{grpc_port} is already the port of the HTTP server; use another one",
  )


def check_host(host: str) -> None:
  """Raise a ConfigError unless the host is an address or can be resolved."""
  try:
    sections.require(host != "", "host", "missing; use --host=127.0.0.1")
    socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError) as error:
    reason = getattr(error, "strerror", None) or "not a host name"
    raise sections.ConfigError(
      f"host: {sections.shown(host)} cannot be found ({reason})"
    ) from error


def bound_socket(host: str, port: int) -> socket.socket:
  """Return a socket bound to an address, which does not listen yet.

  Raises:
    OSError: the address cannot be bound.
  """
  family, kind, protocol, _, address = socket.getaddrinfo(
    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
  )[0]
  # The protocol's number is passed because asyncio sets TCP_NODELAY only if it
  # is given. Without it, each answer on a connection that stays open waits for
  # a delayed ACK.
  bound = socket.socket(family, kind, protocol)
  try:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
  except OSError:
    bound.close()
    raise
  return bound


def check_can_bind(flag: str, host: str, port: int) -> None:
  """Check that a server could listen there now; leave nothing open.

  Args:
    flag: name of the flag that sets the port.
    host: an address or name that `check_host` accepts.
    port: 0 is any free port.

  Raises:
    ConfigError: the address belongs to another machine, or the port is taken.
  """
  try:
    bound_socket(host, port).close()
  except OSError as error:
    raise sections.ConfigError(
      f"{flag}: {host}:{port} cannot be bound ({error.strerror})"
    ) from error
