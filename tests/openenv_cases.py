"""The episode `openenv` against OpenEnv's own server.

OpenEnv cannot be installed beside the other packages of the tests, so pytest
does not collect this file: test_openenv.py runs it in another environment.
"""

import asyncio
import json
import pathlib
import subprocess
import sys
import threading

import numpy as np
from openenv.core import generic_client
import pytest
import tiny
from websockets.asyncio import server as websockets_server
import worker_world

from jaxrl_async import types
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import named_episodes
from jaxrl_async.text import tokenizer as tokenizer_lib

HERE = pathlib.Path(__file__).parent
TOKENIZER = tokenizer_lib.character_level()
PARAMS = {"observation": "text", "reset": {"seed": "digit", "fault": "fault"}}
LIMIT = 10_000


class Server:
  def __init__(self, path):
    self.path = path
    self.process = subprocess.Popen(
      [sys.executable, str(HERE / "openenv_server.py"), str(path)],
      stdout=subprocess.PIPE,
      text=True,
    )
    self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

  def lines(self):
    return self.path.read_text().splitlines() if self.path.exists() else []

  def close(self):
    self.process.kill()
    self.process.wait()
    self.process.stdout.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  one = Server(tmp_path_factory.mktemp("server") / "asked")
  yield one
  one.close()


@pytest.fixture
def server(shared):
  shared.path.unlink(missing_ok=True)
  return shared


@pytest.fixture
def mortal(tmp_path):
  """A server that the test may end."""
  one = Server(tmp_path / "asked")
  yield one
  if one.process.poll() is None:
    one.close()


@pytest.fixture
def begin():
  """Begins conversations, and closes their environments after the test."""
  environments = []

  def make(url, fault="", *, is_replay=False, recorded=None, **params):
    environment = environment_lib.Environment(
      named_episodes.find("openenv", {"url": url, **PARAMS, **params}),
      tokenizer=TOKENIZER,
      vocab_size=TOKENIZER.vocab_size,
      is_replay=is_replay,
    )
    environments.append(environment)
    prompt = types.Prompt(
      prompt_id="p",
      tokens=TOKENIZER.encode("ask\n"),
      item={"digit": 7, "metadata": {"fault": fault}},
    )
    branches, events = recorded or ((), ())
    return Talk(
      environment,
      environment.open(
        prompt, key=(0, 0), limit=LIMIT, recorded=branches, events=events
      ),
    )

  yield make
  for environment in environments:
    environment.close(30.0)


class Talk:
  """A conversation, in texts, and its trajectory."""

  def __init__(self, environment, conversation):
    self.environment, self.conversation = environment, conversation
    self.parts = []

  def shown(self):
    return self._settled(self.conversation.begin())

  def write(self, text):
    tokens = TOKENIZER.encode(text)
    self.parts.append((tokens, True))
    return self._settled(self.conversation.send(tiny.turn(tokens)))

  def _settled(self, answer):
    tokens = self.environment.settled(answer).tokens
    if tokens is None:
      return None
    self.parts.append((tokens, False))
    return TOKENIZER.decode(tokens)

  @property
  def events(self):
    return self.conversation.context.events

  def rewards(self):
    return [
      json.loads(event.text) for event in self.events if event.kind == "reward"
    ]

  def recorded(self):
    tokens = np.concatenate([tokens for tokens, _ in self.parts])
    mask = np.concatenate([np.full(len(t), own) for t, own in self.parts])
    trajectory = types.Trajectory(
      member=0,
      tokens=tokens.astype(np.int32),
      loss_mask=mask,
      behavior_logprobs=np.zeros(len(tokens), np.float32),
      policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )
    return [trajectory], self.events


def test_steps_are_shown_and_give_rewards(server, begin):
  talk = begin(server.url, action="number")
  assert talk.shown() == "ask\nguess\n"
  assert talk.write("3") == "\nmore\n"
  assert talk.write(" 8\n") == "\nless\n"
  assert talk.write("7") is None
  assert talk.rewards() == [-0.25, -0.25, 1.0]
  assert server.lines() == ["reset 7", "step 3", "step 8", "step 7"]


def test_a_reward_of_reset_is_that_of_the_first_turn(server, begin):
  talk = begin(server.url, "reset gives", action="number")
  talk.shown()
  talk.write("3")
  assert talk.write("7") is None
  assert talk.rewards() == [0.5, -0.25, 1.0]


