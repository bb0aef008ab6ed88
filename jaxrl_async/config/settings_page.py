"""The page docs/reference/settings.md, made from the settings themselves.

uv run python -m jaxrl_async.config.settings_page > docs/reference/settings.md
"""

import ast
from collections.abc import Iterator
import dataclasses
import enum
import functools
import inspect
import itertools
from typing import Any

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections

_HEAD = """# All settings

Made from the source by `python -m jaxrl_async.config.settings_page`; a test
compares the two. A config file sets `config.SECTION.NAME`, and the command line
`--config.SECTION.NAME=VALUE`. "Resumed" says whether a run may go on from a
checkpoint with another value, and why."""


def page() -> str:
  """Return the page, as Markdown."""
  config = sections.Config()
  own = [x for x in fields_lib.walk(config) if "." not in x.path]
  parts = [_HEAD, _table(own)]
  for field in dataclasses.fields(config):
    if dataclasses.is_dataclass(field.type):
      parts += _section(field.name, getattr(config, field.name))
  return "\n\n".join(parts) + "\n"


def _section(path: str, section: Any) -> Iterator[str]:
  """Yield the parts of the page that are about a section."""
  yield f"## {path}"
  yield _words(section)
  found = [x for x in _walk(path) if x.path.rpartition(".")[0] == path]
  if found:
    yield _table(found)
  seen: list[type[enum.Enum]] = []
  for field in found:
    if isinstance(field.value, enum.Enum) and type(field.value) not in seen:
      seen.append(type(field.value))
      name = field.path.rpartition(".")[2]
      yield f"`{name}`: {_words(type(field.value))}"
  for field in found:
    if field.known.entries is not None:
      yield _entries(field)
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      yield from _section(f"{path}.{field.name}", value)


def _walk(path: str) -> list[fields_lib.Field]:
  found = fields_lib.walk(sections.Config())
  return [field for field in found if field.path.startswith(f"{path}.")]


def _entries(field: fields_lib.Field) -> str:
  """Return what the entries of a field of free form have."""
  lines = [f"Each entry of `{field.path}` may have:", ""]
  kind: Any = field.known.entries
  for name, meaning in _meanings(kind).items():
    needed = " (needed)" if name in field.known.needs else ""
    lines.append(f"- `{name}`{needed}: {meaning}")
  return "\n".join(lines)


@functools.cache
def _meanings(of: type) -> dict[str, str]:
  """Return the text under each field of a section."""
  found: dict[str, str] = {}
  for kind in reversed(of.__mro__[:-1]):
    tree: Any = ast.parse(inspect.getsource(kind))
    for field, text in itertools.pairwise(tree.body[0].body):
      if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
        found[ast.unparse(field.target)] = inspect.cleandoc(
          ast.literal_eval(text.value)
        ).replace("\n", " ")
  return found


def _words(of: Any) -> str:
  """Return the docstring of a class, as Markdown."""
  return inspect.getdoc(of if isinstance(of, type) else type(of)) or ""


def _table(found: list[fields_lib.Field]) -> str:
  rows = ["| setting | default | meaning | values | resumed |"]
  rows.append("| --- | --- | --- | --- | --- |")
  for field in found:
    known = field.known
    cells = (
      f"`{field.path}`",
      f"`{_shown(field.value)}`",
      _meanings(type(field.section))[field.path.rpartition(".")[2]],
      _values(field),
      f"yes: {known.free}"
      if known.free
      else f"no: {known.fixed or known.fixed_with_groups}",
    )
    rows.append("| " + " | ".join(x.replace("|", r"\|") for x in cells) + " |")
  return "\n".join(rows)


def _shown(value: Any) -> str:
  if isinstance(value, enum.Enum):
    return value.value
  return repr(value).replace("\n", r"\n").replace("ConfigDict()", "{}")


def _values(field: fields_lib.Field) -> str:
  known, words = field.known, []
  if isinstance(field.value, enum.Enum):
    words.append(", ".join(x.value for x in type(field.value)))
  elif known.choices:
    words.append(", ".join(known.choices))
  elif known.low is not None or known.high is not None:
    words.append(fields_lib.range_of(known))
  elif field.kind is bool:
    words.append("True, False")
  return "; ".join(words)


if __name__ == "__main__":
  print(page(), end="")
