"""The episode `openenv`, where its package is missing, and in an environment.

openenv_cases.py has the tests that need the package.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess

import pytest

from jaxrl_async.assembly import assembly
from jaxrl_async.config import sections

ROOT = pathlib.Path(__file__).parents[1]
TIMEOUT_S = 1_200


def test_a_missing_package_is_said_in_one_line():
  if importlib.util.find_spec("openenv"):
    pytest.skip("the package openenv is installed")
  task = sections.TaskSection(episode="openenv")
  with pytest.raises(sections.ConfigError, match="environments.md") as e:
    assembly.episode_of(task)
  text = str(e.value)
  assert text.startswith("task.episode: ") and "\n" not in text
  assert "No module named 'openenv'" in text


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S)
def test_the_episode_plays_with_the_package(tmp_path):
  """Installs as docs/how-to/environments.md says, and runs the tests there."""
  uv = shutil.which("uv")
  assert uv is not None
  environment = tmp_path / "environment"
  python = environment / "bin" / "python"
  packages = ("pytest", "pytest-timeout", "pytest-xdist", "beartype")
  env = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(environment)}
  for command in (
    [uv, "sync", "-q", "--no-dev"],
    [uv, "pip", "install", "-q", "--no-config", "--python", str(python)]
    + ["openenv==0.10.0", *packages],
    [str(python), "-m", "pytest", "-n", "0", "openenv_cases.py"],
  ):
    cwd = ROOT / "tests" if command[0] == str(python) else ROOT
    ran = subprocess.run(
      command,
      cwd=cwd,
      env=env,
      capture_output=True,
      text=True,
      timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
