"""How many replicas and groups one coordinator carries.

    uv run --extra ray benchmarks/cluster.py

The coordinator, the buffer, the ledger, the fleet and Ray are those of a run.
The replicas are fakes, many to a process: they write random tokens at once, and
report each trajectory twice, half-written and finished. Scores are given at
once in the coordinator's process, because benchmarks/rewards.py measures those.
A thread takes a batch of groups for each step, as a trainer would.

Then whole runs are compared, and processes adopt one version of the weights at
once. All of it takes about ten minutes on two CPU cores. --replicas=, --norun
and --weights=0 leave parts out.

The last line is JSON. Its first keys are those of the largest number of
replicas, and `by_replicas` has them for every number:

    replicas                      number of fakes
    groups_per_s                  groups that were finished, while the fakes and
                                  the coordinator share this machine's cores
    reports_per_s                 reports of single trajectories, partial ones
                                  included
    admit_p99_ms                  one round of handing out, in which every
                                  replica may get hundreds of turns
    report_p99_ms                 from taking what one replica says, hundreds of
                                  reports at a time, to the answer
    coordinator_cpu_per_group_ms  CPU time of the coordinator's whole process
    wall_ratio_vs_local           time of a step of configs/quickstart.py with
                                  one replica in another process, over that in
                                  one process
    adopt_idle_s                  seconds without decoding for each version, in
                                  the former; both are means over the steps
                                  after the first three
    fan_out                       what it takes processes on one machine to
                                  adopt one version at once, by their number;
                                  see benchmarks/fan_out.py

What was left out is null.
"""

from collections.abc import Sequence
from concurrent import futures
import gc
import importlib
import json
import os
import pathlib
import pickle
import secrets
import tempfile
import threading
import time
from typing import Any

from absl import app
from absl import flags
from absl import logging
import fake_replicas
import fan_out
import launching
import numpy as np

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.cluster import ray_replicas
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import wire

_REPLICAS = flags.DEFINE_list(
  "replicas", ["1", "8", "64"], "Numbers of fake replicas; empty for none."
)
_STEPS = flags.DEFINE_integer("steps", 20, "Train steps that are timed.", 1)
_HOSTS = flags.DEFINE_integer("hosts", 2, "Processes of the fakes.", 1)
_GROUPS = flags.DEFINE_integer("groups_per_step", 512, "Groups a step.", 1)
_GROUP_SIZE = flags.DEFINE_integer("group_size", 16, "Trajectories a group.", 2)
_TOKENS = flags.DEFINE_integer("tokens", 128, "Mean tokens a completion.", 2)
_RUN = flags.DEFINE_bool("run", True, "Compare whole runs, too.")
_RUN_STEPS = flags.DEFINE_integer("run_steps", 30, "Steps of these runs.", 4)
_WEIGHTS_MB = flags.DEFINE_integer(
  "weights", 300, "MB of a version to be read by several processes at once.", 0
)
_READERS = flags.DEFINE_list(
  "readers", ["1", "2", "4"], "Numbers of those processes."
)

_KEYS = (
  *("replicas", "groups_per_s", "reports_per_s", "admit_p99_ms"),
  *("report_p99_ms", "coordinator_cpu_per_group_ms", "by_replicas"),
  *("wall_ratio_vs_local", "adopt_idle_s", "fan_out"),
)
_MAX_STALENESS = 4
_PROMPT_TOKENS = 32
_COMPILING_STEPS = 3
_WARM_START_STEPS = 300
_DEADLINE_S = 300.0


