"""Supervised fine-tuning as a program of its own, by launch/sft.py.

It trains as the warm start of a run does, on the same section of the config.
`supervised` says what it writes.
"""

import dataclasses
import pathlib
from typing import Any

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.supervised import supervised
from jaxrl_async.training import example_rows
from jaxrl_async.training import sft


def fine_tune(config: sections.Config, workdir: pathlib.Path) -> dict[str, Any]:
  """Start or continue a supervised fine-tuning, and return its summary."""
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
  return supervised.train(config, workdir, _worked_solutions)


def _worked_solutions(
  setup: setup_lib.Setup,
) -> tuple[setup_lib.Setup, supervised.Recipe]:
  """Return the recipe of the warm start."""
  section = setup.config.warm_start

  def examples(
    split: str, num_examples: int
  ) -> worked_examples_lib.WorkedExamples:
    return worked_examples_lib.WorkedExamples(
      assembly.prompt_source(setup),
      dataclasses.replace(section, num_examples=num_examples),
      max_tokens=setup.config.train.tokens_per_row,
      split=split,
    )

  return setup, supervised.Recipe(
    kind=supervised.SFT,
    section=section,
    objective=sft.NEXT_TOKEN,
    examples=examples,
    pack=example_rows.pack_examples,
    first_params=lambda: initial_params.with_adapters(
      initial_params.before_training(setup), setup
    ),
  )
