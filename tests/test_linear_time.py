"""What strangers send, and files of theirs, take time in proportion to size.

Each parser reads texts of four sizes, each twice as long as the one before.
`pytest -n 0 -s` shows the milliseconds, and how many bytes the last one has.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import gc
import json
import pathlib
import time
from typing import Any

import grpc_world
import llama_tokenizer
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny
import tokenizers

from jaxrl_async import types
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import timing_record
from jaxrl_async.rewards import code
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import match
from jaxrl_async.rewards import mathematics
from jaxrl_async.serving import bodies
from jaxrl_async.serving import errors
from jaxrl_async.serving import jetstream_grpc
from jaxrl_async.serving import protocol
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib

SIZES = (1, 2, 4, 8)
# Times what is linear. In eight times the size, what is quadratic takes 64
# times as long, and what sorts some ten times.
MOST = 3.0
LEAST_S = 2e-3  # less than this cannot be compared
NUM_TRIES = 5  # other processes disturb some of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parser:
  """Something that reads what others wrote.

  Attributes:
    make: returns what it reads, of some size; it may write to a directory.
    read: reads that. It may refuse it.
    size: of the first of the four.
  """

  make: Callable[[int, pathlib.Path], Any]
  read: Callable[[Any], Any]
  size: int


def seconds(parser, given):
  gc.disable()  # it would look at everything else in this process
  try:
    start_s = time.process_time()
    with contextlib.suppress(errors.ApiError, ValueError):
      parser.read(given)
    return time.process_time() - start_s
  finally:
    gc.enable()


def is_linear(times_s):
  """Return whether the times of the first sizes are in proportion to them."""
  least_s = max(times_s[0], LEAST_S)
  return all(
    time_s <= MOST * size * least_s
    for size, time_s in zip(SIZES, times_s, strict=False)
  )


def check(name, parser, folder):
  """Measure until the times are linear; fail if they never are."""
  times_s = []
  for size in SIZES:
    given = parser.make(size * parser.size, folder)
    times_s.append(min(seconds(parser, given) for _ in range(2)))
    for _ in range(NUM_TRIES):
      if is_linear(times_s):
        break
      times_s[-1] = min(times_s[-1], seconds(parser, given))
    assert is_linear(times_s), (name, times_s)
  shown = " ".join(f"{1000 * time_s:.1f}" for time_s in times_s)
  print(f"{name}: {SIZES[-1] * parser.size}: {shown} ms")


# -- HTTP bodies ---------------------------------------------------------------

BOUNDS = bodies.Bounds(
  tokens=2**20, prompts=128, characters=2**24, max_body_bytes=2**24
)


def http_body(kind, size, make):
  def read(data):
    wanted = protocol.parse(kind, data, BOUNDS)
    if kind is protocol.Chat:
      return [message.model_dump() for message in wanted.messages]
    return wanted.prompts

  return Parser(make=lambda n, _: make(n), read=read, size=size)


def completion(size, make):
  return http_body(protocol.Completion, size, make)


def fields(**given):
  return json.dumps({"model": "policy", **given}).encode()


def names(n):
  return [f'"{i:x}": 0' for i in range(n)]


def json_object(members):
  return ("{" + ", ".join(members) + "}").encode()


def messages(n):
  return fields(messages=[{"role": "user", "content": "a"}] * n)


def parts(n):
  part = {"type": "text", "text": "a"}
  return fields(messages=[{"role": "user", "content": [part] * n}])


BODIES = {
  "names, the last one twice": completion(
    8_000, lambda n: json_object(names(n) + names(n)[-1:])
  ),
  "names in an inner object": completion(
    8_000, lambda n: b'{"metadata": ' + json_object(names(n)) + b"}"
  ),
  "objects": completion(4_000, lambda n: fields(prompt=[{}] * n)),
  "lists of token ids": completion(4_000, lambda n: fields(prompt=[[5]] * n)),
  "escapes": completion(
    100_000, lambda n: b'{"prompt": "%s"}' % (rb"\ud83d\ude00" * n)
  ),
  "nested lists": completion(
    60, lambda n: b"[%s0]" % (b"%s%s," % (b"[" * 150, b"]" * 150) * n)
  ),
  "objects that do not end": completion(20_000, lambda n: b'{"a":' * n),
  "one long integer": completion(
    100_000, lambda n: b'{"seed": %s}' % (b"9" * n)
  ),
  "fractions": completion(
    8_000, lambda n: b'{"prompt": [%s0]}' % (b"123456789012345678e-300," * n)
  ),
  "messages": http_body(protocol.Chat, 500, messages),
  "parts of a message": http_body(protocol.Chat, 1_000, parts),
}

# -- gRPC ----------------------------------------------------------------------


def read_message(data):
  message = grpc_world.API.messages.DecodeRequest.FromString(data)
  service = grpc_world.make_service(
    grpc_world.Queue(max_waiting=1, cache_tokens=2**24, vocab_size=2**17)
  )
  content, _ = jetstream_grpc.Orchestrator(service)._get_prefill_content(
    message
  )
  return service.tokens(content, "prompt")


def message(size, make):
  return Parser(
    make=lambda n, _: make(n).SerializeToString(), read=read_message, size=size
  )


MESSAGES = {
  "token ids": message(
    20_000, lambda n: grpc_world.tokens_request(np.full(n, 5))
  ),
  "a text": message(10_000, lambda n: grpc_world.text_request("a" * n)),
}

# -- tokenizers, and the text of tokens ----------------------------------------

LLAMA = llama_tokenizer.wrapped()
CHARACTERS = tokenizer_lib.character_level()


def byte_level():
  """Of 256 tokens, with the pre-tokenizer and the normalizer of Qwen2."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate(alphabet)}
  merges = [(a, b) for a in "eĠð" for b in "eĠŁ"]
  for pair in merges:
    vocabulary.setdefault("".join(pair), len(vocabulary))
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
  made.normalizer = tokenizers.normalizers.NFC()
  pattern = tokenizers.Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Split(pattern, "isolated"),
      tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
      ),
    ]
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens(["</s>"])
  return made


