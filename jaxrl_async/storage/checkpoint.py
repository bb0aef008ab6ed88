"""Checkpoints: train state, host state and outstanding groups of a run.

    <directory>/<step>/train_state/       Orbax's files
    <directory>/<step>/host_state.json    state of the caller, such as prompts
    <directory>/<step>/groups.json        the groups without their arrays
    <directory>/<step>/<field>.npy        one array field of all trajectories
    <directory>/<step>/manifest.json      a digest of each file

A checkpoint is written under a temporary name, sealed by its manifest and then
renamed. A directory named by its step is therefore complete, and a crash before
the rename leaves the previous checkpoint as the newest. While another one takes
its place, a checkpoint is called `<step>.old`. A checkpoint that no longer
matches its manifest raises an error, and is never read. `newest_whole` finds
the newest one that is whole, and `set_aside` renames newer ones. Nothing is
pickled.

`begin` copies what a checkpoint holds into host memory, but for the arrays of
trajectories, which are there and do not change. What it returns does the rest,
possibly in another thread: it writes, computes the digests, and renames. Only
one checkpoint of a directory may be between the two.

One process writes, under a claim on the workdir. Any number of processes may
read at the same time without changing anything; see `read_newest`. A reader
holds a shared lock on the manifest, and the writer removes only what it can
lock exclusively. If several processes train together, the train state is
written and read by all of them, each its own part. Process 0 calls `begin` and
`restore`. The others call `begin_arrays` and `restore_arrays` when it says so.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fcntl
import gc
import json
import logging
import os
import pathlib
import shutil
from typing import IO, Any, NamedTuple, TypeVar

from jaxrl_async.config import sections
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import pytree_files

R = TypeVar("R")
Announce = Callable[[pathlib.Path], None]
Verified = dict[str, Any]  # what `verify` returns

# The format is raised when earlier code would misread the stored files.
FORMAT = 1
_DAMAGED = ".damaged"
_OLD = ".old"


class CheckpointError(sections.ConfigError):
  """A checkpoint cannot be written or read; the message is one line."""


class DamagedError(CheckpointError):
  """A checkpoint is not what was written; the message is one line."""


def save(
  directory: pathlib.Path,
  step: int,
  train_state: Any,
  host_state: dict[str, Any],
  groups: list[outstanding_lib.OutstandingGroup],
  **options: Any,
) -> None:
  """Write a checkpoint, and wait until it has reached the disk.

  The arguments and exceptions are those of `begin`, and of what that returns.
  """
  begin(directory, step, train_state, host_state, groups, **options)()


def begin(
  directory: pathlib.Path,
  step: int,
  train_state: Any,
  host_state: dict[str, Any],
  groups: list[outstanding_lib.OutstandingGroup],
  *,
  keep: int = 2,
  announce: Announce = lambda path: None,
) -> Callable[[], None]:
  """Copy what a checkpoint holds, and begin to write it.

  The arguments may be changed, and the arrays donated, after this function has
  returned. The arrays of trajectories may not: they are written as they are.

  Args:
    directory: directory of the run's checkpoints; created if missing.
    step: completed train steps. A checkpoint of the same step is replaced.
    train_state: pytree of arrays on any devices.
    host_state: JSON data. Floats are restored exactly.
    groups: the outstanding groups.
    keep: number of checkpoints to keep, at least 1.
    announce: is called with the path for `begin_arrays`, when it is time for
      the other processes to call that.

  Returns:
    A function that waits until the checkpoint has reached the disk under its
    name, and then removes all but the newest ones. It has to be called before
    the next checkpoint of this directory is begun, in any thread. It raises a
    StorageError if the checkpoint could not be written. Earlier checkpoints are
    then unchanged.

  Raises:
    CheckpointError: `keep` is less than 1.
    StorageError: the checkpoint could not be begun. Earlier ones are unchanged.
  """
  if keep < 1:
    raise CheckpointError(f"keep is {keep}, must be at least 1")
  directory = pathlib.Path(directory).absolute()
  incomplete = directory / f"{step}.incomplete"
  with _writing(directory, step):
    files = outstanding_lib.packed(groups)
    files["host_state.json"] = [json.dumps(host_state).encode()]
    layout = pytree_files.layout(pytree_files.named_leaves(train_state))
    make_ready(directory)
    incomplete.mkdir()
    # This comes last, so that nothing can raise during its background write.
    announce(incomplete / "train_state")
    wait = begin_arrays(incomplete / "train_state", train_state)

  def finish() -> None:
    with _writing(directory, step):
      with disk.naming_lost_files(incomplete):
        wait()
      for name, pieces in files.items():
        disk.write_pieces(incomplete / name, pieces)
      about = {"format": FORMAT, "step": step, "layout": layout}
      manifest.write(incomplete, about, sync=True)
      _put_in_place(directory, step, keep)

  return finish


@contextlib.contextmanager
def _writing(directory: pathlib.Path, step: int) -> Iterator[None]:
  """Remove what is incomplete if the disk fails inside the block."""
  with disk.writing(directory / str(step)):
    try:
      yield
    except (OSError, ValueError):
      # The incomplete files are useless and would keep a full disk full.
      incomplete = directory / f"{step}.incomplete"
      shutil.rmtree(incomplete, ignore_errors=True)
      raise


def begin_arrays(path: pathlib.Path, train_state: Any) -> Callable[[], None]:
  """Begin to write this process's part of a train state.

  Returns:
    A function that waits until all processes have written their parts.
  """
  return pytree_files.save_async(path, pytree_files.named_leaves(train_state))


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
  was_replaced = False
  while (step := latest(directory)) is not None:
    path = _path_of(directory, step)
    try:
      lock = open(path / manifest.NAME, "rb")
    except FileNotFoundError:
      continue
    with lock:
      _lock_manifest(lock, fcntl.LOCK_SH)
      try:
        result = read(step)
      except (CheckpointError, OSError, ValueError):
        # Orbax raises a ValueError for arrays that have vanished.
        is_newest = _is_at(path, lock) and latest(directory) == step
        if is_newest and not was_replaced:
          raise
        # What has failed leaves behind, until it is collected, that a file of
        # this path is missing: Orbax does not look again (recheck_cached_data).
        was_replaced = not is_newest
        gc.collect()
        continue
      if _is_at(path, lock):
        return step, result
  return None


def verify(directory: pathlib.Path, step: int) -> Verified:
  """Verify all files of a checkpoint, and return what its manifest says.

  Raises:
    DamagedError: a file is missing, was added or has changed.
    CheckpointError: it is of a newer version.
  """
  path = _path_of(directory, step)
  try:
    about = manifest.verify(path)
  except (manifest.ManifestError, OSError) as error:
    is_refused = isinstance(error, PermissionError)
    kind = CheckpointError if is_refused else DamagedError
    raise kind(f"checkpoint of step {step}: {error}") from error
  return _readable(about, path, step)


def host_state(
  directory: pathlib.Path, step: int, verified: Verified | None = None
) -> dict[str, Any]:
  """Return the host state of a checkpoint, all of which is verified.

  Args:
    directory: directory of the run's checkpoints.
    step: step of the checkpoint; see `latest`.
    verified: the result of `verify`, if that was called before.

  Raises:
    DamagedError: a file is missing, was added or has changed.
    CheckpointError: it is of a newer version.
  """
  path = _path_of(directory, step)
  if verified is None:
    verify(directory, step)
  return json.loads((path / "host_state.json").read_text())


def group_records(directory: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """Return the stored records of the outstanding groups, without arrays."""
  return json.loads((_path_of(directory, step) / "groups.json").read_text())


def restore(
  directory: pathlib.Path,
  step: int,
  abstract_train_state: Any,
  *,
  verified: Verified | None = None,
  announce: Announce = lambda path: None,
) -> tuple[Any, dict[str, Any], list[outstanding_lib.OutstandingGroup]]:
  """Read a checkpoint that `save` wrote, bit for bit.

  Args:
    directory: directory of the run's checkpoints.
    step: step of the checkpoint; see `latest`.
    abstract_train_state: a train state with jax.ShapeDtypeStruct leaves. Their
      shardings are those of the result and may differ from those of the saved
      state.
    verified: the result of `verify`, if that was called before.
    announce: is called with the checkpoint's path when it has been verified,
      and the other processes are to call `restore_arrays`.

  Returns:
    The train state, the host state and the outstanding groups.

  Raises:
    CheckpointError: a file is missing, was added or has changed, even by one
      bit, or the stored leaves are not those of the abstract state.
  """
  path = _path_of(directory, step)
  about = verified or verify(directory, step)
  _check_layout(about, step, abstract_train_state)
  announce(path)
  train_state = pytree_files.load(path / "train_state", abstract_train_state)
  host_state = json.loads((path / "host_state.json").read_text())
  return train_state, host_state, outstanding_lib.read(path)


def check_layout(
  directory: pathlib.Path, step: int, abstract_train_state: Any
) -> None:
  """Check the names, shapes and dtypes of a checkpoint; no array is read.

  Raises:
    CheckpointError: there is no such checkpoint, or the stored leaves are not
      those of the abstract state.
  """
  path = _path_of(directory, step)
  try:
    about = manifest.about(path)
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise CheckpointError(f"{path} is not a checkpoint") from error
  _check_layout(_readable(about, path, step), step, abstract_train_state)


def _check_layout(
  about: dict[str, Any], step: int, abstract_train_state: Any
) -> None:
  """Check what a manifest says of the arrays."""
  try:
    named = pytree_files.named_leaves(abstract_train_state)
    pytree_files.check_layout(about["layout"], pytree_files.layout(named))
  except pytree_files.LayoutError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error


def restore_arrays(path: pathlib.Path, abstract_train_state: Any) -> Any:
  """Read this process's part of a train state that process 0 has verified."""
  return pytree_files.load(path / "train_state", abstract_train_state)


