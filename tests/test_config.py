"""Wrong settings are refused in one line; a config survives JSON."""

import json
import pathlib
import re

from ml_collections import config_dict
import pytest

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.config import settings_page
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.run import config_checks
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


def test_the_defaults_are_valid():
  config_checks.validate(sections.Config(), 2)
  config_checks.validate(sections.Config(), 1)


@pytest.mark.parametrize(
  "path, value",
  [
    # wrong types
    ("train.num_steps", 1.5),
    ("train.num_steps", True),
    ("train.num_steps", "60"),
    ("train.optimizer.learning_rate", "3e-4"),
    ("train.optimizer.learning_rate", float("nan")),
    ("train.optimizer.name", "adamw"),
    ("rollout.prefill_buckets", (64, 128.0)),
    ("rollout.prefill_buckets", [64, 128]),
    ("model.remat", 1),
    ("task.params", {}),
    ("eval", None),
    # bounds
    ("algorithm.max_staleness", -1),
    ("algorithm.group_size", 1),
    ("algorithm.groups_per_step", 0),
    ("algorithm.behavior_weight_cap", 0.5),
    ("algorithm.clip_low", 1.5),
    ("algorithm.clip_high", -0.1),
    ("warm_start.num_steps", -1),
    ("warm_start.corrupted_frac", 1.01),
    ("rollout.num_slots", 0),
    ("rollout.temperature", 0.0),
    ("eval.temperature", -1.0),
    ("run.stall_timeout_s", 0.0),
    ("train.optimizer.b2", 1.0),
    ("train.optimizer.max_grad_norm", 0.0),
    ("warm_start.optimizer.eps", 0.0),
    ("train.optimizer.state_dtype", "float16"),
    ("seed", 256),
    ("seed", -1),
    ("model.compute_dtype", "float31"),
    ("rollout.dtype", "int8"),
    ("model.name", ""),
    ("model.name", "x" * 5_000),
    ("model.name", "nu\0l"),
    # what float32, timers and the system hold
    ("rollout.temperature", 1e-320),
    ("rollout.temperature", 1e-30),
    ("eval.temperature", 1e-5),
    ("train.optimizer.learning_rate", 1e30),
    ("warm_start.optimizer.learning_rate", 2),
    ("train.optimizer.weight_decay", 1e9),
    ("train.optimizer.b2", 1 - 1e-9),
    ("train.optimizer.eps", 1e-45),
    ("train.optimizer.eps", 10**30),
    ("train.optimizer.max_grad_norm", 10**400),
    ("algorithm.behavior_weight_cap", 1e39),
    ("task.reward_timeout_s", 1e-320),
    ("task.reward_timeout_s", 1e10),
    ("run.stall_timeout_s", 1e30),
    ("run.join_timeout_s", 1e-9),
    ("task.reward_workers", 100_000),
    ("warm_start.num_examples", 10**9),
    ("eval.num_items", 2**31),
    ("algorithm.max_staleness", 2**31),
    ("rollout.num_slots", 2**63),
    ("rollout.decode_steps_per_call", 129),
    ("train.num_steps", 2**31 - 1),
    ("train.num_steps", 10**5_000),
    ("rollout.prefill_buckets", tuple(range(64, 129))),
    # what config.json would not give back
    ("task.params", config_dict.ConfigDict({"a": float("nan")})),
    ("task.params", config_dict.ConfigDict({"a": object()})),
    # names
    ("warm_start.checkpoint", "/no/such/directory"),
    ("transfer.directory", __file__),
    ("transfer.directory", f"{__file__}/below"),
    ("transfer.directory", "/proc/none"),
    ("transfer.directory", "x" * 300),
    ("transfer.directory", "x/" * 3_000),
    ("transfer.directory", "\udcff"),
    ("train.attention", "flash"),
    ("rollout.attention", "gpu_paged"),
    # lengths
    ("rollout.cache_tokens", 127),
    ("rollout.prefill_buckets", ()),
    ("rollout.prefill_buckets", (64, 64, 128)),
    ("rollout.prefill_buckets", (0, 128)),
    ("rollout.window_buckets", (64,)),
    ("train.tokens_per_row", 127),
    ("rollout.prefill_chunk", -1),
    ("rollout.num_pages", -1),
    ("rollout.page_tokens", 0),
    ("rollout.preemption", "exact"),
    # sizes that do not divide
    ("algorithm.num_minibatches", 3),
    ("algorithm.num_minibatches", 1024),
    # text
    ("task.template", "{question"),
    ("task.template", "{}"),
    ("task.template", "{question:>1000000000}"),
    ("task.template", "{question:" + "9" * 5_000 + "}"),
    ("task.template", "{question}" * 100_000),
    ("task.template", "the same for all"),
    # devices
    ("mesh.train_data", 0),
    ("mesh.rollout_data", -2),
    ("mesh.train_context", 0),
    # rules
    ("mesh.train_rules.embed", ("fspd",)),
    ("mesh.train_rules.embed", "fsdp"),
    ("mesh.rollout_rules.heads", ("tensor", "tensor")),
    ("mesh.rollout_rules", None),
  ],
  ids=sections.shown,
)
def test_a_wrong_setting_is_refused_in_one_line_that_names_it(path, value):
  config = sections.Config()
  put(config, path, value)
  with pytest.raises(sections.ConfigError) as caught:
    config_checks.validate(config, 2)
  message = str(caught.value)
  assert message.startswith(path + ": ")
  assert "\n" not in message


