"""Runs launch scripts for the benchmarks that compare whole runs."""

import json
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]


def launch(script: str, *arguments: str) -> dict[str, Any]:
  """Run a launch script to its end; return the JSON of its last line."""
  command = [sys.executable, str(ROOT / "launch" / script), *arguments]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if done.returncode:
    sys.exit(f"error: {' '.join(command)} exited with {done.returncode}")
  return json.loads(done.stdout.splitlines()[-1])
