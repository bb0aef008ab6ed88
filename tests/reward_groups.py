"""Trajectories for scorers, a token a character, and services for them."""

import numpy as np

from jaxrl_async import types
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.character_level()


def trajectory(*turns):
  """Prompts and completions in turn, the first of them a prompt."""
  tokens = [TOKENIZER.encode(text) for text in turns]
  mask = [np.full(len(x), i % 2 == 1) for i, x in enumerate(tokens)]
  tokens, mask = np.concatenate(tokens), np.concatenate(mask)
  return types.Trajectory(
    member=0,
    tokens=tokens,
    loss_mask=mask,
    behavior_logprobs=np.zeros(len(tokens), np.float32),
    policy_versions=np.where(mask, 0, -1),
    finish_reason=types.FinishReason.EOS,
  )


def submit(service, item, texts):
  """Has these completions of a prompt scored."""
  return service.submit(item, [trajectory("Q", text) for text in texts])


def scorers(*terms):
  return scoring.Scorers(terms=terms, answer_prefix="=", tokenizer=TOKENIZER)


def service(*terms):
  return service_lib.RewardService(scorers(*terms), num_workers=1)
