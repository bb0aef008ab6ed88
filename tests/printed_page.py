"""What a page of the documents prints, for the tests that run it."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
_PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
# Goes on after a backslash, and in quotes.
_COMMAND = re.compile(r"^    uv run ((?:\\\n|[^'\n]|'[^']*')*)$", re.MULTILINE)


def programs(page: str) -> dict[str, str]:
  """Return the programs of a page by the names that their first lines give."""
  text = (ROOT / "docs" / page).read_text()
  named = {}
  for program in _PROGRAM.findall(text):
    if found := re.match(r'"""(\w+)\.py:', program):
      named[found[1]] = program
  return named


def commands(page: str) -> list[list[str]]:
  """Return the words of each command after `uv run`, without its extras."""
  text = (ROOT / "docs" / page).read_text()
  return [
    shlex.split(re.sub(r"--extra \S+ ", "", line).replace("\\\n", ""))
    for line in _COMMAND.findall(text)
  ]


def run(
  words: list[str], directory: pathlib.Path, *more: str, timeout_s: float
) -> str:
  """Run a command of a page in a directory, and return its stdout.

  Scripts of the project are found wherever the directory is, and `/tmp` is the
  directory.
  """
  script, *flags = words
  if script.startswith(("launch/", "benchmarks/")):
    script = str(ROOT / script)
  flags = [flag.replace("/tmp/", f"{directory}/") for flag in flags]
  ran = subprocess.run(
    [sys.executable, script, *flags, *more],
    cwd=directory,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=timeout_s,
  )
  assert ran.returncode == 0, f"{words}: {ran.stderr[-4000:]}"
  return ran.stdout
