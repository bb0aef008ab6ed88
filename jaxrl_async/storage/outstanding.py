"""Outstanding groups, which have not ended, and their files in a checkpoint.

groups.json     the groups without their arrays, questions included
<field>.npy     one array field of all trajectories, end to end
"""

from collections.abc import Iterator
import dataclasses
import io
import json
import pathlib
from typing import Any

import numpy as np

from jaxrl_async.storage import disk
from jaxrl_async.storage import item_json
from jaxrl_async.types import (
  TOKEN_ARRAYS,
  Admission,
  CacheBuild,
  Dropped,
  Event,
  FinishReason,
  Prompt,
  Reward,
  RolloutGroup,
  Trajectory,
)

_ARRAYS = ("prompt_tokens", *TOKEN_ARRAYS)
ADMISSION_FIELDS = tuple(x.name for x in dataclasses.fields(Admission))


class OutstandingError(ValueError):
  """Groups cannot be stored."""


@dataclasses.dataclass(kw_only=True, slots=True)
class OutstandingGroup:
  """A group that has not ended, partial or finished.

  Attributes:
    status: the buffer's status of the group.
  """

  status: str
  group: RolloutGroup


def write(directory: pathlib.Path, groups: list[OutstandingGroup]) -> None:
  """Write the files of `packed` into an existing directory.

  Raises:
    OutstandingError: a group cannot be stored.
  """
  for name, pieces in packed(groups).items():
    disk.write_pieces(directory / name, pieces)


def packed(groups: list[OutstandingGroup]) -> dict[str, disk.Pieces]:
  """Return the content of `groups.json` and of the .npy files, by name.

  The arrays of trajectories are not copied, because nothing changes them.

  Raises:
    OutstandingError: a group cannot be stored.
  """
  arrays: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}
  records = []
  for outstanding in groups:
    group = outstanding.group
    records.append(
      {"status": outstanding.status, "group": _group_record(group)}
    )
    arrays["prompt_tokens"].append(group.prompt.tokens)
    for trajectory in group.trajectories:
      for field in TOKEN_ARRAYS:
        array = getattr(trajectory, field)
        if array.shape != trajectory.tokens.shape:
          raise OutstandingError(
            f"group {group.index} member {trajectory.member}: {field} is "
            f"{array.shape}, tokens are {trajectory.tokens.shape}"
          )
        arrays[field].append(array)
  files: dict[str, disk.Pieces] = {
    "groups.json": [json.dumps(records).encode()]
  }
  return files | {f"{name}.npy": _npy(name, x) for name, x in arrays.items()}


def _npy(field: str, pieces: list[np.ndarray]) -> disk.Pieces:
  """Return the file that numpy reads as these arrays end to end."""
  dtypes = {piece.dtype for piece in pieces} or {np.dtype(np.float64)}
  if len(dtypes) > 1:
    names = " and ".join(sorted(map(str, dtypes)))
    raise OutstandingError(f"{field} mixes {names}")
  (dtype,) = dtypes
  header = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    header,
    {
      "descr": np.lib.format.dtype_to_descr(dtype),
      "fortran_order": False,
      "shape": (sum(map(len, pieces)),),
    },
  )
  return [header.getvalue(), *[np.ascontiguousarray(x).data for x in pieces]]


def read(directory: pathlib.Path) -> list[OutstandingGroup]:
  """Read the groups that `write` stored, bit for bit."""
  records = json.loads((directory / "groups.json").read_text())
  arrays = {
    name: np.load(directory / f"{name}.npy", allow_pickle=False)
    for name in _ARRAYS
  }
  stored = [record["group"] for record in records]
  lengths = [t["num_tokens"] for g in stored for t in g["trajectories"]]
  pieces = {field: _cut(arrays[field], lengths) for field in TOKEN_ARRAYS}
  pieces["prompt_tokens"] = _cut(
    arrays["prompt_tokens"], [g["num_prompt_tokens"] for g in stored]
  )
  return [
    OutstandingGroup(
      status=record["status"], group=_read_group(record["group"], pieces)
    )
    for record in records
  ]


