"""An exported policy, read by transformers and by ourselves."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import stored_run
import tiny

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.policies import export
from jaxrl_async.policies import policy as policy_lib
from jaxrl_async.policies import serve
from jaxrl_async.policies import stored_policy
from jaxrl_async.storage import checkpoint
from jaxrl_async.text import tokenizer as tokenizer_lib

ROOT = pathlib.Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return stored_run.write(tmp_path_factory.mktemp("export") / "run")


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_an_export_is_read_back_with_the_same_bits(workdir, tmp_path):
  stored = stored_policy.find(workdir)
  written = export.export(stored, tmp_path / "out", dtype="float32")
  assert written["step"] == 5
  model, params = hf_weights.load(tmp_path / "out")
  assert model == stored_run.MODEL
  same(params, stored_run.params(5))
  older = stored_policy.find(workdir, 2)
  export.export(older, tmp_path / "older", dtype="bfloat16")
  _, params = hf_weights.load(tmp_path / "older")
  expected = jax.tree.map(
    lambda x: x.astype("bfloat16").astype("float32"), stored_run.params(2)
  )
  same(params, expected)
  tokenizer = tokenizer_lib.load(tmp_path / "out")
  assert tokenizer.digest() == tokenizer_lib.character_level().digest()
  with pytest.raises(sections.ConfigError, match="output: .*is not empty"):
    export.export(stored, tmp_path / "out", dtype="float32")
  with pytest.raises(sections.ConfigError, match="of step 3; there is 2, 5"):
    stored_policy.find(workdir, 3)


def test_only_the_parameters_of_a_checkpoint_are_read(workdir, monkeypatch):
  targets = []
  load = checkpoint.pytree_files.load

  def watch(path, target, **options):
    targets.append(target)
    return load(path, target, **options)

  monkeypatch.setattr(checkpoint.pytree_files, "load", watch)
  (device, *_) = jax.devices()
  policy = policy_lib.load(stored_policy.find(workdir, 2), [device])
  same(policy._params, stored_run.params(2))
  (target,) = targets
  assert jax.tree.structure(target) == jax.tree.structure(policy._params)


def test_a_checkpoint_of_another_architecture_is_named(tmp_path):
  config = stored_run.get_config()
  config.model.name = "quickstart"
  stored_run.write(tmp_path, config)
  with pytest.raises(sections.ConfigError, match=r"checkpoint: .* expected"):
    export.export(
      stored_policy.find(tmp_path), tmp_path / "out", dtype="float32"
    )
  assert not (tmp_path / "out").exists()


def test_what_is_no_policy_is_named(tmp_path):
  with pytest.raises(sections.ConfigError, match="does not exist"):
    stored_policy.find(tmp_path / "no")
  with pytest.raises(sections.ConfigError, match="holds no policy"):
    stored_policy.find(tmp_path)
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(sections.ConfigError, match="checkpoint|workdir"):
    stored_policy.find(tmp_path)


def pretrained(directory):
  """A directory of another's making, with what training does not need."""
  tokenizer_lib.character_level().save(directory)
  hf_weights.save(
    directory,
    stored_run.MODEL,
    jax.tree.map(np.asarray, stored_run.params(2)),
    settings={"max_position_embeddings": 512},
  )
  (directory / "chat_template.jinja").write_text(TEMPLATE)
  path = directory / "generation_config.json"
  # The end token is that of the tokenizer alone.
  path.write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
  return directory


def test_no_sequence_is_longer_than_the_model_was_made_for(tmp_path):
  source = pretrained(tmp_path / "model")
  assert hf_config.model_config(source).max_positions == 512
  config = stored_run.get_config()
  config.model.name = str(source)
  sizes = {"num_slots": 2, "cache_tokens": 513}
  for resolved in (
    lambda: setup_lib.resolve(config, jax.devices()),
    lambda: setup_lib.on_all_devices(
      config, jax.devices(), tokenizer=tokenizer_lib.load(source)
    ),
    lambda: serve.load(stored_policy.find(source), **sizes),
  ):
    config.rollout.cache_tokens = 513
    with pytest.raises(
      sections.ConfigError, match="^rollout.cache_tokens: 513, .* for 512 tok"
    ):
      resolved()
  config.model.max_positions = 513
  assert setup_lib.resolve(config, jax.devices()).model.max_positions == 513
  policy = serve.load(stored_policy.find(source), **sizes, max_positions=513)
  assert policy.setup.config.rollout.cache_tokens == 513
  # What says nothing of its length gets the one that it was made for.
  policy = serve.load(stored_policy.find(source), num_slots=2, cache_tokens=0)
  assert policy.setup.config.rollout.cache_tokens == 512
  written = policy_lib.load(stored_policy.find(source), jax.devices()[:1])
  assert written.generate("1", max_tokens=4, temperature=0.0)
  with pytest.raises(ValueError, match="^max_tokens: .* 513 .* made for 512"):
    written.generate("1", max_tokens=512)


