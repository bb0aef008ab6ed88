"""The configs for other hardware: their checks and their memory."""

import json
import pathlib
import re
import runpy

import byte_level
import jax
import pytest
import test_topology
from test_topology import needs_libtpu

from jaxrl_async.assembly import checks
from jaxrl_async.assembly import dry_run
from jaxrl_async.devices import gpus

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """A tokenizer of a real size, and some rows of all columns."""
  directory = tmp_path_factory.mktemp("data")
  byte_level.save(directory)
  rows = [
    {
      "question": f"What is {i} + {i}?",
      "problem": f"What is {i} + {i}?",
      "answer": str(2 * i),
      "tests": f"assert f() == {2 * i}",
      "entry_point": "f",
    }
    for i in range(1_500)
  ]
  for name, part in (("train", rows[600:]), ("test", rows[:600])):
    lines = "".join(json.dumps(row) + "\n" for row in part)
    (directory / f"{name}.jsonl").write_text(lines)
  return directory


def described(name, variant, model, devices, data, **more):
  found = runpy.run_path(str(CONFIGS / f"{name}.py"))
  config = found["get_config"](*([variant] if variant else []))
  config.model.name, config.model.tokenizer = model, str(data)
  config.task.chat = False
  if config.task.sources:
    for source in ("gsm8k", "math"):
      config.task.sources[source].dataset = f"jsonl:{data}/train.jsonl"
    config.task.sources.gsm8k.eval_dataset = f"jsonl:{data}/test.jsonl"
  else:
    config.task.dataset = f"jsonl:{data}/train.jsonl"
    config.task.eval_dataset = f"jsonl:{data}/test.jsonl"
  setup = checks.checked(config, devices, **more)
  return dry_run.describe(setup), found["__doc__"]


@pytest.mark.parametrize(
  ("name", "variant", "gpu", "model"),
  [
    ("gsm8k", "0.5b", "gpu:24GB", "qwen2-0.5b"),
    ("gsm8k", "1.5b", "gpu:80GB", "qwen2-1.5b"),
    ("gsm8k", "1.5b-math", "gpu:80GB", "qwen2-1.5b"),
    ("gsm8k", "8b", "gpu:80GB", "qwen3-8b"),
    ("code", "", "gpu:80GB", "qwen2-1.5b"),
  ],
)
def test_both_slices_fit_on_a_gpu_as_promised(name, variant, gpu, model, data):
  text, promise = described(
    name,
    variant,
    model,
    jax.devices()[:1],
    data,
    device_bytes=gpus.parse(gpu).memory_bytes,
  )
  (together,) = re.findall(r"share a device, with ([\d.]+ GiB)", text)
  assert together in promise


@pytest.mark.parametrize(
  ("name", "variant"),
  [
    ("gsm8k", "0.5b"),
    ("gsm8k", "1.5b"),
    ("gsm8k", "1.5b@v5e:2x4"),
    ("gsm8k", "8b"),
    ("gsm8k", "8b@v5e:2x4"),
    ("code", ""),
    ("deepseek_1p5b", ""),
  ],
)
def test_few_chunks_of_logits_that_fit_cover_the_vocabulary(name, variant):
  found = runpy.run_path(str(CONFIGS / f"{name}.py"))
  config = found["get_config"](*([variant] if variant else []))
  train = config.train
  assert 152_064 / train.vocab_chunk <= 10
  rows = train.rows_per_microbatch // config.mesh.train_fsdp
  logits = 4 * rows * train.tokens_per_row * train.vocab_chunk
  assert logits < 2 << 30


@pytest.mark.nightly
@needs_libtpu
@pytest.mark.parametrize(
  ("name", "variant", "model", "slice_name"),
  [
    ("gsm8k", "1.5b@v5e:2x4", "qwen2-1.5b", "v5e:2x4"),
    ("gsm8k", "8b@v5e:2x4", "qwen3-8b", "v5e:2x4"),
    ("deepseek_1p5b", "", "qwen2-1.5b", "v5p:2x4x4"),
  ],
)
def test_each_slice_fits_on_a_tpu_as_promised(
  name, variant, model, slice_name, data
):
  # In a process of its own, because a process keeps libtpu to itself.
  code = (
    "import pathlib, test_recipes\n"
    f"text, promise = test_recipes.described({name!r}, {variant!r},"
    f" {model!r}, topology.devices({slice_name!r}),"
    f" pathlib.Path({str(data)!r}))\n"
    "print(text, promise, sep='=====')"
  )
  with test_topology.process(f"sys.path.insert(0, 'tests')\n{code}") as ran:
    out, err = ran.communicate(timeout=160)
  assert ran.returncode == 0, err[-2000:]
  text, promise = out.split("=====")
  sizes = re.findall(r"(?:training|rollout) slice +([\d.]+) GiB", text)
  assert len(sizes) == 2
  assert all(size in promise for size in sizes)
