"""Environments: rings that sleep, frames a second, and learning curves.

python benchmarks/control.py --part=ring
python benchmarks/control.py --part=frames
python benchmarks/control.py --part=learn --config=cartpole --target=475

`ring` has one actor, whose environments sleep for T_env, and a policy that
sleeps for T_inf. It measures how long the actor is idle and how many frames a
second it makes, by the size R of its ring, for three ratios of the two times,
and for one or R calls of the policy at the same time. It needs no free core.

`frames` counts frames a second of CartPole: an actor's ring with the policy's
inference, beside Gymnasium's vector environments with the same policy. Nothing
is trained.

`learn` trains a config of configs/ until the mean return of the last 100
episodes reaches the target, or the config's steps are done.

The last line on stdout is JSON.
"""

from collections.abc import Iterator
import contextlib
import importlib.util
import json
import pathlib
import sys
import tempfile
import threading
import time
from typing import Any

from absl import app
from absl import flags
import numpy as np

_PART = flags.DEFINE_enum("part", "ring", ["ring", "frames", "learn"], "Part.")
_SECONDS = flags.DEFINE_float("seconds", 3.0, "Of each measurement.")
_STEP_MS = flags.DEFINE_float("step_ms", 10.0, "T_env of `ring`.")
_RATIOS = flags.DEFINE_list("ratios", ["1", "3", "7"], "T_inf / T_env.")
_CONFIG = flags.DEFINE_string("config", "cartpole", "Of configs/; `learn`.")
_TARGET = flags.DEFINE_float("target", 475.0, "Mean return of `learn`.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of `learn`.")


# -- ring -------------------------------------------------------------------


def sleeper(seconds: float) -> Any:
  """Return a policy that sleeps."""
  from jaxrl_async.control import policies

  class Sleeper(policies.Policy):
    """Has no weights."""

    def __init__(self):
      pass

    def adopt(self) -> int:
      """Return the only version."""
      return 0

    def act(self, observations: np.ndarray) -> tuple[np.ndarray, Any, int]:
      """Sleep, and take the first action."""
      time.sleep(seconds)
      count = len(observations)
      return np.zeros(count, np.int32), np.zeros(count, np.float32), 0

  return Sleeper()


@contextlib.contextmanager
def acting(
  policy: Any, environment: str, arguments: dict[str, Any], **fields: Any
) -> Iterator[Any]:
  """Run actors and inference, without a trainer, inside the block."""
  from ml_collections import config_dict

  from jaxrl_async.buffer import buffer as buffer_lib
  from jaxrl_async.control import actor as actor_lib
  from jaxrl_async.control import fleet as fleet_lib
  from jaxrl_async.control import inference as inference_lib
  from jaxrl_async.control import settings as settings_lib

  section = settings_lib.ActorsSection(
    environment=environment,
    arguments=config_dict.ConfigDict(arguments),
    **fields,
  )
  spaces = actor_lib.spaces_of(environment, arguments)
  # Rows that are dropped when they are full would not be measured: none is.
  buffer: Any = buffer_lib.Buffer(1_000_000, 0)
  buffer.set_policy_version(0)
  fleet = fleet_lib.Fleet(section, spaces, columns=1_000, seeds=(0,))
  inference = inference_lib.Inference(fleet, buffer, policy)
  threads = [
    threading.Thread(target=inference.run, daemon=True)
    for _ in range(section.inference_threads)
  ]
  for thread in threads:
    thread.start()
  try:
    yield inference
  finally:
    inference.stop()
    buffer.close()
    for thread in threads:
      thread.join()
    fleet.close()


def measured(inference: Any, num_environments: int) -> dict[str, float]:
  """Return rates over some seconds, after as many frames as warm it up."""
  from jaxrl_async.control import inference as inference_lib

  while inference.counters()["frames"] < 4 * num_environments:
    time.sleep(0.01)
  before = inference.counters()
  time.sleep(_SECONDS.value)
  after = inference.counters()
  since = {name: after[name] - before[name] for name in after}
  return {
    **inference_lib.rates(before, after),
    "step_ms": 1e3 * since["busy_s"] / since["frames"],
    "call_ms": 1e3 * since["call_s"] / since["calls"],
  }


