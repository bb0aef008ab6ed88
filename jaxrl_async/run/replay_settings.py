"""Which part of a run a replay plays again, and with which settings."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from jaxrl_async.config import field_types
from jaxrl_async.config import sections
from jaxrl_async.coordination import recorded_schedule
from jaxrl_async.run import schedule_start
from jaxrl_async.storage import config_json

# Settings that change no bit of what is generated and trained.
_HARMLESS = ("run.", "cluster.", "transfer.", "eval.", "task.")
# Settings of the programs, which decide how something is computed and not what.
# Other ones round differently.
_OF_PROGRAMS = (
  "mesh.",
  "model.remat",
  "train.tokens_per_row",
  "train.rows_per_microbatch",
  "train.vocab_chunk",
  "train.attention",
  "train.optimizer.offload",
  "critic.optimizer.offload",
  "algorithm.reference_offload",
  "rollout.num_slots",
  "rollout.cache_tokens",
  "rollout.decode_steps_per_call",
  "rollout.prefill_rows",
  "rollout.prefill_buckets",
  "rollout.prefill_chunk",
  "rollout.window_buckets",
  "rollout.num_pages",
  "rollout.page_tokens",
  "rollout.preemption",
  "rollout.attention",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
  """What to replay.

  Attributes:
    until: train steps that are completed at the end; None is all.
    from_step: train step of the checkpoint to begin with; 0 is the beginning.
    from_ledger: whether to train on the stored trajectories, without generating
      them.
    is_forced: the same, and every token is checked: see `forced_replay`.
    settings: values of fields by path, which replace those of the run. Only
      settings of programs, and only if every token is checked.
  """

  until: int | None = None
  from_step: int = 0
  from_ledger: bool = False
  is_forced: bool = False
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def generates(self) -> bool:
    """Whether the trajectories are generated again."""
    return not (self.from_ledger or self.is_forced)

  @property
  def compared(self) -> str:
    """The name of what such a replay has found to be true, or not."""
    if self.is_forced:
      return "draws_equal"
    return "losses_bit_exact" if self.from_ledger else "bit_exact"


def part(
  recorded: recorded_schedule.RecordedSchedule, wanted: Wanted
) -> tuple[sections.Config, int]:
  """Return the config of the part to replay, and the step where it ends.

  Raises:
    ConfigError: there is no such part, its config changes on the way, or it
      cannot be replayed in this way or with these settings.
  """
  last = recorded.num_steps
  first, until = wanted.from_step, wanted.until
  end = last if until is None else until
  sections.require(
    last > 0,
    "workdir",
    f"{recorded.path} has no train steps; a run records them with"
    " run.record_schedule",
  )
  sections.require(
    first < end <= last,
    "until",
    f"the schedule has train steps up to {last}; use one above {first} and not"
    " above that",
  )
  missing = set(range(first, end)) - recorded.summaries.keys()
  sections.require(
    not missing,
    "workdir",
    f"train step {min(missing, default=0)} is not in {recorded.path}, because"
    " it was made without run.record_schedule; replay the steps before or after"
    " it, with --until or --from_step",
  )
  used, *others = _starts(recorded, first, end)
  config = _config(used)
  for later in others:
    found = config_json.differences(config, _config(later))
    changed = [path for path in found if not _may_change(path, wanted)]
    if config.train.decay == 1.0 and "train.num_steps" in changed:
      changed.remove("train.num_steps")  # no learning rate ends there
    sections.require(
      not changed,
      "until",
      f"the run went on from step {later.step} with another"
      f" {', '.join(changed)}; replay it with --until={later.step}",
    )
  _check_kind(config, wanted)
  sections.require(
    first == used.step or config.run.exact_resume or not wanted.generates,
    "from_step",
    "groups were being generated when this checkpoint was taken, and the run"
    " was without run.exact_resume; use 0, or a step with which a start of the"
    " run began",
  )
  for path, value in wanted.settings.items():
    _check_setting(path, wanted)
    field_types.set_at(config, path, value)
  return config, end


def _starts(
  recorded: recorded_schedule.RecordedSchedule, first: int, end: int
) -> list[recorded_schedule.Start]:
  """Return the starts of the program that made the steps of a part."""
  before = [s for s in recorded.starts if s.step <= first]
  return before[-1:] + [s for s in recorded.starts if first < s.step < end]


def _config(start: recorded_schedule.Start) -> sections.Config:
  try:
    config = config_json.from_stored(start.config)
  except ValueError as error:
    raise sections.ConfigError(
      f"workdir: the schedule's config is not of this version ({error})"
    ) from error
  # It decides on which devices the run has trained.
  config.cluster = sections.ClusterSection(kind=config.cluster.kind)
  return config


def _may_change(path: str, wanted: Wanted) -> bool:
  """Return whether a setting may change in the part that is replayed."""
  if path.startswith("eval.sets"):
    return not wanted.generates  # their questions are left out of the prompts
  if path.startswith(_HARMLESS):
    return True
  return wanted.is_forced and path.startswith(_OF_PROGRAMS)


def _check_kind(config: sections.Config, wanted: Wanted) -> None:
  """Check that the run's tokens can be what this kind of replay compares."""
  sections.require(
    config.rollout.kv_on_adopt is not sections.KvOnAdopt.KEEP
    or wanted.from_ledger,
    "workdir",
    "with rollout.kv_on_adopt=keep a cache is of several versions, which is not"
    " recorded; use --from_ledger",
  )
  weights = config.rollout.weights
  sections.require(
    weights is sections.WeightFormat.FLOAT or not wanted.is_forced,
    "teacher_forced",
    f"the run drew with rollout.weights={weights.value}, and the forward pass"
    " that checks tokens has no such weights; leave it out",
  )
  for path, dtype in {
    "rollout.dtype": config.rollout.dtype,
    "model.compute_dtype": config.model.compute_dtype,
  }.items():
    sections.require(
      dtype == "float32" or not wanted.is_forced,
      "teacher_forced",
      f"the run has {path}={dtype}, in which programs differ by more than the"
      " 1e-4 that is allowed to a logprob; leave it out",
    )


