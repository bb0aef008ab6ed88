"""Kernels are taken or refused in bfloat16, at the heads of real models."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import packed_attention

# Query heads, kv heads and head size of Qwen2.5 1.5B, 0.5B and 7B.
HEADS = [(12, 2, 128), (14, 2, 64), (28, 4, 128)]
BFLOAT16 = jnp.dtype("bfloat16")
TOKENS = 640


def on_platform(monkeypatch, platform, interpreted):
  """Try that platform's kernels on this CPU, one of them interpreted."""
  candidates = {"cpu": choice.PACKED[platform]}
  monkeypatch.setattr(choice, "PACKED", candidates)
  kernel = packed_attention.IMPLEMENTATIONS[interpreted]
  monkeypatch.setitem(
    packed_attention.IMPLEMENTATIONS,
    interpreted,
    functools.partial(kernel, interpret=True),
  )


def choose(wanted, heads):
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  return choice.for_training(
    wanted,
    heads=heads,
    tokens_per_row=TOKENS,
    dtype=BFLOAT16,
    layout=mesh_lib.Layout(mesh=mesh, rules=sections.ShardingRules()),
  )


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_a_tpu_takes_splash(heads, monkeypatch):
  on_platform(monkeypatch, "tpu", "splash")
  assert choose("auto", heads) == "splash"
  assert choose("splash", heads) == "splash"


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_a_gpu_takes_a_kernel_of_gpus(heads, monkeypatch):
  # Neither Tokamax's nor cuDNN's can be interpreted; both are refused here.
  on_platform(monkeypatch, "gpu", "pallas_gpu")
  assert choose("auto", heads) == "pallas_gpu"


def of_xla(change):
  """Plain XLA, whose results and gradients are changed."""
  right = choice.with_gradients("xla", None)
  return lambda *arguments: change(right(*arguments))


def scaled(index, factor):
  """Return a change that multiplies one of the arrays."""

  def change(results):
    wrong = [x * jnp.asarray(factor, x.dtype) for x in results]
    return tuple(
      wrong[i].astype(x.dtype) if i == index else x
      for i, x in enumerate(x.astype(jnp.float32) for x in results)
    )

  return change


def noisy(index, size):
  """Return a change that adds noise of that size, relative to the norm."""

  def change(results):
    results = [x.astype(jnp.float32) for x in results]
    noise = np.random.default_rng(1).standard_normal(
      results[index].shape, np.float32
    )
    scale = jnp.linalg.norm(results[index]) / np.linalg.norm(noise)
    results[index] += noise * scale * jnp.float32(size)
    return tuple(x.astype(BFLOAT16) for x in results)

  return change


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_a_kernel_that_is_wrong_by_one_percent_is_refused(heads):
  wrongs = {
    f"{kind.__name__} {index}": of_xla(kind(index, size))
    for index in range(4)
    for kind, size in [(scaled, 1.01), (noisy, 0.01)]
  }
  kernels = {
    **wrongs,
    "xla": choice.with_gradients("xla", None),
    "as exact as bfloat16 is": of_xla(noisy(1, 0.003)),
  }
  trial = choice.packed_trial(heads, TOKENS, BFLOAT16)
  name, refused = choice.first_right(tuple(kernels), kernels, trial)
  assert (name, set(refused)) == ("xla", set(wrongs))
  del kernels["xla"]
  name, _ = choice.first_right(
    ("as exact as bfloat16 is",), {**kernels, "xla": of_xla(tuple)}, trial
  )
  assert name == "as exact as bfloat16 is"


def test_a_kernel_that_mixes_two_segments_is_refused():
  heads = 4, 2, 64

  def leaky(query, key, value, weights, start):
    # The second segment, of one token, is taken for part of the first.
    start = jnp.where(start == start[0, 200], 0, start)
    right = choice.with_gradients("xla", None)
    return right(query, key, value, weights, start)

  kernels = {"xla": choice.with_gradients("xla", None), "leaky": leaky}
  for dtype in ("bfloat16", "float32"):
    trial = choice.packed_trial(heads, TOKENS, jnp.dtype(dtype))
    name, refused = choice.first_right(("leaky",), kernels, trial)
    assert name == "xla"
    assert refused["leaky"].startswith("it is off by")