def restore_params(
  directory: pathlib.Path,
  step: int,
  abstract_params: Any,
  *,
  verified: Verified | None = None,
) -> Any:
  """Read the policy's parameters alone, without the optimizer's state.

  Args:
    directory: directory of the run's checkpoints.
    step: step of the checkpoint; see `steps`.
    abstract_params: the parameters with jax.ShapeDtypeStruct leaves, in the
      shardings of the result.
    verified: the result of `verify`, if that was called before.

  Raises:
    CheckpointError: the checkpoint is damaged or of another architecture.
  """
  path = _path_of(directory, step)
  found = (verified or verify(directory, step))["layout"]
  parts = [f"models.policy.{part}." for part in ("trainable", "frozen")]

  def stored_as(name: str) -> str:
    names = [part + name for part in parts]
    return next((n for n in names if n in found), names[0])

  expected = pytree_files.layout(pytree_files.named_leaves(abstract_params))
  try:
    pytree_files.check_layout(
      {n: x for n, x in found.items() if n.startswith(tuple(parts))},
      {stored_as(name): x for name, x in expected.items()},
    )
  except pytree_files.LayoutError as error:
    raise CheckpointError(f"checkpoint of step {step}: {error}") from error
  return pytree_files.load(
    path / "train_state", abstract_params, stored_as=stored_as, is_partial=True
  )


