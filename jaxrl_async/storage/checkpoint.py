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

from collections.abc import Callable
import fcntl
import json
import os
import pathlib
import shutil
from typing import IO, Any, TypeVar

from jaxrl_async.config import sections
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import pytree_files

R = TypeVar("R")

# Rises when what is stored changes so that earlier code would misread it.
# Checkpoints of format 0 carry no number, and no config in their host state.
# Up to format 1 a train state held one model, the policy, all of it trained.
# Its groups' trajectories had a score in place of a reward.
FORMAT = 2

# Where that policy's arrays are now, and how their names began then.
_BEFORE_FORMAT_2 = {
  "models.policy.trainable.": "params.",
  "models.policy.frozen.": "params.",
  "models.policy.opt_state.": "opt_state.",
}


class CheckpointError(sections.ConfigError):
  """A checkpoint cannot be written or read; one line that names the file."""


def save(
  directory: pathlib.Path,
  step: int,
  train_state: Any,
  host_state: dict[str, Any],
  groups: list[outstanding_lib.OutstandingGroup],
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
  with disk.writing(directory / str(step)):
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
  groups: list[outstanding_lib.OutstandingGroup],
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
  outstanding_lib.write(incomplete, groups)
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
  """The outstanding groups without their arrays, as they are stored."""
  return json.loads((_path(directory, step) / "groups.json").read_text())


def restore(
  directory: pathlib.Path,
  step: int,
  abstract_train_state: Any,
) -> tuple[Any, dict[str, Any], list[outstanding_lib.OutstandingGroup]]:
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

  def stored_as(name: str) -> str:
    return _stored_as(name, about.get("format", 0))

  try:
    named = pytree_files.named_leaves(abstract_train_state)
    expected = pytree_files.layout(named)
    pytree_files.check_layout(
      about["layout"], {stored_as(name): x for name, x in expected.items()}
    )
  except pytree_files.LayoutError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  train_state = pytree_files.load(
    path / "train_state", abstract_train_state, stored_as=stored_as
  )
  host_state = json.loads((path / "host_state.json").read_text())
  try:
    groups = outstanding_lib.read(path)
  except outstanding_lib.OutstandingError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  return train_state, host_state, groups


def _stored_as(name: str, written_as: int) -> str:
  """The name on the disk of an array of the train state.

  Args:
    name: in a train state of today.
    written_as: format of the checkpoint.
  """
  if written_as < 2:
    for now, then in _BEFORE_FORMAT_2.items():
      if name.startswith(now):
        return then + name.removeprefix(now)
  return name


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
