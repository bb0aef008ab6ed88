"""The parity chain: decode = prefill = trainer = transformers, a link a test.

Small random models of each family are written by transformers and read by
`hf_weights`. Without the dependency group `reference` all of it is skipped.
"""

import dataclasses
import functools
import math

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.models import rotary
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VOCABULARY = 61
NUM_TOKENS = 20  # a greedy continuation
PROMPTS = [
  np.random.default_rng(n).integers(0, VOCABULARY, n, np.int32)
  for n in (1, 5, 11, 12)
]
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 24,
}


def case(name, family, heads, kv_heads, model_dim, *, theta=500.0, **more):
  sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": model_dim,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
  }
  return pytest.param((family, sizes | more), id=name)


CASES = [
  case("qwen2-7/1-tied", "Qwen2", 7, 1, 56, tie_word_embeddings=True),
  case("qwen3-3/1", "Qwen3", 3, 1, 32, head_dim=20, theta=1e6),
  case("llama-3/1", "Llama", 3, 1, 48, rope_parameters=LLAMA3),
  case("mistral-4/2-window", "Mistral", 4, 2, 32, sliding_window=6),
  case(
    "qwen2-4/2-windows",
    "Qwen2",
    4,
    2,
    32,
    use_sliding_window=True,
    sliding_window=5,
    max_window_layers=1,
  ),
]


@dataclasses.dataclass(frozen=True)
class Pair:
  """A model of transformers, and what we read of its files."""

  reference: transformers.PreTrainedModel
  model: configs.ModelConfig
  params: transformer.Params

  def logits(self, tokens):
    """The reference's, [T V]."""
    with torch.no_grad():
      batch = torch.tensor(np.asarray(tokens, np.int64)[None])
      return self.reference(batch).logits[0].numpy()

  def continuation(self, prompt):
    """The reference's greedy continuation, prompt included."""
    batch = torch.tensor(np.asarray(prompt, np.int64)[None])
    # With a window of 1, the cache of transformers 5.23 keeps all tokens.
    has_cache = getattr(self.reference.config, "sliding_window", None) != 1
    return self.reference.generate(
      batch,
      attention_mask=torch.ones_like(batch),
      do_sample=False,
      max_new_tokens=NUM_TOKENS,
      pad_token_id=0,
      use_cache=has_cache,
    )[0].numpy()


def spread(model):
  """Weights far from where they start: no norm of one, no bias of zero."""
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn_like(parameter)
      if parameter.ndim == 1:
        parameter += 0.3 * noise
        if "A_log" in name:
          # A state of many tokens. One that forgets each token at once gives
          # products near zero, which a norm then divides by.
          parameter -= 3
      else:
        scale = 1 / math.sqrt(parameter.shape[1])
        if "embed" in name:
          scale = 0.2  # more, and a tied head would repeat its input forever
        elif "lm_head" in name:
          scale = 2 * scale
        parameter.copy_(scale * noise)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
  family, sizes = request.param
  return make_pair(family, sizes, tmp_path_factory.mktemp(family))


def make_pair(family, sizes, directory, seed=0):
  torch.manual_seed(seed)
  settings = getattr(transformers, f"{family}Config")(**sizes)
  reference = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
  spread(reference)
  reference.save_pretrained(directory)
  model, params = hf_weights.load(directory)
  assert sum(x.size for x in jax.tree.leaves(params)) == model.num_params
  return Pair(reference, model, jax.tree.map(jnp.asarray, params))


