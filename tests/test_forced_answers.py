"""The episode budgets: cuts of thoughts, scores of answers, what is learned."""

import dataclasses
import json

from ml_collections import config_dict
import numpy as np
import pytest
import reward_groups
import reward_scorers
import test_run
import tokenizers

from configs import reasoning
from jaxrl_async import types
from jaxrl_async.algorithms import budget_curves
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import assembly
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import rules
from jaxrl_async.config import sections
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import cut_scores
from jaxrl_async.rewards import match
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import forced_answers
from jaxrl_async.rollout import named_episodes
from jaxrl_async.rollout import running_group
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import packing
from jaxrl_async.training import step_metrics

TOKENIZER = reward_groups.TOKENIZER
BUDGETS = budgets_lib.of((1, 3, 5), end="=", suffix="..=", max_tokens=2)
PROMPT = "Q\n"


def play(completion, answers, *, ended=True, tokenizer=TOKENIZER, **params):
  """The branches of a member that writes this, and these forced answers."""
  asked = dataclasses.asdict(BUDGETS) | params
  episode = named_episodes.find("budgets", asked)
  environment = environment_lib.Environment(episode, tokenizer=tokenizer)
  prompt = types.Prompt(
    prompt_id="p", tokens=tokenizer.encode(PROMPT), item={"answer": "7"}
  )
  limit = len(prompt.tokens) + 16
  talk = environment.open(prompt, key=(0, 0), limit=limit)
  answer = talk.begin()
  branches, texts = [], iter([completion, *answers])
  assert answer is not None
  while answer.tokens is not None:
    is_forced = bool(branches)
    assert answer.is_anew == is_forced
    assert answer.ends.max_tokens == (2 if is_forced else 0)
    tokens = tokenizer.encode(next(texts))
    is_full = len(tokens) == 2 if is_forced else not ended
    if not is_full:
      tokens = np.append(tokens, tokenizer.eos_id).astype(np.int32)
    elif not is_forced:
      tokens = tokens[:16]
    size = len(answer.tokens)
    mask = np.arange(size + len(tokens)) >= size
    branches.append(
      types.Trajectory(
        member=len(branches) * types.MEMBERS,
        tokens=np.append(answer.tokens, tokens).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        finish_reason=types.FinishReason.LENGTH
        if is_full
        else types.FinishReason.EOS,
      )
    )
    answer = talk.send(episode_lib.last_completion(branches[-1]))
  assert talk.context is not None
  branches[0].events = talk.context.events
  assert next(texts, None) is None
  return branches


def group_of(*members):
  """A group of members, each of them its branches."""
  for member, branches in enumerate(members):
    for number, branch in enumerate(branches):
      branch.member = member + number * types.MEMBERS
  return types.RolloutGroup(
    admission=types.Admission(index=0, birth=0, deadline=9),
    prompt=types.Prompt(prompt_id="", tokens=np.arange(3), item={}),
    trajectories=[t for branches in members for t in branches],
  )


def served(group, *terms):
  """The rewards that a service gives to the members."""
  scorers = dataclasses.replace(reward_groups.scorers(*terms), budgets=BUDGETS)
  service = service_lib.RewardService(scorers, num_workers=1)
  try:
    members = group.of_members().trajectories
    return service.submit({"answer": "7"}, members).result()
  finally:
    service.close()


def scored(group, *terms, budgets=BUDGETS):
  """The same without other processes."""
  scorers = reward_groups.scorers(*terms)
  found = []
  for member in group.of_members().trajectories:
    made = completion_lib.pack(cut_scores.answers(member, budgets, TOKENIZER))
    attempts = [
      scoring.Attempt(term=i, item={"answer": "7"}, group=made)
      for i in range(len(terms))
    ]
    of_terms = [scorers.score(attempt).rewards for attempt in attempts]
    rewards = of_terms[0]
    if all(isinstance(x, types.Reward) for x in rewards):
      rewards = term_lib.combined(terms, of_terms)
    found.append(cut_scores.reward(member, rewards, budgets))
  return found


def term(scorer, **more):
  return term_lib.Term(
    **{"scorer": scorer, "timeout_s": 10.0, "num_retries": 0} | more
  )


