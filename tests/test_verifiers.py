"""Environments of the unchanged package verifiers, with a scripted policy.

One process of environments serves the whole file, because its start takes many
seconds.
"""

import dataclasses
import json
import re
import sys

import chat_templates
import numpy as np
import pytest
import waiting

from jaxrl_async import types
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.environments import verifiers
from jaxrl_async.environments import worker
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.sessions import episode as session_episode
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

AGENT = "jaxrl_async.sessions.verifiers:rollout"
# Those of Qwen 3 that are not special, and words that are tokens.
MARKS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
WORDS = "higher", "lower", "done", "name", "arguments", "number", "assistant"
REFUSED = {
  "no_such_env": ("no_such_env", {}, {}),
  "no_such_package": ("verifiers_broken", {}, {}),
  "__all__": ("json", {}, {}),
  "nom": ("verifiers_sums", {"nom": "3"}, {}),
  "max_turn": ("verifiers_sums", {}, {"agent": {"max_turn": 3}}),
  "task.params.select.limit": ("verifiers_sums", {"is_endless": "true"}, {}),
}
ROWS = {
  "sums": ("verifiers_sums", {"num": "50"}, {}),
  "guess": ("verifiers_guess", {}, {}),
  "counter": ("verifiers_counter", {}, {}),
  "endless": (
    "verifiers_sums",
    {"is_endless": "true"},
    {"select": {"limit": 7}},
  ),
}


