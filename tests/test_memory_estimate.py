"""What a training slice needs, by arithmetic and as compiled."""

import dataclasses
import math
import pathlib
import runpy

import jax
import pytest
import test_train_step
import tiny

from configs import tiny as tiny_config
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import topology
from jaxrl_async.devices import tpu_chips
from jaxrl_async.models import configs
from jaxrl_async.planning import aot
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import packing
from jaxrl_async.training import trainer as trainer_lib

ROOT = pathlib.Path(__file__).parents[1]

Remat = sections.Remat
MODEL = configs.ModelConfig(
  vocab_size=2_000,
  model_dim=256,
  num_layers=4,
  num_heads=8,
  num_kv_heads=4,
  head_dim=32,
  mlp_dim=768,
  has_qk_norm=True,
)
TRAIN = sections.TrainSection(
  tokens_per_row=512, rows_per_microbatch=4, vocab_chunk=1_024
)
GIB = 2**30
NIGHTLY = pytest.mark.nightly


NOTHING = memory_estimate.ModelBytes(trainable=0, frozen=0, optimizer=0)


def estimate(
  remat,
  *,
  attention="blocks",
  shape=mesh_lib.ONE,
  policy=NOTHING,
  others=(),
):
  return memory_estimate.training(
    MODEL,
    shape,
    mesh_lib.TRAIN_RULES,
    dataclasses.replace(TRAIN, attention=attention),
    sections.ModelSection(remat=remat),
    policy=policy,
    others=others,
    tokens_per_step=4 * 4 * 512,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("remat", "attention", "shape"),
  [
    (Remat.NONE, "xla", mesh_lib.ONE),
    pytest.param(Remat.FULL, "blocks", mesh_lib.ONE, marks=NIGHTLY),
    pytest.param(
      Remat.FULL, "blocks", mesh_lib.MeshShape(fsdp=4), marks=NIGHTLY
    ),
  ],
)
def test_the_estimate_is_near_what_is_compiled(remat, attention, shape):
  trainer = trainer_lib.Trainer(
    mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
    models=tiny.policy_settings(MODEL, sections.OptimizerSection()),
    forward=dataclasses.replace(
      test_train_step.FORWARD,
      model=MODEL,
      remat=remat,
      attention=attention,
      vocab_chunk=TRAIN.vocab_chunk,
    ),
    loss=test_train_step.LOSS,
    stages=test_train_step.STAGES,
    batch=packing.BatchSettings(
      tokens_per_row=TRAIN.tokens_per_row,
      rows_per_microbatch=TRAIN.rows_per_microbatch,
      num_minibatches=2,
      min_microbatches=2,
      advantages=test_train_step.ADVANTAGES,
    ),
    num_steps=1,
    decay=1.0,
    rollout_dtype="float32",
    busy=metrics_lib.BusyClock(),
  )
  (update,) = [x for x in trainer.programs() if x.name == "update"]
  state = trainer.abstract_state()
  guess = estimate(
    remat,
    attention=attention,
    shape=shape,
    policy=device_checks.bytes_of(state.policy),
  )
  compiled = aot.compile_program(update).memory_bytes
  # Only large arrays are counted, and XLA shares buffers as it likes.
  assert compiled / 1.5 < guess.total < 1.5 * compiled
  assert guess.at_least < compiled


def test_what_is_kept_is_a_layers_input_or_every_product():
  tokens, layers = 4 * 512, 4
  of = {remat: estimate(remat) for remat in Remat}
  assert of[Remat.OFFLOAD].activations == 0
  assert of[Remat.FULL].activations == 4 * tokens * layers * 256
  assert of[Remat.ATTENTION].activations == 4 * tokens * layers * (256 + 256)
  # Input, query, key, value, mixed, output, gate, up.
  products = 256 + 256 + 128 + 128 + 256 + 256 + 768 + 768
  assert of[Remat.DOTS].activations == 4 * tokens * layers * products
  assert of[Remat.NONE].activations > of[Remat.DOTS].activations
  scores = estimate(Remat.NONE, attention="xla")
  more = scores.activations - of[Remat.NONE].activations
  # Numerators and shares, and blocks keep what they gave twice.
  assert more == 4 * tokens * layers * (2 * 8 * 512 - 256)
  assert scores.least_activations == of[Remat.DOTS].activations


