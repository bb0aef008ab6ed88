"""Recorded tokens beside the part of the CDF that their number lies in."""

import functools

import jax
import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.run import forced_replay
from jaxrl_async.training import draw_check
from jaxrl_async.training import train_step

TEMPERATURE = 0.7


@functools.cache
def gaps_of():
  settings = train_step.ForwardSettings(
    model=tiny.MODEL,
    compute_dtype="float32",
    remat=sections.Remat.NONE,
    attention="xla",
    temperature=TEMPERATURE,
    vocab_chunk=40,
  )
  return jax.jit(functools.partial(draw_check._gaps, settings))


def parts(tokens):
  """Where the part of the CDF of each token but the first begins and ends."""
  logits = tiny.logits(tiny.params(), tokens).astype(np.float64) / TEMPERATURE
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  ends = np.cumsum(probs, axis=-1)[np.arange(len(tokens) - 1), tokens[1:]]
  own = probs[np.arange(len(tokens) - 1), tokens[1:]]
  return ends - own, ends


@pytest.mark.parametrize("where", [-0.2, 0.0, 0.5, 1.0, 1.2])
def test_a_gap_is_the_distance_to_the_part_of_the_token(where):
  sequences = [tiny.prompt(20), tiny.prompt(17, seed=1)]
  uniforms = np.zeros((1, tiny.WIDTH), np.float32)
  start = 0
  expected = np.zeros(tiny.WIDTH)
  is_looked_at = np.zeros(tiny.WIDTH, bool)
  for tokens in sequences:
    begins, ends = parts(tokens)
    if where < 0:
      drawn = begins + where
    elif where > 1:
      drawn = ends + where - 1
    else:
      drawn = begins + where * (ends - begins)
    here = slice(start + 1, start + len(tokens))
    uniforms[0, here] = drawn
    expected[here] = abs(where - np.clip(where, 0, 1))
    is_looked_at[here] = True
    start += len(tokens)
  batch = tiny.packed(sequences)._replace(fields={draw_check.UNIFORM: uniforms})
  found = np.asarray(gaps_of()(tiny.params(), batch))[0]
  np.testing.assert_allclose(
    found[is_looked_at], expected[is_looked_at], atol=1e-5
  )
  assert np.count_nonzero(is_looked_at) == 35


@pytest.fixture
def replay():
  made = object.__new__(forced_replay.ForcedReplay)
  made.num_checked = made.num_at_boundary = 0
  made.largest_error = 0.0
  return made


def look_at(replay, logprob_error=0.0, gap=0.0):
  """Look at four tokens, two of which are of the version; change the last."""
  trajectory = types.Trajectory(
    tokens=np.arange(10, 14, dtype=np.int32),
    loss_mask=np.array([False, True, True, True]),
    behavior_logprobs=np.array([0, -1, -2, -3], np.float32),
    policy_versions=np.array([-1, 4, 5, 5], np.int32),
    member=0,
  )
  logprobs = trajectory.behavior_logprobs.astype(np.float64)
  logprobs[1] += 1.0  # of another version, whose weights these are not
  logprobs[3] += logprob_error
  gaps = np.array([1.0, 1.0, 0.0, gap])
  return replay._look_at(5, trajectory, logprobs, gaps)


def test_tokens_of_a_version_are_counted(replay):
  assert look_at(replay, 5e-5, 5e-5) == ""
  assert replay.num_checked == 2 and replay.num_at_boundary == 1
  assert replay.largest_error == pytest.approx(5e-5)


@pytest.mark.parametrize(
  "error, gap", [(2e-4, 0.0), (0.0, 2e-4), (np.nan, 0.0), (0.0, np.nan)]
)
def test_a_token_that_was_not_drawn_is_named(replay, error, gap):
  assert look_at(replay, error, gap).startswith("token 3 was drawn with")
