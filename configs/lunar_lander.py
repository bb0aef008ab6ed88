"""LunarLander with one process of environments: solved in a minute.

    uv run launch/control.py --config=configs/lunar_lander.py --workdir=/tmp/m

It needs the extra gym and two cores. docs/how-to/control.md says how it learns.
"""

from jaxrl_async.config import optimizer_section
from jaxrl_async.config import refusals
from jaxrl_async.control import settings as settings_lib


def get_config(variant: str = "") -> settings_lib.ControlConfig:
  """Return the run of this file; there are no variants."""
  refusals.require(
    not variant, "variant", f"{refusals.shown(variant)}; there is none"
  )
  return settings_lib.ControlConfig(
    num_steps=300,
    actors=settings_lib.ActorsSection(environment="LunarLander-v3", ring=16),
    ppo=settings_lib.PpoSection(
      columns_per_row=256,
      rows_per_step=16,
      num_minibatches=32,
      gamma=0.999,
      gae_lambda=0.98,
    ),
    optimizer=optimizer_section.OptimizerSection(
      learning_rate=5e-4, b2=0.999, eps=1e-5, max_grad_norm=0.5
    ),
    rate_decay=0.1,
  )
