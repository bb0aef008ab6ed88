"""Agents in sessions, with a scripted policy and unchanged clients."""

import asyncio
import dataclasses
import functools
import sys
import textwrap

import chat_templates
import httpx
import numpy as np
import openai
import pytest

from jaxrl_async import types
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.sessions import episode as session_episode
from jaxrl_async.text import stop_strings

TOKENIZER, TEMPLATE = chat_templates.load(chat_templates.QWEN)
LIMIT = 600
CALL = (
  '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}'
  "\n</tool_call>"
)


# -- a policy that answers what a script says --------------------------------


@dataclasses.dataclass
class Played:
  """What an episode showed and what was written, by branch."""

  branches: list
  context: episode_lib.Context
  failure: str = ""
  ends: list = dataclasses.field(default_factory=list)  # of the turns

  @property
  def texts(self):
    return [
      "".join(TOKENIZER.decode_all(part.tolist()) for part, _ in branch)
      for branch in self.branches
    ]

  @property
  def tokens(self):
    return [
      np.concatenate([part for part, _ in branch]).tolist()
      for branch in self.branches
    ]

  @property
  def reward(self):
    return sum(
      float(event.text)
      for event in self.context.events
      if event.kind == types.EventKind.REWARD
    )

  def recorded(self, count):
    """The first turns as trajectories, and the events up to there."""
    made, turns = [], 0
    for number, branch in enumerate(self.branches):
      if turns >= count:
        break
      parts = branch[: 2 * (count - turns)]
      turns += len(parts) // 2
      tokens = np.concatenate([part for part, _ in parts])
      mask = np.concatenate([np.full(len(p), w) for p, w in parts])
      made.append(
        types.Trajectory(
          member=number * types.MEMBERS,
          tokens=tokens.astype(np.int32),
          loss_mask=mask.astype(bool),
          behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
          policy_versions=np.where(mask, 3, -1).astype(np.int32),
          finish_reason=types.FinishReason.EOS,
        )
      )
    events = [
      event
      for event in self.context.events
      if event.kind != types.EventKind.REWARD and event.turn < count
    ]
    return made, events


def written(text):
  tokens = np.array([*TOKENIZER.encode(text), TOKENIZER.eos_id], np.int32)
  return episode_lib.Written(
    tokens,
    np.full(len(tokens), -0.5, np.float32),
    np.full(len(tokens), 3, np.int32),
    types.FinishReason.EOS,
  )


def cut(line, ends):
  """What there is of a turn that ends there."""
  count = min(len(line.tokens), ends.max_tokens or LIMIT)
  check = stop_strings.check_of(TOKENIZER, ends.stop)
  if check is not None and (found := check(line.tokens[:count])) is not None:
    count = found
  stops = np.isin(line.tokens, ends.stop_token_ids)
  if stops.any():
    count = min(count, int(stops.argmax()) + 1)
  return line._replace(
    tokens=line.tokens[:count],
    logprobs=line.logprobs[:count],
    policy_versions=line.policy_versions[:count],
  )


@pytest.fixture
def play():
  """Play an episode against a script: a function of the text so far."""
  environments = []

  def run(
    agent,
    script=lambda text: "fine",
    *,
    item=None,
    member=0,
    recorded=(),
    events=(),
    max_turns=0,
    is_replay=False,
    limit=LIMIT,
    temperature=1.0,
    most=100,
    **options,
  ):
    environment = environment_lib.Environment(
      functools.partial(session_episode.run_agent, agent=agent, **options),
      tokenizer=TOKENIZER,
      template=TEMPLATE,
      temperature=temperature,
      max_turns=max_turns,
      is_replay=is_replay,
    )
    environments.append(environment)
    conversation = environment.open(
      types.Prompt(
        prompt_id="p", tokens=np.array([5], np.int32), item=item or {"n": 1}
      ),
      key=(0, member),
      limit=limit,
      recorded=recorded,
      events=events,
    )
    branches = [[]]
    for number, trajectory in enumerate(recorded):
      if number:
        branches.append([])
      own = episode_lib.recorded_turns([trajectory])
      for turn in own:
        branches[-1].append((turn.prompt, False))
        branches[-1].append((turn.completion.tokens, True))
    found = Played(branches, conversation.context)
    try:
      answer = environment.settled(conversation.begin())
      for _ in range(most):
        if answer.tokens is None:
          break
        if answer.is_anew:
          branches.append([])
        branches[-1].append((answer.tokens, False))
        found.ends.append(answer.ends)
        line = cut(written(script(found.texts[-1])), answer.ends)
        branches[-1].append((line.tokens, True))
        answer = environment.settled(conversation.send(line))
    except episode_lib.EpisodeError as error:
      found.failure = str(error)
    conversation.close()
    return found

  yield run
  for environment in environments:
    environment.close(30.0)


