"""How a run is continued: from which checkpoint, and with which settings.

Each field of the config is in one of three tables, together with the reason.
Fields that decide how something is computed, placed or supervised may differ
from the stored config. Fields that stored data depends on may not differ, or
not while there is such data.
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

from jaxrl_async.config import sections
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.run import schedule_start
from jaxrl_async.run import unread_settings
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk
from jaxrl_async.storage import fallback
from jaxrl_async.storage import workdir as workdir_lib

_IN_THE_LOSS = "read when a batch is trained; nothing stored depends on it"
_MEMORY = "decides memory and speed of a train step, not what it computes"
_PROGRAM = "which program generates; logprobs are recorded as they are drawn"
_SUPERVISION = "supervision and persistence of this start"
_RATE = (
  "scales what the optimizer makes of the stored moments, from the next update"
  " on"
)
_WARMUP = (
  "the rate is a function of the number of updates, which goes on: a warmup"
  " that is over is not repeated"
)
_EACH_UPDATE = "enters each update anew"
_OFFLOAD = "where moments lie between updates"

# Maps the path of a field, or a section for all its fields, to the reason why
# it may differ.
MAY_DIFFER = {
  "model.compute_dtype": "activations only; stored weights are float32",
  "model.remat": _MEMORY,
  "mesh": "the train state is read into the shardings of this start",
  "task.reward_timeout_s": _SUPERVISION,
  "task.reward_workers": _SUPERVISION,
  "task.question_workers": _SUPERVISION,
  "task.reward_retries": _SUPERVISION,
  "task.max_failed_groups": _SUPERVISION,
  "rollout.num_slots": "half-written trajectories wait for a slot",
  "rollout.max_completion_tokens": "a half-written trajectory that is as long"
  " already ends as it is; evaluations follow the new limit",
  "rollout.cache_tokens": "caches are rebuilt; those of half-written"
  " trajectories have to fit, which is checked",
  "rollout.decode_steps_per_call": _PROGRAM,
  "rollout.prefill_rows": _PROGRAM,
  "rollout.prefill_buckets": _PROGRAM,
  "rollout.window_buckets": _PROGRAM,
  "rollout.prefill_chunk": _PROGRAM,
  "rollout.max_group_seconds": _SUPERVISION,
  "rollout.num_pages": "caches are rebuilt",
  "rollout.page_tokens": "caches are rebuilt",
  "rollout.preemption": _PROGRAM,
  "rollout.kv_on_adopt": _PROGRAM,
  "rollout.dtype": _PROGRAM,
  "rollout.weights": _PROGRAM,
  "rollout.attention": _PROGRAM,
  "algorithm.max_staleness": "deadlines are stored with groups; another bound"
  " holds for groups born afterwards",
  "algorithm.clip_low": _IN_THE_LOSS,
  "algorithm.clip_high": _IN_THE_LOSS,
  "algorithm.loss": _IN_THE_LOSS,
  "algorithm.dual_clip": _IN_THE_LOSS,
  "algorithm.sapo_positive": _IN_THE_LOSS,
  "algorithm.sapo_negative": _IN_THE_LOSS,
  "algorithm.aggregation": _IN_THE_LOSS,
  "algorithm.aggregation_tokens": _IN_THE_LOSS,
  "algorithm.behavior_weight_level": _IN_THE_LOSS,
  "algorithm.behavior_weight_floor": _IN_THE_LOSS,
  "algorithm.behavior_weight_cap": _IN_THE_LOSS,
  "algorithm.behavior_weight_cap_mode": _IN_THE_LOSS,
  "algorithm.proximal": _IN_THE_LOSS,
  "algorithm.second_moment_bound": _IN_THE_LOSS,
  "algorithm.sequence_kl_bound": _IN_THE_LOSS,
  "algorithm.advantage": _IN_THE_LOSS,
  "algorithm.advantage_scale": _IN_THE_LOSS,
  "algorithm.gamma": _IN_THE_LOSS,
  "algorithm.gae_lambda": _IN_THE_LOSS,
  "algorithm.reward_bias": _IN_THE_LOSS,
  "algorithm.reward_scale": _IN_THE_LOSS,
  "algorithm.reward_clip": _IN_THE_LOSS,
  "algorithm.overlong_filter": _IN_THE_LOSS,
  "algorithm.kl_estimator": _IN_THE_LOSS,
  "algorithm.kl_in_reward": _IN_THE_LOSS,
  "algorithm.kl_reward_clip": _IN_THE_LOSS,
  "algorithm.entropy_coef": _IN_THE_LOSS,
  "algorithm.distill_coef": _IN_THE_LOSS,
  "critic.value_clip": _IN_THE_LOSS,
  "critic.value_coef": _IN_THE_LOSS,
  "critic.optimizer.learning_rate": _RATE,
  "critic.optimizer.warmup_steps": _WARMUP,
  "critic.optimizer.rate_schedule": _WARMUP,
  "critic.optimizer.eps": _EACH_UPDATE,
  "critic.optimizer.weight_decay": _EACH_UPDATE,
  "critic.optimizer.max_grad_norm": _EACH_UPDATE,
  "critic.optimizer.offload": _OFFLOAD,
  "algorithm.schedules": _IN_THE_LOSS,
  "staleness_control": "decides the bound of groups born afterwards; a stored"
  " bound outside of the limits becomes the nearer limit",
  "algorithm.reference_offload": "where the reference lies between its uses",
  "algorithm.filter_zero_std": "asked when a group is scored; groups that were"
  " kept before are trained",
  "train.num_steps": "how far to go; a decaying learning rate follows the new"
  " curve from there",
  "train.tokens_per_row": "rows are packed anew each step; stored trajectories"
  " have to fit, which is checked",
  "train.rows_per_microbatch": _MEMORY,
  "train.max_bad_updates": _SUPERVISION,
  "train.vocab_chunk": _MEMORY,
  "train.attention": _MEMORY,
  "train.decay": "the rate is a function of the number of updates, which goes"
  " on: the new curve holds from there",
  "train.optimizer.learning_rate": _RATE,
  "train.optimizer.warmup_steps": _WARMUP,
  "train.optimizer.rate_schedule": _WARMUP,
  "train.optimizer.eps": _EACH_UPDATE,
  "train.optimizer.weight_decay": _EACH_UPDATE,
  "train.optimizer.max_grad_norm": _EACH_UPDATE,
  "train.optimizer.offload": _OFFLOAD,
  "transfer": "weights are published anew; those of earlier starts are removed"
  " or never adopted",
  "eval.every": "how often; not what is measured",
  "eval.beside": "when; not what is measured",
  "eval.samples": "more answers narrow the same accuracy",
  "eval.sets": "each has metrics of its own name; nothing stored depends on it",
  "run": _SUPERVISION,
  "cluster": "groups, checkpoints and versions are the same in any number of"
  " processes",
}

_MOVED = "the reference of the checkpoint has moved by it"
_TRAJECTORIES = "groups that the checkpoint holds have that size"
# These may differ only if the checkpoint holds no outstanding group.
NOT_WITH_OUTSTANDING_GROUPS = {
  "algorithm.group_size": _TRAJECTORIES,
  "algorithm.groups_per_step": "their deadlines were given for batches of that"
  " size",
}

_QUESTIONS = "stored prompts, and the order of those to come, depend on it"
_WARM_START = "the stored weights came of it"
_HELD_OUT = "accuracies before and after could not be compared"
_MOMENTS = "the stored moments are made with it"
MUST_STAY = {
  "seed": _QUESTIONS,
  "model.lora.rank": "the stored adapters have it",
  "model.lora.alpha": "the stored adapters were trained with it",
  "model.lora.modules": "the stored adapters are of these kernels",
  "model.lora.base_dtype": "the stored adapters were trained on that base",
  "model.lora.adapter": "the stored adapters came of it",
  "model.name": "stored weights and tokens are of that model and tokenizer",
  "model.tokenizer": "stored weights and tokens are of that tokenizer",
  "task.dataset": _QUESTIONS,
  "task.sources": _QUESTIONS,
  "task.params": _QUESTIONS,
  "task.eval_dataset": _QUESTIONS,
  "task.eval_percent": _QUESTIONS,
  "task.fields": _QUESTIONS,
  "task.on_bad_row": _QUESTIONS,
  "task.rest_after": _QUESTIONS,
  "task.rest_for": _QUESTIONS,
  "task.template": _QUESTIONS,
  "task.chat": _QUESTIONS,
  "task.system": _QUESTIONS,
  "task.answer_prefix": "stored groups were scored with it",
  "task.reward": "stored groups were scored with it",
  "task.rewards": "stored groups were scored with them",
  "warm_start": _WARM_START,
  "preference": _WARM_START,
  "rollout.max_prompt_tokens": "it decides which questions there are",
  "rollout.temperature": "stored logprobs are of tokens drawn at it",
  "rollout.stop": "half-written trajectories were read with it",
  "rollout.stop_token_ids": "half-written trajectories were read with it",
  "algorithm.num_minibatches": "the stored number of updates, and so the place"
  " on the learning rate's curve, counts so many a step",
  "algorithm.num_epochs": "the stored number of updates counts so many a step",
  "algorithm.reference_every": _MOVED,
  "algorithm.reference_decay": _MOVED,
  "algorithm.kl_coef": "the checkpoint holds a reference, or none if it was 0",
  "critic.warmup_steps": "the policy's learning rate counts from its end",
  "critic.trunk": "the checkpoint holds the other kind of critic",
  "critic.normalize_decay": "the stored critic predicts in units that it has"
  " made",
  "critic.optimizer.name": _MOMENTS,
  "critic.optimizer.b1": _MOMENTS,
  "critic.optimizer.b2": _MOMENTS,
  "critic.optimizer.state_dtype": _MOMENTS,
  "algorithm.teacher": "the checkpoint holds the teacher, or none",
  "train.optimizer.name": _MOMENTS,
  "train.optimizer.b1": _MOMENTS,
  "train.optimizer.b2": _MOMENTS,
  "train.optimizer.state_dtype": _MOMENTS,
  "eval.num_items": _HELD_OUT,
  "task.solved_score": _HELD_OUT,
  "eval.temperature": _HELD_OUT,
}

# The keys that `training_run.Run` stores. Parameters that launch/sft.py wrote
# do not have them.
_RUN_STATE = (
  "groups_per_step",
  "next_index",
  "stream",
  "ledger",
  "metrics",
  "record",
)


def reason(table: dict[str, str], path: str) -> str | None:
  """Return the reason that a table gives for a field or for its section."""
  section = path.partition(".")[0]
  return table.get(path) or table.get(section)


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
  for path, values in config_json.differences(stored, wanted).items():
    before, now = map(_shown, values)
    why = None if path in unread else reason(MUST_STAY, path)
    if path in _REWARDS and _as_scored(values[0]) == _as_scored(values[1]):
      why = None
    if path == "algorithm.kl_coef" and (all(values) or stored.model.lora.rank):
      why = None  # the checkpoint holds what is needed
    if path == "algorithm.advantage" and "gae" in values:
      why = "the checkpoint holds a critic if it is gae, and none otherwise"
    held = _holds_compute_dtype(stored)
    if path == "model.compute_dtype" and held:
      why = f"the checkpoint holds a {held} of that type"
    if has_outstanding and why is None:
      why = reason(NOT_WITH_OUTSTANDING_GROUPS, path)
    if why is None:
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

  Checkpoints of format 0 do not hold the config. For these, config.json in the
  workdir is read.

  Raises:
    ConfigError: the config cannot be found or read.
  """
  if "config" in host_state:
    try:
      return config_json.from_stored(host_state["config"])
    except ValueError as error:
      raise workdir_lib.WorkdirError(
        f"workdir: the checkpoint in {workdir} has a config that is not of this"
        f" version ({error})"
      ) from error
  found = config_json.read(workdir)
  if found is None:
    raise workdir_lib.WorkdirError(
      f"workdir: {workdir / config_json.NAME} is missing, and the checkpoint is"
      " of a version that kept the config nowhere else; put it back"
    )
  return found


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
  schedule_bytes = stored.get(schedule_start.KEY, 0)
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
    stored.get("max_staleness", then.algorithm.max_staleness),
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
