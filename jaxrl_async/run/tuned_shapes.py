"""The fastest shapes of a train step: measured once, and kept for later starts.

`speed` measures them, which takes a compilation for each candidate. The answer
is kept beside the compiled programs, under everything that it depends on. A run
that continues keeps the shapes that its workdir has, whatever is faster now, so
that it goes on to the bit.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.run import device_checks
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.run import speed
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk

NAME = "tuned_shapes.json"
_REPEATS = 3
# What a train step's time depends on. Its number of steps is not part of it.
_SECTIONS = ("model", "algorithm", "critic", "train", "rollout", "mesh")


def tuned(
  config: sections.Config,
  devices: Sequence[Any],
  *,
  workdir: pathlib.Path,
  cache: pathlib.Path,
  note: Callable[[str], None],
) -> sections.Config:
  """Return a config with the fastest shapes of its train step.

  They are those of the workdir if it has a run, those of an earlier call if the
  cache has them, and measured otherwise.

  Args:
    config: of the run, which was validated.
    devices: the devices that are divided into the two slices.
    workdir: of the run.
    cache: the directory where the answer is kept.
    note: is called with lines for the user.

  Raises:
    ConfigError: the config's own shapes do not fit the devices.
    StorageError: the answer could not be kept.
  """
  if (stored := _of_run(workdir)) is not None:
    note(f"train step: the shapes of {workdir}: {stored.flags()}")
    return speed.with_shapes(config, stored)
  setup = setup_lib.resolve(config, devices)
  key = _key(config, devices)
  kept = _read(cache / NAME)
  if key in kept:
    shapes = _from_json(kept[key])
    note(
      f"train step: the fastest shapes, as measured before: {shapes.flags()}"
    )
    return speed.with_shapes(config, shapes)
  note("train step: looking for its fastest shapes")
  rows = []
  lengths = speed.lengths(config)
  for row in speed.tried(setup, lengths, repeats=_REPEATS):
    step_s = "refused" if row.step_s is None else f"{row.step_s:.3f} s"
    note(f"  {step_s} with {row.shapes.flags()}")
    rows.append(row)
  shapes = speed.fastest([x for x in rows if _fits(setup, x.shapes)]).shapes
  note(f"train step: the fastest shapes are {shapes.flags()}")
  cache.mkdir(parents=True, exist_ok=True)
  kept[key] = dataclasses.asdict(shapes) | {"remat": shapes.remat.value}
  disk.replace_text(cache / NAME, json.dumps(kept, indent=2) + "\n")
  return speed.with_shapes(config, shapes)


def _of_run(workdir: pathlib.Path) -> speed.Shapes | None:
  """Return the shapes of a run that was begun in this workdir."""
  try:
    stored = config_json.read(workdir)
  except config_json.TornError:
    return None  # the run writes it anew
  return None if stored is None else speed.shapes_of(stored)


def _fits(setup: setup_lib.Setup, shapes: speed.Shapes) -> bool:
  """Return whether the run has memory for these, by the same estimate."""
  config = speed.with_shapes(setup.config, shapes)
  changed = dataclasses.replace(setup, config=config)
  try:
    device_checks.check_training_memory(changed)
    device_checks.check_shared_memory(changed)
  except sections.ConfigError:
    return shapes == speed.shapes_of(setup.config)  # the run says what is wrong
  return True


def _key(config: sections.Config, devices: Sequence[Any]) -> str:
  """Return a name of everything that the answer depends on."""
  parts = {name: config_json.plain(getattr(config, name)) for name in _SECTIONS}
  del parts["train"]["num_steps"]
  parts["devices"] = [len(devices), devices[0].device_kind]
  parts["jax"] = jax.__version__
  text = json.dumps(parts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:24]


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
