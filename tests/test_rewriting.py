"""Recorded trajectories are generated again, bit for bit."""

import collections
import dataclasses

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.config import sections
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import rewriting as rewriting_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

LIMIT = 30
SETTINGS = coordinator_settings_lib.CoordinatorSettings(
  group_size=2,
  num_slots=4,
  max_completion_tokens=LIMIT,
  max_tokens=LIMIT,
  temperature=1.0,
  filter_zero_std=False,
  reads_token_scores=False,
  max_failed_groups=1,
  max_filtered_groups=1_000,
)
SIZES = {
  "slots": {},
  "chunks": {"prefill_chunk": 8},
  "pages": {"num_pages": 7, "page_tokens": 8},
  "exact pages": {
    "num_pages": 7,
    "page_tokens": 8,
    "preemption": sections.Preemption.EXACT,
  },
}
TOKENIZER = tokenizer_lib.character_level()


def two_turns(prompt):
  """An episode of a second turn, which depends on the first completion."""
  written = yield prompt.tokens
  yield np.append(written[-1:], prompt.tokens[:2]).astype(np.int32)


def ended_early(prompt):
  """An episode whose turns have limits of their own, the last one apart."""
  written = yield episode_lib.Until(prompt.tokens, max_tokens=5)
  more = np.append(written[-1:], prompt.tokens[:2]).astype(np.int32)
  yield episode_lib.Until(more, stop_token_ids=range(8), stop=("a", "b"))
  yield more


class Recorded:
  """Groups that a coordinator and a replica write, over several versions."""

  def __init__(self, directory, episode, sizes, num_groups=10):
    ledger = ledger_lib.Ledger(
      directory / "ledger.jsonl", ledger_lib.LedgerState()
    )
    ledger.close()  # no group fails
    self.buffer = buffer_lib.Buffer(1, 99)
    self.num_groups = num_groups
    self.scheduler = tiny.scheduler(**sizes)
    self.coordinator = coordinator_lib.Coordinator(
      SETTINGS,
      stream=tiny.Prompts(),
      buffer=self.buffer,
      rewards=tiny.Rewards(),
      ledger=ledger,
      busy=metrics_lib.BusyClock(),
      environment=environment_lib.Environment(episode),
    )
    self.replica = self.new_replica("first")

  def new_replica(self, name):
    return replica_lib.Replica(
      name,
      self.coordinator,
      self.scheduler,
      channel=tiny.channel(),
      tokenizer=TOKENIZER,
    )

  def write(self):
    """Writes the groups, with other weights at every third call."""
    version, calls, done = -1, 0, []
    while len(done) < self.num_groups:
      if calls % 3 == 0 and (version < 0 or self.buffer.num_finished):
        if version >= 0:
          done += self.buffer.get_batch(version, timeout_s=1.0)
        version += 1
        self.buffer.set_policy_version(version)
        self.scheduler.adopt(
          tiny.engine_params(version, seed=version % 5), version
        )
      if calls == 8:  # another replica goes on with what was reported
        self.replica.give_back()
        self.coordinator.drained(self.replica.name)
        self.replica = self.new_replica("second")
      feed_from(self.replica, version)
      self.replica.step()
      self.coordinator.collect_scores()
      calls += 1
    return done


def feed_from(replica, version):
  """What `adopt` and `feed` do, without a channel to look at."""
  replica._link.adopted(messages.Adopted(replica=replica.name, version=version))
  room = max(0, replica.scheduler.room)
  ask = messages.Ask(replica=replica.name, version=version, room=room)
  replica.take(replica._link.admit(ask))


def rewrite(groups, episode, sizes):
  """Generates groups again; gives them by group and member."""
  found = {
    (group.index, branches[0].member): rewriting_lib.Rewritten(
      group.admission,
      group.prompt,
      [t.cache_builds for t in branches],
      environment_lib.Environment(episode),
      SETTINGS,
      member=branches[0].member,
    )
    for group in groups
    for branches in group.branches()
  }
  again = rewriting_lib.Rewriting(tiny.scheduler(**sizes), TOKENIZER)
  again.add(found.values())
  last = max(
    build.version
    for group in groups
    for t in group.trajectories
    for build in t.cache_builds
  )
  for version in range(last + 1):
    params = tiny.engine_params(version, seed=version % 5)
    collections.deque(again.write(params, version), maxlen=0)
  return found


