"""What the coordinator has to know of the configuration."""

import dataclasses


@dataclasses.dataclass(kw_only=True, slots=True)
class CoordinatorSettings:
  """The part of the configuration that the coordinator uses.

  Attributes:
    max_tokens: the longest trajectory in tokens, prompt included. The cache of
      every replica holds this many.
    num_slots: of every replica's engine.
    filter_zero_std: groups that give nothing to learn are left out.
    reads_token_scores: as in `types.teach_nothing`.
    budgets: where thoughts are cut; () if they are not. What gives nothing to
      learn is then said by `rewards.cut_scores.teach_nothing`.
    max_filtered_groups: the run ends with an error after this many filtered
      groups in a row, because training would hardly advance.
    stop: texts each of which ends a turn.
    stop_token_ids: tokens each of which ends a turn.
    max_group_s: a group fails that is not generated after so many seconds; 0
      lets every group take its time.
  """

  group_size: int
  max_completion_tokens: int
  max_tokens: int
  num_slots: int
  temperature: float
  filter_zero_std: bool
  reads_token_scores: bool
  max_failed_groups: int
  max_filtered_groups: int
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  max_group_s: float = 0.0
  budgets: tuple[int, ...] = ()