def ring() -> dict[str, Any]:
  """Measure idle and speed-up by the size of the ring."""
  step_s = _STEP_MS.value / 1e3
  rows = []
  for ratio in map(float, _RATIOS.value):
    enough = int(np.ceil(ratio)) + 1
    sizes = sorted({1, enough - 1, enough, 2 * enough - 2, 2 * enough})
    alone = 0.0
    for size in sizes:
      for calls in sorted({1, size}):
        with acting(
          sleeper(ratio * step_s),
          "sleeping_environment:Sleeping-v0",
          {"step_s": step_s},
          ring=size,
          inference_threads=calls,
        ) as inference:
          found = measured(inference, size)
        if size == 1:
          alone = found["frames_per_s"]
        row = {
          "ratio": ratio,
          "ring": size,
          "calls": calls,
          "speedup": found["frames_per_s"] / alone,
          "limit": 1 + found["call_ms"] / found["step_ms"],
          **found,
        }
        rows.append(row)
        print({k: round(v, 3) for k, v in row.items()}, flush=True)
  return {"ring": rows}


# -- frames -----------------------------------------------------------------


def frames() -> dict[str, Any]:
  """Count frames a second of CartPole, with the policy of the config."""
  import gymnasium
  from gymnasium import vector
  import jax

  from jaxrl_async.control import actor as actor_lib
  from jaxrl_async.control import policies
  from jaxrl_async.weights import weight_transfer

  jax.config.update("jax_cpu_enable_async_dispatch", False)
  spaces = actor_lib.spaces_of("CartPole-v1", {})
  network = policies.Network(spaces, 64)
  params = network.init_params(jax.random.key(0))
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    params,
  )
  channel = weight_transfer.DirectChannel(shapes)
  channel.publish(params, 0)
  policy = policies.Policy(network, channel, jax.random.key(1))
  for n in (1, 2, 4, 8, 16, 32):
    policy.act(np.zeros((n, 4), np.float32))  # compiles
  found: dict[str, Any] = {}

  def add(name: str, rate: float) -> None:
    found[name] = rate
    print(f"{name}: {rate:.0f} frames/s", flush=True)

  for size in (8, 16, 32):
    for num_actors in (1, 2):
      with acting(
        policy,
        "CartPole-v1",
        {},
        ring=size // num_actors,
        num_actors=num_actors,
      ) as inference:
        each = measured(inference, size)
      add(f"ring {size} of {num_actors}", each["frames_per_s"])
    for name, kind in (
      ("sync", vector.SyncVectorEnv),
      ("async", vector.AsyncVectorEnv),
    ):
      environments = kind([lambda: gymnasium.make("CartPole-v1")] * size)
      observations, _ = environments.reset(seed=0)
      count, start_s = 0, time.perf_counter()
      while (seconds := time.perf_counter() - start_s) < _SECONDS.value:
        actions, _, _ = policy.act(observations)
        observations, *_ = environments.step(actions)
        count += size
      environments.close()
      add(f"{name} {size}", count / seconds)
  return {"frames": found}


# -- learn ------------------------------------------------------------------


def learn() -> dict[str, Any]:
  """Train until the target, and return frames and seconds by seed."""
  path = pathlib.Path(__file__).parents[1] / "configs" / f"{_CONFIG.value}.py"
  spec = importlib.util.spec_from_file_location(_CONFIG.value, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  runs = []
  for seed in range(_SEEDS.value):
    config = module.get_config()
    config.seed = seed
    start_s = time.perf_counter()
    run = _learn(config)
    run |= {"seed": seed, "wall_s": time.perf_counter() - start_s}
    runs.append(run)
    print(json.dumps(run), flush=True)
  return {"learn": runs, "target": _TARGET.value}


def _learn(config: Any) -> dict[str, Any]:
  import jax

  from jaxrl_async.control import train

  jax.config.update("jax_cpu_enable_async_dispatch", False)
  curve = []

  def is_enough(found: dict[str, Any]) -> bool:
    mean = found["episode_return"]
    if len(curve) % 20 == 0:
      shown = {
        name: found[name]
        for name in ("frames", "episode_return", "frames_per_s", "entropy")
      }
      print(shown, file=sys.stderr, flush=True)
    curve.append((found["frames"], mean, found["elapsed_s"]))
    has_all = found["episodes"] >= 100
    return has_all and mean >= _TARGET.value

  with tempfile.TemporaryDirectory() as workdir:
    last = train.train(config, pathlib.Path(workdir), is_enough=is_enough)
  return {
    "solved": is_enough(last),
    "frames": last["frames"],
    "seconds": last["elapsed_s"],
    "episode_return": last["episode_return"],
    "curve": curve[:: max(1, len(curve) // 20)],
  }


def main(argv: list[str]) -> None:
  """Run one part."""
  del argv
  parts = {"ring": ring, "frames": frames, "learn": learn}
  print(json.dumps(parts[_PART.value]()))


if __name__ == "__main__":
  app.run(main)
