"""One of the replicas of a fleet, as the fleet sees it."""

import dataclasses
import enum

from jaxrl_async.rollout import messages
from jaxrl_async.rollout import remote


class State(enum.Enum):
  """What the fleet waits for from a replica."""

  STARTING = "starting"  # that it is attached
  READY = "ready"  # what it says next
  SILENT = "silent"  # the same, but its groups were given to others
  RECALLED = "recalled"  # the same, because all groups were taken back
  LOST = "lost"  # nothing; it is started again later


@dataclasses.dataclass(kw_only=True, slots=True)
class Member:
  """One place of the fleet, and the replica that fills it.

  Attributes:
    name: the present name of its replica, which changes at every attachment.
    ask: its last request for work, with the room that was left then.
    given: turns given since then, by the number of the delivery.
    num_sent: number of deliveries to this name.
    since_s: when it was last heard of, or when its state began.
    is_running: whether its process is known to have started.
    num_failures: how often it failed since it last ended a trajectory.
    totals: its counters as it said them last.
  """

  place: int
  state: State = State.LOST
  handle: remote.Handle | None = None
  name: str = ""
  num_names: int = 0
  version: int = -1
  ask: messages.Ask | None = None
  given: dict[int, int] = dataclasses.field(default_factory=dict)
  num_sent: int = 0
  since_s: float = float("-inf")
  num_failures: int = 0
  is_running: bool = False
  totals: dict[str, int | float] = dataclasses.field(default_factory=dict)

  @property
  def room(self) -> int:
    """For how many more trajectories it has room."""
    if self.state is not State.READY or self.ask is None:
      return 0
    return self.ask.room - sum(self.given.values())
