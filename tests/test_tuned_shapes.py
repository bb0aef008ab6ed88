"""`launch/train.py --tune`: shapes that are measured once, and kept."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import test_run

from jaxrl_async.config import sections
from jaxrl_async.run import device_checks
from jaxrl_async.run import speed
from jaxrl_async.run import tuned_shapes
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib


@pytest.fixture
def measured(monkeypatch):
  """The shapes that were measured; two rows with remat=dots are fastest."""
  found = []

  def step_s(setup, lengths, *, repeats):
    del lengths, repeats
    shapes = speed.shapes_of(setup.config)
    found.append(shapes)
    remat = 0.5 if shapes.remat is sections.Remat.DOTS else 1.0
    return remat * shapes.rows_per_microbatch

  monkeypatch.setattr(speed, "train_step_s", step_s)
  return found


def tuned(config, tmp_path, notes=None):
  return tuned_shapes.tuned(
    config,
    jax.devices(),
    workdir=tmp_path / "work",
    cache=tmp_path / "cache",
    note=lambda line: None if notes is None else notes.append(line),
  )


def make_config(**train):
  return test_run.make_config(train={"rows_per_microbatch": 4, **train})


def test_shapes_are_measured_once(measured, tmp_path):
  notes = []
  config = tuned(make_config(), tmp_path, notes)
  assert config.train.rows_per_microbatch == 2
  assert config.model.remat is sections.Remat.DOTS
  assert len(measured) > 5 and len(notes) == 2 + len(measured)
  measured.clear()
  # The number of steps makes no difference.
  again = tuned(make_config(num_steps=9), tmp_path, notes)
  assert speed.shapes_of(again) == speed.shapes_of(config) and not measured
  assert "measured before" in notes[-1]
  tuned(make_config(tokens_per_row=32), tmp_path)
  assert measured


@pytest.mark.parametrize(
  "content", ["", "{}", '{"x": {"remat": "dots"}}', "[]"]
)
def test_what_was_not_kept_whole_is_measured_again(measured, content, tmp_path):
  tuned(make_config(), tmp_path)
  file = tmp_path / "cache" / tuned_shapes.NAME
  whole = json.loads(file.read_text())
  file.write_text(content)
  measured.clear()
  tuned(make_config(), tmp_path)
  assert measured and json.loads(file.read_text()) == whole


def test_a_run_that_continues_keeps_its_shapes(measured, tmp_path):
  (tmp_path / "work").mkdir()
  config = make_config()
  config.model.remat = sections.Remat.ATTENTION
  config_json.write(config, tmp_path / "work")
  assert tuned(make_config(), tmp_path) != config  # of launch/sft.py, perhaps
  measured.clear()
  (tmp_path / "work" / workdir_lib.SCHEDULE).write_text("")
  found = tuned(make_config(rows_per_microbatch=8), tmp_path)
  assert speed.shapes_of(found) == speed.shapes_of(config)
  assert not measured
  # Those that do not suit this start are passed over.
  config.train.rows_per_microbatch = 3
  config_json.write(config, tmp_path / "work")
  wanted = make_config()
  wanted.warm_start.num_steps = 1
  wanted.warm_start.rows_per_batch = 4
  found = tuned(wanted, tmp_path)
  assert found.train.rows_per_microbatch == 2


def test_an_answer_that_a_run_would_refuse_is_none(measured, tmp_path):
  wanted = tuned(make_config(), tmp_path)
  config = make_config()
  config.warm_start.num_steps = 1
  config.warm_start.rows_per_batch = 4
  measured.clear()
  assert speed.shapes_of(tuned(config, tmp_path)) == speed.shapes_of(wanted)
  assert not measured
  file = tmp_path / "cache" / tuned_shapes.NAME
  file.write_text(file.read_text().replace(": 2,", ": 8,"))
  tuned(config, tmp_path)
  assert {x.rows_per_microbatch for x in measured} == {2, 4}


def test_a_cache_that_cannot_be_written_ends_nothing(measured, tmp_path):
  (tmp_path / "cache").write_text("no directory")
  notes = []
  config = tuned(make_config(), tmp_path, notes)
  assert config.train.rows_per_microbatch == 2 and measured
  assert notes[-1].startswith("they will be measured again")


def test_shapes_without_memory_for_a_run_are_left_out(
  measured, monkeypatch, tmp_path
):
  def check(setup):
    sections.require(
      setup.config.model.remat is not sections.Remat.DOTS, "mesh", "too small"
    )

  monkeypatch.setattr(device_checks, "check_shared_memory", check)
  config = tuned(make_config(), tmp_path)
  assert config.train.rows_per_microbatch == 2
  assert config.model.remat is not sections.Remat.DOTS
  before = make_config()
  assert (
    dataclasses.replace(config, train=before.train, model=before.model)
    == before
  )


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_script_measures_at_its_first_start(tmp_path):
  root = pathlib.Path(__file__).parents[1]

  def start(workdir, *flags):
    done = subprocess.run(
      [
        *(sys.executable, str(root / "launch" / "train.py"), "--tune"),
        f"--config={root / 'configs' / 'tiny.py'}",
        f"--workdir={tmp_path / workdir}",
        f"--compile_cache={tmp_path / 'cache'}",
        "--config.warm_start.num_steps=1",
        "--config.train.num_steps=1",
        *flags,
      ],
      env=os.environ | {"XLA_FLAGS": ""},
      capture_output=True,
      text=True,
      timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr

  assert "looking for its fastest shapes" in start("one")
  kept = json.loads((tmp_path / "cache" / tuned_shapes.NAME).read_text())
  assert len(kept) == 1
  assert "measured before" in start("two")
  one, two = (
    speed.shapes_of(config_json.read(tmp_path / name))
    for name in ("one", "two")
  )
  assert one == two
  # Whatever the config says, a run that continues keeps its shapes.
  again = start("two", "--config.train.num_steps=2")
  assert f"the shapes of {tmp_path / 'two'}" in again