@pytest.mark.parametrize(
  "path, values",
  [
    ("rollout.num_pages", {"num_pages": 7}),
    ("rollout.prefill_buckets", {"num_pages": 16, "page_tokens": 48}),
    ("rollout.prefill_buckets", {"prefill_chunk": 48}),
    (
      "rollout.window_buckets",
      {"num_pages": 16, "page_tokens": 32, "window_buckets": (48, 128)},
    ),
  ],
)
def test_pages_and_chunks_have_to_fit_the_buckets(path, values):
  config = sections.Config()
  for name, value in values.items():
    setattr(config.rollout, name, value)
  with pytest.raises(sections.ConfigError, match=f"^{path}: .*$"):
    config_checks.validate(config, 2)
  config.rollout.num_pages = config.rollout.prefill_chunk = 0
  config_checks.validate(config, 2)


def test_pages_and_chunks_that_fit_are_accepted():
  config = sections.Config()
  config.rollout.num_pages, config.rollout.page_tokens = 8, 16
  config.rollout.prefill_chunk = 64
  config.rollout.preemption = sections.Preemption.EXACT
  config_checks.validate(config, 2)


def test_reused_logprobs_are_those_of_one_update():
  config = sections.Config()
  config.algorithm.proximal = sections.ProximalMode.REUSE
  with pytest.raises(
    sections.ConfigError,
    match="^algorithm.proximal: reuse .* 4 updates; use .*num_minibatches=1",
  ):
    config_checks.validate(config, 2)
  config.algorithm.num_minibatches = 1
  config_checks.validate(config, 2)
  config.algorithm.num_minibatches = 4
  config.algorithm.proximal = sections.ProximalMode.LOGLINEAR
  config_checks.validate(config, 2)


def test_the_message_says_what_would_be_right():
  config = sections.Config()
  config.algorithm.max_staleness = -1
  with pytest.raises(sections.ConfigError) as caught:
    config_checks.validate(config, 2)
  assert str(caught.value) == (
    "algorithm.max_staleness: -1 is out of range; use 0 or more"
  )


