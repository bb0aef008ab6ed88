"""Tools for the tests of tools, importable in other processes."""

import asyncio
import enum
import time


class Colour(enum.Enum):
  RED = "red"
  BLUE = "blue"


def multiply(a: int, b: int) -> int:
  """Multiply two numbers.

  Args:
    a: the first number
    b: the second number
  """
  return a * b


def fail(reason: str) -> None:
  """Raise an error.

  Args:
    reason: what it says
  """
  raise ValueError(reason)


async def wait(seconds: float) -> dict[str, float]:
  """Wait.

  Args:
    seconds: for so long
  """
  await asyncio.sleep(seconds)
  return {"waited": seconds}


def block(seconds: float) -> str:
  """Wait, and let nothing else happen.

  Args:
    seconds: for so long
  """
  time.sleep(seconds)
  return "done"


def repeat(text: str, times: int = 1) -> str:
  """Repeat a text.

  Args:
    text: to repeat
    times: how often
  """
  return text * times


def paint(
  colour: Colour,
  size: tuple[int, float],
  also: list[Colour | int],
  at: Colour | None = Colour.BLUE,
) -> str:
  """Take what JSON does not have.

  Args:
    colour: the first
    size: width and height
    also: others
    at: where
  """
  return f"{colour!r} {size!r} {also!r} {at!r}"
