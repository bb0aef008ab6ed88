"""The interface of weight channels, and what both of them have in common.

`weight_transfer` has the channels, and says how they are used.
"""

import abc
import threading
import time
from typing import Any

import jax

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.storage import pytree_files

_POLL_S = 0.005


class WeightTransferError(RuntimeError):
  """A version could not be published, or differs from what was published."""


class UnreadableVersionError(WeightTransferError, supervisor_lib.RunError):
  """A version differs from what was published, or is from another run."""


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
    """Have the written versions removed as soon as the process has ended."""

  @abc.abstractmethod
  def _hand_over(self, named: dict[str, Any], version: int) -> None: ...

  @abc.abstractmethod
  def _raise_failure(self) -> None: ...
