"""The launch scripts' flags: wrong ones are told in a line, before JAX."""

import json
import os
import pathlib
import re
import subprocess
import sys

import command_line_page
import pytest

from jaxrl_async.assembly import config_checks

ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny.py"
# What takes seconds to import, by the name in sys.modules.
HEAVY = {
  *("jax", "jaxlib", "flax", "orbax", "optax", "grain", "tensorstore"),
  *("tensorflow", "reasoning_gym", "sympy", "matplotlib", "starlette"),
  *("uvicorn", "pydantic", "grpc", "tokenizers", "rich", "pebble", "scipy"),
}
LONG = "x" * 5_000


def launch(*arguments, script="train", python=(), cwd=None, platforms="cpu"):
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.run(
    [sys.executable, *python, str(ROOT / "launch" / f"{script}.py")]
    + list(arguments),
    capture_output=True,
    text=True,
    timeout=170,
    env=environment | {"JAX_PLATFORMS": platforms},
    cwd=cwd,
  )


def launch_light(*arguments, **options):
  """As `launch`, without the seconds: nothing heavy may be imported."""
  done = launch(*arguments, python=("-X", "importtime"), **options)
  lines = done.stderr.splitlines()
  imports = [line for line in lines if line.startswith("import time:")]
  modules = {line.rpartition("|")[2].strip() for line in imports}
  assert "absl.flags" in modules
  assert not {name.partition(".")[0] for name in modules} & HEAVY
  done.stderr = "\n".join(line for line in lines if line not in imports)
  return done


def error_of(done):
  """The one line that a script ended with."""
  assert done.returncode not in (0, None)
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ")
  assert len(line) < 700
  return line


def check(launched, words):
  line = error_of(launched)
  for word in words:
    assert word in line, line
  assert not pathlib.Path("/nowhere").exists()


def with_tiny(*arguments):
  return [f"--config={TINY}", "--workdir=/nowhere/to/be/written", *arguments]


@pytest.mark.parametrize("script", ["train", "sft", "prefer", "reward_model"])
def test_an_unknown_field_is_told_before_anything_heavy_is_imported(script):
  done = launch_light(*with_tiny("--config.train.num_stps=3"), script=script)
  check(done, ["num_stps"])


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--config.rollout.temperature=1e-320"], ["rollout.temperature"]),
    (["--serve_port=70000"], ["serve_port"]),
    ([f"--workdir={TINY}/run"], ["workdir", "cannot be a directory"]),
    (["--compile_cache=/proc/x"], ["compile_cache", "/proc/x"]),
  ],
)
def test_a_bad_setting_is_told_before_anything_heavy_is_imported(
  arguments, words
):
  check(launch_light(*with_tiny(*arguments)), words)


def test_a_servers_bad_flag_is_told_before_anything_heavy_is_imported():
  done = launch_light(
    "--workdir=/tmp", "--port=81", "--grpc_port=81", script="serve"
  )
  check(done, ["grpc_port", "81"])


QUICK = ("train", "sft", "prefer", "reward_model", "serve", "show")


@pytest.mark.parametrize("script", QUICK)
def test_help_is_short_quick_and_names_what_is_needed(script):
  done = launch_light("--help", script=script)
  assert done.returncode == 0
  assert done.stderr == ""
  lines = done.stdout.splitlines()
  assert len(lines) < 60
  assert max(map(len, lines)) <= 80
  assert "  --workdir=" in done.stdout
  has_config = script not in ("serve", "show")
  assert ("  --config=FILE" in done.stdout) is has_config
  assert ("docs/reference/settings.md" in done.stdout) is has_config
  assert "--alsologtostderr" not in done.stdout
  assert command_line_page.part(script, done.stdout) in (
    command_line_page.PAGE.read_text()
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "script", sorted({*command_line_page.SCRIPTS} - {*QUICK})
)
def test_the_page_has_the_help_of_the_other_scripts(script):
  done = launch("--help", script=script)
  page = command_line_page.PAGE.read_text()
  assert command_line_page.part(script, done.stdout) in page


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("def get_config(:\n", ["line 1", "SyntaxError"]),
    ("import sys\nsys.exit()\n", ["line 2", "SystemExit"]),
    ("def get_config():\n  return None\n", ["None", "config.Config"]),
    ("", ["defines no get_config()"]),
  ],
)
def test_a_config_files_own_error_is_told_with_its_line(tmp_path, text, words):
  path = tmp_path / "mine.py"
  path.write_text(text)
  words = [*words, str(path)] if "line" in words[0] else words
  check(launch_light(f"--config={path}", "--workdir=/nowhere"), words)


