"""What the benchmarks that compare with transformers have in common."""

from collections.abc import Mapping, Sequence
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any


class Reference:
  """The process that does the same work with PyTorch, or with vLLM.

  Args:
    script: a file beside this one. It reads the work from a file, prints what
      it tried, and then does the work once for each line of its input.
    path: file that the work is written to.
    work: what the script reads, as JSON.
    python: the command of its interpreter; by default this one.
  """

  def __init__(
    self,
    script: str,
    path: pathlib.Path,
    work: dict[str, Any],
    *,
    python: Sequence[str] = (sys.executable,),
  ):
    path.write_text(json.dumps(work))
    self._script = script
    self._process = subprocess.Popen(
      [*python, str(pathlib.Path(__file__).with_name(script)), str(path)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for name, tried in self._read().items():
      print(f"  {script.partition('_')[0]}, {name}: {tried}")

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      sys.exit(f"error: {self._script} exited with {self._process.wait()}")
    return json.loads(line)

  def run(self) -> dict[str, Any]:
    """Do the work once."""
    assert self._process.stdin is not None
    self._process.stdin.write("run\n")
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    """End the process."""
    self._process.communicate()


def has_transformers() -> bool:
  """Return whether torch and transformers are there; say so if not."""
  has = all(map(importlib.util.find_spec, ("torch", "transformers")))
  if not has:
    print("  no torch or no transformers here: nothing to compare with")
  return has


def median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Return the median of each number; other values are the first run's."""
  return {
    name: statistics.median([run[name] for run in runs])
    if isinstance(value, float)
    else value
    for name, value in runs[0].items()
  }


def table(rows: Sequence[dict[str, Any]], columns: Mapping[str, str]) -> str:
  """Return a Markdown table of the columns that the rows have."""
  columns = {n: form for n, form in columns.items() if n in rows[0]}
  lines = [[*columns], ["---"] * len(columns)]
  for row in rows:
    lines.append(
      [
        "" if row[name] is None else f"{row[name]:{form}}"
        for name, form in columns.items()
      ]
    )
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
