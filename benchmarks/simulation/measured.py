"""A cluster with the rates of a run, and which split of its devices is best.

One run tells how long its train steps and its decode steps take, not how a
decode step would change with the number of slots. Two runs that differ in their
slots tell that too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import copy
import dataclasses
import json
import math
import pathlib
import statistics

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib
from simulation import throughput

_FEWEST_STEPS = 4
_MOST_SPLITS = 12
_MORE_SLOTS = 1.5
_NEARLY = 0.98  # of the best throughput is as good
_MEASURED = (
  "completion/tokens_mean",
  "rollout/busy_frac",
  "rollout/decode_steps",
  "rollout/tokens_per_s",
  "time/step_s",
  "train/busy_frac",
  "train/tokens_per_s",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What is known of a run.

  Attributes:
    config: of the run.
    steps: metrics of its later train steps, as `metrics.jsonl` has them.
  """

  config: sections.Config
  steps: Sequence[Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
  """What a split of the devices is predicted to do.

  Attributes:
    num_training: devices that train; the others generate.
    slots: of each replica.
    max_staleness: the bound.
    flags: of launch/train.py for all of these.
    prediction: with this split, these slots and this bound.
  """

  num_training: int
  slots: int
  max_staleness: int
  flags: tuple[str, ...]
  prediction: throughput.Prediction


def read(workdir: pathlib.Path) -> Run:
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
  # The last line has no end while it is being written.
  whole, _, _ = path.read_text().rpartition("\n")
  lines = [json.loads(line) for line in whole.splitlines()]
  lines = [line for line in lines if all(k in line for k in _MEASURED)]
  sections.require(
    len(lines) >= _FEWEST_STEPS,
    "workdir",
    f"{workdir} has {len(lines)} train steps with all metrics;"
    f" {_FEWEST_STEPS} are needed",
  )
  # The first ones compile, and begin with empty slots.
  return Run(config=config, steps=lines[len(lines) // 2 :])


def cluster(run: Run, other: Run | None = None) -> throughput.Cluster:
  """Return a cluster with the rates of a run.

  The time of a decode step is that of the slots as full as they were.

  Args:
    run: the run.
    other: one that differs in its slots. The time of a decode step is then a
      straight line in the number of sequences; otherwise it is constant.

  Raises:
    ConfigError: a config leaves the number of devices open, or the runs do not
      tell what more slots cost.
  """
  config, steps = run.config, run.steps
  mesh, rollout = config.mesh, config.rollout
  training = _product(
    mesh, ("train_data", "train_fsdp", "train_context", "train_tensor")
  )
  num_replicas, per_replica, slots = _replicas(config)
  num_rollout = num_replicas * per_replica
  sequences, step_s = _decode_step(run)
  slot_s = 0.0
  if other is not None:
    _check_alike(config, other.config)
    more, longer_s = _decode_step(other)
    slot_s = (longer_s - step_s) / (more - sequences)
    slot_s = min(max(slot_s, 0.0), step_s / sequences)
    step_s -= slot_s * sequences
  return throughput.Cluster(
    num_devices=training + num_rollout,
    rollout_frac=num_rollout / (training + num_rollout),
    devices_per_replica=per_replica,
    groups_per_step=config.algorithm.groups_per_step,
    group_size=config.algorithm.group_size,
    lengths=_lengths(steps, rollout.max_completion_tokens),
    slots=slots,
    step_s=step_s,
    slot_s=slot_s,
    cached_s=0.0,
    adopt_s=statistics.fmean(step.get("time/adopt_s", 0.0) for step in steps),
    train_device_s=training
    * _over_time(steps, "train/busy_frac")
    / tokens_per_s(run),
    call_tokens=rollout.decode_steps_per_call,
  )


def slots_between(run: Run, other: Run) -> list[int]:
  """Return numbers of slots of a replica from that of one run to the other's.

  Each is about a half more than the one before.
  """
  least, most = sorted(_replicas(one.config)[2] for one in (run, other))
  count = max(1, round(math.log(most / least) / math.log(_MORE_SLOTS)))
  return sorted(
    {round(least * (most / least) ** (i / count)) for i in range(count + 1)}
  )


def tokens_per_s(run: Run) -> float:
  """Return the completion tokens that a run trained a second."""
  return _over_time(run.steps, "train/tokens_per_s")


def _over_time(steps: Sequence[Mapping[str, float]], name: str) -> float:
  """Return the mean of a rate or a share, in which steps count by their time.

  One step may take ten times as long as another.
  """
  values = [step[name] for step in steps]
  return statistics.fmean(values, [step["time/step_s"] for step in steps])


def _replicas(config: sections.Config) -> tuple[int, int, int]:
  """Return the number of engines, and the devices and the slots of each."""
  mesh, slots = config.mesh, config.rollout.num_slots
  if config.cluster.kind is sections.ClusterKind.RAY:
    per_replica = _product(mesh, ("rollout_data", "rollout_tensor"))
    return config.cluster.replicas, per_replica, slots
  num_replicas = _product(mesh, ("rollout_data",))
  per_replica = _product(mesh, ("rollout_tensor",))
  return num_replicas, per_replica, max(1, slots // num_replicas)


def _decode_step(run: Run) -> tuple[float, float]:
  """Return how many sequences a replica wrote at once, and its step's time."""
  num_replicas, _, _ = _replicas(run.config)
  num_steps = sum(step["rollout/decode_steps"] for step in run.steps)
  if run.config.cluster.kind is sections.ClusterKind.RAY:
    num_steps /= num_replicas  # each has an engine, and steps of its own
  steps_per_s = max(num_steps, 1) / math.fsum(
    step["time/step_s"] for step in run.steps
  )
  tokens_per_s = _over_time(run.steps, "rollout/tokens_per_s") / num_replicas
  busy_frac = _over_time(run.steps, "rollout/busy_frac")
  return tokens_per_s / steps_per_s, busy_frac / steps_per_s


def _check_alike(config: sections.Config, other: sections.Config) -> None:
  """Check that two runs tell what more slots cost.

  Raises:
    ConfigError: they do not.
  """
  for name in ("model", "mesh", "cluster"):
    sections.require(
      getattr(config, name) == getattr(other, name),
      "other_workdir",
      f"the runs differ in {name}; they may differ in rollout.num_slots",
    )
  slots, others = config.rollout.num_slots, other.rollout.num_slots
  sections.require(
    slots != others,
    "other_workdir",
    f"both runs have {slots} slots (rollout.num_slots); they have to differ",
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
  found: throughput.Cluster,
  config: sections.Config,
  bounds: Sequence[int],
  slots: Sequence[int],
  *,
  num_steps: int,
) -> list[Advice]:
  """Return the best split and slots for each bound, the best of them first.

  Of bounds and slots that are nearly as good as the best ones, the smallest
  come first. Splits that a run would refuse are not tried.

  Args:
    found: the cluster; its own split does not matter.
    config: of the run that was measured.
    bounds: to try.
    slots: of each replica, to try.
    num_steps: train steps to simulate for each.

  Raises:
    ConfigError: a run would refuse all splits.
  """
  splits = list(_splits(found, config, slots))
  best = []
  for bound in bounds:
    tried = []
    for split, flags in splits:
      prediction = throughput.predict(
        split,
        throughput.Mode.ASYNCHRONOUS,
        bound,
        num_steps=num_steps,
        skip=num_steps // 2,
      )
      tried.append(
        Advice(
          num_training=split.num_training(throughput.Mode.ASYNCHRONOUS),
          slots=split.slots,
          max_staleness=bound,
          flags=(*flags, f"--config.algorithm.max_staleness={bound}"),
          prediction=prediction,
        )
      )
    enough = _NEARLY * max(one.prediction.tokens_per_s for one in tried)
    tried = [one for one in tried if one.prediction.tokens_per_s >= enough]
    best.append(
      min(tried, key=lambda one: (one.slots, -one.prediction.tokens_per_s))
    )
  enough = _NEARLY * max(one.prediction.tokens_per_s for one in best)
  return sorted(
    best,
    key=lambda one: (one.prediction.tokens_per_s < enough, one.max_staleness),
  )


def _splits(
  found: throughput.Cluster, config: sections.Config, slots: Sequence[int]
) -> Iterator[tuple[throughput.Cluster, list[str]]]:
  """Yield the splits that a run would accept, each with its flags.

  Raises:
    ConfigError: there are none.
  """
  per_replica = found.devices_per_replica
  most = (found.num_devices - 1) // per_replica
  refusal: sections.ConfigError | None = None
  has_any = False
  nums_replicas = {
    max(1, round(most * (i + 1) / _MOST_SPLITS)) for i in range(_MOST_SPLITS)
  }
  for num_replicas in sorted(nums_replicas):
    num_rollout = num_replicas * per_replica
    for count in slots:
      try:
        flags = _flags(
          config, found.num_devices - num_rollout, num_replicas, count
        )
      except sections.ConfigError as error:
        refusal = error
        continue
      has_any = True
      split = dataclasses.replace(
        found, rollout_frac=num_rollout / found.num_devices, slots=count
      )
      yield split, flags
  if not has_any:
    assert refusal is not None
    raise refusal


def _flags(
  config: sections.Config, num_training: int, num_replicas: int, slots: int
) -> list[str]:
  """Return the flags of launch/train.py for a split of the devices.

  The model is split as before. Other training devices are along
  `mesh.train_fsdp`, or along `mesh.train_data` if that alone was used.

  Raises:
    ConfigError: a run would refuse them.
  """
  config = copy.deepcopy(config)
  mesh, changed = config.mesh, {}
  by = "train_data" if mesh.train_fsdp == 1 < mesh.train_data else "train_fsdp"
  kept = {"train_data", "train_fsdp", "train_context", "train_tensor"} - {by}
  rest = _product(mesh, kept)
  sections.require(
    num_training % rest == 0,
    f"mesh.{by}",
    f"{num_training} devices cannot be divided by the other axes, {rest}",
  )
  changed[f"mesh.{by}"] = num_training // rest
  if config.cluster.kind is sections.ClusterKind.RAY:
    changed["cluster.replicas"] = num_replicas
  else:
    changed["mesh.rollout_data"] = num_replicas
    slots *= num_replicas
  changed["rollout.num_slots"] = slots
  for path, value in changed.items():
    fields_lib.set_at(config, path, value)
  config_checks.validate(config, 10**9)
  return [f"--config.{path}={value}" for path, value in changed.items()]
