"""What agents in sessions may ask of a call, and agents in threads."""

import functools
import ssl
import threading

import httpx
import numpy as np
import openai
import pytest
import test_sessions

from jaxrl_async import types
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import messages
from jaxrl_async.sessions import episode as session_episode

play = test_sessions.play


async def asks_for_little(access, item):
  """Ends answers early, in one chat, and in token ids."""
  messages = [test_sessions.user("question")]

  async def answer(text, reason, **options):
    choice = await test_sessions.say(access, messages, **options)
    assert (choice.message.content, choice.finish_reason) == (text, reason)
    messages.extend(
      [choice.message.model_dump(exclude_none=True), test_sessions.user("go")]
    )

  fine = test_sessions.TOKENIZER.encode("fine").tolist()
  await answer(test_sessions.TOKENIZER.decode(fine[:1]), "length", max_tokens=1)
  await answer("fine", "stop", max_completion_tokens=len(fine) + 1)
  await answer("f", "stop", stop=["no", "in"])
  extra = {"stop_token_ids": [fine[0]]}
  await answer(
    test_sessions.TOKENIZER.decode(fine[:1]), "stop", extra_body=extra
  )
  await answer("fine", "stop", max_tokens=10_000)
  headers = {"authorization": f"Bearer {access.api_key}"}
  async with httpx.AsyncClient(headers=headers) as calls:
    answered = await calls.post(
      access.base_url.removesuffix("/v1") + "/inference/v1/generate",
      json={"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    )
  (choice,) = answered.json()["choices"]
  assert (choice["token_ids"], choice["finish_reason"]) == (fine[:1], "length")
  return 1.0


async def asks_little_twice(access, item):
  """Ask on depending on why the first answer has ended."""
  messages = [test_sessions.user("question")]
  first = await test_sessions.say(access, messages, max_tokens=1)
  messages += [
    first.message.model_dump(exclude_none=True),
    test_sessions.user(first.finish_reason),
  ]
  await test_sessions.say(access, messages, stop="or")
  return 1.0


async def is_refused(access, item):
  """Ask for what would be another distribution, or can never be."""
  for name, options in {
    "min_tokens": {"extra_body": {"min_tokens": 2}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "stop_token_ids": {"extra_body": {"stop_token_ids": [*range(9)]}},
  }.items():
    with pytest.raises(openai.BadRequestError) as caught:
      await test_sessions.say(access, [test_sessions.user("hello")], **options)
    assert caught.value.param == name
  await test_sessions.say(access, [test_sessions.user("hello")])
  return 1.0


async def samples_otherwise(access, item, **options):
  for _ in range(2):
    await test_sessions.say(access, [test_sessions.user("hello")], **options)
  return 1.0


async def counts_cached(access, item):
  async with test_sessions.client(access) as calls:
    done = await calls.chat.completions.create(
      model=access.model, messages=[test_sessions.user("hello")]
    )
  usage = done.usage
  assert usage.prompt_tokens > 5
  return usage.prompt_tokens_details.cached_tokens


def in_no_coroutine(access, item, **params):
  """Call, together with all other agents of the test."""
  TOGETHER[0].wait(60.0)
  with openai.OpenAI(
    base_url=access.base_url,
    api_key=access.api_key,
    max_retries=0,
    http_client=httpx.Client(verify=CERTIFICATES),
  ) as calls:
    done = calls.chat.completions.create(
      model=access.model, messages=[test_sessions.user("hello")], **params
    )
  return float(done.choices[0].message.content == "fine")


async def gives_a_number_of_numpy(access, item):
  await test_sessions.say(access, [test_sessions.user("hello")])
  return np.float32(1.0)


async def gives_more_than_is_read(access, item, **fields):
  await test_sessions.say(access, [test_sessions.user("hello")])
  return types.Reward(score=1.0, **fields)


def in_a_wrapper(access, item):
  return gives_a_number_of_numpy(access, item)


TOGETHER = [threading.Barrier(1)]
CERTIFICATES = ssl.create_default_context()


def raises_in_a_thread(access, item):
  raise StopIteration("no more")


def yields_nothing(access, item):
  yield 1.0


def named(function):
  return f"{__name__}:{function.__name__}"


def test_a_function_may_return_a_coroutine(play):
  found = play(named(in_a_wrapper))
  assert found.failure == "" and found.reward == 1.0


@pytest.mark.parametrize(
  "fields", [{"token_scores": {}}, {"token_scores": {1: 2.0}}]
)
def test_what_is_not_read_of_a_reward_is_refused_by_name(play, fields):
  found = play(named(gives_more_than_is_read), params=fields)
  (name,) = fields
  assert f"a Reward with {name}" in found.failure


def test_answers_end_where_their_calls_say(play):
  found = play(named(asks_for_little))
  assert found.failure == "" and found.reward == 1.0
  assert len(found.branches) == 2  # the chat, and the token ids
  fine = test_sessions.TOKENIZER.encode("fine").tolist()
  assert found.ends == [
    messages.Ends(max_tokens=1),
    messages.Ends(max_tokens=len(fine) + 1),
    messages.Ends(stop=("no", "in")),
    messages.Ends(stop_token_ids=(fine[0],)),
    messages.Ends(),
    messages.Ends(max_tokens=1),
  ]


def test_what_the_policy_would_not_write_by_itself_is_refused(play):
  found = play(named(is_refused))
  assert found.failure == "" and found.reward == 1.0


@pytest.mark.parametrize(
  ("asked", "told"),
  [
    ({}, []),
    ({"temperature": 0.7, "top_p": 1.0}, []),
    ({"temperature": 1.0, "top_p": 0.9, "seed": 3}, ["1.0", "0.9", "3"]),
  ],
)
def test_sampling_that_has_no_effect_is_told_once(play, caplog, asked, told):
  options = {"params": asked, "temperature": 0.7}
  assert play(named(samples_otherwise), **options).failure == ""
  names = [name for name in asked if told]
  assert [record.getMessage() for record in caplog.records] == [
    f"calls of agents ask for {name}={value}, which has no effect: the policy"
    " is sampled with rollout.temperature=0.7"
    for name, value in zip(names, told, strict=True)
  ]


def test_cached_tokens_are_told(play, monkeypatch):
  plain = test_sessions.written
  for num_cached, told in ((5, 5), (10_000, None)):
    monkeypatch.setattr(
      test_sessions,
      "written",
      lambda text, n=num_cached: plain(text)._replace(num_cached=n),
    )
    found = play(named(counts_cached))
    assert found.failure == ""
    prompt, _ = found.branches[0][0]
    assert found.reward == (len(prompt) if told is None else told)


def test_agents_that_are_no_coroutines_run_in_threads_of_their_own():
  num_agents = 64
  TOGETHER[0] = threading.Barrier(num_agents)
  environment = environment_lib.Environment(
    functools.partial(session_episode.run_agent, agent=named(in_no_coroutine)),
    tokenizer=test_sessions.TOKENIZER,
    template=test_sessions.TEMPLATE,
  )
  prompt = types.Prompt(prompt_id="p", tokens=np.array([5], np.int32), item={})
  conversations = [
    environment.open(prompt, key=(number, 0), limit=test_sessions.LIMIT)
    for number in range(num_agents)
  ]
  for conversation in conversations:
    conversation.begin()
  # Each of them calls before any is answered.
  asking = [environment.answers.get(timeout=60.0) for _ in conversations]
  for conversation in asking:
    assert len(conversation.taken().tokens) > 5
    conversation.send(test_sessions.written("fine"))
  for _ in asking:
    assert environment.answers.get(timeout=60.0).taken().tokens is None
  for conversation in conversations:
    (event,) = conversation.context.events[2:]
    assert (event.kind, event.text) == (types.EventKind.REWARD, "1.0")
  environment.close(30.0)


def test_what_an_agent_raises_in_its_thread_is_its_failure(play):
  found = play(named(raises_in_a_thread))
  assert "StopIteration" in found.failure


def test_a_generator_is_no_agent(play):
  assert "is no function" in play(named(yields_nothing)).failure


@pytest.mark.parametrize("count", [1, 2])
def test_a_record_has_what_ended_an_answer(play, count):
  whole = play(named(asks_little_twice))
  recorded, events = whole.recorded(count)
  again = play(named(asks_little_twice), recorded=recorded, events=events)
  assert again.failure == "" and again.tokens == whole.tokens
  assert "length" in again.texts[0]