# -- cuts --------------------------------------------------------------------


def test_a_thought_is_cut_where_it_is_longer_than_a_budget():
  branches = play("abcd=7", ["1", "7"])
  texts = [TOKENIZER.decode(t.tokens) for t in branches]
  assert texts == ["Q\nabcd=7", "Q\na..=1", "Q\nabc..=7"]
  written = [TOKENIZER.decode(t.tokens[t.loss_mask]) for t in branches]
  assert written == ["abcd=7", "1", "7"]
  assert branches[0].reward_parts() == {
    "budget/thought_tokens": 4.0,
    "budget/thought_truncated": 0.0,
    "budget/completion_truncated": 0.0,
  }
  # A budget that is the length of the thought cuts nothing.
  assert len(play("abc=7", ["1"])) == 2 and len(play("a=7", [])) == 1
  assert play("=7", [])[0].reward_parts()["budget/thought_tokens"] == 0.0


def test_all_of_a_completion_without_an_end_is_thought():
  branches = play("abcdefghijklmnopqr", ["12", "7", "8"], ended=False)
  parts = branches[0].reward_parts()
  assert (
    parts["budget/thought_tokens"] == 16.0
    and parts["budget/thought_truncated"] == 1.0
  )
  assert parts["budget/completion_truncated"] == 1.0
  branches = play("abcd", ["1", "7"])
  parts = branches[0].reward_parts()
  assert (
    parts["budget/thought_tokens"] == 4.0
    and parts["budget/thought_truncated"] == 1.0
  )
  assert parts["budget/completion_truncated"] == 0.0


def with_special_token(name):
  """A tokenizer of characters and pairs of them, with a special token."""
  words = ["<pad>", "<eos>", name, *"Q\nabcd=.178", "d="]
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "?")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"d=|[\s\S]"), "isolated"
  )
  tokenizer.decoder = tokenizers.decoders.Fuse()
  tokenizer.add_special_tokens(["<pad>", "<eos>", name])
  return tokenizer_lib.Tokenizer(
    tokenizer, eos_token="<eos>", pad_token="<pad>"
  )


def test_the_end_may_be_a_special_token_or_begin_within_a_token():
  tokenizer = with_special_token("</think>")

  def found(text, end):
    return forced_answers.thought(tokenizer.encode(text), end, tokenizer)

  assert found("abc</think>7", "</think>") == (3, False)
  assert found("abc7", "</think>") == (4, True)
  assert found("abc7<eos>", "</think>") == (4, True)
  assert found("abcd=7", "=") == (3, False)
  branches = play(
    "abcc</think>7",
    ["1", "7"],
    tokenizer=tokenizer,
    end="</think>",
    suffix="",
  )
  assert tokenizer.decode_all(branches[1].tokens.tolist()) == (
    "Q\na</think>1<eos>"
  )


# -- scores ------------------------------------------------------------------


def test_each_answer_is_scored_once_as_a_completion_with_all_terms():
  right = term(match.exact, name="right", weight=2.0)
  ended = term(match.ended, name="ended", weight=0.5)
  group = group_of(
    play("abcdef=7", ["12", "7", "8"]),
    play("ab=7", ["7"]),
    play("a=1", []),
    play("abcdefghijklmnopqr", ["7", "7", "7"], ended=False),
  )
  found = scored(group, right, ended)
  first, second, third, fourth = found
  # The answers "12" have no room for an end, and count as cut off.
  assert first.score == 2.5 and first.parts == {
    "right": 1.0,
    "ended": 1.0,
    "budget/thought_tokens": 6.0,
    "budget/thought_truncated": 0.0,
    "budget/completion_truncated": 0.0,
    "budget/1": 0.0,
    "budget/3": 2.5,
    "budget/5": 0.5,
  }
  # At the last tokens of the forced answers, after 9 of the completion.
  assert first.token_scores == {10: 0.0, 12: 2.5, 14: 0.5}
  assert second.score == 2.5 and second.token_scores == {6: 2.5}
  assert [second.parts[f"budget/{x}"] for x in (1, 3, 5)] == [2.5] * 3
  assert third.score == 0.5 and third.token_scores == {}
  assert third.parts["budget/1"] == third.parts["budget/5"] == 0.5
  assert fourth.score == 0.0 and fourth.parts["budget/5"] == 2.5


