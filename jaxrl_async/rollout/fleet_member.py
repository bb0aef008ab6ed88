"""One of the replicas of a fleet, as the fleet sees it."""

from concurrent import futures
import dataclasses
import enum

from jaxrl_async.rollout import messages
from jaxrl_async.rollout import pace as pace_lib
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
    rest_s: how long it is left alone after it was lost.
    attaching: the call that attaches it. It is running from when the process
      has started.
    num_failures: how often it failed since it last ended a trajectory.
    totals: its counters as it said them last.
    pace: of the decode steps of its process, since it was READY first.
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
  rest_s: float = 0.0
  attaching: futures.Future[None] | None = None
  num_failures: int = 0
  totals: dict[str, int | float] = dataclasses.field(default_factory=dict)
  pace: pace_lib.Pace | None = None

  @property
  def is_attaching(self) -> bool:
    """Whether its process has started, and is not attached yet."""
    return self.attaching is not None and self.attaching.running()

  @property
  def room(self) -> int:
    """For how many more trajectories it has room."""
    if self.state is not State.READY or self.ask is None:
      return 0
    return self.ask.room - sum(self.given.values())
