"""Metrics to Weights & Biases, beside TensorBoard; the extra `wandb`.

The library is imported only by a run that asks for it (`run.wandb_project`).
Its own environment variables decide the account and the mode, such as
WANDB_MODE=offline.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import pathlib
import secrets
from typing import Any

import numpy as np

from jaxrl_async.storage import disk

_ID = "wandb.json"
_EVAL_STEP = "eval/step"
# Without these a run would wait for minutes, or for an answer on the terminal.
_INIT_S = 30.0
_FINISH_S = 30.0


class WandbError(OSError):
  """W&B did not take something; a side output counts it."""


class WandbLog:
  """One run at W&B, which all starts of a training run continue.

  W&B takes each step once: after a crash, steps that are done again keep the
  values that they had there.

  Threads: one at a time.
  """

  def __init__(
    self, workdir: pathlib.Path, project: str, config: Mapping[str, Any]
  ):
    """Prepare a log; nothing is sent yet.

    Args:
      workdir: of the run; it holds the id of the run at W&B.
      project: at W&B.
      config: shown beside the metrics.
    """
    self._workdir = workdir
    self._project = project
    self._config = dict(config)
    self._run: Any = None
    self._last_step = -1

  def add(self, step: int, values: Mapping[str, Any]) -> None:
    """Log everything that is known about one step.

    The first call begins or continues the run at W&B. `values` are as
    `events.EventFile.add` takes them.

    Raises:
      WandbError: it failed.
    """
    self._last_step = step
    with _errors():
      if self._run is None:
        self._run = self._begin()
      self._run.log({k: _shown(v) for k, v in values.items()}, step=step)

  def add_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
    """Log an evaluation of `step`, over steps of its own; as `add`.

    It may belong to an earlier step than the last one, which W&B would leave
    out.
    """
    self.add(max(step, self._last_step), {**values, _EVAL_STEP: step})

  def close(self) -> None:
    """Send what is left, for up to half a minute.

    Raises:
      WandbError: it failed.
    """
    run, self._run = self._run, None
    if run is not None:
      with _errors():
        run.finish()

  def _begin(self) -> Any:
    import wandb

    run = wandb.init(
      project=self._project,
      dir=str(self._workdir),
      id=self._run_id(),
      resume="allow",
      config=self._config,
      settings=wandb.Settings(
        console="off",
        silent=True,
        init_timeout=_INIT_S,
        login_timeout=_INIT_S,
        finish_timeout=_FINISH_S,
      ),
    )
    run.define_metric("eval/*", step_metric=_EVAL_STEP)
    return run

  def _run_id(self) -> str:
    path = self._workdir / _ID
    try:
      return json.loads(path.read_text())["id"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
      run_id = secrets.token_hex(4)
      disk.replace_text(path, json.dumps({"id": run_id}) + "\n")
      return run_id


@contextlib.contextmanager
def _errors() -> Iterator[None]:
  """Raise any error of the library, whose errors have no common class."""
  try:
    yield
  except Exception as error:
    raise WandbError(" ".join(str(error).split())) from None


def _shown(value: Any) -> Any:
  """Return a metric as W&B takes it."""
  import wandb

  if isinstance(value, dict):
    counts, limits = value["counts"], value["limits"]
  elif isinstance(value, list):
    counts, limits = value, [i - 0.5 for i in range(len(value) + 1)]
  else:
    return value
  return wandb.Histogram(np_histogram=(np.array(counts), np.array(limits)))