def test_a_session_that_cannot_be_closed_has_ended_well(
  server, begin, monkeypatch
):
  asked, closed = [], generic_client.GenericEnvClient.close

  async def close(client):
    asked.append(client)
    await closed(client)
    raise ConnectionError("the server went away")

  monkeypatch.setattr(generic_client.GenericEnvClient, "close", close)
  talk = begin(server.url, action="number")
  talk.shown()
  assert talk.write("7") is None
  assert asked and talk.rewards() == [1.0]


def test_an_action_may_be_written_as_json_and_its_errors_are_told(
  server, begin
):
  talk = begin(server.url, then="\n[{observation}]\n")
  talk.shown()
  assert talk.write('{"number": 3}') == "\n[more]\n"
  assert talk.write('{"other": 3}') == "\n[Error: this is no valid action]\n"
  assert "Error: the action is no JSON" in talk.write("{")
  assert "no JSON object" in talk.write("3")
  assert talk.write('{"number": 7}') is None
  assert talk.rewards() == [-0.25, 1.0]


def test_without_a_field_the_observation_is_shown_as_json(server, begin):
  shown = begin(server.url, observation="").shown()
  assert json.loads(shown.removeprefix("ask\n"))["text"] == "guess"


def test_a_long_observation_is_cut(server, begin):
  talk = begin(
    server.url, "writes much", action="number", max_observation_tokens=20
  )
  talk.shown()
  assert talk.write("1") == (
    "\n" + "x" * 20 + "\n[the rest of the result is not shown]\n"
  )
  assert sum(len(event.text) for event in talk.events) < 1_000


@pytest.mark.parametrize(
  ("fault", "words"),
  [
    ("reset raises", "no such page .code: EXECUTION_ERROR"),
    ("reset ends", "done after its reset"),
    ("step raises", "no such page .code: EXECUTION_ERROR"),
    ("hangs", "^timeout: Session.answer took longer than 2 s"),
    ("floods", "ConnectionClosedError.*message too big"),
  ],
)
def test_a_fault_of_the_environment_is_no_score(server, begin, fault, words):
  timeout_s = 2.0 if fault == "hangs" else 60.0
  talk = begin(server.url, fault, action="number", timeout_s=timeout_s)
  with pytest.raises(episode_lib.EpisodeError, match=words) as raised:
    talk.shown()
    talk.write("3")
  assert "\n" not in str(raised.value)
  assert not talk.rewards()


def test_a_replay_asks_no_server_and_a_run_fails_without_it(mortal, begin):
  first = begin(mortal.url, action="number")
  first.shown()
  first.write("3")
  assert first.write("7") is None
  other = begin(mortal.url, action="number")
  other.shown()
  mortal.close()
  with pytest.raises(episode_lib.EpisodeError, match="^error: Connection"):
    other.write("3")
  with pytest.raises(episode_lib.EpisodeError, match="Failed to connect"):
    begin(mortal.url, action="number").shown()
  recorded = ((), first.events)
  second = begin(mortal.url, action="number", recorded=recorded, is_replay=True)
  assert second.shown() == "ask\nguess\n"
  assert second.write("3") == "\nmore\n"
  assert second.write("7") is None
  assert second.rewards() == first.rewards()


def test_a_session_that_is_lost_is_not_begun_anew(begin):
  """The client connects again by itself, and this server answers that."""
  first = {"observation": {"text": "guess"}, "reward": None, "done": False}
  with Serving([first], closes_after=1) as serving:
    talk = begin(serving.url, action="number")
    talk.shown()
    assert serving.has_closed.wait(30.0)
    with pytest.raises(episode_lib.EpisodeError, match="session was lost"):
      talk.write("7")
  assert not talk.rewards()


@pytest.mark.parametrize(
  ("data", "words"),
  [
    ({"observation": "text"}, "the observation is 'text'"),
    ({"observation": {}}, "the observation has no 'text'"),
    ({"observation": {"text": "a"}, "reward": "1.0"}, "the reward is '1.0'"),
    ({"observation": {"text": "a"}, "reward": True}, "the reward is True"),
    ({"observation": {"text": "a"}, "reward": float("nan")}, "nan"),
    ({"observation": {"text": "a"}, "done": 1}, "done is 1"),
    ([], "AttributeError"),
  ],
)
def test_other_types_are_a_failure(begin, data, words):
  first = {"observation": {"text": "guess"}, "reward": None, "done": False}
  with Serving([first, data]) as serving:
    talk = begin(serving.url, action="number")
    talk.shown()
    with pytest.raises(episode_lib.EpisodeError, match=words):
      talk.write("3")
    assert not talk.rewards()


