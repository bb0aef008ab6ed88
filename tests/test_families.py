"""Every family of `families` against transformers, a test a link.

Logits and gradients over packed and padded rows, decoding, files, adapters and
int8 weights, each with small random models of odd shapes. test_parity.py has
the older families in more depth. Without the dependency group `reference` all
of it is skipped.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import pytest
import test_parity
import tiny

from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_tensors
from jaxrl_async.models import hf_weights
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import train_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY = test_parity.VOCABULARY
# Its row of the embedding has no gradient in transformers. No sequence has it.
PAD = VOCABULARY - 1
NUM_TOKENS = 64  # a greedy continuation
LENGTHS = (5, 11)  # of the prompts that are continued
# The cases of the default run, which have all that the others have.
QUICK = (
  *("gemma2-windows-caps", "gemma3", "smollm3", "olmo3"),
  *("phi4-mini-long", "granite", "exaone4", "qwen3-moe", "qwen3.5"),
)


class Case(NamedTuple):
  """A model of transformers, and how its files are.

  Attributes:
    family: the start of its classes' names.
    sizes: of its config.
    dtype: of its files.
    num_shards: the least number of its files.
    lengths: of the sequences whose logits are compared.
    longest: the longest sequence of a run.
    attention: over packed rows.
    has_greedy: whether transformers computes a sequence token by token as it
      computes it at once.
  """

  family: str
  sizes: dict
  dtype: str = "float32"
  num_shards: int = 1
  lengths: tuple = (37, 23)
  longest: int | None = None
  attention: str = "xla"
  has_greedy: bool = True


def case(name, family, heads, kv_heads, model_dim, *, layers=2, **more):
  own = {x: more.pop(x) for x in Case._fields if x in more}
  sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": model_dim,
    "intermediate_size": 40,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
  }
  marks = (pytest.mark.slow,) if name not in QUICK else ()
  return pytest.param(Case(family, sizes | more, **own), id=name, marks=marks)


def rope(kind="default", theta=500.0, **more):
  return {"rope_type": kind, "rope_theta": theta, **more}


def longrope(pairs, original):
  """A longrope whose factors differ from pair to pair."""
  return {
    "rope_parameters": rope(
      "longrope",
      short_factor=[1.0 + 0.1 * i for i in range(pairs)],
      long_factor=[1.0 + 0.7 * i for i in range(pairs)],
    ),
    "original_max_position_embeddings": original,
  }


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=24)
LOCAL_AND_GLOBAL = {
  "full_attention": rope("linear", 1e3, factor=8.0),
  "sliding_attention": rope(theta=100.0),
}
DELTA = {
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 6,
  "linear_key_head_dim": 12,
  "linear_value_head_dim": 20,
}
TANH = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0}
CASES = [
  case("gemma", "Gemma", 3, 1, 36, head_dim=16, rms_norm_eps=1e-4),
  case(
    "gemma2-windows-caps",
    "Gemma2",
    4,
    2,
    32,
    layers=3,
    head_dim=20,
    query_pre_attn_scalar=24,
    sliding_window=6,
    attention="blocks",
    dtype="bfloat16",
    num_shards=3,
    **TANH,
  ),
  case(
    "gemma3",
    "Gemma3",
    2,
    1,
    24,
    layers=3,
    head_dim=256,
    query_pre_attn_scalar=200,
    sliding_window=7,
    sliding_window_pattern=3,
    rope_parameters=LOCAL_AND_GLOBAL,
    dtype="float16",
  ),
  case(
    "gemma3-untied-cap",
    "Gemma3",
    2,
    2,
    24,
    layers=2,
    head_dim=16,
    query_pre_attn_scalar=16,
    layer_types=["sliding_attention", "sliding_attention"],
    sliding_window=4,
    final_logit_softcapping=2.0,
    attn_logit_softcapping=None,
    tie_word_embeddings=False,
  ),
  case(
    "smollm3",
    "SmolLM3",
    4,
    2,
    32,
    layers=4,
    no_rope_layer_interval=2,
    rope_parameters=YARN,
    num_shards=3,
    dtype="bfloat16",
  ),
  case("olmo2", "Olmo2", 2, 2, 40, tie_word_embeddings=True),
  case(
    "olmo3",
    "Olmo3",
    6,
    3,
    60,
    layers=4,
    sliding_window=5,
    rope_parameters={
      "full_attention": YARN,
      "sliding_attention": rope(),
    },
    attention="blocks",
  ),
  case("phi4", "Phi3", 3, 1, 48, num_shards=3, rope_parameters=rope()),
  case(
    "phi4-mini-long",
    "Phi3",
    4,
    2,
    64,
    **longrope(6, 4),
    partial_rotary_factor=0.75,
    sliding_window=9,
    tie_word_embeddings=True,
    longest=96,
  ),
  case(
    "phi4-mini-short",
    "Phi3",
    4,
    2,
    64,
    **longrope(6, 90),
    partial_rotary_factor=0.75,
    longest=90,
    dtype="bfloat16",
  ),
  case(
    "granite",
    "Granite",
    4,
    1,
    32,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.2,
    logits_scaling=0.5,
  ),
  case(
    "exaone4",
    "Exaone4",
    4,
    2,
    32,
    layers=3,
    sliding_window=5,
    sliding_window_pattern=2,
    rope_parameters=rope(),
  ),
  case(
    "exaone4-full",
    "Exaone4",
    4,
    4,
    32,
    sliding_window=None,
    layer_types=["full_attention"] * 2,
  ),
  case(
    "qwen3.5",
    "Qwen3_5",
    4,
    2,
    36,
    layers=4,
    head_dim=16,
    layer_types=["linear_attention", "full_attention"] * 2,
    **DELTA,
    linear_conv_kernel_dim=3,
    rope_parameters=rope(partial_rotary_factor=0.5),
    dtype="bfloat16",
    num_shards=3,
  ),
  case(
    "qwen3.5-tied",
    "Qwen3_5",
    3,
    1,
    32,
    layers=3,
    head_dim=32,
    layer_types=["full_attention", *["linear_attention"] * 2],
    **DELTA,
    rope_parameters=rope(partial_rotary_factor=0.25),
    lengths=(70, 9),
    tie_word_embeddings=True,
  ),
  case(
    "qwen3-moe",
    "Qwen3Moe",
    3,
    1,
    36,
    head_dim=20,
    moe_intermediate_size=28,
    num_experts=5,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    attention="blocks",
    dtype="bfloat16",
    num_shards=3,
  ),
  case(
    "qwen3-moe-plain",
    "Qwen3Moe",
    4,
    2,
    24,
    moe_intermediate_size=20,  # PyTorch wants 16 bytes
    num_experts=7,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    tie_word_embeddings=True,
    layers=3,
  ),
  case("qwen2-yarn", "Qwen2", 2, 1, 32, rope_parameters=YARN),
  case(
    "llama-dynamic",
    "Llama",
    4,
    2,
    40,
    rope_parameters=rope("dynamic", factor=3.0),
    max_position_embeddings=16,
    lengths=(30, 30),
    longest=30,
    has_greedy=False,
  ),
]


class Pair(NamedTuple):
  """A model of transformers, and what we read of its files."""

  case: Case
  reference: transformers.PreTrainedModel
  model: configs.ModelConfig
  params: transformer.Params


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
  return make_pair(request.param, tmp_path_factory.mktemp("model"))


def make_pair(case, directory):
  torch.manual_seed(0)
  has_images = case.family in ("Gemma3", "Qwen3_5")
  config = getattr(transformers, case.family + "Text" * has_images + "Config")
  made = getattr(transformers, f"{case.family}ForCausalLM")(
    config(**case.sizes, attn_implementation="eager")
  )
  test_parity.spread(made)
  size = sum(x.numel() * x.element_size() for x in made.parameters())
  half = case.dtype != "float32"
  made.to(getattr(torch, case.dtype)).save_pretrained(
    directory, max_shard_size=int(size / (1 + half) / case.num_shards)
  )
  num_files = len(list(directory.glob("*.safetensors")))
  assert num_files >= case.num_shards
  reference = type(made).from_pretrained(
    directory, attn_implementation="eager", dtype=torch.float32
  )
  model, params = hf_weights.load(directory)
  if case.longest:
    model = model.within(case.longest)
  assert sum(x.size for x in jax.tree.leaves(params)) == model.num_params
  return Pair(case, reference.eval(), model, jax.tree.map(jnp.asarray, params))


def sequences_of(case):
  rng = np.random.default_rng(0)
  return [rng.integers(0, PAD, n, np.int32) for n in case.lengths]


def row_of(sequences):
  """A row, long enough for them."""
  width = 32 * math.ceil(sum(map(len, sequences)) / 32)
  return tiny.packed(sequences, max(tiny.WIDTH, width))


def rows_of(sequences):
  """A row with all of them, and a padded row for each."""
  width = row_of(sequences).tokens.shape[1]
  sets = [sequences, *([x] for x in sequences)]
  rows = [tiny.packed(own, width) for own in sets]
  return jax.tree.map(lambda *x: jnp.concatenate(x), *rows)


def forward_settings(model, attention="xla"):
  return train_step.ForwardSettings(
    model=model,
    compute_dtype="float32",
    remat=sections.Remat.FULL,
    attention=attention,
    temperature=0.9,
    vocab_chunk=40,
  )


def logits_of(model, params, batch, attention="xla"):
  batch = jax.tree.map(jnp.asarray, batch)

  @jax.jit
  def compute(params):
    settings = forward_settings(model, attention)
    decoder, hidden = train_step.final_hidden(settings, params, batch)
    return decoder.logits(hidden)

  return np.asarray(compute(params))


def gradients_of(reference):
  """Gradients by the names of the files, which have each expert by itself."""
  found = {}
  for name, parameter in reference.named_parameters():
    start, is_expert, fused = name.rpartition(".experts.")
    if not is_expert:
      found[name] = parameter.grad
      continue
    names = {"gate_up_proj": ("gate_proj", "up_proj")}.get(fused, (fused,))
    for expert, gradient in enumerate(parameter.grad):
      parts = gradient.chunk(len(names))
      for part, own in zip(parts, names, strict=True):
        found[f"{start}.experts.{expert}.{own}.weight"] = part
  return found


def test_logits_and_gradients_are_those_of_transformers(pair):
  sequences = sequences_of(pair.case)
  batch = rows_of(sequences)
  weights = np.random.default_rng(1).normal(size=batch.tokens.shape)
  weights = weights.astype(np.float32)
  weights[1:] = 0
  settings = forward_settings(pair.model, pair.case.attention)

  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(params):
    decoder, hidden = train_step.final_hidden(settings, params, batch)
    logprobs, _ = train_step._likelihood(settings, decoder, hidden, batch)
    return (logprobs * weights).sum(), decoder.logits(hidden)

  (_, logits), gradients = jax.jit(loss)(pair.params)
  pair.reference.zero_grad()
  start = 0
  for row, tokens in enumerate(sequences, start=1):
    here = slice(start, start + len(tokens))
    start = here.stop
    inputs = torch.tensor(np.asarray(tokens, np.int64)[None])
    expected = pair.reference(inputs).logits[0]
    found = expected.detach().numpy()
    assert np.std(found) > 0.3
    np.testing.assert_allclose(logits[0, here], found, atol=1e-4)
    np.testing.assert_allclose(logits[row, : len(tokens)], found, atol=1e-4)
    logprobs = torch.log_softmax(expected / settings.temperature, -1)
    picked = logprobs[:-1].gather(1, inputs[0, 1:, None])[:, 0]
    (picked * torch.tensor(weights[0, here][1:])).sum().backward()
  expected = gradients_of(pair.reference)
  for name, parts in hf_tensors.places(pair.model).items():
    found = [
      hf_weights._as_stored(gradients, part, np.dtype("float32"))
      for part in parts
    ]
    gradient = expected[name].numpy()
    assert np.abs(gradient).max() > 0
    # Through the gated delta rule, transformers' gradients in float32 differ
    # from its own in float64 by up to 8e-4 of the largest, ours by 6.5e-4.
    bound = 3e-4 if pair.model.is_delta else 1e-4
    np.testing.assert_allclose(
      np.concatenate(found),
      gradient,
      # Sums of thousands of terms that may cancel almost entirely.
      atol=bound * max(1e-2, np.abs(gradient).max()),
      err_msg=name,
    )


def test_transformers_reads_what_is_written(pair, tmp_path):
  dtype = pair.case.dtype
  out = tmp_path / "out"
  size = sum(x.nbytes for x in jax.tree.leaves(pair.params))
  hf_weights.save(
    out,
    pair.model,
    pair.params,
    dtype=dtype,
    max_shard_bytes=size // pair.case.num_shards,
    settings={
      "pad_token_id": PAD,
      # Of this scaling the length is part of the architecture.
      **(
        {}
        if any(x in str(pair.model) for x in ("dynamic", "longrope"))
        else {"max_position_embeddings": 96}
      ),
    },
  )
  assert hf_weights.load(out)[0].within(pair.case.longest or 0) == (
    pair.model.within(pair.case.longest or 0)
  )
  read = transformers.AutoModelForCausalLM.from_pretrained(
    out, attn_implementation="eager", dtype=torch.float32
  ).eval()
  test_parity.check_same(read, pair.reference)
  tokens = torch.tensor(sequences_of(pair.case)[0].astype(np.int64))[None]
  with torch.no_grad():
    torch.testing.assert_close(
      read(tokens).logits, pair.reference(tokens).logits, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("family", ["Granite", "Gemma2"])
def test_scales_are_rounded_to_bfloat16_as_in_torch(family):
  """The same bits; a scale that is rounded where torch does not is a bias."""
  sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1}
  sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
  sizes |= {"intermediate_size": 40, "head_dim": 6, "pad_token_id": 0}
  if family == "Granite":
    sizes |= {"embedding_multiplier": 11.9, "residual_multiplier": 0.22}
  torch.manual_seed(0)
  made = getattr(transformers, f"{family}Model")(
    getattr(transformers, f"{family}Config")(**sizes)
  ).to(torch.bfloat16)
  model = hf_config._model_config(made.config.to_dict())
  decoder = transformer.Decoder(model, rngs=nnx.Rngs(0), is_stacked=False)
  table = made.get_input_embeddings().weight.detach().float().numpy()
  decoder.embedding.set_value(jnp.asarray(table))
  tokens = np.arange(1, 50)
  with torch.no_grad():
    expected = made.get_input_embeddings()(torch.tensor(tokens))
    if family == "Granite":
      expected = expected * made.config.embedding_multiplier
  found = decoder.embed(jnp.asarray(tokens), jnp.dtype("bfloat16"))
  np.testing.assert_array_equal(
    np.asarray(found, np.float32), expected.float().numpy()
  )
  if family == "Granite":
    added = torch.randn(49, 24).to(torch.bfloat16)
    wanted = expected + added * made.config.residual_multiplier
    half = jnp.asarray(added.float().numpy(), jnp.bfloat16)
    found = decoder.layers[0]._around("mlp", found, lambda h: half)
    np.testing.assert_array_equal(
      np.asarray(found, np.float32), wanted.float().numpy()
    )


# -- decoding ------------------------------------------------------------------

CACHES = {
  "slots": {"num_slots": 3, "window_buckets": (32, 80)},
  # Fewer pages than two sequences need, so that one is preempted.
  "pages and chunks": {
    "num_slots": 2,
    "window_buckets": (80,),
    "num_pages": 30,
    "page_tokens": 4,
    "prefill_chunk": 4,
  },
}


def continuation(pair, prompt):
  batch = torch.tensor(np.asarray(prompt, np.int64)[None])
  # The default of some families, which a small vocabulary has, too.
  pair.reference.generation_config.eos_token_id = None
  return pair.reference.generate(
    batch,
    attention_mask=torch.ones_like(batch),
    do_sample=False,
    max_new_tokens=NUM_TOKENS,
    pad_token_id=PAD,
  )[0].numpy()


def is_clear(pair, tokens, start):
  """For each token from `start` on: no other was as likely, up to there."""
  with torch.no_grad():
    inputs = torch.tensor(np.asarray(tokens[:-1], np.int64)[None])
    logits = pair.reference(inputs).logits[0, start - 1 :].numpy()
  logits = np.sort(logits)
  return np.cumprod(logits[:, -1] - logits[:, -2] > 1e-3).astype(bool)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
  "pair", [x for x in CASES if x.values[0].has_greedy], indirect=True
)
def test_greedy_continuations_are_those_of_transformers(pair, cache):
  engine = tiny.engine(
    pair.model,
    end_tokens=(),
    cache_tokens=80,
    prefill_buckets=(80,),
    **CACHES[cache],
  )
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  weights = transformer.unstack(pair.params, pair.model.num_layers, pair.model)
  scheduler.adopt(engine.load_params(weights, 0), 0)
  rng = np.random.default_rng(3)
  prompts = [rng.integers(0, PAD, n, np.int32) for n in LENGTHS]
  sequences = [
    sequence_lib.Sequence(
      prompt,
      limit=len(prompt) + NUM_TOKENS,
      stream=sampling.Stream.EVAL,
      group=group,
      member=0,
      settings=sampling.SamplingSettings(temperature=0.0),
    )
    for group, prompt in enumerate(prompts)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  for _ in range(6):
    scheduler.step()
  # The same weights again: every running sequence is prefilled anew.
  scheduler.adopt(engine.load_params(weights, 1), 1)
  tiny.finish(scheduler)
  num_clear = 0
  for prompt, sequence in zip(prompts, sequences, strict=True):
    expected, start = continuation(pair, prompt), len(prompt)
    clear = is_clear(pair, expected, start)
    num_clear += clear.sum()
    np.testing.assert_array_equal(
      sequence.tokens[start:][clear], expected[start:][clear]
    )
    assert len(sequence.tokens) == len(expected)
  assert num_clear > NUM_TOKENS // 2


# -- adapters and int8 ---------------------------------------------------------


def modules_of(pair):
  """Kernels that have a matrix of their own in the files."""
  name = next(
    name
    for name, family in families.FAMILIES.items()
    if family.architecture == f"{pair.case.family}ForCausalLM"
  )
  fused = {x for parts in families.FAMILIES[name].fused.values() for x in parts}
  if pair.model.experts is not None:
    fused |= {*configs.DENSE_KERNELS}
  return tuple(x for x in sections.LORA_MODULES if x not in fused)


@pytest.mark.slow
def test_peft_loads_the_adapters_that_are_written(pair, tmp_path):
  peft = pytest.importorskip("peft")
  lora = configs.Lora(rank=3, alpha=5.0, modules=modules_of(pair))
  model = dataclasses.replace(pair.model, lora=lora)
  rng = np.random.default_rng(0)
  shapes = lora_lib.adapters(hf_weights._abstract_params(model))
  leaves = jax.tree.map(
    lambda x: rng.normal(0, 0.2, x.shape).astype("f4"), shapes
  )
  params = lora_lib.joined(pair.params, leaves)
  peft_files.write(tmp_path / "adapter", model, params, base_model="base")
  found, read = peft_files.read(tmp_path / "adapter", pair.model)
  assert found == lora
  jax.tree.map(np.testing.assert_array_equal, read, leaves)
  (tokens, *_) = sequences_of(pair.case)
  with torch.no_grad():
    inputs = torch.tensor(tokens.astype(np.int64))[None]
    plain = pair.reference(inputs).logits[0].numpy()
    adapted = peft.PeftModel.from_pretrained(
      pair.reference, tmp_path / "adapter"
    ).eval()
    expected = adapted(inputs).logits[0].numpy()
    adapted.unload()
  assert np.abs(expected - plain).max() > 0.05
  ours = logits_of(model, params, row_of([tokens]))
  np.testing.assert_allclose(ours[0, : len(tokens)], expected, atol=1e-4)


@pytest.mark.slow
def test_int8_weights_compute_what_they_stand_for(pair):
  (tokens, *_) = sequences_of(pair.case)
  batch = row_of([tokens])
  int8 = quantization.quantize(
    pair.params, sections.WeightFormat.INT8, "float32"
  )
  wide = quantization.dequantize(int8)
  expected = logits_of(pair.model, wide, batch)[0, : len(tokens)]
  found = logits_of(pair.model, int8, batch)[0, : len(tokens)]
  np.testing.assert_allclose(found, expected, atol=1e-4)
  exact = logits_of(pair.model, pair.params, batch)[0, : len(tokens)]
  assert 1e-4 < np.abs(exact - expected).max() < 1.0