def test_other_models_cost_their_weights_and_no_more():
  policy = memory_estimate.ModelBytes(trainable=100, frozen=10, optimizer=200)
  frozen = memory_estimate.ModelBytes(trainable=0, frozen=70, optimizer=0)
  alone = estimate(Remat.FULL, policy=policy)
  assert (alone.weights, alone.gradients, alone.optimizer) == (110, 200, 200)
  beside = estimate(Remat.FULL, policy=policy, others=[frozen, frozen])
  assert beside.total == alone.total + 2 * 70
  assert beside.at_least == alone.at_least + 2 * 70
  assert beside == dataclasses.replace(alone, weights=110 + 2 * 70)


def test_rows_tokens_and_heads_are_split():
  whole = estimate(Remat.DOTS)
  for shape in (
    mesh_lib.MeshShape(data=2, fsdp=2),
    mesh_lib.MeshShape(context=4),
  ):
    part = estimate(Remat.DOTS, shape=shape)
    assert part.activations == whole.activations // 4
    assert part.batch == whole.batch // 4
  part = estimate(Remat.DOTS, shape=mesh_lib.MeshShape(tensor=4))
  layer_input_and_output = 4 * 4 * 512 * 4 * 2 * 256
  assert part.activations - layer_input_and_output == (
    (whole.activations - layer_input_and_output) // 4
  )


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    (
      {"weights": GIB, "optimizer": 4 * GIB, "gradients": 2 * GIB},
      "train.optimizer: an update needs at least 8.0 GiB a device, which has"
      " 7.5 GiB; 4.0 GiB of it are optimizer state; use"
      " train.optimizer.offload=True",
    ),
    ({"least_activations": 9 * GIB}, "model.remat: .*rows_per_microbatch"),
    ({"weights": 3 * GIB, "gradients": 6 * GIB}, "mesh.train_fsdp: .*9.0 GiB"),
    ({"least_working": 9 * GIB}, "train.rows_per_microbatch: .*vocab_chunk"),
  ],
)
def test_what_cannot_fit_is_refused_with_its_largest_part(parts, message):
  names = [field.name for field in dataclasses.fields(memory_estimate.Estimate)]
  zeros = dict.fromkeys(names, 0) | {"least_activations": GIB}
  needs = memory_estimate.Estimate(**zeros | parts)
  memory_estimate.check(needs, None)
  memory_estimate.check(needs, needs.at_least)
  with pytest.raises(sections.ConfigError, match=f"^{message}") as caught:
    memory_estimate.check(needs, 7.5 * GIB)
  assert "\n" not in str(caught.value)


def test_a_layers_products_its_scores_or_the_logits_are_there_at_once():
  tokens, dots = 4 * 512, estimate(Remat.DOTS)
  logits = 4 * tokens * TRAIN.vocab_chunk
  assert dots.least_working == logits
  a_layer = dots.activations // 4
  for remat in (Remat.FULL, Remat.ATTENTION, Remat.OFFLOAD):
    assert estimate(remat).least_working == max(logits, a_layer)
  scores = estimate(Remat.DOTS, attention="xla").least_working
  assert scores == 4 * tokens * 8 * 512
  for remat in Remat:
    policy = memory_estimate.ModelBytes(trainable=99, frozen=1, optimizer=200)
    needs = estimate(remat, policy=policy)
    assert needs.total > needs.at_least
    memory_estimate.check(needs, needs.at_least)


@dataclasses.dataclass(frozen=True)
class Described:
  """A device that is not here."""

  id: int
  device_kind: str = "TPU v5 lite"
  platform: str = "tpu"
  process_index: int = 0