@pytest.mark.parametrize(
  "name",
  ["slots", "exact pages"]
  + [pytest.param(x, marks=pytest.mark.slow) for x in ("chunks", "pages")],
)
def test_what_was_recorded_is_written_again_to_the_bit(name, tmp_path):
  sizes = SIZES[name]
  recorded = Recorded(tmp_path, two_turns, sizes)
  groups = recorded.write()
  if "pages" in name:
    assert recorded.scheduler.stats.preemptions > 0
  builds = [len(t.cache_builds) for g in groups for t in g.trajectories]
  assert max(builds) > 2
  spans = [
    len(np.unique(t.policy_versions[t.loss_mask]))
    for g in groups
    for t in g.trajectories
  ]
  assert max(spans) > 2
  check_rewritten(groups, two_turns, sizes)


def check_rewritten(groups, episode, sizes):
  found = rewrite(groups, episode, sizes)
  for group in groups:
    for trajectory in group.trajectories:
      again = found[group.index, trajectory.member]
      assert again.is_done
      for array in types.TOKEN_ARRAYS:
        np.testing.assert_array_equal(
          getattr(again.branches[-1], array), getattr(trajectory, array)
        )
      assert again.branches[-1].finish_reason is trajectory.finish_reason
      # A preemption within a version leaves exact caches as they were.
      assert [b[:3] for b in again.branches[-1].cache_builds] == [
        b[:3] for b in trajectory.cache_builds
      ]


def test_turns_with_limits_of_their_own_are_written_again(tmp_path):
  groups = Recorded(tmp_path, ended_early, {}).write()
  trajectories = [t for group in groups for t in group.trajectories]
  by_turn = collections.defaultdict(list)
  for trajectory in trajectories:
    turns = episode_lib.recorded_turns([trajectory])
    for number, turn in enumerate(turns):
      by_turn[number].append(turn.completion.tokens.tolist())
  first, second, last = by_turn.values()
  assert max(map(len, first)) == 5 < max(map(len, last))
  a, b = TOKENIZER.encode("ab").tolist()
  ends = {*range(8), a, b}
  assert not any(ends.intersection(tokens[:-1]) for tokens in second)
  assert any(ends.intersection(tokens[:-1]) for tokens in last)
  found = {tokens[-1] for tokens in second}
  assert found & set(range(8)) and found & {a, b}
  check_rewritten(groups, ended_early, {})


def test_without_one_of_the_caches_other_bits_are_written(tmp_path):
  groups = Recorded(tmp_path, two_turns, {}).write()
  whole = next(
    (group, t)
    for group in groups
    for t in group.trajectories
    if len(t.cache_builds) > 1
    and t.cache_builds[0].version < t.cache_builds[1].version
    and t.loss_mask[t.cache_builds[1].length]
    and t.loss_mask[t.cache_builds[1].length - 1]
  )
  group, trajectory = whole
  cut = dataclasses.replace(trajectory)
  cut.cache_builds = cut.cache_builds[:1] + cut.cache_builds[2:]
  group = dataclasses.replace(group, trajectories=[cut])
  try:
    ((_, again),) = rewrite([group], two_turns, {}).items()
  except rewriting_lib.RewritingError:
    return  # other tokens ended it elsewhere
  length = trajectory.cache_builds[1].length + 1
  assert not np.array_equal(
    again.branches[-1].behavior_logprobs[:length],
    trajectory.behavior_logprobs[:length],
  )


def test_a_record_that_ends_too_early_is_refused(tmp_path):
  group = Recorded(tmp_path, two_turns, {}).write()[0]
  cut = dataclasses.replace(group.trajectories[0])
  cut.cache_builds = cut.cache_builds[:-1]
  group = dataclasses.replace(group, trajectories=[cut])
  with pytest.raises(
    rewriting_lib.RewritingError, match="group 0, member 0 has"
  ):
    rewrite([group], two_turns, {})
