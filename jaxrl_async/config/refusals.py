"""How a wrong setting is refused: in one line that names the field."""

from collections.abc import Collection, Iterable
import difflib
from typing import Any


class ConfigError(ValueError):
  """A setting is wrong; the message is one line that names the field."""


def require(holds: bool, path: str, message: str) -> None:
  """Raise a ConfigError of one line about the field unless `holds` is True."""
  if not holds:
    raise ConfigError(f"{path}: {message}")


_SHOWN = 60  # characters of a value that a message shows


def shown(value: Any) -> str:
  """Return a value as messages show it: on one line, and cut if it is long."""
  if type(value) is int and value.bit_length() > 8 * _SHOWN:
    return f"an integer of {value.bit_length()} bits"
  try:
    text = " ".join(repr(value).split())
  except ValueError:  # a huge integer inside a container
    return f"a {type(value).__name__}"
  if len(text) <= 2 * _SHOWN:
    return text
  return f"{text[:_SHOWN]}... ({len(text)} characters)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """End a message that refuses a name: say what would be right."""
  known = sorted(known)
  close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  if close:
    return f"; did you mean {' or '.join(close)}?"
  shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
  return f"; there is {shown}"


def require_one_of(path: str, value: str, known: Collection[str]) -> None:
  """Raise a ConfigError that lists the known names unless `value` is one."""
  require(
    value in known, path, f"{shown(value)} is not one of {', '.join(known)}"
  )
