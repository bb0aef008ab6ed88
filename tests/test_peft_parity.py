"""Adapters against PEFT: equal logits, and equal training."""

import dataclasses
import warnings

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest
import test_parity
import tiny

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.training import train_step

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS = np.random.default_rng(0).integers(0, test_parity.VOCABULARY, 20, "i4")
LEARNING_RATE = 1e-2


def base_of(family, **more):
  """A random model of transformers."""
  torch.manual_seed(0)
  settings = getattr(transformers, f"{family}Config")(
    vocab_size=test_parity.VOCABULARY,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    attn_implementation="eager",
    bos_token_id=None,
    eos_token_id=None,
    **more,
  )
  model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
  test_parity.spread(model)
  return model


def with_adapter(base, rank, alpha, modules):
  """The same, with an adapter of PEFT that is not at its start."""
  config = peft.LoraConfig(
    r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM"
  )
  model = peft.get_peft_model(base, config)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if "lora_B" in name:
        parameter.normal_(std=0.2)
  return model


def logits_of(model):
  with torch.no_grad():
    return model(torch.tensor(TOKENS[None].astype(np.int64))).logits[0].numpy()


CASES = [
  pytest.param(
    "Qwen3",
    {"head_dim": 10, "tie_word_embeddings": True},
    (4, 8, ["q_proj", "v_proj", "down_proj"]),
    id="qwen3",
  ),
  pytest.param("Qwen2", {}, (3, 16, list(peft_files._MODULES)), id="qwen2"),
]


@pytest.mark.parametrize(("family", "sizes", "adapter"), CASES)
def test_an_adapter_of_peft_gives_its_logits(tmp_path, family, sizes, adapter):
  base = base_of(family, **sizes)
  base.save_pretrained(tmp_path / "base")
  before = logits_of(base)
  reference = with_adapter(base, *adapter)
  reference.save_pretrained(tmp_path / "adapter")
  config, params = hf_weights.load(tmp_path / "base")
  lora, leaves = peft_files.read(tmp_path / "adapter", config)
  model = dataclasses.replace(config, lora=lora)
  params = lora_lib.joined(params, leaves)
  expected = logits_of(reference)
  assert np.abs(expected - before).max() > 0.1
  np.testing.assert_allclose(
    tiny.logits(params, TOKENS, model), expected, atol=1e-4
  )
  # Merged, it is a model of transformers.
  hf_weights.save(tmp_path / "merged", config, lora_lib.merged(params, lora))
  merged = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "merged", attn_implementation="eager"
  )
  np.testing.assert_allclose(logits_of(merged.eval()), expected, atol=1e-4)


def test_peft_loads_what_is_written_here(tmp_path):
  base = base_of("Llama")
  base.save_pretrained(tmp_path / "base")
  config, params = hf_weights.load(tmp_path / "base")
  lora = configs.Lora(rank=5, alpha=7.0, modules=sections.LORA_MODULES)
  model = dataclasses.replace(config, lora=lora)
  rng = np.random.default_rng(0)
  shapes = lora_lib.adapters(hf_weights._abstract_params(model))
  leaves = jax.tree.map(
    lambda x: rng.normal(0, 0.2, x.shape).astype("f4"), shapes
  )
  params = lora_lib.joined(params, leaves)
  peft_files.write(tmp_path / "adapter", model, params, base_model="base")
  loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
  ours = tiny.logits(params, TOKENS, model)
  np.testing.assert_allclose(logits_of(loaded), ours, atol=1e-4)


def test_a_few_updates_are_those_of_peft(tmp_path):
  base = base_of("Qwen3", head_dim=10)
  base.save_pretrained(tmp_path / "base")
  reference = with_adapter(base, 4, 8, ["q_proj", "o_proj", "up_proj"])
  reference.save_pretrained(tmp_path / "adapter")
  config, params = hf_weights.load(tmp_path / "base")
  params = jax.tree.map(jnp.asarray, params)
  lora, trained = peft_files.read(tmp_path / "adapter", config)
  settings = train_step.ForwardSettings(
    model=dataclasses.replace(config, lora=lora),
    compute_dtype="float32",
    remat=sections.Remat.DOTS,
    attention="xla",
    temperature=1.0,
    vocab_chunk=1000,
  )
  batch = jax.tree.map(jnp.asarray, tiny.packed([TOKENS]))
  optimizer = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.99, weight_decay=0.0)

  @jax.jit
  def update(trained, state):
    def loss(trained):
      params_here = lora_lib.joined(params, trained)
      logprobs, _ = train_step.token_logprobs(settings, params_here, batch)
      return -logprobs[0, 1 : len(TOKENS)].mean()

    value, gradients = jax.value_and_grad(loss)(trained)
    with jax.numpy_dtype_promotion("standard"):
      updates, state = optimizer.update(gradients, state, trained)
    return optax.apply_updates(trained, updates), state, value

  trained = jax.tree.map(jnp.asarray, trained)
  state, ours = optimizer.init(trained), []
  for _ in range(4):
    trained, state, value = update(trained, state)
    ours.append(float(value))

  own = [p for p in reference.parameters() if p.requires_grad]
  theirs = []
  stepper = torch.optim.AdamW(
    own, LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0
  )
  tokens = torch.tensor(TOKENS[None].astype(np.int64))
  for _ in range(4):
    stepper.zero_grad()
    value = reference(tokens, labels=tokens).loss
    value.backward()
    stepper.step()
    theirs.append(float(value))
  assert ours[0] - ours[-1] > 0.1
  np.testing.assert_allclose(ours, theirs, rtol=1e-4)
