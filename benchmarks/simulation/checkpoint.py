"""What a simulated run continues from."""

import dataclasses

from jaxrl_async.buffer import ledger as ledger_lib
from simulation import invariants as invariants_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
  """What a start of the trainer continues from, besides the groups' files.

  Attributes:
    version: completed train steps.
    next_index: of the next group.
    ledger: its length and its totals.
    num_tokens: tokens that were generated for groups.
    num_prompts: questions that were taken.
    trained: groups that were trained.
    bounds: of the groups, by index.
    cuts: those before it, and its own.
  """

  version: int = 0
  next_index: int = 0
  ledger: ledger_lib.LedgerState = ledger_lib.LedgerState()
  num_tokens: int = 0
  num_prompts: int = 0
  trained: frozenset[int] = frozenset()
  bounds: tuple[tuple[int, int], ...] = ()
  cuts: tuple[invariants_lib.Cut, ...] = ()