def source_of(dataset, **settings):
  task = sections.TaskSection(dataset=dataset, **settings)
  return setup_lib.of_task(task, 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """That of a tokenizer of Qwen 3's kind, for the package renderers."""
  path = tmp_path_factory.mktemp("tokenizer")
  chat_templates.save(path, chat_templates.QWEN, words=WORDS, marks=MARKS)
  return path


@pytest.fixture(scope="module")
def environment(directory):
  found = environment_lib.Environment(
    episode,
    tokenizer=tokenizer_lib.load(directory),
    template=chat_template_lib.load(directory),
  )
  yield found
  found.close(30.0)


@pytest.fixture(scope="module")
def asked(environment):
  """The answers of the process of the environments to requests for tasks."""

  async def ask():
    process = worker.of_loop(verifiers.WORKER)
    return {
      name: await process.ask(
        {"what": "rows", "taskset": of, "options": options, "params": params}
      )
      for name, (of, options, params) in {**REFUSED, **ROWS}.items()
    }

  return environment._loop.start(ask()).result()


@pytest.fixture(scope="module")
def items(asked):
  """Returns the items of an environment, with settings of a test.

  `fails` is for `verifiers_sums`, and the others are of the episode.
  """

  def make(name, *, fails="", timeout_s=1_000.0, **params):
    of_task = {"taskset": {"task": {"fails": fails}}} if fails else {}
    return [
      {
        "metadata": {"verifiers": {**row["verifiers"], "params": of_task}},
        "episode": {"timeout_s": timeout_s, "params": params},
      }
      for row in asked[name]["rows"]
    ]

  return make


@dataclasses.dataclass
class Played:
  """What came of one conversation."""

  branches: list = dataclasses.field(default_factory=lambda: [""])
  reward: float | None = None
  parts: dict = dataclasses.field(default_factory=dict)
  failure: str = ""


async def episode(prompt, context):
  """Play an item as it says."""
  turns = session_episode.run_agent(
    prompt, context, agent=AGENT, **prompt.item["episode"]
  )
  written = None
  try:
    while True:
      written = yield await turns.asend(written)
  except StopAsyncIteration:
    return
  finally:
    await turns.aclose()


def written(tokenizer, text):
  """What a policy writes: a token for each byte, and for each mark."""
  parts = []
  for part in re.split(r"(</?\w+>)", text):
    one = tokenizer.encode(part)
    split = len(one) != 1 and [tokenizer.encode(letter) for letter in part]
    parts += split or [one]
  tokens = np.concatenate([*parts, [tokenizer.eos_id]]).astype(np.int32)
  return episode_lib.Written(
    tokens,
    np.full(len(tokens), -0.5, np.float32),
    np.full(len(tokens), 3, np.int32),
    types.FinishReason.EOS,
  )


def play(environment, items, script):
  """Play all items at the same time, against a function of the text so far."""
  played = {}
  for number, item in enumerate(items):
    conversation = environment.open(
      types.Prompt(prompt_id="p", tokens=np.array([5], np.int32), item=item),
      key=(number, 0),
      limit=2000,
    )
    played[conversation] = Played()
    conversation.begin()
  left = len(played)
  while left:
    conversation = environment.answers.get()
    tokenizer = conversation.context.tokenizer
    found = played[conversation]
    try:
      answer = conversation.taken()
    except episode_lib.EpisodeError as error:
      found.failure = str(error)
      answer = None
    if answer is None or answer.tokens is None:
      left -= 1
      conversation.close()
      rewards = [
        json.loads(event.text)
        for event in conversation.context.events
        if event.kind == types.EventKind.REWARD
      ]
      found.reward = sum(rewards) if rewards else None
      for event in conversation.context.events:
        if event.kind == types.EventKind.PARTS:
          found.parts |= json.loads(event.text)
      continue
    if answer.is_anew:
      found.branches.append("")
    found.branches[-1] += tokenizer.decode_all(answer.tokens.tolist())
    line = written(tokenizer, script(found.branches[-1]))
    found.branches[-1] += tokenizer.decode_all(line.tokens.tolist())
    conversation.send(line)
  return [*played.values()]


def adds(text):
  *_, (left, right) = re.findall(r"(\d+) \+ (\d+)", text)
  return str(int(left) + int(right))


def bisects(text):
  """Guess a number from the hints so far."""
  low, high = 0, 9
  for guess, hint in re.findall(
    r"(\d)<\|im_end\|>\s.*?(higher|lower)", text, re.S
  ):
    if hint == "higher":
      low = int(guess) + 1
    else:
      high = int(guess) - 1
  return str((low + high) // 2)


def thinks(text):
  """The same after a thought."""
  return f"<think>\nnumber\n</think>\n\n{bisects(text)}"


def counts(text):
  """Add 1 to the counter until it shows the goal."""
  goal = int(re.findall(r"Bring the counter to (\d+)", text)[0])
  if text.count('"number": 1') >= goal:
    return "done"
  (name,) = set(re.findall(r'"name": "(\w*add)", "desc', text))
  call = {"name": name, "arguments": {"number": 1}}
  return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.slow
def test_tasks_are_items_with_splits_of_their_own(asked, monkeypatch):
  monkeypatch.setattr(worker, "ask_once", lambda *_: asked["sums"])
  source = source_of("verifiers:verifiers_sums?num=50")
  source.check()
  seen = {}
  for split in ("train", "eval"):
    stream = source.open(split, 0, num_workers=1)
    items = [stream.next() for _ in range(source.num_questions(split))]
    seen[split] = {item["question"] for item in items}
    assert len(seen[split]) == len(items)
    task = items[0]["metadata"]["verifiers"]
    assert f"{task['task']['total'] - 1} + 1" == items[0]["question"]
  assert not seen["train"] & seen["eval"]
  assert len(seen["train"]) + len(seen["eval"]) == 50


@pytest.mark.slow
def test_tasks_that_begin_alike_are_different_questions(asked):
  rows = asked["guess"]["rows"]
  assert len({row["question"] for row in rows}) == 10


@pytest.mark.slow
def test_endless_tasks_have_a_limit(asked):
  assert len(asked["endless"]["rows"]) == 7


@pytest.mark.slow
@pytest.mark.parametrize("reason", REFUSED)
def test_an_environment_that_cannot_be_used_is_refused_in_a_line(reason, asked):
  refused = asked[reason]["refused"]
  assert reason in refused and "\n" not in refused


def test_what_is_refused_is_an_error_of_the_config(monkeypatch):
  monkeypatch.setattr(worker, "ask_once", lambda *_: {"refused": "no such env"})
  with pytest.raises(sections.ConfigError, match="verifiers:mine: no such env"):
    source_of("verifiers:mine").check()


def test_without_the_package_there_is_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, "verifiers", None)
  with pytest.raises(sections.ConfigError, match=r"jaxrl_async\[verifiers\]"):
    source_of("verifiers:verifiers_sums").check()


@pytest.mark.slow
def test_a_rollout_of_one_turn_has_the_reward_of_its_rubric(environment, items):
  right, wrong = play(
    environment,
    items("sums")[6:8],
    lambda text: adds(text) if "6 + 1" in text else "I do not know",
  )
  assert (right.reward, right.failure) == (1.25, "")
  assert right.parts == {"right": 1.0, "is_short": 1.0}  # without weights
  assert (wrong.reward, wrong.failure) == (0.0, "")
  assert wrong.parts == {"right": 0.0, "is_short": 0.0}


@pytest.mark.slow
def test_rollouts_of_several_turns_run_at_the_same_time(environment, items):
  given = items("guess")
  found = play(environment, [given[n % 10] for n in range(48)], bisects)
  assert {each.failure for each in found} == {""}
  assert {each.reward for each in found} == {1.0}
  assert {len(each.branches) for each in found} == {1}


@pytest.mark.slow
def test_tools_keep_the_state_of_each_rollout(environment, items):
  found = play(environment, items("counter")[:2], counts)
  assert [each.failure for each in found] == [""] * 2
  assert [each.reward for each in found] == [1.0] * 2
  assert [each.parts for each in found] == [
    {"reached": 1.0, "calls": number} for number in (2.0, 3.0)
  ]
  assert [len(each.branches) for each in found] == [1] * 2


@pytest.mark.slow
def test_renderers_exchange_tokens(environment, items, directory):
  """Those of a family of models go on with the tokens that were written."""

  def how(**renderer):
    return {"tokenizer": str(directory), "renderer": renderer}

  exact = how(name="qwen3", enable_thinking=False)
  for name, script, count in (
    ("sums", adds, 1),
    ("guess", bisects, 3),
    ("counter", counts, 1),
  ):
    found = play(environment, items(name, **exact)[:count], script)
    assert [each.failure for each in found] == [""] * count
    assert all(each.reward for each in found)
    assert [len(each.branches) for each in found] == [1] * count
  # By default thoughts of earlier turns are left out, as the template does.
  kept = how(name="qwen3", thinking_retention="all")
  for params, count in ((how(name="qwen3"), 3), (kept, 1)):
    (each,) = play(environment, items("guess", **params)[:1], thinks)
    assert (each.reward, each.failure) == (1.0, "")
    assert len(each.branches) == count
    assert each.branches[-1].count("<think>") == (1 if count > 1 else 3)
  plain = how(name="default", tool_parser="qwen3")
  (each,) = play(environment, items("guess", **plain)[:1], bisects)
  assert (each.reward, each.failure) == (1.0, "")


@pytest.mark.slow
def test_an_environment_that_fails_is_a_failure(environment, items):
  reasons = {"raises": "no such sum", "is_nan": "right is nan"}
  reasons |= {"is_text": "right", "hangs": "timeout"}
  timeouts_s = {"hangs": 5.0}
  failing = [
    items("sums", fails=name, timeout_s=timeouts_s.get(name, 1_000.0))[0]
    for name in reasons
  ]
  *found, right = play(environment, [*failing, items("sums")[0]], adds)
  assert [each.reward for each in found] == [None] * 4
  for each, reason in zip(found, reasons.values(), strict=True):
    assert reason in each.failure
  assert (right.reward, right.failure) == (1.25, "")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fails", "timeout_s", "reason"),
  [("dies", 1_000.0, "died"), ("blocks", 5.0, "timeout")],
)
def test_an_environment_that_ends_its_process_fails_alone(
  environment, items, monkeypatch, fails, timeout_s, reason
):
  monkeypatch.setattr(worker, "_CANCEL_S", 0.5)
  bad = items("sums", fails=fails, timeout_s=timeout_s)[0]
  (found,) = play(environment, [bad], adds)
  assert found.reward is None and reason in found.failure

  def is_played():
    # One that begins before the process is killed dies with it.
    (found,) = play(environment, items("sums")[:1], adds)
    assert not found.failure or "died" in found.failure
    return found.reward == 1.25

  waiting.until(is_played, "there is no other process")
