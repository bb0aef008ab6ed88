"""launch/serve.py: a whole process, its signals, and bad input in one line."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import runpy
import signal
import socket
import subprocess
import sys
import time

import httpx
import jax
import numpy as np
import openai
import pytest
import tiny

from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.policies import serve
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import config_json
from jaxrl_async.text import tokenizer as tokenizer_lib

ROOT = pathlib.Path(__file__).parents[1]
DEADLINE_S = 120.0
# Processes of several tests compile the same programs.
CACHE = {
  "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def launch(*arguments, **environment):
  inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.Popen(
    [sys.executable, str(ROOT / "launch" / "serve.py"), *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=inherited | {"JAX_PLATFORMS": "cpu"} | CACHE | environment,
  )


def write_params(workdir):
  """What launch/sft.py leaves, without training."""
  config = runpy.run_path(str(ROOT / "configs" / "tiny.py"))["get_config"]()
  config_json.write(config, workdir)
  tokenizer = tokenizer_lib.character_level()
  tokenizer.save(workdir / "tokenizer")
  model = setup_lib.resolve(config, jax.devices()).model
  init = jax.jit(functools.partial(transformer.init_params, model))
  params = init(jax.random.key(0))
  initial_params.save(workdir / "params", params)
  return params


@pytest.mark.slow
def test_parameters_alone_are_read_with_the_config_beside_them(tmp_path):
  params = write_params(tmp_path)
  policy = serve.load(
    stored_policy.find(tmp_path / "params"), num_slots=2, cache_tokens=100
  )
  assert policy.version == 0
  jax.tree.map(
    lambda a, b: (a == b).all() or pytest.fail(), params, policy.params
  )
  rollout = policy.setup.config.rollout
  assert (rollout.num_slots, rollout.cache_tokens) == (2, 100)
  assert rollout.prefill_buckets == rollout.window_buckets == (64, 100)
  message = [{"role": "user", "content": "1 + 2"}]
  assert policy.chat_template.render(message) == "1 + 2\n"


@pytest.mark.slow
def test_pretrained_weights_come_with_tokenizer_and_template(tmp_path):
  tokenizer_lib.character_level().save(tmp_path)
  path = tmp_path / "tokenizer_config.json"
  template = "{{ messages[0].content }}?"
  settings = json.loads(path.read_text()) | {"chat_template": template}
  path.write_text(json.dumps(settings))
  model = dataclasses.replace(tiny.MODEL, vocab_size=98)
  params = jax.tree.map(np.asarray, tiny.params(3, model))
  hf_weights.save(tmp_path, model, params)
  policy = serve.load(
    stored_policy.find(tmp_path), num_slots=2, cache_tokens=64
  )
  assert policy.setup.model == model
  jax.tree.map(np.testing.assert_array_equal, policy.params, params)
  message = [{"role": "user", "content": "why"}]
  assert policy.chat_template.render(message) == "why?"
  stop = supervisor_lib.StopRequest()
  texts = []

  def ask(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-") as client:
      done = client.chat.completions.create(
        model="policy", messages=message, temperature=0, max_tokens=8
      )
    texts.append(done.choices[0].message.content)
    stop.set()

  settings = front_lib.ServeSettings(port=0)
  serve.serve(policy, settings, stop=stop, on_ready=ask)
  tokens = policy.setup.tokenizer.encode("why?").tolist()
  for _ in range(8):
    tokens.append(greedy_next(model, params, tokens))
    if tokens[-1] == policy.setup.tokenizer.eos_id:
      break
  assert texts == [policy.setup.tokenizer.decode(tokens[4:])]


def greedy_next(model, params, tokens):
  """The likeliest token, from the trainer's forward pass."""
  options = [[*tokens, token] for token in range(model.vocab_size)]
  logprobs = [
    tiny.trainer_logprobs(params, [np.array(option)], model=model)[0][-1]
    for option in options
  ]
  return int(np.argmax(logprobs))


def test_what_cannot_be_read_is_named(tmp_path):
  with pytest.raises(sections.ConfigError, match="workdir: .*config.json"):
    stored_policy.of_run(tmp_path)
  with pytest.raises(sections.ConfigError, match="checkpoint: .*not exist"):
    stored_policy.find(tmp_path / "no")
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(sections.ConfigError, match="damaged"):
    stored_policy.of_run(tmp_path)
  (tmp_path / "config.json").unlink()
  write_params(tmp_path)
  with pytest.raises(sections.ConfigError, match="holds no checkpoint"):
    stored_policy.of_run(tmp_path)
  (tmp_path / "empty").mkdir()
  with pytest.raises(sections.ConfigError, match="checkpoint: .*empty"):
    stored_policy.find(tmp_path / "empty")


