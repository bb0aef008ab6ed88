"""Checkpoints: train state, host state and outstanding groups of a run.

    <directory>/<step>/train_state/       Orbax's files
    <directory>/<step>/host_state.json    state of the caller, such as prompts
    <directory>/<step>/groups.json        the groups without their arrays
    <directory>/<step>/<field>.npy        one array field of all trajectories
    <directory>/<step>/manifest.json      a digest of each file

A checkpoint is written under a temporary name, sealed by its manifest and then
renamed. A directory named by its step is therefore complete, and a crash before
the rename leaves the previous checkpoint as the newest. A checkpoint that no
longer matches its manifest raises an error. Falling back silently to an earlier
one would hide a failing disk. Nothing is pickled.

One process writes, under a claim on the workdir. Any number of processes may
read at the same time without changing anything; see `read_newest`. If several
processes train together, the train state is written and read by all of them,
each its own part. Process 0 calls `save` and `restore`, which do the rest. The
others call `save_arrays` and `restore_arrays` when it says so.
"""

from collections.abc import Callable
import fcntl
import functools
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
Announce = Callable[[pathlib.Path], None]

# The format is raised when earlier code would misread the stored files.
# Checkpoints of format 0 have no format number and no config in their host
# state. Up to format 1 a train state held one model, the policy, all of whose
# parameters were trained, and trajectories had a score instead of a reward.
FORMAT = 2

# Prefixes of the names of the policy's arrays: now, and before format 2.
_BEFORE_FORMAT_2 = {
  "models.policy.trainable.": "params.",
  "models.policy.frozen.": "params.",
  "models.policy.opt_state.": "opt_state.",
}


class CheckpointError(sections.ConfigError):
  """A checkpoint cannot be written or read; the message is one line."""


def save(
  directory: pathlib.Path,
  step: int,
  train_state: Any,
  host_state: dict[str, Any],
  groups: list[outstanding_lib.OutstandingGroup],
  *,
  keep: int = 2,
  announce: Announce = lambda path: None,
) -> None:
  """Write a checkpoint, then remove all but the newest ones.

  The arguments may be changed after this function has returned.

  Args:
    directory: directory of the run's checkpoints; created if missing.
    step: completed train steps. A checkpoint of the same step is replaced.
    train_state: pytree of arrays on any devices.
    host_state: JSON data. Floats are restored exactly.
    groups: the outstanding groups.
    keep: number of checkpoints to keep, at least 1.
    announce: is called with the path for `save_arrays`, when it is time for the
      other processes to call that.

  Raises:
    CheckpointError: `keep` is less than 1.
    StorageError: the checkpoint could not be written. Earlier checkpoints are
      unchanged.
  """
  if keep < 1:
    raise CheckpointError(f"keep is {keep}, must be at least 1")
  directory = pathlib.Path(directory).absolute()
  with disk.writing(directory / str(step)):
    try:
      _save(directory, step, train_state, host_state, groups, keep, announce)
    except (OSError, ValueError):
      # The incomplete files are useless and would keep a full disk full.
      shutil.rmtree(directory / f"{step}.incomplete", ignore_errors=True)
      raise


def _save(
  directory: pathlib.Path,
  step: int,
  train_state: Any,
  host_state: dict[str, Any],
  groups: list[outstanding_lib.OutstandingGroup],
  keep: int,
  announce: Announce,
) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  recover(directory)
  for suffix in ("incomplete", "removed"):
    for leftover in directory.glob(f"*.{suffix}"):
      shutil.rmtree(leftover)
  for replaced in directory.glob("*.old"):
    _remove(replaced)
  layout = pytree_files.layout(pytree_files.named_leaves(train_state))
  incomplete = directory / f"{step}.incomplete"
  incomplete.mkdir()
  (incomplete / "host_state.json").write_text(json.dumps(host_state))
  outstanding_lib.write(incomplete, groups)
  # This comes last, so that nothing can raise during its background write.
  announce(incomplete / "train_state")
  save_arrays(incomplete / "train_state", train_state)
  about = {"format": FORMAT, "step": step, "layout": layout}
  manifest.write(incomplete, about, sync=True)
  target, replaced = directory / str(step), directory / f"{step}.old"
  if target.exists():
    target.rename(replaced)
  incomplete.rename(target)
  _sync_names(directory)
  if replaced.exists():
    _remove(replaced)
  for old in steps(directory)[:-keep]:
    _remove_unread(directory / str(old))