def log_softmax(logits):
  wide = logits.astype(np.float64)
  wide = wide - wide.max(-1, keepdims=True)
  return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def greedy(pair, decode_steps_per_call, **sizes):
  """What our engine writes after each prompt, several in flight."""
  engine = tiny.engine(
    pair.model,
    end_tokens=(),
    decode_steps_per_call=decode_steps_per_call,
    num_slots=3,
    **sizes,
  )
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  weights = transformer.unstack(pair.params, pair.model.num_layers)
  scheduler.adopt(engine.load_params(weights, 0), 0)
  sequences = [
    sequence_lib.Sequence(
      prompt,
      limit=len(prompt) + NUM_TOKENS,
      stream=sampling.Stream.EVAL,
      group=group,
      member=0,
      settings=sampling.SamplingSettings(temperature=0.0),
    )
    for group, prompt in enumerate(PROMPTS)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  tiny.finish(scheduler)
  return sequences


@pytest.fixture(scope="module")
def written(pair):
  return greedy(pair, decode_steps_per_call=4)


def test_one_token_a_call_is_several_a_call(pair, written):
  for one, several in zip(greedy(pair, 1), written, strict=True):
    np.testing.assert_array_equal(one.tokens, several.tokens)
    np.testing.assert_array_equal(
      one.behavior_logprobs, several.behavior_logprobs
    )


def test_decoding_is_the_trainers_packed_forward(pair, written):
  packed = tiny.trainer_logprobs(
    pair.params, [s.tokens for s in written[:2]], model=pair.model
  )
  for sequence, logprobs in zip(written, packed, strict=False):
    np.testing.assert_allclose(
      sequence.behavior_logprobs[sequence.loss_mask],
      logprobs[sequence.loss_mask],
      atol=1e-4,
    )


def test_prefill_caches_what_the_trainer_computes(pair):
  tokens = PROMPTS[-1]
  params = pair.params
  engine = tiny.engine(
    pair.model, end_tokens=(), decode_steps_per_call=4, num_slots=3
  )
  weights = transformer.unstack(params, pair.model.num_layers)
  prefix = tiny.prefill(engine, engine.load_params(weights, 0), tokens)
  forward = functools.partial(
    tiny.hidden_states,
    pair.model,
    batch=tiny.packed([tokens], len(tokens)),
    kept=True,
  )
  _, (keys, values) = jax.jit(forward)(params)
  n = len(tokens)
  for layer, (k, v) in enumerate(prefix.cache):
    np.testing.assert_allclose(
      k[0, :, :, :n], np.transpose(keys[layer, 0], (1, 2, 0)), atol=1e-4
    )
    np.testing.assert_allclose(
      v[0, :, :n], np.transpose(values[layer, 0], (1, 0, 2)), atol=1e-4
    )


def test_the_trainers_packed_forward_is_that_of_transformers(pair):
  rng = np.random.default_rng(0)
  sequences = [rng.integers(0, VOCABULARY, n, np.int32) for n in (40, 23)]
  batch = tiny.packed(sequences)

  @jax.jit
  def forward(params):
    hidden = tiny.hidden_states(pair.model, params, batch)
    return (
      hidden @ transformer.bind(pair.model, params, is_stacked=True).head().T
    )

  logits = np.asarray(forward(pair.params))[0]
  logprobs = tiny.trainer_logprobs(pair.params, sequences, model=pair.model)
  start = 0
  for tokens, ours in zip(sequences, logprobs, strict=True):
    expected = pair.logits(tokens)
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(
      logits[start : start + len(tokens)], expected, atol=1e-4
    )
    rows = np.arange(len(tokens) - 1)
    expected = log_softmax(expected)[rows, tokens[1:]]
    np.testing.assert_allclose(ours[1:], expected, atol=1e-4)
    start += len(tokens)


def test_greedy_continuations_are_those_of_transformers(pair, written):
  for prompt, sequence in zip(PROMPTS, written, strict=True):
    expected = pair.continuation(prompt)
    logits = np.sort(pair.logits(expected[:-1])[len(prompt) - 1 :])
    assert (logits[:, -1] - logits[:, -2]).min() > 1e-3  # no ties
    np.testing.assert_array_equal(sequence.tokens, expected)
  completions = np.concatenate([s.tokens[s.loss_mask] for s in written])
  assert len(np.unique(completions)) > 10


def test_transformers_reads_what_is_written(pair, tmp_path):
  directory = tmp_path / "exported"
  hf_weights.save(directory, pair.model, pair.params, max_shard_bytes=30_000)
  assert len(list(directory.glob("*.safetensors"))) > 1
  read = transformers.AutoModelForCausalLM.from_pretrained(
    directory, attn_implementation="eager"
  )
  check_same(read, pair.reference)
  tokens = torch.arange(60)[None]
  with torch.no_grad():
    torch.testing.assert_close(
      read(tokens).logits, pair.reference(tokens).logits, rtol=0, atol=0
    )


def windows(config):
  """The sliding window of each layer, or None."""
  window = getattr(config, "sliding_window", None)
  kinds = getattr(config, "layer_types", None)
  kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
  return [window if kind == "sliding_attention" else None for kind in kinds]


def check_same(found, expected):
  """The same class of model, the same windows, and the same bits."""
  assert type(found) is type(expected)
  assert found.dtype == expected.dtype
  assert windows(found.config) == windows(expected.config)
  tensors = found.state_dict()
  assert tensors.keys() == expected.state_dict().keys()
  for name, tensor in expected.state_dict().items():
    assert torch.equal(tensors[name], tensor), name


FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral")


def random_model(seed):
  """A model of a family, with anything that the family may have."""
  rng = np.random.default_rng(seed)
  family = FAMILIES[seed % len(FAMILIES)]

  def any_of(*values):
    return values[rng.integers(len(values))]

  kv_heads, layers = any_of(1, 2, 3), any_of(1, 2, 3)
  heads, head_dim = kv_heads * any_of(1, 2, 3), any_of(6, 8, 10)
  window = any_of(1, 2, 5, 8)
  sizes = {
    "num_hidden_layers": layers,
    "rms_norm_eps": any_of(1e-3, 1e-6),
    "tie_word_embeddings": any_of(True, False),
  }
  rope = {"rope_type": "default", "rope_theta": any_of(500.0, 1e4, 1e6)}
  if family in ("Llama", "Mistral") and any_of(True, False):
    rope = LLAMA3 | {"factor": any_of(2.0, 8.0)}
  if family != "Qwen2":
    sizes["head_dim"] = head_dim
  if family == "Mistral":
    sizes["sliding_window"] = any_of(None, window, window, window)
  elif family != "Llama":
    sizes |= {"use_sliding_window": True, "sliding_window": window}
    kinds = any_of("full_attention", "sliding_attention"), "sliding_attention"
    sizes |= any_of(
      {"max_window_layers": any_of(0, 1)},
      {"layer_types": [any_of(*kinds) for _ in range(layers)]},
    )
  name = f"{family}-{seed}"
  width = heads * any_of(8, 12)  # of Qwen2, a multiple of the heads
  return case(
    name, family, heads, kv_heads, width, rope_parameters=rope, **sizes
  )


def is_clear(pair, tokens, start):
  """For each token from `start` on: no other was as likely, up to there."""
  logits = np.sort(pair.logits(tokens[:-1])[start - 1 :])
  return np.cumprod(logits[:, -1] - logits[:, -2] > 1e-3).astype(bool)


@pytest.mark.parametrize(
  "seed",
  [
    0,
    *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 24)),
  ],
)
def test_any_model_of_a_family_is_that_of_transformers(seed, tmp_path):
  (described,) = random_model(seed).values
  pair = make_pair(*described, tmp_path / "float32", seed)
  tokens = np.random.default_rng(seed).integers(0, VOCABULARY, 48, np.int32)
  logits = tiny.logits(pair.params, tokens, pair.model)
  np.testing.assert_allclose(logits, pair.logits(tokens), atol=1e-4)
  (logprobs,) = tiny.trainer_logprobs(pair.params, [tokens], model=pair.model)
  expected = log_softmax(pair.logits(tokens))[np.arange(47), tokens[1:]]
  np.testing.assert_allclose(logprobs[1:], expected, atol=1e-4)
  num_clear = 0
  few = {"prefill_buckets": (16,), "window_buckets": (32,)}
  for sizes in (few, few | {"num_pages": 30, "page_tokens": 4}):
    for prompt, sequence in zip(PROMPTS, greedy(pair, 4, **sizes), strict=True):
      expected, start = pair.continuation(prompt), len(prompt)
      clear = is_clear(pair, expected, start)
      num_clear += clear.sum()
      np.testing.assert_array_equal(
        sequence.tokens[start:][clear], expected[start:][clear]
      )
  assert num_clear > len(PROMPTS) * NUM_TOKENS  # of twice as many
  # In half precision and in shards, there and back.
  half = pair.reference.to(torch.bfloat16)
  half.save_pretrained(tmp_path / "half", max_shard_size="5KB")
  assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
  model, params = hf_weights.load(tmp_path / "half", "bfloat16")
  assert model == pair.model
  hf_weights.save(
    tmp_path / "back", model, params, dtype="bfloat16", max_shard_bytes=5_000
  )
  read = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "back", attn_implementation="eager", dtype=torch.bfloat16
  )
  check_same(read, half)


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "llama3"}])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", [10, 64, 128])
def test_rotary_frequencies_are_those_of_transformers(head_dim, theta, scaling):
  rope = LLAMA3 | {"original_max_position_embeddings": 8192} | scaling
  rope |= {"rope_theta": theta, **({} if scaling else {"rope_type": "default"})}
  settings = transformers.LlamaConfig(
    hidden_size=head_dim, num_attention_heads=1, rope_parameters=rope
  )
  module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
  expected = module(settings).inv_freq.numpy()
  model = configs.ModelConfig(
    vocab_size=1,
    model_dim=head_dim,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=head_dim,
    mlp_dim=1,
    rope_theta=theta,
    rope_scaling=configs.RopeScaling(
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_tokens=8192,
    )
    if scaling
    else None,
  )
  np.testing.assert_array_almost_equal_nulp(
    rotary.frequencies(model, *set(model.ropes)), expected, nulp=1
  )
