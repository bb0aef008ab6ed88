"""Weight transfer: the trainer publishes versions, and engines adopt them.

A channel carries pairs of (params, version). The trainer's thread publishes and
never waits for an engine. Each engine polls `newest_version` between two decode
calls, and adopts that version when it is newer than its own. Two channels share
one interface:

- `OrbaxChannel` writes versioned Orbax checkpoints to a directory that both
  sides see, in the same process or in several.
- `channels.DirectChannel` copies from device to device, for both sides in one
  process.

Published arrays are outputs of the trainer's jitted cast. They must not be
donated afterwards, because the direct channel may hand out aliases of arrays on
the same device.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import fcntl
import functools
import os
import pathlib
import threading
from typing import IO, Any

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import transfer_directory
from jaxrl_async.coordination import version_files
from jaxrl_async.coordination import weight_channel
from jaxrl_async.coordination import world as world_lib
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files

# Begins to save a version, and returns what waits for the end of that.
_Save = Callable[[], Callable[[], None]]

# What a caller of either channel needs.
WeightChannel = weight_channel.WeightChannel
WeightTransferError = weight_channel.WeightTransferError
RefusedVersionError = weight_channel.RefusedVersionError

# How often the publisher looks whether the newest version is still there.
_LOOK_S = 1.0
# Waits after an attempt to publish that has failed.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0


class OrbaxChannel(WeightChannel):
  """A channel of versioned Orbax checkpoints in a directory seen by both sides.

      <directory>/incarnation-<id>/<copy>/       see `version_files`
      <directory>/incarnation-<id>/newest        symbolic link to a copy

  Publishing. Orbax writes a version under a temporary name and renames it; then
  the version is sealed by its manifest; then it is announced by replacing the
  link. Each of the three steps is atomic, and they happen in this order, so an
  announced version is always complete. A poll is one readlink (2 us), in the
  publishing process and in any other.

  Refusal. If an announced version differs from its manifest or cannot be read,
  or if the manifest names another incarnation or version, it is never adopted.
  `adopt` counts it and returns None, and the reader keeps what it has until
  something else is announced. It leaves a mark beside the version. The
  publisher keeps the arrays of the last version in the host's memory, and looks
  about once a second. If it finds a mark, or no files, it writes a further copy
  under another name, unless a newer version waits. Several processes that
  train keep no arrays: there, `wanted_again` asks the caller of `publish` for
  the version, as long as it is the newest. Where nothing is written again,
  `adopt` raises if nothing newer would come: if the reader has no weights yet,
  or if no version may be skipped.

  Removal. A reader takes a shared lock on the manifest and then checks whether
  the copy is still the newest. The publisher removes a copy only when two
  newer ones have been announced, and under an exclusive lock. A copy that is
  being read is therefore never removed, and the kernel releases the lock of a
  reader that dies.

  Coalescing. Saving blocks its caller for 11-90 ms, so it runs in a thread of
  the channel. While one version is being saved, the newest waiting version
  replaces older waiting ones. With `coalesce` False every version is announced,
  in order.

  The first `publish` creates the incarnation and removes those of earlier
  starts. A process that only adopts removes nothing, and writes nothing but its
  marks, and the record by which the readers of one host check a version once.

  Failures. A disk that is full, or a directory that was removed, does not end
  the run: the thread writes the version again, or a newer one, after waits that
  become longer. Engines go on with the version they have. What they lack then
  shows as a stall.

  Several processes. If several processes train, each writes its parts of every
  version. Process 0 has the channel. It tells the others when to begin, and
  seals and announces what Orbax has committed. All begin in the thread that
  trains, because what several processes do together has one order. So no
  version is skipped; it waits until the last one is committed.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    incarnation: str,
    target: Any,
    *,
    coalesce: bool = True,
    is_written_again: bool = True,
    world: world_lib.World | None = None,
    note: Callable[[str], None] = lambda text: None,
  ):
    """Create one side of the channel; both sides are created in the same way.

    Args:
      directory: for this run alone, see `transfer_directory.prepare`.
      incarnation: id of this start of the run.
      target: jax.ShapeDtypeStruct leaves with the rollout shardings.
      coalesce: False at max_staleness 0, where no version may be skipped.
      is_written_again: False keeps no arrays in the host's memory, for what is
        large and published once.
      world: the processes that publish together; None is this one alone.
      note: is called with a message when a version cannot be written, and when
        one is written again.
    """
    super().__init__(target)
    self._world = world or world_lib.alone()
    self.directory = pathlib.Path(directory).absolute()
    self.incarnation = incarnation
    self._path = self.directory / f"incarnation-{incarnation}"
    self._newest_link = self._path / "newest"
    self._note = note
    self._coalesce = coalesce and self._world.size == 1
    self.is_written_again = is_written_again
    self._waiting: collections.deque[tuple[_Save, str]]
    self._waiting = collections.deque()
    self._announced: list[str] = []  # names of copies
    self._not_removed: set[str] = set()  # copies of which the user was told
    self._kept: dict[str, Any] = {}  # arrays of the version that was saved last
    self._is_refused = False  # the newest copy, in this process
    self._failure: BaseException | None = None
    self._thread: threading.Thread | None = None
    self._lock: IO[bytes] | None = None
    self._held = -1  # by the reader that refused a version

  def newest_version(self) -> int:
    copy = self._newest_copy()
    if not copy:
      return -1
    if self.refusal is not None and copy == self.refusal.copy:
      return self._held
    return version_files.version_of(copy)

  def _newest_copy(self) -> str:
    """Return the name of the copy that was announced last, or ""."""
    try:
      return os.readlink(self._newest_link)
    except (FileNotFoundError, NotADirectoryError):
      return ""

  def adopt(self, newer_than: int) -> tuple[Any, int] | None:
    self._raise_failure()
    if self._world.size > 1:
      raise WeightTransferError("one of several processes cannot adopt alone")
    try:
      with self.reading(newer_than) as copy:
        if copy is None:
          return None
        return self.read(copy), version_files.version_of(copy)
    except RefusedVersionError as error:
      if not self.is_written_again and (newer_than < 0 or not self._coalesce):
        raise
      self._held, self.refusal = newer_than, error
      self.num_refused += 1
      version_files.mark_refused(self._path / error.copy)
      with self._changed:
        self._is_refused = True
        self._changed.notify_all()
      return None

  @contextlib.contextmanager
  def reading(self, newer_than: int) -> Iterator[str | None]:
    """Keep the newest copy from being removed while the block runs.

    Yields:
      The name of that copy, or None if its version is not newer than
      `newer_than`.

    Raises:
      RefusedVersionError: it is announced and not there.
    """
    while self.newest_version() > newer_than and (copy := self._newest_copy()):
      try:
        lock = open(self._path / copy / manifest.NAME, "rb")
      except OSError as error:
        if self._newest_copy() == copy:
          raise RefusedVersionError(
            version_files.version_of(copy),
            f"is announced but has no manifest ({error.strerror})",
            copy,
          ) from None
        continue
      with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        # The copy may have been removed before the lock was taken, but not any
        # more after this check.
        if self._newest_copy() == copy:
          yield copy
          return
    yield None

  def close(self, timeout_s: float = 30.0) -> None:
    with self._changed:
      self._is_closed = True
      self._waiting.clear()
      self._changed.notify_all()
    if self._thread is not None:
      supervisor_lib.Deadline(timeout_s).join(self._thread)
      if self._thread.is_alive():
        raise WeightTransferError(f"still saving {timeout_s} s after close")
      self._thread = None
      assert self._lock is not None
      self._lock.close()
      transfer_directory.remove_leftovers(self.directory)
    self._raise_failure()

  def remove(self) -> None:
    self._remover = transfer_directory.remove_when_ended(self._path)

  def _hand_over(self, named: dict[str, Any], version: int) -> None:
    if self._thread is None:
      self._open_incarnation()
      self._thread = supervisor_lib.start_thread(
        "weight-transfer", self._publish_all, self._keep_failure
      )
    copy = version_files.copy_name(version, self._next_number(version))
    if self._world.size > 1:
      with disk.writing(self._path):
        begun = self._save(named, copy)
      save = functools.partial(lambda wait: wait, begun)
    elif self.is_written_again:
      save = functools.partial(self._keep_and_save, named, copy)
    else:
      save = functools.partial(self._save, named, copy)
    with self._changed:
      if self._coalesce:
        self._waiting.clear()
      self._waiting.append((save, copy))
      self._changed.notify_all()

  def _open_incarnation(self) -> None:
    if self._lock is not None:
      self._lock.close()  # of a directory that was removed
    try:
      with disk.writing(self._path):
        self._lock = transfer_directory.open_incarnation(self._path)
    except FileExistsError:
      raise WeightTransferError(
        f"{self._path} is already used by another publisher"
      ) from None

  def _publish_all(self) -> None:
    while self._publish_next():
      pass

  def _keep_failure(self, error: BaseException) -> None:
    """Keep an error of the thread, for the next call to raise."""
    with self._changed:
      self._failure = error
      self._changed.notify_all()

  def _publish_next(self) -> bool:
    """Wait for a version and announce it; return False once closed."""
    with self._changed:
      self._changed.wait_for(self._has_work, _LOOK_S)
      if self._is_closed:
        return False
      if self._waiting:
        save, copy = self._waiting.popleft()
      else:
        save = None
    if save is None:
      if (copy := self._next_copy()) is None:
        return True
      if self._world.size > 1:
        self._want_again(copy)
        return True
      save = functools.partial(self._save, self._kept, copy)
    wait_s = _FIRST_WAIT_S
    while True:
      try:
        with disk.writing(self._path):
          self._announce(save, copy)
        break
      except disk.StorageError as error:
        if self._world.size > 1:
          raise  # all of them would have to write it again
        with contextlib.suppress(OSError):
          transfer_directory.remove_attempts(self._path / copy)
        self._note(
          f"WARNING: version {version_files.version_of(copy)} of the weights"
          f" could not be published ({error.__cause__ or error}); the next"
          f" attempt follows in {wait_s:g} s"
        )
        with self._changed:
          if self._changed.wait_for(lambda: self._is_closed, wait_s):
            raise
          if self._coalesce and self._waiting:
            save, copy = self._waiting.popleft()
      wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    self._remove_old()
    return True

  def _has_work(self) -> bool:
    return bool(self._waiting or self._is_refused or self._is_closed)

  def _next_copy(self) -> str | None:
    """Return the name of a further copy of the newest version, if it needs one.

    It does if a reader has refused the newest copy, or if that is not there.
    """
    self._is_refused = False
    keeps = self._kept or (self._world.size > 1 and self.is_written_again)
    announced = self._announced[-1:]  # which another thread may clear
    if not keeps or not announced or self.wanted_again is not None:
      return None
    (newest,) = announced
    if version_files.is_refused(self._path / newest):
      why = "was refused"
    elif not os.path.exists(self._newest_link / manifest.NAME):
      why = "was removed"
    else:
      return None
    number = 1 + version_files.number_of(newest)
    version = version_files.version_of(newest)
    self._note(
      f"WARNING: version {version} of the weights {why}; it is written again"
    )
    # The second copy follows at once. Where that is damaged too, something is
    # wrong for longer.
    wait_s = 0.0 if number == 2 else min(2.0 ** (number - 3), _LONGEST_WAIT_S)
    with self._changed:
      if self._changed.wait_for(
        lambda: self._waiting or self._is_closed, wait_s
      ):
        return None
    return version_files.copy_name(version, number)

  def _next_number(self, version: int) -> int:
    """Return the number of the next copy of a version."""
    for copy in self._announced[-1:]:
      if version_files.version_of(copy) == version:
        return 1 + version_files.number_of(copy)
    return 1

  def _want_again(self, copy: str) -> None:
    """Ask for a version once more, unless a newer one was handed over."""
    version = version_files.version_of(copy)
    with self._changed:
      if version == self._last_published:
        self.wanted_again = version

  def _keep_and_save(
    self, named: dict[str, Any], copy: str
  ) -> Callable[[], None]:
    """Begin to save a version, whose arrays are kept in the host's memory."""
    self._kept = {}  # frees those of the last one before there are others
    self._kept = pytree_files.in_host_memory(named)
    return self._save(self._kept, copy)

  def _save(self, named: dict[str, Any], copy: str) -> Callable[[], None]:
    """Begin to save a version, and return what waits for the end of that."""
    path = self._path / copy
    if not self._path.is_dir():
      self._announced.clear()
      self._open_incarnation()
    self._world.tell("write version", path=str(path))
    return pytree_files.save_async(
      path, named, is_kept=bool(self._kept), is_frequent=True
    )

  def _announce(self, save: _Save, copy: str) -> None:
    """Save a version, seal it, and point the link at it."""
    directory = self._path / copy
    wait = save()
    with disk.naming_lost_files(directory):
      wait()
    version_files.seal(directory, self._named(copy), self._layout)
    incomplete = self._path / "newest.incomplete"
    incomplete.unlink(missing_ok=True)
    os.symlink(copy, incomplete)
    with self._changed:
      os.replace(incomplete, self._newest_link)
      self._changed.notify_all()
    self._announced.append(copy)

  def _remove_old(self) -> None:
    """Remove copies that two newer ones have replaced and nobody reads.

    What cannot be removed is tried again after the next version.
    """
    for copy in self._announced[: -transfer_directory.NUM_KEPT]:
      directory = self._path / copy
      try:
        # NFS wants "+".
        with open(directory / manifest.NAME, "r+b") as lock:
          fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
          version_files.remove(directory)
      except FileNotFoundError:
        pass  # It was damaged, or the directory was removed.
      except BlockingIOError:
        continue  # It is being read.
      except OSError as error:
        if copy not in self._not_removed:
          self._not_removed.add(copy)
          self._note(f"WARNING: {directory} could not be removed ({error})")
        continue
      self._announced.remove(copy)

  def check(self, copy: str) -> version_files.Checked:
    """Check a copy that this process or another one holds, see `reading`.

    Returns:
      What `load` has to know of it.

    Raises:
      RefusedVersionError: it differs from what was published.
    """
    with self._refusing(copy):
      return version_files.check(
        self._path / copy, self._named(copy), self._target
      )

  def load(self, copy: str, checked: version_files.Checked) -> Any:
    """Read a copy that was checked, and is held since.

    Raises:
      RefusedVersionError: it has changed since.
    """
    with self._refusing(copy):
      return version_files.load(self._path / copy, self._target, checked)

  def read(self, copy: str) -> Any:
    """Check a copy that is held, and read it.

    Raises:
      RefusedVersionError: it differs from what was published.
    """
    return self.load(copy, self.check(copy))

  @contextlib.contextmanager
  def _refusing(self, copy: str) -> Iterator[None]:
    """Refuse a copy if it proves to be damaged inside the block."""
    try:
      yield
    except (manifest.ManifestError, pytree_files.LayoutError) as error:
      raise RefusedVersionError(
        version_files.version_of(copy), f"is not adopted: {error}", copy
      ) from error

  def _named(self, copy: str) -> dict[str, Any]:
    version = version_files.version_of(copy)
    return {"incarnation": self.incarnation, "version": version}

  def _raise_failure(self) -> None:
    if isinstance(self._failure, disk.StorageError):
      raise self._failure  # the message already says what to do
    if self._failure is not None:
      raise WeightTransferError(
        f"a version after {self.newest_version()} could not be published: "
        f"{self._failure}"
      ) from self._failure
