"""What a train step is compared with is the same train step."""

import dataclasses
import functools
import importlib
import json
import pathlib
import subprocess
import sys

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.training import objectives
from jaxrl_async.training import sft
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SCRIPT = (
  pathlib.Path(__file__).parents[1] / "benchmarks" / "transformers_train.py"
)
MODEL = configs.ModelConfig(
  vocab_size=97,
  model_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=64,
  has_qkv_bias=True,
)
LEARNING_RATE = 1e-2


def batch_of(*rows):
  """A microbatch of one row for each list of segments, and one of padding."""
  packed = [tiny.packed(segments) for segments in (*rows, [])]
  batch = jax.tree.map(lambda *x: np.stack(x), *packed)
  drawn = np.random.default_rng(1).random(batch.tokens.shape) < 0.7
  # The same tokens count wherever their segment lies.
  counts = drawn.ravel()[batch.tokens] & (batch.positions > 0)
  return batch._replace(loss_mask=counts)


def segments(*lengths):
  rng = np.random.default_rng(0)
  return [rng.integers(1, MODEL.vocab_size, n, np.int32) for n in lengths]


def write(directory, batch):
  """The script's two files; the path of the first."""
  path = directory / "batch.npz"
  names = ("tokens", "segment_ids", "positions", "loss_mask")
  np.savez(path, **{name: getattr(batch, name) for name in names})
  work = {
    "model": dataclasses.asdict(MODEL),
    "dtype": "float32",
    "learning_rate": LEARNING_RATE,
    "batch": str(path),
  }
  (directory / "work.json").write_text(json.dumps(work))
  return directory / "work.json"


def reference(directory, batch, attention):
  script = importlib.import_module(SCRIPT.stem)
  made = script.Reference(json.loads(write(directory, batch).read_text()))
  made.use(script.Variant(attention, 1))
  return made


@pytest.mark.parametrize(
  "attention", [pytest.param("sdpa", marks=pytest.mark.nightly), "eager"]
)
def test_their_updates_are_ours(attention, tmp_path):
  a, b, c, d = segments(40, 23, 30, 17)
  batch = batch_of([a, b], [c, d])
  theirs = reference(tmp_path, batch, attention)
  theirs.model.save_pretrained(tmp_path / "model")
  model, params = hf_weights.load(tmp_path / "model")
  assert model == MODEL
  section = sections.OptimizerSection(learning_rate=LEARNING_RATE)
  optimizer = train_step.make_optimizer(
    section, train_step.learning_rate_schedule(section)
  )
  settings = train_step.ForwardSettings(
    model=MODEL,
    compute_dtype="float32",
    remat=sections.Remat.NONE,
    attention="xla",
    temperature=1.0,
    vocab_chunk=64,
  )
  update = jax.jit(
    functools.partial(
      train_step.update,
      settings,
      sft.NEXT_TOKEN.loss,
      objectives.no_diagnostic,
      {train_state.POLICY: optimizer},
    )
  )
  params = jax.tree.map(jnp.asarray, params)
  state = tiny.policy_state(params, optimizer)
  for _ in range(5):
    minibatches = jax.tree.map(lambda x: x[None], batch)
    state, metrics = update(state, minibatches, np.int32(0))
    answer = theirs.run()
    np.testing.assert_allclose(answer["loss"], metrics["loss"][0], rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_segment_learns_as_it_does_alone(attention, tmp_path):
  rows = segments(40, 23)
  ways = {"packed": batch_of(rows), "alone": batch_of(*([x] for x in rows))}
  losses = {}
  for name, batch in ways.items():
    (tmp_path / name).mkdir()
    made = reference(tmp_path / name, batch, attention)
    losses[name] = [made.run()["loss"] for _ in range(5)]
  np.testing.assert_allclose(losses["packed"], losses["alone"], rtol=1e-4)


@pytest.mark.nightly
def test_each_line_it_reads_is_one_update(tmp_path):
  batch = batch_of(segments(40, 23))
  done = subprocess.run(
    [sys.executable, str(SCRIPT), str(write(tmp_path, batch))],
    input="run\n" * 3,
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  chosen, *answers = map(json.loads, done.stdout.splitlines())
  times_s = chosen["first_microbatch_s"]
  assert {"sdpa, threads 1", "eager, threads 1"} <= times_s.keys()
  assert len(answers) == 3
  losses = [answer["loss"] for answer in answers]
  # What was tried moved no weight: random weights know nothing yet.
  assert abs(losses[0] - np.log(MODEL.vocab_size)) < 0.1
  assert losses[0] > losses[1] > losses[2]
  for answer in answers:
    assert answer["variant"] in times_s
    np.testing.assert_allclose(
      answer["tokens_per_s"] * answer["wall_s"], 63, rtol=1e-6
    )
    assert answer["peak_bytes"] > 50e6
