"""The messages that docs/reference/errors.md quotes, against the source."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/errors.md").read_text()
_ROWS = PAGE.partition("## A setting is refused")[2]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", _ROWS, re.MULTILINE)
FILES = [*(ROOT / "jaxrl_async").rglob("*.py"), *(ROOT / "launch").glob("*.py")]
_PLACE = "…"


def texts_of(tree: ast.Module) -> list[str]:
  """Return the strings of a file, with a mark for each replacement field."""
  texts = []
  for node in ast.walk(tree):
    if isinstance(node, ast.JoinedStr):
      texts.append(
        "".join(
          str(part.value) if isinstance(part, ast.Constant) else _PLACE
          for part in node.values
        )
      )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      texts.append(node.value)
  return texts


@pytest.fixture(scope="module")
def source() -> str:
  """Return each string of the package and of the launch scripts on a line."""
  texts = [x for f in FILES for x in texts_of(ast.parse(f.read_text()))]
  return "\n".join(" ".join(text.split()) for text in texts)


def pieces(message: str) -> list[str]:
  """Return the words of a message between its names and numbers."""
  return [
    x.strip(" :;,()?") for x in message.split(_PLACE) if x.strip(" :;?()")
  ]


def test_the_page_has_as_many_messages_as_it_promises():
  assert 15 <= len(MESSAGES) == len(set(MESSAGES)) <= 35


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_source(message, source):
  wanted = [p for p in pieces(message) if len(p) > 3]
  assert sum(map(len, wanted)) > 15, "too little to search for"
  missing = [piece for piece in wanted if piece not in source]
  assert not missing