def _readable(about: Any, path: pathlib.Path, step: int) -> dict[str, Any]:
  """Return what a manifest says, if it is of a checkpoint that can be read."""
  if not isinstance(about, dict) or not {"step", "layout"} <= about.keys():
    raise CheckpointError(f"{path} is not a checkpoint")
  if about.get("format") != FORMAT:
    raise CheckpointError(
      f"{path} has format {about.get('format')}, of another version than this"
      f" one, which knows {FORMAT}; use that version"
    )
  if about["step"] != step:
    raise CheckpointError(f"{path} holds step {about['step']}")
  return about


# -- damaged checkpoints ------------------------------------------------------


class Whole(NamedTuple):
  """A checkpoint whose files are those that were written.

  Attributes:
    step: of the checkpoint.
    host_state: what it holds.
    damaged: the newer steps that were passed over.
    verified: for `restore`, so that nothing is verified twice.
  """

  step: int
  host_state: dict[str, Any]
  damaged: tuple[int, ...]
  verified: Verified


def newest_whole(
  directory: pathlib.Path, note: Callable[[str], None]
) -> Whole | None:
  """Find the newest checkpoint that is whole; nothing is changed.

  Args:
    directory: directory of the run's checkpoints.
    note: is called with a message about each damaged checkpoint.

  Returns:
    The checkpoint, or None if there is none at all.

  Raises:
    DamagedError: all of them are damaged. The error is about the newest.
    CheckpointError: the newest one that is whole is of a newer version.
  """
  damaged: dict[int, DamagedError] = {}
  for step in reversed(steps(directory)):
    try:
      verified = verify(directory, step)
      state = host_state(directory, step, verified)
    except DamagedError as error:
      damaged[step] = error
      continue
    for error in damaged.values():
      note(f"WARNING: {error}; going back to the checkpoint of step {step}")
    return Whole(step, state, tuple(damaged), verified)
  for error in damaged.values():
    raise error
  return None


