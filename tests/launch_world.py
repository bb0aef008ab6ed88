"""Runs the launch scripts, and finds the commands of runs in them and in docs.

Real runs of a script have programs of these tests in place of gcloud, srun and
others, which write down how they were called.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import warnings

from absl import flags
from ml_collections import config_flags
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
TPU_POD = LAUNCH / "tpu_pod.sh"
SBATCH = LAUNCH / "slurm.sbatch"
GKE = LAUNCH / "gke" / "run.sh"
OWN_MACHINES = LAUNCH / "ray_cluster.sh"
MANIFESTS = sorted((LAUNCH / "gke").glob("*.yaml"))
PAGES = [
  ROOT / "docs" / "how-to" / f"{name}.md"
  for name in ("clusters", "tpu", "slurm", "gke", "own_machines", "security")
]
SIZES = ROOT / "docs" / "how-to" / "tpu.md"
SLICES = ("--name=run1", "--project=p", "--zone=z")
A_RUN = (
  "--config=configs/tpu_7b.py:8k@v5p:2x2x2",
  "--workdir=/mnt/jaxrl/run1",
)


def output(*command, **environment):
  """Return what a script prints; its exit status must be 0."""
  done = subprocess.run(
    ["bash", *map(str, command)],
    cwd=ROOT,
    env=os.environ | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stdout
  return done.stdout


def tpu_pod(command, *options, run=A_RUN):
  """Return the commands that a dry run of tpu_pod.sh prints."""
  text = output(TPU_POD, command, *SLICES, "--dry_run", *options, "--", *run)
  return [line[2:] for line in text.splitlines() if line.startswith("+ ")]


def slurm(*arguments, **environment):
  """Return the commands that a dry run of slurm.sbatch prints."""
  text = output(SBATCH, *arguments, DRY_RUN="1", **environment)
  return [line[2:] for line in text.splitlines() if line.startswith("+ ")]


def gke(command, *options):
  """Return the commands that a dry run of gke/run.sh prints."""
  text = output(GKE, command, *options, "--dry_run")
  return [line[2:] for line in text.splitlines() if line.startswith("+ ")]


def own_machines(command, *run):
  """Return the commands that a dry run of ray_cluster.sh prints."""
  text = output(OWN_MACHINES, command, "--dry_run", "--", *run)
  return [line[2:] for line in text.splitlines() if line.startswith("+ ")]


def stand_in(folder, name, script):
  """Put a program into a folder that writes its calls to the file `calls`."""
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f'#!/bin/bash\necho "{path.name} $*" >>"$CALLS"\n{script}\n')
  path.chmod(0o755)


def objects(path):
  """Return the objects of a manifest, by kind."""
  return {o["kind"]: o for o in yaml.safe_load_all(path.read_text())}


def templates(thing):
  """Yield all templates of pods in an object: dicts that have containers."""
  if isinstance(thing, dict):
    if "containers" in thing.get("spec", {}):
      yield thing
    for part in thing.values():
      yield from templates(part)
  elif isinstance(thing, list):
    for part in thing:
      yield from templates(part)


def scripts_in(manifest):
  """Yield the shell scripts that containers of a manifest run."""
  for thing in objects(manifest).values():
    for template in templates(thing):
      for container in template["spec"]["containers"]:
        yield from container.get("args", [])


def text_of_pages():
  """Return the pages on several hosts as one text."""
  return "\n".join(page.read_text() for page in PAGES)


def code_of_pages():
  """Return the indented lines of these pages, as shell commands."""
  lines = text_of_pages().splitlines()
  return "\n".join(line[4:] for line in lines if line.startswith("    "))


def _words(command):
  """Return the words of a command, and those of commands within its words."""
  words = []
  for word in shlex.split(command, comments=True):
    if word.startswith("--command="):
      word = word.removeprefix("--command=")
    has_command = " " in word and "launch/train.py" in word
    words += _words(word) if has_command else [word]
  return words


def runs_in(text):
  """Return the flags of each run that shell commands start.

  These are the words from --config=... on, of each command that has one.
  """
  runs = []
  # The drawings of a page are no commands.
  lines = text.replace("\\\n", " ").splitlines()
  for line in lines:
    if "--config" not in line or "│" in line:
      continue
    words = _words(line)
    starts = [i for i, word in enumerate(words) if word.startswith("--config=")]
    assert starts, line
    flags_of_run = words[starts[0] :]
    runs.append([w for w in flags_of_run if w.startswith("--")])
  return runs


def config_of(run):
  """Return the config of a run's flags, and load its config file for it."""
  own = [flag for flag in run if re.match(r"--config[.=]", flag)]
  path = own[0].removeprefix("--config=")
  argv = ["train", f"--config={ROOT / path}", *own[1:]]
  values = flags.FlagValues()
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
  with warnings.catch_warnings():
    # ml_collections loads the file in a way that Python is about to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    values(argv)
  return values["config"].value


def shellcheck(path):
  """Return what shellcheck says of a script; "" is nothing."""
  program = pathlib.Path(sys.executable).with_name("shellcheck")
  done = subprocess.run(
    [program, "--shell=bash", path],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=60,
  )
  return done.stdout
