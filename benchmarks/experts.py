"""A train step of experts against a dense one of equal FLOPs a token.

Both models have the same width, layers and attention, and some 10M parameters
that a token uses. One has a dense feed-forward. The other has 16 experts, of
which each token is fed to 2 that together are as large. Value and gradient of a
microbatch are timed in turns, so that the load of the machine is the same for
both.

    python benchmarks/experts.py

The aim is 0.7 of the dense rate. Result: docs/reference/models.md.
"""

import dataclasses
import statistics
import time

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import numpy as np
import workloads

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.training import packing
from jaxrl_async.training import train_step

_ROWS = flags.DEFINE_integer("rows", 4, "Rows of a microbatch.")
_TOKENS = flags.DEFINE_integer("tokens", 512, "Tokens of a row.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Steps that are timed of each.")

DENSE = workloads.DENSE_10M
EXPERTS = dataclasses.replace(
  DENSE,
  mlp_dim=448,
  experts=configs.Experts(num_experts=16, num_per_token=2),
)


def batch(rows: int, tokens: int) -> packing.PackedBatch:
  """Return rows of four sequences each, whose tokens are all learned from."""
  drawn = np.random.default_rng(0).integers(0, DENSE.vocab_size, (rows, tokens))
  positions = np.tile(np.arange(tokens) % (tokens // 4), (rows, 1))
  starts = np.arange(tokens) - positions
  zeros = np.zeros((rows, tokens), np.float32)
  return packing.PackedBatch(
    tokens=drawn.astype(np.int32),
    segment_ids=(starts // (tokens // 4) + 1).astype(np.int32),
    positions=positions.astype(np.int32),
    segment_start=starts.astype(np.int32),
    loss_mask=np.ones((rows, tokens), bool),
    advantages=zeros,
    behavior_logprobs=zeros,
    policy_versions=zeros.astype(np.int32),
    fields={},
  )


class Training:
  """The gradient of a model's likelihood on one microbatch."""

  def __init__(self, model: configs.ModelConfig, rows: int, tokens: int):
    settings = train_step.ForwardSettings(
      model=model,
      compute_dtype="float32",
      remat=sections.Remat.DOTS,
      attention="blocks",
      temperature=1.0,
      vocab_chunk=model.vocab_size,
    )

    def loss(params, batch):
      logprobs, _ = train_step.token_logprobs(settings, params, batch)
      return logprobs.mean()

    self._params = transformer.init_params(model, jax.random.key(0))
    self._batch = jax.tree.map(jnp.asarray, batch(rows, tokens))
    self._step = jax.jit(jax.value_and_grad(loss))

  def seconds(self) -> float:
    """Return how long a step takes."""
    start = time.perf_counter()
    jax.block_until_ready(self._step(self._params, self._batch))
    return time.perf_counter() - start


def main(_: list[str]) -> None:
  """Time both in turns and print the rates."""
  rows, tokens = _ROWS.value, _TOKENS.value
  models = {"dense": DENSE, "experts": EXPERTS}
  made = {name: Training(x, rows, tokens) for name, x in models.items()}
  for training in made.values():
    training.seconds()  # compiles
  times = {name: [] for name in models}
  for _round in range(_ROUNDS.value):
    for name, training in made.items():
      times[name].append(training.seconds())
  for name, model in models.items():
    rate = rows * tokens / statistics.median(times[name])
    print(
      f"{name}: {model.num_params / 1e6:.1f}M parameters,"
      f" {model.num_active_params / 1e6:.1f}M used by a token,"
      f" {rate:,.0f} tokens/s"
    )
  ratios = [
    a / b for a, b in zip(times["dense"], times["experts"], strict=True)
  ]
  print(f"experts train at {statistics.median(ratios):.2f} of the dense rate")


if __name__ == "__main__":
  app.run(main)
