"""What the coordinator and the replicas that write for it tell each other.

The coordinator (`coordinator.Coordinator`) admits groups, plays their episodes,
has them scored and keeps the books. A replica (`replica.Replica`) is an engine
that writes turns, and adopts new weights by itself. A replica always speaks
first, through the verbs of `CoordinatorLink`:

    admit     it has room; the answer is what to write
    report    this was written; the answer is how that goes on
    adopted   it holds other weights from now on
    drained   it writes nothing any more

In one process a verb is a method call. The messages are made to be sent: they
are frozen, consist of plain data and numpy arrays, and name things by numbers.
A turn carries the whole trajectory so far, so any replica can write it. The
one that wrote the turn before knows nothing that is not in its report.
"""

import dataclasses
from typing import Protocol, runtime_checkable

from jaxrl_async import types


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
  """A replica asks for work.

  Attributes:
    replica: its name, which no other replica has or had.
    version: of the weights that it holds.
    room: how many more trajectories it could soon be writing. It is given whole
      groups, and so perhaps a few trajectories more.
  """

  replica: str
  version: int
  room: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
  """Something to write: the next completion of one trajectory.

  Attributes:
    admission: of its group. The index seeds the sampling together with the
      member, and the deadline says what may wait.
    trajectory: everything so far, the prompt of this turn included. It has no
      finish reason.
    limit: the turn ends when the trajectory has that many tokens.
    temperature: of the sampling.
  """

  admission: types.Admission
  trajectory: types.Trajectory
  limit: int
  temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
  """The coordinator's answer.

  Attributes:
    turns: to be written.
    cancelled: indices of groups that are not to be written on. The replica
      reports what it has of them, as `ABORTED`.
  """

  turns: tuple[Turn, ...] = ()
  cancelled: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Written:
  """A trajectory as a replica has it.

  Attributes:
    group: its index.
    trajectory: everything so far. Its finish reason tells what became of the
      turn: None while it is being written, `ABORTED` where the coordinator
      cancelled it, and otherwise why it ended.
  """

  group: int
  trajectory: types.Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
  """What a replica has written; not necessarily of all its trajectories."""

  replica: str
  written: tuple[Written, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
  """A replica holds weights of another version from now on."""

  replica: str
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
  """A replica writes nothing any more: it was stopped, or it is lost.

  Another one goes on with its groups, from what was reported of them last.
  """

  replica: str


@runtime_checkable
class CoordinatorLink(Protocol):
  """The coordinator, as replicas know it."""

  def admit(self, ask: Ask) -> Work:
    """Returns turns for a replica that has room."""
    ...

  def report(self, report: Report) -> Work:
    """Takes note of what was written; returns how it goes on."""
    ...

  def adopted(self, adopted: Adopted) -> None:
    """Takes note of a replica's version."""
    ...

  def drained(self, drained: Drained) -> None:
    """Keeps the groups of a replica that is gone for another one."""
    ...