def save_arrays(path: pathlib.Path, train_state: Any) -> None:
  """Write this process's part of a train state, and wait for the others."""
  pytree_files.save_async(path, pytree_files.named_leaves(train_state))()


def recover(directory: pathlib.Path) -> None:
  """Rename back a complete checkpoint that a crash left as `<step>.old`.

  That happens if `save` is killed between its two renames. Only the process
  that writes may call this function. Readers find the checkpoint under either
  name.
  """
  for replaced in directory.glob("*.old"):
    if not replaced.with_suffix("").exists():
      replaced.rename(replaced.with_suffix(""))


def latest(directory: pathlib.Path) -> int | None:
  """Return the newest step with a checkpoint, or None if there is none.

  Raises:
    CheckpointError: the directory exists but cannot be read.
  """
  return max(steps(pathlib.Path(directory)), default=None)


def unsealed(directory: pathlib.Path) -> list[pathlib.Path]:
  """Return checkpoints whose manifest is missing, which means damage.

  Raises:
    CheckpointError: the directory exists but cannot be read.
  """
  return [
    directory / name
    for name in _names(directory)
    if name.isdecimal() and not (directory / name / manifest.NAME).exists()
  ]


def read_newest(
  directory: pathlib.Path, read: Callable[[int], R]
) -> tuple[int, R] | None:
  """Read the newest checkpoint while another process may write.

  A shared lock on the manifest prevents the checkpoint from being removed while
  it is read. If it was removed before that, or replaced by another one of the
  same step, the checkpoint that is now the newest is read instead.

  Args:
    directory: directory of the run's checkpoints.
    read: function that reads the checkpoint of a step, such as `restore`.

  Returns:
    The step and the result of `read`, or None if there is no checkpoint.
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
  """Return the host state of a checkpoint.

  Raises:
    CheckpointError: the checkpoint is damaged.
  """
  path = _path(directory, step)
  _verify(path, step)
  return json.loads((path / "host_state.json").read_text())


def group_records(directory: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """Return the stored records of the outstanding groups, without arrays."""
  return json.loads((_path(directory, step) / "groups.json").read_text())


def restore(
  directory: pathlib.Path,
  step: int,
  abstract_train_state: Any,
  *,
  announce: Announce = lambda path: None,
) -> tuple[Any, dict[str, Any], list[outstanding_lib.OutstandingGroup]]:
  """Read a checkpoint that `save` wrote, bit for bit.

  Args:
    directory: directory of the run's checkpoints.
    step: step of the checkpoint; see `latest`.
    abstract_train_state: a train state with jax.ShapeDtypeStruct leaves. Their
      shardings are those of the result and may differ from those of the saved
      state.
    announce: is called with the checkpoint's path when it has been verified,
      and the other processes are to call `restore_arrays`.

  Returns:
    The train state, the host state and the outstanding groups.

  Raises:
    CheckpointError: a file is missing, was added or has changed, even by one
      bit, or the stored leaves are not those of the abstract state.
  """
  path = _path(directory, step)
  about = _verify(path, step)
  stored_as = _check_layout(about, step, abstract_train_state)
  announce(path)
  train_state = pytree_files.load(
    path / "train_state", abstract_train_state, stored_as=stored_as
  )
  host_state = json.loads((path / "host_state.json").read_text())
  try:
    groups = outstanding_lib.read(path)
  except outstanding_lib.OutstandingError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  return train_state, host_state, groups


def check_layout(
  directory: pathlib.Path, step: int, abstract_train_state: Any
) -> None:
  """Check the names, shapes and dtypes of a checkpoint; no array is read.

  Args:
    directory: directory of the checkpoints.
    step: step of the checkpoint; see `latest`.
    abstract_train_state: as in `restore`.

  Raises:
    CheckpointError: there is no such checkpoint, or the stored leaves are not
      those of the abstract state.
  """
  path = _path(directory, step)
  try:
    about = manifest.about(path)
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise CheckpointError(f"{path} is not a checkpoint") from error
  _check_layout(_readable(about, path, step), step, abstract_train_state)


def _check_layout(
  about: dict[str, Any], step: int, abstract_train_state: Any
) -> Callable[[str], str]:
  """Check what a manifest says, and return the stored name of each array."""
  stored_as = functools.partial(_stored_as, written_as=about.get("format", 0))
  try:
    named = pytree_files.named_leaves(abstract_train_state)
    expected = pytree_files.layout(named)
    pytree_files.check_layout(
      about["layout"], {stored_as(name): x for name, x in expected.items()}
    )
  except pytree_files.LayoutError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  return stored_as


def restore_arrays(path: pathlib.Path, abstract_train_state: Any) -> Any:
  """Read this process's part of a train state that process 0 has verified."""
  written_as = manifest.about(path).get("format", 0)
  return pytree_files.load(
    path / "train_state",
    abstract_train_state,
    stored_as=functools.partial(_stored_as, written_as=written_as),
  )


