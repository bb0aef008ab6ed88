"""Training and replay from a script: what the user has at hand makes a run."""

from collections.abc import Mapping, Sequence
import copy
import json
import pathlib
import runpy
from typing import Any

import jax

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.data import source as source_lib
from jaxrl_async.devices import xla_flags
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import replay as replay_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import importable
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import train as train_lib
from jaxrl_async.storage import directories
from jaxrl_async.storage import disk
from jaxrl_async.training import objectives


def train(
  config: sections.Config | str | pathlib.Path,
  workdir: pathlib.Path,
  *,
  reward: service_lib.Scorer | None,
  dataset: Any,
  eval_dataset: Any,
  settings: Mapping[str, Any],
  loss: objectives.Loss | None,
  episode: episode_lib.Episode | None,
) -> dict[str, Any]:
  """Do what `jaxrl_async.train` documents."""
  scorer = _importable(reward)
  config = _config(config)
  for path, value in settings.items():
    fields_lib.set_at(config, path, value)
  directories.check_can_write("workdir", str(workdir))
  workdir = workdir.absolute()
  source = None
  if isinstance(dataset, source_lib.Source):
    source = dataset
  elif dataset is not None:
    config.task.dataset = _uri("dataset", dataset, workdir)
    config.task.eval_dataset = ""
  if eval_dataset is not None:
    config.task.eval_dataset = _uri("eval_dataset", eval_dataset, workdir)
  if config.run.exact_resume:
    # If it is too late, the run says so.
    xla_flags.use(xla_flags.of_same_bits())
  summary = train_lib.run(
    config,
    workdir,
    source=source,
    scorer=scorer,
    loss=loss,
    episode=episode,
    xla_flags=xla_flags.current(),
  )
  return json.loads(summary)


def replay(
  workdir: pathlib.Path,
  wanted: replay_lib.Wanted,
  *,
  source: source_lib.Source | None,
  loss: objectives.Loss | None,
  episode: episode_lib.Episode | None,
) -> dict[str, Any]:
  """Do what `jaxrl_async.replay` documents."""
  try:
    start = recorded_timing.start_of(workdir, wanted.from_step)
  except recorded_timing.TimingError as error:
    raise sections.ConfigError(f"workdir: {error}") from error
  if xla_flags.OWN_PRODUCTS in start.environment.get("xla_flags", ""):
    xla_flags.use(xla_flags.OWN_PRODUCTS)  # if too late, the replay says so
  stop = supervisor_lib.StopRequest()
  with (
    progress_lib.Progress(0) as progress,
    stop.on_signals(
      progress.note, "stopping; once more ends it now", "ended at once"
    ),
  ):
    result = replay_lib.replay(
      workdir.absolute(),
      wanted,
      jax.devices(),
      progress=progress,
      stop=stop,
      source=source,
      loss=loss,
      episode=episode,
      xla_flags=xla_flags.current(),
    )
  return {"bit_exact": True, **result.record()}


def _importable(reward: service_lib.Scorer | None) -> service_lib.Scorer | None:
  try:
    importable.check_main_script()
    return None if reward is None else importable.function(reward)
  except ValueError as error:
    raise sections.ConfigError(f"reward: {error}") from error


def _config(config: sections.Config | str | pathlib.Path) -> sections.Config:
  """Return a copy of a config, or the config of a file."""
  if isinstance(config, sections.Config):
    return copy.deepcopy(config)
  path, has_variant, variant = str(config).partition(":")
  try:
    with user_code.told(), user_code.announced(path):
      get_config = runpy.run_path(path).get("get_config")
      if get_config is None:
        raise sections.ConfigError(f"config: {path}: defines no get_config()")
      return get_config(variant) if has_variant else get_config()
  except user_code.UserCodeError as error:
    raise sections.ConfigError(f"config: {path}: {error}") from error


def _uri(
  name: str, dataset: str | Sequence[Mapping[str, Any]], workdir: pathlib.Path
) -> str:
  """Return the name of a dataset; rows are first stored in the workdir."""
  if isinstance(dataset, str):
    return dataset
  lines = []
  for number, row in enumerate(dataset):
    try:
      lines.append(json.dumps(dict(row), allow_nan=False) + "\n")
    except (TypeError, ValueError) as error:
      raise sections.ConfigError(
        f"{name}: row {number} is no dict of JSON values: {error}"
      ) from error
  text, path = "".join(lines), workdir / f"{name}.jsonl"
  if not path.exists():
    with disk.writing(path):
      workdir.mkdir(parents=True, exist_ok=True)
    disk.replace_text(path, text)
  elif path.read_text() != text:
    raise sections.ConfigError(
      f"{name}: {path} holds other rows, of a run that began with them; use"
      " another workdir"
    )
  return f"jsonl:{path}"
