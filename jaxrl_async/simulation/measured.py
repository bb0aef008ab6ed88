"""A cluster with the rates of a run, and which split of its devices is best.

One run tells how long its train steps and its decode steps take, not how a
decode step would change with the number of slots. So slots stay as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
import statistics

from jaxrl_async.config import sections
from jaxrl_async.simulation import throughput
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib

_FEWEST_STEPS = 4
_MOST_SPLITS = 12
_NEARLY = 0.98  # of the best throughput is as good
_MEASURED = (
  "completion/tokens_mean",
  "rollout/busy_frac",
  "rollout/tokens_per_s",
  "time/step_s",
  "train/busy_frac",
  "train/tokens_per_s",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
  """What a split of the devices is predicted to do.

  Attributes:
    num_training: devices that train; the others generate.
    max_staleness: the bound.
    prediction: with this split and this bound.
  """

  num_training: int
  max_staleness: int
  prediction: throughput.Prediction


def read(
  workdir: pathlib.Path,
) -> tuple[sections.Config, list[dict[str, float]]]:
  """Return the config of a run, and the metrics of its later steps.

  Raises:
    ConfigError: there is no run, or it has too few steps.
  """
  config = config_json.read(workdir)
  path = workdir / workdir_lib.METRICS
  sections.require(
    config is not None and path.exists(), "workdir", f"{workdir} has no run"
  )
  assert config is not None
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines = [line for line in lines if all(k in line for k in _MEASURED)]
  sections.require(
    len(lines) >= _FEWEST_STEPS,
    "workdir",
    f"{workdir} has {len(lines)} train steps; {_FEWEST_STEPS} are needed",
  )
  # The first ones compile, and begin with empty slots.
  return config, lines[len(lines) // 2 :]


def cluster(
  config: sections.Config, steps: Sequence[Mapping[str, float]]
) -> throughput.Cluster:
  """Return a cluster with the rates of a run.

  The time of a decode step is that of the slots as full as they were while
  sequences waited for a slot.

  Args:
    config: of the run.
    steps: metrics of train steps, as `metrics.jsonl` has them.

  Raises:
    ConfigError: the config leaves the number of devices open.
  """
  mesh, rollout = config.mesh, config.rollout
  training = _product(
    mesh, ("train_data", "train_fsdp", "train_context", "train_tensor")
  )
  per_engine = _product(mesh, ("rollout_data", "rollout_tensor"))
  if config.cluster.kind is sections.ClusterKind.RAY:
    num_replicas, per_replica = config.cluster.replicas, per_engine
    slots = rollout.num_slots
  else:
    num_replicas, per_replica = mesh.rollout_data, mesh.rollout_tensor
    slots = max(1, rollout.num_slots // num_replicas)
  mean = {
    name: statistics.fmean(step.get(name, 0.0) for step in steps)
    for name in {*_MEASURED, "time/adopt_s"}
  }
  occupancy = statistics.fmean(
    step.get("rollout/slot_occupancy", 1.0) for step in steps
  )
  num_rollout = num_replicas * per_replica
  tokens_per_busy_s = mean["rollout/tokens_per_s"] / mean["rollout/busy_frac"]
  return throughput.Cluster(
    num_devices=training + num_rollout,
    rollout_frac=num_rollout / (training + num_rollout),
    devices_per_replica=per_replica,
    groups_per_step=config.algorithm.groups_per_step,
    group_size=config.algorithm.group_size,
    lengths=_lengths(steps, rollout.max_completion_tokens),
    slots=slots,
    step_s=slots * num_replicas * occupancy / tokens_per_busy_s,
    cached_s=0.0,
    adopt_s=mean["time/adopt_s"],
    train_device_s=training
    * mean["train/busy_frac"]
    / mean["train/tokens_per_s"],
    call_tokens=rollout.decode_steps_per_call,
  )


def _product(mesh: sections.MeshSection, names: Iterable[str]) -> int:
  product = 1
  for name in names:
    size = getattr(mesh, name)
    sections.require(
      size > 0, f"mesh.{name}", f"is {size}; set the number of devices"
    )
    product *= size
  return product


def _lengths(
  steps: Sequence[Mapping[str, float]], limit: int
) -> throughput.Lengths:
  """Return lognormal lengths with the mean and the deviation of a run."""
  mean = statistics.fmean(step["completion/tokens_mean"] for step in steps)
  squares, count = 0.0, 0
  for step in steps:
    histogram = step.get("completion/tokens_histogram")
    if not isinstance(histogram, Mapping):
      continue
    limits, counts = histogram["limits"], histogram["counts"]
    for i, number in enumerate(counts):
      squares += number * ((limits[i] + limits[i + 1]) / 2 - mean) ** 2
      count += number
  return throughput.lognormal(
    mean, (squares / max(count, 1)) ** 0.5, limit=limit
  )


def advise(
  found: throughput.Cluster, bounds: Sequence[int], *, num_steps: int
) -> list[Advice]:
  """Return the best split for each bound, the best of them first.

  Of bounds that are nearly as good as the best one, the smallest comes first.

  Args:
    found: the cluster; its own split does not matter.
    bounds: to try.
    num_steps: train steps to simulate for each.
  """
  per_replica = found.devices_per_replica
  most = (found.num_devices - 1) // per_replica
  nums_replicas = {
    max(1, round(most * (i + 1) / _MOST_SPLITS)) for i in range(_MOST_SPLITS)
  }
  best = []
  for bound in bounds:
    tried = []
    for num_replicas in sorted(nums_replicas):
      num_rollout = num_replicas * per_replica
      split = dataclasses.replace(
        found, rollout_frac=num_rollout / found.num_devices
      )
      prediction = throughput.predict(
        split,
        throughput.Mode.ASYNCHRONOUS,
        bound,
        num_steps=num_steps,
        skip=num_steps // 2,
      )
      tried.append(
        Advice(
          num_training=found.num_devices - num_rollout,
          max_staleness=bound,
          prediction=prediction,
        )
      )
    best.append(max(tried, key=lambda one: one.prediction.tokens_per_s))
  enough = _NEARLY * max(one.prediction.tokens_per_s for one in best)
  return sorted(
    best,
    key=lambda one: (one.prediction.tokens_per_s < enough, one.max_staleness),
  )
