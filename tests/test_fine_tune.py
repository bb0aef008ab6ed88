"""Fine-tuning as a program: validation, early stop, checkpoints."""

import json

import jax
import metrics_page
import numpy as np
import pytest
import stored_run

from configs import tiny
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.supervised import fine_tune
from jaxrl_async.supervised import supervised
from jaxrl_async.text import tokenizer as tokenizer_lib


def make_config(**warm_start):
  config = tiny.get_config()
  config.run.checkpoint_every = 3
  fields = {
    "num_steps": 8,
    "num_examples": 40,
    "eval_every": 2,
    "num_eval_examples": 12,
  }
  for name, value in (fields | warm_start).items():
    setattr(config.warm_start, name, value)
  return config


def metrics(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  read = [json.loads(line) for line in lines]
  for line in read:
    line.pop("sft/step_s", None)
  return read


def params(workdir, config):
  setup = setup_lib.resolve(config, jax.devices())
  loaded = initial_params.load(str(workdir / supervised.PARAMS), setup)
  return jax.tree.map(np.asarray, loaded)


def without_time(summary):
  return {k: v for k, v in summary.items() if k not in ("wall_s", "params")}


def interrupt(train, config, workdir):
  """Train until a kill in step 5, and again until a request to stop."""
  steps = []

  def kill_in_step_5(progress, name, done, total, text=""):
    del progress, name, total, text
    steps.append(done)
    if len(steps) == 5:
      raise RuntimeError("killed")

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(supervised.progress_lib.Progress, "stage", kill_in_step_5)
    with pytest.raises(RuntimeError, match="killed"):
      train(config, workdir)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      supervisor_lib.StopRequest, "is_set", property(lambda self: True)
    )
    with pytest.raises(supervisor_lib.Interrupted, match="after step 3; the"):
      train(config, workdir)


@pytest.mark.slow
def test_the_best_parameters_are_kept_and_an_interruption_changes_nothing(
  tmp_path,
):
  config = make_config()
  whole = fine_tune.fine_tune(config, tmp_path / "whole")
  lines = metrics(tmp_path / "whole")
  losses = {
    line["step"]: line["sft/validation_loss"]
    for line in lines
    if "sft/validation_loss" in line
  }
  assert list(losses) == [0, 2, 4, 6, 8]
  named = {name for line in lines for name in line} - {"step"}
  in_page = {x for x in metrics_page.entries() if x.startswith("sft/")}
  assert named == in_page - {"sft/step_s"}
  assert whole["validation_loss_before"] == losses[0]
  assert whole["validation_loss"] == min(losses.values()) < 0.9 * losses[0]
  assert losses[whole["best_step"]] == whole["validation_loss"]
  assert not whole["stopped_early"]

  part = tmp_path / "part"
  interrupt(fine_tune.fine_tune, config, part)
  again = fine_tune.fine_tune(config, part)
  assert without_time(again) == without_time(whole)
  assert metrics(part) == lines
  jax.tree.map(
    np.testing.assert_array_equal,
    params(part, config),
    params(tmp_path / "whole", config),
  )
  # Once more, on what is finished.
  assert without_time(fine_tune.fine_tune(config, part)) == without_time(whole)
  # And from the checkpoint before, where the newest is damaged.
  (part / "fine_tuning" / "8" / "host_state.json").write_bytes(b"{}")
  assert without_time(fine_tune.fine_tune(config, part)) == without_time(whole)
  assert metrics(part) == lines
  assert (part / "fine_tuning" / "8.damaged").is_dir()


