"""A server over the tiny engine, and what to ask of it."""

import functools
import re
import time

import httpx
import openai
import tiny

from jaxrl_async.engine import sampling
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import app as app_lib
from jaxrl_async.serving import bodies
from jaxrl_async.serving import prometheus
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.serving import server as server_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

DEADLINE_S = 60.0
KEY = "a-key-for-tests"
TOKENIZER = tokenizer_lib.character_level()
LIMITS = bodies.Limits(
  deadline_s=30.0,
  max_deadline_s=60.0,
  max_body_bytes=20_000,
  body_timeout_s=30.0,
)
PROMPT = "What is 2+3?"


class Serving:
  """A server over the tiny engine, with its threads.

  It may be given another scheduler, and the tokenizer and the chat template of
  another policy.
  """

  def __init__(
    self,
    *,
    max_waiting=16,
    limits=LIMITS,
    cls=None,
    scheduler=None,
    tokenizer=TOKENIZER,
    chat_template=None,
    cache_tokens=tiny.SIZES.cache_tokens,
    **options,
  ):
    self.metrics = prometheus.Metrics()
    if scheduler is None:
      scheduler = tiny.scheduler(cls=cls or tiny.SteppedScheduler)
      scheduler.adopt(tiny.engine_params(), 0)
    self.scheduler = scheduler
    own = tokenizer is TOKENIZER
    self.queue = requests_lib.RequestQueue(
      tokenizer,
      max_waiting=max_waiting,
      cache_tokens=cache_tokens,
      vocab_size=tiny.MODEL.vocab_size if own else tokenizer.vocab_size,
      max_choices=8,
      on_time=self.metrics.observe,
    )
    self.loop = requests_lib.ServeLoop(self.queue, self.scheduler)
    self.service = app_lib.Service(
      queue=self.queue,
      tokenizer=tokenizer,
      chat_template=chat_template or chat_template_lib.ChatTemplate(None),
      metrics=self.metrics,
      model_name="tiny",
      is_alive=lambda: self.loop.is_running,
      api_key=KEY,
      limits=limits,
      **options,
    )
    self.app = app_lib.make_app(self.service)
    self.http = server_lib.HttpServer(
      self.app, host="127.0.0.1", port=0, max_connections=64
    )
    self.url = f"http://127.0.0.1:{self.http.port}"
    self.supervisor = supervisor_lib.Supervisor(lambda error: None)
    # Without looking for proxies and certificates at every request.
    self._direct = httpx.Client(trust_env=False, verify=False, timeout=60)

  def __enter__(self):
    self.supervisor.spawn("http server", self.http.run)
    self.supervisor.spawn("serve loop", self.loop.run)
    stats = self.queue.stats
    assert wait_until(
      lambda: stats.policy_version >= 0 and self.http.has_started
    )
    return self

  def __exit__(self, *_):
    self.loop.stop()
    self.http.stop()
    self._direct.close()
    assert self.supervisor.join(DEADLINE_S) == []

  def client(self, **options):
    return openai.OpenAI(
      base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, **options
    )

  def post(self, path="/v1/completions", *, headers=None, **options):
    headers = {"authorization": f"Bearer {KEY}"} | (headers or {})
    return self._direct.post(self.url + path, headers=headers, **options)

  def is_idle(self):
    return self.queue.is_empty and self.scheduler.is_idle


def wait_until(is_over):
  deadline_s = time.monotonic() + DEADLINE_S
  while not is_over():
    if time.monotonic() > deadline_s:
      return False
    time.sleep(0.005)
  return True


def alone(prompt=PROMPT, *, seed, choice=0, max_tokens=16, **settings):
  """What a scheduler writes for the same request when there is no server."""
  tokens = TOKENIZER.encode(prompt)
  scheduler = tiny.scheduler()
  scheduler.adopt(tiny.engine_params(), 0)
  sequence = sequence_lib.Sequence(
    tokens,
    limit=len(tokens) + max_tokens,
    stream=sampling.Stream.SERVE,
    group=seed,
    member=choice,
    settings=sampling.SamplingSettings(**settings),
  )
  scheduler.submit(sequence)
  tiny.finish(scheduler)
  t = sequence.trajectory()
  n = len(tokens)
  return t.tokens[n:].tolist(), t.behavior_logprobs[n:].tolist(), t


@functools.cache
def long_seed():
  """One with which nothing but max_tokens ends the completion."""
  return next(s for s in range(99) if len(alone(seed=s)[0]) == 16)


def finish_of(trajectory):
  return "length" if trajectory.finish_reason == "length" else "stop"


def body(**options):
  return {"model": "tiny", "prompt": PROMPT, **options}


def chat(**options):
  messages = [{"role": "user", "content": "a"}]
  return {"model": "tiny", "messages": messages, **options}


def check_error(answer, status, words):
  assert answer.status_code == status, answer.text
  assert answer.headers["content-type"] == "application/json"
  error = answer.json()["error"]
  assert error.keys() == {"message", "type", "param", "code"}
  assert re.search(words, error["message"]), error["message"]
  return error
