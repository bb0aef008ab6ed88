"""Packing: trajectories of any length in a few arrays of fixed shape.

Trajectories are dealt to minibatches, those of a minibatch are packed into
rows, and the rows are grouped into microbatches:

  [num_minibatches, num_microbatches, rows_per_microbatch, tokens_per_row]

A row holds several trajectories one after the other, its segments, and then
padding. Attention stays within a segment. It can use either of two arrays:
token q sees token k if segment_ids[k] == segment_ids[q] and k <= q, which is
the same as segment_start[q] <= k <= q. Padding is a segment of its own with id
0, so that every token has something to attend to.

XLA compiles once per shape, and only num_microbatches may vary from step to
step. A run asks for enough microbatches for any batch that it expects, so that
all its batches have one shape. The device programs visit only the microbatches
in use (`num_used_microbatches`), and the unused ones come last in each
minibatch. If a batch needs more microbatches, their number is rounded up to 2^k
or 3 * 2^k.

If the rows of a microbatch are split over several devices, all devices wait for
the slowest one. The matrix products of a row cost the same for every row,
padding included. Attention does not, if the kernel skips what the mask hides:
its cost is quadratic in the length of each trajectory. Rows are therefore dealt
so that the shards of a microbatch have similar sums of squared lengths.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import heapq
import itertools
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int, Num, Shaped
import numpy as np

from jaxrl_async import types
from jaxrl_async.training import segments as segments_lib
from jaxrl_async.types import (
  Admission,
  FinishReason,
  Prompt,
  RolloutGroup,
  Trajectory,
)

# One for each trajectory, or for each an array with one per token.
Advantages = Float[np.ndarray, "_"] | Sequence[Float[np.ndarray, "_"]]
# The field with the token scores of rewards; see `reward_fields`.
TOKEN_SCORES = "token_scores"


class PackedBatch(NamedTuple):
  """One train step's trajectories, in numpy until they are moved to a device.

  It is a pytree: indexing each array with `jax.tree.map` gives the
  `PackedBatch` of a minibatch or a microbatch, with fewer leading axes.
  Position t of every array is about token t.

  Attributes:
    tokens: int32 token ids; 0 in padding.
    segment_ids: int32; 1, 2, ... along the row, 0 in padding.
    positions: int32 position within the trajectory; 0 in padding.
    segment_start: int32 column where the token's segment begins. In padding it
      is the first column of padding.
    loss_mask: bool; True for the generated tokens that are learned from.
    advantages: float32 advantage of the token's trajectory; 0 in padding.
    behavior_logprobs: float32; 0 for tokens that the policy did not write.
    policy_versions: int32; -1 for tokens that the policy did not write.
    fields: further float32 arrays by name, passed to `pack` or added by a stage
      of the train step; 0 in padding.
  """

  tokens: Int[Any, "*leading B T"]
  segment_ids: Int[Any, "*leading B T"]
  positions: Int[Any, "*leading B T"]
  segment_start: Int[Any, "*leading B T"]
  loss_mask: Bool[Any, "*leading B T"]
  advantages: Float[Any, "*leading B T"]
  behavior_logprobs: Float[Any, "*leading B T"]
  policy_versions: Int[Any, "*leading B T"]
  fields: Mapping[str, Float[Any, "*leading B T"]]

  def with_arrays(self, arrays: Mapping[str, Any]) -> "PackedBatch":
    """Return the batch with arrays replaced by name or added to its fields."""
    own = {name: x for name, x in arrays.items() if name in self._fields}
    further = {name: x for name, x in arrays.items() if name not in own}
    return self._replace(**own, fields={**self.fields, **further})


def pack(
  groups: list[RolloutGroup],
  advantages: Advantages,
  **settings: Any,
) -> tuple[PackedBatch, segments_lib.Segments]:
  """Pack all trajectories of the groups, deterministically."""
  segments = plan(groups, advantages, **settings)
  return packed_batch(dict(segments.filled())), segments


def without_overlong(groups: list[RolloutGroup]) -> list[RolloutGroup]:
  """Return the groups without loss tokens in trajectories that were cut off.

  This is the overlong filter of DAPO, arXiv:2503.14476.
  """

  def learned(trajectory: Trajectory) -> Trajectory:
    if trajectory.finish_reason is not FinishReason.LENGTH:
      return trajectory
    mask = np.zeros_like(trajectory.loss_mask)
    return dataclasses.replace(trajectory, loss_mask=mask)

  return [
    dataclasses.replace(group, trajectories=[*map(learned, group.trajectories)])
    for group in groups
  ]


def without_steered(groups: list[RolloutGroup]) -> list[RolloutGroup]:
  """Return the groups without loss tokens that guides have changed."""
  if not any(t.steered for group in groups for t in group.trajectories):
    return groups
  return [
    dataclasses.replace(
      group,
      trajectories=[
        dataclasses.replace(t, loss_mask=t.learned_mask)
        for t in group.trajectories
      ],
    )
    for group in groups
  ]


def learned(
  groups: list[RolloutGroup], advantages: Advantages
) -> tuple[list[RolloutGroup], Advantages]:
  """Return groups and advantages without branches that only measure another.

  See `types.learned`.
  """
  members = [branches for group in groups for branches in group.branches()]
  kept = [len(types.learned(x)) > i for x in members for i in range(len(x))]
  if all(kept):
    return groups, advantages
  found = [
    dataclasses.replace(
      group,
      trajectories=[t for x in group.branches() for t in types.learned(x)],
    )
    for group in groups
  ]
  if isinstance(advantages, np.ndarray):
    return found, advantages[kept]
  return found, list(itertools.compress(advantages, kept))


def packed_batch(arrays: Mapping[str, Any]) -> PackedBatch:
  """Return the batch of these arrays by name."""
  own = {name: arrays[name] for name in segments_lib.ARRAYS}
  fields = {name: x for name, x in arrays.items() if name not in own}
  return PackedBatch(**own, fields=fields)


def plan(
  groups: list[RolloutGroup],
  advantages: Advantages,
  *,
  tokens_per_row: int,
  rows_per_microbatch: int,
  num_minibatches: int,
  min_microbatches: int = 1,
  num_shards: int = 1,
  fields: Mapping[str, Sequence[Float[np.ndarray, "_"]]] | None = None,
) -> segments_lib.Segments:
  """Decide where each trajectory of the groups is packed, deterministically.

  Args:
    advantages: one advantage per trajectory, or for each an array with one per
      token.
    num_minibatches: number of optimizer steps. Trajectories, not groups, are
      dealt to minibatches: an equal number to each, or one more to some, the
      longest completion first, each to the minibatch with the fewest loss
      tokens.
    min_microbatches: smallest number of microbatches of a minibatch. Unused
      ones come last and hold only padding.
    num_shards: number of contiguous parts of a microbatch's rows, one for each
      device that they are split over.
    fields: further values by name: for each trajectory an array with one number
      per token.

  Raises:
    ValueError: a trajectory does not fit, does not begin with a prompt token,
      or has no advantage; a field does not have one number per token; or the
      rows cannot be split over the shards.
  """
  if rows_per_microbatch % num_shards:
    raise ValueError(
      f"{rows_per_microbatch} rows_per_microbatch cannot be split over"
      f" {num_shards} shards; use a multiple"
    )
  trajectories = [t for group in groups for t in group.trajectories]
  lengths = np.array([len(t.tokens) for t in trajectories], np.int64)
  fields = fields or {}
  _check(trajectories, lengths, advantages, tokens_per_row)
  if not isinstance(advantages, np.ndarray):
    fields = {**fields, "advantages": advantages}
    advantages = np.zeros(len(trajectories))
  for name, values in fields.items():
    if [len(x) for x in values] != lengths.tolist():
      raise ValueError(f"{name} does not have a number for each token")

  minibatch = _deal(trajectories, lengths, num_minibatches)
  rows = _lay_out(
    lengths,
    minibatch,
    tokens_per_row=tokens_per_row,
    rows_per_microbatch=rows_per_microbatch,
    num_minibatches=num_minibatches,
    num_shards=num_shards,
  )
  num_rows = max(1, *rows.used)
  num_microbatches = -(-num_rows // rows_per_microbatch)
  if num_microbatches <= min_microbatches:
    num_microbatches = min_microbatches
  else:
    num_microbatches = _round_up(num_microbatches)
  shape = (
    num_minibatches,
    num_microbatches,
    rows_per_microbatch,
    tokens_per_row,
  )
  row = minibatch * num_microbatches * rows_per_microbatch + rows.row
  return segments_lib.Segments(
    shape=shape,
    starts=row * tokens_per_row + rows.column,
    lengths=lengths,
    segment_ids=rows.segment,
    advantages=advantages,
    values={
      **{
        name: [getattr(t, name) for t in trajectories]
        for name in segments_lib.VALUES
      },
      **fields,
    },
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class _Rows:
  """The row of each trajectory within its minibatch, and its place in the row.

  Attributes:
    segment: segment id of the trajectory: 1, 2, ... along the row.
    used: for each minibatch, the number of its rows.
  """

  row: Int[np.ndarray, "trajectories"]
  column: Int[np.ndarray, "trajectories"]
  segment: Int[np.ndarray, "trajectories"]
  used: list[int]


def _lay_out(
  lengths: Int[np.ndarray, "trajectories"],
  minibatch: Int[np.ndarray, "trajectories"],
  *,
  tokens_per_row: int,
  rows_per_microbatch: int,
  num_minibatches: int,
  num_shards: int,
) -> _Rows:
  """Fill the rows of each minibatch, and balance them over the shards."""
  row = np.zeros_like(lengths)
  column = np.zeros_like(lengths)
  segment = np.zeros_like(lengths)
  num_rows = []
  for m in range(num_minibatches):
    members = np.flatnonzero(minibatch == m)
    first_row, column[members], segment[members], used = _first_fit(
      lengths[members], tokens_per_row
    )
    places = _balance(
      np.bincount(first_row, lengths[members] ** 2, len(used)),
      rows_per_microbatch,
      num_shards,
    )
    row[members] = places[first_row]
    num_rows.append(int(places.max(initial=-1)) + 1)
  return _Rows(row=row, column=column, segment=segment, used=num_rows)


def without_prompt(trajectories: Sequence[Trajectory]) -> RolloutGroup:
  """Return a group of trajectories that do not come from a prompt of a run."""
  return RolloutGroup(
    admission=Admission(index=0, birth=0, deadline=0),
    prompt=Prompt(prompt_id="", tokens=np.zeros(1, np.int32), item={}),
    trajectories=list(trajectories),
  )


def reward_fields(
  trajectories: Sequence[Trajectory],
) -> dict[str, list[Float[np.ndarray, "_"]]]:
  """Return the field `TOKEN_SCORES` for `pack`, if any reward scores tokens.

  Position t of an array is about token t of the trajectory, prompt included. A
  reward, in contrast, counts only the tokens that the policy generated. Tokens
  without a score get 0, including all tokens of a reward without token scores.
  If no reward scores tokens, the result is empty and the device programs are
  those of a run without token scores.
  """
  rewards = [t.reward for t in trajectories]
  if all(r is None or r.token_scores is None for r in rewards):
    return {}
  fields = []
  for trajectory, reward in zip(trajectories, rewards, strict=True):
    values = np.zeros(len(trajectory.tokens), np.float32)
    scores = (reward and reward.token_scores) or {}
    places = np.flatnonzero(trajectory.loss_mask)
    for position, score in scores.items():
      values[places[position]] = score
    fields.append(values)
  return {TOKEN_SCORES: fields}


MakeAdvantages = Callable[[Sequence[RolloutGroup]], Advantages]
# Makes further fields of a batch, by name, of the trajectories of a step.
MakeFields = Callable[
  [Sequence[Trajectory]], dict[str, list[Float[np.ndarray, "_"]]]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
  """What is learned from groups, and how they are packed; see `plan`.

  Attributes:
    advantages: makes advantages of rewards.
    fields: makes what else the stages and the loss need.
    overlong_filter: nothing is learned from trajectories that were cut off.
    num_epochs: passes of a train step over its minibatches.
  """

  tokens_per_row: int
  rows_per_microbatch: int
  num_minibatches: int
  min_microbatches: int
  advantages: MakeAdvantages
  fields: MakeFields = reward_fields
  overlong_filter: bool = False
  num_epochs: int = 1


def expected_microbatches(
  num_trajectories: int,
  *,
  max_tokens: int,
  tokens_per_row: int,
  rows_per_microbatch: int,
) -> int:
  """Return how many microbatches hold this many trajectories of any length.

  With first fit, at most one row has room for another trajectory of max_tokens.
  Every other row therefore holds at least tokens_per_row // max_tokens
  trajectories.

  Args:
    num_trajectories: the number of trajectories of a minibatch.
    max_tokens: the longest trajectory in tokens.
  """
  num_rows = -(-num_trajectories // (tokens_per_row // max_tokens))
  return -(-num_rows // rows_per_microbatch)


def num_used_microbatches(
  segment_ids: Int[Any, "K B T"],
) -> Int[Any, ""]:
  """Return how many microbatches of a minibatch are in use; they come first."""
  return (segment_ids != 0).any(axis=(1, 2)).sum(dtype=np.int32)


def unpack(
  packed: Shaped[Any, "M K B T"], segments: segments_lib.Segments
) -> list[np.ndarray]:
  """Return one array per trajectory, in the order of `pack`'s input."""
  flat = np.asarray(packed).reshape(-1)
  return [
    flat[start : start + length]
    for start, length in zip(segments.starts, segments.lengths, strict=True)
  ]


