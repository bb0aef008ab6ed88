"""Every field with every value: one line that names a field, or a run."""

import pathlib
import subprocess
import sys
import time

import config_values
import pytest

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import sections


def refusal(config, num_devices=2):
  """The message of the ConfigError, "" if there is none."""
  try:
    config_checks.validate(config, num_devices)
  except sections.ConfigError as error:
    return str(error)
  return ""


def accepted():
  """Each field with the values that it takes."""
  for path in config_values.paths():
    for value in config_values.VALUES:
      config = config_values.get_config()
      config_values.put(config, path, value)
      if not refusal(config):
        yield path, value


def check_all():
  """Every value of every field is refused in one line, or passes."""
  base = config_values.get_config()
  known = {"mesh", *config_values.paths()}
  for path in config_values.paths():
    usual = config_values.value_of(base, path)
    for value in config_values.VALUES:
      config_values.put(base, path, value)
      start_s = time.monotonic()
      message = refusal(base)
      assert time.monotonic() - start_s < 5.0, (path, value)
      if not message:
        continue
      assert "\n" not in message and "\0" not in message
      assert len(message) < 600, message
      named = message.partition(":")[0]
      places = ("mesh.", "task.rewards.", "task.sources.", "eval.sets.")
      assert named in known or named.startswith(places), message
      # Of two that do not go together either may be named first.
      name = path.rpartition(".")[2]
      assert name in message or named == "mesh", message
    config_values.put(base, path, usual)
  assert not refusal(base)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_value_of_every_field_passes_or_is_refused_in_one_line():
  # Nine thousand configs: without this session's checks of types.
  call = "import test_config_sweep; test_config_sweep.check_all()"
  done = subprocess.run(
    [sys.executable, "-c", call],
    cwd=pathlib.Path(__file__).parent,
    capture_output=True,
    text=True,
    timeout=150,
  )
  assert done.returncode == 0, done.stderr