BYTES = tokenizer_lib.Tokenizer(
  byte_level(), eos_token="</s>", pad_token="</s>"
)
TEXTS = {
  "spaces": " ",
  "lines and spaces": "\n ",
  "emoji": "\U0001f600",
  "words": "the stop ",
  "beginnings of special tokens": "</",
}


def text_of(part, tokenizer, size=8_000):
  return Parser(
    make=lambda n, _: "e" + part * (n // len(part)),
    read=tokenizer.encode,
    size=size,
  )


def tokens_of(part, strings=()):
  """Tokens that arrive one by one, as the engine writes them."""

  def read(tokens):
    text = stop_strings.CompletionText(LLAMA, strings)
    for token in tokens:
      text.add([token])
    text.finish()

  return Parser(
    make=lambda n, _: LLAMA.encode(part * n)[:n].tolist(), read=read, size=250
  )


TOKENIZERS = {
  **{f"bytes, {name}": text_of(part, BYTES) for name, part in TEXTS.items()},
  **{f"Llama, {name}": text_of(part, LLAMA) for name, part in TEXTS.items()},
  "characters": text_of("a", CHARACTERS),
  "tokens": tokens_of("the stop "),
  "tokens, stop strings": tokens_of("the stop ", ("abc",)),
  "tokens of bytes": tokens_of("\U0001f600"),
  "tokens of bytes, stop strings": tokens_of("\U0001f600", ("abc",)),
}

# -- chat templates ------------------------------------------------------------

QWEN = """\
{%- for message in messages %}
  {%- if loop.first and message.role != 'system' %}
    {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
  {%- endif %}
  {{- '<|im_start|>' + message.role + '\n' + message.content }}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def rendered(size, make):
  template = chat_template_lib.ChatTemplate(QWEN)
  return Parser(make=lambda n, _: make(n), read=template.render, size=size)


def source(size, make):
  read = chat_template_lib.ChatTemplate
  return Parser(make=lambda n, _: make(n), read=read, size=size)


TEMPLATES = {
  "messages": rendered(4_000, lambda n: [{"role": "user", "content": "a"}] * n),
  "one message": rendered(
    200_000, lambda n: [{"role": "user", "content": "a " * n}]
  ),
  "statements": source(50, lambda n: "{{ x }}{% if x %}a{% endif %}" * n),
  "text": source(20_000, lambda n: "{ % \n" * n),
  "a comment that does not end": source(100_000, lambda n: "{#" * n),
  "an expression": source(200, lambda n: "{{ " + "x ~ " * n + "x }}"),
}

# -- files of models -----------------------------------------------------------


def write(path, value):
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(value))


def files(size, make, read):
  """Read a directory that `make` fills."""

  def fill(n, folder):
    make(n, folder)
    return folder

  return Parser(make=fill, read=read, size=size)


def vocabulary(n, folder):
  stored = json.loads(byte_level().to_str())
  known = stored["model"]["vocab"]
  letters = [token for token in known if len(token) == 1]
  pairs = ((a, b) for a in letters for b in letters if a + b not in known)
  for pair, _ in zip(pairs, range(n), strict=False):
    known["".join(pair)] = len(known) + 1
    stored["model"]["merges"].append(pair)
  write(folder / "tokenizer.json", stored)
  write(folder / "tokenizer_config.json", {"eos_token": "</s>"})


def added_tokens(n, folder):
  stored = json.loads(byte_level().to_str())
  (end,) = stored["added_tokens"]
  for i in range(n):
    is_special = i % 2 == 0
    added = {"id": 500 + i, "content": f"<{i}>", "special": is_special}
    stored["added_tokens"].append(
      {**end, **added, "normalized": not is_special}
    )
  write(folder / "tokenizer.json", stored)
  write(folder / "tokenizer_config.json", {"eos_token": "</s>"})


def named_tokens(n, folder):
  named_of = {f"a{i}_token": f"<{i}>" for i in range(n)}
  added_tokens(1, folder)
  write(folder / "tokenizer_config.json", {"eos_token": "</s>", **named_of})


def end_tokens(n, folder):
  added_tokens(1, folder)
  write(folder / "generation_config.json", {"eos_token_id": [*range(n)]})


def templates(n, folder):
  named_of = [{"name": f"a{i}", "template": "a"} for i in range(n)]
  write(folder / "tokenizer_config.json", {"chat_template": named_of})


def config(n, folder):
  settings = hf_config.config_json(tiny.MODEL)
  settings |= {f"a{i}": i for i in range(n)}
  write(folder / "config.json", settings)


def index(n, folder):
  """Tensors that old files have and nobody reads."""
  config(0, folder)
  unused = [f"model.layers.{i}.rotary_emb.inv_freq" for i in range(n)]
  shard = "model-1.safetensors"
  safetensors_numpy.save_file(
    dict.fromkeys(unused, np.zeros(0, np.float32)), folder / shard
  )
  write(
    folder / "model.safetensors.index.json",
    {"weight_map": dict.fromkeys(unused, shard)},
  )


FILES = {
  "vocabulary": files(4_000, vocabulary, tokenizer_lib.load),
  "added tokens": files(500, added_tokens, tokenizer_lib.load),
  "named tokens": files(4_000, named_tokens, tokenizer_lib.load),
  "end tokens": files(20_000, end_tokens, tokenizer_lib.load),
  "chat templates": files(5_000, templates, chat_template_lib.load),
  "settings": files(10_000, config, hf_config.model_config),
  "tensors": files(4_000, index, hf_weights.check),
}

# -- schedules -----------------------------------------------------------------


def trajectory(member):
  one = np.ones(1, np.int32)
  return types.Trajectory(
    member=member,
    tokens=one,
    loss_mask=one.astype(bool),
    behavior_logprobs=one.astype(np.float32),
    policy_versions=one,
    finish_reason=types.FinishReason.EOS,
    reward=types.Reward(score=1.0),
    cache_builds=(types.CacheBuild(1, 1, 0, decode_step=0),),
  )


def schedule(folder, num_steps, num_trajectories):
  (folder / "timing.jsonl").unlink(missing_ok=True)
  written = timing_record.TimingRecord(
    folder,
    0,
    record_steps=True,
    first_step=0,
    environment={},
    config={},
  )
  group = types.RolloutGroup(
    admission=types.Admission(index=0, birth=0, deadline=9),
    prompt=types.Prompt(
      prompt_id="sums/train/0", tokens=np.zeros(1, np.int32), item={}
    ),
    trajectories=[trajectory(i) for i in range(num_trajectories)],
  )
  for step in range(num_steps):
    written.add_step(step, [group], {"loss": [0.1]})
  written.close()


def read_schedule(folder):
  recorded = recorded_timing.read(folder)
  recorded_timing.start_of(folder, recorded.num_steps)
  for step in range(recorded.num_steps):
    recorded.step(step)


SCHEDULES = {
  "steps": files(50, lambda n, at: schedule(at, n, 1), read_schedule),
  "trajectories": files(100, lambda n, at: schedule(at, 2, n), read_schedule),
}

# -- completions, which the policy writes --------------------------------------


def completions(part, size, read):
  return Parser(make=lambda n, _: part * n, read=read, size=size)


COMPLETIONS = {
  "answers": completions(
    "Answer: 1 ",
    20_000,
    lambda text: extraction.extract_answer(text, "Answer:"),
  ),
  "digits": completions("1", 20_000, match.last_number),
  "commas": completions("1,,", 10_000, match.last_number),
  "boxes that do not end": completions(r"\boxed{", 5_000, mathematics.boxed),
  "hashes": completions("#### ", 10_000, mathematics.answer_of),
  "blocks": completions("```\n", 10_000, code.program_of),
  "blocks that do not end": completions("```python ", 10_000, code.program_of),
  "spaces": completions(
    " ", 50_000, lambda text: code.program_of(text, "def f():\n", "f")
  ),
}

PARSERS = {
  f"{kind}: {name}": parser
  for kind, table in {
    "HTTP body": BODIES,
    "gRPC": MESSAGES,
    "tokenizer": TOKENIZERS,
    "chat template": TEMPLATES,
    "model files": FILES,
    "schedule": SCHEDULES,
    "completion": COMPLETIONS,
  }.items()
  for name, parser in table.items()
}


@pytest.mark.parametrize("name", PARSERS)
def test_time_is_in_proportion_to_size(name, tmp_path):
  check(name, PARSERS[name], tmp_path)


def test_time_that_is_not_would_be_found(tmp_path):
  """The search for repeated names that once blocked the server."""

  def read(names):
    return next((name for name in names if names.count(name) > 1), None)

  parser = Parser(
    make=lambda n, _: [str(i) for i in range(n)], read=read, size=500
  )
  with pytest.raises(AssertionError, match="quadratic"):
    check("quadratic", parser, tmp_path)