def client(access):
  return openai.AsyncOpenAI(
    base_url=access.base_url, api_key=access.api_key, max_retries=0
  )


async def say(access, messages, **options):
  async with client(access) as calls:
    done = await calls.chat.completions.create(
      model=access.model, messages=messages, **options
    )
  return done.choices[0]


def user(text):
  return {"role": "user", "content": text}


# -- agents, by name ---------------------------------------------------------


async def two_questions(access, item):
  """Ask, and ask again in the same chat."""
  messages = [user(f"question {item['n']}")]
  first = await say(access, messages)
  messages += [first.message.model_dump(exclude_none=True), user("and more")]
  second = await say(access, messages)
  return float(second.message.content == "fine")


async def with_tools(access, item):
  messages = [user("How is it in Bern?")]
  first = await say(access, messages, tools=chat_templates.TOOLS)
  (call,) = first.message.tool_calls
  assert first.finish_reason == "tool_calls"
  messages += [
    first.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
  ]
  second = await say(access, messages, tools=chat_templates.TOOLS)
  return len(second.message.content)


async def forks(access, item, count=3):
  begin = [user("begin")]
  first = await say(access, begin)
  shared = [*begin, first.message.model_dump(exclude_none=True)]
  for number in range(count):
    await say(access, [*shared, user(f"fork {number}")])
  return 1.0


async def at_once(access, item, count=4):
  await asyncio.gather(
    *(say(access, [user(f"chat {n}")]) for n in range(count))
  )
  return 1.0


async def raises(access, item):
  await say(access, [user("hello")])
  raise LookupError("no such page")


async def hangs(access, item):
  await say(access, [user("hello")])
  await asyncio.Event().wait()


async def returns_text(access, item):
  await say(access, [user("hello")])
  return "good"


async def says_its_thought(access, item):
  await say(access, [user("hello")])
  return types.Reward(score=1.0, parts={types.THOUGHT_TOKENS: 2.0})


async def never_calls(access, item):
  return 1.0


async def calls_for_ever(access, item):
  num = 0
  try:
    while True:
      await say(access, [user(f"again {num}")])
      num += 1
  except openai.PermissionDeniedError as error:
    assert "session is over" in str(error)
  return num


async def too_long(access, item):
  await say(access, [user("short")])
  with pytest.raises(openai.BadRequestError) as caught:
    await say(access, [user("long " * 500)])
  assert caught.value.code == "context_length_exceeded"
  return 1.0


async def wrong_key(access, item):
  await say(access, [user("hello")])
  other = dataclasses.replace(access, api_key="no " + access.api_key)
  with pytest.raises(openai.AuthenticationError):
    await say(other, [user("hello")])
  foreign = dataclasses.replace(
    access, base_url=access.base_url.replace("sessions/", "sessions/0")
  )
  with pytest.raises(openai.AuthenticationError):
    await say(foreign, [user("hello")])
  return 1.0


async def after_the_reward(access, item):
  await say(access, [user("hello")])
  headers = {"authorization": f"Bearer {access.api_key}"}
  async with httpx.AsyncClient(headers=headers) as calls:
    url = access.base_url.removesuffix("/v1") + "/reward"
    assert (await calls.post(url, json={"reward": "1"})).status_code == 400
    long = {"reward": 1, "why": "x" * 10_000}
    assert (await calls.post(url, json=long)).status_code == 413
    assert (await calls.post(url, json={"reward": 0.5})).status_code == 200
    assert (await calls.post(url, json={"reward": 5})).status_code == 403
  with pytest.raises(openai.PermissionDeniedError):
    await say(access, [user("more")])


