"""The messages that docs/reference/errors.md quotes, against the source."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/errors.md").read_text()
_ROWS = PAGE.partition("## A setting is refused")[2]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", _ROWS, re.MULTILINE)
_BETWEEN_LITERALS = re.compile(r'"\s+f?"')


@pytest.fixture(scope="module")
def source() -> str:
  """Return package and launch scripts, with texts of several lines joined."""
  files = [*(ROOT / "jaxrl_async").rglob("*.py")]
  files += (ROOT / "launch").glob("*.py")
  return "\n".join(_BETWEEN_LITERALS.sub("", f.read_text()) for f in files)


def test_the_page_has_as_many_messages_as_a_reader_can_look_through():
  assert 15 <= len(MESSAGES) == len(set(MESSAGES)) <= 35


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_source(message, source):
  parts = [x.strip(" :;,()?") for x in message.split("…")]  # names and numbers
  assert sum(map(len, parts)) > 15, "too little to search for"
  assert not [part for part in parts if part not in source]
