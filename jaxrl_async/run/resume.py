"""How a run is continued: from which checkpoint, and with which settings.

Fields that decide how something is computed, placed or supervised may differ
from the stored config. Fields that stored data depends on may not differ, or
not while there is such data. Each field of the config says which it is, and
why (`config.setting`).
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.run import schedule_start
from jaxrl_async.run import unread_settings
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk
from jaxrl_async.storage import fallback
from jaxrl_async.storage import workdir as workdir_lib

# The keys that `loop.Loop` stores. Parameters that launch/sft.py wrote
# do not have them.
_RUN_STATE = (
  "config",
  "max_staleness",
  schedule_start.KEY,
  "groups_per_step",
  "next_index",
  "stream",
  "ledger",
  "metrics",
  "record",
)


_REWARDS = ("task.reward", "task.rewards")


def _as_scored(value: Any) -> Any:
  """Return rewards without the address, deadlines and retries of a server."""
  value = config_json.plain(value)
  if isinstance(value, str):
    return "http" if server_lib.is_address(value) else value
  return {
    name: {
      field: _as_scored(x) if field == "function" else x
      for field, x in entry.items()
      if field not in ("timeout_s", "retries")
    }
    for name, entry in value.items()
  }


def _holds_compute_dtype(config: sections.Config) -> str | None:
  """Return which model a checkpoint holds in `model.compute_dtype`, if any.

  `setup.Setup.models` gives each model its type. A reference that is a moving
  average is in float32.
  """
  algorithm = config.algorithm
  if algorithm.teacher:
    return "teacher"
  has_reference = algorithm.kl_coef > 0 and not config.model.lora.rank
  if has_reference and not algorithm.reference_decay:
    return "reference"
  return None


def _shown(value: Any) -> str:
  text = str(getattr(value, "value", value)).replace("\n", " ")
  return text if len(text) <= 60 else text[:57] + "..."


def check_config(
  stored: sections.Config,
  wanted: sections.Config,
  workdir: pathlib.Path,
  *,
  has_outstanding: bool,
) -> list[str]:
  """Check that the stored data allows all settings that differ.

  Args:
    stored: the config that the data was made with.
    wanted: the config to continue with.
    workdir: for the error message.
    has_outstanding: whether there are groups that were not trained.

  Returns:
    The allowed differences, each like "rollout.num_slots: 8 and now 4".

  Raises:
    ConfigError: some fields may not differ. The message names each one and the
      reason.
  """
  allowed, refused = [], []
  unread = unread_settings.reasons(stored).keys()
  unread &= unread_settings.reasons(wanted).keys()
  known = {field.path: field.known for field in fields_lib.walk(wanted)}
  for path, values in config_json.differences(stored, wanted).items():
    before, now = map(_shown, values)
    why = "" if path in unread else known[path].fixed
    if path in _REWARDS and _as_scored(values[0]) == _as_scored(values[1]):
      why = ""
    if path == "algorithm.kl_coef" and (all(values) or stored.model.lora.rank):
      why = ""  # the checkpoint holds what is needed
    if path == "algorithm.advantage" and "gae" in values:
      why = "the checkpoint holds a critic if it is gae, and none otherwise"
    held = _holds_compute_dtype(stored)
    if path == "model.compute_dtype" and held:
      why = f"the checkpoint holds a {held} of that type"
    if has_outstanding and not why:
      why = known[path].fixed_with_groups
    if not why:
      allowed.append(f"{path}: {before} and now {now}")
    else:
      refused.append(f"{path}: {before} and {now}: {why}")
  if refused:
    raise sections.ConfigError(
      f"workdir: {workdir} holds another config ({'; '.join(refused)}); use an"
      " empty one, or the stored values"
    )
  return allowed


def check_config_file(
  wanted: sections.Config, workdir: pathlib.Path
) -> list[str]:
  """Do what `check_config` does with the workdir's config.json, if any.

  The workdir need not hold a run.

  Raises:
    ConfigError: some fields may not differ, or config.json is not a config.
  """
  stored = config_json.read(workdir)
  if stored is None:
    return []
  return check_config(stored, wanted, workdir, has_outstanding=True)


def stored_config(
  workdir: pathlib.Path, host_state: dict[str, Any]
) -> sections.Config:
  """Return the config that a checkpoint was written with.

  Raises:
    ConfigError: it cannot be read.
  """
  try:
    return config_json.from_stored(host_state.get("config"))
  except ValueError as error:
    raise workdir_lib.WorkdirError(
      f"workdir: the checkpoint in {workdir} has a config that is not of this"
      f" version ({error})"
    ) from error


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


def find(
  wanted: sections.Config,
  workdir: pathlib.Path,
  note: Callable[[str], None],
) -> Found:
  """Find the checkpoint that this start continues from.

  A damaged checkpoint is passed over for the one before. It is set aside once
  nothing else keeps the run from continuing.

  The caller must hold the workdir's claim.

  Args:
    wanted: the config of this start.
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
    whole = fallback.newest_whole(directory, note)
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
  then = stored_config(workdir, stored)
  differences = check_config(
    then, wanted, workdir, has_outstanding=bool(outstanding)
  )
  _check_lengths(wanted, outstanding)
  metrics_bytes = stored["metrics"]["num_bytes"]
  ledger_bytes = stored["ledger"]["offset_bytes"]
  workdir_lib.check_lines(workdir / workdir_lib.METRICS, metrics_bytes)
  workdir_lib.check_lines(workdir / workdir_lib.LEDGER, ledger_bytes)
  schedule_bytes = stored[schedule_start.KEY]
  workdir_lib.check_lines(workdir / workdir_lib.SCHEDULE, schedule_bytes)
  for path in torn:
    if int(path.name) > step:
      note(f"{path} has no manifest and is passed over")
  fallback.set_aside(directory, damaged)
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
  groups = [record["group"] for record in outstanding if record["group"]]
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
