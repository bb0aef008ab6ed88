"""Runs launch scripts for the benchmarks that compare whole runs."""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.storage import disk

ROOT = pathlib.Path(__file__).resolve().parents[1]


def launch(
  script: str, *arguments: str, further_xla_flags: str = ""
) -> dict[str, Any]:
  """Run a launch script to its end; return the JSON of its last line.

  Args:
    script: its name.
    *arguments: of the script.
    further_xla_flags: added to those of this process.
  """
  command = [sys.executable, str(ROOT / "launch" / script), *arguments]
  environment = dict(os.environ)
  if further_xla_flags:
    own = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{own} {further_xla_flags}".strip()
  done = subprocess.run(
    command, stdout=subprocess.PIPE, text=True, env=environment
  )
  if done.returncode:
    sys.exit(f"error: {' '.join(command)} exited with {done.returncode}")
  return json.loads(done.stdout.splitlines()[-1])


def launch_once(
  script: str,
  directory: pathlib.Path,
  name: str,
  *arguments: str,
  launch: Callable[..., dict[str, Any]] = launch,
) -> dict[str, Any]:
  """Run a launch script in DIRECTORY/NAME, unless it has been run there.

  A run that was stopped goes on. What it was started with is kept beside it, so
  that a result is never shown as that of other settings.

  Args:
    script: its name.
    directory: of all runs.
    name: of this one.
    *arguments: of the script, without its workdir.
    launch: runs a script.

  Returns:
    The JSON of the script's last line.
  """
  arguments = f"--workdir={directory / name}", *arguments
  return once(
    directory, name, [script, *arguments], lambda: launch(script, *arguments)
  )


def once(
  directory: pathlib.Path,
  name: str,
  made_from: list[Any],
  make: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
  """Return a result that is kept in DIRECTORY, and made if it is not there.

  Args:
    directory: of all results.
    name: of this one.
    made_from: what it depends on, which JSON can hold. A result of something
      else is refused.
    make: makes it. Where that was stopped, it is called again.
  """
  directory.mkdir(parents=True, exist_ok=True)
  settings = directory / f"{name}.json"
  if not settings.exists():
    disk.replace_text(settings, json.dumps(made_from))
  if json.loads(settings.read_text()) != made_from:
    sys.exit(f"error: {settings} has other settings; use another directory")
  result = _result(directory, name)
  if not result.exists():
    print(name, file=sys.stderr)
    disk.replace_text(result, json.dumps(make()))
  return json.loads(result.read_text())


def is_made(directory: pathlib.Path, name: str) -> bool:
  """Return whether DIRECTORY has the result NAME."""
  return _result(directory, name).exists()


def after_warm_start(
  directory: pathlib.Path,
  name: str,
  *,
  config: pathlib.Path,
  variant: str = "",
  seed: int,
  further: Sequence[str],
  fields: Mapping[str, Any],
  launch_once: Callable[..., dict[str, Any]] = launch_once,
) -> pathlib.Path:
  """Make a run, and the warm start of its seed, unless they are there.

  The runs of a seed begin with the same policy.

  Args:
    directory: of all runs.
    name: of this one.
    config: file of both.
    variant: of that file.
    seed: of both.
    further: settings of both, as "a.b=c".
    fields: settings of the run alone.
    launch_once: see above.

  Returns:
    The workdir of the run.
  """
  usual = (
    f"--config={config}{variant and ':'}{variant}",
    f"--config.seed={seed}",
    *(f"--config.{setting}" for setting in further),
  )
  first = "_".join(filter(None, ("warm_start", variant, str(seed))))
  params = launch_once("sft.py", directory, first, *usual)["params"]
  launch_once(
    "train.py",
    directory,
    name,
    # While a run compiles, generation gets as far ahead as the bound allows.
    f"--compile_cache={directory / name}.compiled",
    *usual,
    f"--config.warm_start.checkpoint={params}",
    *(f"--config.{field}={value}" for field, value in fields.items()),
  )
  return directory / name


def _result(directory: pathlib.Path, name: str) -> pathlib.Path:
  return directory / f"{name}.result.json"


def to_be_made(
  directory: pathlib.Path, names: Sequence[str], usual_s: float
) -> str:
  """Return how many of these runs are missing, and how long they take.

  Args:
    directory: of all runs.
    names: of the runs, without their warm starts.
    usual_s: of one of them. It is not used if some are there, whose mean is.
  """
  files = [_result(directory, name) for name in names]
  there = [json.loads(x.read_text())["wall_s"] for x in files if x.exists()]
  missing = len(names) - len(there)
  run_s = statistics.mean(there) if there else usual_s
  return (
    f"{missing} of {len(names)} runs are to be made, of about {run_s:.0f} s:"
    f" {missing * run_s / 60:.0f} minutes, and the warm starts that are missing"
  )


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Return what the lines of a run's metrics say of each step."""
  return metrics_lib.by_step(workdir)


def markdown(rows: list[dict[str, Any]]) -> str:
  """Return a Markdown table with a line for each row, without lists."""
  columns = [k for k, v in rows[0].items() if not isinstance(v, list)]
  lines = [columns, ["---"] * len(columns)]
  for row in rows:
    values = (row[name] for name in columns)
    lines.append(
      [f"{x:.3f}" if isinstance(x, float) else str(x) for x in values]
    )
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
