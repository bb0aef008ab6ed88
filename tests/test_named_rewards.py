"""Rewards that a config names."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl_async.config import settings_page
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import named

ROOT = pathlib.Path(__file__).parents[1]
TIMEOUT_S = 600


@pytest.mark.parametrize("name", named.SHIPPED)
def test_every_shipped_reward_is_a_function(name):
  assert callable(named.find(name))
  assert name in settings_page.page().partition("`task.reward`")[2]


def test_a_reward_is_found_by_module_and_function():
  found = named.find("jaxrl_async.rewards.mathematics:score")
  assert found is mathematics.score is named.find("mathematics")


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("maths", "there is no reward 'maths'; use one of reasoning_gym"),
    ("", "there is no reward ''"),
    ("json:", "there is no reward 'json:'"),
    ("no_such_module:score", "cannot be imported: ModuleNotFoundError: No"),
    ("json:no_such_function", "json has no function 'no_such_function'"),
    ("json:__doc__", "json has no function '__doc__'"),
  ],
)
def test_what_is_no_reward_is_refused_in_one_line(name, words):
  with pytest.raises(ValueError, match=words):
    named.find(name)


def train(folder, *flags):
  return subprocess.run(
    [
      sys.executable,
      str(ROOT / "launch" / "train.py"),
      f"--config={ROOT / 'configs' / 'tiny.py'}",
      *flags,
    ],
    cwd=folder,
    env={**os.environ, "XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    timeout=TIMEOUT_S,
  )


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_a_run_takes_a_reward_from_a_file_beside_it(tmp_path):
  (tmp_path / "my_reward.py").write_text(
    "def length(item, completion):\n  return len(completion.tokens) / 100\n"
  )
  ran = train(
    tmp_path, "--workdir=run", "--config.task.reward=my_reward:length"
  )
  assert ran.returncode == 0, ran.stderr[-3000:]
  for step in metrics_lib.by_step(tmp_path / "run")[1:]:
    mean = step["completion/tokens_mean"] / 100
    assert step["reward/mean"] == pytest.approx(mean)
