"""The arithmetic of benchmarks/prefill_padding.py, and what it says."""

import pathlib
import runpy

import numpy as np
import pytest
import tiny

ROOT = pathlib.Path(__file__).parents[1]
PADDING = runpy.run_path(str(ROOT / "benchmarks" / "prefill_padding.py"))


def test_padded_tokens_are_those_an_adoption_prefills(monkeypatch):
  scheduler = tiny.ready()
  sizes = scheduler.engine.sizes
  for group, length in enumerate((3, 9, 11, 20), start=8):
    scheduler.submit(tiny.sequence(tiny.prompt(length), group=group, limit=32))
  scheduler.step()
  shapes = []
  prefill = scheduler.engine.prefill

  def recorded(*, padded_tokens, **arguments):
    shapes.append((sizes.prefill_rows, padded_tokens.shape[1]))
    return prefill(padded_tokens=padded_tokens, **arguments)

  monkeypatch.setattr(scheduler.engine, "prefill", recorded)
  scheduler.adopt(tiny.engine_params(1), 1)
  lengths = [[s.length for s in scheduler.sequences()]]
  expected = PADDING["padded_tokens"](
    np.array(lengths), sizes.prefill_buckets, sizes.prefill_rows
  )
  assert sum(rows * bucket for rows, bucket in shapes) == expected[0]
  # Two of three long ones share a call, the third has one to itself.
  assert sorted(bucket for _, bucket in shapes) == [16, 32, 32]


@pytest.mark.parametrize("name", ["tpu_1p5b", "tpu_7b", "tpu_32b"])
@pytest.mark.parametrize("length", ["1k", "8k", "32k"])
def test_the_buckets_of_the_tpu_configs_pad_less_than_two_would(name, length):
  file = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))
  config = file["get_config"](length)
  buckets = config.rollout.prefill_buckets
  assert buckets[0] == config.rollout.max_prompt_tokens
  assert all(b == 2 * a for a, b in zip(buckets, buckets[1:], strict=False))
  tail = PADDING["_ratios"](config, is_tailed=True)
  assert tail["now"] < 0.8 * tail["two_buckets"]
  limit = PADDING["_ratios"](config, is_tailed=False)
  # Two slots a replica leave rows empty, whatever the buckets.
  is_small = config.rollout.num_slots == 2 * config.rollout.prefill_rows
  assert limit["now"] < (1.2 if is_small else 0.95) * limit["two_buckets"]


@pytest.mark.parametrize(
  ("name", "variants"),
  [
    ("gsm8k", ["0.5b", "1.5b", "1.5b@v5e:2x4", "8b", "8b@v5e:2x4"]),
    ("code", [""]),
    ("deepseek_1p5b", [""]),
  ],
)
def test_a_prefill_that_recomputes_caches_fills_a_device(name, variants):
  file = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))
  for variant in variants:
    config = file["get_config"](*([variant] if variant else []))
    rollout = config.rollout
    rows, left = divmod(rollout.prefill_rows, config.mesh.rollout_data)
    assert left == 0
    rng = np.random.default_rng(0)
    lengths = PADDING["running_lengths"](rollout, rng, is_tailed=True)
    buckets = rollout.prefill_buckets
    usual = buckets[np.searchsorted(buckets, np.median(lengths))]
    assert 2_048 <= rows * usual <= 8_192
