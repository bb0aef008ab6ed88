"""Preference training as a program: files, interruption, adapters, refusals."""

import functools

import jax
import metrics_page
from ml_collections import config_dict
import numpy as np
import preference_world
import pytest
import test_fine_tune

from jaxrl_async.config import sections
from jaxrl_async.supervised import fine_tune
from jaxrl_async.supervised import prefer
from jaxrl_async.supervised import supervised


@functools.cache
def policy(directory):
  """A policy that was fine-tuned for a few steps."""
  config = test_fine_tune.make_config(num_steps=6, eval_every=0)
  fine_tune.fine_tune(config, directory / "sft")
  return str(directory / "sft" / supervised.PARAMS)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  return policy(tmp_path_factory.mktemp("policy"))


def make_config(tmp_path, start, **fields):
  config = test_fine_tune.make_config()
  config.warm_start.checkpoint = start
  config.task.dataset = preference_world.sums(tmp_path / "pairs.jsonl")
  config.task.params = type(config.task.params)()
  config.task.fields.question = "prompt"
  config.task.fields.answer = ""
  config.task.template = "{question}\n"
  fields = {
    "num_steps": 8,
    "rows_per_batch": 4,
    "num_examples": 40,
    "eval_every": 2,
    "num_eval_examples": 8,
  } | fields
  for name, value in fields.items():
    setattr(config.preference, name, value)
  config.preference.optimizer.learning_rate = 1e-3
  config.eval.num_items = 2
  return config


@pytest.mark.slow
def test_it_learns_and_an_interruption_changes_nothing(tmp_path, start):
  config = make_config(tmp_path, start)
  whole = prefer.prefer(config, tmp_path / "whole")
  lines = test_fine_tune.metrics(tmp_path / "whole")
  for line in lines:
    line.pop("preference/step_s", None)
  first = lines[0]
  assert first["step"] == 0
  assert first["preference/validation_loss"] == pytest.approx(np.log(2))
  assert first["preference/validation_margin"] == 0
  named = {name for line in lines for name in line} - {"step"}
  in_page = {x for x in metrics_page.entries() if x.startswith("preference/")}
  assert named == in_page - {"preference/step_s"}
  assert whole["validation_loss"] < whole["validation_loss_before"]
  # Trained pairs are told apart better than before, when no margin was above 0.
  assert lines[-1]["preference/accuracy"] > 0.6

  part = tmp_path / "part"
  test_fine_tune.interrupt(prefer.prefer, config, part)
  again = prefer.prefer(config, part)
  assert test_fine_tune.without_time(again) == test_fine_tune.without_time(
    whole
  )
  found = test_fine_tune.metrics(part)
  for line in found:
    line.pop("preference/step_s", None)
  assert found == lines
  jax.tree.map(
    np.testing.assert_array_equal,
    test_fine_tune.params(part, config),
    test_fine_tune.params(tmp_path / "whole", config),
  )

  # The same workdir with other data, which the reference is not of.
  preference_world.sums(tmp_path / "pairs.jsonl", count=61)
  with pytest.raises(sections.ConfigError, match="other rows of pairs"):
    prefer.prefer(config, part)
  # Another kind of training.
  other = test_fine_tune.make_config(num_steps=8)
  with pytest.raises(sections.ConfigError, match="of the kind preference, not"):
    fine_tune.fine_tune(other, part)


@pytest.mark.slow
def test_a_reference_of_other_rows_is_refused(tmp_path, start, monkeypatch):
  def make():
    chosen = "preference_world:right"
    return make_config(tmp_path, start, chosen=chosen, num_steps=1)

  workdir = tmp_path / "new"
  first = prefer.prefer(make(), workdir)
  lines = test_fine_tune.metrics(workdir)
  again = prefer.prefer(make(), workdir)
  assert test_fine_tune.without_time(again) == test_fine_tune.without_time(
    first
  )

  def refusal(config):
    with pytest.raises(sections.ConfigError) as refused:
      prefer.prefer(config, workdir)
    # Nothing is lost.
    assert test_fine_tune.metrics(workdir) == lines
    message = str(refused.value)
    assert "\n" not in message
    return message

  def is_of_rows(message):
    return message.startswith("train.tokens_per_row: ") and all(
      name in message
      for name in ("eval.sets", "preference.chosen", "preference.rejected")
    )

  config = make()
  config.train.tokens_per_row += 8
  assert is_of_rows(refusal(config))
  config = make()
  one = tmp_path / "one.jsonl"
  one.write_text((tmp_path / "pairs.jsonl").read_text().splitlines()[7] + "\n")
  config.eval.sets = config_dict.ConfigDict({"a": {"dataset": f"jsonl:{one}"}})
  assert is_of_rows(refusal(config))
  with monkeypatch.context() as patch:
    patch.setattr(preference_world, "RIGHT", "yea")
    assert is_of_rows(refusal(make()))
  config = make()
  config.model.compute_dtype = "bfloat16"
  message = refusal(config)
  assert message.startswith("model.compute_dtype: bfloat16, but the checkpoint")


@pytest.mark.slow
@pytest.mark.nightly
def test_with_lora_the_reference_is_the_policy_without_adapters(
  tmp_path, start
):
  config = make_config(tmp_path, start, num_steps=3, eval_every=0)
  config.model.lora.rank = 2
  config.model.lora.base_dtype = "float32"
  prefer.prefer(config, tmp_path / "lora")
  first, *_ = test_fine_tune.metrics(tmp_path / "lora")
  assert first["preference/loss"] == pytest.approx(np.log(2))
