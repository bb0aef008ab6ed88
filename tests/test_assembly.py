"""What only a whole config can tell: sizes against devices, names."""

import dataclasses
import pathlib

import byte_level
import jax
from ml_collections import config_dict
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from configs import tiny
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import continued_settings
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import dry_run
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.planning import memory_estimate
from jaxrl_async.storage import config_json
from jaxrl_async.text import tokenizer as tokenizer_lib


@pytest.mark.parametrize(
  ("groups_per_step", "num_groups"), [(4, 1_000), (512, 10_240)]
)
def test_large_batches_may_filter_more_groups_in_a_row(
  groups_per_step, num_groups
):
  config = tiny.get_config()
  config.algorithm.groups_per_step = groups_per_step
  made = assembly.coordinator_settings(config, has_own_loss=False)
  assert made.max_filtered_groups == num_groups


@pytest.mark.parametrize(
  ("axis", "size", "what"),
  [
    ("train_tensor", 3, "98 (vocabulary of"),
    ("rollout_tensor", 7, "4 (number of heads of"),
    ("train_fsdp", 3, "32 (model dimension of"),
  ],
)
def test_a_model_that_a_mesh_cannot_split_is_refused_in_one_line(
  axis, size, what
):
  config = tiny.get_config()
  config.train.rows_per_microbatch = 12  # which all of them divide
  config.warm_start.rows_per_batch = 12
  setattr(config.mesh, axis, size)
  with pytest.raises(sections.ConfigError) as caught:
    checks.checked(config, jax.devices()[:8])
  assert str(caught.value).startswith(
    f"mesh.{axis}: {size} does not divide {what}"
  )
  assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [{}, {"train_fsdp": 4, "train_data": 1}, {"train_data": 3}],
)
def test_a_mesh_that_splits_the_model_is_accepted(sizes):
  config = tiny.get_config()
  config.train.rows_per_microbatch = 12  # which all of them divide
  config.warm_start.rows_per_batch = 12
  for axis, size in sizes.items():
    setattr(config.mesh, axis, size)
  checks.checked(config, jax.devices()[:8])


@pytest.mark.parametrize(
  ("rule", "axes", "message"),
  [
    ("embed", ("tensor",), "embed: tensor already splits vocab of an array"),
    ("mlp", ("data",), "mlp: data already splits batch of an array"),
    ("layers", ("fsdp",), "embed: fsdp already splits layers of an array"),
    ("batch", ("context",), "tokens: context already splits batch of an array"),
  ],
)
def test_rules_that_split_an_array_twice_are_refused_in_one_line(
  rule, axes, message
):
  config = tiny.get_config()
  setattr(config.mesh.train_rules, rule, axes)
  with pytest.raises(sections.ConfigError) as caught:
    checks.checked(config, jax.devices()[:8])
  assert str(caught.value).startswith(f"mesh.train_rules.{message}")
  assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_a_mesh_cannot_split_may_stay_whole():
  config = tiny.get_config()
  config.mesh.train_tensor = 4
  with pytest.raises(sections.ConfigError, match="rules.vocab=..$"):
    checks.checked(config, jax.devices()[:8])
  config.mesh.train_rules.vocab = ()
  with pytest.raises(sections.ConfigError, match="rules.kv_heads=..$"):
    checks.checked(config, jax.devices()[:8])
  config.mesh.train_rules.kv_heads = ()
  checks.checked(config, jax.devices()[:8])


def test_a_model_without_a_name_is_refused():
  config = tiny.get_config()
  config.model.name = "tinny"
  with pytest.raises(sections.ConfigError, match="^model.name: 'tinny'"):
    checks.checked(config, jax.devices()[:2])


def resolved(config):
  return setup_lib.resolve(config, jax.devices()[:2])


def warm_started(config):
  return assembly.warm_start(resolved(config), lambda step, loss: None)


def test_a_warm_start_may_come_from_a_checkpoint(tmp_path):
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  params = warm_started(config)
  initial_params.save(tmp_path / "params", params)
  config.seed = 5  # another seed's initialisation
  assert not np.array_equal(
    params["embedding"], warm_started(config)["embedding"]
  )
  config.warm_start.checkpoint = str(tmp_path / "params")
  loaded = warm_started(config)
  jax.tree.map(np.testing.assert_array_equal, params, loaded)


