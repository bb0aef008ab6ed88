"""The setup of a run: a config with everything that it refers to.

Training, serving, the warm start alone and a dry run all begin with `resolve`.
Parts that only some of them need are built in `assembly`.
"""

from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.run import config_checks
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import packing
from jaxrl_async.training import train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """A config and everything that it refers to.

  Attributes:
    config: a validated config.
    tokenizer: the tokenizer of the pretrained model. Without such a model, each
      character is a token.
    model: the policy's architecture. Its vocabulary is at least as large as the
      tokenizer's.
    pretrained: directory of the model in Hugging Face's format that
      `model.name` names. None if it names one of `configs.MODELS`.
    train_mesh: devices of the training slice.
    rollout_mesh: devices of the rollout slice.
    source: the source of the prompts.
  """

  config: sections.Config
  tokenizer: tokenizer_lib.Tokenizer
  model: configs.ModelConfig
  pretrained: pathlib.Path | None
  train_mesh: jax.sharding.Mesh
  rollout_mesh: jax.sharding.Mesh
  source: source_lib.Source

  @property
  def models(self) -> dict[str, train_state.ModelSettings]:
    """The settings of each model in the train state, by name."""
    policy = train_state.ModelSettings(
      model=self.model, optimizer=self.config.train.optimizer
    )
    return {train_state.POLICY: policy}

  @property
  def max_microbatches(self) -> int:
    """The number of microbatches if every trajectory has the maximum length.

    This is for one minibatch.
    """
    algorithm, rollout = self.config.algorithm, self.config.rollout
    return packing.expected_microbatches(
      algorithm.group_size
      * algorithm.groups_per_step
      // algorithm.num_minibatches,
      max_tokens=rollout.max_prompt_tokens + rollout.max_completion_tokens,
      tokens_per_row=self.config.train.tokens_per_row,
      rows_per_microbatch=self.config.train.rows_per_microbatch,
    )


def resolve(
  config: sections.Config,
  devices: Sequence[Any],
  *,
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  source: source_lib.Source | None = None,
) -> Setup:
  """Return the setup of a config; this reads files but compiles nothing.

  Args:
    config: a validated config.
    devices: the devices that are divided into the two slices. They may be
      descriptions of devices that are not present.
    tokenizer: a tokenizer that a run has stored, used instead of the model's.
    source: the source of the prompts; None is the dataset of `task.dataset`.

  Raises:
    ConfigError: one line that names the field.
  """
  pretrained = _pretrained(config)
  if tokenizer is None:
    tokenizer = _load_tokenizer(pretrained)
  model = _model_config(config, pretrained, tokenizer.vocab_size)
  train_mesh, rollout_mesh = _cut_devices(config, devices)
  return Setup(
    config=config,
    tokenizer=tokenizer,
    model=model,
    pretrained=pretrained,
    train_mesh=train_mesh,
    rollout_mesh=rollout_mesh,
    source=source_of(config) if source is None else source,
  )


def source_of(config: sections.Config) -> source_lib.Source:
  """Return the source that a config names."""
  task = config.task
  path = _path("task.dataset", task.dataset)
  eval_path = _path("task.eval_dataset", task.eval_dataset)
  if path is not None:
    return rows_lib.Rows(
      path=path,
      eval_path=eval_path,
      fields=task.fields.to_dict(),
      eval_percent=task.eval_percent,
      skips_bad_rows=task.on_bad_row is sections.OnBadRow.SKIP,
      seed=config.seed,
    )
  sections.require(
    eval_path is None and not task.eval_dataset,
    "task.eval_dataset",
    "a dataset of reasoning-gym has held-out questions of its own; leave it"
    " empty",
  )
  return gym.ReasoningGym(
    name=task.dataset, params=task.params.to_dict(), seed=config.seed
  )


def _path(field: str, dataset: str) -> pathlib.Path | None:
  """Return the path that a dataset names; None if it is not a URI."""
  kind, has_colon, path = dataset.partition(":")
  if not has_colon:
    return None
  sections.require(
    kind == "jsonl" and bool(path),
    field,
    f"{sections.shown(dataset)} is no dataset; use jsonl:PATH, or the name of a"
    " dataset of reasoning-gym",
  )
  return pathlib.Path(path)


def _pretrained(config: sections.Config) -> pathlib.Path | None:
  """Return the directory of the pretrained model, if `model.name` names one."""
  name = config.model.name  # os.path accepts any name; pathlib may raise
  is_directory = name not in configs.MODELS and os.path.isdir(name)
  return pathlib.Path(name) if is_directory else None


def _load_tokenizer(
  pretrained: pathlib.Path | None,
) -> tokenizer_lib.Tokenizer:
  """Load the pretrained model's tokenizer.

  Without a pretrained model, return a tokenizer whose tokens are characters.

  Raises:
    ConfigError: the directory has no usable tokenizer.
  """
  if pretrained is None:
    return tokenizer_lib.character_level()
  try:
    return tokenizer_lib.load(pretrained)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"model.name: {error}") from error


def _model_config(
  config: sections.Config, pretrained: pathlib.Path | None, vocab_size: int
) -> configs.ModelConfig:
  """Return the architecture of the policy, with a sufficient vocabulary.

  A pretrained model keeps its own vocabulary size, which may be larger than the
  tokenizer's. A model of `configs.MODELS` keeps its size too if that is larger,
  as for those with the shapes of a pretrained model. Otherwise it gets the size
  of the tokenizer's vocabulary.

  Raises:
    ConfigError: there is no model of that name, or its files cannot be used.
  """
  name = config.model.name
  if name in configs.MODELS:
    model = configs.MODELS[name]
    return dataclasses.replace(
      model, vocab_size=max(model.vocab_size, vocab_size)
    )
  if pretrained is None:
    raise sections.ConfigError(
      f"model.name: {sections.shown(name)} does not exist; use one of"
      f" {', '.join(configs.MODELS)}, or a directory in Hugging Face's format"
    )
  try:
    model = hf_config.model_config(pretrained)
    hf_config.check_vocabulary(pretrained, model, vocab_size)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"model.name: {error}") from error
  return model


def _cut_devices(
  config: sections.Config, devices: Sequence[Any]
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Divide the devices into the train and the rollout mesh.

  Raises:
    ConfigError: the mesh sizes do not suit the devices, or a mesh would contain
      chips of two TPU slices.
  """
  train, rollout = config_checks.slice_shapes(config.mesh, len(devices))
  meshes = mesh_lib.cut_devices(
    devices, train_shape=train, rollout_shape=rollout
  )
  for side, mesh in zip(("train", "rollout"), meshes, strict=True):
    sections.require(
      len(set(mesh.devices.flat)) == mesh.size,
      f"mesh.{side}_data",
      f"the {side} slice would have chips of two TPU slices; give each mesh the"
      " chips of one",
    )
  return meshes
