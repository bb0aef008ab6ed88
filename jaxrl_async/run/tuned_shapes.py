"""The fastest shapes of a train step: measured once, and kept for later starts.

`speed` measures them, which takes a compilation for each candidate. The answer
is kept beside the compiled programs, under everything that it depends on. A run
that continues keeps the shapes of its last start, whatever is faster now, so
that it goes on to the bit.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.devices import xla_flags
from jaxrl_async.run import checks
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.run import speed
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib

NAME = "tuned_shapes.json"
_REPEATS = 3
# What a train step's time depends on. Its number of steps is not part of it.
_SECTIONS = ("model", "algorithm", "critic", "train", "rollout")


def tuned(
  config: sections.Config,
  devices: Sequence[Any],
  *,
  workdir: pathlib.Path,
  cache: pathlib.Path,
  note: Callable[[str], None],
) -> sections.Config:
  """Return a config with the fastest shapes of its train step.

  They are those of the workdir's run if it has one, those of an earlier call if
  the cache has them, and measured otherwise. Stored shapes that a run of this
  config would refuse are passed over.

  Args:
    config: of the run.
    devices: the devices that are divided into the two slices.
    workdir: of the run.
    cache: the directory where the answer is kept.
    note: is called with lines for the user.

  Raises:
    ConfigError: the config cannot be run, or its own shapes do not fit the
      devices.
  """
  setup = checks.checked(config, devices, note=lambda line: None)
  stored = _of_run(workdir)
  if stored is not None and speed.may_run(setup, stored):
    note(f"train step: the shapes of {workdir}: {stored.flags()}")
    return speed.with_shapes(config, stored)
  key = _key(setup, devices)
  kept = _read(cache / NAME)
  if key in kept and speed.may_run(setup, shapes := _from_json(kept[key])):
    note(f"train step: the shapes that were measured before: {shapes.flags()}")
    return speed.with_shapes(config, shapes)
  note("train step: looking for its fastest shapes")
  rows = []
  lengths = speed.lengths(config)
  for row in speed.tried(setup, lengths, repeats=_REPEATS):
    step_s = "refused" if row.step_s is None else f"{row.step_s:.3f} s"
    note(f"  {step_s} with {row.shapes.flags()}")
    rows.append(row)
  shapes = speed.fastest(rows).shapes
  note(f"train step: the fastest shapes are {shapes.flags()}")
  try:
    _keep(cache / NAME, key, shapes)
  except (OSError, disk.StorageError) as error:
    note(f"they will be measured again at the next start: {error}")
  return speed.with_shapes(config, shapes)


def _of_run(workdir: pathlib.Path) -> speed.Shapes | None:
  """Return the shapes of the last start of a run in this workdir."""
  if not (workdir / workdir_lib.SCHEDULE).exists():
    return None  # no run, or one of another script
  try:
    stored = config_json.read(workdir)
  except config_json.TornError:
    return None  # the run writes it anew
  return None if stored is None else speed.shapes_of(stored)


def _key(setup: setup_lib.Setup, devices: Sequence[Any]) -> str:
  """Return a name of everything that the answer depends on."""
  config = setup.config
  parts = {name: config_json.plain(getattr(config, name)) for name in _SECTIONS}
  del parts["train"]["num_steps"]
  parts["mesh"] = [dict(setup.train_mesh.shape), setup.shares_a_device]
  parts["devices"] = [len(devices), devices[0].device_kind, os.cpu_count()]
  parts["jax"] = [jax.__version__, xla_flags.current().split()]
  text = json.dumps(parts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:24]


def _keep(path: pathlib.Path, key: str, shapes: speed.Shapes) -> None:
  """Add an answer to those that others may have added meanwhile."""
  path.parent.mkdir(parents=True, exist_ok=True)
  kept = _read(path)
  kept[key] = dataclasses.asdict(shapes) | {"remat": shapes.remat.value}
  disk.replace_text(path, json.dumps(kept, indent=2) + "\n")


def _read(path: pathlib.Path) -> dict[str, Any]:
  """Return what was kept; what cannot be read is measured again."""
  try:
    kept = json.loads(path.read_text())
    for shapes in kept.values():
      _from_json(shapes)
  except (OSError, ValueError, TypeError, KeyError, AttributeError):
    return {}
  return kept


def _from_json(kept: dict[str, Any]) -> speed.Shapes:
  return speed.Shapes(
    rows_per_microbatch=int(kept["rows_per_microbatch"]),
    remat=sections.Remat(kept["remat"]),
    attention=str(kept["attention"]),
  )
