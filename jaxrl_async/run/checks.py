"""All checks of a config before a run starts, and the setup that results."""

from collections.abc import Sequence
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.rewards import code
from jaxrl_async.rewards import named
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.run import assembly
from jaxrl_async.run import config_checks
from jaxrl_async.run import device_checks
from jaxrl_async.run import setup as setup_lib


def checked(
  config: sections.Config,
  devices: Sequence[Any],
  *,
  source: source_lib.Source | None = None,
) -> setup_lib.Setup:
  """Check a config completely, and return its setup.

  The checks of `config_checks` come first. Then the names, the sizes on the
  devices, the data and the template are checked. Quantised weights are tried
  out on a rollout device, if that device is present. Nothing else is compiled.

  Args:
    config: of the run.
    devices: the devices that are divided into the two slices.
    source: the source of the prompts; None is the dataset of `task.dataset`.

  Raises:
    ConfigError: one line that names the field.
  """
  config_checks.validate(config, len(devices))
  try:
    if named.find(config.task.reward) is code.score:
      sandbox_lib.find()
  except (ValueError, sandbox_lib.SandboxError) as error:
    raise sections.ConfigError(f"task.reward: {error}") from error
  if source is None:
    source = setup_lib.source_of(config)
  source.check()  # may import the library of the data set
  setup = setup_lib.resolve(config, devices, source=source)
  device_checks.check_sharding(setup)
  device_checks.check_weights(setup)
  device_checks.check_training_memory(setup)
  device_checks.check_rollout_memory(setup)
  prompt_source = assembly.prompt_source(setup)
  prompts.validate_task(prompt_source)
  if config.warm_start.num_steps and not config.warm_start.checkpoint:
    prompts.validate_warm_start(
      prompt_source, config.warm_start, max_tokens=config.train.tokens_per_row
    )
  return setup
