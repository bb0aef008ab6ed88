"""The books of a run: all that writes each step down.

The classes are those of a run. The rollout worker and the reward service, of
which the books only read counters, are stand-ins.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
import pathlib
import resource
import sys
from types import SimpleNamespace
from typing import Any

from jax import numpy as jnp
import numpy as np
import rich.console

from jaxrl_async import types
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.engine import scheduler_stats
from jaxrl_async.models import configs
from jaxrl_async.replay import timing_record
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import step_metrics

_SUMS = (
  "loss",
  "grad_norm",
  "bad_updates",
  "entropy_sum",
  "clip_count",
  "approx_kl_sum",
  "behavior_kl_sum",
  "behavior_weight_sum",
  "behavior_weight_square_sum",
  "behavior_weight_capped_count",
  "left_out_count",
  "mismatch_kl_sum",
)


class Books:
  """The recorder of a run, with the files that it writes.

  Attributes:
    busy: the clocks of the two slices, which stand still.
    rollout: the stand-in; `generated_tokens` is set from outside.
  """

  def __init__(
    self, workdir: pathlib.Path, stored: Mapping[str, Any] | None = None
  ):
    """Open the files, cut to the lengths in the host state of a checkpoint."""
    stored = stored or {}
    self.busy = {
      name: metrics_lib.BusyClock(0.0) for name in ("rollout", "train")
    }
    beside = side_outputs_lib.SideOutputs(print)
    self.writer = metrics_lib.MetricsWriter(workdir, beside)
    if stored:
      self.writer.restore(stored["metrics"])
    self.ledger = ledger_lib.Ledger(
      workdir / "ledger.jsonl",
      ledger_lib.LedgerState(**stored.get("ledger", {})),
    )
    self.timing = timing_record.TimingRecord(
      workdir,
      stored.get("timing", 0),
      record_steps=True,
      first_step=stored.get("step", 0),
      environment={},
      config={},
    )
    self._null = open(os.devnull, "w")
    self.rollout: Any = SimpleNamespace(
      coordinator=SimpleNamespace(stream=SimpleNamespace(metrics=dict)),
      generated_tokens=0,
      metrics=dict,
      totals=lambda: {
        **dataclasses.asdict(scheduler_stats.SchedulerStats()),
        "wait_s": 0.0,
        "adopt_s": 0.0,
      },
    )
    rewards: Any = SimpleNamespace(
      metrics=lambda: {"reward_service/latency_s": 0.1}
    )
    self.sampler = sampler_lib.Sampler(
      workdir,
      num_groups=4,
      tokenizer=tokenizer_lib.character_level(),
      answer_prefix="",
      side_outputs=beside,
      first_step=stored.get("step", 0),
    )
    self.recorder = recorder_lib.Recorder(
      stored["metrics"]["totals"] if stored else {},
      workdir=workdir,
      writer=self.writer,
      ledger=self.ledger,
      timing=self.timing,
      rollout=self.rollout,
      rewards=rewards,
      busy=self.busy,
      compilations=metrics_lib.CompilationCounter(),
      progress=progress_lib.Progress(
        1, console=rich.console.Console(file=self._null)
      ),
      side_outputs=beside,
      sampler=self.sampler,
      max_bad_updates=1,
      solved_score=1.0,
    )

  def close(self) -> None:
    """End the recorder's thread and close the files."""
    self.recorder.close(600.0)
    self.writer.close()
    self.ledger.close()
    self.timing.close()
    self._null.close()


def peak_memory_bytes() -> int:
  """Return the most host memory that this process has held so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


def pending(
  step: int, groups: Sequence[types.RolloutGroup], tokens_per_row: int
) -> step_metrics.Pending:
  """Return a train step that is done, with a row for each trajectory."""
  lengths = np.array([len(t.tokens) for g in groups for t in g.trajectories])
  return step_metrics.Pending(
    step=step,
    groups=list(groups),
    pack_efficiency=float(lengths.mean()) / tokens_per_row,
    num_epochs=1,
    sums={name: jnp.zeros(1) for name in _SUMS}
    | {"num_loss_tokens": jnp.ones(1), "mismatch_count": jnp.ones(1)},
    learning_rate=lambda: 1e-3,
    times_s={"proximal_s": 0.1, "update_s": 0.1},
    programs_s=0.2,
    models=[configs.MODELS["tiny"]],
    peak_flops=1e12,
  )
