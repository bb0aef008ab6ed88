"""Settings of LoRA: what is refused, and what the dry run says it saves."""

import dataclasses

import config_values
import jax
import lora_world
import numpy as np
import pytest
import tiny

from jaxrl_async.assembly import checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import dry_run
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import peft_files
from jaxrl_async.training import train_state


def make_config(**lora):
  config = config_values.get_config()
  for name, value in {"rank": 4, **lora}.items():
    setattr(config.model.lora, name, value)
  return config


@pytest.mark.slow
def test_an_adapter_that_is_not_the_configs_is_refused_before_the_start(
  tmp_path,
):
  lora = lora_world.OTHER
  model = dataclasses.replace(tiny.MODEL, lora=lora)
  peft_files.write(tmp_path / "fits", model, lora_world.adapter(lora))
  fields = {
    "rank": lora.rank,
    "alpha": lora.alpha,
    "modules": lora.modules,
    "adapter": str(tmp_path / "fits"),
  }
  setup = checks.checked(make_config(**fields), jax.devices()[:2])
  assert setup.model.lora == lora
  # A run starts from it.
  base = {"layers": {"up": np.zeros(3)}, "embedding": np.ones(2)}
  found = initial_params.with_adapters(base, setup)
  assert found["layers"].pop("up") is base["layers"]["up"]
  jax.tree.map(
    np.testing.assert_array_equal,
    found["layers"],
    lora_world.adapter(lora)["layers"],
  )
  for name, value in (("rank", 3), ("alpha", 2.0), ("modules", ("up",))):
    with pytest.raises(
      sections.ConfigError, match=f"model.lora.adapter: .* model.lora.{name} is"
    ):
      checks.checked(make_config(**fields | {name: value}), jax.devices()[:2])


def test_the_dry_run_shows_what_is_saved():
  text, setups = {}, {}
  for rank in (0, 4):
    config = make_config(rank=rank)
    setups[rank] = setup_lib.resolve(config, jax.devices()[:2])
    text[rank] = dry_run.describe(setups[rank])
  assert "LoRA" not in text[0]
  assert "rank 4 on query, key, value, output, gate, up, down" in text[4]
  assert "4,096 parameters are trained" in text[4]
  whole, some = (
    device_checks.model_bytes(setups[rank])[train_state.POLICY]
    for rank in (0, 4)
  )
  num_params = setups[0].model.num_params
  assert whole.weights == 4 * num_params
  assert some.frozen == 2 * num_params and some.trainable == 4 * 4_096
  assert some.optimizer == pytest.approx(2 * some.trainable, abs=64)
  assert device_checks.published_bytes(setups[0]) == (4 * num_params, 0)
  version, base = device_checks.published_bytes(setups[4])
  assert (version, base) == (4 * 4_096, 4 * num_params)
  rollout = device_checks.rollout_memory(setups[4])
  assert (rollout["weights"], rollout["base"]) == (2 * version, base)
