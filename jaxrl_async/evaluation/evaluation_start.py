"""Starts an evaluation of its own: policy, questions, rewards and engine."""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import engine_sizes
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.evaluation import evaluation
from jaxrl_async.evaluation import evaluation_plan
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import service as service_lib


def evaluate(
  checkpoint: pathlib.Path,
  step: int | None,
  config: sections.Config,
  wanted: evaluation_plan.Wanted,
  output: pathlib.Path,
  devices: Sequence[Any],
  *,
  progress: progress_lib.Progress,
  stop: supervisor_lib.StopRequest,
) -> dict[str, Any]:
  """Begin or continue an evaluation, and return its results.

  Args:
    checkpoint: directory of the policy.
    step: train step of a run's checkpoint. None is that of the evaluation in
      `output`, if there is one, and otherwise the newest.
    config: of the policy, with the caller's changes.
    wanted: what the caller asks for.
    output: directory of the evaluation, which belongs to this process.
    devices: all of them generate.
    progress: shows how far the evaluation is.
    stop: the stop request, which a signal sets.

  Raises:
    ConfigError: one line that names the flag or the field.
    Interrupted: the evaluation was asked to stop. It can be continued.
    EvaluationError: none of the first answers could be scored.
    StorageError: a file could not be written.
  """
  if step is None:
    step = evaluation.stored_step(output)
  stored = stored_policy.find(checkpoint, step)
  if stored.kind is stored_policy.Kind.RUN and stored.step is None:
    stored = dataclasses.replace(stored, step=stored_policy.newest(stored))
  is_pretrained = stored.kind is stored_policy.Kind.PRETRAINED
  if is_pretrained and not wanted.dataset:
    raise sections.ConfigError(
      "dataset: missing; use for example --dataset=jsonl:test.jsonl"
    )
  stored = dataclasses.replace(stored, config=config)
  tokenizer = stored_policy.tokenizer(stored)
  config, plan = evaluation_plan.prepare(
    stored, wanted, tokenizer, is_cpu=devices[0].platform == "cpu"
  )
  setup = setup_lib.on_all_devices(config, devices, tokenizer=tokenizer)
  device_checks.check_sharding(setup)
  device_checks.check_weights(setup)
  engine_sizes.fit_slots(setup)
  rewards = service_lib.RewardService(
    assembly.make_scorers(config.task, tokenizer),
    num_workers=config.task.reward_workers,
  )
  with contextlib.closing(rewards):
    return evaluation.run(
      plan,
      output,
      lambda: scheduler_of(stored, setup),
      tokenizer=tokenizer,
      rewards=rewards,
      progress=progress,
      stop=stop,
    )


def scheduler_of(
  stored: stored_policy.StoredPolicy, setup: setup_lib.Setup
) -> scheduler_lib.Scheduler:
  """Return a scheduler that holds the weights of a stored policy.

  Raises:
    ConfigError: the policy cannot be read.
  """
  version, params = stored_policy.load(stored, setup)
  engine, engine_params = assembly.engine_with(setup, params, version)
  scheduler = assembly.make_scheduler(setup, engine, metrics_lib.BusyClock())
  scheduler.adopt(engine_params, version)
  return scheduler
