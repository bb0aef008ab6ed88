"""Decoding with states (the gated delta rule) against decoding with attention.

Two models of about 10M parameters and the same width: attention in all layers,
and the gated delta rule in three of four. Both decode in every slot at 1,024
cached tokens, in turns, so that the load of the machine is the same for both.

    python benchmarks/states.py
"""

import dataclasses
import statistics
import time

from absl import app
from absl import flags
import jax
from jax import numpy as jnp
import workloads

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import configs
from jaxrl_async.models import transformer

_SLOTS = flags.DEFINE_integer("slots", 8, "Sequences that are decoded.")
_TOKENS = flags.DEFINE_integer("tokens", 1024, "Cached tokens of each.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Calls that are timed of each.")

ATTENTION = workloads.DENSE_10M
STATES = dataclasses.replace(
  ATTENTION,
  has_gated_attention=True,
  delta=configs.GatedDelta(
    num_key_heads=5,
    num_value_heads=10,
    key_dim=32,
    value_dim=32,
    conv_tokens=4,
  ),
  is_delta=(True, True, True, False) * 2,
)
_STEPS = 8  # tokens a call


class Decoding:
  """An engine all of whose slots are at the same position."""

  def __init__(self, model: configs.ModelConfig, slots: int, tokens: int):
    self._engine = engine_lib.Engine(
      model,
      decode_state_lib.EngineSizes(
        num_slots=slots,
        cache_tokens=tokens,
        decode_steps_per_call=_STEPS,
        prefill_rows=1,
        prefill_buckets=(tokens,),
        window_buckets=(tokens,),
      ),
      mesh=mesh_lib.make_mesh(jax.devices()[:1]),
      seed=0,
      end_tokens=(),
    )

    @jax.jit
    def weights():
      params = transformer.init_params(model, jax.random.key(0))
      return transformer.unstack(params, model.num_layers, model)

    self._params = self._engine.load_params(weights(), 0)
    self._slots, self._position = slots, tokens - _STEPS - 1

  def seconds(self) -> float:
    """Return how long a call takes."""
    state = self._engine.init_decode_state()
    each = jnp.full((self._slots,), self._position, jnp.int32)
    settings = dataclasses.replace(
      state.settings, limits=each + 2 * _STEPS, temperature=each * 0.0 + 1.0
    )
    state = dataclasses.replace(
      state, positions=each, is_active=each > 0, settings=settings
    )
    jax.block_until_ready(state)
    start = time.perf_counter()
    state, result = self._engine.generate(self._params, state)
    drawn = self._engine.read(result)
    elapsed = time.perf_counter() - start
    assert drawn.is_valid.all()
    return elapsed


def main(_: list[str]) -> None:
  """Time both in turns and print the rates."""
  slots, tokens = _SLOTS.value, _TOKENS.value
  cases = {"attention": ATTENTION, "states": STATES}
  made = {name: Decoding(x, slots, tokens) for name, x in cases.items()}
  for decoding in made.values():
    decoding.seconds()  # compiles
  times = {name: [] for name in cases}
  for _round in range(_ROUNDS.value):
    for name, decoding in made.items():
      times[name].append(decoding.seconds())
  rates = {
    name: slots * _STEPS / statistics.median(x) for name, x in times.items()
  }
  for name, model in cases.items():
    kept = model.slot_bytes(tokens=tokens, itemsize=4)
    kept += model.state_bytes(itemsize=4)
    print(
      f"{name}: {model.num_params / 1e6:.1f}M parameters,"
      f" {rates[name]:,.0f} tokens/s, {kept / 2**20:.1f} MiB a slot"
    )
  ratios = [
    a / b for a, b in zip(times["attention"], times["states"], strict=True)
  ]
  print(f"states are {statistics.median(ratios):.2f}x as fast")


if __name__ == "__main__":
  app.run(main)
