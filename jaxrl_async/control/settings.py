"""All settings of a run in environments, as sections; no JAX.

`get_config(variant)` of a config file returns a `ControlConfig`. How settings
are stated, overridden and checked is that of `config.sections`.
"""

import dataclasses

from ml_collections import config_dict

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import optimizer_section
from jaxrl_async.config import refusals
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config.setting import section
from jaxrl_async.config.setting import setting


@dataclasses.dataclass(kw_only=True, slots=True)
class ActorsSection:
  """The processes that step environments."""

  environment: str = setting("CartPole-v1")
  """Its id at Gymnasium. "module:ID" imports the module first, which registers
  it."""
  arguments: config_dict.ConfigDict = setting(config_dict.ConfigDict)
  """Arguments of `gymnasium.make`."""
  num_actors: int = setting(1, low=1, high=1024)
  """Processes."""
  ring: int = setting(8, low=1, high=1024)
  """Environments of each process. It steps one while the others wait for their
  actions."""
  inference_threads: int = setting(1, low=1, high=64)
  """Calls of the policy that may run at the same time. More than one shortens
  the wait for an action only where devices or cores are free."""
  timeout_s: float = setting(60.0, low=0.1, high=setting_lib.MAX_TIMEOUT_S)
  """The run ends if no process says anything for so long, while any owes a
  step. Their start may take a minute more."""


@dataclasses.dataclass(kw_only=True, slots=True)
class PpoSection:
  """Decoupled PPO (arXiv:2505.24298) with generalised advantages."""

  max_staleness: int = setting(1, low=0)
  """Bound on the age of a frame, in policy versions."""
  columns_per_row: int = setting(129, low=2)
  """Length of a segment: so many observations of one environment, in order. The
  last one only says what follows, and so does the last one of an episode that
  was cut off."""
  rows_per_step: int = setting(8, low=1)
  """Segments of a train step."""
  num_minibatches: int = setting(4, low=1)
  """Updates of an epoch."""
  num_epochs: int = setting(4, low=1)
  """How often a train step goes over its frames."""
  gamma: float = setting(0.99, low=0, high=1)
  """Discount of rewards."""
  gae_lambda: float = setting(0.95, low=0, high=1)
  """Decay of the generalised advantages."""
  clip: float = setting(0.2, low=0, high=1)
  """How far the ratio to the proximal policy may move from 1."""
  behavior_weight_cap: float = setting(2.0, low=setting_lib.MIN_FLOAT)
  """Largest weight of a frame that an older policy drew."""
  entropy_coef: float = setting(0.01, low=0)
  """Of the bonus for entropy."""
  value_coef: float = setting(0.5, low=0)
  """Of the critic's loss."""
  value_clip: float = setting(0.2, low=0)
  """Bound on how far a prediction gains by moving within a train step, in
  normalised units; 0 sets none."""
  normalize_decay: float = setting(0.99, low=0, below=1)
  """Weight of earlier train steps in the running mean and deviation of the
  returns, by which the critic's targets are normalised; 0 normalises
  nothing."""


@dataclasses.dataclass(kw_only=True, slots=True)
class ControlConfig:
  """A run."""

  seed: int = setting(0, low=0)
  """Of weights, actions and environments."""
  num_steps: int = setting(500, low=1)
  """Train steps."""
  checkpoint_every: int = setting(100, low=1)
  """Train steps between two checkpoints; the last step has one anyway."""
  rate_decay: float = setting(1.0, low=0, high=1)
  """The learning rate falls in a cosine to this part of it; 1 is constant."""
  hidden_size: int = setting(64, low=1)
  """Width of the network's hidden layers; of images, that of the last one."""
  actors: ActorsSection = section(ActorsSection)
  ppo: PpoSection = section(PpoSection)
  optimizer: optimizer_section.OptimizerSection = section(
    optimizer_section.OptimizerSection
  )


def check(config: ControlConfig) -> None:
  """Check every field, and what holds between them.

  Raises:
    ConfigError: one line that names the field.
  """
  fields_lib.check(config)
  ppo = config.ppo
  refusals.require(
    optimizer_section.OptimizerName.ADAMW is config.optimizer.name,
    "optimizer.name",
    "Muon is for the matrices of a language model; use adamw",
  )
  refusals.require(
    config.optimizer.weight_decay == 0,
    "optimizer.weight_decay",
    "only the matrices of language models decay; use 0",
  )
  frames = ppo.rows_per_step * ppo.columns_per_row
  refusals.require(
    frames % ppo.num_minibatches == 0,
    "ppo.num_minibatches",
    f"{ppo.num_minibatches} does not divide rows_per_step * columns_per_row"
    f" = {frames}",
  )