def test_special_tokens_may_lie_past_the_rows_of_the_model(tmp_path):
  source = pretrained(tmp_path / "model")
  path = source / "tokenizer.json"
  settings = json.loads(path.read_text())
  rows = stored_run.MODEL.vocab_size
  image = settings["added_tokens"][0] | {"content": "<image>", "id": rows}
  settings["added_tokens"].append(image)
  path.write_text(json.dumps(settings))
  config = stored_run.get_config()
  config.model.name = str(source)
  whole = tokenizer_lib.load(source)
  assert (whole.num_needed, whole.vocab_size) == (rows, rows + 1)
  for tokenizer in (
    setup_lib.resolve(config, jax.devices()).tokenizer,
    setup_lib.on_all_devices(
      config, jax.devices()[:1], tokenizer=whole
    ).tokenizer,
  ):
    assert tokenizer.vocab_size == rows
    np.testing.assert_array_equal(tokenizer.encode("1+2"), whole.encode("1+2"))
    with pytest.raises(ValueError, match=f"'<image>' is the token {rows}, and"):
      tokenizer.encode("1<image>")
  # An ordinary token needs its row.
  image["special"] = False
  path.write_text(json.dumps(settings))
  with pytest.raises(sections.ConfigError, match="vocab_size is"):
    setup_lib.resolve(config, jax.devices())


def test_a_longer_sequence_changes_the_engine_and_logprobs_alike(tmp_path):
  source = tmp_path / "model"
  tokenizer_lib.character_level().save(source)
  scaling = configs.RopeScaling(
    kind="longrope",
    short_factors=(1.0,) * 4,
    long_factors=(3.0, 5.0, 7.0, 9.0),
    original_max_tokens=150,
  )
  model = dataclasses.replace(
    stored_run.MODEL, rope_scaling=scaling, max_positions=512
  )
  params = jax.tree.map(np.asarray, stored_run.params(2))
  hf_weights.save(
    source, model, params, settings={"max_position_embeddings": 512}
  )
  policy = policy_lib.load(stored_policy.find(source), jax.devices()[:1])
  policy.config.rollout.cache_tokens = 128
  policy._setup = dataclasses.replace(
    policy._setup, model=policy._setup.model.within(128)
  )
  short = policy.logprobs(["1+2+3"])[0]
  # Still within the context, so that the room ends there.
  policy.logprobs(["1" * 140])
  np.testing.assert_array_equal(policy.logprobs(["1+2+3"])[0], short)
  (written,) = policy.generate("1+", max_tokens=148, temperature=0.0)
  assert policy.config.rollout.cache_tokens == 150
  np.testing.assert_array_equal(policy.logprobs(["1+2+3"])[0], short)
  (written,) = policy.generate("1+", max_tokens=149, temperature=0.0)
  long = policy.logprobs(["1+2+3"])[0]
  assert np.abs(long - short).max() > 1e-3
  (found,) = policy.logprobs([("1+", written)])
  np.testing.assert_allclose(found, written.logprobs, atol=1e-4)
  other = policy_lib.load(stored_policy.find(source), jax.devices()[:1])
  other.config.rollout.cache_tokens = 128
  other._setup = dataclasses.replace(
    other._setup, model=other._setup.model.within(128)
  )
  other.logprobs(["1" * 160])
  np.testing.assert_array_equal(other.logprobs(["1+2+3"])[0], long)


def test_a_model_of_unknown_length_has_no_bound(tmp_path):
  source = pretrained(tmp_path / "model")
  path = source / "config.json"
  settings = json.loads(path.read_text())
  del settings["max_position_embeddings"]
  path.write_text(json.dumps(settings))
  assert hf_config.max_positions(source) is None
  policy = serve.load(stored_policy.find(source), num_slots=2, cache_tokens=0)
  assert policy.setup.config.rollout.cache_tokens == 1_024


def test_what_a_pretrained_model_brought_is_exported_with_it(tmp_path):
  source = pretrained(tmp_path / "model")
  config = stored_run.get_config()
  config.model.name = str(source)
  stored_run.write(tmp_path / "run", config)
  out = tmp_path / "out"
  export.export(
    stored_policy.find(tmp_path / "run"),
    out,
    dtype="float32",
    max_shard_bytes=20_000,
  )
  assert (out / "chat_template.jinja").read_text() == TEMPLATE
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation["temperature"] == 0.6 and generation["eos_token_id"] == [1]
  settings = json.loads((out / "config.json").read_text())
  assert settings["max_position_embeddings"] == 512
  assert len(list(out.glob("model-*.safetensors"))) > 3
  _, params = hf_weights.load(out)
  same(params, stored_run.params(5))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_and_writes_the_same(workdir, tmp_path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  out = tmp_path / "out"
  ran = subprocess.run(
    [
      sys.executable,
      str(ROOT / "launch" / "export.py"),
      f"--checkpoint={workdir}",
      f"--output={out}",
      "--dtype=float32",
      "--max_shard_bytes=1000000",
    ],
    capture_output=True,
    text=True,
    check=True,
  )
  assert json.loads(ran.stdout)["output"] == str(out)
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
  text = "12+34=\n"
  ours = tokenizer_lib.character_level()
  tokens = ours.encode_prompt(text)
  ids = tokenizer(text, return_tensors="pt").input_ids
  assert ids[0].tolist() == tokens.tolist()
  with torch.no_grad():
    logits = model(ids).logits[0].numpy()
  expected = tiny.logits(stored_run.params(5), tokens, stored_run.MODEL)
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  written = model.generate(ids, do_sample=False, max_new_tokens=24)
  policy = policy_lib.load(stored_policy.find(out), jax.devices()[:1])
  (greedy,) = policy.generate(text, max_tokens=24, temperature=0.0)
  theirs = tokenizer.decode(written[0, len(tokens) :], skip_special_tokens=True)
  assert greedy.text == theirs and len(greedy.tokens) > 2
