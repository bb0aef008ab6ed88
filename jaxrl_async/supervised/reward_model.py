"""Reward models: trained from preferences or labelled steps, and scoring.

A reward model is the policy that training starts from with a scalar head in
place of its output head, which is zero at first. Training is supervised
(`supervised`), and its result are parameters like any other: WORKDIR/params.
`Scorer` reads them again, for `scores` and for `reward_server`, through which
such a model is the reward of a run.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import continued_settings
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import columns as columns_lib
from jaxrl_async.data import labelled_steps
from jaxrl_async.data import prompts
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.data.tables import opening
from jaxrl_async.data.tables import table as table_lib
from jaxrl_async.data.tables import uri as uri_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.storage import checkpoint
from jaxrl_async.supervised import prefer
from jaxrl_async.supervised import supervised
from jaxrl_async.training import example_rows
from jaxrl_async.training import packing
from jaxrl_async.training import reward_objectives
from jaxrl_async.training import row_passes
from jaxrl_async.training import train_step

_KIND = "reward_model"
# The column of the texts that are scored as a whole.
COMPLETION = "completion"


def train(config: sections.Config, workdir: pathlib.Path) -> dict[str, Any]:
  """Start or continue the training of a reward model."""
  config_checks.check_preference(config)
  return supervised.train(config, workdir, _recipe)


def _recipe(
  setup: setup_lib.Setup,
) -> tuple[setup_lib.Setup, supervised.Recipe]:
  if setup.config.preference.reward_loss is sections.RewardLoss.STEPS:
    objective, pack = reward_objectives.STEPS, reward_objectives.pack_steps
    examples = functools.partial(_labelled_solutions, setup)
  else:
    objective, pack = reward_objectives.PAIRS, reward_objectives.pack_pairs
    examples = functools.partial(prefer.pairs_of, setup)
  scored = _with_scalar_head(setup)
  return scored, supervised.Recipe(
    kind=_KIND,
    section=setup.config.preference,
    objective=objective,
    examples=examples,
    pack=pack,
    first_params=lambda: _first_params(setup, scored),
  )


def _with_scalar_head(setup: setup_lib.Setup) -> setup_lib.Setup:
  """Return the setup of the reward model that begins as a policy."""
  model = dataclasses.replace(setup.model, has_scalar_head=True)
  return dataclasses.replace(setup, model=model)


def _first_params(
  policy: setup_lib.Setup, scored: setup_lib.Setup
) -> transformer.Params:
  """Return the reward model before training, with its adapters."""
  params = dict(prefer.starting_policy(policy))
  params.pop("output_head", None)
  params["scalar_head"] = jnp.zeros((policy.model.model_dim,), jnp.float32)
  params = initial_params.placed(params, scored)
  return initial_params.with_adapters(params, scored)


def _labelled_solutions(
  setup: setup_lib.Setup, split: str, num_examples: int
) -> labelled_steps.Solutions:
  return labelled_steps.Solutions(
    assembly.prompt_source(setup),
    setup.config.preference,
    split=split,
    num_examples=num_examples,
    max_tokens=setup.config.train.tokens_per_row,
  )


# -- scoring ------------------------------------------------------------------


def scores(
  config: sections.Config, workdir: pathlib.Path, dataset: str
) -> Iterator[dict[str, Any]]:
  """Yield what a trained reward model says of each row of a dataset.

  Args:
    dataset: URI of rows, with the prompt's columns as `task` names them, and a
      column `completion`; or, for a model of steps, the column of steps.

  Yields:
    `row`, and `score`, a number; or `steps`, for each step the probability that
    it is right.
  """
  scorer = Scorer(config, workdir)
  examples = list(_examples(scorer.setup, dataset))
  for row, found in enumerate(scorer.values(examples)):
    if config.preference.reward_loss is sections.RewardLoss.STEPS:
      right = 1 / (1 + np.exp(-found.astype(np.float64)))
      yield {"row": row, "steps": right.tolist()}
    else:
      yield {"row": row, "score": float(found[0])}


class Scorer:
  """A trained reward model on the devices of this process.

  Attributes:
    setup: of the reward model.
    version: the number of updates after which its parameters were kept.
  """

  def __init__(self, config: sections.Config, workdir: pathlib.Path):
    """Read the model."""
    continued_settings.check_file(config, workdir)
    self.setup = _with_scalar_head(
      setup_lib.resolve(config, jax.devices(), is_supervised=True)
    )
    self._params, self.version = load(self.setup, workdir)
    self._passes = row_passes.RowPasses(
      self.setup.train_mesh,
      config.mesh.train_rules,
      rows_per_microbatch=config.train.rows_per_microbatch,
      rows_per_batch=config.preference.rows_per_batch,
    )
    forward = dataclasses.replace(
      assembly.forward_settings(self.setup, 1.0),
      model=self.setup.model.base,
      layout=mesh_lib.Layout(
        mesh=self.setup.train_mesh, rules=config.mesh.train_rules
      ),
    )
    self._program = jax.jit(functools.partial(_scalars, forward))

  def values(
    self, examples: Sequence[worked_examples_lib.WorkedExample]
  ) -> list[Float[np.ndarray, "_"]]:
    """Return what the scalar head says at the loss tokens of each example.

    Args:
      examples: one or more, none of them longer than a row.
    """
    segments = example_rows.plan(
      examples,
      tokens_per_row=self.setup.config.train.tokens_per_row,
    )
    found = self._passes.of_tokens(
      self._program, self._params, example_rows.rows_of(segments)
    ).reshape(-1)
    return [
      found[start + np.flatnonzero(example.loss_mask)]
      for example, start in zip(examples, segments.starts.tolist(), strict=True)
    ]


def load(
  setup: setup_lib.Setup, workdir: pathlib.Path
) -> tuple[transformer.Params, int]:
  """Return a trained reward model, and the number of its updates.

  The parameters are on the training slice.
  """
  path = workdir / supervised.PARAMS
  sections.require(
    checkpoint.latest(path) is not None,
    "workdir",
    f"{path} holds no reward model; launch/reward_model.py trains one without"
    " --score",
  )
  try:
    abstract = initial_params.abstract(setup)
    params, about, _ = checkpoint.restore(path, 0, abstract)
    return params, about["updates"]
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"workdir: {error}") from error


def _scalars(
  forward: train_step.ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> Float[Array, "M K B T"]:
  """Return what the scalar head makes of the state after each token."""
  return train_step.of_batch(
    lambda micro: train_step.token_scalars(forward, params, micro), batch
  )


def _examples(
  setup: setup_lib.Setup, dataset: str
) -> Iterator[worked_examples_lib.WorkedExample]:
  """Yield the texts of a dataset; the loss mask says where they are scored."""
  config, source = setup.config, assembly.prompt_source(setup)
  try:
    table = opening.open_table(uri_lib.parse("score", dataset))
    columns = columns_lib.Columns(
      {"answer": "", **config.task.fields.to_dict()}
    )
    items = [columns.item(table, row) for row in range(len(table))]
  except table_lib.TableError as error:
    raise sections.ConfigError(f"score: {error}") from error
  sections.require(bool(items), "score", f"{dataset} has no rows")
  for item in items:
    prompt = source.prompt("score", item)
    try:
      example = _example(setup, prompt, source)
    except ValueError as error:
      if isinstance(error, sections.ConfigError):
        raise
      raise sections.ConfigError(
        f"score: {prompt.prompt_id} cannot be tokenized: {error}"
      ) from error
    check_length(example, prompt.prompt_id, config)
    yield example


def check_length(
  example: worked_examples_lib.WorkedExample,
  prompt_id: str,
  config: sections.Config,
) -> None:
  """Raise a ConfigError if no row of tokens holds an example."""
  sections.require(
    len(example.tokens) <= config.train.tokens_per_row,
    "train.tokens_per_row",
    f"{config.train.tokens_per_row}, but {prompt_id} has"
    f" {len(example.tokens)} tokens; use more",
  )


def _example(
  setup: setup_lib.Setup, prompt: types.Prompt, source: prompts.PromptSource
) -> worked_examples_lib.WorkedExample:
  section = setup.config.preference
  if section.reward_loss is sections.RewardLoss.STEPS:
    steps = labelled_steps.steps_of(
      prompt.item, section.steps, prompt.prompt_id, "score"
    )
    return labelled_steps.tokenized(prompt, steps, setup.tokenizer)
  text = prompt.item["metadata"].get(COMPLETION)
  sections.require(
    isinstance(text, str),
    "score",
    f"{prompt.prompt_id} has no text in the column {COMPLETION!r}",
  )
  return reward_objectives.scored_at_end(
    worked_examples_lib.answered(prompt, text, source)
  )
