"""The real buffer, with a book of its own of what goes in and out."""

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib


class Violation(AssertionError):
  """An invariant does not hold.

  Attributes:
    kind: its name in the docstring of `invariants`.
  """

  def __init__(self, kind: str, text: str):
    """Create a violation; the text says what was found."""
    super().__init__(f"{kind}: {text}")
    self.kind = kind


class WatchedBuffer(buffer_lib.Buffer):
  """The real buffer, and a book of what was admitted and taken.

  Attributes:
    bound: as it was set last.
    bounds: the bound under which each group was admitted.
    admitted_s: when each group was admitted.
    dropped_s: when each group was dropped.
  """

  def __init__(self, groups_per_step: int, max_staleness: int, **settings):
    """Create a buffer; the clock has to be given."""
    super().__init__(groups_per_step, max_staleness, **settings)
    self.bound = max_staleness
    self.bounds: dict[int, int] = {}
    self.admitted_s: dict[int, float] = {}
    self.dropped_s: dict[int, float] = {}

  def set_max_staleness(self, max_staleness: int) -> None:
    """Set the bound, and write it down."""
    super().set_max_staleness(max_staleness)
    self.bound = max_staleness

  def try_admit(self, engine_version: int) -> types.Admission | None:
    """Admit a group, and write it down."""
    admission = super().try_admit(engine_version)
    if admission is not None:
      self.bounds[admission.index] = self.bound
      self.admitted_s[admission.index] = self._clock()
    return admission

  def drop(self, index: int) -> None:
    """Drop a group, and write it down."""
    super().drop(index)
    self.dropped_s[index] = self._clock()

  def get_batch(
    self, step: int, timeout_s: float
  ) -> list[types.RolloutGroup] | None:
    """Take a batch, and check that nothing in it could have waited."""
    batch = super().get_batch(step, timeout_s)
    if batch is not None:
      left = [
        due(group.admission)
        for heap in self._finished.values()
        for _, group in heap
      ]
      taken = [due(group.admission) for group in batch]
      if taken != sorted(taken) or left and min(left) < taken[-1]:
        raise Violation("order", f"step {step} took {taken}, and left {left}")
    return batch


def due(admission: types.Admission) -> tuple[int, int]:
  """Return the order in which batches take groups."""
  return admission.deadline, admission.index
