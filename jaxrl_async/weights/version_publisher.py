"""Publishes what the trainer has made, and does not wait for a checkpoint.

Several processes that train write one thing at a time (`pytree_files`). While
they write a checkpoint, which may take minutes, training goes on, and engines
generate with the version that they have, as far as the bound on staleness
allows. The newest version is published once the checkpoint is written.
"""

from collections.abc import Callable
from typing import Any

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.storage import pytree_files
from jaxrl_async.weights import weight_transfer


class VersionPublisher:
  """Publishes the trainer's weights, now or when a checkpoint is written.

  Invariant: a version that is due is that of the trainer's weights.

  Threads: belongs to the main thread.
  """

  def __init__(
    self,
    published: Callable[[], Any],
    channel: weight_transfer.WeightChannel,
    buffer: buffer_lib.Buffer,
  ):
    """Begin without a version.

    Args:
      published: returns the trainer's weights as they are published.
      channel: to the engines.
      buffer: is told the version.
    """
    self._published = published
    self._channel = channel
    self._buffer = buffer
    self._due: int | None = None

  def publish(self, version: int, *, is_urgent: bool = False) -> None:
    """Publish the trainer's weights, unless that would wait for a checkpoint.

    Args:
      version: of the weights.
      is_urgent: whether something waits for just this version.
    """
    self._due = version
    self.catch_up(is_urgent=is_urgent)
    self._buffer.set_policy_version(version)

  def catch_up(self, *, is_urgent: bool = False) -> None:
    """Publish the version that is due, if there is one, under the same terms.

    It must be called before the weights change, whenever something waits for
    the newest version.
    """
    if self._due is None or (pytree_files.is_held_up() and not is_urgent):
      return
    version, self._due = self._due, None
    self._channel.publish(self._published(), version)