def test_a_scorer_sees_the_thought_up_to_the_cut_and_the_forced_answer():
  first, *forced = play("abcd=7", ["12", "7"])
  # Without its last token it looks like one that a stop text has ended.
  arrays = {x: getattr(first, x)[:-1] for x in types.TOKEN_ARRAYS}
  for member in (first, dataclasses.replace(first, **arrays)):
    whole = types.whole([member, *forced])
    found = [
      completion_lib.of_trajectory(x, TOKENIZER)
      for x in cut_scores.answers(whole, BUDGETS, TOKENIZER)
    ]
    assert [x.text for x in found] == ["abcd=7", "a..=12", "abc..=7"]
    assert [len(x.turns) for x in found] == [1, 1, 1]
    reasons = [x.finish_reason for x in found]
    assert reasons == [*map(types.FinishReason, ("eos", "length", "eos"))]


def test_a_solved_completion_has_the_score_of_its_own_answer():
  (found,) = scored(group_of(play("abcd=7", ["1", "2"])), term(match.exact))
  assert found.score == 1.0 >= sections.TaskSection().solved_score


def test_an_answer_that_cannot_be_scored_costs_its_member():
  group = group_of(play("abcd=7", ["2", "7"]), play("abcd=7", ["7", "7"]))
  found = scored(group, term(reward_scorers.fails_on_two))
  assert isinstance(found[0], scoring.RewardFailure)
  kept = running_group.scored(group, found)
  assert [len(b) for b in kept.branches()] == [3]
  assert "two" in kept.dropped[0].reason


def test_or_it_is_zero_and_the_other_answers_keep_their_scores():
  group = group_of(play("abcd=7", ["2", "7"]), play("abcd=7", ["7", "7"]))
  found = served(group, term(reward_scorers.fails_on_two, fails_as_zero=True))
  assert [found[0].parts[f"budget/{x}"] for x in (1, 3, 5)] == [0.0, 1.0, 1.0]
  assert found[0].score == found[1].score == 1.0 and found[0].answer == "7"
  kept = running_group.scored(group, found)
  section = sections.AlgorithmSection(
    advantage="segment", advantage_scale=sections.AdvantageScale.NONE
  )
  made = algorithm_lib.advantages(section, budgets=BUDGETS, longest=16)([kept])
  assert all(np.isfinite(x).all() for x in made) and made[0][2] < 0


def test_a_reward_that_scores_tokens_is_refused():
  group = group_of(play("abcd=7", ["2", "7"]))
  (found,) = scored(group, term(reward_scorers.scores_the_first))
  assert "scores tokens" in found.reason


# -- what is learned ---------------------------------------------------------


def test_parts_of_thoughts_have_the_advantages_of_the_equation():
  group = group_of(
    play("abcdef=7", ["12", "7", "8"]),
    play("ab=7", ["7"]),
    play("abcd=1", ["1", "7"]),
  )
  found = scored(group, term(match.exact))
  group = running_group.scored(group, found)
  r = np.array([[0, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0]], np.float64)
  c = np.array([3, 4, 13, 11]) / 2 / 16
  np.testing.assert_allclose(budget_curves.weights((1, 3, 5), 16), c)
  section = sections.AlgorithmSection(
    advantage="segment", advantage_scale=sections.AdvantageScale.NONE
  )
  make = algorithm_lib.advantages(section, budgets=BUDGETS, longest=16)
  made = make([group])
  assert len(made) == 3 + 1 + 2 + 3
  for i, at in enumerate((0, 4, 6)):
    own = group.branches()[i][0].tokens[2:]
    length, forced = (6, 2, 4)[i], (3, 1, 2)[i]
    assert made[at][:2].tolist() == [0, 0]  # the prompt
    for t in range(1, len(own) + 1):
      # The answer's own tokens are of the last part.
      j = next(j for j, x in enumerate((1, 3, 5, 99)) if x >= min(t, length))
      assert j <= forced
      others = [o for o in range(3) if o != i]
      expected = sum(
        c[k] * (r[i, k] - np.mean(r[others, k])) for k in range(j, 4)
      )
      np.testing.assert_allclose(
        made[at][1 + t], expected, rtol=1e-5, atol=1e-7
      )
  forced = [made[k] for k in (1, 2, 3, 5, 7, 8)]
  assert not any(x.any() for x in forced)
  # What only measures is not trained, and is no part of lengths.
  learned, advantages = packing.learned([group], made)
  assert [t.member for t in learned[0].trajectories] == [0, 1, 2]
  assert [len(a) for a in advantages] == [11, 7, 9]
  metrics = step_metrics.of_groups([group], 4)
  assert metrics["completion/tokens_mean"] == np.mean([9, 5, 7])
  assert metrics["completion/frac_truncated"] == 0.0
  assert metrics["reward/parts/budget/thought_tokens"] == 4.0
  assert metrics["reward/parts/budget/3"] == 1.0
  assert metrics["reward/mean"] == pytest.approx(2 / 3)
  assert step_metrics.pass_at_k([group], 1.0)["reward/pass@1"] == (
    pytest.approx(2 / 3)
  )