def _check(
  trajectories: list[Trajectory],
  lengths: Int[np.ndarray, "trajectories"],
  advantages: Advantages,
  tokens_per_row: int,
):
  if not trajectories:
    raise ValueError("no trajectories to pack")
  if len(advantages) != len(trajectories):
    raise ValueError(
      f"{len(advantages)} advantages for {len(trajectories)} trajectories"
    )
  if lengths.max() > tokens_per_row:
    raise ValueError(
      f"a trajectory of {lengths.max()} tokens does not fit: tokens_per_row "
      f"is {tokens_per_row}; use {lengths.max()} or more"
    )
  # Nothing precedes a first token, so it has no logprob to learn from.
  if lengths.min() == 0 or any(t.loss_mask[0] for t in trajectories):
    raise ValueError("a trajectory must begin with a token of its prompt")


def _deal(
  trajectories: list[Trajectory],
  lengths: Int[np.ndarray, "trajectories"],
  num_minibatches: int,
) -> Int[np.ndarray, "trajectories"]:
  """Return the minibatch of each trajectory.

  Minibatches get similar numbers of loss tokens and, as a tie-breaker, similar
  numbers of tokens. Their numbers of trajectories differ by at most one, so
  that `expected_microbatches` applies.
  """
  loss_tokens = np.array([t.num_completion_tokens for t in trajectories])
  minibatch = np.zeros_like(lengths)
  size, num_larger = divmod(len(trajectories), num_minibatches)
  heap = [(0, 0, m, 0) for m in range(num_minibatches)]
  for i in np.lexsort((-lengths, -loss_tokens)).tolist():
    num_loss, num_all, m, count = heapq.heappop(heap)
    while count == size and not num_larger:  # it is full
      num_loss, num_all, m, count = heapq.heappop(heap)
    minibatch[i] = m
    if count == size:
      num_larger -= 1
    else:
      num_loss += int(loss_tokens[i])
      num_all += int(lengths[i])
      heapq.heappush(heap, (num_loss, num_all, m, count + 1))
  return minibatch


