"""What the books of a train step cost if it has many long trajectories.

    python benchmarks/large_step.py --workdir=/tmp/large --groups=512

Runs the coordinator, the buffer, the recorder and the checkpoints of a run with
the sizes of configs/deepseek_1p5b.py. Engine and rewards are fakes, and nothing
is trained. Messages are encoded and decoded as replicas in other processes send
them, a 16th of the batch at a time. Groups are written half by one version and
half by the next one, so that each checkpoint has a step's worth of finished
groups, and as many that are half written. Replicas give these back at a
checkpoint, as with `run.exact_resume`.

If the workdir has a checkpoint, the run goes on from it. What the fakes write
depends on the group alone, so that the books of a run that was killed and
resumed have to be those of a run that was not. benchmarks/bookkeeping.py
compares them.

The last line on stdout is one JSON object about the last train step. It has the
processor time, in milliseconds, of

    start       starting the groups of a step and encoding their turns
    again       encoding turns again that are half written
    reports     taking what was written, in two reports of each trajectory
    scores      taking the rewards, and handing groups to the buffer
    replica     what replicas do of it: encoding reports, and decoding turns
    ledger, timing, samples, metrics     writing a step down
    still       copying a checkpoint, while training stands still
    write       writing the checkpoint, beside training
    check       checking a checkpoint before the run goes on from it
    restore     reading it

where the last two are 0 if the run did not go on from one. In bytes it has what
a step adds to the files, what it sends, and what a checkpoint has of its groups
besides tokens (`groups_bytes`). `tokens_mb` are the arrays of a step's groups,
`checkpoint_mb` those of a checkpoint, and `memory_mb` is the most memory that
the process has had.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import gc
import json
import pathlib
import pickle
import runpy
import time
from types import SimpleNamespace
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import run_books

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import wire
from jaxrl_async.run import checkpointing
from jaxrl_async.run import resume
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib

_WORKDIR = flags.DEFINE_string("workdir", None, "Of the run.", required=True)
_GROUPS = flags.DEFINE_integer("groups", 512, "Groups of a step.", 1)
_TOKENS = flags.DEFINE_integer("tokens", 8_192, "Of each trajectory.", 512)
_STEPS = flags.DEFINE_integer("train_steps", 4, "Train steps of the run.", 1)

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PROMPT_TOKENS = 128
_REPLICA = "replica 0"
_MESSAGES = 16  # of a batch, for each thing that is sent
_STATE = {"weights": jnp.zeros(8)}
Row = dict[str, float]


class _Times:
  """Processor seconds by name, summed up since the last `take`."""

  def __init__(self):
    self._s: dict[str, float] = {}

  @contextlib.contextmanager
  def of(self, name: str) -> Iterator[None]:
    start_s = time.process_time()
    try:
      yield
    finally:
      passed_s = time.process_time() - start_s
      self._s[name] = self._s.get(name, 0.0) + passed_s

  def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
      with self.of(name):
        return call(*args, **kwargs)

    return timed

  def take(self) -> Row:
    found, self._s = self._s, {}
    return {name: 1e3 * s for name, s in found.items()}


class _Tokenizer:
  """Makes three characters of each token, in no time."""

  def decode(self, tokens: Sequence[int]) -> str:
    return "abc" * len(tokens)


def _score(item: dict[str, Any], completion: types.Completion) -> types.Reward:
  """Return a reward with a part, which depends on the completion alone."""
  last = int(completion.tokens[-1]) / 7
  return types.Reward(score=last + item["index"], parts={"last": last})


class _Rewards:
  """Scores in this process, when nobody measures."""

  def __init__(self):
    term: Any = term_lib.Term(scorer=_score, timeout_s=60.0, num_retries=0)
    tokenizer: Any = _Tokenizer()
    self._scorers = scoring.Scorers(
      terms=(term,), answer_prefix="", tokenizer=tokenizer
    )
    self._submitted: list[tuple[Any, scoring.Attempt]] = []

  def submit(
    self, item: dict[str, Any], trajectories: Sequence[types.Trajectory]
  ) -> Any:
    """Return a handle, which is done after the next call of `score`."""
    handle = SimpleNamespace(done=lambda: False)
    group = completion_lib.pack(trajectories)
    attempt = scoring.Attempt(term=0, item=item, group=group)
    self._submitted.append((handle, attempt))
    return handle

  def score(self) -> None:
    """Score all that was submitted."""
    for handle, attempt in self._submitted:
      outcome = self._scorers.score(attempt)
      assert isinstance(outcome, scoring.Scored)
      rewards = [
        dataclasses.replace(reward, answer=answer)
        for reward, answer in zip(outcome.rewards, outcome.answers, strict=True)
      ]
      handle.done, handle.result = lambda: True, lambda found=rewards: found
    self._submitted.clear()


class _Stream:
  """Prompts without end."""

  num_too_long = 0

  def __init__(self, next_index: int = 0):
    self.next_index = next_index

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    return True

  def next(self) -> types.Prompt:
    index = self.next_index
    self.next_index += 1
    tokens = (np.arange(_PROMPT_TOKENS, dtype=np.int32) + index) % 50_000
    item = {"index": index, "question": f"what is {index}?", "answer": "7"}
    return types.Prompt(
      prompt_id=f"fake/train/{index}", tokens=tokens, item=item
    )


class _Engine:
  """Writes turns: what it writes depends on group, member and position."""

  def __init__(self, num_tokens: int):
    rng = np.random.default_rng(0)
    size = num_tokens + 10_007
    self._num_tokens = num_tokens
    self._tokens = rng.integers(0, 50_000, size, np.int32)
    self._logprobs = -rng.random(size, np.float32)
    self._mask = np.ones(size, bool)

  def write(
    self, turn: messages.Turn, version: int, *, until: int
  ) -> messages.Written:
    """Return what a version writes of a turn, up to a number of tokens."""
    one, group = turn.trajectory, turn.admission.index
    begin, count = len(one.tokens), until - len(one.tokens)
    first = (16 * group + one.member) * 7_919 % 10_007 + begin
    part = slice(first, first + count)
    build = types.CacheBuild(begin, begin - 1, version, 32 * group + begin)
    is_over = until == self._num_tokens
    return messages.Written(
      group=group,
      begin=begin,
      trajectory=types.Trajectory(
        member=one.member,
        tokens=self._tokens[part],
        loss_mask=self._mask[:count],
        behavior_logprobs=self._logprobs[part],
        policy_versions=np.full(count, version, np.int32),
        finish_reason=types.FinishReason.LENGTH if is_over else None,
        cache_builds=(build,),
      ),
    )


class Run:
  """A run whose engine, rewards and trainer are fakes."""

  def __init__(self, workdir: pathlib.Path, config: sections.Config):
    """Begin a run, or go on from the newest checkpoint."""
    self.times = _Times()
    self.row: Row = {}
    self.step = 0
    self._workdir = workdir
    self._config = config
    self._num_tokens = config.rollout.cache_tokens
    self._now_s = 0.0
    self._message_bytes = 0
    self._engine = _Engine(self._num_tokens)
    algorithm = config.algorithm
    self._buffer = buffer_lib.Buffer(algorithm.groups_per_step, 1)
    with self.times.of("check"):
      found = resume.find(
        config, configs.MODELS["tiny"], workdir, lambda text: None
      )
    stored: dict[str, Any] = {}
    running: list[types.RolloutGroup] = []
    if found.step is not None:
      self.step = found.step
      with self.times.of("restore"):
        _, stored, groups = checkpoint.restore(
          workdir / workdir_lib.CHECKPOINTS,
          found.step,
          jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
              x.shape, x.dtype, sharding=x.sharding
            ),
            _STATE,
          ),
          verified=found.verified,
        )
        self._buffer.restore(
          checkpointing.buffer_state(
            groups,
            groups_per_step=stored["groups_per_step"],
            next_step=found.step,
            next_index=stored["next_index"],
          )
        )
        running = checkpointing.running(groups)
        stored["step"] = found.step
    with self.times.of("restore"):
      self.books = run_books.Books(workdir, stored)
    self._stream: Any = _Stream(stored.get("stream", {}).get("next_index", 0))
    rewards: Any = _Rewards()
    self._rewards: _Rewards = rewards
    self._coordinator = coordinator_lib.Coordinator(
      coordinator_settings_lib.CoordinatorSettings(
        group_size=algorithm.group_size,
        num_slots=self._config.rollout.num_slots,
        max_completion_tokens=self._num_tokens - _PROMPT_TOKENS,
        max_tokens=self._num_tokens,
        temperature=1.0,
        filter_zero_std=False,
        reads_token_scores=False,
        max_failed_groups=3,
        max_filtered_groups=1_000,
      ),
      stream=self._stream,
      buffer=self._buffer,
      rewards=rewards,
      ledger=self.books.ledger,
      busy=metrics_lib.BusyClock(0.0, seconds=lambda: self._now_s),
    )
    with self.times.of("restore"):
      self._coordinator.restore(running)
    self._buffer.set_policy_version(self.step)
    self._hold(self.step)
    books = self.books
    for name, owner, method in (
      ("ledger", books.ledger, "add_trained"),
      ("timing", books.timing, "add_step"),
      ("samples", books.sampler, "write_step"),
    ):
      timed = self.times.wrapped(name, getattr(owner, method))
      setattr(owner, method, timed)
    books.recorder.start_rl()
    if found.step is None:
      config_json.write(config, workdir)
      first = self._hand_out("start", 2 * algorithm.groups_per_step)
      cut = len(first) // 2
      self._write(first[:cut], 0, is_rest=True)
      self._write(first[cut:], 0, is_rest=False)
      self._collect()
      self._save()

  def _hold(self, version: int) -> None:
    self._now_s = float(version)
    self._coordinator.adopted(
      messages.Adopted(replica=_REPLICA, version=version)
    )

  def _encoded(self, packed: Any) -> bytes:
    """Return a message as another process gets it."""
    data = pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)
    self._message_bytes += len(data)
    return data

  def _hand_out(self, name: str, num_groups: int) -> list[messages.Turn]:
    """Have the coordinator send the turns of so many groups."""
    turns: list[messages.Turn] = []
    size = -(-num_groups // _MESSAGES)
    for first in range(0, num_groups, size):
      room = min(size, num_groups - first) * self._config.algorithm.group_size
      with self.times.of(name):
        ask = messages.Ask(replica=_REPLICA, version=self.step, room=room)
        work = self._coordinator.admit(ask)
        assert len(work.turns) == room
        data = self._encoded(wire.pack_work(work))
      with self.times.of("replica"):
        turns += wire.unpack_work(pickle.loads(data)).turns
    return turns

  def _write(
    self, turns: Sequence[messages.Turn], version: int, *, is_rest: bool
  ) -> None:
    """Have turns written to the end, or to the half, and report them."""
    until = self._num_tokens if is_rest else self._num_tokens // 2
    size = -(-len(turns) // _MESSAGES)
    for first in range(0, len(turns), size):
      report = messages.Report(
        replica=_REPLICA,
        written=tuple(
          self._engine.write(turn, version, until=until)
          for turn in turns[first : first + size]
        ),
      )
      self.books.rollout.generated_tokens += sum(
        len(written.trajectory.tokens) for written in report.written
      )
      with self.times.of("replica"):
        data = self._encoded(wire.pack_report(report))
      with self.times.of("reports"):
        self._coordinator.report(wire.unpack_report(pickle.loads(data)))
      self._rewards.score()

  def _collect(self) -> None:
    with self.times.of("scores"):
      self._coordinator.collect_scores()
    assert self._buffer.num_finished == self._config.algorithm.groups_per_step

  def train(self) -> None:
    """Make a train step, write it down, and generate until the next one."""
    step, books = self.step, self.books
    sizes = self._sizes()
    self._message_bytes = 0
    groups = self._buffer.get_batch(step, 0.0)
    assert groups is not None
    pending = run_books.pending(step, groups, self._num_tokens)
    with self.times.of("metrics"):
      totals = books.recorder.totals()
      books.recorder.begin(pending, totals, {})
      while not books.recorder.wait(60.0):
        pass
    self.step = step + 1
    self._buffer.set_policy_version(self.step)
    self._hold(self.step)
    del groups, pending
    algorithm = self._config.algorithm
    num_groups, group_size = algorithm.groups_per_step, algorithm.group_size
    # What was half written first, because it waits for a replica.
    turns = self._hand_out("again", num_groups)
    self._write(turns, self.step, is_rest=True)
    self._collect()
    turns = self._hand_out("start", num_groups)
    self._write(turns, self.step, is_rest=False)
    del turns
    self._save()
    row = self.times.take()
    for name in ("ledger", "timing", "samples"):
      row["metrics"] -= row[name]
    row |= {
      f"{name}_bytes": size - sizes[name]
      for name, size in self._sizes().items()
    }
    row["message_mb"] = self._message_bytes / 1e6
    row["tokens_mb"] = 13e-6 * self._num_tokens * num_groups * group_size
    self.row |= row

  def _save(self) -> None:
    """Take a checkpoint as `loop.Loop` does with `run.exact_resume`."""
    books = self.books
    with self.times.of("still"):
      self._coordinator.cut(self.step)
      side: Any = self._coordinator
      groups = checkpointing.outstanding(self._buffer, side)
      books.recorder.check_tokens(checkpointing.count_tokens(groups))
      state = {
        "groups_per_step": self._config.algorithm.groups_per_step,
        "max_staleness": 1,
        "next_index": self._buffer.state().next_index,
        "stream": {"next_index": self._stream.next_index},
        "ledger": dataclasses.asdict(books.ledger.state()),
        "metrics": books.recorder.state(),
        "timing": books.recorder.timing.num_bytes(),
        "config": config_json.to_stored(self._config),
      }
      finish = checkpoint.begin(
        self._workdir / workdir_lib.CHECKPOINTS,
        self.step,
        _STATE,
        state,
        groups,
      )
    with self.times.of("write"):
      finish()
    path = self._workdir / workdir_lib.CHECKPOINTS / str(self.step)
    files = {x.name: x.stat().st_size for x in path.iterdir() if x.is_file()}
    arrays = sum(n for name, n in files.items() if name.endswith(".npy"))
    self.row["checkpoint_mb"] = arrays / 1e6
    self.row["groups_bytes"] = sum(files.values()) - arrays

  def _sizes(self) -> dict[str, int]:
    samples = self._workdir / "samples"
    files = samples.iterdir() if samples.exists() else ()
    found = {"samples": sum(x.stat().st_size for x in files)}
    for name in ("ledger", "timing", "metrics"):
      path = self._workdir / f"{name}.jsonl"
      found[name] = path.stat().st_size if path.exists() else 0
    return found


def config_of(num_groups: int, num_tokens: int) -> sections.Config:
  """Return configs/deepseek_1p5b.py with another number of groups."""
  path = _ROOT / "configs" / "deepseek_1p5b.py"
  config = runpy.run_path(str(path))["get_config"]()
  config.algorithm.groups_per_step = num_groups
  config.rollout.cache_tokens = num_tokens
  return config


def main(argv: Sequence[str]) -> None:
  """Run to the end, and print what the last step has cost."""
  del argv
  gc.set_threshold(10_000)  # as launch/train.py
  logging.set_verbosity(logging.WARNING)  # Orbax
  workdir = pathlib.Path(_WORKDIR.value)
  workdir.mkdir(parents=True, exist_ok=True)
  run = Run(workdir, config_of(_GROUPS.value, _TOKENS.value))
  first = run.times.take()
  run.row |= {name: first[name] for name in ("check", "restore")}
  while run.step < _STEPS.value:
    run.train()
    print(f"step {run.step}", flush=True)
  run.books.close()
  run.row["memory_mb"] = run_books.peak_memory_bytes() / 1e6
  print(json.dumps(run.row))


if __name__ == "__main__":
  app.run(main)