def test_a_warm_start_from_what_does_not_fit_is_refused(tmp_path):
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  initial_params.save(tmp_path / "params", warm_started(config))
  config.model.name = "quickstart"
  for directory in (tmp_path, tmp_path / "params"):
    config.warm_start.checkpoint = str(directory)
    with pytest.raises(sections.ConfigError, match="^warm_start.checkpoint"):
      warm_started(config)


def write_pretrained(directory, config, vocab_size=98, **more):
  """A pretrained model of a run's architecture: weights, and its tokenizer."""
  model = dataclasses.replace(resolved(config).model, vocab_size=vocab_size)
  params = jax.tree.map(
    lambda x: np.random.default_rng(x.size).normal(size=x.shape).astype("f4"),
    jax.eval_shape(
      lambda key: transformer.init_params(model, key), jax.random.key(0)
    ),
  )
  hf_weights.save(directory, model, params, **more)
  tokenizer_lib.character_level().save(directory)
  return params


def test_a_warm_start_may_come_from_pretrained_weights(tmp_path):
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  params = write_pretrained(tmp_path / "same", config)
  config.warm_start.checkpoint = str(tmp_path / "same")
  loaded = warm_started(config)
  jax.tree.map(np.testing.assert_array_equal, params, loaded)
  write_pretrained(tmp_path / "other", config, vocab_size=99)
  config.warm_start.checkpoint = str(tmp_path / "other")
  with pytest.raises(
    sections.ConfigError,
    match="^warm_start.checkpoint: .* has vocab_size 99, .* 98$",
  ):
    warm_started(config)
  (tmp_path / "other" / "model.safetensors").unlink()
  with pytest.raises(sections.ConfigError, match="^warm_start.checkpoint"):
    warm_started(config)


def test_a_model_may_be_a_pretrained_one(tmp_path):
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  params = write_pretrained(tmp_path, config, vocab_size=104)
  config.model.name = str(tmp_path)
  setup = checks.checked(config, jax.devices()[:2])
  assert setup.pretrained == tmp_path
  assert setup.tokenizer.vocab_size == 98
  assert setup.model.vocab_size == 104
  assert "vocabulary 104" in dry_run.describe(setup)
  loaded = warm_started(config)
  jax.tree.map(np.testing.assert_array_equal, params, loaded)


@pytest.mark.slow
def test_a_built_in_model_may_have_a_tokenizer_from_a_directory(tmp_path):
  config = tiny.get_config()
  byte_level.save(tmp_path)
  config.model.tokenizer = str(tmp_path)
  setup = resolved(config)
  assert setup.pretrained is None
  assert setup.tokenizer.digest() == tokenizer_lib.load(tmp_path).digest()
  assert setup.model.vocab_size == setup.tokenizer.vocab_size > 98
  (tmp_path / "tokenizer.json").unlink()
  with pytest.raises(sections.ConfigError, match="^model.tokenizer: "):
    resolved(config)


def another_tokenizer(config):
  config.model.tokenizer = config.model.name


def no_file(name):
  return lambda config: (pathlib.Path(config.model.name) / name).unlink()


@pytest.mark.parametrize(
  ("vocab_size", "change", "message"),
  [
    (98, another_tokenizer, "model.tokenizer: .* has a tokenizer"),
    (98, no_file("tokenizer.json"), "model.name: .*tokenizer.json"),
    (98, no_file("config.json"), "model.name: .*config.json"),
    (97, lambda config: None, "model.name: .*98 tokens"),
  ],
)
def test_a_pretrained_model_that_lacks_something_is_refused(
  tmp_path, vocab_size, change, message
):
  config = tiny.get_config()
  write_pretrained(tmp_path, config, vocab_size=vocab_size)
  config.model.name = str(tmp_path)
  change(config)
  with pytest.raises(sections.ConfigError, match=f"^{message}"):
    checks.checked(config, jax.devices()[:2])


def truncate(path):
  path.write_bytes(path.read_bytes()[:-100])


