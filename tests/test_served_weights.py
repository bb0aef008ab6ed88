"""What is served are the weights that the run's engine used.

The server is asked over HTTP; what it has to answer is written by an engine
that was given what the trainer publishes, as an evaluation does.
"""

import pathlib
import runpy

import httpx
import jax
import numpy as np
import pytest

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.policies import serve
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import train_state

ROOT = pathlib.Path(__file__).parents[1]
ONE = sections.MeshSection()
SPLIT = sections.MeshSection(train_fsdp=2, rollout_data=2, rollout_tensor=2)
PROMPTS = ("1 + 2\n", "7 + 7\n", "9")
STEP = 3


def make_config(weights, mesh):
  config = runpy.run_path(str(ROOT / "configs" / "tiny.py"))["get_config"]()
  config.rollout.weights = weights
  config.mesh = mesh
  return config


def write_run(workdir, config):
  """A run's directory with a checkpoint of weights that no one trained.

  Returns: the trainer that has them.
  """
  config_json.write(config, workdir)
  tokenizer = tokenizer_lib.character_level()
  tokenizer.save(workdir / "tokenizer")
  setup = setup_lib.resolve(config, jax.devices())
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda: transformer.init_params(setup.model, jax.random.key(0))
  )
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes
  )
  trainer.start({train_state.POLICY: params})
  host_state = {"config": config_json.to_stored(config)}
  checkpoint.save(workdir / "checkpoints", STEP, trainer.state, host_state, [])
  initial_params.save(workdir / "params", trainer.state.policy.params)
  return trainer


def greedy(scheduler):
  """Completions of the prompts by a scheduler that has its weights."""
  tokenizer = tokenizer_lib.character_level()
  sequences = []
  for index, prompt in enumerate(map(tokenizer.encode, PROMPTS)):
    sequences.append(
      sequence_lib.Sequence(
        prompt,
        limit=scheduler.engine.sizes.cache_tokens,
        stream=sampling.Stream.EVAL,
        group=index,
        member=0,
        settings=sampling.SamplingSettings(temperature=0.0),
      )
    )
    scheduler.submit(sequences[-1])
  while not scheduler.is_idle:
    scheduler.step()
  done = [sequence.trajectory() for sequence in sequences]
  return [t.tokens[t.loss_mask].tolist() for t in done]


def of_the_run(config, trainer):
  """The run's own engine under what its trainer publishes."""
  engine = assembly.make_engine(setup_lib.resolve(config, jax.devices()))
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  scheduler.adopt(engine.load_params(trainer.published(), STEP), STEP)
  return scheduler


def served(policy):
  """Greedy completions of the same prompts, over HTTP."""
  stop, answers = supervisor_lib.StopRequest(), []

  def ask(address):
    for prompt in PROMPTS:
      body = {"model": "policy", "prompt": prompt, "temperature": 0}
      body |= {
        "max_tokens": policy.setup.config.rollout.cache_tokens - len(prompt)
      }
      answer = httpx.post(
        f"{address}/v1/completions",
        json=body | {"return_token_ids": True},
        timeout=60.0,
      )
      (choice,) = answer.json()["choices"]
      answers.append((choice["token_ids"], choice["policy_versions"][0]))
    stop.set()

  serve.serve(policy, front_lib.ServeSettings(port=0), stop=stop, on_ready=ask)
  tokens, versions = zip(*answers, strict=True)
  assert set(versions) == {policy.version}
  return list(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("weights", "mesh"),
  [
    (sections.WeightFormat.INT8, ONE),
    pytest.param(sections.WeightFormat.FP8, ONE, marks=pytest.mark.nightly),
    (sections.WeightFormat.INT8, SPLIT),
  ],
)
def test_a_run_is_served_with_the_weights_its_own_engine_had(
  weights, mesh, tmp_path
):
  config = make_config(weights, mesh)
  assert not quantization.unsupported(weights, jax.devices()[0])
  trainer = write_run(tmp_path, config)
  expected = greedy(of_the_run(config, trainer))
  assert all(expected)
  policy = serve.load(stored_policy.of_run(tmp_path))
  assert policy.version == STEP
  if weights is sections.WeightFormat.FP8:
    assert served(policy) == expected
    return
  assert greedy(serve.make_scheduler(policy)) == expected
  # Parameters alone are served as the config beside them says.
  policy = serve.load(stored_policy.find(tmp_path / "params"))
  assert greedy(serve.make_scheduler(policy)) == expected


def test_a_format_this_device_gets_wrong_is_refused_in_one_line(
  monkeypatch, tmp_path
):
  # A type of exponents alone: XLA on CPUs converts to it, to no use.
  monkeypatch.setitem(
    quantization._TYPES, sections.WeightFormat.FP8, "float8_e8m0fnu"
  )
  config = make_config(sections.WeightFormat.FP8, ONE)
  policy = serve.Policy(
    setup=setup_lib.resolve(config, jax.devices()),
    params=None,
    version=0,
    chat_template=chat_template_lib.load(tmp_path),
  )
  with pytest.raises(sections.ConfigError, match="^rollout.weights: cpu"):
    serve.make_scheduler(policy)