@pytest.mark.parametrize(
  ("budgets", "members", "is_empty"),
  [
    # The answers of short thoughts are those of their completions.
    ((1, 3, 5), [("abcdef=7", "777"), ("a=7", "")], True),
    ((1, 3, 5), [("abcdef=1", "177"), ("abcd=1", "17")], False),
    ((1, 3, 5), [("abcdef=1", "177"), ("abcdef=1", "177")], True),
    ((1, 3, 5), [("abcdef=7", "177"), ("abcd=7", "77")], False),
    ((1, 3, 5), [("abcdef=7", "771"), ("a=7", "")], False),
    ((1, 3, 5), [("a=7", ""), ("ab=1", "7")], False),
    # Nothing stands before a cut at 0, unless it is the whole completion.
    ((0, 3), [("abcdef=7", "17"), ("abcdef=7", "77")], True),
    ((0, 3), [("abcdef=7", "71"), ("abcdef=7", "77")], False),
    ((0, 3), [("abcdef=7", "17"), ("=7", "")], False),
    ((0, 3), [("abcdef=7", "77"), ("=7", "")], True),
  ],
)
def test_a_group_is_filtered_if_its_budgets_teach_nothing(
  budgets, members, is_empty
):
  asked = dataclasses.replace(BUDGETS, budgets=budgets)
  group = group_of(*(play(a, b, budgets=budgets) for a, b in members))
  found = scored(group, term(match.exact), budgets=asked)
  assert cut_scores.teach_nothing(found, budgets) == is_empty
  section = sections.AlgorithmSection(
    advantage="segment", advantage_scale=sections.AdvantageScale.NONE
  )
  make = algorithm_lib.advantages(section, budgets=asked, longest=16)
  made = make([running_group.scored(group, found)])
  assert is_empty == (not any(x.any() for x in made))


def test_the_rollout_side_is_told_the_budgets():
  made = assembly.coordinator_settings(config_of(), has_own_loss=False)
  assert made.budgets == (2, 4, 8)
  made = assembly.coordinator_settings(sections.Config(), has_own_loss=False)
  assert made.budgets == ()


def test_the_ledger_has_the_finish_reason_of_the_completion(tmp_path):
  group = group_of(
    play("abcdef=7", ["12", "7", "12"]),
    play("abcdefghijklmnopqr", ["7", "7", "7"], ended=False),
  )
  group.trajectories[0].reward = types.Reward(score=1.0)
  ledger = ledger_lib.Ledger(tmp_path / "ledger", ledger_lib.LedgerState())
  ledger.add_filtered(group)
  ledger.close()
  line = json.loads((tmp_path / "ledger").read_text())
  assert line["finish_reasons"] == ["eos", "length"]
  # All that was written counts.
  assert line["num_completion_tokens"] == [9 + 2 + 2 + 2, 16 + 3 * 2]


# -- settings ----------------------------------------------------------------


def config_of(**params):
  config = test_run.make_config(
    algorithm={
      "advantage": "segment",
      "advantage_scale": sections.AdvantageScale.NONE,
    }
  )
  config.task.episode = "budgets"
  asked = {"budgets": (2, 4, 8), "end": "=", "max_tokens": 3} | params
  given = {k: v for k, v in asked.items() if v is not None}
  config.task.episode_params = config_dict.ConfigDict(given)
  return config


