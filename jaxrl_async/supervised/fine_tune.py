"""Supervised fine-tuning as a program of its own, by launch/sft.py.

It trains as the warm start of a run does, on the same section of the config.
`supervised` says what it writes.
"""

import pathlib
from typing import Any

import jax

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.models import transformer
from jaxrl_async.supervised import supervised
from jaxrl_async.training import packing
from jaxrl_async.training import sft


def fine_tune(
  config: sections.Config,
  workdir: pathlib.Path,
  *,
  source: source_lib.Source | None = None,
) -> dict[str, Any]:
  """Start or continue a supervised fine-tuning, and return its summary.

  Args:
    config: its section `warm_start` says how to train; `model`, `task`, `mesh`
      and `train` say what, on what, and in which shapes.
    workdir: directory of this fine-tuning alone.
    source: the source of the examples; None is the dataset of `task.dataset`.

  Raises:
    ConfigError: a setting is wrong, or the workdir cannot be used with it.
    Interrupted: a signal asked to stop. The same call continues.
    WarmStartError: too many updates in a row were not finite.
    StorageError: a file could not be written.
  """
  section = config.warm_start
  sections.require(
    section.num_steps > 0, "warm_start.num_steps", "0 trains nothing; use more"
  )
  sections.require(
    not section.checkpoint,
    "warm_start.checkpoint",
    "not used here; model.name says what to train from",
  )
  sections.require(
    not config.model.lora.rank
    or section.optimizer.name is sections.OptimizerName.ADAMW,
    "warm_start.optimizer.name",
    f"{section.optimizer.name.value} cannot train adapters; use adamw",
  )
  setup = checks.checked(
    config, jax.devices(), source=source, is_supervised=True
  )
  return supervised.train(setup, _worked_solutions(setup), workdir)


def _worked_solutions(setup: setup_lib.Setup) -> supervised.Recipe:
  """Return the recipe of the warm start."""

  def packed(
    split: str, num_examples: int
  ) -> tuple[packing.PackedBatch, list[str]]:
    rows, num_too_long = assembly.sft_rows(setup, split, num_examples)
    if not num_too_long:
      return rows, []
    return rows, [
      f"{num_too_long:,} worked solutions of the split {split} are longer"
      " than train.tokens_per_row and were left out"
    ]

  def first_params() -> transformer.Params:
    params = initial_params.before_training(setup)
    if setup.model.lora is None:
      return params
    return initial_params.with_adapters(params, setup)

  return supervised.Recipe(
    kind=supervised.SFT,
    section=setup.config.warm_start,
    objective=sft.NEXT_TOKEN,
    packed=packed,
    first_params=first_params,
  )
