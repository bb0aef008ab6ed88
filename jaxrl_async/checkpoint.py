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

One process writes, under a claim on the workdir. Any number may read meanwhile
and change nothing: see `read_newest`.
"""

from collections.abc import Callable, Iterator
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
from typing import IO, Any, TypeVar

import numpy as np

from jaxrl_async import config
from jaxrl_async import item_json
from jaxrl_async import manifest
from jaxrl_async import pytree_files
from jaxrl_async import storage
from jaxrl_async.types import FinishReason, Prompt, RolloutGroup, Trajectory

R = TypeVar("R")

# Rises when what is stored changes so that earlier code would misread it.
# Checkpoints of format 0 carry no number, and no config in their host state.
FORMAT = 1
_ARRAY_FIELDS = (
  "tokens",
  "loss_mask",
  "behavior_logprobs",
  "policy_versions",
)


class CheckpointError(config.ConfigError):
  """A checkpoint cannot be written or read; one line that names the file."""


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

  Raises:
    StorageError: the disk did not take it; earlier ones are as they were.
  """
  if keep < 1:
    raise CheckpointError(f"keep is {keep}, must be at least 1")
  directory = pathlib.Path(directory).absolute()
  with storage.writing(directory / str(step)):
    try:
      _save(directory, step, train_state, host_state, groups, keep)
    except (OSError, ValueError):
      # What is useless would only keep the disk full.
      shutil.rmtree(directory / f"{step}.incomplete", ignore_errors=True)
      raise


def _save(
  directory: pathlib.Path,
  step: int,
  train_state: Any,
  host_state: dict[str, Any],
  groups: list[OutstandingGroup],
  keep: int,
) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  recover(directory)
  for suffix in ("incomplete", "removed"):
    for leftover in directory.glob(f"*.{suffix}"):
      shutil.rmtree(leftover)
  for replaced in directory.glob("*.old"):
    _remove(replaced)
  named = pytree_files.named_leaves(train_state)
  incomplete = directory / f"{step}.incomplete"
  incomplete.mkdir()
  (incomplete / "host_state.json").write_text(json.dumps(host_state))
  write_groups(incomplete, groups)
  # Last, so that nothing can raise while it writes in the background.
  pytree_files.save_async(incomplete / "train_state", named)()
  layout = pytree_files.layout(named)
  about = {"format": FORMAT, "step": step, "layout": layout}
  manifest.write(incomplete, about, sync=True)
  target, replaced = directory / str(step), directory / f"{step}.old"
  if target.exists():
    target.rename(replaced)
  incomplete.rename(target)
  _sync_names(directory)
  if replaced.exists():
    _remove(replaced)
  for old in _steps(directory)[:-keep]:
    _remove_unread(directory / str(old))


def recover(directory: pathlib.Path) -> None:
  """Puts back what a crash left between two renames, moved aside but whole.

  For the process that writes; readers find it where it is.
  """
  for replaced in directory.glob("*.old"):
    if not replaced.with_suffix("").exists():
      replaced.rename(replaced.with_suffix(""))


def latest(directory: pathlib.Path) -> int | None:
  """The newest step with a checkpoint, None without one.

  Raises:
    CheckpointError: there is something of that name that cannot be looked into.
  """
  return max(_steps(pathlib.Path(directory)), default=None)


def unsealed(directory: pathlib.Path) -> list[pathlib.Path]:
  """Checkpoints that lost their manifest: none is ever written without it.

  Raises:
    CheckpointError: as of `latest`.
  """
  return [
    directory / name
    for name in _names(directory)
    if name.isdecimal() and not (directory / name / manifest.NAME).exists()
  ]


def read_newest(
  directory: pathlib.Path, read: Callable[[int], R]
) -> tuple[int, R] | None:
  """Reads the newest checkpoint while another process may write.

  A shared lock on its manifest keeps it from being removed meanwhile. One that
  was removed just before, or that is replaced by one of the same step, is no
  error: then the one that is newest by now is read.

  Args:
    directory: of the run's checkpoints.
    read: what to do with the checkpoint of a step, such as `restore`.

  Returns:
    The step and what `read` returned; None if there is no checkpoint.
  """
  directory = pathlib.Path(directory).absolute()
  while (step := latest(directory)) is not None:
    path = _path(directory, step)
    try:
      lock = open(path / manifest.NAME, "rb")
    except FileNotFoundError:
      continue
    with lock:
      _lock(lock, fcntl.LOCK_SH)
      try:
        result = read(step)
      except (CheckpointError, OSError, ValueError):
        # Orbax raises a ValueError for arrays that have vanished.
        if _is_at(path, lock) and latest(directory) == step:
          raise
        continue
      if _is_at(path, lock):
        return step, result
  return None