def wrong_shape(path):
  tensors = safetensors_numpy.load_file(path)
  name = "model.norm.weight"
  safetensors_numpy.save_file(tensors | {name: tensors[name][:-2]}, path)


@pytest.mark.parametrize(
  ("shard", "damage", "message"),
  [
    (1, truncate, "model-00002-of-.*incomplete"),
    (1, pathlib.Path.unlink, "model-00002-of-.* does not exist"),
    (-1, wrong_shape, r"model.norm.weight has shape \(30,\), expected \(32,\)"),
  ],
)
def test_damaged_weights_are_refused_before_anything_compiles(
  tmp_path, shard, damage, message
):
  config = tiny.get_config()
  write_pretrained(tmp_path, config, max_shard_bytes=30_000)
  damage(sorted(tmp_path.glob("*.safetensors"))[shard])
  for field in ("model.name", "warm_start.checkpoint"):
    config = tiny.get_config()
    section, name = field.split(".")
    setattr(getattr(config, section), name, str(tmp_path))
    with pytest.raises(
      sections.ConfigError, match=f"^{field}: .*{message}"
    ) as caught:
      checks.checked(config, jax.devices()[:2])
    assert "\n" not in str(caught.value)


def test_weights_of_another_architecture_are_refused_before_compiling(tmp_path):
  config = tiny.get_config()
  config.model.name = "quickstart"
  write_pretrained(tmp_path, config)
  config = tiny.get_config()
  config.warm_start.checkpoint = str(tmp_path)
  words = (
    "^warm_start.checkpoint: .* has model_dim 96, the model of this run 32"
  )
  with pytest.raises(sections.ConfigError, match=words):
    checks.checked(config, jax.devices()[:2])


def test_a_dry_run_needs_no_weights_but_a_run_does(tmp_path):
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  write_pretrained(tmp_path, config)
  (tmp_path / hf_weights.WEIGHTS_FILE).unlink()
  config.model.name = str(tmp_path)
  checks.checked(config, jax.devices()[:2])
  with pytest.raises(sections.ConfigError, match="^model.name: .* neither"):
    warm_started(config)


def test_a_workdir_keeps_the_config_it_was_made_with(tmp_path):
  workdir = tmp_path / "new"
  config = tiny.get_config()
  config.task.params = config_dict.ConfigDict({"operators": ("+", "-")})
  continued_settings.check_file(config, workdir)
  config_json.write(config, workdir)
  before = (workdir / "config.json").read_text()
  config.seed += 1
  with pytest.raises(sections.ConfigError, match="^workdir: .*seed"):
    continued_settings.check_file(config, workdir)
  config.seed -= 1
  config.train.num_steps += 1
  continued_settings.check_file(config, workdir)
  config_json.write(config, workdir)
  assert (workdir / "config.json").read_text() != before


@dataclasses.dataclass(frozen=True)
class Described:
  """A chip; a second slice has those of the first one again."""

  id: int


def test_a_mesh_has_chips_of_one_tpu_slice():
  config = tiny.get_config()
  two_slices = 2 * [Described(id) for id in range(4)]
  config.mesh = sections.MeshSection(train_fsdp=4, rollout_data=4)
  setup = setup_lib.resolve(config, two_slices)
  train, rollout = setup.train_mesh, setup.rollout_mesh
  assert list(train.devices.flat) == list(rollout.devices.flat)
  config.mesh = sections.MeshSection(train_fsdp=3, rollout_data=5)
  with pytest.raises(sections.ConfigError, match="^mesh.rollout_data: .*two"):
    setup_lib.resolve(config, two_slices)


@pytest.mark.slow
def test_a_device_that_both_slices_share_has_to_hold_both():
  config = tiny.get_config()

  def check(device_bytes):
    checks.checked(config, jax.devices()[:1], device_bytes=device_bytes)

  setup = setup_lib.resolve(config, jax.devices()[:1])
  training = device_checks.training_memory(setup).at_least
  rollout = memory_estimate.least_rollout(device_checks.rollout_memory(setup))
  assert 0 < rollout < training
  check(training + rollout)
  with pytest.raises(sections.ConfigError, match="^model.name: both slices"):
    check(training + rollout - 1)
  with pytest.raises(sections.ConfigError, match=": an update needs"):
    check(training - 1)
