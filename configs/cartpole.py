"""CartPole with one process of environments: solved in half a minute.

    uv run launch/control.py --config=configs/cartpole.py --workdir=/tmp/cart

It needs the extra gym and two cores. `sync`, after a colon, is the same run
with max_staleness=0.
"""

from jaxrl_async.config import optimizer_section
from jaxrl_async.config import refusals
from jaxrl_async.control import settings as settings_lib


def get_config(variant: str = "") -> settings_lib.ControlConfig:
  """Return the run of this file; variants are "" and "sync"."""
  refusals.require(
    variant in ("", "sync"),
    "variant",
    f"{refusals.shown(variant)}; use sync or none",
  )
  return settings_lib.ControlConfig(
    num_steps=300,
    actors=settings_lib.ActorsSection(environment="CartPole-v1", ring=8),
    ppo=settings_lib.PpoSection(
      max_staleness=0 if variant == "sync" else 1,
      columns_per_row=129,
      rows_per_step=8,
    ),
    optimizer=optimizer_section.OptimizerSection(
      learning_rate=1e-3, b2=0.999, eps=1e-5, max_grad_norm=0.5
    ),
    rate_decay=0.1,
  )
