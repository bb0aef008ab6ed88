"""All checks of a config before a run starts, and what they found out."""

from collections.abc import Sequence
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
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
  """Checks a config in every respect, and returns what it refers to.

  After the checks of `config_checks` these are the names, the sizes on the
  devices, the data and the template. Quantised weights are tried out on a
  rollout device, if it is there. Nothing else compiles.

  Args:
    config: of the run.
    devices: to be cut into the two slices.
    source: where prompts come from; None is the dataset of `task.dataset`.

  Raises:
    ConfigError: one line that names the field.
  """
  config_checks.validate(config, len(devices))
  if source is None:
    source = setup_lib.source_of(config)
  source.check()  # it may import a library meanwhile
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
