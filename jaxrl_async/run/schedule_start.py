"""Opens the schedule of a run, with what each start has to record."""

from typing import Any

import jax
import jaxlib.version

from jaxrl_async.config import sections
from jaxrl_async.coordination import run_schedule
from jaxrl_async.run import session as session_lib
from jaxrl_async.storage import config_json

KEY = "schedule"  # of the host state: the length of the file


def environment(xla_flags: str) -> dict[str, Any]:
  """Return what the bits of a result depend on besides the configuration.

  Args:
    xla_flags: as in `session.Extensions`.
  """
  return {
    "jax": jax.__version__,
    "jaxlib": jaxlib.version.__version__,
    "device": jax.devices()[0].device_kind,
    "num_devices": jax.device_count(),
    "xla_flags": xla_flags,
  }


def open_schedule(
  config: sections.Config,
  session: session_lib.Session,
  extensions: session_lib.Extensions,
  stored: dict[str, Any],
  first_step: int,
) -> run_schedule.Schedule:
  """Open `schedule.jsonl` of a run, and record this start.

  Args:
    config: of this start.
    session: of this start.
    extensions: parts that the caller of the run provides.
    stored: host state of the checkpoint from which the run goes on.
    first_step: its completed train steps.
  """
  return run_schedule.Schedule(
    session.workdir,
    stored.get(KEY, 0),
    keep_trajectories=config.run.keep_trajectories,
    first_step=first_step,
    environment=environment(extensions.xla_flags),
    config=config_json.to_stored(config),
    note=session.progress.note,
  )
