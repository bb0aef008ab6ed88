"""Weight transfer: the trainer publishes versions, and engines adopt them.

A channel carries pairs of (params, version). The trainer's thread publishes and
never waits for an engine. Each engine polls `newest_version` between two decode
calls, and adopts that version when it is newer than its own. Two channels share
one interface:

- `OrbaxChannel` writes versioned Orbax checkpoints to a directory that both
  sides see, in the same process or in several.
- `DirectChannel` copies from device to device, for both sides in one
  process.

Published arrays are outputs of the trainer's jitted cast. They must not be
donated afterwards, because the direct channel may hand out aliases of arrays on
the same device.
"""

import abc
import collections
from collections.abc import Callable, Iterator
import contextlib
import fcntl
import functools
import logging
import os
import pathlib
import shutil
import threading
import time
from typing import IO, Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxrl_async.config import sections
from jaxrl_async.devices import shard_copies
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files
from jaxrl_async.weights import transfer_directory

# Begins to save a version, and returns what waits for the end of that.
_Save = Callable[[], Callable[[], None]]

# Waits after an attempt to publish that has failed.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_POLL_S = 0.005
_LAST_WRITE_S = 0.7  # less than `before_ending_now` gives
_LONGEST = 300  # characters of an error


class WeightTransferError(RuntimeError):
  """A version could not be published, or differs from what was published."""


class UnreadableVersionError(WeightTransferError, supervisor_lib.RunError):
  """A version differs from what was published, or is from another run.

  A new process publishes its own version.
  """

  status = supervisor_lib.START_AGAIN


class WeightChannel(abc.ABC):
  """Order, layout and waiting, which both channels have in common.

  Invariant: `newest_version` never decreases, except after a version that
  cannot be read, and `adopt` returns exactly the params that were published
  with the version it returns.

  Attributes:
    num_bytes: size of one version.
    shapes: shapes and dtypes of the arrays of a version.
    unreadable: the last version that could not be read, and is not adopted; -1
      before the first.

  Threads: one thread publishes and closes; any number poll, wait and adopt.
  `_changed` guards what they share and is notified after every new version,
  failure and close.
  """

  def __init__(self, target: Any):
    """Prepare a channel.

    Args:
      target: jax.ShapeDtypeStruct leaves with the rollout shardings.
    """
    self._target = target
    self.shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), target
    )
    self._layout = pytree_files.layout(pytree_files.named_leaves(target))
    self.num_bytes = sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(target)
    )
    self._changed = threading.Condition()
    self.unreadable = -1
    self._last_published = -1
    self._is_closed = False
    self._failure: BaseException | None = None

  def publish(self, params: Any, version: int) -> float:
    """Hand over the weights of a version, which engines may adopt from now on.

    Args:
      params: arrays with the target's leaf names, shapes and dtypes, on any
        devices.
      version: completed train steps; increases from call to call.

    Returns:
      The seconds for which the caller was held up.

    Raises:
      WeightTransferError: the params do not fit the target, the version is not
        newer than the last one, the channel is closed, or an earlier version
        could not be published.
    """
    start = time.perf_counter()
    self._raise_failure()
    if self._is_closed:
      raise WeightTransferError(f"version {version}: the channel is closed")
    if version <= self._last_published:
      raise WeightTransferError(
        f"version {version} is not newer than {self._last_published}"
      )
    try:
      named = pytree_files.named_leaves(params)
      pytree_files.check_layout(pytree_files.layout(named), self._layout)
    except pytree_files.LayoutError as error:
      raise WeightTransferError(f"version {version}: {error}") from error
    self._last_published = version
    self._hand_over({name: named[name] for name in self._layout}, version)
    return time.perf_counter() - start

  @abc.abstractmethod
  def newest_version(self) -> int:
    """Return the newest version that can be adopted, -1 before the first."""

  @abc.abstractmethod
  def adopt(self, newer_than: int) -> tuple[Any, int] | None:
    """Return the newest version in the target's shardings, or None.

    The result is None if no version is newer than `newer_than`, and if the
    newest one cannot be read. Then the next one is waited for.

    Raises:
      WeightTransferError: an earlier version could not be published.
    """

  def adopt_first(self, timeout_s: float) -> tuple[Any, int] | None:
    """Wait for a version, and adopt it; the result is None after the timeout.

    Raises:
      WeightTransferError: as `adopt`.
    """
    end_s = time.monotonic() + timeout_s
    while self.wait_for_version(-1, max(0.0, end_s - time.monotonic())):
      if (adopted := self.adopt(-1)) is not None:
        return adopted
    return None

  def wait_for_version(self, newer_than: int, timeout_s: float) -> bool:
    """Wait until there is a newer version.

    Returns:
      True if there is one, False after the timeout or the close of the channel.

    Raises:
      WeightTransferError: a version could not be published.
    """
    deadline = time.monotonic() + timeout_s
    with self._changed:
      while self.newest_version() <= newer_than:
        self._raise_failure()
        left_s = deadline - time.monotonic()
        if self._is_closed or left_s <= 0:
          return False
        # A publisher in another process cannot notify this one, so its versions
        # are found by polling.
        self._changed.wait(min(left_s, _POLL_S))
    return True

  @abc.abstractmethod
  def close(self, timeout_s: float = 30.0) -> None:
    """Stop publishing, wake all waiting threads and remove what was written.

    Call it when no engine adopts any more. Further calls do nothing.

    Args:
      timeout_s: deadline for a version that is still being written.

    Raises:
      WeightTransferError: a version could not be published, or the deadline
        passed.
    """

  @abc.abstractmethod
  def remove(self) -> None:
    """Remove the written versions, because the process ends now."""

  @abc.abstractmethod
  def _hand_over(self, named: dict[str, Any], version: int) -> None: ...

  def _raise_failure(self) -> None:
    if isinstance(self._failure, disk.StorageError):
      raise self._failure  # the message already says what to do
    if self._failure is not None:
      raise WeightTransferError(
        f"a version after {self.newest_version()} could not be published: "
        f"{self._failure}"
      ) from self._failure


