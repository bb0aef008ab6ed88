"""Where the base of a run with LoRA is kept, and what a start makes of it."""

import dataclasses
import runpy

import jax
import numpy as np
import pytest
import test_served_weights

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.models import hf_weights
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import train_state

pytestmark = pytest.mark.slow

TINY = test_served_weights.ROOT / "configs" / "tiny.py"
KINDS = ("own", "parameters", "hugging_face")


def started(tmp_path, kind, base_dtype):
  """A setup and a trainer at its start, whose base is from such a place."""
  config = runpy.run_path(str(TINY))["get_config"]()
  config.model.lora.rank = 4
  config.model.lora.base_dtype = base_dtype
  if kind == "parameters":
    config.warm_start.checkpoint = str(tmp_path / "source")
  if kind == "hugging_face":
    config.warm_start.num_steps = 0
  setup = setup_lib.resolve(config, jax.devices()[:2])
  if kind == "hugging_face":
    setup = dataclasses.replace(setup, pretrained=tmp_path / "source")
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  shapes = jax.eval_shape(
    lambda: transformer.init_params(setup.model, jax.random.key(0))
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), shapes)
  if kind == "parameters":
    initial_params.save(tmp_path / "source", lora_lib.base(params))
  if kind == "hugging_face":
    base = lora_lib.base(params)
    hf_weights.save(tmp_path / "source", setup.model.base, base)
  if kind != "own":
    base = initial_params.load(str(tmp_path / "source"), setup)
    params = lora_lib.joined(base, lora_lib.adapters(params))
  trainer.start({train_state.POLICY: params})
  return setup, trainer


def saved(tmp_path, setup, trainer):
  """A checkpoint of it, as a run writes it."""
  state = trainer.state
  record = frozen_base.keep(setup, tmp_path, state, is_given=False)
  checkpoint.save(
    tmp_path / "checkpoints",
    0,
    frozen_base.without_base(state),
    {frozen_base.KEY: record},
    [],
  )


def restored(tmp_path, setup, trainer):
  found, _, _ = frozen_base.restore(
    setup, tmp_path, 0, trainer.abstract_state()
  )
  return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_comes_back_from_where_it_is(tmp_path, kind):
  base_dtype = "bfloat16" if kind == "parameters" else "int8"
  setup, trainer = started(tmp_path, kind, base_dtype)
  saved(tmp_path, setup, trainer)
  assert not frozen_base.without_base(trainer.state).policy.frozen
  assert (tmp_path / "base").exists() == (kind == "own")
  found = restored(tmp_path, setup, trainer)
  assert jax.tree.structure(found) == jax.tree.structure(trainer.state)
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(found),
    jax.tree.leaves(trainer.state),
    strict=True,
  ):
    assert x.dtype == y.dtype, path
    np.testing.assert_array_equal(x, y, err_msg=str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_changed_is_refused_in_one_line(tmp_path, kind):
  setup, trainer = started(tmp_path, kind, "bfloat16")
  saved(tmp_path, setup, trainer)
  source = tmp_path / ("base" if kind == "own" else "source")
  path = {
    "own": source / "0" / "manifest.json",
    "parameters": source / "0" / "manifest.json",
    "hugging_face": source / "model.safetensors",
  }[kind]
  content = path.read_bytes()
  path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  with pytest.raises(checkpoint.CheckpointError, match="has changed") as error:
    restored(tmp_path, setup, trainer)
  assert "\n" not in str(error.value) and str(source) in str(error.value)
  path.write_bytes(content)
  restored(tmp_path, setup, trainer)
  source.rename(tmp_path / "elsewhere")
  with pytest.raises(
    checkpoint.CheckpointError, match="cannot be read"
  ) as error:
    restored(tmp_path, setup, trainer)
  assert "\n" not in str(error.value) and str(source) in str(error.value)


def test_parameters_that_a_caller_gave_are_kept(tmp_path):
  setup, trainer = started(tmp_path, "parameters", "bfloat16")
  record = frozen_base.keep(setup, tmp_path, trainer.state, is_given=True)
  assert record["path"] == ""
  assert (tmp_path / "base").is_dir()
