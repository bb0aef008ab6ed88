"""What a run compiles, without running it."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_topology import needs_libtpu

from configs import tiny as tiny_config
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.devices import tpu_chips
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import train_state

ROOT = pathlib.Path(__file__).resolve().parents[1]

CHIP = tpu_chips.Chip(
  kind="test",
  hbm_bytes=2.0**30,
  flops_per_s=1e12,
  hbm_bytes_per_s=1e9,
  ici_bytes_per_s=1e8,
  slices=(),
)


def program(name, gib, refusal=""):
  return aot.Compiled(name=name, memory_bytes=int(gib * 2**30), refusal=refusal)


def test_what_is_too_large_is_named_with_its_size():
  line = aot.slice_line("training", [program("update", 0.5)], CHIP)
  assert line == "  training slice: 0.50 GiB of 1.00 GiB a device, in update"
  fits = {"training": [program("update", 0.5)], "rollout": []}
  assert aot.misfit({"training": fits["training"]}, CHIP) == ""
  large = [program("prefill", 0.25), program("decode", 1.5)]
  assert (
    aot.misfit({**fits, "rollout": large}, CHIP)
    == "decode of the rollout slice needs 1.50 GiB a device, which has 1.00"
  )
  refused = [program("update", 0, "Used 23.05G of 15.75G hbm")]
  reason = aot.misfit({"training": refused, "rollout": large}, CHIP)
  assert reason == "update of the training slice: Used 23.05G of 15.75G hbm"


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    (
      "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required"
      " for HLO temporaries (1.56T) exceeds available HBM (15.75G).",
      "Ran out of memory on HBM, the total memory required for HLO temporaries"
      " (1.56T) exceeds available HBM (15.75G).",
    ),
    (
      "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory"
      " in memory space hbm. Used 23.05G of 15.75G hbm. Exceeded hbm capacity"
      " by 7.30G.\n\nTotal hbm usage >= 23.30G:",
      "Used 23.05G of 15.75G hbm",
    ),
  ],
)
def test_xla_refusing_a_program_is_a_result_with_its_numbers(text, reason):
  class Refusing:
    def lower(self, *arguments, **settings):
      return self

    def compile(self):
      raise jax.errors.JaxRuntimeError(text)

  large = aot.Program(name="update", function=Refusing(), arguments=())
  assert aot.compile_program(large).refusal == reason


def test_another_error_of_the_compiler_is_raised():
  class Failing:
    def lower(self, *arguments, **settings):
      return self

    def compile(self):
      raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

  with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
    aot.compile_program(aot.Program(name="x", function=Failing(), arguments=()))


def test_memory_is_that_of_a_shard_and_of_what_else_is_resident():
  mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  array = jax.ShapeDtypeStruct((4_096,), np.float32, sharding=split)
  assert aot.bytes_a_device({"a": [array]}) == 4_096
  add = jax.jit(lambda x: x + 1)
  alone = aot.Program(name="add", function=add, arguments=(array,))
  beside = dataclasses.replace(alone, resident=(array, array))
  small, large = (aot.compile_program(x) for x in (alone, beside))
  assert small.memory_bytes >= 2 * 4_096  # argument and result
  assert large.memory_bytes == small.memory_bytes + 2 * 4_096


@pytest.mark.slow
def test_what_is_compiled_takes_what_a_run_gives_it():
  config = tiny_config.get_config()
  config.mesh.train_fsdp, config.mesh.rollout_tensor = 2, 2
  setup = setup_lib.resolve(config, jax.devices())
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  engine = assembly.make_engine(setup)
  programs = [
    *trainer.programs(),
    *engine.programs(trainer.published_shapes()),
  ]
  compiled = {
    x.name: x.function.lower(*x.arguments, **x.settings).compile()
    for x in programs
  }
  init = jax.jit(lambda key: transformer.init_params(setup.model, key))
  trainer.start({train_state.POLICY: init(jax.random.key(0))})
  state, published = trainer.state, trainer.published()
  batch = jax.tree.map(
    lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
    programs[0].arguments[1],
  )
  compiled["publish"](state.policy.params)
  trained = batch.with_arrays(
    compiled["proximal"](state.params, batch, np.int32(0))
  )
  compiled["update"](state, trained, np.int32(0))
  params = engine.load_params(published, 0)
  rows = config.rollout.prefill_rows, config.rollout.prefill_buckets[-1]
  compiled["prefill"](
    params,
    np.zeros(rows, np.int32),
    np.ones(rows[:1], np.int32),
    None,
  )
  slots = config.rollout.num_slots
  tables = np.full(slots, -2, np.int32), np.zeros((slots, 0), np.int32)
  compiled["decode"](params, engine.init_decode_state(), *tables)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smallest_tpu_config_compiles_and_fits():
  done = subprocess.run(
    [
      sys.executable,
      str(ROOT / "launch" / "train.py"),
      "--dry_run",
      "--topology=v5e:2x2",
      f"--config={ROOT / 'configs' / 'tpu_quickstart.py'}",
    ],
    capture_output=True,
    text=True,
    timeout=800,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
  )
  assert done.returncode == 0, done.stderr[-2_000:]
  for name in ("proximal", "update", "publish", "prefill", "decode"):
    assert f"\n  {name} " in done.stdout
  assert " MiB of 15.75 GiB a device, in update" in done.stdout
  assert "prefill splash" in done.stdout
