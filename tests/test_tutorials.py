"""The pages of docs/tutorials and docs/how-to, as they are printed."""

import dataclasses
import functools
import importlib
import json
import pathlib
import re
import runpy
import sys

import hardware_table
import numpy as np
import printed_page
import pytest

from jaxrl_async import types
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.reporting import metrics as metrics_lib

DOCS = printed_page.ROOT / "docs"
PAGES = sorted(
  str(path.relative_to(DOCS))
  for folder in ("tutorials", "how-to")
  for path in (DOCS / folder).glob("*.md")
)
LAPTOP = "tutorials/laptop.md"
TIMEOUT_S = 3_000
# A short form of the run, which learns nothing.
SHORT = (
  "--config.warm_start.num_steps=2",
  "--config.train.num_steps=2",
  "--config.eval.num_items=16",
)


# -- a reward of your own, on a laptop -----------------------------------------


def run_laptop(directory: pathlib.Path, *short: str) -> list[dict]:
  """Run all commands of the page, and return the metrics of its run."""
  for name, program in printed_page.programs(LAPTOP).items():
    (directory / f"{name}.py").write_text(program)
  printed = []
  for words in printed_page.commands(LAPTOP):
    is_run = words[0] == "launch/train.py"
    more = short if is_run else ()
    printed.append(
      printed_page.run(words, directory, *more, timeout_s=TIMEOUT_S)
    )
  made, dry_run, summary, first, worst, *_, evaluated = printed
  assert made == "" and "held out (by a hash)" in dry_run
  assert json.loads(summary.splitlines()[-1])["train_steps"] > 0
  assert all("expected" in shown for shown in (first, worst))
  assert "pass@4" in evaluated.splitlines()[-1]
  return metrics_lib.by_step(directory / "dates")


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_the_commands_for_a_laptop_run_as_they_are_printed(tmp_path):
  _, *steps = run_laptop(tmp_path, *SHORT)
  assert all("reward/parts/right" in step for step in steps)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S)
def test_the_run_for_a_laptop_learns(tmp_path):
  _, *steps = run_laptop(tmp_path)
  right = [step["reward/parts/right"] for step in steps]
  assert 0.15 < np.mean(right[:2]) < 0.55
  assert np.mean(right[-5:]) > 0.65


@pytest.fixture
def laptop(tmp_path, monkeypatch):
  """The programs of the page as modules, in a directory of their own."""
  programs = printed_page.programs(LAPTOP)
  for name, program in programs.items():
    (tmp_path / f"{name}.py").write_text(program)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  yield {name: importlib.import_module(name) for name in programs}
  for name in programs:
    del sys.modules[name]


def test_about_a_third_of_the_laptops_solutions_are_right(laptop, tmp_path):
  runpy.run_path(str(tmp_path / "make_dates.py"), run_name="__main__")
  lines = (tmp_path / "dates.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert len(rows) == 10_000
  assert '{"question": "9. February 1974", ' in (DOCS / LAPTOP).read_text()
  assert f"    {lines[0]}" in (DOCS / LAPTOP).read_text()
  right = np.mean([row["solution"] == row["answer"] for row in rows])
  assert 0.3 < right < 0.4
  rollout = laptop["my_dates"].get_config().rollout
  assert max(len(row["question"]) for row in rows) < rollout.max_prompt_tokens
  assert all(len(row["solution"]) == 10 for row in rows)


def test_the_reward_for_a_laptop(laptop):
  def scored(text):
    completion = types.Completion(
      text=text,
      answer=None,
      turns=(types.Turn(prompt="", completion=text, num_tokens=0),),
      tokens=np.zeros((0,), np.int32),
      finish_reason=types.FinishReason.EOS,
    )
    return laptop["my_dates"].score({"answer": "2026-03-14"}, completion).score

  assert scored("2026-03-14\n") == 1.0
  assert scored("2026-14-03") == 0.1
  assert scored("March 14") == 0.0


# -- which configuration for my hardware ---------------------------------------


def test_the_page_has_the_table_that_its_script_prints():
  page = (DOCS / "how-to" / "hardware.md").read_text()
  assert "\n".join(hardware_table.table()) in page


def test_an_8b_model_needs_lora_or_two_slices_of_v5e_16():
  model = hardware_table.MODELS["8B"]
  assert 8.1e9 < model.num_params < 8.3e9
  per_device = hardware_table.training_bytes(model, 1_024, 4, 4)
  # 20 bytes a parameter over four chips, and activations.
  assert 5 * model.num_params < per_device < 5.5 * model.num_params
  lora = hardware_table.with_lora(model)
  assert hardware_table.training_bytes(lora, 1_024, 4, 4) < per_device / 5
  cells = {
    (on, kind): hardware_table.cell(trained, 8_192, hardware_table.HARDWARE[on])
    for kind, trained in (("full", model), ("LoRA", lora))
    for on in ("v5e-16", "2 x v5e-16")
  }
  assert cells["v5e-16", "full"] == "no"  # LoRA, or two slices
  del cells["v5e-16", "full"]
  assert "no" not in cells.values()


# -- every page ----------------------------------------------------------------


@functools.cache
def flags_of(script: str) -> frozenset[str]:
  """The names of the flags that a launch script and its neighbours define."""
  paths = [printed_page.ROOT / script]
  paths += (printed_page.ROOT / "launch").glob("*_*.py")
  found = []
  for path in paths:
    found += re.findall(r'DEFINE_\w+\(\s*"(\w+)"', path.read_text())
    found += re.findall(r'DEFINE_config_file\(\s*"(\w+)"', path.read_text())
  return frozenset(found)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_flags_and_settings_that_exist(page):
  for script, *words in printed_page.commands(page):
    path = printed_page.ROOT / script
    if not script.startswith(("launch/", "benchmarks/")):
      continue
    assert path.is_file(), script
    for word in words:
      name, _, value = word.removeprefix("--").partition("=")
      if not word.startswith("--") or name == "":
        continue
      if name.startswith("config."):
        setting = name.removeprefix("config.")
        assert fields_lib.has_field(sections.Config(), setting), setting
      else:
        assert name in flags_of(script), f"{script}: {name}"
      if name == "config" and value.startswith("configs/"):
        file, _, variant = value.partition(":")
        get_config = runpy.run_path(str(printed_page.ROOT / file))["get_config"]
        get_config(variant) if variant else get_config()


def _value(config: sections.Config, name: str):
  """The value of a field or section, or None."""
  for part in name.split("."):
    config = getattr(config, part, None)
  return config


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_settings_that_exist(page):
  """`section.field` in backquotes is a setting."""
  config = sections.Config()
  names = {field.name for field in dataclasses.fields(config)}
  text = (DOCS / page).read_text()
  for section, rest in re.findall(r"`(\w+)\.(\w[\w.]*)(?:=[^`]*)?`", text):
    if section in names and rest not in ("py", "md"):
      name = f"{section}.{rest}"
      is_section = dataclasses.is_dataclass(_value(config, name))
      assert is_section or fields_lib.has_field(config, name), name