async def asks_otherwise(access, item):
  """Ask what no earlier run of it has asked."""
  asks_otherwise.count += 1
  await say(access, [user(f"question {asks_otherwise.count}")])
  await say(access, [user("second")])
  return 1.0


asks_otherwise.count = 0


async def by_tokens(access, item):
  base = access.base_url.removesuffix("/v1")
  headers = {"authorization": f"Bearer {access.api_key}"}
  async with httpx.AsyncClient(headers=headers) as calls:
    tokens = [9, 8, 7]
    for _ in range(2):
      answer = await calls.post(
        f"{base}/inference/v1/generate",
        json={
          "model": "policy",
          "token_ids": tokens,
          "sampling_params": {
            "temperature": 1.0,
            "stop_token_ids": [TOKENIZER.eos_id],
            "logprobs": 1,
            "skip_special_tokens": False,
          },
        },
        timeout=None,
      )
      (choice,) = answer.json()["choices"]
      assert choice["finish_reason"] == "stop"
      assert [x["logprob"] for x in choice["logprobs"]["content"]] == (
        [-0.5] * len(choice["token_ids"])
      )
      tokens = [*tokens, *choice["token_ids"], 4]
    bad = await calls.post(f"{base}/inference/v1/generate", json={"x": 1})
    assert bad.status_code == 400
    odd = {"token_ids": [5], "sampling_params": [1]}
    bad = await calls.post(f"{base}/inference/v1/generate", json=odd)
    assert bad.status_code == 400
    long = {"token_ids": [5] * LIMIT}
    bad = await calls.post(f"{base}/inference/v1/generate", json=long)
    assert bad.status_code == 400 and "context_length_exceeded" in bad.text
  return 1.0


async def streams(access, item):
  async with client(access) as calls:
    stream = await calls.chat.completions.create(
      model=access.model,
      messages=[user("hello")],
      stream=True,
      logprobs=True,
      temperature=0.1,
    )
    parts = [event async for event in stream]
  text = "".join(part.choices[0].delta.content or "" for part in parts)
  assert text == "fine"
  return 1.0


async def with_a_framework(access, item):
  """An agent of the package openai-agents, which loops over its tools."""
  import agents

  agents.set_tracing_disabled(True)

  @agents.function_tool
  def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"

  async with client(access) as calls:
    model = agents.OpenAIChatCompletionsModel(access.model, calls)
    agent = agents.Agent(
      "guide", instructions="Be kind.", tools=[weather], model=model
    )
    result = await agents.Runner.run(agent, "How is it in Bern?")
  return float(result.final_output == "Sunny!")


def named(function):
  return f"{__name__}:{function.__name__}"


# -- tests -------------------------------------------------------------------


def test_a_chat_that_goes_on_is_one_trajectory(play):
  found = play(named(two_questions))
  assert found.failure == ""
  (text,) = found.texts
  (whole,) = found.tokens
  messages = [
    user("question 1"),
    {"role": "assistant", "content": "fine"},
    user("and more"),
  ]
  begun = TEMPLATE.render(messages)
  assert text == begun + "fine" + TOKENIZER.name_of(TOKENIZER.eos_id)
  assert found.reward == 1.0
  assert whole == TOKENIZER.encode(text).tolist()


def test_what_the_policy_wrote_is_never_encoded_again(play, monkeypatch):
  # A byte that begins no character: its text has other tokens.
  (odd,) = [t for t in range(256) if TOKENIZER.bytes_of(t) == b"\xff"]
  plain = written

  def broken(text):
    line = plain("fi")
    arrays = [np.insert(array, 2, 0) for array in line[:3]]
    arrays[0][2] = odd
    return episode_lib.Written(*arrays, line.finish_reason)

  monkeypatch.setitem(globals(), "written", broken)
  found = play(named(two_questions))
  assert found.failure == "" and len(found.branches) == 1
  assert found.tokens[0].count(odd) == 2
  assert found.tokens[0] != TOKENIZER.encode(found.texts[0]).tolist()


