"""Opens the schedule of a run, with what each start has to record."""

from typing import Any

import jax
import jaxlib.version

from jaxrl_async.config import sections
from jaxrl_async.coordination import run_schedule
from jaxrl_async.devices import xla_flags
from jaxrl_async.run import session as session_lib
from jaxrl_async.storage import config_json

KEY = "schedule"  # of the host state: the length of the file


def environment(flags: str) -> dict[str, Any]:
  """Return what the bits of a result depend on besides the configuration.

  Args:
    flags: as in `session.Extensions`.
  """
  return {
    "jax": jax.__version__,
    "jaxlib": jaxlib.version.__version__,
    "device": jax.devices()[0].device_kind,
    "num_devices": jax.device_count(),
    "xla_flags": flags or xla_flags.current(),
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
  is_cpu = jax.devices()[0].platform == "cpu"
  now = environment(extensions.xla_flags)
  same_bits = xla_flags.SAME_BITS in now["xla_flags"]
  if config.run.exact_resume and is_cpu and not same_bits:
    session.progress.note(
      "run.exact_resume: not exact on a processor with AVX-512, because JAX was"
      f" started without {xla_flags.SAME_BITS} in XLA_FLAGS; set it before JAX"
      " looks for devices"
    )
  return run_schedule.Schedule(
    session.workdir,
    stored.get(KEY, 0),
    keep_trajectories=config.run.keep_trajectories,
    first_step=first_step,
    environment=now,
    config=config_json.to_stored(config),
    note=session.progress.note,
  )