@pytest.mark.slow
@pytest.mark.nightly
def test_it_ends_when_the_validation_loss_no_longer_falls(tmp_path):
  config = make_config(num_steps=40, eval_every=1, patience=2)
  config.warm_start.optimizer.learning_rate = 0.0
  summary = fine_tune.fine_tune(config, tmp_path)
  assert summary["train_steps"] == 2
  assert summary["stopped_early"] and summary["best_step"] == 0
  assert summary["validation_loss"] == summary["validation_loss_before"]
  assert fine_tune.fine_tune(config, tmp_path)["train_steps"] == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_with_lora_the_adapter_and_the_merged_model_are_the_result(tmp_path):
  config = make_config(num_steps=3, eval_every=0)
  config.model.lora.rank = 2
  config.model.lora.base_dtype = "float32"
  fine_tune.fine_tune(config, tmp_path)
  setup = setup_lib.resolve(config, jax.devices())
  initial = jax.tree.map(np.asarray, initial_params.before_training(setup))
  lora, adapter = peft_files.read(tmp_path / supervised.ADAPTER, setup.model)
  found = params(tmp_path, config)
  np.testing.assert_array_equal(found["embedding"], initial["embedding"])
  wanted = lora_lib.merged(lora_lib.joined(initial, adapter), lora)
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  changed = found["layers"]["query"] != initial["layers"]["query"]
  assert changed.any()
  again = fine_tune.fine_tune(config, tmp_path)
  assert again["train_steps"] == 3
  config.warm_start.optimizer.name = sections.OptimizerName.MUON
  with pytest.raises(sections.ConfigError, match="^warm_start.optimizer.name"):
    fine_tune.fine_tune(config, tmp_path / "muon")


PHI = configs.ModelConfig(
  vocab_size=98,
  model_dim=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=16,
  has_tied_head=False,
  family="phi3",
  max_positions=512,
  rope_scaling=configs.RopeScaling(
    kind="longrope",
    short_factors=(1.0,) * 4,
    long_factors=(2.0, 3.0, 4.0, 5.0),
    original_max_tokens=200,
  ),
)


def phi(directory):
  """A config that trains a small Phi-3 with adapters."""
  tokenizer_lib.character_level().save(directory)
  arrays = jax.tree.map(np.asarray, stored_run.params(2, PHI))
  longest = {"max_position_embeddings": PHI.max_positions}
  hf_weights.save(directory, PHI, arrays, settings=longest)
  config = make_config(num_steps=2, eval_every=0)
  config.model.name = str(directory)
  config.model.lora.rank = 2
  config.train.tokens_per_row = 256
  return config


@pytest.mark.slow
def test_a_phi_is_trained_with_lora_and_has_no_adapter_of_peft(
  tmp_path, capsys
):
  config, workdir = phi(tmp_path / "model"), tmp_path / "sft"
  fine_tune.fine_tune(config, workdir)
  assert (workdir / supervised.PARAMS).exists()
  assert not (workdir / supervised.ADAPTER).exists()
  assert "stores in qkv_proj with others" in capsys.readouterr().err
  # Rows are longer than the context of 200 tokens, and decide.
  assert config.train.tokens_per_row > 200
  config.train.tokens_per_row = 199
  with pytest.raises(
    sections.ConfigError, match="^train.tokens_per_row: sequences may have 199"
  ):
    fine_tune.fine_tune(config, workdir)


def test_the_longest_example_decides_in_supervised_training(tmp_path):
  config = phi(tmp_path / "model")
  config.train.tokens_per_row, found = 1024, {}
  for is_supervised in (False, True):
    setup = setup_lib.resolve(
      config, jax.devices(), is_supervised=is_supervised
    )
    found[is_supervised] = setup.model.base
    initial_params.check(setup)
    assert setup_lib.longest_tokens(
      config, setup.model, is_supervised=is_supervised
    ) == (512 if is_supervised else config.rollout.cache_tokens)
  assert found[False] == PHI and found[True] == PHI.within(201) != PHI


@pytest.mark.slow
def test_without_a_validation_the_last_parameters_are_the_result(tmp_path):
  config = make_config(num_steps=2, eval_every=0)
  summary = fine_tune.fine_tune(config, tmp_path)
  assert summary["validation_loss"] is summary["best_step"] is None
  initial = initial_params.before_training(
    setup_lib.resolve(config, jax.devices())
  )
  found = params(tmp_path, config)
  assert not np.array_equal(found["embedding"], initial["embedding"])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_steps": 0}, "^warm_start.num_steps: 0 trains nothing"),
    ({"checkpoint": "."}, "^warm_start.checkpoint: not used here"),
    ({"solver": "nobody"}, "^warm_start.solver: 'nobody' is none of"),
  ],
)
def test_what_cannot_be_trained_is_one_line(tmp_path, changes, message):
  with pytest.raises(sections.ConfigError, match=message):
    fine_tune.fine_tune(make_config(**changes), tmp_path / "new")
