"""The channel within one process, and the choice between the channels."""

from collections.abc import Callable
import pathlib
import threading
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.coordination import transfer_directory
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.coordination import world as world_lib
from jaxrl_async.devices import shard_copies


class DirectChannel(weight_transfer.WeightChannel):
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

  def _raise_failure(self) -> None:
    pass


def make_channel(
  kind: sections.Channel,
  *,
  directory: pathlib.Path,
  target: Any,
  coalesce: bool,
  world: world_lib.World | None = None,
  note: Callable[[str], None] = lambda text: None,
) -> weight_transfer.WeightChannel:
  """Return the channel that a config asks for.

  Args:
    kind: of the channel.
    directory: where an Orbax channel writes versions.
    target: jax.ShapeDtypeStruct leaves with the rollout shardings.
    coalesce: False at max_staleness 0, where no version may be skipped.
    world: the processes that publish together; None is this one alone.
    note: is called with a message when a version cannot be written.
  """
  if kind == sections.Channel.DIRECT:
    return DirectChannel(target)
  incarnation = transfer_directory.new_incarnation()
  return weight_transfer.OrbaxChannel(
    directory,
    incarnation,
    target,
    coalesce=coalesce,
    world=world,
    note=note,
  )
