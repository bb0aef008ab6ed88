"""How a run is continued: from which checkpoint."""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

from jaxrl_async.assembly import continued_settings
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.replay import timing_start
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib

# The keys that `loop.Loop` stores. Parameters that launch/sft.py wrote
# do not have them.
_RUN_STATE = (
  "config",
  "max_staleness",
  timing_start.KEY,
  "groups_per_step",
  "next_index",
  "stream",
  "ledger",
  "metrics",
)


class Found(NamedTuple):
  """What a start continues from.

  Attributes:
    step: of the checkpoint; None for a new run.
    host_state: of the run in that checkpoint. Its "max_staleness" is the
      largest bound that any start of the run has had.
    verified: the checkpoint, for `checkpoint.restore`.
  """

  step: int | None
  host_state: dict[str, Any]
  verified: checkpoint.Verified | None

  @property
  def is_new(self) -> bool:
    """Whether the run begins with this start."""
    return self.step is None

  @property
  def first_step(self) -> int:
    """The number of train steps that are completed already."""
    return self.step or 0

  def totals(self) -> dict[str, Any]:
    """Return the totals of the metrics, which this start goes on counting."""
    bound = {"run/max_staleness": self.host_state["max_staleness"]}
    return (
      bound if self.is_new else self.host_state["metrics"]["totals"] | bound
    )


def find(
  wanted: sections.Config,
  model: configs.ModelConfig,
  workdir: pathlib.Path,
  note: Callable[[str], None],
) -> Found:
  """Find the checkpoint that this start continues from.

  A damaged checkpoint is passed over for the one before. It is set aside once
  nothing else keeps the run from continuing.

  The caller must hold the workdir's claim.

  Args:
    wanted: the config of this start.
    model: the architecture of the policy.
    workdir: of the run.
    note: is called with messages about the settings that differ, and about
      checkpoints that cannot be used.

  Raises:
    ConfigError: the run in the workdir cannot be continued with this config, or
      the workdir holds something that a new run would destroy.
  """
  directory = workdir / workdir_lib.CHECKPOINTS
  try:
    _check_is_of_a_run(workdir, note)
    checkpoint.recover(directory)
    torn = checkpoint.unsealed(directory)
    whole = checkpoint.newest_whole(directory, note)
    if whole is None:
      if torn:
        raise checkpoint.CheckpointError(
          f"{torn[-1]} has no manifest, and there is no other checkpoint; put"
          " its manifest.json back, or begin anew in an empty workdir"
        )
      workdir_lib.check_unused(workdir)
      bound = wanted.algorithm.max_staleness
      return Found(None, {"max_staleness": bound}, None)
    step, stored, damaged, verified = whole
    outstanding = checkpoint.group_records(directory, step)
  except checkpoint.CheckpointError as error:
    raise workdir_lib.WorkdirError(f"workdir: {error}") from error
  for name in _RUN_STATE:
    if name not in stored:
      raise workdir_lib.WorkdirError(
        f"workdir: {directory / str(step)} is not the checkpoint of a run, it"
        f" lacks {name!r}; a run takes parameters by warm_start.checkpoint"
      )
  then = continued_settings.stored_config(workdir, stored)
  differences = continued_settings.check(
    then, wanted, workdir, has_outstanding=bool(outstanding)
  )
  continued_settings.check_length(
    model, then, wanted, workdir, is_supervised=False
  )
  _check_lengths(wanted, outstanding)
  metrics_bytes = stored["metrics"]["num_bytes"]
  ledger_bytes = stored["ledger"]["offset_bytes"]
  workdir_lib.check_lines(workdir / workdir_lib.METRICS, metrics_bytes)
  workdir_lib.check_lines(workdir / workdir_lib.LEDGER, ledger_bytes)
  timing_bytes = stored[timing_start.KEY]
  workdir_lib.check_lines(workdir / workdir_lib.TIMING, timing_bytes)
  for path in torn:
    if int(path.name) > step:
      note(f"{path} has no manifest and is passed over")
  checkpoint.set_aside(directory, damaged)
  with disk.writing(directory):
    checkpoint.make_ready(directory)  # a finished run saves no other one
  note(
    f"continuing {workdir} from step {step} with {len(outstanding)} outstanding"
    " groups"
  )
  if differences:
    note(f"the config differs from then: {'; '.join(differences)}")
  bound = max(
    wanted.algorithm.max_staleness,
    stored["max_staleness"],
  )
  return Found(step, stored | {"max_staleness": bound}, verified)


def _check_is_of_a_run(
  workdir: pathlib.Path, note: Callable[[str], None]
) -> None:
  """Check config.json before anything is changed in a directory."""
  try:
    config_json.read(workdir)
  except config_json.TornError:
    # Checkpoints hold the config too, and each start writes the file anew.
    if not checkpoint.steps(workdir / workdir_lib.CHECKPOINTS):
      raise
    note(f"{workdir / config_json.NAME} is damaged, and is written anew")


def tell_changed_data(
  then: Mapping[str, str] | None,
  now: Mapping[str, str],
  note: Callable[[str], None],
) -> None:
  """Tell if the prompts to come are not those that they would have been.

  Args:
    then: versions of the source when the checkpoint was written; None if the
      checkpoint does not say.
    now: versions of the source.
    note: is called with a message if they differ.
  """
  if then is not None and then != now:
    names = sorted(n for n in then.keys() | now if then.get(n) != now.get(n))
    note(
      f"the data differs from when the checkpoint was written"
      f" ({', '.join(names)}); the run goes on with what is there now"
    )


def _check_lengths(
  wanted: sections.Config, outstanding: list[dict[str, Any]]
) -> None:
  """Check that no stored trajectory exceeds the new limits."""
  groups = [record["group"] for record in outstanding]
  stored = [t for group in groups for t in group["trajectories"]]
  half_written = [t for t in stored if t["finish_reason"] is None]
  for path, limit, trajectories in (
    ("train.tokens_per_row", wanted.train.tokens_per_row, stored),
    ("rollout.cache_tokens", wanted.rollout.cache_tokens, half_written),
  ):
    longest = max((t["num_tokens"] for t in trajectories), default=0)
    sections.require(
      longest <= limit,
      path,
      f"{limit} is less than the {longest} tokens of a trajectory in the"
      f" checkpoint; use {longest} or more",
    )
