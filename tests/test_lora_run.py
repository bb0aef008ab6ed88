"""A whole run with LoRA: it trains, resumes, is exported and is served."""

import json

import jax
import numpy as np
import openai
import pytest
import test_run
import test_served_weights

import jaxrl_async
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import hf_weights
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.policies import export
from jaxrl_async.policies import serve
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import front as front_lib

pytestmark = pytest.mark.slow


def make_config(num_steps=4):
  config = test_run.make_config("sync", num_steps=num_steps)
  config.model.lora.rank = 4
  config.train.optimizer.learning_rate = 1e-2
  return config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  path = tmp_path_factory.mktemp("lora")
  test_run.start(make_config(), path)
  return path


def named_arrays(workdir, step):
  path = workdir / "checkpoints" / str(step) / "manifest.json"
  return json.loads(path.read_text().splitlines()[0])["about"]["layout"]


@pytest.mark.nightly  # test_distillation.py continues one
def test_a_continued_run_is_an_uninterrupted_one(workdir, tmp_path):
  test_run.start(make_config(2), tmp_path)
  before = (tmp_path / "base" / "0" / "manifest.json").stat()
  test_run.start(make_config(), tmp_path)
  found, expected = map(test_run.losses, (tmp_path, workdir))
  assert (np.abs(expected) > 1e-4).all(), "losses that prove nothing"
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  # The base is written once, and no checkpoint holds it.
  assert (tmp_path / "base" / "0" / "manifest.json").stat() == before
  for step in (2, 4):
    names = named_arrays(tmp_path, step)
    assert any(name.endswith("query_lora_a") for name in names)
    assert not any(".frozen." in name for name in names)
  (tmp_path / "base").rename(tmp_path / "elsewhere")
  with pytest.raises(
    sections.ConfigError, match="the base of the adapters was"
  ):
    test_run.start(make_config(5), tmp_path)


def test_only_adapters_travel_with_each_version(workdir):
  model = setup_lib.resolve(make_config(), jax.devices()).model
  _, *steps = test_run.lines(workdir, "metrics")
  sent = {line["transfer/bytes"] for line in steps}
  assert sent == {4 * lora_lib.num_params(model)}
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["mismatch_kl_max"] < 1e-9


@pytest.mark.nightly
def test_a_run_is_exported_and_served_beside_its_base(workdir, tmp_path):
  policy = serve.load(stored_policy.of_run(workdir))
  model, params = policy.setup.model, policy.params
  fresh = lora_lib.adapters(params)["layers"]["up_lora_b"]
  assert np.abs(fresh).max() > 1e-3, "an adapter that learned nothing"
  peft_files.write(tmp_path / "adapter", model, params)
  # Large, so that it changes every answer.
  big = jax.tree.map(lambda x: 30.0 * np.asarray(x), lora_lib.adapters(params))
  peft_files.write(tmp_path / "big", model, big)
  own = test_served_weights.greedy(serve.make_scheduler(policy))
  directories = {name: tmp_path / name for name in ("adapter", "big")}
  serve.add_adapters(policy, directories)
  stop, answers = supervisor_lib.StopRequest(), {}

  def ask(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client:
      answers["models"] = [m.id for m in client.models.list()]
      try:
        client.completions.create(model="none", prompt="1")
      except openai.NotFoundError as error:
        answers["error"] = error
      for name in ("policy", "adapter", "big"):
        answers[name] = []
        for prompt in test_served_weights.PROMPTS:
          room = policy.setup.config.rollout.cache_tokens - len(prompt)
          done = client.completions.create(
            model=name,
            prompt=prompt,
            temperature=0,
            max_tokens=room,
            extra_body={"return_token_ids": True},
          )
          assert done.model == name
          answers[name].append(done.choices[0].token_ids)
    stop.set()

  settings = front_lib.ServeSettings(port=0, adapters=tuple(directories))
  serve.serve(policy, settings, stop=stop, on_ready=ask)
  assert answers["models"] == ["policy", "adapter", "big"]
  assert answers["error"].code == "model_not_found"
  assert "'policy', 'adapter', 'big'" in answers["error"].message
  assert answers["policy"] == own
  assert answers["adapter"] == own
  assert answers["big"] != own


def test_a_directory_without_an_adapter_is_named(workdir, tmp_path):
  policy = serve.load(stored_policy.of_run(workdir))
  with pytest.raises(
    sections.ConfigError, match="adapter: mine: .*adapter_con"
  ):
    serve.add_adapters(policy, {"mine": tmp_path})


def test_an_adapter_without_a_place_is_refused_before_anything_is_written(
  workdir, tmp_path, monkeypatch
):
  monkeypatch.setattr(peft_files, "why_no_places", lambda model: "no place")
  stored = stored_policy.find(workdir)
  with pytest.raises(sections.ConfigError, match="^adapter: no place"):
    export.export_adapter(stored, tmp_path / "adapter")
  assert not (tmp_path / "adapter").exists()


def test_the_exported_run_is_the_one_that_is_loaded(workdir, tmp_path):
  stored = stored_policy.find(workdir)
  policy = serve.load(stored_policy.of_run(workdir))
  model, params = policy.setup.model, policy.params
  export.export(stored, tmp_path / "merged", dtype="float32")
  _, found = hf_weights.load(tmp_path / "merged")
  wanted = lora_lib.merged(params, model.lora)
  assert not np.array_equal(
    wanted["layers"]["query"], params["layers"]["query"]
  )
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  written = export.export_adapter(stored, tmp_path / "adapter")
  assert written == {"step": 4, "parameters": lora_lib.num_params(model)}
  _, adapter = peft_files.read(tmp_path / "adapter", model)
  jax.tree.map(
    np.testing.assert_array_equal, adapter, lora_lib.adapters(params)
  )
  loaded = jaxrl_async.load(workdir, num_slots=8)
  assert loaded.version == 4
  (completion,) = loaded.generate("1+2\n", max_tokens=4)
  assert 1 <= len(completion.tokens) <= 4
  (logprobs,) = loaded.logprobs([("1+2\n", completion.text)])
  assert np.isfinite(logprobs).all()
