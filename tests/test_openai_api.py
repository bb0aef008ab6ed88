"""The HTTP interface, asked by the official client over a real connection."""

import dataclasses

import pytest
import serving_world
import tiny

SEEDS = (1, 4, 5)


@pytest.fixture(scope="module")
def serving():
  with serving_world.Serving() as this:
    yield this


@pytest.fixture(scope="module")
def client(serving):
  with serving.client() as this:
    yield this


@pytest.mark.parametrize("seed", SEEDS)
def test_a_completion_is_what_a_scheduler_alone_writes(client, seed):
  done = client.completions.create(
    model="tiny",
    prompt=serving_world.PROMPT,
    seed=seed,
    n=2,
    logprobs=0,
    max_tokens=16,
    extra_body={"return_token_ids": True},
  )
  assert [choice.index for choice in done.choices] == [0, 1]
  written = 0
  for choice in done.choices:
    tokens, logprobs, trajectory = serving_world.alone(
      seed=seed, choice=choice.index
    )
    assert choice.token_ids == tokens
    assert choice.text == serving_world.TOKENIZER.decode(tokens)
    assert choice.finish_reason == serving_world.finish_of(trajectory)
    assert choice.logprobs.token_logprobs == logprobs
    assert choice.logprobs.tokens == [
      serving_world.TOKENIZER.name_of(t) for t in tokens
    ]
    assert choice.logprobs.text_offset == list(range(len(tokens)))
    assert choice.policy_versions == [0] * len(tokens)
    assert (
      choice.prompt_token_ids
      == serving_world.TOKENIZER.encode(serving_world.PROMPT).tolist()
    )
    written += len(tokens)
  assert done.usage.prompt_tokens == len(serving_world.PROMPT)
  assert done.usage.completion_tokens == written
  assert done.usage.total_tokens == written + len(serving_world.PROMPT)
  assert done.system_fingerprint == "policy_version=0"


def gather(events, n):
  """Texts, finish reasons, logprobs and usage of a streamed completion."""
  texts, reasons, logprobs, usage = (
    [""] * n,
    [None] * n,
    [[] for _ in range(n)],
    None,
  )
  for event in events:
    usage = event.usage or usage
    for choice in event.choices:
      assert reasons[choice.index] is None
      texts[choice.index] += choice.text
      reasons[choice.index] = choice.finish_reason
      if choice.logprobs is not None:
        logprobs[choice.index] += choice.logprobs.token_logprobs
  return texts, reasons, logprobs, usage


@pytest.mark.parametrize("seed", SEEDS)
def test_a_streamed_completion_is_the_same_in_pieces(client, seed):
  wanted = {
    "model": "tiny",
    "prompt": [serving_world.PROMPT, "ab"],
    "seed": seed,
    "n": 3,
    "logprobs": 0,
    "max_tokens": 17,
  }
  whole = client.completions.create(**wanted)
  stream = client.completions.create(
    **wanted, stream=True, stream_options={"include_usage": True}
  )
  texts, reasons, logprobs, usage = gather(stream, 6)
  assert texts == [choice.text for choice in whole.choices]
  assert reasons == [choice.finish_reason for choice in whole.choices]
  assert logprobs == [c.logprobs.token_logprobs for c in whole.choices]
  assert usage == whole.usage
  tokens, _, _ = serving_world.alone("ab", seed=seed, choice=5, max_tokens=17)
  assert texts[5] == serving_world.TOKENIZER.decode(tokens)
  assert whole.usage.prompt_tokens == len(serving_world.PROMPT) + 2


