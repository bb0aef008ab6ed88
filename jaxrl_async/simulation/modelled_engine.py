"""An engine without device programs, for the real scheduler.

What a sequence becomes is a function of its group and member: which tokens, and
how many. It does not matter who writes it, how often it was interrupted, or
when. So everything that arrives anywhere can be compared with what it has to
be.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.models import configs

END_TOKEN = 1
PROMPT_TOKENS = 3
_FIRST_TOKEN, _NUM_TOKENS = 8, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
  """What every sequence of a run becomes.

  Attributes:
    seed: of the run.
    max_completion: the most tokens of a completion, at which it is cut off.
  """

  seed: int
  max_completion: int

  def num_tokens(self, group: int, member: int) -> int:
    """Return the tokens of a completion; one more than allowed is cut off."""
    mixed = (self.seed * 1_000_003 + group) * 8191 + member * 127 + 11
    mixed = (mixed ^ (mixed >> 13)) * 0x5BD1E995 & 0xFFFFFFFF
    # The minimum of two numbers: few are long.
    most = self.max_completion + 1
    return 1 + min((mixed >> 3) % most, (mixed >> 17) % most)

  def tokens(
    self, group: int, member: int, begin: int, count: int
  ) -> np.ndarray:
    """Return tokens of a completion, from its token `begin` on."""
    first = group * 31 + member * 17
    positions = np.arange(begin, begin + count, dtype=np.int32)
    tokens = _FIRST_TOKEN + (first + 7 * positions) % _NUM_TOKENS
    last = self.num_tokens(group, member) - 1
    tokens[positions == last] = END_TOKEN
    return tokens

  def is_of(self, group: int, trajectory: types.Trajectory) -> bool:
    """Return whether a trajectory is this script's, as far as it goes."""
    written = trajectory.tokens[PROMPT_TOKENS:]
    expected = self.tokens(group, trajectory.member, 0, len(written))
    return bool(
      len(trajectory.tokens) >= PROMPT_TOKENS
      and trajectory.loss_mask[PROMPT_TOKENS:].all()
      and (written == expected).all()
    )

  def is_whole(self, group: int, trajectory: types.Trajectory) -> bool:
    """Return whether a trajectory is all that this script has for it."""
    count = min(
      self.num_tokens(group, trajectory.member), self.max_completion
    )
    written = len(trajectory.tokens) - PROMPT_TOKENS
    return written == count and self.is_of(group, trajectory)


@dataclasses.dataclass(slots=True)
class _Slot:
  """A sequence in a slot; `length` and `end` count its prompt too."""

  ticket: int = -1
  group: int = 0
  member: int = 0
  length: int = 0
  end: int = 0


class ModelledEngine(engine_lib.Engine):
  """Writes what a script says, in slots as a device would.

  The lengths of its rows stand for a prefix. Its state is changed in place.
  """

  def __init__(self, sizes: decode_state_lib.EngineSizes, script: Script):
    """Create an engine; nothing is compiled."""
    self.sizes = sizes
    self.model = configs.MODELS["tiny"]
    self.end_tokens = (END_TOKEN,)
    self.num_end_tokens = 1 + sampling.MAX_END_TOKENS
    self._script = script
    self._has_adapters = False

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

  def open_prefix(
    self, tokens: Any, lengths: Any, shared: Any, adapters: Any = None
  ) -> Any:
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
      end = PROMPT_TOKENS + self._script.num_tokens(group, member)
      slots[place] = _Slot(
        ticket=ticket,
        group=group,
        member=member,
        length=int(prefix[slot.sources[i]]),
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
  ) -> Any:
    """Write a few tokens in every slot that is not idle."""
    shape = self.sizes.num_slots, self.sizes.decode_steps_per_call
    tokens = np.zeros(shape, np.int32)
    is_valid = np.zeros(shape, bool)
    for row, slot in enumerate(decode_state):
      count = min(shape[1], slot.end - slot.length)
      if count <= 0:
        continue
      begin = slot.length - PROMPT_TOKENS
      tokens[row, :count] = self._script.tokens(
        slot.group, slot.member, begin, count
      )
      is_valid[row, :count] = True
      slot.length += count
    return decode_state, decode_state_lib.StepResult(
      tokens=tokens,
      is_valid=is_valid,
      logprobs=np.zeros(shape, np.float32),
      policy_versions=np.full(shape, params.version, np.int32),
      has_ended=np.array([s.length >= s.end for s in decode_state]),
      tickets=np.array([s.ticket for s in decode_state], np.int32),
    )

  def read(self, result: Any) -> Any:
    """Return the result, which is on the host."""
    return result