def test_calls_of_tools_continue_the_turn_that_made_them(play):
  found = play(
    named(with_tools), lambda text: "It is sunny." if "sunny" in text else CALL
  )
  assert found.failure == ""
  assert len(found.branches) == 1
  assert found.reward == len("It is sunny.")
  assert "<tool_response>\nsunny" in found.texts[0]
  assert found.texts[0].count(CALL) == 1


def test_a_framework_of_agents_loops_over_its_tools(play):
  found = play(
    named(with_a_framework),
    lambda text: "Sunny!" if "sunny in Bern" in text else CALL,
  )
  assert found.failure == "" and found.reward == 1.0
  assert len(found.branches) == 1
  assert "Be kind." in found.texts[0] and found.texts[0].count(CALL) == 1


def test_forks_begin_branches_that_share_the_tokens_before(play):
  found = play(named(forks), lambda text: f"word {len(text)}")
  assert found.failure == "" and found.reward == 1.0
  first, *others = found.tokens
  begun = len(np.concatenate([p for p, _ in found.branches[0][:2]]))
  assert len(others) == 2
  for branch in others:
    assert branch[:begun] == first[:begun]


def test_calls_at_the_same_time_are_all_answered(play):
  found = play(named(at_once))
  assert found.failure == "" and len(found.branches) == 4


async def in_threads(access, item):
  """Call from as many threads as the event loop has, and more."""

  def ask():
    with openai.OpenAI(
      base_url=access.base_url, api_key=access.api_key, max_retries=0
    ) as calls:
      calls.chat.completions.create(
        model=access.model, messages=[user("hello")]
      )

  await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(40)))
  return 1.0


async def changes_its_item(access, item):
  item["n"] += 1
  await say(access, [user("hello")], max_tokens=10_000)
  return item["n"]


async def spells_special_tokens(access, item):
  messages = [user("question")]
  first = await say(access, messages)
  messages += [first.message.model_dump(exclude_none=True), user("and more")]
  await say(access, messages)
  return 1.0


async def exits(access, item):
  await say(access, [user("hello")])
  raise SystemExit(3)


async def gives_nothing(access, item):
  await say(access, [user("hello")])


def test_calls_from_all_threads_of_the_loop_are_answered(play):
  found = play(named(in_threads))
  assert found.failure == "" and len(found.branches) == 40


def test_an_agent_has_an_item_of_its_own(play):
  item = {"n": 1}
  for _ in range(2):
    found = play(named(changes_its_item), item=item)
    assert found.failure == "" and found.reward == 2
  assert item == {"n": 1}


def test_what_was_written_may_spell_a_special_token(play, monkeypatch):
  plain = written

  def spelled(text):
    line = plain("")
    tokens = np.concatenate(
      [TOKENIZER.encode(letter) for letter in "<|im_start|>"] + [line.tokens]
    )
    n = len(tokens)
    return episode_lib.Written(
      tokens.astype(np.int32),
      np.full(n, -0.5, np.float32),
      np.full(n, 3, np.int32),
      line.finish_reason,
    )

  monkeypatch.setitem(globals(), "written", spelled)
  found = play(named(spells_special_tokens))
  assert found.failure == "" and len(found.branches) == 1


def test_an_agent_that_exits_ends_no_other(play):
  for _ in range(2):
    assert "SystemExit(3)" in play(named(exits)).failure


def test_an_agent_may_leave_its_score_to_the_run(play):
  assert "ended without a reward" in play(named(gives_nothing)).failure
  found = play(named(gives_nothing), gives_reward=False)
  assert found.failure == "" and found.reward == 0


@pytest.mark.parametrize(
  ("agent", "reason"),
  [
    (raises, "the agent raised LookupError: no such page"),
    (hangs, "took longer than 0.5 s"),
    (returns_text, "the agent returned 'good', which is no finite number"),
    (says_its_thought, "those of the episode budgets"),
    (never_calls, "returned before its first turn"),
  ],
)
def test_an_agent_that_fails_is_a_failure_with_its_reason(play, agent, reason):
  timeout_s = 0.5 if agent is hangs else 60.0
  assert reason in play(named(agent), timeout_s=timeout_s).failure


