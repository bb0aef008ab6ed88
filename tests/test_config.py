"""Wrong settings are refused in one line; a config survives JSON."""

import json
import pathlib
import re

from ml_collections import config_dict
import pytest

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import mesh_shape
from jaxrl_async.config import sections
from jaxrl_async.config import settings_page
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.storage import config_json


def put(config, path, value):
  *sections, name = path.split(".")
  for section in sections:
    config = getattr(config, section)
  setattr(config, name, value)


@pytest.mark.parametrize(
  ("path", "hint"),
  [
    ("run.seed", "; did you mean seed?"),
    ("eval.evry", "; did you mean eval.every?"),
    ("train.steps", "; did you mean train.num_steps or "),
    ("tran.num_steps", "; did you mean train.num_steps or "),
    ("algorithm.max_stalenes", "; did you mean algorithm.max_staleness?"),
    ("nothing.like_it", ""),
  ],
)
def test_a_field_that_is_not_there_is_refused_with_the_right_one(path, hint):
  start = f"{path}: there is no such field{hint}"
  with pytest.raises(sections.ConfigError, match=re.escape(start)):
    fields_lib.set_at(sections.Config(), path, 3)


@pytest.mark.parametrize(
  "settings, num_devices, train, rollout",
  [
    ({}, 1, {}, {}),
    ({}, 8, {}, {}),
    ({"train_fsdp": -1}, 1, {}, {}),
    ({"train_fsdp": -1}, 8, {"fsdp": 7}, {}),
    (
      {"train_fsdp": -1, "train_tensor": 2},
      8,
      {"fsdp": 3, "tensor": 2},
      {},
    ),
    ({"train_context": -1, "train_data": 2}, 8, {"context": 3, "data": 2}, {}),
    ({"train_data": 4, "rollout_data": -1}, 8, {"data": 4}, {"data": 4}),
    ({"rollout_tensor": 2, "train_data": 6}, 8, {"data": 6}, {"tensor": 2}),
  ],
)
def test_the_slices_take_the_devices_that_are_left(
  settings, num_devices, train, rollout
):
  mesh = sections.MeshSection(**settings)
  assert mesh_shape.of_slices(mesh, num_devices) == (
    mesh_lib.MeshShape(**train),
    mesh_lib.MeshShape(**rollout),
  )


@pytest.mark.parametrize(
  "settings, num_devices, field",
  [
    ({"train_data": 8}, 8, "mesh"),
    ({"train_data": 2}, 1, "mesh"),
    ({"train_data": 4, "rollout_data": 8, "rollout_tensor": -1}, 8, "mesh"),
    ({"train_data": -1, "rollout_data": -1}, 8, "mesh.rollout_data"),
  ],
)
def test_more_devices_than_there_are_is_an_error(settings, num_devices, field):
  mesh = sections.MeshSection(**settings)
  with pytest.raises(sections.ConfigError, match=f"^{field}: "):
    mesh_shape.of_slices(mesh, num_devices)


@pytest.mark.parametrize(
  "path, value, axis",
  [
    ("train.rows_per_microbatch", 7, "train_fsdp"),
    ("train.tokens_per_row", 511, "train_context"),
    ("rollout.num_slots", 31, "rollout_data"),
  ],
)
def test_rows_and_slots_divide_over_their_axis(path, value, axis):
  config = sections.Config()
  put(config, f"mesh.{axis}", 2)
  config_checks.validate(config, 8)
  put(config, path, value)
  with pytest.raises(sections.ConfigError, match=path):
    config_checks.validate(config, 8)


def test_the_page_of_all_settings_is_that_of_the_source():
  path = pathlib.Path(__file__).parents[1] / "docs/reference/settings.md"
  assert path.read_text() == settings_page.page()


def changed_config():
  config = sections.Config()
  config.task.params = config_dict.ConfigDict({"min_terms": 3, "sizes": [1]})
  config.rollout.kv_on_adopt = sections.KvOnAdopt.KEEP
  config.rollout.prefill_buckets = (32, 64, 128)
  config.mesh.train_rules.kv_heads = ()
  config.mesh.rollout_rules.mlp = ("data", "tensor")
  config.train.optimizer.learning_rate = 1e-3
  return config


def test_a_config_survives_json():
  text = json.dumps(fields_lib.plain(changed_config()), allow_nan=False)
  read = config_json.from_dict(json.loads(text))
  assert read == changed_config()
  assert read != sections.Config()
  config_checks.validate(read, 2)


def test_a_stored_config_that_lacks_a_field_is_refused():
  values = config_json.to_stored(sections.Config())
  del values["train"]["vocab_chunk"]
  with pytest.raises(sections.ConfigError, match="^train.vocab_chunk: .*miss"):
    config_json.from_stored(values)


def test_a_stored_config_with_other_fields_is_refused():
  values = fields_lib.plain(sections.Config())
  values["train"]["vocab_chunks"] = 1
  with pytest.raises(sections.ConfigError, match="^train.vocab_chunks: unk"):
    config_json.from_dict(values)
  del values["train"]["vocab_chunks"]
  for value in ("pigeon", ["orbax"]):
    values["transfer"]["channel"] = value
    with pytest.raises(
      sections.ConfigError, match="one of auto, orbax, direct"
    ):
      config_json.from_dict(values)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_config_of_another_format_is_refused(tmp_path, more):
  config_json.write(sections.Config(), tmp_path)
  path = tmp_path / "config.json"
  values = json.loads(path.read_text())
  assert config_json.read(tmp_path) == sections.Config()
  values["format"] += more
  path.write_text(json.dumps(values))
  with pytest.raises(sections.ConfigError, match="another version; this one"):
    config_json.read(tmp_path)


def test_differences_name_the_fields():
  found = config_json.differences(sections.Config(), changed_config())
  assert list(found) == [
    "mesh.train_rules.kv_heads",
    "mesh.rollout_rules.mlp",
    "task.params",
    "rollout.prefill_buckets",
    "rollout.kv_on_adopt",
    "train.optimizer.learning_rate",
  ]
  assert found["train.optimizer.learning_rate"] == (3e-4, 1e-3)