# What values a field takes is in test_rules.py.
BAD_INPUT = [
  (
    with_tiny("--noconfig.run.exact_resum"),
    ["--config.run.exact_resum: ", "--config.run.exact_resume?"],
  ),
  (with_tiny("--config.task.params.min_termz=3"), ["mean min_terms?"]),
  (with_tiny("--config.train.num_steps=few"), ["train.num_steps"]),
  (["--config=/no/such/file.py"], ["/no/such/file.py"]),
  (["--config=/tmp"], ["/tmp", "directory"]),
  ([f"--config=/tmp/{LONG}"], ["File name too long"]),
  ([f"--config={TINY}:{LONG}"], ["variant", "5002 characters"]),
  ([], ["config"]),
  ([f"--config={TINY}"], ["workdir"]),
  (["--config.train.num_steps=3", f"--config={TINY}"], ["has to come before"]),
  (with_tiny("stray"), ["stray"]),
  (with_tiny("--topology=v5e:2x4"), ["topology", "add --dry_run"]),
  (with_tiny("--compile"), ["compile", "add --dry_run"]),
  (with_tiny("--dry_run", "--topology=v5e:3x3"), ["topology", "2x2, 2x4"]),
  (
    with_tiny("--dry_run", "--compile", "--topology=gpu:24GB"),
    ["compile", "with a GPU"],
  ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT)
def test_bad_input_is_one_line_that_names_the_field(arguments, words):
  check(launch_light(*arguments), words)


@pytest.mark.slow
def test_what_the_devices_must_say_is_one_line_too():
  done = launch(*with_tiny("--config.mesh.train_data=4"))
  check(done, ["mesh", "there are 2"])


def test_a_config_file_that_hangs_can_be_interrupted(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(
    "import os, signal\n"
    # Who started the tests in the background had them ignore it.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "os.kill(os.getpid(), signal.SIGINT)\n"
    "while True:\n"
    "  pass\n"
  )
  done = launch_light(f"--config={path}", "--workdir=/nowhere")
  assert done.returncode == 130
  assert done.stderr.splitlines() == ["interrupted"]


@pytest.mark.slow
def test_a_reward_that_exits_at_import_ends_with_its_name(tmp_path):
  (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
  done = launch(
    *with_tiny("--config.task.reward=mine:score", "--dry_run"), cwd=tmp_path
  )
  check(done, ["task.reward", "mine:score", "mine.py, line 2: SystemExit: 0"])


@pytest.mark.slow
def test_items_that_cannot_be_scored_are_told_by_a_dry_run(tmp_path):
  lines = [json.dumps({"question": f"p{i}", "answer": "1"}) for i in range(200)]
  (tmp_path / "items.jsonl").write_text("\n".join(lines))
  config = TINY.read_text().replace('"chain_sum"', '"jsonl:items.jsonl"')
  config = re.sub(r"(?s)params=.*?\n      \),\n", "", config)
  config = config.replace("{expression}", "{question}")
  config = config.replace("num_steps=300", "num_steps=0")
  (tmp_path / "mine.py").write_text(config)
  done = launch(
    "--config=mine.py",
    "--config.task.reward=code",
    "--dry_run",
    cwd=tmp_path,
  )
  assert done.returncode == 1 and done.stdout == ""
  assert "error: task.reward: the completions of items/" in done.stderr
  assert "cannot be scored: it has no tests" in done.stderr


@pytest.mark.slow
def test_a_platform_that_gives_no_devices_is_one_line():
  done = launch(f"--config={TINY}", "--dry_run", platforms="cpu,nonsense")
  check(done, ["JAX_PLATFORMS", "'cpu,nonsense' gives no devices"])


def test_the_config_of_the_page_works_from_any_folder(tmp_path, monkeypatch):
  page = (ROOT / "docs/how-to/running.md").read_text()
  blocks = re.findall(r"(?s)```python\n(.*?)```", page)
  (text,) = [block for block in blocks if "def get_config" in block]
  monkeypatch.chdir(tmp_path)
  names = {"__file__": str(tmp_path / "mine.py"), "__name__": "mine"}
  exec(compile(text, names["__file__"], "exec"), names)
  config_checks.check(names["get_config"]())


@pytest.mark.slow
def test_dry_run_prints_sizes_and_devices_and_writes_nothing(tmp_path):
  workdir = tmp_path / "run"
  done = launch(f"--config={TINY}", f"--workdir={workdir}", "--dry_run")
  assert done.returncode == 0, done.stderr
  assert "parameters" in done.stdout
  assert not workdir.exists()


@pytest.mark.slow
def test_a_cpu_appears_as_all_devices_of_a_mesh_that_its_cores_can_carry():
  """Besides a device for generation, a device for each core that trains."""
  cores = len(os.sched_getaffinity(0))
  for count, is_enough in ((cores, True), (cores + 1, False)):
    done = launch(
      f"--config={TINY}",
      "--dry_run",
      f"--config.mesh.train_data={count}",
      f"--config.train.rows_per_microbatch={count}",
      f"--config.warm_start.rows_per_batch={count}",
    )
    if is_enough:
      assert f"rollout slice    cpu:{count} " in done.stdout, done.stderr
    else:
      assert "mesh" in error_of(done)
