"""The recorder's thread: what fails in it ends the run's wait."""

import threading

import numpy as np
import pytest
import worker_world

from jaxrl_async import batching
from jaxrl_async import metrics
from jaxrl_async import progress
from jaxrl_async import run_record
from jaxrl_async import side_outputs
from jaxrl_async import trainer
from jaxrl_async.models import configs

DEADLINE_S = 60.0


@pytest.fixture
def recorder(tmp_path):
  world = worker_world.World(tmp_path)
  beside = side_outputs.SideOutputs(lambda text: None)
  writer = metrics.MetricsWriter(tmp_path, beside)
  this = run_record.Recorder(
    run_record.RunRecord(),
    workdir=tmp_path,
    writer=writer,
    ledger=world.ledger,
    worker=world.worker,
    rewards=world.rewards,
    busy={name: metrics.BusyClock() for name in ("rollout", "train")},
    progress=progress.Progress(1),
    side_outputs=beside,
    max_bad_updates=1,
  )
  yield this
  this.close(DEADLINE_S)
  writer.close()
  world.ledger.close()


def without_arrays(kind=trainer.Pending):
  """A step whose metrics cannot be made."""
  none = np.zeros(0, np.int64)
  return kind(
    step=0,
    groups=[],
    placement=batching.Placement(starts=none, lengths=none, shape=(1, 1, 1, 1)),
    arrays={},
    learning_rate=lambda: 0.0,
    times_s={},
    model=configs.MODELS["tiny"],
    peak_flops=1.0,
  )


def test_a_failure_is_raised_by_the_next_look_and_only_once(recorder):
  assert recorder.wait(0.0)
  recorder.begin(without_arrays(), {}, {}, is_evaluated=False)
  with pytest.raises(KeyError, match="num_loss_tokens"):
    recorder.wait(DEADLINE_S)
  assert recorder.wait(0.0)


class NeverDone(trainer.Pending):
  """A step whose metrics do not come before a gate opens."""

  gate = threading.Event()

  def metrics(self):
    assert self.gate.wait(DEADLINE_S)
    raise LookupError("the gate is open")


def test_no_wait_for_a_step_that_is_never_written_is_without_a_deadline(
  recorder,
):
  step = without_arrays(NeverDone)
  recorder.begin(step, {}, {}, is_evaluated=False)
  assert not recorder.wait(0.01)
  assert "recorder: writing step 1 down since" in recorder.status()
  with pytest.raises(TimeoutError, match="writing step 1 down"):
    recorder.close(0.05)
  # Nor does the end of the process wait for it.
  (thread,) = [t for t in threading.enumerate() if t.name == "recorder"]
  assert thread.daemon
  step.gate.set()
  with pytest.raises(LookupError, match="the gate is open"):
    recorder.wait(DEADLINE_S)