class Prompts(prompts.PromptStream):
  """The same prompt, as often as it is wanted."""

  def __init__(self):
    self._tokens = np.arange(_PROMPT_TOKENS, dtype=np.int32)

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return True."""
    del timeout_s
    return True

  def next(self) -> types.Prompt:
    """Return the prompt."""
    return types.Prompt(prompt_id="none/train/0", tokens=self._tokens, item={})


class Scored(service_lib.ScoreHandle):
  """A group that is scored at once."""

  def __init__(self, count: int):
    self._rewards = [types.Reward(score=float(i % 2)) for i in range(count)]

  def done(self) -> bool:
    """Return True."""
    return True

  def result(self) -> list[types.Reward]:
    """Return alternating scores."""
    return self._rewards


class Rewards(service_lib.RewardService):
  """Scores without processes, but packs what they would get."""

  def __init__(self):
    self.num_groups = 0

  def submit(
    self, item: dict[str, Any], trajectories: Sequence[types.Trajectory]
  ) -> service_lib.ScoreHandle:
    """Return scores at once."""
    self.num_groups += 1
    pickle.dumps((item, completion_lib.pack(trajectories)))
    return Scored(len(trajectories))


class TimedFleet(fleet_lib.Fleet):
  """Measures how long its answers take."""

  def __init__(self, *arguments: Any, **named: Any):
    super().__init__(*arguments, **named)
    self.admit_s: list[float] = []
    self.report_s: list[float] = []
    self.num_reports = 0

  def _on_said(self, member: Any, said: remote.Said) -> None:
    start_s = time.perf_counter()
    super()._on_said(member, said)
    self.report_s.append(time.perf_counter() - start_s)
    self.num_reports += sum(
      len(told.groups)
      for told in said.told
      if isinstance(told, wire.PackedReport)
    )

  def _hand_out(self) -> None:
    start_s, before = time.perf_counter(), self.num_given
    super()._hand_out()
    if self.num_given > before:
      self.admit_s.append(time.perf_counter() - start_s)

  @property
  def num_given(self) -> int:
    """Deliveries so far."""
    return sum(member.num_sent for member in self._members)


class FakeHandle:
  """One fake replica of a host, called through Ray."""

  def __init__(self, ray: Any, host: Any, number: int):
    self._ray, self._host, self._number = ray, host, number

  def attach(self, name: str, spec: Any) -> futures.Future:
    """Create the replica."""
    del spec
    return self._host.attach.remote(self._number, name).future()

  def collect(self) -> futures.Future:
    """Return what it says."""
    return self._host.collect.remote(self._number).future()

  def deliver(self, delivery: remote.Delivery) -> None:
    """Give it work."""
    self._host.deliver.remote(self._number, delivery)

  def kill(self) -> None:
    """Leave it; it ends with Ray."""


def _p99_ms(times_s: list[float]) -> float:
  return round(1e3 * float(np.quantile(times_s, 0.99)), 3)


def measure_all(directory: pathlib.Path) -> dict[str, Any]:
  """Let coordinators work with fakes, as many as the flag says."""
  section = sections.ClusterSection(
    kind=sections.ClusterKind.RAY, replicas=_HOSTS.value, replica_cpus=1.0
  )
  cluster = ray_replicas.Cluster(section, run_name="fakes", environment={})
  rows = []
  for count in map(int, _REPLICAS.value):
    own = directory / f"replicas-{count}"
    own.mkdir()
    rows.append(measure(own, count))
    print(json.dumps(rows[-1]), flush=True)
  cluster.close()
  return {**max(rows, key=lambda row: row["replicas"]), "by_replicas": rows}


def measure(directory: pathlib.Path, num_replicas: int) -> dict[str, float]:
  """Let a coordinator work with fakes for some train steps."""
  ray = importlib.import_module("ray")
  host_class = ray.remote(fake_replicas.Host)
  per_host = -(-num_replicas // _HOSTS.value)
  hosts = [
    host_class.options(max_concurrency=2 * per_host + 4).remote(
      str(directory), _TOKENS.value
    )
    for _ in range(_HOSTS.value)
  ]
  buffer = buffer_lib.Buffer(_GROUPS.value, _MAX_STALENESS)
  ledger = ledger_lib.Ledger(
    directory / "ledger.jsonl", ledger_lib.LedgerState()
  )
  busy = metrics_lib.BusyClock()
  rewards = Rewards()
  fleet = TimedFleet(
    coordinator_lib.Coordinator(
      coordinator_settings_lib.CoordinatorSettings(
        group_size=_GROUP_SIZE.value,
        num_slots=fake_replicas.SLOTS,
        max_completion_tokens=2 * _TOKENS.value,
        max_tokens=_PROMPT_TOKENS + 2 * _TOKENS.value,
        temperature=1.0,
        filter_zero_std=False,
        reads_token_scores=False,
        max_failed_groups=3,
        max_filtered_groups=3,
      ),
      stream=Prompts(),
      buffer=buffer,
      rewards=rewards,
      ledger=ledger,
      busy=busy,
    ),
    lambda place: FakeHandle(ray, hosts[place % _HOSTS.value], place),
    None,
    num_replicas=num_replicas,
    num_slots=fake_replicas.SLOTS,
    replica_timeout_s=60.0,
    start_timeout_s=_DEADLINE_S,
    busy=busy,
    note=lambda line: None,
  )
  version = directory / "version"
  version.write_text("0")
  fleet.start()
  buffer.set_policy_version(0)
  thread = threading.Thread(target=fleet.run, daemon=True)
  thread.start()
  start: tuple[float, float, int, int] | None = None
  for step in range(_STEPS.value + 1):
    batch = buffer.get_batch(step, _DEADLINE_S)
    assert batch is not None, fleet.status()
    ledger.add_trained(batch, step=step, skipped_update=False)
    buffer.set_policy_version(step + 1)
    incomplete = directory / "incomplete"
    incomplete.write_text(str(step + 1))
    incomplete.replace(version)
    if start is None:  # the first step is a warm-up
      start = (
        time.perf_counter(),
        time.process_time(),
        fleet.num_reports,
        rewards.num_groups,
      )
      fleet.admit_s.clear()
      fleet.report_s.clear()
  assert start is not None
  wall_s = time.perf_counter() - start[0]
  cpu_s = time.process_time() - start[1]
  # Others were trained, which had been written before.
  num_groups = rewards.num_groups - start[3]
  fleet.stop()
  buffer.close()
  thread.join(_DEADLINE_S)
  ledger.close()
  for host in hosts:
    ray.kill(host)
  return {
    "replicas": num_replicas,
    "groups_per_s": round(num_groups / wall_s, 1),
    "reports_per_s": round((fleet.num_reports - start[2]) / wall_s, 1),
    "admit_p99_ms": _p99_ms(fleet.admit_s),
    "report_p99_ms": _p99_ms(fleet.report_s),
    "coordinator_cpu_per_group_ms": round(1e3 * cpu_s / num_groups, 3),
  }


def compare_runs(directory: pathlib.Path) -> dict[str, float]:
  """Run the quickstart in one process, and with a replica in another."""
  step_s, idle_s = {}, {}
  for kind in ("local", "ray"):
    workdir = directory / kind
    launching.launch(
      "train.py",
      f"--config={launching.ROOT / 'configs' / 'quickstart.py'}",
      f"--workdir={workdir}",
      f"--config.cluster.kind={kind}",
      f"--config.train.num_steps={_RUN_STEPS.value}",
      # Enough for solutions of about the usual length.
      f"--config.warm_start.num_steps={_WARM_START_STEPS}",
      "--config.eval.every=0",
    )
    steps = [x for x in launching.metrics(workdir) if "time/step_s" in x]
    steps = steps[_COMPILING_STEPS:]
    step_s[kind] = float(np.mean([x["time/step_s"] for x in steps]))
    # Steps without an adoption have 0 here.
    adoptions = [x["time/adoption_s"] for x in steps if x["time/adoption_s"]]
    idle_s[kind] = float(np.mean(adoptions))
    print(kind, f"{step_s[kind]:.3f} s a step", flush=True)
  return {
    "wall_ratio_vs_local": round(step_s["ray"] / step_s["local"], 3),
    "adopt_idle_s": round(idle_s["ray"], 4),
  }


def main(argv: Sequence[str]) -> None:
  """Measure, and print one line of JSON."""
  del argv
  gc.set_threshold(10_000)  # as in launch/train.py
  logging.set_verbosity(logging.WARNING)
  os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
  os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
  os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
  os.environ["RAY_AUTH_MODE"] = "token"
  os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
  os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parent)
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory)
    found: dict[str, Any] = dict.fromkeys(_KEYS)
    if _REPLICAS.value:
      found |= measure_all(path)
    if _RUN.value:
      found |= compare_runs(path)
    if _WEIGHTS_MB.value:
      found["fan_out"] = fan_out.measure(
        path / "weights",
        1_000_000 * _WEIGHTS_MB.value,
        [int(count) for count in _READERS.value],
      )
  print(json.dumps(found))


if __name__ == "__main__":
  app.run(main)
