"""Tokenizers and end tokens of a directory, against transformers itself.

Without the dependency group `reference` all of it is skipped.
"""

import json

import jax
from jax import numpy as jnp
import llama_tokenizer
import numpy as np
import pytest
import tiny
import tokenizers
from tokenizers import decoders
from tokenizers import pre_tokenizers
from tokenizers import processors

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.storage import model_files
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXTS = [
  "",
  " ",
  "the naïve 😀 a\n\nb",
  "  two  spaces ",
  "<s>a </s> b",
  "a<0x0A>b\t界\r\n",
  "1 + 2 = 3",
]


def llama3(puts_end=False):
  """Llama 3's kind: bytes are the alphabet, and a token begins each text."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  special = ["<s>", "</s>", "<unk>"]
  vocabulary = {token: i for i, token in enumerate(special + alphabet)}
  merges = []
  for pair in ("th", "the", "Ġa", "an", "Ã©"):
    merges.append((pair[:-1], pair[-1]))
    vocabulary[pair] = len(vocabulary)
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(special)
  made.post_processor = processors.Sequence(
    [
      processors.ByteLevel(trim_offsets=False),
      processors.TemplateProcessing(
        single="<s> $A </s>" if puts_end else "<s> $A",
        special_tokens=[("<s>", 0), ("</s>", 1)],
      ),
    ]
  )
  return made


KINDS = {
  "llama2": llama_tokenizer.byte_fallback,
  "gemma": lambda: llama_tokenizer.byte_fallback(strips=False),
  "metaspace": lambda: llama_tokenizer.byte_fallback(has_metaspace=True),
  "llama3": llama3,
  "with an end": lambda: llama3(puts_end=True),
}
SETTINGS = {
  "as it is": {},
  "as Llama's": {"tokenizer_class": "LlamaTokenizer"},
  "as Llama's fast one": {
    "tokenizer_class": "LlamaTokenizerFast",
    "legacy": True,
    "add_bos_token": True,
  },
  "without a space": {
    "tokenizer_class": "LlamaTokenizer",
    "add_prefix_space": False,
  },
}


@pytest.mark.parametrize(
  ("in_file", "has_space"), [(False, True), (True, None), (True, False)]
)
@pytest.mark.parametrize(
  ("of", "model_type"),
  [
    ("GPT2Tokenizer", None),
    ("RobertaTokenizerFast", "llama"),
    ("PreTrainedTokenizerFast", "qwen2"),
    ("PreTrainedTokenizerFast", None),
  ],
)
def test_a_space_before_a_text_is_that_of_transformers(
  tmp_path, of, model_type, in_file, has_space
):
  made = llama3()
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.ByteLevel(add_prefix_space=in_file)]
  )
  settings = {"tokenizer_class": of, "add_prefix_space": has_space}
  if has_space is None:
    del settings["add_prefix_space"]
  llama_tokenizer.save(tmp_path, made, **settings)
  if model_type:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
  reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ours = tokenizer_lib.load(tmp_path)
  for text in ("the an", " the", "a<s>the", ""):
    ids = reference(text, add_special_tokens=False).input_ids
    assert ours.encode(text).tolist() == ids


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_text_are_those_of_transformers(tmp_path, kind, settings):
  made = KINDS[kind]()
  made.enable_truncation(5)  # what tokenizer.json says of it is not heeded
  llama_tokenizer.save(tmp_path, made, **SETTINGS[settings])
  ours = tokenizer_lib.load(tmp_path)
  reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert ours.vocab_size == len(reference)
  for text in TEXTS:
    whole = reference(text).input_ids
    assert ours.encode_prompt(text).tolist() == whole
    alone = reference(text, add_special_tokens=False).input_ids
    assert ours.encode(text).tolist() == alone
    assert len(whole) > len(alone)
  rng = np.random.default_rng(0)
  for length in rng.integers(0, 60, 60):
    tokens = rng.integers(0, ours.vocab_size, length)
    ordinary = rng.integers(259, ours.vocab_size, length)
    tokens = np.where(rng.random(length) < 0.6, ordinary, tokens)
    text = reference.decode(tokens.tolist(), skip_special_tokens=True)
    assert ours.decode(tokens) == text
    shown = stop_strings.TokenText(ours)
    assert "".join(map(shown.add, tokens[:, None])) + shown.finish() == text


@pytest.mark.parametrize(
  ("settings", "special_map"),
  [
    ({}, {}),
    ({"eos_token": "</s>", "pad_token": None}, {"pad_token": "<unk>"}),
    ({"eos_token": "<unk>"}, {"eos_token": {"content": "</s>"}}),
    ({"eos_token": "<unk>"}, {"eos_token": None}),
    (
      {"eos_token": "<unk>", "added_tokens_decoder": {}},
      {"eos_token": "</s>"},
    ),
    ({"tokenizer_class": "LlamaTokenizer"}, {}),
    ({"tokenizer_class": "LlamaTokenizer", "bos_token": None}, {}),
    ({"tokenizer_class": "Qwen2Tokenizer"}, {"eos_token": "a"}),
    ({"tokenizer_class": "GPT2Tokenizer", "image_token": "a"}, {}),
    ({"extra_special_tokens": {"image": "a", "sound_token": "e"}}, {}),
    ({}, {"image_token": {"content": "a"}}),
  ],
)
def test_named_tokens_are_those_of_transformers(
  tmp_path, settings, special_map
):
  llama_tokenizer.byte_fallback().save(str(tmp_path / "tokenizer.json"))
  settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
  for name, value in (
    ("tokenizer_config.json", settings),
    ("special_tokens_map.json", special_map),
  ):
    (tmp_path / name).write_text(json.dumps(value))
  reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert model_files.special_tokens(tmp_path) == reference.special_tokens_map


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """A model of transformers with a tokenizer, and its greedy continuation."""
  directory = tmp_path_factory.mktemp("checkpoint")
  made = llama_tokenizer.byte_fallback()
  llama_tokenizer.save(directory, made)
  torch.manual_seed(1)
  settings = transformers.LlamaConfig(
    vocab_size=made.get_vocab_size() + 4,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
  )
  model = transformers.LlamaForCausalLM(settings).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      if parameter.ndim > 1:
        parameter.copy_(0.3 * torch.randn_like(parameter))
  model.save_pretrained(directory)
  (directory / "generation_config.json").unlink()
  return directory


def generate(directory, prompt):
  """What transformers writes after it until an end, or 16 tokens."""
  model = transformers.AutoModelForCausalLM.from_pretrained(directory)
  batch = torch.tensor(prompt[None].astype(np.int64))
  return model.generate(
    batch,
    attention_mask=torch.ones_like(batch),
    do_sample=False,
    max_new_tokens=16,
    pad_token_id=0,
  )[0].tolist()


def write(directory, prompt):
  """What our engine writes, made as a run makes it, and how that ends."""
  config = sections.Config()
  config.model.name = str(directory)
  config.rollout.num_slots = 2
  config.rollout.cache_tokens = 32
  config.rollout.prefill_buckets = config.rollout.window_buckets = (32,)
  setup = setup_lib.resolve(config, jax.devices()[:2])
  engine = assembly.make_engine(setup)
  _, params = hf_weights.load(directory)
  params = jax.tree.map(jnp.asarray, params)
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  weights = transformer.unstack(params, setup.model.num_layers)
  scheduler.adopt(engine.load_params(weights, 0), 0)
  sequence = sequence_lib.Sequence(
    prompt,
    limit=len(prompt) + 16,
    stream=sampling.Stream.TRAIN,
    group=0,
    member=0,
    settings=sampling.SamplingSettings(temperature=0.0),
  )
  scheduler.submit(sequence)
  tiny.finish(scheduler)
  return sequence.written().tolist(), sequence.finish_reason


def test_a_checkpoint_ends_where_transformers_ends_it(checkpoint):
  tokenizer = tokenizer_lib.load(checkpoint)
  prompt = tokenizer.encode_prompt("the")
  free = generate(checkpoint, prompt)
  written = free[len(prompt) :]
  assert len(written) == 16 and len(set(written)) > 8
  config = json.loads((checkpoint / "config.json").read_text())
  for place, ids in (
    ("generation_config.json", [2, written[6]]),
    ("generation_config.json", 2),
    ("config.json", [2, written[3]]),
  ):
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    if place == "config.json":
      (checkpoint / place).write_text(
        json.dumps(config | {"eos_token_id": ids})
      )
    else:
      (checkpoint / place).write_text(json.dumps({"eos_token_id": ids}))
    expected = generate(checkpoint, prompt)
    found, reason = write(checkpoint, prompt)
    assert found == expected
    ends = ids if isinstance(ids, list) else [ids]
    assert reason == ("eos" if found[-1] in ends else "length")
    loaded = tokenizer_lib.load(checkpoint)
    assert set(loaded.end_tokens) == {2, *ends}
    completion = found[len(prompt) :]
    if reason == "eos":
      assert len(completion) < 16
      completion = completion[:-1]
    assert loaded.decode(found[len(prompt) :]) == tokenizer.decode(completion)