@pytest.mark.slow
def test_no_client_waits_for_a_compilation():
  # As many steps a call as lie between two buckets.
  scheduler = tiny.scheduler(decode_steps_per_call=16)
  scheduler.adopt(tiny.engine_params(), 0)
  serve._compile(scheduler, supervisor_lib.StopRequest())
  with metrics_lib.CompilationCounter() as compilations:
    for length in (1, 15, 16, 17, 31):
      scheduler.submit(tiny.sequence(tiny.prompt(length), limit=32))
    tiny.finish(scheduler)
  assert compilations.num_programs == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([], "workdir: missing"),
    (["--workdir=/nowhere", "--checkpoint=/x"], "not together"),
    (["--checkpoint=/nowhere"], "checkpoint: '/nowhere' is not a dir"),
    (["--workdir=/nowhere", "--host=0.0.0.0"], "api_key_file: 0.0.0.0"),
    ([f"--config={ROOT}/configs/tiny.py"], "config: not used"),
    (["--workdir=/nowhere", "stray"], "stray"),
    (["--workdir=/nowhere", f"--host={'x' * 5000}"], "host: 'xxx"),
    (["--workdir=/nowhere", "--port=81", "--grpc_port=81"], "grpc_port: 81"),
    (["--workdir=/nowhere", "--deadline_s=nan"], "deadline_s: nan"),
    (["--workdir=/nowhere", "--model_name="], "model_name: ''"),
    (["--workdir=/nowhere", "--compile_cache=/proc/x"], "compile_cache: "),
    (["--workdir=/x", "--adapter=/tmp"], "adapter: '/tmp' is not NAME=DIR"),
    (["--workdir=/x", "--adapter=policy=/tmp"], "adapter: 'policy' is the"),
  ],
)
def test_bad_input_is_one_line(arguments, words):
  process = launch(*arguments)
  out, err = process.communicate(timeout=DEADLINE_S)
  assert process.returncode not in (0, None)
  assert out == ""
  (line,) = err.splitlines()
  assert re.match(f"error: .*{words}", line), line


@contextlib.contextmanager
def serving(tmp_path):
  """A server process of random parameters, and its address."""
  write_params(tmp_path)
  process = launch(
    f"--checkpoint={tmp_path / 'params'}",
    "--port=0",
    "--cache_tokens=512",
    JAXRL_API_KEY="secret",
  )
  try:
    line = process.stdout.readline()
    assert "policy version 0" in line, process.stderr.read()
    yield process, re.search(r"http://\S+", line)[0]
  finally:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_sigterm_finishes_what_was_begun_and_exits_with_zero(tmp_path):
  with serving(tmp_path) as (process, address):
    assert httpx.get(f"{address}/health").json()["status"] == "ok"
    assert httpx.get(f"{address}/metrics").status_code == 401
    client = openai.OpenAI(
      base_url=f"{address}/v1", api_key="secret", max_retries=0
    )
    with client:
      stream = client.completions.create(
        model="policy",
        prompt="1 + 2\n",
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
      )
      events = iter(stream)
      written = len(next(events).choices[0].token_ids)
      process.send_signal(signal.SIGTERM)
      for event in events:
        written += len(event.choices[0].token_ids)
      assert event.choices[0].finish_reason == "length"
      assert written == 400
    assert process.wait(DEADLINE_S) == 0
    assert "SIGTERM: finishing what was begun" in process.stderr.read()


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(tmp_path):
  wanted = {"model": "policy", "prompt": "1 + 2\n", "n": 128}
  wanted |= {"max_tokens": 400, "ignore_eos": True, "stream": True}
  headers = {"authorization": "Bearer secret"}
  with (
    serving(tmp_path) as (process, address),
    httpx.stream(
      "POST",
      f"{address}/v1/completions",
      json=wanted,
      headers=headers,
      timeout=DEADLINE_S,
    ) as answer,
  ):
    events = answer.iter_lines()  # which ends the answer when it goes
    next(events)
    process.send_signal(signal.SIGTERM)
    assert "finishing what was begun" in process.stderr.readline()
    start_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert time.monotonic() - start_s < 5  # a join would take so long
    assert process.stderr.read() == "SIGTERM: ended at once\n"


@pytest.mark.slow
def test_a_training_serves_its_policy_meanwhile(tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  training = subprocess.Popen(
    [
      sys.executable,
      str(ROOT / "launch" / "train.py"),
      f"--config={ROOT / 'configs' / 'tiny.py'}",
      f"--workdir={tmp_path}",
      f"--compile_cache={jax.config.jax_compilation_cache_dir}",
      f"--serve_port={port}",
      "--config.train.num_steps=12",
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    env=inherited | {"JAX_PLATFORMS": "cpu", "JAXRL_API_KEY": "secret"},
  )
  versions = []
  body = {"model": "policy", "prompt": "3 + 4\n", "max_tokens": 12, "seed": 1}
  body |= {"return_token_ids": True}
  headers = {"authorization": "Bearer secret"}
  url = f"http://127.0.0.1:{port}"
  with httpx.Client(base_url=url, headers=headers, timeout=60.0) as client:
    while training.poll() is None:
      try:
        answer = client.post("/v1/completions", json=body)
      except httpx.TransportError:
        time.sleep(0.05)  # not yet, or not any more
        continue
      if answer.status_code == 200:
        (choice,) = answer.json()["choices"]
        versions.append(choice["policy_versions"])
        if len(versions) == 1:
          assert client.get("/health").status_code == 200
          bare = httpx.post(f"{url}/v1/completions", json=body)
          assert bare.status_code == 401
      else:
        assert answer.status_code == 503  # it is closing
  output, _ = training.communicate(timeout=DEADLINE_S)
  assert training.returncode == 0
  tokens = json.loads(output.splitlines()[-1])["tokens"]
  # Served tokens stand outside of the books.
  assert tokens["generated"] == sum(
    tokens[fate] for fate in ("trained", "filtered", "failed", "in_flight")
  )
  assert all(v == sorted(v) for v in versions)
  assert len({v[-1] for v in versions}) > 2
