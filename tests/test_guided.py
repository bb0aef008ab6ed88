"""Guided decoding: what is drawn fits a grammar, and nothing else changes."""

import json
import sys
from typing import Literal

from jax import numpy as jnp
import jsonschema
import numpy as np
import openai
import pydantic
import pytest
import serving_world
import tiny

from jaxrl_async.engine import sampling
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.serving import guided
from jaxrl_async.text import guides as guides_lib

TOKENIZER = serving_world.TOKENIZER
V = tiny.MODEL.vocab_size
SCHEMAS = [
  {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
  },
  {"enum": ["yes", "no", 3]},
  {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
  {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
  {
    "type": "object",
    "properties": {"x": {"const": 1}, "y": {"pattern": "^[ab]{1,2}$"}},
    "required": ["x", "y"],
    "additionalProperties": False,
  },
]


class Only:
  """A guide that allows what a function of the tokens so far returns."""

  error = ""

  def __init__(self, allowed):
    self.allowed = allowed
    self.taken = []

  def copy(self):
    return Only(self.allowed)

  def allow(self, row):
    row[:] = 0
    for token in self.allowed(self.taken):
      row[token // 32] |= (
        np.int32(1 << token % 32) if token % 32 < 31 else (np.int32(-(2**31)))
      )

  def take(self, tokens):
    self.taken += tokens.tolist()


def sequence(guide=None, *, member=0, limit=20, **settings):
  return sequence_lib.Sequence(
    tiny.prompt(5),
    limit=limit,
    stream=sampling.Stream.SERVE,
    group=3,
    member=member,
    settings=sampling.SamplingSettings(ignore_eos=True, **settings),
    guide=guide,
  )


def write(*sequences, **options):
  scheduler = tiny.ready(**options)
  tiny.write_all(scheduler, list(sequences))
  return scheduler


def test_bits_are_unpacked_with_the_lowest_first():
  bits = np.array([[1, -(2**31), 6], [-1, 0, 1]], np.int32)
  expected = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
  found = sampling.unpacked(jnp.asarray(bits), 70)
  np.testing.assert_array_equal(found, expected[:, :70].astype(bool))


@pytest.mark.parametrize("calls_in_flight", [1, 2])
def test_a_guided_sequence_draws_what_its_guide_allows(calls_in_flight):
  def next_two(taken):
    return [(7 * len(taken)) % V, (7 * len(taken) + 40) % V]

  guides = [Only(next_two) for _ in range(6)]  # more than there are slots
  written = [sequence(guide, member=i) for i, guide in enumerate(guides)]
  free = [sequence(member=10 + i, limit=9 + i) for i in range(3)]
  write(*written[:3], *free, *written[3:], calls_in_flight=calls_in_flight)
  for one, guide in zip(written, guides, strict=True):
    drawn = one.tokens[5 : one.length].tolist()
    assert drawn == guide.taken and len(drawn) == 15
    for i, token in enumerate(drawn):
      assert token in next_two(drawn[:i])
    # Of two tokens whose probabilities are what is left after the mask.
    assert (one.behavior_logprobs[5:20] <= 0).all()
  assert len({tuple(guide.taken) for guide in guides}) == 6


def test_the_logprob_is_that_of_the_distribution_drawn_from():
  one = sequence(Only(lambda taken: [11, 50, 90]), limit=6)
  write(one)
  free = sequence(limit=6)
  logits = tiny.logits(tiny.params(), free.tokens[:5])[4, [11, 50, 90]]
  logits = logits.astype(np.float64)
  logprobs = logits - np.log(np.exp(logits).sum())
  token = [11, 50, 90].index(int(one.tokens[5]))
  np.testing.assert_allclose(
    one.behavior_logprobs[5], logprobs[token], rtol=1e-4
  )


def test_tokens_are_steered_where_a_guide_leaves_out_much():
  temperature = 0.5

  def forbidden(count):
    return [(17 * count + k) % V for k in range(4)]

  guide = Only(lambda taken: sorted({*range(V)} - {*forbidden(len(taken))}))
  one = sequence(guide, limit=32, temperature=temperature)
  beside = sequence(Only(lambda taken: range(V)), member=1, limit=9)
  free = sequence(member=2, limit=9)
  write(one, beside, free)
  logits = tiny.logits(tiny.params(), one.tokens).astype(np.float64)
  odds = np.exp(logits[4:31] / temperature)
  odds /= odds.sum(axis=1, keepdims=True)
  left_out = np.array([odds[i, forbidden(i)].sum() for i in range(27)])
  is_steered = left_out > sampling.MAX_LEFT_OUT
  assert 5 < is_steered.sum() < 22
  assert one.steered == (5 + np.flatnonzero(is_steered)).tolist()
  own = np.log(odds[np.arange(27), one.tokens[5:]])
  gained = one.behavior_logprobs[5:] - own
  np.testing.assert_allclose(gained, -np.log1p(-left_out), atol=1e-4)
  assert (gained[~is_steered] < 1.2e-3).all()
  assert beside.steered == free.steered == []


@pytest.mark.parametrize("calls_in_flight", [1, 2])
def test_sequences_beside_a_guided_one_are_not_changed(calls_in_flight):
  options = {"calls_in_flight": calls_in_flight}
  alone = [sequence(member=i, limit=8 + i) for i in range(8)]
  write(*alone, **options)
  beside = [sequence(member=i, limit=8 + i) for i in range(8)]
  guide = Only(lambda taken: [5])
  guided_one = sequence(guide, limit=9)
  scheduler = tiny.ready(**options)
  for one in beside[:3]:  # the host does not know the last one's slot yet
    scheduler.submit(one)
    scheduler.step()
  tiny.write_all(scheduler, [*beside[3:5], guided_one, *beside[5:]])
  assert guided_one.tokens[5:9].tolist() == [5] * 4
  for one, other in zip(alone, beside, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(
      one.behavior_logprobs, other.behavior_logprobs
    )


def test_a_guided_sequence_goes_on_under_new_weights():
  guide = Only(lambda taken: [len(taken) + 1])
  scheduler = tiny.ready()
  scheduler.submit(sequence(guide))
  for _ in range(4):
    scheduler.step()
  assert 0 < len(guide.taken) < 15
  scheduler.adopt(tiny.engine_params(version=1, seed=1), 1)
  (one,) = scheduler.sequences()
  tiny.finish(scheduler)
  assert one.tokens[5:20].tolist() == list(range(1, 16)) == guide.taken
  assert set(one.policy_versions[5:20]) == {0, 1}


@pytest.fixture(scope="module")
def serving():
  """A server with room for longer answers."""
  sizes = {"cache_tokens": 128, "window_buckets": (128,)}
  sizes |= {"end_tokens": TOKENIZER.end_tokens}
  scheduler = tiny.scheduler(cls=tiny.SteppedScheduler, **sizes)
  scheduler.adopt(tiny.engine_params(), 0)
  with serving_world.Serving(scheduler=scheduler, cache_tokens=128) as this:
    yield this


@pytest.fixture(scope="module")
def client(serving):
  with serving.client() as this:
    yield this


def wanted(schema, **options):
  described = {"name": "answer", "schema": schema, "strict": True}
  return {
    "model": "tiny",
    "messages": [{"role": "user", "content": "a"}],
    "response_format": {"type": "json_schema", "json_schema": described},
    "max_tokens": 120,
    **options,
  }


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_fit_their_schema(client, schema):
  done = client.chat.completions.create(**wanted(schema, n=8, seed=1))
  texts = {choice.message.content for choice in done.choices}
  for choice in done.choices:
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), schema)
  assert len(texts) > 2
  stream = client.chat.completions.create(
    **wanted(schema, n=2, seed=1), stream=True
  )
  parts = ["", ""]
  for event in stream:
    parts[event.choices[0].index] += event.choices[0].delta.content
  assert parts == [c.message.content for c in done.choices[:2]]


def test_an_object_is_any_object_and_a_completion_may_be_guided(client):
  done = client.completions.create(
    model="tiny",
    prompt="a",
    seed=1,
    n=8,
    max_tokens=120,
    logprobs=0,
    extra_body={"response_format": {"type": "json_object"}},
  )
  found = [c.text for c in done.choices if c.finish_reason == "stop"]
  assert found and all(isinstance(json.loads(text), dict) for text in found)
  for choice in done.choices:
    assert choice.text[0] == "{"
    # Nothing else was allowed, which makes it certain.
    assert choice.logprobs.token_logprobs[0] == 0


BAD_FORMATS = [
  ({"type": "xml"}, "response_format.type"),
  ({"type": "json_schema"}, "belongs to the type json_schema"),
  (
    {"type": "json_schema", "json_schema": {"name": "a"}},
    "schema: is required",
  ),
  (
    {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}},
    "response_format: failed to compile JSON schema: Invalid type: foo",
  ),
  (
    {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
    "Unimplemented keys",
  ),
  (
    {"type": "json_object"},
    "response_format: not together with min_tokens and ignore_eos",
  ),
]


class Place(pydantic.BaseModel):
  """A class within others."""

  x: bool


class Route(pydantic.BaseModel):
  """Go somewhere."""

  places: list[Place]
  then: "Route | None"


class Stop(pydantic.BaseModel):
  """Stop where another class has the same name."""

  place: Literal["here"]
  model_config = {"json_schema_extra": {"$defs": {"Place": {"type": "null"}}}}


@pytest.mark.parametrize("may_speak", [True, False])
def test_classes_within_the_arguments_of_a_call_are_found(may_speak):
  functions = [
    openai.pydantic_function_tool(kind)["function"] for kind in (Route, Stop)
  ]
  assert "$defs" in functions[0]["parameters"]
  grammar = guided.grammar(
    None, functions, "hermes", TOKENIZER, may_speak=may_speak
  )
  inner = '{"places": [], "then": null}'
  for arguments, is_right in (
    (f'{{"places": [{{"x": true}}], "then": {inner}}}', True),
    ('{"places": [null], "then": null}', False),
  ):
    guide = guides_lib.Guides(TOKENIZER).guide(grammar)
    call = f'{{"name": "Route", "arguments": {arguments}}}'
    guide.take(TOKENIZER.encode(f"<tool_call>\n{call}\n</tool_call>"))
    assert bool(guide.error) != is_right


def test_formats_that_cannot_be_followed_are_refused(serving, monkeypatch):
  for form, words in BAD_FORMATS:
    body = serving_world.chat(response_format=form)
    if form == {"type": "json_object"}:
      body["ignore_eos"] = True
    answer = serving.post("/v1/chat/completions", json=body)
    serving_world.check_error(answer, 400, words)
  monkeypatch.setitem(sys.modules, "llguidance", None)
  body = serving_world.chat(response_format={"type": "json_object"})
  answer = serving.post("/v1/chat/completions", json=body)
  serving_world.check_error(answer, 400, "response_format: .* extra `guided`")


def test_a_grammar_that_takes_too_much_fails_its_request(
  serving, client, monkeypatch
):
  monkeypatch.setattr(guides_lib.Guide, "error", "too complex")
  for n in (1, 6):  # more than there are slots
    with pytest.raises(openai.InternalServerError, match="grammar"):
      client.chat.completions.create(**wanted(SCHEMAS[0], n=n))
    assert serving_world.wait_until(serving.is_idle)


class Answer(pydantic.BaseModel):
  """What a client asks for as a class."""

  a: Literal[1, 2]
  b: list[bool] = pydantic.Field(max_length=2)


def test_the_client_parses_an_answer_of_its_own_class(client):
  done = client.chat.completions.parse(
    model="tiny",
    messages=[{"role": "user", "content": "a"}],
    response_format=Answer,
    seed=1,
    max_tokens=120,
  )
  assert isinstance(done.choices[0].message.parsed, Answer)
