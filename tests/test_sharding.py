"""Training on a mesh is training on one device."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
from jax import numpy as jnp
import mesh_world
import numpy as np
import optax
import pytest
import test_losses
import test_train_step
import tiny

from jaxrl_async.algorithms import likelihood
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import train_step

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import hlo  # noqa: E402
import hlo_text  # noqa: E402

from configs import tiny as tiny_config  # noqa: E402

MeshShape = mesh_lib.MeshShape
MIXED = MeshShape(fsdp=2, context=2, tensor=2)
EIGHT = [
  MeshShape(data=data, fsdp=fsdp, tensor=tensor)
  for data, fsdp, tensor in itertools.product((1, 2, 4, 8), repeat=3)
  if data * fsdp * tensor == 8
]
OTHERS = [*EIGHT, MeshShape(context=8), MeshShape(data=2, context=4)]
nightly = pytest.mark.nightly


@functools.cache
def trained(shape, **rules):
  trainer = mesh_world.make_trainer(
    shape, rules=sections.ShardingRules(**rules)
  )
  steps = mesh_world.train(trainer)
  return trainer, steps, jax.tree.map(np.asarray, trainer.state.policy.params)


def assert_same(found, wanted):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
    found,
    wanted,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "shape",
  [MIXED, *(pytest.param(shape, marks=nightly) for shape in OTHERS)],
  ids=str,
)
def test_a_mesh_trains_like_one_device(shape):
  trainer, steps, params = trained(shape)
  assert trainer.state.policy.params["final_norm"].sharding.num_devices == 8
  _, wanted_steps, wanted_params = trained(mesh_lib.ONE)
  assert all((step["grad_norm"] > 1e-2).all() for step in wanted_steps)
  assert_same(steps, wanted_steps)
  assert_same(params, wanted_params)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
  "rules",
  [
    {"kv_heads": (), "vocab": ()},
    {"embed": ("fsdp",), "batch": ("fsdp",)},
    {"embed": (), "layers": ("fsdp",)},
  ],
  ids=lambda rules: " ".join(rules),
)
def test_other_rules_train_the_same(rules):
  trainer, steps, params = trained(MIXED, **rules)
  layers = trainer.state.policy.params["layers"]
  axes = transformer.logical_axes(mesh_world.MODEL, is_stacked=True)["layers"]
  spec = mesh_lib.spec(sections.ShardingRules(**rules), axes["key"])
  assert layers["key"].sharding.is_equivalent_to(
    jax.sharding.NamedSharding(layers["key"].sharding.mesh, spec), 4
  )
  _, wanted_steps, wanted_params = trained(mesh_lib.ONE)
  assert_same(steps, wanted_steps)
  assert_same(params, wanted_params)


@pytest.mark.slow
@pytest.mark.parametrize(
  "shape", [pytest.param(MeshShape(fsdp=8), marks=nightly), MIXED], ids=str
)
def test_no_device_is_sent_the_table_of_tokens_or_its_gradient(shape):
  trainer = mesh_world.make_trainer(shape)
  (update,) = (p for p in trainer.programs() if p.name == "update")
  text = update.function.lower(*update.arguments).compile().as_text()
  model = trainer.forward.model
  tables = [
    {model.vocab_size // parts, model.model_dim} for parts in (1, shape.tensor)
  ]
  computations, _ = hlo_text.parse(text)
  sent = [
    x.sizes
    for here in computations.values()
    for this in here.values()
    if this.opcode.removesuffix("-start") in ("all-gather", "all-reduce")
    for x in this.shapes
  ]
  assert sent
  assert not [sizes for sizes in sent for x in tables if x <= set(sizes)]


def test_no_device_is_sent_the_states_of_all_rows_and_tokens():
  shape = MeshShape(fsdp=2, context=2)
  trainer = mesh_world.make_trainer(shape)
  params = trainer.abstract_state().policy.params
  layout = trainer.forward.layout
  here = mesh_lib.sharding(layout.mesh, layout.rules, "batch", "tokens")
  tokens = jax.ShapeDtypeStruct((8, 16), np.int32, sharding=here)

  def loss(params, tokens):
    model = transformer.bind(mesh_world.MODEL, params, is_stacked=True)
    return (train_step._embedded(trainer.forward, model, tokens) ** 2).sum()

  compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
  computations, _ = hlo_text.parse(compiled.as_text())
  sent = {
    (this.opcode, x.sizes)
    for here in computations.values()
    for this in here.values()
    for x in this.shapes
    if this.opcode in ("all-gather", "all-to-all") and x.dtype == "f32"
  }
  assert "all-to-all" in {opcode for opcode, _ in sent}
  whole = tokens.size * mesh_world.MODEL.model_dim
  assert not [x for x in sent if np.prod(x[1]) >= whole]


@pytest.mark.slow
@pytest.mark.nightly
def test_devices_that_split_only_rows_add_up_gradients_once_an_update():
  trainer = mesh_world.make_trainer(MeshShape(data=2))
  (update,) = (p for p in trainer.programs() if p.name == "update")
  text = update.function.lower(*update.arguments).compile().as_text()

  def sent(num_microbatches):
    module = hlo.Module(text, max_trips=num_microbatches)
    return module.cost().collectives["all-reduce"][1]

  params = jax.tree.leaves(tiny.params(model=mesh_world.MODEL))
  num_updates = trainer.batch_settings.num_minibatches
  # Each of two devices sends as much as it has, and a few counts.
  assert 1 <= sent(1) / (num_updates * sum(x.nbytes for x in params)) < 1.01
  assert sent(100) == sent(1)


@pytest.mark.parametrize(
  ("shape", "rules", "axes"),
  [
    (MeshShape(data=2, fsdp=4), {}, ("data",)),
    (MeshShape(fsdp=8), {}, ()),
    (MeshShape(data=2, fsdp=2), {"layers": ("data",)}, ()),
    (MeshShape(data=2, fsdp=2), {"embed": ()}, ("data", "fsdp")),
  ],
  ids=str,
)
def test_an_axis_is_data_parallel_if_it_splits_rows_alone(shape, rules, axes):
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  layout = mesh_lib.Layout(mesh=mesh, rules=sections.ShardingRules(**rules))
  assert layout.data_parallel == axes
  inside = layout.in_data_parallel()
  assert not {*axes} & inside.axes
  assert not {*axes} & {*inside.rules.batch}


@pytest.mark.slow
def test_moments_are_sharded_like_their_parameters():
  trainer = trained(MIXED)[0]
  params = jax.tree.leaves(trainer.state.policy.params)
  adam = optax.tree.get(trainer.state.policy.opt_state, "mu")
  for moment, param in zip(jax.tree.leaves(adam), params, strict=True):
    assert moment.sharding == param.sharding
  assert any(not p.sharding.is_fully_replicated for p in params)


@pytest.mark.slow
@pytest.mark.nightly  # test_trainer_processes.py has runs of two
@pytest.mark.timeout(450)
def test_two_processes_train_like_one():
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  script = pathlib.Path(__file__).with_name("two_processes.py")
  root = str(script.parents[1])
  shape = json.dumps(dataclasses.asdict(MIXED))
  four = "--xla_force_host_platform_device_count=4"
  processes = [
    subprocess.Popen(
      [sys.executable, str(script), str(port), "2", str(process), shape],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ
      | {
        "PYTHONPATH": root,
        "XLA_FLAGS": four,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
      },
    )
    for process in range(2)
  ]
  try:
    ended = [process.communicate(timeout=300) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (_, errors) in zip(processes, ended, strict=True):
    assert process.returncode == 0, errors
  first, second = (json.loads(out.splitlines()[-1]) for out, _ in ended)
  assert first == second
  trainer, steps, _ = trained(MIXED)
  assert_same(first["steps"], jax.tree.map(np.ndarray.tolist, steps))
  (group, *_) = test_train_step.groups()
  logprobs = np.concatenate(trainer.logprobs(group.trajectories))
  assert_same(first["logprobs"], logprobs.tolist())


@pytest.mark.parametrize("vocab_chunk", [1, 6, 24])
def test_a_vocabulary_in_parts_is_the_whole(vocab_chunk):
  hidden, head, tokens = test_losses.make_inputs()
  head = np.concatenate([head, head[:, :1]], axis=1)  # two parts of 12
  mesh = mesh_lib.make_mesh(jax.devices()[:2], MeshShape(tensor=2))
  layout = mesh_lib.Layout(mesh=mesh, rules=mesh_lib.TRAIN_RULES)

  def both(hidden, head, **options):
    logprobs, entropy = likelihood.token_logprobs_and_entropy(
      hidden,
      head.T,
      jnp.asarray(tokens),
      jnp.asarray(test_losses.SEGMENT_IDS),
      temperature=test_losses.TEMPERATURE,
      **options,
    )
    weights = np.arange(test_losses.T, dtype=np.float32)
    return (logprobs * weights[None] + entropy**2).sum(), (logprobs, entropy)

  def run(**options):
    loss = functools.partial(both, **options)
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    return gradient(jnp.asarray(hidden), jnp.asarray(head))

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    run(vocab_chunk=vocab_chunk, layout=layout),
    run(vocab_chunk=24),
  )


def test_parameters_are_never_whole_on_one_device():
  mesh = mesh_lib.make_mesh(jax.devices(), MeshShape(fsdp=8))
  shardings = mesh_lib.shardings(
    mesh,
    mesh_lib.TRAIN_RULES,
    transformer.logical_axes(mesh_world.MODEL, is_stacked=True),
  )
  init = functools.partial(transformer.init_params, mesh_world.MODEL)
  key = jax.random.key(0)
  compiled = jax.jit(init, out_shardings=shardings).lower(key).compile()
  memory = compiled.memory_analysis()
  num_bytes = 4 * mesh_world.MODEL.num_params
  on_one_device = memory.temp_size_in_bytes + memory.output_size_in_bytes
  assert on_one_device < num_bytes / 3
  # And what they are does not depend on the mesh.
  jax.tree.map(np.testing.assert_array_equal, compiled(key), jax.jit(init)(key))


def test_a_run_begins_with_parameters_in_parts():
  mesh = mesh_lib.make_mesh(jax.devices(), MeshShape(fsdp=8))
  setup = dataclasses.replace(
    setup_lib.resolve(tiny_config.get_config(), jax.devices()[:2]),
    model=mesh_world.MODEL,
    train_mesh=mesh,
  )
  params = initial_params.before_training(setup)
  matrices = [x for x in jax.tree.leaves(params) if x.ndim > 2]
  assert matrices
  for x in matrices:
    assert np.prod(x.sharding.shard_shape(x.shape)) == x.size // 8


def test_host_arrays_are_sent_in_parts():
  mesh = mesh_lib.make_mesh(jax.devices(), MIXED)
  here = mesh_lib.sharding(mesh, mesh_lib.TRAIN_RULES, "batch", "tokens")
  rows = np.arange(64).reshape(4, 16)
  placed = mesh_lib.put({"rows": rows}, here)["rows"]
  np.testing.assert_array_equal(placed, rows)
  assert {x.data.shape for x in placed.addressable_shards} == {(2, 8)}