def _first_fit(
  lengths: Int[np.ndarray, "trajectories"], tokens_per_row: int
) -> tuple[
  Int[np.ndarray, "trajectories"],
  Int[np.ndarray, "trajectories"],
  Int[np.ndarray, "trajectories"],
  Int[np.ndarray, "rows"],
]:
  """Pack by first-fit decreasing."""
  row = np.zeros_like(lengths)
  column = np.zeros_like(lengths)
  segment = np.zeros_like(lengths)
  used = np.zeros(len(lengths), np.int64)
  num_segments = np.zeros(len(lengths), np.int64)
  num_rows = 0
  for i in np.argsort(-lengths, kind="stable").tolist():
    # The search includes one unused row, so that there always is a row.
    r = int(np.argmax(used[: num_rows + 1] <= tokens_per_row - lengths[i]))
    num_rows = max(num_rows, r + 1)
    row[i], column[i] = r, used[r]
    used[r] += lengths[i]
    num_segments[r] += 1
    segment[i] = num_segments[r]
  return row, column, segment, used[:num_rows]


def _balance(
  costs: Num[np.ndarray, "rows"], rows_per_microbatch: int, num_shards: int
) -> Int[np.ndarray, "rows"]:
  """Return a new place for each row that balances the shards' costs.

  Rows of similar cost share a microbatch. Within it the most expensive row
  comes first, and each row goes to the cheapest shard that has room. With one
  shard the order does not change.
  """
  places = np.arange(len(costs))
  if num_shards == 1:
    return places
  per_shard = rows_per_microbatch // num_shards
  order = np.argsort(-costs, kind="stable").tolist()
  for first in range(0, len(order), rows_per_microbatch):
    shards = [(0.0, shard, 0) for shard in range(num_shards)]
    for r in order[first : first + rows_per_microbatch]:
      cost, shard, num_rows = heapq.heappop(shards)
      places[r] = first + shard * per_shard + num_rows
      if num_rows + 1 < per_shard:
        heapq.heappush(shards, (cost + float(costs[r]), shard, num_rows + 1))
  return places


def _round_up(count: int) -> int:
  """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... not below count."""
  power = 1 << (count - 1).bit_length()
  return power * 3 // 4 if count <= power * 3 // 4 else power