def _group_record(group: RolloutGroup) -> dict[str, Any]:
  """Return the record of a group, which holds the lengths of its arrays."""
  try:
    item = item_json.encode(group.prompt.item)
  except item_json.UnstorableError as error:
    raise OutstandingError(
      f"group {group.index}: the item of {group.prompt.prompt_id} holds {error}"
    ) from error
  return {
    **dataclasses.asdict(group.admission),
    "prompt_id": group.prompt.prompt_id,
    "item": item,
    "num_prompt_tokens": len(group.prompt.tokens),
    "times_s": group.times_s,
    "dropped": [dataclasses.asdict(one) for one in group.dropped],
    "trajectories": [
      {
        "member": trajectory.member,
        "num_tokens": len(trajectory.tokens),
        "finish_reason": trajectory.finish_reason,
        "writers": trajectory.writers,
        "steered": trajectory.steered,
        "cache_builds": trajectory.cache_builds,
        "events": trajectory.events,
        "reward": _reward_record(trajectory.reward),
      }
      for trajectory in group.trajectories
    ],
  }


def _reward_record(reward: Reward | None) -> dict[str, Any] | None:
  """Return a reward as JSON."""
  if reward is None:
    return None
  return {
    "score": reward.score,
    "parts": dict(reward.parts),
    "token_scores": token_scores_record(reward),
    "answer": reward.answer,
  }


def token_scores_record(reward: Reward) -> list[tuple[int, float]] | None:
  """Return the token scores of a reward as JSON.

  Keys of JSON objects are strings. Token scores therefore become pairs
  (position, score).
  """
  scores = reward.token_scores
  return None if scores is None else list(scores.items())


def read_token_scores(record: list[Any] | None) -> dict[int, float] | None:
  """Invert `token_scores_record`."""
  return None if record is None else {at: x for at, x in record}


def _read_reward(record: dict[str, Any] | None) -> Reward | None:
  """Invert `_reward_record`."""
  if record is None:
    return None
  return Reward(
    score=record["score"],
    parts=record["parts"],
    token_scores=read_token_scores(record["token_scores"]),
    answer=record["answer"],
  )


def read_admission(record: dict[str, Any]) -> Admission:
  """Return the admission from a record that holds other fields too."""
  return Admission(**{name: record[name] for name in ADMISSION_FIELDS})


def _read_group(
  record: dict[str, Any], pieces: dict[str, Iterator[np.ndarray]]
) -> RolloutGroup:
  """Return one group, taking its arrays from the iterators in `pieces`."""
  trajectories = []
  for trajectory in record["trajectories"]:
    reason = trajectory["finish_reason"]
    trajectories.append(
      Trajectory(
        member=trajectory["member"],
        finish_reason=None if reason is None else FinishReason(reason),
        reward=_read_reward(trajectory["reward"]),
        writers=tuple((n, k) for n, k in trajectory["writers"]),
        steered=tuple(trajectory["steered"]),
        cache_builds=tuple(CacheBuild(*x) for x in trajectory["cache_builds"]),
        events=tuple(Event(*x) for x in trajectory["events"]),
        **{field: next(pieces[field]) for field in TOKEN_ARRAYS},
      )
    )
  return RolloutGroup(
    admission=read_admission(record),
    prompt=Prompt(
      prompt_id=record["prompt_id"],
      tokens=next(pieces["prompt_tokens"]),
      item=item_json.decode(record["item"]),
    ),
    trajectories=trajectories,
    dropped=tuple(Dropped(**one) for one in record["dropped"]),
    times_s=record["times_s"],
  )


def _cut(array: np.ndarray, lengths: list[int]) -> Iterator[np.ndarray]:
  """Yield consecutive pieces of the given lengths."""
  start = 0
  for length in lengths:
    yield array[start : start + length]
    start += length