class DirectChannel(WeightChannel):
  """A channel that copies from device to device, into the rollout shardings.

  If the rollout side splits arrays differently, `publish` makes the shards that
  it wants, on the devices that train. If that began later, it would wait there
  for the next train step. The first engine that adopts a version copies the
  shards, and all engines share the copy. The publisher does not copy: where
  copies block, as on a CPU, the trainer would have to wait. The published
  arrays are released as soon as they have been copied or replaced by a newer
  version.
  """

  def __init__(self, target: Any):
    """Prepare a channel.

    Args:
      target: jax.ShapeDtypeStruct leaves with the rollout shardings.
    """
    super().__init__(target)
    self._shardings = [leaf.sharding for leaf in jax.tree.leaves(target)]
    self._newest: tuple[list[Any], int] = ([], -1)
    self._copy: tuple[Any, int] = (None, -1)
    self._copying = threading.Lock()

  def newest_version(self) -> int:
    return self._newest[1]

  def adopt(self, newer_than: int) -> tuple[Any, int] | None:
    with self._copying:
      published, version = self._newest
      if version <= newer_than:
        return None
      if version > self._copy[1]:
        leaves = shard_copies.copied(published, self._shardings)
        structure = jax.tree.structure(self._target)
        self._copy = jax.tree.unflatten(structure, leaves), version
        with self._changed:
          if self._newest[1] == version:
            self._newest = [], version
      return self._copy

  def close(self, timeout_s: float = 30.0) -> None:
    del timeout_s
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()

  def remove(self) -> None:
    pass

  def _hand_over(self, named: dict[str, Any], version: int) -> None:
    made = shard_copies.regrouped(list(named.values()), self._shardings)
    with self._changed:
      self._newest = made, version
      self._changed.notify_all()


def write_part(path: pathlib.Path, params: Any) -> None:
  """Begin to write this process's parts of a version that process 0 publishes.

  Args:
    path: of the version, as process 0 has told.
    params: the same arrays that process 0 publishes.
  """
  pytree_files.save_async(
    path, pytree_files.named_leaves(params), is_frequent=True
  )