class Serving:
  """A server that gives these answers to each session, whatever is asked."""

  def __init__(self, answers, closes_after=0):
    self.answers, self.closes_after = answers, closes_after
    self.is_ready, self.has_closed = threading.Event(), threading.Event()
    self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))

  async def _answer(self, connection):
    number = 0
    async for text in connection:
      if json.loads(text)["type"] != "close":
        answer = {"type": "observation", "data": self.answers[number]}
        await connection.send(json.dumps(answer))
        number += 1
        if number == self.closes_after:
          await connection.close()
          self.has_closed.set()

  async def _run(self):
    self.loop, self.is_over = asyncio.get_running_loop(), asyncio.Event()
    async with websockets_server.serve(
      self._answer, "127.0.0.1", 0, close_timeout=1.0
    ) as serving:
      self.url = f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
      self.is_ready.set()
      await self.is_over.wait()

  def __enter__(self):
    self.thread.start()
    assert self.is_ready.wait(30.0)
    return self

  def __exit__(self, *_):
    self.loop.call_soon_threadsafe(self.is_over.set)
    self.thread.join(30.0)


def test_a_run_that_goes_on_repeats_the_steps_in_a_new_session(server, begin):
  first = begin(server.url, action="number")
  first.shown()
  first.write("3")
  second = begin(server.url, action="number", recorded=first.recorded())
  second.shown()
  assert server.lines() == ["reset 7", "step 3"]  # nothing is asked again yet
  assert second.write("7") is None
  assert server.lines()[2:] == ["reset 7", "step 3", "step 7"]
  assert second.rewards() == [-0.25, 1.0]


def test_a_run_that_goes_on_has_time_for_each_recorded_step(server, begin):
  """Each answer has `timeout_s`, those that are asked for again included."""
  first = begin(server.url, action="number")
  first.shown()
  first.write("3")
  second = begin(server.url, action="number", recorded=first.recorded())
  context, given_s = second.conversation.context, []
  make_call = context._make_call

  def noting(*arguments, timeout_s, **options):
    given_s.append(timeout_s)
    return make_call(*arguments, timeout_s=timeout_s, **options)

  context._make_call = noting
  second.shown()
  second.write("1")
  assert second.write("7") is None
  assert given_s == [180.0, 60.0]


def test_a_run_does_not_go_on_in_another_environment(server, begin):
  first = begin(server.url, action="number")
  first.shown()
  first.write("3")
  other = {"observation": {"text": "less"}, "reward": -0.25, "done": False}
  reset = {"observation": {"text": "guess"}, "reward": None, "done": False}
  with Serving([reset, other, other]) as serving:
    second = begin(serving.url, action="number", recorded=first.recorded())
    second.shown()
    with pytest.raises(episode_lib.EpisodeError, match="not answer as it was"):
      second.write("7")


def test_a_group_fails_with_the_reason_of_its_environment(server, tmp_path):
  episode = named_episodes.find(
    "openenv", {"url": server.url, **PARAMS, "reset": {"fault": "fault"}}
  )

  async def faulty(prompt, context):
    is_bad = prompt.item["number"] == 1 and context.member == 1
    item = {"fault": "reset raises" if is_bad else ""}
    prompt = types.Prompt(prompt_id="p", tokens=prompt.tokens, item=item)
    turns = episode(prompt, context)
    written = None
    try:
      while True:
        written = yield await turns.asend(written)
    except StopAsyncIteration:
      return
    finally:
      await turns.aclose()

  made = worker_world.worlds(tmp_path)
  world = next(made)(
    episode=faulty,
    environment={"tokenizer": TOKENIZER},
    max_completion_tokens=24,
  )
  world.run_until(worker_world.finished(4), 100_000)
  (line,) = world.lines()
  assert line["index"] == 1 and line["fate"] == "failed"
  assert "no such page (code: EXECUTION_ERROR)" in line["reason"]
  worker_world.check_balance(world)
  next(made, None)
