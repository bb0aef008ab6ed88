"""Learning rates that follow a schedule of Optax, tried before a run starts."""

from collections.abc import Iterator
import copy

import jax
import numpy as np

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import rules
from jaxrl_async.config import sections
from jaxrl_async.training import optax_schedules

_MAX_TRIED = 10_000  # updates at which a schedule is tried


def check(config: sections.Config) -> None:
  """Check that each learning rate stays within its bounds in the run.

  If there are very many updates, a schedule is tried at some of them only.

  Raises:
    ConfigError: one line that names the schedule, and the update.
  """
  section = config.algorithm
  of_run = config.train.num_steps * section.num_minibatches * section.num_epochs
  for name in rules.TRAINED:
    optimizer = getattr(config, name).optimizer
    if not optimizer.rate_schedule:
      continue
    path = f"{name}.optimizer.rate_schedule"
    schedule = optax_schedules.of_entry(
      path, optimizer.learning_rate, optimizer.rate_schedule.to_dict()
    )
    num_updates = of_run
    if name in ("warm_start", "preference"):
      num_updates = getattr(config, name).num_steps
    for update, value in _tried(path, schedule, num_updates):
      there = copy.deepcopy(config)
      getattr(there, name).optimizer.learning_rate = value
      try:
        fields_lib.check(there)
        rules.check(there)
      except sections.ConfigError as error:
        raise sections.ConfigError(
          f"{path}: it becomes {value:g} at update {update}, and {error}"
        ) from error


def _tried(
  path: str, schedule: optax_schedules.Schedule, num_updates: int
) -> Iterator[tuple[int, float]]:
  """Yield the updates where a rate is not finite, least and greatest."""
  count = min(max(num_updates, 1), _MAX_TRIED)
  updates = np.linspace(0, max(num_updates - 1, 0), count)
  updates = np.unique(updates.astype(np.int32))
  try:
    values = np.asarray(jax.vmap(schedule)(updates))
  except optax_schedules.ERRORS as error:
    raise optax_schedules.refusal(path, error) from error
  for at in (
    np.argmax(~np.isfinite(values)),
    np.argmin(values),
    np.argmax(values),
  ):
    yield int(updates[at]), float(values[at])
