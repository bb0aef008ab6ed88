"""The trajectories of each train step, stored as the run goes on.

    WORKDIR/trajectories/<step>/    as a checkpoint stores its groups

They belong to the schedule of a run (`run_schedule`), and are as safe as its
lines: what the disk refuses is kept in memory and written later.
"""

from collections.abc import Callable, Sequence
import pathlib
import shutil

from jaxrl_async import types
from jaxrl_async.storage import disk
from jaxrl_async.storage import outstanding as outstanding_lib

DIRECTORY = "trajectories"
_TRAINED = "trained"
# Bytes of trajectories that are kept in memory at most.
_MOST_KEPT = 2**30


class StoredTrajectories:
  """The directory of a run's trajectories, open for writing.

  Invariant: the directory of a step is complete and has reached the disk. What
  the disk has refused is kept, and is written before anything else.

  Threads: one at a time.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    first_step: int,
    note: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
  ):
    """Remove what a start that was killed stored after the checkpoint.

    Args:
      workdir: of the run.
      first_step: train steps that are completed.
      note: if given, trajectories that the disk refuses are kept in memory, and
        this is called with a message about the first of them.
      check: is called before something is written. It raises if the workdir is
        not where it was.

    Raises:
      StorageError: it could not be removed.
    """
    self._path = workdir / DIRECTORY
    self._note = note
    self._check = check
    self._kept: list[tuple[int, dict[str, disk.Pieces]]] = []
    with disk.writing(self._path):
      for path in self._path.glob("*"):
        if not path.name.isdecimal() or int(path.name) >= first_step:
          shutil.rmtree(path)

  def add(self, step: int, groups: Sequence[types.RolloutGroup]) -> None:
    """Store the trajectories of a train step, prompts and rewards included.

    Args:
      step: completed train steps before it.
      groups: in the order of the batch.

    Raises:
      StorageError: the disk refused them, and they are not kept.
      WorkdirError: another directory is in the place of the workdir.
    """
    num_kept = len(self._kept)
    files = outstanding_lib.packed(
      [
        outstanding_lib.OutstandingGroup(
          admission=group.admission, status=_TRAINED, group=group
        )
        for group in groups
      ]
    )
    self._kept.append((step, files))
    try:
      self.sync()
    except disk.StorageError as error:
      num_bytes = sum(
        memoryview(piece).nbytes
        for _, files in self._kept
        for pieces in files.values()
        for piece in pieces
      )
      if self._note is None or num_bytes > _MOST_KEPT:
        self._kept.pop()
        raise
      if not num_kept:
        self._note(
          f"WARNING: {self._path} cannot be written"
          f" ({error.__cause__ or error}); trajectories stay in memory until it"
          " can be"
        )
    else:
      if num_kept and self._note is not None:
        self._note(f"{self._path} is written again, and lacks nothing")

  def sync(self) -> None:
    """Wait until everything has reached the disk.

    Raises:
      StorageError: the disk refused it.
    """
    while self._kept:
      self._write(*self._kept[0])
      self._kept.pop(0)

  def _write(self, step: int, files: dict[str, disk.Pieces]) -> None:
    self._check()
    target = self._path / str(step)
    with disk.writing(target):
      self._path.mkdir(exist_ok=True)
      with disk.replacing(target) as incomplete:
        incomplete.mkdir()
        for name, pieces in files.items():
          disk.write_pieces(incomplete / name, pieces, sync=True)
        disk.sync_names(incomplete)
        # It is there if its name could not be confirmed.
        disk.remove(target)
      disk.sync_names(self._path)