def test_a_run_that_a_described_chip_cannot_hold_is_refused_before_compiling():
  devices = [Described(id) for id in range(2)]
  assert topology.memory_bytes(devices[0]) == 15.75 * GIB
  assert topology.memory_bytes(jax.devices()[0]) is None
  config = tiny_config.get_config()
  checks.checked(config, devices)
  config.train.rows_per_microbatch = 65_536
  config.warm_start.rows_per_batch = 65_536
  config.train.tokens_per_row = 16 * 48
  with pytest.raises(
    sections.ConfigError, match="^model.remat: .*15.8 GiB.*activations"
  ):
    checks.checked(config, devices)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"rollout.num_slots": 10**7}, "rollout.num_slots: .*the cache"),
    ({"rollout.prefill_rows": 10**8}, "rollout.prefill_rows: .*prefill call"),
    ({"algorithm.groups_per_step": 2**16}, ""),
    (
      {"algorithm.groups_per_step": 2**16, "algorithm.group_size": 2**14},
      "algorithm.groups_per_step: .*a train step's batch",
    ),
    ({"warm_start.rows_per_batch": 2**16}, ""),
    ({"train.tokens_per_row": 2**31 - 1}, "model.remat: .*activations"),
  ],
)
def test_what_the_host_of_a_cpu_cannot_hold_is_refused(
  monkeypatch, settings, message
):
  monkeypatch.setattr(memory_estimate, "host_bytes", lambda: 8 * GIB)
  config = tiny_config.get_config()
  config.train.rows_per_microbatch = 1
  for path, value in settings.items():
    section, name = path.split(".")
    setattr(getattr(config, section), name, value)
  devices = jax.devices()[:2]
  config_checks.validate(config, 2)
  if not message:
    checks.checked(config, devices)
    return
  with pytest.raises(sections.ConfigError, match=f"^{message}"):
    checks.checked(config, devices)


def test_pages_are_named_where_they_are_what_is_too_large():
  section = sections.RolloutSection(num_pages=64)
  parts = {"weights": 2, "cache": 5, "prefill": 0, "prefilled": 3}
  memory_estimate.check_rollout(parts, section, None)
  memory_estimate.check_rollout(parts, section, 9)
  with pytest.raises(sections.ConfigError, match="^rollout.num_pages: "):
    memory_estimate.check_rollout(parts, section, 8)


def test_a_batch_of_the_warm_start_has_to_fit():
  section = sections.WarmStartSection(num_steps=1, rows_per_batch=2**16)
  memory_estimate.check_warm_start(section, 64, GIB)
  with pytest.raises(sections.ConfigError, match="^warm_start.rows_per_ba"):
    memory_estimate.check_warm_start(section, 2**20, GIB)
  section.num_steps = 0
  memory_estimate.check_warm_start(section, 2**20, GIB)


def test_the_hosts_memory_is_some():
  assert 2**28 < memory_estimate.host_bytes() < 2**50


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "length"),
  [
    ("tpu_1p5b", "8k"),
    ("tpu_7b", "32k"),
    ("tpu_32b", "32k"),
    pytest.param("tpu_1p5b", "32k", marks=NIGHTLY),
    pytest.param("tpu_7b", "8k", marks=NIGHTLY),
    pytest.param("tpu_32b", "8k", marks=NIGHTLY),
  ],
)
def test_the_tpu_configs_are_valid_on_their_slices(name, length):
  file = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))
  for slice_name, mesh in file["SLICES"].items():
    config = file["get_config"](f"{length}@{slice_name}")
    count, chip, sizes = tpu_chips.parse(slice_name)
    num_devices = count * math.prod(map(int, sizes.split("x")))
    devices = [
      Described(id, device_kind=tpu_chips.CHIPS[chip].kind)
      for id in range(num_devices)
    ]
    config_checks.validate(config, num_devices)
    checks.checked(config, devices)
    more = 4 if length == "32k" and chip != "v5p" else 1
    assert config.mesh.train_context == mesh.train_context * more
    assert config.mesh.train_fsdp * more == mesh.train_fsdp


def test_no_moments_are_counted_that_the_host_holds():
  config = tiny_config.get_config()

  def training_memory():
    setup = setup_lib.resolve(config, jax.devices()[:2])
    return device_checks.training_memory(setup)

  model = setup_lib.resolve(config, jax.devices()[:2]).model
  here = training_memory()
  assert here.weights == 4 * model.num_params
  assert here.optimizer == pytest.approx(2 * here.weights, rel=1e-3)
  config.train.optimizer.state_dtype = "bfloat16"
  small = training_memory()
  assert small.optimizer == pytest.approx(1.5 * here.weights, rel=1e-3)
  config.train.optimizer.offload = True
  there = training_memory()
  assert there.optimizer == 8  # two counts
  assert math.isclose(here.total - there.total, here.optimizer - 8)
