"""What AReaL's paper reports, beside what the simulator says of the same.

The paper is arXiv:2505.24298. Three numbers are targets of a calibration, and
the speedup of each larger model has its asynchronous hours in it; what else the
simulator was given is in docs/project/scaling.md.
"""

from collections.abc import Iterator
import dataclasses
import enum

from simulation import presets
from simulation import throughput

_CALIBRATED_BOUNDS = (0, 8)
_SPEEDUP_BOUND = 8
# More tokens generated on four nodes because sequences go on under new weights.
_INTERRUPTION = {"1p5b": 1.12, "7b": 1.17}
_INTERRUPTION_DEVICES = 32


class Kind(enum.StrEnum):
  """How much of a number the simulator was given."""

  CALIBRATED = "calibrated"
  PARTLY = "partly calibrated"
  PREDICTED = "predicted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A number of the paper, and the same one simulated.

  Attributes:
    what: it is.
    paper: its value there.
    simulated: its value here.
    kind: how much of it was given.
  """

  what: str
  paper: float
  simulated: float
  kind: Kind

  @property
  def difference(self) -> float:
    """By what share the simulated number is larger."""
    return self.simulated / self.paper - 1


def rows(num_steps: int = 24) -> Iterator[Row]:
  """Yield all rows; this takes about two minutes.

  Args:
    num_steps: train steps to simulate for each.
  """
  small = presets.areal("1p5b")
  for bound, paper in presets.PAPER_THROUGHPUT.items():
    name = "unbounded" if bound == throughput.UNBOUNDED else str(bound)
    yield Row(
      what=f"k tokens/s of 1.5B, staleness {name}",
      paper=paper,
      simulated=_predict(small, bound, num_steps).tokens_per_s / 1e3,
      kind=Kind.CALIBRATED if bound in _CALIBRATED_BOUNDS else Kind.PREDICTED,
    )
  for name, published in presets.PAPER.items():
    cluster = presets.areal(name)
    alternating = throughput.predict(
      cluster, throughput.Mode.SYNCHRONOUS, num_steps=num_steps
    )
    apart = _predict(cluster, _SPEEDUP_BOUND, num_steps)
    yield Row(
      what=f"speedup over synchronous, {name} on {published.num_nodes} nodes",
      paper=published.speedup,
      simulated=apart.tokens_per_s / alternating.tokens_per_s,
      kind=Kind.CALIBRATED if name == "1p5b" else Kind.PARTLY,
    )
  for name, paper in _INTERRUPTION.items():
    cluster = dataclasses.replace(
      presets.areal(name), num_devices=_INTERRUPTION_DEVICES
    )
    going_on, waiting = (
      throughput.predict(
        cluster,
        throughput.Mode.ASYNCHRONOUS,
        throughput.UNBOUNDED,
        num_steps=num_steps,
        interrupts=interrupts,
      ).generated_per_s
      for interrupts in (True, False)
    )
    yield Row(
      what=f"tokens generated with and without interruption, {name}",
      paper=paper,
      simulated=going_on / waiting,
      kind=Kind.PREDICTED,
    )


def _predict(
  cluster: throughput.Cluster, bound: int, num_steps: int
) -> throughput.Prediction:
  return throughput.predict(
    cluster, throughput.Mode.ASYNCHRONOUS, bound, num_steps=num_steps
  )