def restore_params(
  directory: pathlib.Path, step: int, abstract_params: Any
) -> Any:
  """Read the policy's parameters alone, without the optimizer's state.

  Args:
    directory: directory of the run's checkpoints.
    step: step of the checkpoint; see `steps`.
    abstract_params: the parameters with jax.ShapeDtypeStruct leaves, in the
      shardings of the result.

  Raises:
    CheckpointError: the checkpoint is damaged or of another architecture.
  """
  path = _path(directory, step)
  about = _verify(path, step)
  found = about["layout"]
  parts = [f"models.policy.{part}." for part in ("trainable", "frozen")]
  stored_parts = [_stored_as(part, about.get("format", 0)) for part in parts]

  def stored_as(name: str) -> str:
    names = [part + name for part in stored_parts]
    return next((n for n in names if n in found), names[0])

  expected = pytree_files.layout(pytree_files.named_leaves(abstract_params))
  try:
    pytree_files.check_layout(
      {n: x for n, x in found.items() if n.startswith(tuple(stored_parts))},
      {stored_as(name): x for name, x in expected.items()},
    )
  except pytree_files.LayoutError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  return pytree_files.load(
    path / "train_state", abstract_params, stored_as=stored_as, is_partial=True
  )


def _stored_as(name: str, written_as: int) -> str:
  """Return the name under which a checkpoint stores an array.

  Args:
    name: name of the array in a train state of the current format.
    written_as: format of the checkpoint.
  """
  if written_as < 2:
    for now, then in _BEFORE_FORMAT_2.items():
      if name.startswith(now):
        return then + name.removeprefix(now)
  return name


def _verify(path: pathlib.Path, step: int) -> dict[str, Any]:
  """Verify a checkpoint and return the information stored in its manifest.

  Raises:
    CheckpointError: the checkpoint is damaged, its format is too new, or it
      belongs to another step.
  """
  try:
    about = manifest.verify(path)
  except (manifest.ManifestError, OSError) as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  return _readable(about, path, step)


def _readable(about: Any, path: pathlib.Path, step: int) -> dict[str, Any]:
  """Return what a manifest says, if it is of a checkpoint that can be read.

  Raises:
    CheckpointError: the format is too new, or it belongs to another step.
  """
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
  """Return the path of a checkpoint.

  A crash may have left it complete but under the name `<step>.old`.
  """
  path = pathlib.Path(directory).absolute() / str(step)
  aside = path.with_suffix(".old")
  return aside if not path.exists() and aside.exists() else path


def _is_at(path: pathlib.Path, lock: IO[bytes]) -> bool:
  """Return whether the checkpoint at a path still has this open manifest."""
  try:
    found = os.stat(path / manifest.NAME)
  except FileNotFoundError:
    return False
  return os.path.samestat(found, os.fstat(lock.fileno()))


def _lock(manifest_file: IO[bytes], how: int) -> bool:
  """Lock a manifest; return False if another process holds it.

  On a file system without locks the result is True. Readers then rely on
  `read_newest`, which reads again if a checkpoint has vanished.
  """
  try:
    fcntl.flock(manifest_file, how)
  except BlockingIOError:
    return False
  except OSError:
    return True
  return True


def _remove_unread(path: pathlib.Path) -> None:
  """Remove a checkpoint unless a process reads it.

  In that case a later `save` removes it.
  """
  with open(path / manifest.NAME, "r+b") as lock:
    if _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
      _remove(path)


def _remove(path: pathlib.Path) -> None:
  # The rename comes first, so that a half-removed directory does not look like
  # a checkpoint.
  shutil.rmtree(path.rename(path.with_suffix(".removed")))


def _names(directory: pathlib.Path) -> list[str]:
  """Return the names in a directory, which need not exist.

  Raises:
    CheckpointError: the directory exists but cannot be read.
  """
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


def steps(directory: pathlib.Path) -> list[int]:
  """Return the steps that have a sealed checkpoint, in ascending order."""
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
