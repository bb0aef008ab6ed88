"""The config that a recorded run began with, as a config file.

launch/replay.py takes it where no other one is given.
"""

import pathlib

from jaxrl_async.config import sections
from jaxrl_async.coordination import recorded_schedule
from jaxrl_async.storage import config_json
from jaxrl_async.storage import directories


def get_config(workdir: str = "") -> sections.Config:
  """Return the config of the first start in the schedule of a run."""
  sections.require(bool(workdir), "workdir", "missing; use --workdir=DIRECTORY")
  directories.check_can_read("workdir", workdir, "use the workdir of a run")
  try:
    start = recorded_schedule.first_start(pathlib.Path(workdir))
    return config_json.from_stored(start.config)
  except ValueError as error:
    reason = str(error)
  # Raised here, the error has no cause inside of a config file.
  raise sections.ConfigError(f"workdir: {reason}")
