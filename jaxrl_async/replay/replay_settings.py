"""Which part of a run a replay plays again."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import timing_start
from jaxrl_async.storage import config_json

# Settings that change no bit of what is generated and trained.
_HARMLESS = ("run.", "cluster.", "transfer.", "eval.", "task.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
  """What to replay.

  Attributes:
    until: train steps that are completed at the end; None is all.
    from_step: train step of the checkpoint to begin with; 0 is the beginning.
  """

  until: int | None = None
  from_step: int = 0


def part(
  recorded: recorded_timing.RecordedTiming, wanted: Wanted
) -> tuple[sections.Config, int]:
  """Return the config of the part to replay, and the step where it ends.

  Raises:
    ConfigError: there is no such part, its config changes on the way, or it
      cannot be replayed.
  """
  last = recorded.num_steps
  first, until = wanted.from_step, wanted.until
  end = last if until is None else until
  sections.require(
    last > 0,
    "workdir",
    f"{recorded.path} has no train steps; a run records them with"
    " run.record_timing",
  )
  sections.require(
    first < end <= last,
    "until",
    f"the timing record has train steps up to {last}; use one above {first}"
    " and not above that",
  )
  missing = set(range(first, end)) - recorded.summaries.keys()
  sections.require(
    not missing,
    "workdir",
    f"train step {min(missing, default=0)} is not in {recorded.path}, because"
    " it was made without run.record_timing; replay the steps before or after"
    " it, with --until or --from_step",
  )
  used, *others = _starts(recorded, first, end)
  config = _config(used)
  for later in others:
    found = config_json.differences(config, _config(later))
    changed = [path for path in found if not _may_change(path)]
    if config.train.decay == 1.0 and "train.num_steps" in changed:
      changed.remove("train.num_steps")  # no learning rate ends there
    sections.require(
      not changed,
      "until",
      f"the run went on from step {later.step} with another"
      f" {', '.join(changed)}; replay it with --until={later.step}",
    )
  sections.require(
    config.rollout.kv_on_adopt is not sections.KvOnAdopt.KEEP,
    "workdir",
    "with rollout.kv_on_adopt=keep a cache is of several versions, which is not"
    " recorded",
  )
  sections.require(
    not config.rollout.kept_tokens,
    "workdir",
    "with rollout.kept_tokens a cache is of several programs, which is not"
    " recorded",
  )
  sections.require(
    first == used.step or config.run.exact_resume,
    "from_step",
    "groups were being generated when this checkpoint was taken, and the run"
    " was without run.exact_resume; use 0, or a step with which a start of the"
    " run began",
  )
  return config, end


def _starts(
  recorded: recorded_timing.RecordedTiming, first: int, end: int
) -> list[recorded_timing.Start]:
  """Return the starts of the program that made the steps of a part."""
  before = [s for s in recorded.starts if s.step <= first]
  return before[-1:] + [s for s in recorded.starts if first < s.step < end]


def _config(start: recorded_timing.Start) -> sections.Config:
  try:
    config = config_json.from_stored(start.config)
  except ValueError as error:
    raise sections.ConfigError(
      f"workdir: the timing record's config is not of this version ({error})"
    ) from error
  # It decides on which devices the run has trained.
  config.cluster = sections.ClusterSection(kind=config.cluster.kind)
  return config


def _may_change(path: str) -> bool:
  """Return whether a setting may change in the part that is replayed."""
  # The questions of these sets are left out of the prompts.
  return path.startswith(_HARMLESS) and not path.startswith("eval.sets")


def check_environment(
  recorded: recorded_timing.RecordedTiming,
  first: int,
  end: int,
  now: Mapping[str, Any],
  note: Callable[[str], None],
) -> None:
  """Check that the replay is given what the run was, and tell other changes.

  Args:
    recorded: the timing record. What an earlier version of this program did not
      record of a start is not compared.
    first: completed train steps before the part that is replayed.
    end: the same after it.
    now: what `timing_start.environment` returns of the replay.
    note: is called with a line about what may make bits differ.

  Raises:
    ConfigError: the run was given something that the replay was not.
  """
  for start in _starts(recorded, first, end):
    then = start.environment
    for name in timing_start.GIVEN:
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
