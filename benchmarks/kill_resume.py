"""Kills a run many times with SIGKILL, and resumes it with the same command.

    uv run benchmarks/kill_resume.py --kills=100 --directory=/tmp/killed
    uv run benchmarks/kill_resume.py --kills=10 --mode=exact
    uv run benchmarks/kill_resume.py --kills=10 --replicas=2
    uv run benchmarks/kill_resume.py --kills=10 --set=algorithm.advantage=gae

The mode is that of the run: exact is run.exact_resume, and fast is without it,
as runs are by default. With --replicas the engines are in other processes, in a
Ray cluster that each start makes.

A third of the kills come at a random time after the start. The others wait
until the run is inside a named stage: a checkpoint that is being written, a
version that is published or adopted, a reward, the warm start, an evaluation, a
train step, or the start from a checkpoint. (Replicas in other processes adopt
versions where nobody sees it, so that no kill waits for that.) After each kill
the newest checkpoint is read, and after the last one the run is resumed to its
end.

Only the process that trains is killed. What it started has to end by itself.
In both modes the replay begins with the first step, and the flag of XLA that
makes bits comparable is set.

The last line is JSON:

    kills            how many kills there were
    lost             groups and prompts that no part of the books has
    duplicated       groups and prompts that they have twice
    ledger_balanced  whether every generated token was accounted for each time
    bit_exact        whether launch/replay.py repeats every token, logprob and
                     loss of the run
    bound_held       whether no token was older than algorithm.max_staleness
    stages           how many kills fell into which stage
    missed           kills that waited for a stage in vain
"""

from collections.abc import Callable, Sequence
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import marked_processes
import stage_board
import surviving_books

from jaxrl_async.devices import xla_flags
from jaxrl_async.weights import transfer_directory

