"""The benchmark for accelerators: its parts, and what becomes of bad ones."""

import dataclasses
import json
import subprocess
import sys

import accelerator_kernels
import benchmark_module
from jax import numpy as jnp
import pytest


@pytest.fixture
def benchmark():
  return benchmark_module.imported("accelerator")


@pytest.fixture
def kernels(monkeypatch):
  monkeypatch.setattr(accelerator_kernels, "_REPEATS", 1)
  return accelerator_kernels


def program(path, text):
  path.write_text(text)
  return [str(path)]


DEVICE = {"platform": "gpu", "name": "a device", "memory_bytes": 80e9}


def test_a_part_that_fails_or_hangs_leaves_the_others_in_the_table(
  benchmark, tmp_path, monkeypatch
):
  programs = {
    "kernels": "import os\nos.abort()",
    "generate": "import sys\nsys.exit('error: no room')",
    "transfer": """print("a table")\nprint('{"rows": []}')""",
    "run": "import time\ntime.sleep(600)",
  }
  asked = []

  def arguments_of(part, device, directory):
    asked.append((part, device.platform, device.is_large))
    return program(tmp_path / f"{part}.py", programs[part])

  monkeypatch.setattr(benchmark, "arguments_of", arguments_of)
  found = f"print('''{json.dumps(DEVICE)}''')"
  monkeypatch.setattr(benchmark, "_FIND_DEVICE", found)
  result = benchmark.measure([*programs], tmp_path, 5.0)
  assert asked == [(part, "gpu", True) for part in programs]
  assert result["device"] == "a device"
  errors = {name: part["error"] for name, part in result["parts"].items()}
  assert errors["kernels"].startswith("exit code -6")
  assert errors["transfer"] == ""
  assert errors["generate"].startswith("exit code 1: error: no room")
  assert "did not end in" in errors["run"]
  assert [row["part"] for row in result["rows"]] == [
    "kernels",
    "generate",
    "run",
  ]
  assert result["wall_s"] < 60


def test_the_model_is_one_that_the_device_holds(benchmark, tmp_path):
  def row(part, **device):
    device = benchmark.Device(name="it", **device)
    return benchmark.arguments_of(part, device, tmp_path)[1]

  assert row("train", platform="cpu", memory_bytes=None) == "--rows=cpu-1m"
  assert row("train", platform="tpu", memory_bytes=16e9) == "--rows=0.5b-8k"
  assert row("train", platform="gpu", memory_bytes=8e10) == "--rows=1.5b-8k"
  assert row("generate", platform="tpu", memory_bytes=16e9) == (
    "--rows=1.5b-128x1k"
  )


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_every_kernel_of_a_platform_is_called_in_its_shapes(kernels, platform):
  found = kernels.uses(kernels.CPU, platform)
  tried = {name: use.kernels for name, use in found.items()}
  assert tried["packed"][-1] == "blocks"
  assert all(map(bool, tried.values())) == (platform != "cpu")
  for use in found.values():
    assert set(use.kernels) <= use.implementations.keys()
    shapes = [x.shape for x in use.full_arguments()[1:]]
    assert shapes == [x.shape for x in use.trial.shapes[1:]]


def test_a_kernel_that_is_wrong_or_does_not_run_is_shown_as_such(kernels):
  use = kernels.uses(kernels.CPU, "cpu")["packed"]
  plain = use.implementations["xla"]

  def broken(*arguments):
    raise NotImplementedError("not on this platform")

  wrong = dataclasses.replace(
    use,
    implementations={
      "xla": plain,
      "good": plain,
      "wrong": lambda *arguments: [
        x * jnp.float32(1.01) for x in plain(*arguments)
      ],
      "broken": broken,
    },
    kernels=("good", "wrong", "broken"),
  )
  right, off, refused = kernels.measure("packed", wrong)
  assert right["verdict"] == "agrees" and right["error"] < 1e-4
  assert off["verdict"].startswith("it is off by")
  assert off["error"] > 1e-4 and off["ms"] > 0 and off["xla_ms"] > 0
  assert "not on this platform" in refused["verdict"]
  assert refused["ms"] is None and refused["error"] is None


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_all_parts_run_here(tmp_path):
  script = benchmark_module.BENCHMARKS / "accelerator.py"
  done = subprocess.run(
    [sys.executable, str(script), f"--results={tmp_path}"],
    stdout=subprocess.PIPE,
    text=True,
  )
  result = json.loads(done.stdout.splitlines()[-1])
  assert done.returncode == 0, done.stdout
  parts = ["kernels", "generate", "train", "transfer", "run"]
  assert [*result["parts"]] == parts
  assert {row["part"] for row in result["rows"]} == set(parts)
