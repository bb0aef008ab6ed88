"""The messages between the coordinator and its replicas.

The coordinator (`coordinator.Coordinator`) admits groups, runs their episodes,
has them scored and records the outcome. A replica (`replica.Replica`) is an
engine that generates the completions of turns and adopts new weights by itself.
All calls are made by replicas, through `CoordinatorLink`:

    admit     asks for turns; the answer holds them
    report    passes on trajectories; the answer says how they continue
    adopted   says that the replica holds other weights

Within one process these are method calls. The messages could also be sent to
another process: they are frozen, consist of plain data and numpy arrays, and
identify things by numbers and names. A turn carries the whole trajectory so
far, so that any replica can generate it. A replica holds no state of a
trajectory beyond what it reports. Its reports arrive in the order in which they
were made, and each holds only what is new.

An answer need not be for the call that returns it. A link to another process
does not wait: it returns what has arrived since the last call.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

from jaxrl_async import types


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
  """A replica's request for work.

  Attributes:
    replica: the replica's name. No two replicas of a run ever share a name,
      and a replica that was given up gets a new one.
    version: the policy version of the weights that the replica holds.
    room: how many more trajectories the replica can soon generate. The answer
      consists of whole groups, so that it may hold a few more than that.
  """

  replica: str
  version: int
  room: int


class Ends(NamedTuple):
  """What ends a turn besides what ends all turns of the run, and its grammar.

  Attributes:
    max_tokens: the turn ends when it has this many tokens; 0 is no limit.
    stop: texts each of which ends the turn.
    stop_token_ids: tokens each of which ends the turn.
    guide: the grammar of the turn, as `text.guides` reads it; "" is any text.
  """

  max_tokens: int = 0
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  guide: str = ""


class Turn(NamedTuple):
  """One completion to generate: the next one of a trajectory.

  Attributes:
    admission: the admission of the trajectory's group. Its index and the member
      seed the sampling. Its deadline decides which sequences may wait.
    trajectory: the trajectory so far, the prompt of this turn included. It has
      no finish reason.
    limit: the turn ends when the trajectory has this many tokens.
    temperature: the sampling temperature.
    stop: texts each of which ends the turn.
    stop_token_ids: tokens each of which ends the turn, besides the engine's.
    guide: as in `Ends`.
    question: number of the question of an evaluation that it answers, which
      seeds the sampling instead of the index; None for a group.
  """

  admission: types.Admission
  trajectory: types.Trajectory
  limit: int
  temperature: float
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  guide: str = ""
  question: int | None = None

  def until(self, ends: Ends) -> "Turn":
    """Return the turn as it is if it ends there, too."""
    if ends == Ends():
      return self
    limit = self.limit
    if ends.max_tokens:
      limit = min(limit, self.trajectory.turn_start + ends.max_tokens)
    stop_token_ids = (*self.stop_token_ids, *ends.stop_token_ids)
    return self._replace(
      limit=limit,
      stop=(*self.stop, *ends.stop),
      stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
      guide=ends.guide,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
  """The coordinator's answer to a request or a report.

  Attributes:
    turns: turns to generate.
    cancelled: indices of groups to stop generating. The replica reports their
      trajectories with the finish reason `ABORTED`.
  """

  turns: tuple[Turn, ...] = ()
  cancelled: tuple[int, ...] = ()


class Written(NamedTuple):
  """The state of one trajectory at a replica.

  Attributes:
    group: the index of the trajectory's group.
    begin: how many tokens of the trajectory the coordinator knows already, from
      the turn or from earlier reports. The arrays of `trajectory` hold the
      tokens after them, which the policy has generated.
    trajectory: the rest of the trajectory so far. Its finish reason is None
      while the turn is being generated, `ABORTED` if the coordinator cancelled
      the group, and otherwise the reason why the turn ended.
    num_cached: tokens at its beginning that did not have to be prefilled.
  """

  group: int
  begin: int
  trajectory: types.Trajectory
  num_cached: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
  """The current state of some or all trajectories of a replica."""

  replica: str
  written: tuple[Written, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
  """A notice that a replica now holds the weights of another version."""

  replica: str
  version: int


@runtime_checkable
class CoordinatorLink(Protocol):
  """The interface of the coordinator that replicas use."""

  def admit(self, ask: Ask) -> Work:
    """Return turns for a replica that has room."""
    ...

  def report(self, report: Report) -> Work:
    """Record the reported trajectories and return the work that follows."""
    ...

  def adopted(self, adopted: Adopted) -> None:
    """Record the policy version that a replica holds."""
    ...
