"""What a scorer is shown, made in another process than the trajectories."""

import dataclasses
import pickle

import byte_level
import numpy as np
import pytest
import reward_groups
import tokenizers

from jaxrl_async import types
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

EOS = 50_256  # of the byte-level tokenizer


def random_trajectory(rng, member):
  """Turns of random tokens, which cut characters in two now and then."""
  lengths = rng.integers(1, 9, rng.choice([2, 2, 4, 5]))
  tokens = [rng.integers(0, 400, n).astype(np.int32) for n in lengths]
  tokens[-1][-1] = EOS
  mask = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
  return types.Trajectory(
    member=member,
    tokens=np.concatenate(tokens),
    loss_mask=mask,
    behavior_logprobs=np.zeros(len(mask), np.float32),
    policy_versions=np.where(mask, 0, -1),
    finish_reason=types.FinishReason(rng.choice(list(types.FinishReason))),
  )


def runs(trajectory):
  """Lists of tokens, of which the first and every second is a prompt."""
  found = []
  for i, (token, is_written) in enumerate(
    zip(trajectory.tokens, trajectory.loss_mask, strict=True)
  ):
    if i == 0 or is_written != trajectory.loss_mask[i - 1]:
      found.append([])
    found[-1].append(int(token))
  return found


def test_texts_are_byte_for_byte_those_of_the_library():
  library = tokenizers.Tokenizer.from_str(byte_level.build().to_str())
  # As it arrives in a reward process.
  tokenizer = pickle.loads(pickle.dumps(byte_level.load()))
  rng = np.random.default_rng(0)
  group = [random_trajectory(rng, member) for member in range(40)]
  group[7] = group[8]
  sent = pickle.loads(pickle.dumps(completion_lib.pack(group)))
  assert sum(len(runs(x)) > 2 for x in group) > 10
  made = completion_lib.of_group(sent, tokenizer)
  for one, trajectory in zip(made, group, strict=True):
    pieces = runs(trajectory)
    prompts, written = pieces[::2], pieces[1::2]
    texts = [
      library.decode(piece, skip_special_tokens=True) for piece in written
    ]
    ids = [token for piece in written for token in piece]
    assert one.text == library.decode(ids, skip_special_tokens=True)
    assert one.tokens.tolist() == ids
    shown = [turn.completion for turn in one.turns]
    assert shown == (texts + [""])[: len(prompts)]
    assert [turn.prompt for turn in one.turns] == [
      library.decode(piece, skip_special_tokens=True) for piece in prompts
    ]
    assert one.finish_reason is trajectory.finish_reason
    alone = completion_lib.of_trajectory(trajectory, tokenizer)
    assert repr(alone) == repr(one)
  assert any("\N{REPLACEMENT CHARACTER}" in one.text for one in made)


def test_a_group_without_trajectories_or_with_an_open_one():
  none = completion_lib.pack([])
  assert completion_lib.of_group(none, reward_groups.TOKENIZER) == []
  one = reward_groups.trajectory("Q", "7")
  one.finish_reason = None
  with pytest.raises(ValueError, match="trajectory 0 has not ended"):
    completion_lib.pack([reward_groups.trajectory("Q", "7"), one])


def test_an_episode_that_failed_before_it_showed_anything_has_no_turn():
  trajectory = dataclasses.replace(
    episode_lib.nothing(0), finish_reason=types.FinishReason.ABORTED
  )
  tokenizer = tokenizer_lib.character_level()
  found = completion_lib.of_trajectory(trajectory, tokenizer)
  assert (found.text, found.turns, len(found.tokens)) == ("", (), 0)