def host_state(directory: pathlib.Path, step: int) -> dict[str, Any]:
  """The caller's part of a checkpoint.

  Raises:
    CheckpointError: as of `restore`.
  """
  path = _path(directory, step)
  _verify(path, step)
  return json.loads((path / "host_state.json").read_text())


def group_records(directory: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """The outstanding groups without their arrays, as `_pack` makes them."""
  return json.loads((_path(directory, step) / "groups.json").read_text())


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
  path = _path(directory, step)
  about = _verify(path, step)
  try:
    named = pytree_files.named_leaves(abstract_train_state)
    pytree_files.check_layout(about["layout"], pytree_files.layout(named))
  except pytree_files.LayoutError as error:
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


def _verify(path: pathlib.Path, step: int) -> dict[str, Any]:
  """What the manifest says about a checkpoint, which is whole.

  Raises:
    CheckpointError: it is damaged, or not what its name says.
  """
  try:
    about = manifest.verify(path)
  except (manifest.ManifestError, OSError) as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  if not isinstance(about, dict) or not {"step", "layout"} <= about.keys():
    raise CheckpointError(f"{path} is not a checkpoint")
  if about.get("format", 0) > FORMAT:
    raise CheckpointError(
      f"{path} has format {about['format']}, of a newer version than this one,"
      f" which knows {FORMAT}; use that version"
    )
  if about["step"] != step:
    raise CheckpointError(f"{path} holds step {about['step']}")
  return about


def _path(directory: pathlib.Path, step: int) -> pathlib.Path:
  """Where a checkpoint is; a crash may have left it moved aside but whole."""
  path = pathlib.Path(directory).absolute() / str(step)
  aside = path.with_suffix(".old")
  return aside if not path.exists() and aside.exists() else path


def _is_at(path: pathlib.Path, lock: IO[bytes]) -> bool:
  """Whether an open manifest is still that of the checkpoint at a path."""
  try:
    found = os.stat(path / manifest.NAME)
  except FileNotFoundError:
    return False
  return os.path.samestat(found, os.fstat(lock.fileno()))


def _lock(manifest_file: IO[bytes], how: int) -> bool:
  """Locks a checkpoint against removal; False if it is being read.

  Where the file system has no locks, readers depend on reading again.
  """
  try:
    fcntl.flock(manifest_file, how)
  except BlockingIOError:
    return False
  except OSError:
    return True
  return True


def _remove_unread(path: pathlib.Path) -> None:
  """Removes a checkpoint, unless it is being read: then a later save does."""
  with open(path / manifest.NAME, "rb") as lock:
    if _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
      _remove(path)


def _remove(path: pathlib.Path) -> None:
  # Under another name first: what is half removed is no checkpoint.
  shutil.rmtree(path.rename(path.with_suffix(".removed")))


def _names(directory: pathlib.Path) -> list[str]:
  """What lies in a directory that need not exist."""
  try:
    return sorted(os.listdir(directory))
  except FileNotFoundError:
    if directory.is_symlink():
      raise CheckpointError(
        f"{directory} is a link to {os.readlink(directory)}, which does not"
        " exist; is its disk mounted?"
      ) from None
    return []
  except OSError as error:
    raise CheckpointError(
      f"{directory} cannot be read ({error.strerror})"
    ) from error


def _steps(directory: pathlib.Path) -> list[int]:
  """Steps with a sealed checkpoint, ascending."""
  names = {name.removesuffix(".old") for name in _names(directory)}
  return sorted(
    int(step)
    for step in names
    if step.isdecimal()
    and (_path(directory, int(step)) / manifest.NAME).exists()
  )


def _sync_names(directory: pathlib.Path) -> None:
  """Wait until the directory's renames have reached the disk."""
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