def test_edges_of_the_allowed_are_allowed():
  config = sections.Config()
  config.algorithm.max_staleness = 0
  config.algorithm.num_minibatches = config.algorithm.groups_per_step
  config.eval.temperature = 0.0
  config.eval.every = 0
  config.warm_start.num_steps = 0
  config.train.tokens_per_row = config.rollout.cache_tokens
  config.rollout.max_prompt_tokens = 64
  config.rollout.prefill_buckets = (128,)
  config.train.optimizer.learning_rate = 1
  config.seed = 255
  config.task.template = "{question} {{literally}} {difficulty[terms]}"
  config_checks.validate(config, 2)


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
  assert config_checks.slice_shapes(mesh, num_devices) == (
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
    config_checks.slice_shapes(mesh, num_devices)


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


def test_a_warm_starts_batch_is_cut_into_microbatches():
  config = sections.Config()
  config.warm_start.rows_per_batch = 12
  config_checks.validate(config, 2)  # there is no warm start
  config.warm_start.num_steps = 1
  with pytest.raises(
    sections.ConfigError,
    match="^train.rows_per_microbatch: 8 .*12 warm_start.rows_per_batch",
  ):
    config_checks.validate(config, 2)


def test_patience_needs_measurements():
  config = sections.Config()
  config.warm_start.patience = 2
  config.warm_start.eval_every = 10
  config_checks.validate(config, 2)
  config.warm_start.eval_every = 0
  with pytest.raises(
    sections.ConfigError,
    match="^warm_start.patience: 2 .*warm_start.eval_every",
  ):
    config_checks.validate(config, 2)


def test_the_page_of_all_settings_is_that_of_the_source():
  path = pathlib.Path(__file__).parents[1] / "docs" / "settings.md"
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
  text = json.dumps(config_json.to_dict(changed_config()), allow_nan=False)
  read = config_json.from_dict(json.loads(text))
  assert read == changed_config()
  assert read != sections.Config()
  config_checks.validate(read, 2)


def test_fields_that_a_stored_config_lacks_take_their_defaults():
  values = config_json.to_stored(changed_config())
  del values["train"]["vocab_chunk"], values["transfer"]
  assert config_json.from_stored(values) == changed_config()


def test_a_stored_config_with_other_fields_is_refused():
  values = config_json.to_dict(sections.Config())
  values["train"]["vocab_chunks"] = 1
  with pytest.raises(sections.ConfigError, match="^train.vocab_chunks: unk"):
    config_json.from_dict(values)
  del values["train"]["vocab_chunks"]
  for value in ("pigeon", ["orbax"]):
    values["transfer"]["channel"] = value
    with pytest.raises(sections.ConfigError, match="one of orbax, direct"):
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


@pytest.mark.parametrize(
  ("sets", "message"),
  [
    ({"held_out": {"dataset": "chain_sum"}}, "eval.sets: held_out: "),
    ({"a b": {"dataset": "chain_sum"}}, "eval.sets: 'a b' is no name"),
    ({"a": {}}, "eval.sets: a.dataset: is missing"),
    ({"a": 3}, "eval.sets: a: 3 is not a ConfigDict"),
    ({"a": {"dataset": "x", "k": 2}}, "eval.sets: a: there is no entry 'k'"),
    (
      {"a": {"dataset": "x", "samples": 0}},
      "eval.sets: a.samples: 0 is out of",
    ),
    (
      {"a": {"dataset": "x", "num_items": "5"}},
      "eval.sets: a.num_items: '5' is",
    ),
    (
      {"a": {"dataset": "x", "template": "q"}},
      "eval.sets: a.template: 'q' has",
    ),
  ],
)
def test_a_wrong_set_of_questions_is_refused(sets, message):
  config = sections.Config()
  config.eval.sets = config_dict.ConfigDict(sets)
  with pytest.raises(sections.ConfigError, match=re.escape(message)):
    config_checks.check(config)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("stop", ("",), "rollout.stop: '' can never be found"),
    ("stop", ("a\ufffd",), "can never be found"),
    ("stop", tuple("abcdefghijklmnopq"), "17 entries; use at most 16"),
    ("stop_token_ids", (-1,), "rollout.stop_token_ids: -1 is out of range"),
    ("stop_token_ids", tuple(range(9)), "9 entries; use at most 8"),
  ],
)
def test_a_stop_that_cannot_be_looked_for_is_refused(field, value, message):
  config = sections.Config()
  setattr(config.rollout, field, value)
  with pytest.raises(sections.ConfigError, match=re.escape(message)):
    config_checks.check(config)
