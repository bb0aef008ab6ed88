"""A program that renders chat templates in a process of its own.

A template is code that comes with a model, and what it does depends on what
clients send. Nothing inside a process can reliably end its loops or bound its
memory. This file is therefore run as a program, which is killed when a template
takes too long. It imports nothing of the package, so that it starts quickly.

Each line of the input is a request and each line of the output its reply, in
JSON. The first request holds the template.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
from jinja2 import ext
from jinja2 import nodes
from jinja2 import sandbox

_MAX_MEMORY_BYTES = 1 << 30


class _Generation(ext.Extension):
  """Support for `{% generation %}`, which marks what the assistant said.

  The marks are for training and have no effect here.
  """

  tags = {"generation"}

  def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
    """Return the statements inside the block unchanged."""
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
  def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

  def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  def strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[ext.loopcontrols, _Generation],
  )
  environment.filters["tojson"] = tojson
  environment.globals["raise_exception"] = raise_exception
  environment.globals["strftime_now"] = strftime_now
  return environment


def _compile(source: str) -> jinja2.Template:
  try:
    return _environment().from_string(source)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(f"line {error.lineno}: {error}") from error


def _answer(template: jinja2.Template | None, request: Any) -> Any:
  """Return the compiled template, or what it renders.

  Raises:
    ValueError: the template is invalid, or fails for these messages.
  """
  try:
    if template is None:
      return _compile(request["source"])
    return template.render(**request["variables"])
  except (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
  ) as error:
    raise ValueError(str(error)) from error
  except RecursionError as error:
    raise ValueError("it is nested too deeply") from error
  except MemoryError as error:
    raise ValueError("it needs too much memory") from error


def main() -> None:
  """Answer requests until the input ends."""
  # The server handles interrupts, and ends this process when it is done.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # Not supported on every system.
  with contextlib.suppress(ValueError, OSError):
    resource.setrlimit(
      resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES)
    )
  template = None
  for line in sys.stdin:
    request = json.loads(line)
    # The alarm ends a loop even if the server that would kill it is gone.
    signal.alarm(request["alarm_s"])
    try:
      answer = _answer(template, request)
    except ValueError as error:
      reply = {"error": str(error)}
    else:
      if template is None:
        template, answer = answer, ""
      reply = {"text": answer}
    signal.alarm(0)
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
  main()