class OrbaxChannel(WeightChannel):
  """A channel of versioned Orbax checkpoints in a directory seen by both sides.

      <directory>/incarnation-<id>/<version>/    with a sealed manifest
      <directory>/incarnation-<id>/newest        symbolic link to a version

  Publishing. Orbax writes a version under a temporary name and renames it; then
  the version is sealed by its manifest; then it is announced by replacing the
  link. Each of the three steps is atomic, and they happen in this order, so an
  announced version is always complete. A poll is one readlink (2 us), in the
  publishing process and in any other.

  A reader checks what it adopts. A version that differs from its manifest, or
  is of another incarnation, is never adopted: its reader logs that, keeps what
  it has, and goes on with the next version. Nothing is written again. A run
  that needs this version ends, and its next start continues from a checkpoint.

  Removal. A reader takes a shared lock on the manifest and then checks whether
  the version is still the newest. The publisher removes a version only when two
  newer ones have been announced, and under an exclusive lock. A version that is
  being read is therefore never removed, and the kernel releases the lock of a
  reader that dies.

  Coalescing. Saving blocks its caller for 11-90 ms, so it runs in a thread of
  the channel. While one version is being saved, the newest waiting version
  replaces older waiting ones. With `coalesce` False every version is announced,
  in order.

  The first `publish` creates the incarnation and removes those of earlier
  starts. A process that only adopts writes and removes nothing.

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
    world: world_lib.World | None = None,
    note: Callable[[str], None] = lambda text: None,
  ):
    """Create one side of the channel; both sides are created in the same way.

    Args:
      directory: for this run alone, see `transfer_directory.prepare`.
      incarnation: id of this start of the run.
      target: jax.ShapeDtypeStruct leaves with the rollout shardings.
      coalesce: False at max_staleness 0, where no version may be skipped.
      world: the processes that publish together; None is this one alone.
      note: is called with a message when a version cannot be written.
    """
    super().__init__(target)
    self._world = world or world_lib.alone()
    self.directory = pathlib.Path(directory).absolute()
    self.incarnation = incarnation
    self._path = self.directory / f"incarnation-{incarnation}"
    self._newest_link = self._path / "newest"
    self._note = note
    self._coalesce = coalesce and self._world.size == 1
    self._waiting: collections.deque[tuple[_Save, int]]
    self._waiting = collections.deque()
    self._announced: list[int] = []
    self._not_removed: set[int] = set()  # of which the user was told
    self._held = -1  # by the reader that could not read a version
    self._thread: threading.Thread | None = None
    self._writing = threading.Lock()
    self._lock: IO[bytes] | None = None

  def newest_version(self) -> int:
    version = self._announced_version()
    return self._held if version == self.unreadable else version

  def _announced_version(self) -> int:
    try:
      return int(os.readlink(self._newest_link))
    except (FileNotFoundError, NotADirectoryError):
      return -1

  def adopt(self, newer_than: int) -> tuple[Any, int] | None:
    self._raise_failure()
    if self._world.size > 1:
      raise WeightTransferError("one of several processes cannot adopt alone")
    try:
      with self.reading(newer_than) as version:
        return None if version is None else (self.read(version), version)
    except UnreadableVersionError as error:
      self._held, self.unreadable = newer_than, self._announced_version()
      logging.warning("%s; the next version is waited for", error)
      return None

  @contextlib.contextmanager
  def reading(self, newer_than: int) -> Iterator[int | None]:
    """Keep the newest version from being removed while the block runs.

    Yields:
      That version, or None if it is not newer than `newer_than`.

    Raises:
      UnreadableVersionError: it is announced and not there.
    """
    while (version := self.newest_version()) > newer_than:
      try:
        lock = open(self._path / str(version) / manifest.NAME, "rb")
      except OSError as error:
        if self.newest_version() == version:
          raise UnreadableVersionError(
            f"version {version} is announced but has no manifest"
            f" ({error.strerror})"
          ) from None
        continue
      with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        # The version may have been removed before the lock was taken, but not
        # any more after this check.
        if self.newest_version() == version:
          yield version
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
    # It is not released: a version begun now would make the directory again.
    self._writing.acquire(timeout=_LAST_WRITE_S)
    transfer_directory.remove_now(self._path)

  def _hand_over(self, named: dict[str, Any], version: int) -> None:
    if self._thread is None:
      self._open_incarnation()
      self._thread = supervisor_lib.start_thread(
        "weight-transfer", self._publish_all, self._keep_failure
      )
    if self._world.size > 1:
      with self._writing, disk.writing(self._path):
        begun = self._save(named, version)
      save = functools.partial(lambda wait: wait, begun)
    else:
      save = functools.partial(self._save, named, version)
    with self._changed:
      if self._coalesce:
        self._waiting.clear()
      self._waiting.append((save, version))
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
      self._changed.wait_for(lambda: self._waiting or self._is_closed)
      if self._is_closed:
        return False
      save, version = self._waiting.popleft()
    wait_s = _FIRST_WAIT_S
    while True:
      try:
        with self._writing, disk.writing(self._path):
          self._announce(save, version)
        break
      except disk.StorageError as error:
        if self._world.size > 1:
          raise  # all of them would have to write it again
        with contextlib.suppress(OSError):
          transfer_directory.remove_attempts(self._path / str(version))
        self._note(
          f"WARNING: version {version} of the weights could not be published"
          f" ({error.__cause__ or error}); the next attempt follows in"
          f" {wait_s:g} s"
        )
        with self._changed:
          if self._changed.wait_for(lambda: self._is_closed, wait_s):
            raise
          if self._coalesce and self._waiting:
            save, version = self._waiting.popleft()
      wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    self._remove_old()
    return True

  def _save(self, named: dict[str, Any], version: int) -> Callable[[], None]:
    """Begin to save a version, and return what waits for the end of that."""
    path = self._path / str(version)
    if not self._path.is_dir():
      self._announced.clear()
      self._open_incarnation()
    self._world.tell("write_version", path=path)
    return pytree_files.save_async(path, named, is_frequent=True)

  def _announce(self, save: _Save, version: int) -> None:
    """Save a version, seal it, and point the link at it."""
    directory = self._path / str(version)
    wait = save()
    with disk.naming_lost_files(directory):
      wait()
    manifest.write(directory, self._named(version) | {"layout": self._layout})
    incomplete = self._path / "newest.incomplete"
    incomplete.unlink(missing_ok=True)
    os.symlink(str(version), incomplete)
    with self._changed:
      os.replace(incomplete, self._newest_link)
      self._changed.notify_all()
    self._announced.append(version)

  def _remove_old(self) -> None:
    """Remove versions that two newer ones have replaced and nobody reads.

    What cannot be removed is tried again after the next version.
    """
    for version in self._announced[: -transfer_directory.NUM_KEPT]:
      directory = self._path / str(version)
      try:
        # NFS wants "+".
        with open(directory / manifest.NAME, "r+b") as lock:
          fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
          shutil.rmtree(directory)
      except FileNotFoundError:
        pass  # It was damaged, or the directory was removed.
      except BlockingIOError:
        continue  # It is being read.
      except OSError as error:
        if version not in self._not_removed:
          self._not_removed.add(version)
          self._note(f"WARNING: {directory} could not be removed ({error})")
        continue
      self._announced.remove(version)

  def read(self, version: int) -> Any:
    """Check a version that this process or another one holds, and read it.

    Raises:
      UnreadableVersionError: it differs from what was published.
    """
    directory, named = self._path / str(version), self._named(version)
    try:
      about = manifest.verify(directory)
      found = {key: about.get(key) for key in named}
      if found != named:
        raise manifest.ManifestError(f"it is {found}, not {named}")
      pytree_files.check_layout(about["layout"], self._layout)
      return pytree_files.load(directory, self._target)
    except (
      OSError,
      manifest.ManifestError,
      pytree_files.LayoutError,
      ocp.errors.InvalidLayoutError,
    ) as error:
      reason = " ".join(str(error).split())[:_LONGEST]
      raise UnreadableVersionError(
        f"version {version} is not adopted: {reason}"
      ) from error

  def _named(self, version: int) -> dict[str, Any]:
    return {"incarnation": self.incarnation, "version": version}


def make_channel(
  kind: sections.Channel,
  *,
  directory: pathlib.Path,
  target: Any,
  coalesce: bool,
  world: world_lib.World | None = None,
  note: Callable[[str], None] = lambda text: None,
) -> WeightChannel:
  """Return a new channel of a kind; the other arguments are as there."""
  if kind == sections.Channel.DIRECT:
    return DirectChannel(target)
  return OrbaxChannel(
    directory,
    transfer_directory.new_incarnation(),
    target,
    coalesce=coalesce,
    world=world,
    note=note,
  )
