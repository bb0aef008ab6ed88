"""Code that a config names: it may exit, fail or hang, and that is told."""

import contextlib
import itertools
import pickle
import re
import sys
import threading
import time

import pytest
import reward_groups

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.data import worked_solutions
from jaxrl_async.rewards import importable
from jaxrl_async.rewards import named
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.run import script

# What a module does at import, the line, and what is told.
WRONG = (
  ("import sys\nsys.exit(0)\n", 2, "SystemExit: 0"),
  ("quit()\n", 1, "SystemExit: None"),
  ("def f(:\n  pass\n", 1, "SyntaxError: invalid syntax"),
  ("x = 1\ny = {}['a']\n", 2, "KeyError: 'a'"),
  ("import no_such\n", 1, "ModuleNotFoundError: No module named 'no_such'"),
  ("raise RuntimeError('a\\n' * 50)\n", 1, "RuntimeError: a"),
)
_numbers = itertools.count()


@pytest.fixture
def write(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)

  def written(text):
    name = f"of_a_user_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(text)
    return name

  return written


@pytest.mark.parametrize(("text", "line", "message"), WRONG)
def test_what_a_module_does_at_import_is_told_in_one_line(
  write, tmp_path, text, line, message
):
  name = write(text)
  with pytest.raises(user_code.UserCodeError) as raised:
    user_code.module(name)
  assert str(raised.value).startswith(f"{tmp_path / name}.py, line {line}: ")
  assert message in str(raised.value)
  assert "\n" not in str(raised.value)
  outer = write(f"import {name}\n")
  with pytest.raises(user_code.UserCodeError, match=re.escape(message)):
    user_code.module(outer)


def find_loss(name):
  algorithm_lib.check(algorithm_section.AlgorithmSection(loss=name))


def find_advantage(name):
  algorithm_lib.check(algorithm_section.AlgorithmSection(advantage=name))


@pytest.mark.parametrize(
  "find",
  [
    named.find,
    lambda name: worked_solutions.find(name, 0.0),
    find_loss,
    find_advantage,
  ],
)
def test_whatever_names_a_module_that_exits_names_it(write, find):
  name = write("import sys\nsys.exit()\n")
  with pytest.raises(
    ValueError, match=f"{name}:f' cannot be imported.*line 2: SystemExit"
  ):
    find(f"{name}:f")


def test_a_module_that_exits_in_the_reward_process_is_told_there(
  write, monkeypatch
):
  name = write("def score(item, completion):\n  return 1.0\n")
  pickled = pickle.dumps(user_code.module(name).score)
  monkeypatch.delitem(sys.modules, name)
  monkeypatch.setattr(scoring, "_scorers", None, raising=False)
  other = write("raise SystemExit\n")
  scoring.begin(pickled.replace(name.encode(), other.encode()))
  with pytest.raises(user_code.UserCodeError, match="line 1: SystemExit: "):
    scoring.loaded_modules()


@pytest.mark.slow
def test_a_module_that_exits_in_those_processes_alone_ends_the_start(write):
  name = write(
    "import multiprocessing\n"
    "if multiprocessing.parent_process():\n"
    "  raise SystemExit\n"
    "def score(item, completion):\n"
    "  return 1.0\n"
  )
  rewards = reward_groups.service(
    term_lib.Term(
      scorer=user_code.module(name).score, timeout_s=5.0, num_retries=0
    )
  )
  with contextlib.closing(rewards):
    with pytest.raises(
      sections.ConfigError, match=f"^task.reward: .*{name}.py, line 3: SystemEx"
    ):
      rewards.warm_up()


@pytest.mark.parametrize("call", ["sys.exit()", "get_config = None"])
def test_a_config_of_a_script_that_exits_is_told(tmp_path, call):
  path = tmp_path / "mine.py"
  path.write_text(f"import sys\n\ndef get_config():\n  pass\n\n{call}\n")
  with pytest.raises(sections.ConfigError, match=f"^config: {path}"):
    script._config(path)
  path.write_text("def get_config():\n  raise SystemExit\n")
  with pytest.raises(sections.ConfigError, match="line 2: SystemExit"):
    script._config(path)


def test_a_script_with_a_reward_that_exits_at_import_is_told(write, tmp_path):
  path = tmp_path / f"{write('import sys')}.py"
  path.write_text("raise SystemExit\n")
  with pytest.raises(ValueError, match=f'^{path} ends .* "__main__":$'):
    importable._imported(path)


def test_an_import_that_takes_long_is_announced(capsys):
  with user_code.announced("the module slow", after_s=0.01):
    while "the module slow" not in capsys.readouterr().err:
      time.sleep(0.01)
  num_threads = threading.active_count()
  with user_code.announced("the module quick", after_s=3600.0):
    assert threading.active_count() == num_threads + 1
  while threading.active_count() > num_threads:
    time.sleep(0.01)
  assert not capsys.readouterr().err


def test_a_config_error_of_the_users_code_stays_what_it_is():
  with pytest.raises(sections.ConfigError, match="^variant: x$"):
    with user_code.told():
      raise sections.ConfigError("variant: x")
