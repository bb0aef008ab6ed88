"""A policy on disk: of a run, of launch/sft.py, or in Hugging Face's format.

Serving, evaluation, export and `jaxrl_async.load` find a policy here. Only its
parameters are read, never an optimizer's state.
"""

import contextlib
import copy
import dataclasses
import enum
import hashlib
import pathlib

from jaxrl_async.assembly import continued_settings
from jaxrl_async.assembly import engine_sizes
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.models import hub
from jaxrl_async.models import transformer
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import manifest
from jaxrl_async.storage import model_files
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

_SAMPLED_BYTES = 2**20  # of each end of a file of weights, for its identity


class Kind(enum.Enum):
  """What a directory holds.

  RUN is a run's workdir, with checkpoints. PARAMS is WORKDIR/params as
  launch/sft.py writes it, with the config and the tokenizer in WORKDIR.
  PRETRAINED is a model in Hugging Face's format.
  """

  RUN = "run"
  PARAMS = "params"
  PRETRAINED = "pretrained"


@dataclasses.dataclass(kw_only=True)
class StoredPolicy:
  """A policy that has been found, and not been read yet.

  Attributes:
    kind: what `directory` holds.
    directory: the workdir, the directory of parameters, or that of the model.
    config: that of the run. For a pretrained model it is the default config
      with the model's directory as `model.name`.
    step: train step of the checkpoint of a run; None for the newest one.
  """

  kind: Kind
  directory: pathlib.Path
  config: sections.Config
  step: int | None = None

  @property
  def checkpoints(self) -> pathlib.Path:
    """The directory of a run's checkpoints."""
    return self.directory / workdir_lib.CHECKPOINTS


# -- finding ----------------------------------------------------------------


def place(name: str | pathlib.Path) -> pathlib.Path:
  """Return the directory of a policy, of which the hub's are downloaded.

  Args:
    name: a directory, or hf:ORG/NAME[@REVISION].

  Raises:
    ConfigError: the model cannot be downloaded.
  """
  name = str(name)
  if not name.startswith(hub.PREFIX):
    return pathlib.Path(name)
  try:
    hub.fetch_weights(name)
    found = hub.model_directory(name)
  except hub.HubError as error:
    raise sections.ConfigError(f"checkpoint: {error}") from error
  assert found is not None
  return found


def find(name: str | pathlib.Path, step: int | None = None) -> StoredPolicy:
  """Find the policy in a directory of any kind.

  Args:
    name: the directory, see `Kind`, or hf:ORG/NAME of the hub. A workdir of
      launch/sft.py stands for its params.
    step: which checkpoint of a run; None is the newest one.

  Raises:
    ConfigError: there is no policy in the directory, or no such step.
  """
  directory = place(name).absolute()
  if not directory.is_dir():
    raise sections.ConfigError(
      f"checkpoint: {directory} does not exist; use a run's workdir, a"
      " directory in Hugging Face's format, or hf:ORG/NAME of its hub"
    )
  if (directory / workdir_lib.CHECKPOINTS).is_dir():
    return of_run(directory, step, field="checkpoint")
  sections.require(
    step is None, "step", f"{directory} is no run's workdir; leave it out"
  )
  if (directory / "params").is_dir():
    return _of_params(directory / "params")
  if is_pretrained(directory):
    return _of_pretrained(directory)
  if checkpoint.steps(directory):
    return _of_params(directory)
  raise sections.ConfigError(
    f"checkpoint: {directory} holds no policy; use a run's workdir, WORKDIR/"
    "params of launch/sft.py, or a directory in Hugging Face's format"
  )


def is_pretrained(directory: pathlib.Path) -> bool:
  """Return whether a directory is in Hugging Face's format, not a workdir."""
  if not hf_weights.is_pretrained(directory):
    return False
  try:
    settings = model_files.read_optional(directory / hf_config.CONFIG_FILE)
  except ValueError:
    return True  # a damaged one, which is named when it is read
  return "algorithm" not in settings


def of_run(
  workdir: pathlib.Path, step: int | None = None, *, field: str = "workdir"
) -> StoredPolicy:
  """Find the policy of a run.

  Args:
    workdir: of the run.
    step: of the checkpoint; None is the newest one.
    field: that named the directory, for error messages.

  Raises:
    ConfigError: there is no checkpoint, or it is damaged.
  """
  directory = workdir / workdir_lib.CHECKPOINTS
  there = checkpoint.steps(directory)
  if step is not None and step not in there:
    have = ", ".join(map(str, there)) or "none"
    raise sections.ConfigError(
      f"step: {workdir} has no checkpoint of step {step}; there is {have}"
    )

  def config_of(at: int) -> sections.Config:
    stored = checkpoint.host_state(directory, at)
    return continued_settings.stored_config(workdir, stored)

  try:
    if step is not None:
      found = step, config_of(step)
    else:
      found = checkpoint.read_newest(directory, config_of)
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  if found is None:
    _read_config(workdir)
    raise sections.ConfigError(
      f"{field}: {workdir} holds no checkpoint; launch/train.py writes the"
      " first one after the warm start"
    )
  return StoredPolicy(
    kind=Kind.RUN, directory=workdir, config=found[1], step=step
  )


def _of_pretrained(directory: pathlib.Path) -> StoredPolicy:
  config = sections.Config()
  config.model.name = str(directory)
  with contextlib.suppress(ValueError):  # which is named when it is read
    most = hf_config.max_positions(directory)
    if most is not None and most < config.rollout.cache_tokens:
      engine_sizes.set_cache_tokens(config.rollout, most)
  return StoredPolicy(kind=Kind.PRETRAINED, directory=directory, config=config)


