"""This project against TRL and Tunix: the same RL of a small policy on a CPU.

    python benchmarks/head_to_head.py

Each system trains the same Qwen2 of 0.53 million parameters, with one token per
character, by GRPO: 8 prompts of 31 tokens a step, 8 completions each, one
update, temperature 1, no penalty for divergence, the same AdamW and the same
reward. The cases (peers/shared_work.py):

    fixed      every completion has 64 tokens
    long_tail  lengths are nearly lognormal (median 32, deviation 1.2 in
               logarithms) and cut at 512; TRL and Tunix wait for the longest of
               a batch, and this project goes on with the others
    reward     sums of three or four digits that are worked out step by step,
               32 prompts of 8 completions: the time until an evaluation on 256
               held-out questions, sampled at temperature 1, reaches 0.6

Lengths are those that the policy has learned. It was fine-tuned by this project
on letters of such lengths (in `fixed`: of more than may be written), and all
systems begin from that policy, exported in Hugging Face's format. So none of
them is changed, and they draw lengths from one distribution; the table has the
tokens of a mean batch. In these cases rewards are arbitrary, and the learning
rate is so small that the lengths stay.

The systems run one after the other, in the reverse order in every second
repeat, each in a process of its own. Peers have environments of their own,
from peers/*.txt, which `uv run` makes. Without a network they have to be made
before: the error says how. PyTorch is the build for CPUs, which uv has to find
(UV_FIND_LINKS or UV_INDEX).

Each system has the settings that its documentation recommends for speed, as far
as they work without a GPU; they are printed below the table. This project runs
asynchronously, by the function that its users call. Its first and last steps
are left out, because the engine is ahead at the start, and has nothing to write
at the end; of the peers, which do one step after the other, only the first step
is, which compiles. `ours_sync`, which has to be asked for, is the same with
max_staleness=0.

Three others are not here, because they do not run without a GPU. verl (0.5)
requires CUDA 12.1, and generates with vLLM or SGLang on it. AReaL (1.0)
requires NVIDIA's cuDNN in every installation, and its two inference engines are
extras for CUDA. prime-rl (0.5) says that it needs at least one NVIDIA GPU, and
requires a build of vLLM for CUDA.

    tokens_per_s   tokens of completions up to their end, over the time of all
                   measured steps
    ratio          over that of the fastest peer in the same repeat; in `reward`
                   the fastest peer's time over the own. Median of the repeats.
    step_s         median of the measured steps
    step_cpu_s     time on cores, with all child processes
    train_frac     share of the time in which there was training; rollout_frac
                   is that in which completions were written and scored. Of this
                   project both are what its two devices were busy, at once.
    step_tokens    tokens of a batch; longest_tokens are those of its longest
                   completion. Both are means.
    first_step_s   from the start of the program, imports included, to the end
                   of the first step, with nothing in a compilation cache
    peak_mb        largest resident memory, with all child processes
    num_compilations   programs that XLA compiled
    reach_s        until the target, evaluations after the first not counted

Everything is kept in --directory, and policies there are used again. Prints the
tables and, as the last line, one JSON object: `rows`, with `system`, `case`,
`tokens_per_s`, `ratio` and the other columns. Hardware: two CPU cores.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import launching
from peers import measurements
from peers import shared_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """A program that does the work.

  Attributes:
    program: a file of peers/, and its options.
    modules: what it imports; the first import in an environment is slow.
    requirements: of the environment of a peer; "" is this project's own.
    skip_first: steps before those that are measured.
    skip_last: steps after them.
  """

  program: tuple[str, ...]
  modules: str
  requirements: str = ""
  skip_first: int = 1
  skip_last: int = 0

  def num_measured(self) -> int:
    """Return the number of measured steps of a run without a target."""
    return _PEER_STEPS.value if self.requirements else _STEPS.value


SYSTEMS = {
  "ours": System(
    program=("ours.py",), modules="jaxrl_async", skip_first=12, skip_last=3
  ),
  "ours_sync": System(
    program=("ours.py", "--sync"), modules="jaxrl_async", skip_first=2
  ),
  "trl": System(
    program=("trl_grpo.py",),
    modules="torch, transformers, trl",
    requirements="trl.txt",
  ),
  "tunix": System(
    program=("tunix_grpo.py",),
    modules="jax, transformers, tunix",
    requirements="tunix.txt",
  ),
}
_PEERS = launching.ROOT / "benchmarks" / "peers"
_MOST_STEPS = 80  # of a run that has a target
_EVAL_EVERY = 5
_NUM_HELD_OUT = 256

_SYSTEMS = flags.DEFINE_list(
  "systems", ["ours", "trl", "tunix"], f"Of {', '.join(SYSTEMS)}."
)
_CASES = flags.DEFINE_list(
  "cases", [*shared_work.CASES], f"Of {', '.join(shared_work.CASES)}."
)
for _name, _known in (("systems", SYSTEMS), ("cases", shared_work.CASES)):
  flags.register_validator(
    _name,
    lambda names, known=_known: names and {*names} <= known.keys(),
    message="unknown name",
  )
_REPEATS = flags.DEFINE_integer(
  "repeats", 3, "How often each system does each case.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
  "steps", 16, "Train steps of this project that are measured.", lower_bound=1
)
_PEER_STEPS = flags.DEFINE_integer(
  "peer_steps", 5, "Train steps of a peer that are measured.", lower_bound=1
)
_REWARD_MS = flags.DEFINE_float(
  "reward_ms", 0.0, "Processor time of each reward.", lower_bound=0.0
)
_DIRECTORY = flags.DEFINE_string(
  "directory", "", "Where policies and runs are kept; a temporary one if empty."
)


def _environment(requirements: str) -> tuple[list[str], dict[str, str]]:
  """Return the start of a command that runs Python for a system."""
  variables = dict(os.environ)
  if not requirements:
    return [sys.executable], variables
  # Nothing of this project's environment may reach that of a peer.
  for name in ("PYTHONPATH", "VIRTUAL_ENV"):
    variables.pop(name, None)
  version = f"{sys.version_info.major}.{sys.version_info.minor}"
  command = ["uv", "run", "--isolated", "--no-project", "--python", version]
  command += ["--with-requirements", str(_PEERS / requirements), "python"]
  return command, variables


def _check_environments(systems: Sequence[str]) -> None:
  """Make the environments; end the process with one line if one is missing."""
  for name in systems:
    command, variables = _environment(SYSTEMS[name].requirements)
    command += ["-c", f"import {SYSTEMS[name].modules}"]
    try:
      done = subprocess.run(
        command, env=variables, capture_output=True, text=True
      )
      reason = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except FileNotFoundError:
      reason = ["uv is not installed"]
    if reason:
      shown = shlex.join(command)
      sys.exit(
        f"error: no environment for {name} ({reason[0].strip()}); run this"
        f" where there is a network: {shown}"
      )


def _policy(case: str, directory: pathlib.Path) -> pathlib.Path:
  """Return the directory of the policy that all systems begin with."""
  program = _PEERS / "warm_start.py"
  print(f"{case}: the policy", file=sys.stderr)
  _execute([sys.executable, str(program), case, str(directory)], directory)
  return directory / "policy"


def _execute(
  command: list[str],
  directory: pathlib.Path,
  variables: dict[str, str] | None = None,
) -> None:
  """Run a program; its output is kept in log.txt."""
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / "log.txt"
  with path.open("w") as log:
    done = subprocess.run(
      command, env=variables, stdout=log, stderr=subprocess.STDOUT
    )
  if done.returncode:
    sys.exit(f"error: {command[-2:]} exited with {done.returncode}: see {path}")


def _run(
  name: str, case: str, repeat: int, policy: pathlib.Path
) -> dict[str, Any]:
  """Let one system do a case once; return what was measured."""
  system, shape = SYSTEMS[name], shared_work.CASES[case]
  num_steps = system.skip_first + system.num_measured() + system.skip_last
  if shape.target:
    num_steps = _MOST_STEPS
  directory = pathlib.Path(
    tempfile.mkdtemp(prefix=f"{name}_{repeat}_", dir=policy.parent)
  )
  model = json.loads((policy.parent / "model.json").read_text())
  work = shared_work.Work(
    case=case,
    policy=str(policy),
    model=model,
    directory=str(directory),
    num_steps=num_steps,
    questions=shared_work.questions(
      case, num_steps * shape.prompts_per_step, repeat
    ),
    held_out=shared_work.held_out(case, _NUM_HELD_OUT),
    eval_every=_EVAL_EVERY if shape.target else 0,
    reward_ms=_REWARD_MS.value,
    seed=repeat,
  )
  path = directory / "work.json"
  work.write(path)
  print(f"{case}, repeat {repeat}: {name}", file=sys.stderr)
  command, variables = _environment(system.requirements)
  program, *options = system.program
  command += [str(_PEERS / program), str(path), *options]
  _execute(command, directory, variables)
  return measurements.run(
    measurements.read(directory),
    skip_first=1 if shape.target else system.skip_first,
    skip_last=0 if shape.target else system.skip_last,
    target=shape.target,
  )


def _case(case: str, directory: pathlib.Path) -> list[dict[str, Any]]:
  """Return the rows of a case."""
  policy = _policy(case, directory / case)
  runs: dict[str, list[dict[str, Any]]] = {name: [] for name in _SYSTEMS.value}
  for repeat in range(_REPEATS.value):
    names = list(runs)
    for name in reversed(names) if repeat % 2 else names:
      runs[name].append(_run(name, case, repeat, policy))
  peers = [name for name in runs if SYSTEMS[name].requirements]
  return measurements.rows(case, runs, peers)


def main(argv: Sequence[str]) -> None:
  """Measure all cases and print the results."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  _check_environments(_SYSTEMS.value)
  with tempfile.TemporaryDirectory(prefix="head_to_head_") as temporary:
    directory = pathlib.Path(_DIRECTORY.value or temporary).absolute()
    cases = {case: _case(case, directory) for case in _CASES.value}
  rows = [row for case in cases.values() for row in case]
  for is_reward in (False, True):
    shown = [row for row in rows if ("reach_s" in row) is is_reward]
    if shown:
      print(measurements.table(shown) + "\n")
  for name in _SYSTEMS.value:
    row = next(row for row in rows if row["system"] == name)
    print(f"{name}: {row['versions']}; {row['settings']}")
  load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
  print(f"load of the machine at the end: {load}")
  print(json.dumps({"rows": rows, "num_cores": len(os.sched_getaffinity(0))}))


if __name__ == "__main__":
  app.run(main)
