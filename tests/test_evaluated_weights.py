"""An evaluation measures the version of its step, however late it arrives."""

import time

import pytest
import test_run

from jaxrl_async.config import sections
from jaxrl_async.coordination import weight_transfer

pytestmark = pytest.mark.slow


@pytest.fixture
def slow_adoption(monkeypatch):
  adopt = weight_transfer.DirectChannel.adopt

  def slow_adopt(self, newer_than):
    time.sleep(0.5)  # longer than a train step
    return adopt(self, newer_than)

  monkeypatch.setattr(weight_transfer.DirectChannel, "adopt", slow_adopt)


def make_config(variant, **evaluation):
  config = test_run.make_config(
    variant, num_steps=3, eval={"every": 1} | evaluation
  )
  config.transfer.channel = sections.Channel.DIRECT
  config.train.optimizer.learning_rate = 1e-2
  return config


@pytest.mark.usefixtures("slow_adoption")
@pytest.mark.parametrize(
  "variant", ["", pytest.param("sync", marks=pytest.mark.nightly)]
)
def test_an_evaluation_has_the_weights_of_its_step(tmp_path, variant):
  summary = test_run.start(make_config(variant, beside=False), tmp_path)
  # Between the logprobs of the engine and those of the trainer.
  assert 0 <= summary["mismatch_kl_max"] < 1e-9


@pytest.mark.usefixtures("slow_adoption")
def test_no_version_is_passed_over_that_is_to_be_held(tmp_path, capfd):
  test_run.start(make_config(""), tmp_path)
  assert "has no evaluation" not in capfd.readouterr().err
  lines = test_run.lines(tmp_path, "metrics")
  assert all("eval/held_out/avg@1" in line for line in lines)