def set_aside(directory: pathlib.Path, damaged: Sequence[int]) -> None:
  """Rename damaged checkpoints, so that nobody takes them for whole ones.

  What a crash has left of such a step under its old name goes with it: the run
  goes on from an earlier step and comes to this one anew. What was set aside
  before is removed, because it would fill the disk.
  """
  if not damaged:
    return
  before = [*directory.glob(f"*{_DAMAGED}")]
  for step in damaged:
    for name in (f"{step}", f"{step}{_OLD}"):
      target = directory / f"{name}{_DAMAGED}"
      shutil.rmtree(target, ignore_errors=True)
      if (directory / name).exists():
        (directory / name).rename(target)
  for path in before:
    if int(path.name.partition(".")[0]) not in damaged:
      shutil.rmtree(path, ignore_errors=True)


# -- where checkpoints lie ----------------------------------------------------


def _names(directory: pathlib.Path) -> list[str]:
  """Return the names in a directory, which need not exist."""
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


def _path_of(directory: pathlib.Path, step: int) -> pathlib.Path:
  """Return the path of a checkpoint.

  A crash may have left it complete but under the name `<step>.old`.
  """
  path = pathlib.Path(directory).absolute() / str(step)
  aside = path.with_suffix(_OLD)
  return aside if not path.exists() and aside.exists() else path


def _is_at(path: pathlib.Path, lock: IO[bytes]) -> bool:
  """Return whether the checkpoint at a path still has this open manifest."""
  try:
    found = os.stat(path / manifest.NAME)
  except FileNotFoundError:
    return False
  return os.path.samestat(found, os.fstat(lock.fileno()))


def _lock_manifest(manifest_file: IO[bytes], how: int) -> bool:
  """Lock a manifest; return False if another process holds it.

  On a file system without locks the result is True. Readers then rely on
  `read_newest`, which reads again if a checkpoint has vanished.
  """
  try:
    fcntl.flock(manifest_file, how)
  except OSError as error:
    return not isinstance(error, BlockingIOError)
  return True


def _remove_unread(path: pathlib.Path) -> None:
  """Remove a checkpoint unless a process reads it.

  In that case a later `save` removes it.
  """
  with open(path / manifest.NAME, "r+b") as lock:
    if _lock_manifest(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
      _remove(path)


def _remove(path: pathlib.Path) -> None:
  """Remove a checkpoint, whose name goes first: half of it is none."""
  shutil.rmtree(path.rename(path.with_suffix(".removed")))


def steps(directory: pathlib.Path) -> list[int]:
  """Return the steps that have a sealed checkpoint, in ascending order."""
  found = {name.removesuffix(_OLD) for name in _names(directory)}
  return sorted(
    int(step)
    for step in found
    if step.isdecimal()
    and (_path_of(directory, int(step)) / manifest.NAME).exists()
  )


def recover(directory: pathlib.Path) -> None:
  """Rename back a complete checkpoint that a crash left as `<step>.old`.

  That happens if the writer is killed between its two renames. Only the process
  that writes may call this function. Readers find the checkpoint under either
  name.
  """
  for replaced in directory.glob(f"*{_OLD}"):
    if not replaced.with_suffix("").exists():
      replaced.rename(replaced.with_suffix(""))


def make_ready(directory: pathlib.Path) -> None:
  """Create the directory, or remove what a crash has left in it."""
  if not directory.is_dir():
    directory.mkdir(parents=True)
    disk.sync_names(directory.parent)
  recover(directory)
  for leftover in directory.glob("*.incomplete"):
    shutil.rmtree(leftover)
  for path in (*directory.glob("*.removed"), *directory.glob(f"*{_OLD}")):
    with _staying():
      (_remove if path.suffix == _OLD else shutil.rmtree)(path)


def _put_in_place(directory: pathlib.Path, step: int, keep: int) -> None:
  """Give a sealed checkpoint its name, and remove all but the newest ones."""
  target, replaced = directory / str(step), directory / f"{step}{_OLD}"
  if target.exists():
    target.rename(replaced)
  (directory / f"{step}.incomplete").rename(target)
  disk.sync_names(directory)
  if replaced.exists():
    with _staying():
      _remove(replaced)
  for old in steps(directory)[:-keep]:
    with _staying():
      _remove_unread(directory / str(old))


@contextlib.contextmanager
def _staying() -> Iterator[None]:
  """Let an old checkpoint stay that cannot be removed, until the next save.

  The new one is on the disk, and does not fail because of it.
  """
  try:
    yield
  except OSError as error:
    logging.warning("an old checkpoint could not be removed: %s", error)
