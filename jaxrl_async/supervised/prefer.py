"""Preference training: a policy learns from pairs of completions.

It is supervised training (`supervised`) by a recipe of its own, and writes the
same files as a fine-tuning.
The reference is the policy before training. Its logprobs are computed once,
before the first update, and only their sum over each completion is kept. So no
second model is in memory, and a step costs as much as one of supervised
training on as many tokens.
"""

import functools
import pathlib
from typing import Any

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import pairs as pairs_lib
from jaxrl_async.models import transformer
from jaxrl_async.supervised import supervised
from jaxrl_async.training import preference_objectives

_KIND = "preference"


def prefer(config: sections.Config, workdir: pathlib.Path) -> dict[str, Any]:
  """Start or continue a training on preferences, and return its summary."""
  config_checks.check_preference(config)
  return supervised.train(config, workdir, _recipe)


def _recipe(
  setup: setup_lib.Setup,
) -> tuple[setup_lib.Setup, supervised.Recipe]:
  section = setup.config.preference
  return setup, supervised.Recipe(
    kind=_KIND,
    section=section,
    objective=preference_objectives.preference(section),
    examples=functools.partial(pairs_of, setup),
    pack=preference_objectives.pack_pairs,
    first_params=lambda: initial_params.with_adapters(
      starting_policy(setup), setup
    ),
    needs_reference=True,
  )


def starting_policy(setup: setup_lib.Setup) -> transformer.Params:
  """Return the policy that training starts from, without adapters."""
  checkpoint = setup.config.warm_start.checkpoint
  if checkpoint:
    return initial_params.load(checkpoint, setup)
  return initial_params.before_training(setup)


def pairs_of(
  setup: setup_lib.Setup, split: str, num_examples: int
) -> pairs_lib.Pairs:
  """Return the pairs of a split."""
  return pairs_lib.Pairs(
    assembly.prompt_source(setup),
    setup.config.preference,
    corrupted_frac=setup.config.warm_start.corrupted_frac,
    split=split,
    num_examples=num_examples,
    max_tokens=setup.config.train.tokens_per_row,
  )