ROOT = pathlib.Path(__file__).resolve().parents[1]
_POLL_S = 0.0005
_LONGEST_S = 120.0  # of one start until it is killed
_PATIENCE_S = 10.0  # after its first train step
_MOST = 8  # times that a kill waits for a stage
_ORPHANS_S = 30.0  # until the processes of a killed run must have ended
# As in launch/; the driver makes prompts as the run does. The second flag makes
# bits independent of slots, which a run in the exact mode sets by itself.
os.environ.setdefault(
  "XLA_FLAGS",
  f"--xla_force_host_platform_device_count=2 {xla_flags.of_same_bits()}",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What a kill waits for, in turn. The warm start comes only once.
_TARGETS = tuple(x for x in stage_board.STAGES if x != "warm start")
# Stages that a start goes through many times, and about how long they take.
# Kills wait for several of them, so that the run makes progress in between.
_REPEATED = {
  "checkpoint": 0.3,
  "publish": 0.05,
  "adopt": 0.02,
  "reward": 0.005,
  "train step": 0.05,
}


class KillError(RuntimeError):
  """A run did not survive: it failed, or left processes behind."""


class Driver:
  """Starts one run again and again.

  Attributes:
    stages: how many kills fell into which stage.
    orphans_s: seconds after each kill in which processes of the run remained.
    ready_s: seconds of each start until its first train step.
    books: what was found after each kill that left a checkpoint.
    num_missed: kills that waited in vain for the stage that they were to be in.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    flags_of_run: list[str],
    seed: int,
    targets: Sequence[str] = _TARGETS,
    *,
    temporary: str,
  ):
    """Prepare the first start; `temporary` holds its temporary files."""
    self.workdir = directory / "run"
    self.stages: dict[str, int] = {}
    self.orphans_s: list[float] = []
    self.ready_s: list[float] = []
    self.books: list[surviving_books.Books] = []
    self.num_missed = 0
    self._targets = targets
    self._rng = random.Random(seed)
    self._log = directory / "output.log"
    self._board_path = directory / "board"
    self.board = stage_board.Board(self._board_path)
    self._flags = [f"--workdir={self.workdir}", *flags_of_run]
    self._mark = ""
    self._temporary = temporary

  def start(self, *more: str) -> subprocess.Popen:
    """Start the run, or resume it, in a process group of its own."""
    self.board.clear()
    # Ray's processes have groups of their own, and keep the environment.
    self._mark = marked_processes.new_mark()
    with open(self._log, "ab") as log:
      return subprocess.Popen(
        [
          sys.executable,
          str(ROOT / "benchmarks" / "staged_train.py"),
          str(self._board_path),
          *self._flags,
          *more,
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={
          **marked_processes.environment(self._mark),
          "TMPDIR": self._temporary,
        },
      )

  def kill(self, number: int, num_kills: int) -> None:
    """Start the run, kill it at some moment, and look at what it left.

    Raises:
      KillError: the run ended by itself, or left processes behind.
      ManifestError: the newest checkpoint is damaged.
    """
    process, start_s = self.start(), time.monotonic()
    is_now = self._moment(number, num_kills, start_s)
    ready_s = None
    while not is_now():
      if ready_s is None and self.board.num_entered("train step"):
        ready_s = time.monotonic() - start_s
      if process.poll() is not None:
        raise KillError(
          f"the run ended with {process.returncode}: {self.end()}"
        )
      lived_s = time.monotonic() - start_s
      is_waiting = ready_s is not None and lived_s > ready_s + _PATIENCE_S
      if is_waiting or lived_s > _LONGEST_S:
        self.num_missed += 1
        break
      time.sleep(_POLL_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if ready_s is not None:
      self.ready_s.append(ready_s)
    self._count_stages()
    self._wait_for_orphans()
    books = surviving_books.read(self.workdir)
    if books is not None:
      self.books.append(books)

  def _moment(
    self, number: int, num_kills: int, start_s: float
  ) -> Callable[[], bool]:
    """Return what tells when the kill of this number is due."""
    typical_s = statistics.median(self.ready_s) if self.ready_s else 20.0
    if number < max(1, num_kills // 16):
      return self._inside("warm start")
    if number % 3:
      place = number // 3 * 2 + number % 3
      return self._inside(self._targets[place % len(self._targets)])
    due_s = start_s + self._rng.uniform(0.0, 1.5 * typical_s)
    return lambda: time.monotonic() > due_s

  def _inside(self, stage: str) -> Callable[[], bool]:
    """Return what tells whether the run is some way into a stage."""
    count = self._rng.randint(1, _MOST) if stage in _REPEATED else 1
    wait_s = self._rng.uniform(0.0, _REPEATED.get(stage, 1.0))
    entered_s = None

    def is_now() -> bool:
      nonlocal entered_s
      if entered_s is None and self.board.num_entered(stage) >= count:
        entered_s = time.monotonic()
      return entered_s is not None and time.monotonic() - entered_s >= wait_s

    return is_now

  def _count_stages(self) -> None:
    active = self.board.active()
    if not active:
      is_ready = self.board.num_entered("train step") > 0
      active = ["between these" if is_ready else "start"]
    for stage in active:
      self.stages[stage] = self.stages.get(stage, 0) + 1

  def _wait_for_orphans(self) -> None:
    killed_s = time.monotonic()
    while left := marked_processes.find(self._mark):
      if time.monotonic() - killed_s > _ORPHANS_S:
        names = ", ".join(sorted(left.values()))
        raise KillError(
          f"{len(left)} processes of a killed run remain: {names}"
        )
      time.sleep(0.01)
    self.orphans_s.append(time.monotonic() - killed_s)

  def end(self) -> str:
    """Return the last lines that the run has written."""
    return self._log.read_text(errors="replace")[-2000:]

  def finish(self, num_more: int) -> None:
    """Resume the run, and let it end a few steps after its checkpoint.

    Raises:
      KillError: it failed.
    """
    newest = surviving_books.newest_checkpoint(self.workdir)
    step = int(newest.name) if newest else 0
    process = self.start(f"--config.train.num_steps={step + num_more}")
    try:
      code = process.wait(10 * _LONGEST_S)
    finally:
      process.kill()
    if code:
      raise KillError(f"the last start ended with {code}: {self.end()}")
    self._wait_for_orphans()


def flags_of_run(
  compile_cache: pathlib.Path, mode: str = "fast", replicas: int = 0
) -> list[str]:
  """Return the flags of a run whose every stage comes often.

  Args:
    compile_cache: of XLA's programs.
    mode: "fast" or "exact".
    replicas: in other processes; 0 is the one within the run.
  """
  remote = [
    "--config.cluster.kind=ray",
    f"--config.cluster.replicas={replicas}",
  ]
  return [
    f"--config={ROOT / 'configs' / 'tiny.py'}",
    f"--compile_cache={compile_cache}",
    "--config.warm_start.num_steps=40",
    "--config.eval.num_items=4",
    "--config.eval.every=3",
    "--config.run.checkpoint_every=2",
    f"--config.run.exact_resume={mode == 'exact'}",
    "--config.task.question_workers=1",
    # So that kills meet versions on their way, too.
    "--config.transfer.channel=orbax",
    "--config.train.num_steps=1000000",
    *(remote if replicas else []),
  ]


def first_prompt_ids(workdir: pathlib.Path, count: int) -> list[str]:
  """Return the ids of the first prompts of a run, as its source makes them."""
  # Slow imports, which the kills need not wait for.
  import jax

  from jaxrl_async.assembly import assembly
  from jaxrl_async.assembly import setup as setup_lib
  from jaxrl_async.data import held_out
  from jaxrl_async.data import prompts
  from jaxrl_async.data import source as source_lib
  from jaxrl_async.storage import config_json

  config = config_json.read(workdir)
  assert config is not None
  source = assembly.prompt_source(setup_lib.resolve(config, jax.devices()))
  evaluated = held_out.load_or_make(
    workdir / "held_out.json",
    source,
    config.eval.num_items,
    note=print,
    on_progress=lambda num_made: None,
  )
  stream = prompts.PromptStream(source, source_lib.Split.TRAIN)
  stream.exclude(prompt.item["question"] for prompt in evaluated)
  with contextlib.closing(stream):
    return [stream.next().prompt_id for _ in range(count)]


def replayed(workdir: pathlib.Path, compile_cache: pathlib.Path) -> bool:
  """Return whether launch/replay.py reproduces the run."""
  done = subprocess.run(
    [
      sys.executable,
      str(ROOT / "launch" / "replay.py"),
      f"--workdir={workdir}",
      f"--compile_cache={compile_cache}",
    ],
    stdout=subprocess.PIPE,
    text=True,
  )
  return json.loads(done.stdout.splitlines()[-1])["bit_exact"]


def measure(
  directory: pathlib.Path,
  num_kills: int,
  *,
  compile_cache: pathlib.Path,
  mode: str = "fast",
  replicas: int = 0,
  minutes: float = float("inf"),
  seed: int = 0,
  further: Sequence[str] = (),
) -> dict[str, Any]:
  """Kill a run so many times, finish it, and say what became of it.

  Args:
    directory: for the run and its output; it is emptied.
    num_kills: how often.
    compile_cache: of XLA's programs, which makes starts short.
    mode: as for `flags_of_run`.
    replicas: as for `flags_of_run`.
    minutes: after which no more kills follow.
    seed: of the moments.
    further: settings of the run, as "a.b=c".
  """
  shutil.rmtree(directory, ignore_errors=True)
  directory.mkdir(parents=True)
  of_run = flags_of_run(compile_cache, mode, replicas)
  of_run += [f"--config.{setting}" for setting in further]
  targets = [x for x in _TARGETS if not (replicas and x == "adopt")]
  # A killed process does not remove its own temporary files.
  with tempfile.TemporaryDirectory(prefix="kill_") as temporary:
    driver = Driver(directory, of_run, seed, targets, temporary=temporary)
    end_s = time.monotonic() + 60 * minutes
    for number in range(num_kills):
      if time.monotonic() > end_s:
        num_kills = number
        break
      driver.kill(number, num_kills)
      step = driver.books[-1].prefix.step if driver.books else None
      print(
        f"kill {number + 1}/{num_kills}: checkpoint {step}, {driver.stages}",
        file=sys.stderr,
      )
    driver.finish(num_more=4)
  workdir = driver.workdir
  newest = surviving_books.newest_checkpoint(workdir)
  assert newest is not None
  state = json.loads((newest / "host_state.json").read_text())
  final = surviving_books.read(
    workdir, first_prompt_ids(workdir, state["next_index"])
  )
  assert final is not None
  books = [*driver.books, final]
  rewritten = surviving_books.changed_since(workdir, [b.prefix for b in books])
  used = transfer_directory.defaults(workdir.resolve())
  return {
    "mode": mode,
    "replicas": replicas,
    "kills": num_kills,
    "lost": sum(len(b.lost) for b in books),
    "duplicated": sum(len(b.duplicated) for b in books)
    + len(surviving_books.repeated_metrics(workdir)),
    "ledger_balanced": all(b.is_balanced for b in books),
    "bit_exact": replayed(workdir, compile_cache),
    "bound_held": not any(b.out_of_bound for b in books),
    "whole_steps": not any(b.wrong_steps for b in books),
    "rewritten_checkpoints": len(rewritten),
    "train_steps": final.prefix.step,
    "groups": state["next_index"],
    "checkpoints_seen": len({b.prefix.step for b in books}),
    "stages": dict(sorted(driver.stages.items())),
    "missed": driver.num_missed,
    "ready_s_median": round(statistics.median(driver.ready_s or [0.0]), 1),
    "orphans_s_max": round(max(driver.orphans_s), 2),
    "left_in_memory": [str(path) for path in used if path.exists()],
  }


_KILLS = flags.DEFINE_integer("kills", 100, "How often to kill.", 1)
_MODE = flags.DEFINE_enum("mode", "fast", ["fast", "exact"], "Of the run.")
_REPLICAS = flags.DEFINE_integer(
  "replicas", 0, "Replicas in other processes; 0 is one within the run.", 0
)
_DIRECTORY = flags.DEFINE_string(
  "directory", "/tmp/kill_resume", "Directory of the run; it is emptied."
)
_CACHE = flags.DEFINE_string(
  "compile_cache", "/tmp/kill_resume_cache", "Directory of XLA's programs."
)
_MINUTES = flags.DEFINE_float(
  "minutes", float("inf"), "No more kills follow after so many minutes."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the moments.")
_SET = flags.DEFINE_multi_string(
  "set", [], "A further setting of the run, as algorithm.num_epochs=2."
)


def main(argv: list[str]) -> None:
  """Measure, and print the result."""
  del argv
  result = measure(
    pathlib.Path(_DIRECTORY.value).absolute(),
    _KILLS.value,
    compile_cache=pathlib.Path(_CACHE.value).absolute(),
    mode=_MODE.value,
    replicas=_REPLICAS.value,
    minutes=_MINUTES.value,
    seed=_SEED.value,
    further=_SET.value,
  )
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
