"""Everything a run needs to go on: train state, host state, outstanding groups.

    <directory>/<step>/train_state/       Orbax's files
    <directory>/<step>/host_state.json    the caller's: prompts, lengths, record
    <directory>/<step>/groups.json        records and scalars of the groups
    <directory>/<step>/<field>.npy        one of their arrays, end to end
    <directory>/<step>/manifest.json      a digest per file

A checkpoint is written under another name, sealed by its manifest and renamed:
what has a step for a name is whole, and a crash before the rename leaves the
previous checkpoint the newest. What was whole and no longer matches its
manifest raises instead: falling back in silence would hide a failing disk.
Nothing is pickled.
"""

from collections.abc import Iterator
import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from jaxrl_async import item_json
from jaxrl_async import manifest
from jaxrl_async import pytree_files
from jaxrl_async.types import FinishReason, Prompt, RolloutGroup, Trajectory

_ARRAY_FIELDS = (
  "tokens",
  "loss_mask",
  "behavior_logprobs",
  "policy_versions",
)


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or read; the message names the file."""


@dataclasses.dataclass(kw_only=True, slots=True)
class OutstandingGroup:
  """One group that has not ended, as the buffer knows it.

  Attributes:
    index: admission order.
    birth: policy version at admission.
    deadline: last train step that may use it.
    status: the buffer's word for where the group is.
    group: its trajectories, partial or finished; None before the first token.
  """

  index: int
  birth: int
  deadline: int
  status: str
  group: RolloutGroup | None


def save(
  directory: pathlib.Path,
  step: int,
  train_state: Any,
  host_state: dict[str, Any],
  groups: list[OutstandingGroup],
  *,
  keep: int = 2,
) -> None:
  """Write a checkpoint, then remove all but the newest.

  Args:
    directory: of the run's checkpoints; created if missing.
    step: completed train steps; a checkpoint of the same step is replaced.
    train_state: pytree of arrays on any devices, read before this returns.
    host_state: JSON; floats come back exactly.
    groups: read before this returns.
    keep: checkpoints left, at least 1.
  """
  if keep < 1:
    raise CheckpointError(f"keep is {keep}, must be at least 1")
  directory = pathlib.Path(directory).absolute()
  directory.mkdir(parents=True, exist_ok=True)
  _recover(directory)
  for suffix in ("incomplete", "old", "removed"):
    for leftover in directory.glob(f"*.{suffix}"):
      shutil.rmtree(leftover)
  named = pytree_files.named_leaves(train_state)
  incomplete = directory / f"{step}.incomplete"
  incomplete.mkdir()
  (incomplete / "host_state.json").write_text(json.dumps(host_state))
  write_groups(incomplete, groups)
  # Last, so that nothing can raise while it writes in the background.
  pytree_files.save_async(incomplete / "train_state", named)()
  about = {"step": step, "layout": pytree_files.layout(named)}
  manifest.write(incomplete, about, sync=True)
  target, replaced = directory / str(step), directory / f"{step}.old"
  if target.exists():
    target.rename(replaced)
  incomplete.rename(target)
  _sync_names(directory)
  shutil.rmtree(replaced, ignore_errors=True)
  for old in _steps(directory)[:-keep]:
    shutil.rmtree((directory / str(old)).rename(directory / f"{old}.removed"))


def latest(directory: pathlib.Path) -> int | None:
  """The newest step with a checkpoint, None without one."""
  _recover(pathlib.Path(directory))
  return max(_steps(pathlib.Path(directory)), default=None)


def host_state(directory: pathlib.Path, step: int) -> dict[str, Any]:
  """The caller's part of a checkpoint.

  Raises:
    CheckpointError: as of `restore`.
  """
  path = pathlib.Path(directory).absolute() / str(step)
  try:
    manifest.verify(path)
  except manifest.ManifestError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  return json.loads((path / "host_state.json").read_text())


def restore(
  directory: pathlib.Path,
  step: int,
  abstract_train_state: Any,
) -> tuple[Any, dict[str, Any], list[OutstandingGroup]]:
  """Read what `save` wrote, bit for bit.

  Args:
    directory: of the run's checkpoints.
    step: see `latest`.
    abstract_train_state: jax.ShapeDtypeStruct leaves with the shardings wanted
      now, which need not be those the state was saved with.

  Raises:
    CheckpointError: a file is missing, added or changed by a single bit, or
      the state does not have the abstract state's leaves.
  """
  path = pathlib.Path(directory).absolute() / str(step)
  try:
    about = manifest.verify(path)
    if about["step"] != step:
      raise CheckpointError(f"{path} holds step {about['step']}")
    named = pytree_files.named_leaves(abstract_train_state)
    pytree_files.check_layout(about["layout"], pytree_files.layout(named))
  except (manifest.ManifestError, pytree_files.LayoutError) as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  train_state = pytree_files.load(path / "train_state", abstract_train_state)
  host_state = json.loads((path / "host_state.json").read_text())
  return train_state, host_state, read_groups(path)


def write_groups(
  directory: pathlib.Path, groups: list[OutstandingGroup]
) -> None:
  """Write `groups.json` and the .npy files into an existing directory."""
  records, arrays = _pack(groups)
  (directory / "groups.json").write_text(json.dumps(records))
  for field, array in arrays.items():
    np.save(directory / f"{field}.npy", array, allow_pickle=False)


def read_groups(directory: pathlib.Path) -> list[OutstandingGroup]:
  """Read what `write_groups` wrote, bit for bit.

  Raises:
    CheckpointError: a group was stored without its item.
  """
  records = json.loads((directory / "groups.json").read_text())
  arrays = {
    field: np.load(directory / f"{field}.npy", allow_pickle=False)
    for field in ("prompt_tokens", *_ARRAY_FIELDS)
  }
  return _unpack(records, arrays)


def _pack(
  groups: list[OutstandingGroup],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
  """JSON records, and per field the arrays of all of them end to end."""
  pieces: dict[str, list[np.ndarray]] = {"prompt_tokens": []}
  pieces |= {field: [] for field in _ARRAY_FIELDS}
  records = []
  for outstanding in groups:
    group = outstanding.group
    records.append(
      {
        "index": outstanding.index,
        "birth": outstanding.birth,
        "deadline": outstanding.deadline,
        "status": outstanding.status,
        "group": None if group is None else _group_record(group),
      }
    )
    if group is None:
      continue
    pieces["prompt_tokens"].append(group.prompt.tokens)
    for trajectory in group.trajectories:
      for field in _ARRAY_FIELDS:
        array = getattr(trajectory, field)
        if array.shape != trajectory.tokens.shape:
          raise CheckpointError(
            f"group {group.index} member {trajectory.member}: {field} is "
            f"{array.shape}, tokens are {trajectory.tokens.shape}"
          )
        pieces[field].append(array)
  arrays = {}
  for field, parts in pieces.items():
    dtypes = sorted({str(part.dtype) for part in parts})
    if len(dtypes) > 1:
      raise CheckpointError(f"{field} mixes {' and '.join(dtypes)}")
    arrays[field] = np.concatenate(parts) if parts else np.zeros(0)
  return records, arrays


def _group_record(group: RolloutGroup) -> dict[str, Any]:
  """All of a group but its arrays, and the lengths that cut those apart."""
  try:
    item = item_json.encode(group.prompt.item)
  except item_json.UnstorableError as error:
    raise CheckpointError(
      f"group {group.index}: the item of {group.prompt.prompt_id} holds {error}"
    ) from error
  return {
    "index": group.index,
    "birth": group.birth,
    "deadline": group.deadline,
    "prompt_id": group.prompt.prompt_id,
    "item": item,
    "num_prompt_tokens": len(group.prompt.tokens),
    "times_s": group.times_s,
    "trajectories": [
      {
        "member": trajectory.member,
        "num_tokens": len(trajectory.tokens),
        "finish_reason": trajectory.finish_reason,
        "reward": trajectory.reward,
      }
      for trajectory in group.trajectories
    ],
  }


def _unpack(
  records: list[dict[str, Any]],
  arrays: dict[str, np.ndarray],
) -> list[OutstandingGroup]:
  """The inverse of `_pack`."""
  present = [r["group"] for r in records if r["group"] is not None]
  prompts = _cut(
    arrays["prompt_tokens"], [g["num_prompt_tokens"] for g in present]
  )
  lengths = [t["num_tokens"] for g in present for t in g["trajectories"]]
  pieces = {field: _cut(arrays[field], lengths) for field in _ARRAY_FIELDS}
  groups = []
  for record in records:
    group = record.pop("group")
    if group is not None:
      group = _read_group(group, next(prompts), pieces)
    groups.append(OutstandingGroup(**record, group=group))
  return groups


def _read_group(
  record: dict[str, Any],
  prompt_tokens: np.ndarray,
  pieces: dict[str, Iterator[np.ndarray]],
) -> RolloutGroup:
  """One group; takes its trajectories' arrays off the front of `pieces`."""
  if "item" not in record:
    raise CheckpointError(
      f"group {record['index']} was stored without its question,"
      f" {record['prompt_id']}; start in an empty workdir"
    )
  trajectories = []
  for trajectory in record["trajectories"]:
    reason = trajectory["finish_reason"]
    trajectories.append(
      Trajectory(
        member=trajectory["member"],
        finish_reason=None if reason is None else FinishReason(reason),
        reward=trajectory["reward"],
        **{field: next(pieces[field]) for field in _ARRAY_FIELDS},
      )
    )
  return RolloutGroup(
    index=record["index"],
    birth=record["birth"],
    deadline=record["deadline"],
    prompt=Prompt(
      prompt_id=record["prompt_id"],
      tokens=prompt_tokens,
      item=item_json.decode(record["item"]),
    ),
    trajectories=trajectories,
    times_s=record["times_s"],
  )


def _cut(array: np.ndarray, lengths: list[int]) -> Iterator[np.ndarray]:
  """Consecutive pieces of the given lengths."""
  start = 0
  for length in lengths:
    yield array[start : start + length]
    start += length


def _steps(directory: pathlib.Path) -> list[int]:
  """Steps with a sealed checkpoint, ascending."""
  return sorted(
    int(path.parent.name)
    for path in directory.glob(f"*/{manifest.NAME}")
    if path.parent.name.isdecimal()
  )


def _recover(directory: pathlib.Path) -> None:
  """Puts back what a crash left between two renames, moved aside but whole."""
  for replaced in directory.glob("*.old"):
    if not replaced.with_suffix("").exists():
      replaced.rename(replaced.with_suffix(""))


def _sync_names(directory: pathlib.Path) -> None:
  """Wait until the directory's renames have reached the disk."""
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
