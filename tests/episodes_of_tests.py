"""Episodes that the configs of tests name; this module imports no JAX."""

import numpy as np

from jaxrl_async.rollout import episode as episode_lib


def plain(prompt):
  yield prompt.tokens


def with_params(prompt, context, *, hint, count=1):
  for _ in range(count):
    yield context.tokenizer.encode(hint)


async def waits(prompt, context, *, hint="\n?"):
  yield prompt.tokens
  context.reward(1.0)
  yield context.tokenizer.encode(hint)
  context.reward(0.25)


def forks(prompt, context):
  """Member m begins anew m + 1 times, with what it wrote first."""
  written = yield prompt.tokens
  for number in range(context.member + 1):
    context.reward(len(written) / 16)
    written = yield episode_lib.Anew(
      np.concatenate([prompt.tokens, written[: 1 + number]])
    )
  context.reward(len(written) / 16)


async def never_yields(prompt):
  return prompt


NOTHING = 3
