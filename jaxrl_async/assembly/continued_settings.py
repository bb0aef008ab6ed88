"""Which settings may differ from those that stored data was made with.

Fields that decide how something is computed, placed or supervised may differ.
Fields that stored data depends on may not differ, or not while there is such
data. Each field of the config says which it is, and why (`config.setting`).
"""

import pathlib
from typing import Any

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib

_REWARDS = ("task.reward", "task.rewards")


def _as_scored(value: Any) -> Any:
  """Return rewards without the address, deadlines and retries of a server."""
  value = fields_lib.plain(value)
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


def check(
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
  unread = fields_lib.unread(stored).keys()
  unread &= fields_lib.unread(wanted).keys()
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


def check_length(
  model: configs.ModelConfig,
  stored: sections.Config,
  wanted: sections.Config,
  workdir: pathlib.Path,
  *,
  is_supervised: bool,
) -> None:
  """Check that the longest sequence leaves the rotary embeddings as they were.

  Args:
    model: the architecture of this start.
    stored: the config that the data was made with.
    wanted: the config to continue with.
    workdir: for the error message.
    is_supervised: see `setup.longest_tokens`.

  Raises:
    ConfigError: `dynamic` or `longrope` would have other frequencies.
  """
  before, now = (
    setup_lib.longest_tokens(config, model, is_supervised=is_supervised)
    for config in (stored, wanted)
  )
  sections.require(
    model.within(before) == model,
    "train.tokens_per_row" if is_supervised else "rollout.cache_tokens",
    f"sequences may have {now} tokens, and {before} when {workdir} was written;"
    " the rotary embeddings of this model differ between the two, so use the"
    " stored value, or an empty workdir",
  )


def check_file(wanted: sections.Config, workdir: pathlib.Path) -> list[str]:
  """Do what `check` does with the workdir's config.json, if any.

  The workdir need not hold a run.

  Raises:
    ConfigError: some fields may not differ, or config.json is not a config.
  """
  stored = config_json.read(workdir)
  if stored is None:
    return []
  return check(stored, wanted, workdir, has_outstanding=True)


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
