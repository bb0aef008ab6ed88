"""An engine without device programs, for the real scheduler.

It writes what the script of the run says.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.models import configs
from simulation import script as script_lib


@dataclasses.dataclass(slots=True)
class _Slot:
  """A sequence in a slot, which is idle once `length` is `end`."""

  ticket: int = -1
  group: int = 0
  member: int = 0
  length: int = 0
  end: int = 0


class ModelledEngine(engine_lib.Engine):
  """Writes what a script says, in slots as a device would.

  The lengths of its rows stand for a prefix. Its state is changed in place.

  Attributes:
    fails_next: whether the next call raises, after it has changed the state.
  """

  def __init__(
    self, sizes: decode_state_lib.EngineSizes, script: script_lib.Script
  ):
    """Create an engine; nothing is compiled."""
    self.sizes = sizes
    self.model = configs.MODELS["tiny"]
    self.end_tokens = (script_lib.END_TOKEN,)
    self.num_end_tokens = 1 + sampling.MAX_END_TOKENS
    self._script = script
    self._has_adapters = False
    self.calls_in_flight = 2
    self.fails_next = False

  def init_decode_state(self) -> Any:
    """Return idle slots."""
    return [_Slot() for _ in range(self.sizes.num_slots)]

  def prefill(
    self,
    *,
    params: Any,
    existing_prefix: Any = None,
    padded_tokens: Any,
    true_length: Any,
    adapters: Any = None,
  ) -> Any:
    """Return the lengths of the rows."""
    return np.array(true_length)

  def open_prefix(self, tokens: Any, lengths: Any, adapters: Any = None) -> Any:
    """Return the lengths of the rows."""
    return np.array(lengths)

  def extend_prefix(self, params: Any, prefix: Any, start: int) -> Any:
    """Return the same rows."""
    return prefix

  def fill_pages(
    self, prefix: Any, row: int, decode_state: Any, pages: np.ndarray
  ) -> Any:
    """Return the same state: pages hold nothing here."""
    return decode_state

  def insert(self, prefix: Any, decode_state: Any, slot: Any) -> Any:
    """Put rows into slots, as the program `insert_rows` does."""
    slots: list[_Slot] = decode_state
    newest = max(one.ticket for one in slots)
    idle = [i for i, one in enumerate(slots) if one.length >= one.end]
    for i, place in enumerate(slot.slots.tolist()):
      if place == self.sizes.num_slots:
        continue
      ticket = int(slot.settings.tickets[i])
      if place == decode_state_lib.PICK:
        if ticket <= newest or not idle:
          continue
        place = idle.pop(0)
      group, member = int(slot.groups[i]), int(slot.members[i])
      length = int(prefix[slot.sources[i]])
      ends = self._script.expected(group, member).turn_ends
      end = next(end for end in ends if end > length)
      slots[place] = _Slot(
        ticket=ticket,
        group=group,
        member=member,
        length=length,
        end=min(end, int(slot.settings.limits[i])),
      )
    return slots

  def release(self, decode_state: Any, tickets: Sequence[int]) -> Any:
    """Stop the sequences with these tickets."""
    for slot in decode_state:
      if slot.ticket in tickets:
        slot.end = slot.length
    return decode_state

  def generate(
    self,
    params: Any,
    decode_state: Any,
    *,
    window: int | None = None,
    is_filtered: bool = False,
    tables: Any = None,
    guided: Any = None,
  ) -> Any:
    """Write a few tokens in every slot that is not idle."""
    assert guided is None
    shape = self.sizes.num_slots, self.sizes.decode_steps_per_call
    tokens = np.zeros(shape, np.int32)
    is_valid = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    for row, slot in enumerate(decode_state):
      count = min(shape[1], slot.end - slot.length)
      if count <= 0:
        continue
      expected = self._script.expected(slot.group, slot.member)
      places = np.arange(slot.length, slot.length + count)
      tokens[row, :count] = expected.tokens[places]
      logprobs[row, :count] = script_lib.logprobs(places, params.version)
      is_valid[row, :count] = True
      slot.length += count
    if self.fails_next:
      self.fails_next = False
      raise jax.errors.JaxRuntimeError("a fault of the simulation")
    return decode_state, decode_state_lib.StepResult(
      tokens=tokens,
      is_valid=is_valid,
      logprobs=logprobs,
      policy_versions=np.full(shape, params.version, np.int32),
      has_ended=np.array([s.length >= s.end for s in decode_state]),
      tickets=np.array([s.ticket for s in decode_state], np.int32),
    )

  def read(self, result: Any) -> Any:
    """Return the result, which is on the host."""
    return result
