"""The config of a stored policy, as a config file.

launch/evaluate.py takes it where no other one is given. In a file of one's own:

--config=launch/checkpoint_config.py:/tmp/quickstart

A run's workdir has its config in config.json, and so has that of launch/sft.py.
For a model in Hugging Face's format, in a directory or of the hub, it is the
default config with this model.
"""

import pathlib

from jaxrl_async.config import sections
from jaxrl_async.models import hub
from jaxrl_async.storage import config_json
from jaxrl_async.storage import directories
from jaxrl_async.storage import model_files


def check(checkpoint: str) -> None:
  """Check that --checkpoint names a directory, or a model of the hub.

  Raises:
    ConfigError: it does not.
  """
  sections.require(
    bool(checkpoint), "checkpoint", "missing; use --checkpoint=DIRECTORY"
  )
  if not checkpoint.startswith(hub.PREFIX):
    directories.check_can_read(
      "checkpoint",
      checkpoint,
      "use a run's workdir, a directory in Hugging Face's format, or"
      " hf:ORG/NAME of its hub",
    )


def get_config(checkpoint: str = "") -> sections.Config:
  """Return the config that belongs to a policy in a directory."""
  check(checkpoint)
  if checkpoint.startswith(hub.PREFIX):
    config = sections.Config()
    config.model.name = checkpoint
    return config
  directory = pathlib.Path(checkpoint).absolute()
  for place in (directory, directory.parent):
    try:
      found = model_files.read_optional(place / config_json.NAME)
    except ValueError as error:
      raise sections.ConfigError(f"checkpoint: {error}") from error
    if "algorithm" in found:
      config = config_json.read(place)
      assert config is not None
      return config
    if found:
      break
  config = sections.Config()
  config.model.name = str(directory)
  return config
