"""Reports and work as few large arrays, which are cheap to send.

A report of a thousand trajectories would be four thousand small arrays, which
take longer to encode and decode than all else that a coordinator does.
"""

from collections.abc import Sequence
import dataclasses
import itertools

from jaxtyping import Bool, Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.rollout import messages

_REASONS = (None, *types.FinishReason)
_NUMBERS = {reason: number for number, reason in enumerate(_REASONS)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedTrajectories:
  """N trajectories with T tokens in all, without rewards and events.

  Attributes:
    reasons: of each finish reason, its index in `types.FinishReason` plus one;
      0 is none.
    writers: those of each trajectory; () if none has any.
    num_steered: how many `steered` tokens each has.
    steered: the positions of all of them.
    num_builds: how many `cache_builds` each has.
    builds: the fields of all of them.
  """

  members: Int[np.ndarray, "N"]
  lengths: Int[np.ndarray, "N"]
  reasons: Int[np.ndarray, "N"]
  tokens: Int[np.ndarray, "T"]
  loss_mask: Bool[np.ndarray, "T"]
  behavior_logprobs: Float[np.ndarray, "T"]
  policy_versions: Int[np.ndarray, "T"]
  num_steered: Int[np.ndarray, "N"]
  steered: Int[np.ndarray, "S"]
  num_builds: Int[np.ndarray, "N"]
  builds: Int[np.ndarray, "C 4"]
  writers: tuple[tuple[tuple[str, int], ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedReport:
  """A `messages.Report`."""

  replica: str
  groups: Int[np.ndarray, "N"]
  begins: Int[np.ndarray, "N"]
  cached: Int[np.ndarray, "N"]
  trajectories: PackedTrajectories


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedWork:
  """A `messages.Work`.

  Attributes:
    admissions: index, birth and deadline of each turn's group.
    limits: of each turn.
    questions: of each turn; -1 for that of a group.
    settings: the distinct (temperature, stop, stop_token_ids, guide) of the
      turns.
    settings_of: of each turn, which of them are its own.
  """

  admissions: Int[np.ndarray, "N 3"]
  limits: Int[np.ndarray, "N"]
  questions: Int[np.ndarray, "N"]
  settings: tuple[tuple[float, tuple[str, ...], tuple[int, ...], str], ...]
  settings_of: Int[np.ndarray, "N"]
  trajectories: PackedTrajectories
  cancelled: tuple[int, ...]


def pack_trajectories(
  trajectories: Sequence[types.Trajectory],
) -> PackedTrajectories:
  """Return trajectories end to end."""
  has_writers = any(t.writers for t in trajectories)
  dtypes = np.int32, np.bool_, np.float32, np.int32
  return PackedTrajectories(
    members=np.array([t.member for t in trajectories], np.int32),
    lengths=np.array([len(t.tokens) for t in trajectories], np.int32),
    reasons=np.array(
      [_NUMBERS[t.finish_reason] for t in trajectories], np.int8
    ),
    writers=tuple(t.writers for t in trajectories) if has_writers else (),
    num_steered=np.array([len(t.steered) for t in trajectories], np.int32),
    steered=np.array([at for t in trajectories for at in t.steered], np.int32),
    num_builds=np.array([len(t.cache_builds) for t in trajectories], np.int32),
    builds=np.array(
      [build for t in trajectories for build in t.cache_builds], np.int32
    ).reshape(-1, 4),
    **{
      name: np.concatenate([getattr(t, name) for t in trajectories])
      if trajectories
      else np.zeros(0, dtype)
      for name, dtype in zip(types.TOKEN_ARRAYS, dtypes, strict=True)
    },
  )


def unpack_trajectories(packed: PackedTrajectories) -> list[types.Trajectory]:
  """Invert `pack_trajectories`; the arrays share the memory of the argument."""
  ends = np.cumsum(packed.lengths).tolist()
  arrays = [getattr(packed, name) for name in types.TOKEN_ARRAYS]
  writers = packed.writers or ((),) * len(ends)
  steered = iter(packed.steered.tolist())
  builds = itertools.starmap(types.CacheBuild, packed.builds.tolist())
  found, start = [], 0
  for member, reason, by, num_steered, num_builds, end in zip(
    packed.members.tolist(),
    packed.reasons.tolist(),
    writers,
    packed.num_steered.tolist(),
    packed.num_builds.tolist(),
    ends,
    strict=True,
  ):
    tokens, mask, logprobs, versions = [x[start:end] for x in arrays]
    found.append(
      types.Trajectory(
        member=member,
        tokens=tokens,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        policy_versions=versions,
        finish_reason=_REASONS[reason],
        writers=by,
        steered=tuple(itertools.islice(steered, num_steered)),
        cache_builds=tuple(itertools.islice(builds, num_builds)),
      )
    )
    start = end
  return found


def pack_report(report: messages.Report) -> PackedReport:
  """Return a report as arrays."""
  written = report.written
  return PackedReport(
    replica=report.replica,
    groups=np.array([one.group for one in written], np.int64),
    begins=np.array([one.begin for one in written], np.int32),
    cached=np.array([one.num_cached for one in written], np.int32),
    trajectories=pack_trajectories([one.trajectory for one in written]),
  )


def unpack_report(packed: PackedReport) -> messages.Report:
  """Invert `pack_report`."""
  return messages.Report(
    replica=packed.replica,
    written=tuple(
      messages.Written(group, begin, trajectory, num_cached)
      for group, begin, trajectory, num_cached in zip(
        packed.groups.tolist(),
        packed.begins.tolist(),
        unpack_trajectories(packed.trajectories),
        packed.cached.tolist(),
        strict=True,
      )
    ),
  )


def pack_work(work: messages.Work) -> PackedWork:
  """Return work as arrays."""
  settings = [
    (t.temperature, t.stop, t.stop_token_ids, t.guide) for t in work.turns
  ]
  distinct = {one: i for i, one in enumerate(dict.fromkeys(settings))}
  return PackedWork(
    admissions=np.array(
      [
        (t.admission.index, t.admission.birth, t.admission.deadline)
        for t in work.turns
      ],
      np.int64,
    ).reshape(-1, 3),
    limits=np.array([t.limit for t in work.turns], np.int32),
    questions=np.array(
      [-1 if t.question is None else t.question for t in work.turns], np.int32
    ),
    settings=tuple(distinct),
    settings_of=np.array([distinct[one] for one in settings], np.int32),
    trajectories=pack_trajectories([t.trajectory for t in work.turns]),
    cancelled=work.cancelled,
  )


def unpack_work(packed: PackedWork) -> messages.Work:
  """Invert `pack_work`."""
  turns = []
  for (index, birth, deadline), limit, question, number, trajectory in zip(
    packed.admissions.tolist(),
    packed.limits.tolist(),
    packed.questions.tolist(),
    packed.settings_of.tolist(),
    unpack_trajectories(packed.trajectories),
    strict=True,
  ):
    temperature, stop, stop_token_ids, guide = packed.settings[number]
    turns.append(
      messages.Turn(
        admission=types.Admission(index=index, birth=birth, deadline=deadline),
        trajectory=trajectory,
        limit=limit,
        temperature=temperature,
        stop=stop,
        stop_token_ids=stop_token_ids,
        guide=guide,
        question=None if question < 0 else question,
      )
    )
  return messages.Work(turns=tuple(turns), cancelled=packed.cancelled)