def _of_params(directory: pathlib.Path) -> StoredPolicy:
  config = _read_config(directory.parent)
  return StoredPolicy(kind=Kind.PARAMS, directory=directory, config=config)


def _read_config(workdir: pathlib.Path) -> sections.Config:
  config = config_json.read(workdir)
  if config is None:
    raise sections.ConfigError(
      f"workdir: {workdir / config_json.NAME} does not exist; use the workdir"
      " of a run or of fine-tuning"
    )
  return config


def newest(stored: StoredPolicy) -> int:
  """Return the step of a run's newest checkpoint.

  Raises:
    ConfigError: there is none any more.
  """
  step = checkpoint.latest(stored.checkpoints)
  if step is None:
    raise sections.ConfigError(f"checkpoint: {stored.checkpoints} is empty")
  return step


# -- reading ----------------------------------------------------------------


def tokenizer_directory(stored: StoredPolicy) -> pathlib.Path:
  """Return the directory of the policy's tokenizer."""
  if stored.kind is Kind.PRETRAINED:
    return stored.directory
  is_run = stored.kind is Kind.RUN
  workdir = stored.directory if is_run else stored.directory.parent
  return workdir / "tokenizer"


def tokenizer(stored: StoredPolicy) -> tokenizer_lib.Tokenizer:
  """Return the policy's tokenizer.

  Raises:
    ConfigError: it cannot be read.
  """
  try:
    return tokenizer_lib.load(tokenizer_directory(stored))
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"tokenizer: {error}") from error


def model_directory(stored: StoredPolicy) -> pathlib.Path | None:
  """Return the directory of the pretrained model that the policy began with.

  None if it began with none. A workdir keeps all but the weights of it. Without
  this copy it is the directory that the config names, which may be gone.
  """
  name = stored.config.model.name
  kept = tokenizer_directory(stored)
  if name not in configs.MODELS and (kept / hf_config.CONFIG_FILE).exists():
    return kept
  try:
    found = hub.model_directory(name)
  except hub.HubError:
    found = None
  return None if name in configs.MODELS else found or pathlib.Path(name)


def own_config(stored: StoredPolicy) -> sections.Config:
  """Return a copy of a policy's config that needs no files but the policy's.

  `model.name` is the workdir's copy of the pretrained model, if there is one.
  """
  config = copy.deepcopy(stored.config)
  kept = tokenizer_directory(stored)
  if model_directory(stored) == kept:
    config.model.name = str(kept)
  return config


def chat_template(stored: StoredPolicy) -> chat_template_lib.ChatTemplate:
  """Return the chat template of the policy's model.

  If there is neither the workdir's copy nor the model's own directory, the
  result is a chat template that refuses every chat.

  Raises:
    ConfigError: the template cannot be used.
  """
  directory = model_directory(stored)
  if directory is None:
    directory = tokenizer_directory(stored)
  elif not hf_weights.is_pretrained(directory):
    return chat_template_lib.ChatTemplate(
      None,
      refusal=f"the chat template of this policy was in {directory}, which is"
      " gone",
    )
  try:
    return chat_template_lib.load(directory)
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"tokenizer: {error}") from error


def load(
  stored: StoredPolicy, setup: setup_lib.Setup
) -> tuple[int, transformer.Params]:
  """Read the parameters of a policy onto the training mesh of a setup.

  With LoRA they are those of the base and the adapters.

  Args:
    stored: the policy.
    setup: made of its config, which may have been changed in everything but the
      model.

  Returns:
    The policy version, which is 0 for parameters that no run has counted, and
    the parameters with stacked layers. They are float32, except for the base of
    adapters.

  Raises:
    ConfigError: the files are damaged, or hold another architecture.
  """
  try:
    if stored.kind is not Kind.RUN:
      return 0, initial_params.load(str(stored.directory), setup)
    return _load_run(stored, setup)
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"checkpoint: {error}") from error
  except sections.ConfigError as error:
    text = str(error).removeprefix("warm_start.")
    raise sections.ConfigError(text) from error


def _load_run(
  stored: StoredPolicy, setup: setup_lib.Setup
) -> tuple[int, transformer.Params]:
  directory = stored.checkpoints

  def read(step: int) -> transformer.Params:
    return frozen_base.restore_params(setup, stored.directory, step)

  if stored.step is not None:
    return stored.step, read(stored.step)
  found = checkpoint.read_newest(directory, read)
  if found is None:
    raise checkpoint.CheckpointError(f"{directory} was removed meanwhile")
  return found


def identity(stored: StoredPolicy, step: int) -> str:
  """Return a digest that tells the parameters of two policies apart.

  Of a checkpoint it is that of its manifest, which has a digest of each file.
  Of other weights it is that of their names, their sizes, and the first and
  last megabyte of each file, so that it takes no time.
  """
  if stored.kind is Kind.RUN:
    return manifest.digest(stored.checkpoints / str(step))
  if stored.kind is Kind.PARAMS:
    return manifest.digest(stored.directory / "0")
  digest = hashlib.blake2b(digest_size=16)
  paths = [stored.directory / hf_config.CONFIG_FILE]
  paths += sorted(stored.directory.glob("*.safetensors"))
  for path in paths:
    with open(path, "rb") as file:
      size = path.stat().st_size
      digest.update(f"{path.name} {size}\n".encode())
      digest.update(file.read(_SAMPLED_BYTES))
      file.seek(max(0, size - _SAMPLED_BYTES))
      digest.update(file.read(_SAMPLED_BYTES))
  return digest.hexdigest()