def _check_setting(path: str, wanted: Wanted) -> None:
  sections.require(
    path != "rollout.weights",
    path,
    "other weights draw other tokens; leave it out",
  )
  sections.require(
    path.startswith(_OF_PROGRAMS),
    path,
    "it decides what was generated and trained, and not in which programs;"
    " leave it out",
  )
  sections.require(
    wanted.is_forced,
    path,
    "other programs round differently, so that bits cannot be compared; add"
    " --teacher_forced, or leave it out",
  )


def check_environment(
  recorded: recorded_schedule.RecordedSchedule,
  first: int,
  end: int,
  now: Mapping[str, Any],
  note: Callable[[str], None],
) -> None:
  """Check that the replay is given what the run was, and tell other changes.

  Args:
    recorded: the schedule. What an earlier version of this program did not
      record of a start is not compared.
    first: completed train steps before the part that is replayed.
    end: the same after it.
    now: what `schedule_start.environment` returns of the replay.
    note: is called with a line about what may make bits differ.

  Raises:
    ConfigError: the run was given something that the replay was not.
  """
  for start in _starts(recorded, first, end):
    then = start.environment
    for name in schedule_start.GIVEN:
      sections.require(
        now[name] is not None or then.get(name) is None,
        name,
        f"the run was given one of its own, {then.get(name)}; use"
        f" jaxrl_async.replay(..., {name}=...) in a script",
      )
    changed = [
      f"{name} was {then[name]!r} and is {value!r}"
      for name, value in now.items()
      if name in then and then[name] != value
    ]
    if changed:
      note(f"bits may differ from step {start.step} on: {'; '.join(changed)}")