@pytest.mark.slow  # a further engine is compiled
def test_the_usage_of_a_turn_counts_what_was_kept_of_the_turns_before(client):
  scheduler = tiny.scheduler(
    cls=tiny.SteppedScheduler,
    num_pages=40,
    page_tokens=4,
    prefill_chunk=8,
    kept_tokens=160,
  )
  scheduler.adopt(tiny.engine_params(), 0)

  def ask(of, prompt, **options):
    return of.completions.create(
      model="tiny",
      prompt=prompt,
      seed=len(prompt),
      n=2,
      max_tokens=4,
      extra_body={"ignore_eos": True, "return_token_ids": True},
      **options,
    )

  # Its programs are compiled by the first requests.
  limits = dataclasses.replace(
    serving_world.LIMITS, deadline_s=600.0, max_deadline_s=600.0
  )
  with (
    serving_world.Serving(scheduler=scheduler, limits=limits) as serving,
    serving.client() as keeping,
  ):
    cached, prompt = [], [6, 7, 8, 9, 10, 11, 12, 13, 14]
    for _ in range(3):
      done, plain = ask(keeping, prompt), ask(client, prompt)
      assert done.usage.prompt_tokens == len(prompt)
      assert plain.usage.prompt_tokens_details.cached_tokens == 0
      cached.append(done.usage.prompt_tokens_details.cached_tokens)
      for one, other in zip(done.choices, plain.choices, strict=True):
        assert one.token_ids == other.token_ids
      prompt = [*prompt, *done.choices[0].token_ids]
    assert cached == [0, 12, 16]
    (*_, last) = ask(
      keeping, prompt, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.prompt_tokens_details.cached_tokens == 20
    assert scheduler.stats.cached_tokens == 48


def test_token_ids_and_texts_are_the_same_prompt(client):
  ids = serving_world.TOKENIZER.encode(serving_world.PROMPT).tolist()
  texts = {
    client.completions.create(model="tiny", prompt=prompt, seed=1)
    .choices[0]
    .text
    for prompt in (serving_world.PROMPT, [serving_world.PROMPT], ids, [ids])
  }
  assert texts == {
    serving_world.TOKENIZER.decode(serving_world.alone(seed=1)[0])
  }


def test_a_chat_is_answered_after_the_last_message_and_a_newline(client):
  tokens, logprobs, trajectory = serving_world.alone(
    serving_world.PROMPT + "\n", seed=4, max_tokens=9
  )
  wanted = {
    "model": "tiny",
    "messages": [{"role": "user", "content": serving_world.PROMPT}],
    "seed": 4,
    "logprobs": True,
  }
  done = client.chat.completions.create(**wanted, max_completion_tokens=9)
  (choice,) = done.choices
  assert choice.message.content == serving_world.TOKENIZER.decode(tokens)
  assert choice.message.role == "assistant"
  assert choice.finish_reason == serving_world.finish_of(trajectory)
  assert [entry.logprob for entry in choice.logprobs.content] == logprobs
  assert [bytes(e.bytes).decode() for e in choice.logprobs.content] == [
    entry.token for entry in choice.logprobs.content
  ]
  stream = client.chat.completions.create(**wanted, max_tokens=9, stream=True)
  events = list(stream)
  assert events[0].choices[0].delta.role == "assistant"
  assert all(event.choices[0].delta.role is None for event in events[1:])
  pieces = [event.choices[0].delta.content for event in events]
  assert "".join(pieces) == choice.message.content
  assert events[-1].choices[0].finish_reason == choice.finish_reason
  assert all(event.usage is None for event in events)


def test_a_chat_has_the_token_ids_that_were_read_and_written(client):
  wanted = {
    "model": "tiny",
    "messages": [{"role": "user", "content": serving_world.PROMPT}],
    "seed": 4,
    "max_tokens": 9,
    "logprobs": True,
    "extra_body": {
      "return_token_ids": True,
      "return_tokens_as_token_ids": True,
    },
  }
  prompt = serving_world.PROMPT + "\n"
  tokens, _, _ = serving_world.alone(prompt, seed=4, max_tokens=9)
  whole = client.chat.completions.create(**wanted)
  assert (
    whole.prompt_token_ids == serving_world.TOKENIZER.encode(prompt).tolist()
  )
  assert whole.choices[0].token_ids == tokens
  texts = [entry.token for entry in whole.choices[0].logprobs.content]
  assert texts == [f"token_id:{token}" for token in tokens]
  first, *others = client.chat.completions.create(**wanted, stream=True)
  assert first.prompt_token_ids == whole.prompt_token_ids
  assert all("prompt_token_ids" not in e.model_extra for e in others)
  written = [t for e in (first, *others) for t in e.choices[0].token_ids]
  assert written == tokens


def test_texts_and_chats_become_tokens_and_texts_again(serving):
  def ask(path, **body):
    answer = serving.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()

  text = serving_world.PROMPT
  tokens = serving_world.TOKENIZER.encode(text).tolist()
  assert ask("/tokenize", model="tiny", prompt=text) == {
    "count": len(tokens),
    "max_model_len": tiny.SIZES.cache_tokens,
    "tokens": tokens,
    "token_strs": None,
  }
  chat = ask(
    "/tokenize",
    messages=[{"role": "user", "content": text}],
    add_generation_prompt=True,
    return_token_strs=True,
    chat_template=None,
  )
  assert chat["token_strs"] == [*text, "\n"]
  assert ask("/detokenize", tokens=chat["tokens"]) == {"prompt": text + "\n"}
  end = serving_world.TOKENIZER.eos_id
  whole = ask("/detokenize", tokens=[*tokens, end] * 3)  # more than the cache
  assert whole == {"prompt": (text + "⟨eos⟩") * 3}


def test_a_chat_without_a_bound_may_fill_the_cache(client):
  message = {"role": "user", "content": serving_world.PROMPT}
  lengths = {
    client.chat.completions.create(
      model="tiny", messages=[message], seed=seed
    ).usage.total_tokens
    for seed in range(6)
  }
  assert max(lengths) == tiny.SIZES.cache_tokens


def test_the_seed_decides_what_is_drawn(client):
  def write(**options):
    return (
      client.completions.create(
        model="tiny", prompt=serving_world.PROMPT, **options
      )
      .choices[0]
      .text
    )

  assert write(seed=5) == write(seed=5) != write(seed=4)
  assert write(seed=-1) == write(seed=2**31 - 1)
  assert len({write() for _ in range(4)}) > 1
  assert write(temperature=0, seed=1) == write(temperature=0, seed=2)
  tokens, _, _ = serving_world.alone(seed=1, temperature=0.0)
  assert write(temperature=0) == serving_world.TOKENIZER.decode(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
  seed = serving_world.long_seed()
  text = serving_world.TOKENIZER.decode(serving_world.alone(seed=seed)[0])
  stop = text[3:6]
  wanted = {
    "model": "tiny",
    "prompt": serving_world.PROMPT,
    "seed": seed,
    "max_tokens": 16,
  }
  done = client.completions.create(
    **wanted, stop=[stop, "never"], stream=stream
  )
  if stream:
    (got,), (reason,), _, _ = gather(done, 1)
  else:
    got, reason = done.choices[0].text, done.choices[0].finish_reason
    assert done.usage.completion_tokens == text.index(stop) + 3
  assert got == text[: text.index(stop)]
  assert reason == "stop"