@pytest.mark.parametrize(
  ("params", "words"),
  [
    ({"budgets": None}, "episode_params.budgets: missing"),
    ({"end": None}, "episode_params.end: missing"),
    ({"budgets": (4, 2)}, "ascending"),
    ({"budgets": (2, 2, 4)}, "each of them once"),
    ({"budgets": ()}, "1 to 32"),
    ({"budgets": (-1, 4)}, "episode_params.budgets"),
    ({"end": ""}, "episode_params.end: None is no text"),
    ({"max_tokens": 0}, "episode_params.max_tokens"),
    ({"more": 1}, "'more' is none of budgets, end, suffix, max_tokens"),
    (
      {"budgets": (2, 16)},
      "16 is not less than rollout.max_completion_tokens 16",
    ),
  ],
)
def test_wrong_parameters_are_refused_before_anything_starts(params, words):
  with pytest.raises(sections.ConfigError) as caught:
    rules.check(config_of(**params))
  assert words in str(caught.value)


def test_settings_that_do_not_go_with_budgets_are_refused():
  rules.check(config_of())
  config = config_of()
  config.task.max_turns = 3
  with pytest.raises(sections.ConfigError, match=r"^task.max_turns: 3 .*budg"):
    rules.check(config)
  config = config_of()
  config.algorithm.advantage = "group"
  with pytest.raises(sections.ConfigError, match="'group' .* use segment"):
    rules.check(config)
  for scale in (sections.AdvantageScale.STD, sections.AdvantageScale.BATCH_STD):
    config = config_of()
    config.algorithm.advantage_scale = scale
    words = rf"^algorithm.advantage_scale: {scale.value} .*task.episode.* none$"
    with pytest.raises(sections.ConfigError, match=words):
      rules.check(config)


@pytest.mark.parametrize(
  ("params", "words"),
  [
    ({"suffix": "=" * 6}, "suffix: 6 tokens after a cut at 8 .*_tokens 16"),
    ({"end": "é"}, "episode_params.end: character 'é'"),
    ({"suffix": tokenizer_lib.EOS_TOKEN}, "episode_params.suffix: "),
  ],
)
def test_texts_that_cannot_be_written_or_do_not_fit_are_refused(params, words):
  with pytest.raises(sections.ConfigError, match=words):
    forced_answers.check(config_of(**params), TOKENIZER)
  forced_answers.check(config_of(suffix="=" * 5), TOKENIZER)


@pytest.mark.parametrize("variant", ["", *reasoning.VARIANTS])
def test_every_variant_of_the_config_holds(variant):
  config = reasoning.get_config(variant)
  rules.check(config)
  forced_answers.check(config, TOKENIZER)
  assert (config.task.episode == "budgets") == (variant in reasoning.BUDGETS)


def test_solutions_are_right_or_cut_and_cuts_are_only_shown():
  rng = np.random.default_rng(0)
  item = {"answer": "2", "metadata": {"expression": "4 - 1 - 7 + 6"}}
  made = [reasoning.solution(item, rng) for _ in range(400)]
  cut = [x for x in made if isinstance(x, tuple)]
  assert 0.2 < len(cut) / len(made) < 0.3
  assert all(a.endswith("#") and b == "2" for a, b in cut)
  whole = [x for x in made if isinstance(x, str)]
  assert 0.6 < np.mean([x.endswith("\n#2") for x in whole]) < 0.95
  # The teacher of a row errs, and what follows a cut does not.
  row = {"answer": "2", "metadata": {"solution": "1+1=3\n#3"}}
  rows = {reasoning.of_row(row, rng) for _ in range(200)}
  assert rows == {"1+1=3\n#3", *((f"{'1+1=3'[:n]}#", "2") for n in range(6))}
  completion = types.Completion(
    text="4-1=3\n#2",
    answer="2",
    turns=(),
    tokens=np.arange(8),
    finish_reason=types.FinishReason.EOS,
  )
  assert reasoning.short(item, completion) == pytest.approx(1 - 0.5 * 8 / 96)