def test_an_agent_that_calls_for_ever_is_refused_after_max_turns(play):
  found = play(named(calls_for_ever), max_turns=5)
  assert found.failure == "" and found.reward == 5


def test_there_is_a_bound_on_branches(play):
  found = play(named(calls_for_ever))
  assert found.failure == "" and found.reward == episode_lib.MAX_BRANCHES


@pytest.mark.parametrize(
  "agent", [too_long, wrong_key, by_tokens, streams], ids=lambda a: a.__name__
)
def test_an_agent_gets_on_with(play, agent):
  found = play(named(agent))
  assert found.failure == "" and found.reward == 1.0


def test_tokens_that_go_on_are_one_trajectory(play):
  found = play(named(by_tokens))
  fine = written("fine").tokens.tolist()
  assert found.tokens == [[9, 8, 7, *fine, 4, *fine]]


def test_a_session_is_over_with_its_reward(play):
  found = play(named(after_the_reward))
  assert found.failure == "" and found.reward == 0.5


@pytest.mark.parametrize("count", [1, 2])
def test_an_agent_goes_on_where_its_record_ends(play, count):
  script = lambda text: f"word {len(text)}"  # noqa: E731
  for agent in (two_questions, forks, with_tools):
    say_it = (
      (lambda text: "sunny!" if "sunny" in text else CALL)
      if agent is with_tools
      else script
    )
    whole = play(named(agent), say_it)
    recorded, events = whole.recorded(count)
    again = play(named(agent), say_it, recorded=recorded, events=events)
    assert again.failure == ""
    assert again.tokens == whole.tokens and again.reward == whole.reward


def test_an_agent_that_asks_something_else_then_fails(play):
  whole = play(named(asks_otherwise))
  recorded, events = whole.recorded(1)
  again = play(named(asks_otherwise), recorded=recorded, events=events)
  assert "the agent, started again, asked something else" in again.failure


def test_a_replay_runs_no_agent(play):
  whole = play(named(asks_otherwise))
  count = asks_otherwise.count
  recorded, events = whole.recorded(2)
  again = play(
    named(asks_otherwise),
    recorded=recorded,
    events=whole.context.events,
    is_replay=True,
  )
  assert again.failure == "" and asks_otherwise.count == count


PROGRAM = """
  import json, os, sys, openai
  given = json.load(sys.stdin)
  client = openai.OpenAI()
  done = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"],
    messages=[{"role": "user", "content": given["item"]["word"]}],
  )
  print(done.choices[0].message.content * given["params"]["times"])
  import httpx
  httpx.post(
    os.environ["SESSION_URL"] + "/reward",
    json={"reward": 0.25},
    headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
  ).raise_for_status()
"""


@pytest.mark.slow
def test_a_program_may_leave_children_behind(play):
  child = "import subprocess; subprocess.Popen(['sleep', '1000'])"
  found = play(
    [sys.executable, "-c", child + textwrap.dedent(PROGRAM)],
    item={"word": "moon"},
    params={"times": 1},
    timeout_s=60.0,
  )
  assert found.failure == "" and found.reward == 0.25


@pytest.mark.slow
def test_a_program_is_an_agent(play):
  found = play(
    [sys.executable, "-c", textwrap.dedent(PROGRAM)],
    item={"word": "moon"},
    params={"times": 1_000_000},
  )
  assert found.failure == "" and found.reward == 0.25
  assert "moon" in found.texts[0]


@pytest.mark.parametrize(
  ("program", "reason"),
  [
    ("raise SystemExit('out of luck')", "exit code 1: out of luck"),
    ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ("pass", "returned before its first turn"),
    (
      "import sys; sys.stdout.write('x' * 10**8 + '\\nlast'); sys.exit(3)",
      "exit code 3: last",
    ),
  ],
)
def test_a_program_that_fails_is_a_failure_with_its_reason(
  play, program, reason
):
  assert reason in play([sys.executable, "-c", program]).failure


def test_a_program_that_is_not_there_is_a_failure(play):
  assert "cannot be started" in play(["/nowhere/agent"]).failure
