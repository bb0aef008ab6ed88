"""Opens the schedule of a run, with what each start has to record."""

from typing import Any

import jax
import jaxlib.version

from jaxrl_async.coordination import run_schedule
from jaxrl_async.data import source as source_lib
from jaxrl_async.devices import xla_flags
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import session as session_lib
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.storage import config_json

KEY = "schedule"  # of the host state: the length of the file
# What a caller may give to a run in place of what the config names. The names
# are those of the arguments of `jaxrl_async.replay`.
GIVEN = ("loss", "episode", "dataset")
INITIAL_PARAMS = "initial_params"  # the same, as True or False


def environment(
  flags: str,
  *,
  loss: Any,
  episode: episode_lib.Episode,
  source: source_lib.Source | None,
  data: source_lib.Source,
) -> dict[str, Any]:
  """Return what the bits of a result depend on besides the configuration.

  Args:
    flags: `xla_flags` as in `session.Extensions`.
    loss: as there.
    episode: as there.
    source: of the prompts, if the caller has given it.
    data: the source that is used.
  """
  return {
    "jax": jax.__version__,
    "jaxlib": jaxlib.version.__version__,
    "device": jax.devices()[0].device_kind,
    "num_devices": jax.device_count(),
    "xla_flags": flags or xla_flags.current(),
    "loss": None if loss is None else _name(loss),
    "episode": None if episode is episode_lib.single_turn else _name(episode),
    "dataset": None if source is None else source.name,
    "data": dict(data.versions),
  }


def _name(given: Any) -> str:
  """Return the name of a function or class, with that of its module."""
  kind = given if hasattr(given, "__qualname__") else type(given)
  return f"{kind.__module__}:{kind.__qualname__}"


def open_schedule(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  extensions: session_lib.Extensions,
  stored: dict[str, Any],
  first_step: int,
) -> run_schedule.Schedule:
  """Open `schedule.jsonl` of a run, and record this start.

  Args:
    setup: of this start.
    session: of this start.
    extensions: parts that the caller of the run provides.
    stored: host state of the checkpoint from which the run goes on.
    first_step: its completed train steps.
  """
  about = environment(
    extensions.xla_flags,
    loss=extensions.loss,
    episode=extensions.episode,
    source=extensions.source,
    data=setup.source,
  )
  about[INITIAL_PARAMS] = extensions.initial_params is not None
  is_cpu = jax.devices()[0].platform == "cpu"
  same_bits = xla_flags.SAME_BITS in about["xla_flags"]
  if setup.config.run.exact_resume and is_cpu and not same_bits:
    session.progress.note(
      "run.exact_resume: not exact on a processor with AVX-512, because JAX was"
      f" started without {xla_flags.SAME_BITS} in XLA_FLAGS; set it before JAX"
      " looks for devices"
    )
  return run_schedule.Schedule(
    session.workdir,
    stored.get(KEY, 0),
    keep_trajectories=setup.config.run.keep_trajectories,
    first_step=first_step,
    environment=about,
    config=config_json.to_stored(setup.config),
    note=session.progress.note,
  )
