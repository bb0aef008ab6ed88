"""An evaluation measures the version of its step, however late it arrives."""

import time

import pytest
import test_run

from jaxrl_async.config import sections
from jaxrl_async.coordination import weight_transfer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", ["", "sync"])
def test_an_evaluation_has_the_weights_of_its_step(
  tmp_path, monkeypatch, variant
):
  adopt = weight_transfer.DirectChannel.adopt

  def slow_adopt(self, newer_than):
    time.sleep(0.5)  # longer than a train step
    return adopt(self, newer_than)

  monkeypatch.setattr(weight_transfer.DirectChannel, "adopt", slow_adopt)
  config = test_run.make_config(variant, num_steps=3, eval={"every": 1})
  config.transfer.channel = sections.Channel.DIRECT
  config.train.optimizer.learning_rate = 1e-2
  summary = test_run.start(config, tmp_path)
  # Between the logprobs of the engine and those of the trainer.
  assert 0 <= summary["mismatch_kl_max"] < 1e-9
