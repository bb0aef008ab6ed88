"""The setup of a run: a config with everything that it refers to.

Training, serving, the warm start alone and a dry run all begin with `resolve`.
Parts that only some of them need are built in `assembly`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import jax

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import mesh_shape
from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.data import mixture as mixture_lib
from jaxrl_async.data import rendering
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import task_sources
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.data.tables import uri as uri_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.models import hub
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import transformer
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.text import tokenizer_files
from jaxrl_async.tools import episode as tool_episode
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import packing
from jaxrl_async.training import train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """A config and everything that it refers to.

  Attributes:
    config: a validated config.
    tokenizer: the tokenizer of the pretrained model, or that of
      `model.tokenizer`. Without either, each character is a token.
    model: the policy's architecture, with its adapters. Its vocabulary is at
      least as large as the tokenizer's.
    pretrained: directory of the model in Hugging Face's format that
      `model.name` names. None if it names one of `configs.MODELS`.
    train_mesh: devices of the training slice.
    rollout_mesh: devices of the rollout slice. If replicas are in other
      processes, it has the shape of a replica's mesh, and no devices to use.
    source: the source of the prompts.
    chat_template: of the tokenizer, if the task's prompts are chats.
    teacher: the architecture of `algorithm.teacher`, if there is one.
    evaluated: the questions of `eval.sets`, which nothing is trained on. It is
      empty until `checks` has read them.
    device_bytes: the memory of each device, where the devices only stand in for
      others. None asks the devices.
    attention: of the trainer's packed rows, if it has been chosen already, here
      or by the first process of the trainer. "" is to choose it.
  """

  config: sections.Config
  tokenizer: tokenizer_lib.Tokenizer
  model: configs.ModelConfig
  pretrained: pathlib.Path | None
  train_mesh: jax.sharding.Mesh
  rollout_mesh: jax.sharding.Mesh
  source: source_lib.Source
  chat_template: chat_template_lib.ChatTemplate | None = None
  teacher: configs.ModelConfig | None = None
  evaluated: frozenset[str] = frozenset()
  device_bytes: int | None = None
  attention: str = ""

  @property
  def models(self) -> dict[str, train_state.ModelSettings]:
    """The settings of each model in the train state, by name."""
    config = self.config
    policy = train_state.ModelSettings(
      model=self.model, optimizer=config.train.optimizer
    )
    if self.model.lora is not None:
      policy = dataclasses.replace(
        policy,
        is_trainable=lora_lib.is_adapter,
        frozen_dtype=config.model.lora.base_dtype,
      )
    models = {train_state.POLICY: policy}
    algorithm = config.algorithm
    # The reference of adapters is the model without them.
    if algorithm.kl_coef and self.model.lora is None:
      # Held as the forward pass uses it. A moving average needs more digits,
      # because it changes by little at a time.
      models[train_state.REFERENCE] = train_state.ModelSettings(
        model=self.model,
        optimizer=None,
        frozen_dtype="float32"
        if algorithm.reference_decay
        else config.model.compute_dtype,
        is_on_host=algorithm.reference_offload,
      )
    if self.teacher is not None:
      models[train_state.TEACHER] = train_state.ModelSettings(
        model=self.teacher,
        optimizer=None,
        frozen_dtype=config.model.compute_dtype,
      )
    if config.algorithm.advantage == "gae":
      models[train_state.CRITIC] = train_state.ModelSettings(
        model=dataclasses.replace(self.model.base, has_scalar_head=True),
        optimizer=config.critic.optimizer,
        is_trainable=train_state.is_critic_weight,
        trunk=config.critic.trunk,
      )
    return models

  def first_params(
    self, params: transformer.Params
  ) -> dict[str, transformer.Params]:
    """Return the parameters of each model before the first train step.

    Those of a teacher are not among them; see `initial_params.of_models`.

    Args:
      params: of the policy. The reference has the same, and so have the layers
        of a critic.
    """
    return {
      name: params
      if settings.trunk is None
      else critic_lib.first_params(settings, params)
      for name, settings in self.models.items()
      if name != train_state.TEACHER
    }

  @property
  def shares_a_device(self) -> bool:
    """Whether both slices are the same single device."""
    if config_checks.has_remote_replicas(self.config):
      return False
    return self.train_mesh.size == 1 and self.train_mesh == self.rollout_mesh

  @property
  def max_microbatches(self) -> int:
    """The number of microbatches if every trajectory has the maximum length.

    This is for one minibatch.
    """
    algorithm, rollout = self.config.algorithm, self.config.rollout
    return packing.expected_microbatches(
      algorithm.group_size
      * algorithm.groups_per_step
      // algorithm.num_minibatches,
      max_tokens=rollout.max_prompt_tokens + rollout.max_completion_tokens,
      tokens_per_row=self.config.train.tokens_per_row,
      rows_per_microbatch=self.config.train.rows_per_microbatch,
    )


def resolve(
  config: sections.Config,
  devices: Sequence[Any],
  *,
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  source: source_lib.Source | None = None,
  device_bytes: int | None = None,
  is_supervised: bool = False,
) -> Setup:
  """Return the setup of a config; this reads files but compiles nothing.

  Args:
    config: a validated config.
    devices: the devices that are divided into the two slices. They may be
      descriptions of devices that are not present.
    tokenizer: a tokenizer that a run has stored, used instead of the model's.
    source: the source of the prompts; None is the dataset of `task.dataset`.
    device_bytes: as in `Setup`.
    is_supervised: the sequences are rows of examples, as in `longest_tokens`.

  Raises:
    ConfigError: one line that names the field.
  """
  pretrained = _pretrained(config)
  if tokenizer is None:
    tokenizer = _load_tokenizer(config.model, pretrained)
  model = _model_config(
    config, pretrained, tokenizer, is_supervised=is_supervised
  )
  tokenizer = tokenizer.within(model.vocab_size)
  train_mesh, rollout_mesh = _cut_devices(config, devices)
  return Setup(
    config=config,
    tokenizer=tokenizer,
    model=model,
    pretrained=pretrained,
    train_mesh=train_mesh,
    rollout_mesh=rollout_mesh,
    source=source_of(config, tokenizer) if source is None else source,
    chat_template=chat_template_of(config),
    teacher=_teacher_config(config, model, tokenizer),
    device_bytes=device_bytes,
  )


def on_all_devices(
  config: sections.Config,
  devices: Sequence[Any],
  *,
  tokenizer: tokenizer_lib.Tokenizer,
) -> Setup:
  """Return the setup of a program that generates and does not train.

  Both meshes have all of the devices. Generation splits the sequences over
  them, and the model over `mesh.rollout_tensor` of them where that many divide
  the devices. The parameters are read in parts, one for each device.

  Args:
    config: a checked config. The other sizes of its meshes are not used, and
      `rollout.num_slots` is rounded up to what the meshes divide.
    devices: all of them.
    tokenizer: of the policy.

  Raises:
    ConfigError: one line that names the field.
  """
  count, tensor = len(devices), config.mesh.rollout_tensor
  if tensor < 1 or count % tensor:
    tensor = 1
  pretrained = _pretrained(config)
  model = _model_config(config, pretrained, tokenizer)
  tokenizer = tokenizer.within(model.vocab_size)
  parts = count if model.model_dim % count == 0 else 1
  slots = config.rollout.num_slots
  rollout_shape = MeshShape(data=count // tensor, tensor=tensor)
  replicas = rollout_shape.parts(config.mesh.rollout_rules.batch)
  config.rollout.num_slots = -(-slots // replicas) * replicas
  return Setup(
    config=config,
    tokenizer=tokenizer,
    model=model,
    pretrained=pretrained,
    train_mesh=mesh_lib.make_mesh(
      devices, MeshShape(data=count // parts, fsdp=parts)
    ),
    rollout_mesh=mesh_lib.make_mesh(devices, rollout_shape),
    source=source_of(config, tokenizer),
    chat_template=chat_template_of(config),
  )


def source_of(
  config: sections.Config, tokenizer: tokenizer_lib.Tokenizer | None = None
) -> source_lib.Source:
  """Return the source that a config names.

  Args:
    config: a validated config.
    tokenizer: of the policy; None reads the one that the config names.

  Raises:
    ConfigError: one line that names the field.
  """
  template = chat_template_of(config)
  if template is None:
    return of_task(config.task, config.seed)
  if tokenizer is None:
    tokenizer = _load_tokenizer(config.model, _pretrained(config))
  check = functools.partial(
    rendering.check_chat, tokenizer=tokenizer, chat_template=template
  )
  return of_task(config.task, config.seed, check)


def tools_of(
  task: sections.TaskSection,
  tokenizer: tokenizer_lib.Tokenizer,
  template: chat_template_lib.ChatTemplate | None,
) -> list[dict[str, Any]]:
  """Return the descriptions of the tools that the prompts of a task show.

  Raises:
    ConfigError: the tools cannot be used.
  """
  if task.episode != "tools":
    return []
  params = fields_lib.plain(task)["episode_params"]
  return tool_episode.prepared(params, tokenizer, template)


def chat_template_of(
  config: sections.Config,
) -> chat_template_lib.ChatTemplate | None:
  """Return the chat template of the tokenizer, if the task's prompts need one.

  Raises:
    ConfigError: the tokenizer has none, or it cannot be used.
  """
  needed_by = task_sources.needs_chat(config.task)
  if needed_by is None:
    return None
  directory = _pretrained(config) or config.model.tokenizer
  field = "model.tokenizer" if config.model.tokenizer else "model.name"
  try:
    template = directory and chat_template_lib.load(pathlib.Path(directory))
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  if not template or not template.exists:
    why = f" ({template.refusal})" if template and template.refusal else ""
    name = config.model.tokenizer or config.model.name
    raise sections.ConfigError(
      f"{needed_by}: the tokenizer of {sections.shown(name)} has no chat"
      f" template{why}; use a model that has one, or task.template alone"
    )
  return template


def save_tokenizer(setup: Setup, directory: pathlib.Path) -> None:
  """Write what a workdir keeps of its tokenizer and its pretrained model.

  Of a pretrained model it is everything but the weights, so that the policy can
  be served, evaluated and exported when the model is gone.

  Raises:
    OSError: a file cannot be written.
  """
  if setup.pretrained is not None:
    tokenizer_files.copy(setup.pretrained, directory, with_config=True)
    return
  setup.tokenizer.save(directory)
  if setup.config.model.tokenizer:
    chat_template_lib.copy_to(
      pathlib.Path(setup.config.model.tokenizer), directory
    )


def _pretrained(config: sections.Config) -> pathlib.Path | None:
  """Return the directory of the pretrained model, if `model.name` names one.

  Raises:
    ConfigError: it names one of the hub, which cannot be read.
  """
  try:
    return hub.model_directory(config.model.name)
  except hub.HubError as error:
    raise sections.ConfigError(f"model.name: {error}") from error


def _load_tokenizer(
  section: sections.ModelSection, pretrained: pathlib.Path | None
) -> tokenizer_lib.Tokenizer:
  """Load the tokenizer of the pretrained model, or that of the section.

  Without either, return a tokenizer whose tokens are characters.

  Raises:
    ConfigError: the directory has no usable tokenizer, or there are two.
  """
  sections.require(
    pretrained is None or not section.tokenizer,
    "model.tokenizer",
    f"{pretrained} has a tokenizer of its own; leave it empty",
  )
  if pretrained is None and not section.tokenizer:
    return tokenizer_lib.character_level()
  try:
    return tokenizer_lib.load(pretrained or section.tokenizer)
  except (FileNotFoundError, ValueError) as error:
    field = "model.name" if pretrained else "model.tokenizer"
    raise sections.ConfigError(f"{field}: {error}") from error


def longest_tokens(
  config: sections.Config, model: configs.ModelConfig, *, is_supervised: bool
) -> int:
  """Return the length of the longest sequence that a model may see.

  Args:
    config: of the run, or of the supervised training.
    model: its architecture.
    is_supervised: examples may be as long as a row, if the model was made for
      that many tokens. Otherwise the engine writes all sequences.
  """
  if not is_supervised:
    return config.rollout.cache_tokens
  row = config.train.tokens_per_row
  return min(row, model.max_positions or row)


def _model_config(
  config: sections.Config,
  pretrained: pathlib.Path | None,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  is_supervised: bool = False,
) -> configs.ModelConfig:
  """Return the architecture of the policy, with its adapters.

  Raises:
    ConfigError: there is no model of that name, its files cannot be used, or
      sequences may become longer than it was made for.
  """
  model = _base_config(config, pretrained, tokenizer)
  longest, most = config.rollout.cache_tokens, model.max_positions
  sections.require(
    most is None or longest <= most,
    "rollout.cache_tokens",
    f"{longest}, but {sections.shown(config.model.name)} was made for"
    f" {most} tokens (max_position_embeddings); use {most} or fewer, or allow"
    f" more by model.max_positions={longest}",
  )
  model = model.within(
    longest_tokens(config, model, is_supervised=is_supervised)
  )
  lora = lora_lib.of_section(config.model.lora)
  why = model.why_no_adapters(lora)
  sections.require(not why, "model.lora.modules", why)
  return dataclasses.replace(model, lora=lora)


def _teacher_config(
  config: sections.Config,
  policy: configs.ModelConfig,
  tokenizer: tokenizer_lib.Tokenizer,
) -> configs.ModelConfig | None:
  """Return the architecture of the teacher, if there is one.

  Raises:
    ConfigError: its files cannot be used, or it has another vocabulary.
  """
  field, name = "algorithm.teacher", config.algorithm.teacher
  if not name:
    return None
  directory = pathlib.Path(name)
  if not hf_weights.is_pretrained(directory):
    return policy.base
  try:
    model = hf_config.model_config(directory)
    model = model.within(config.rollout.cache_tokens)
    digest = tokenizer_lib.load(directory).digest()
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  sections.require(
    digest == tokenizer.digest(),
    field,
    f"{sections.shown(name)} has another vocabulary than model.name"
    f" {sections.shown(config.model.name)}; use a model with its tokenizer",
  )
  sections.require(
    model.vocab_size >= policy.vocab_size,
    field,
    f"{sections.shown(name)} has logits of {model.vocab_size} tokens, and"
    f" model.name {sections.shown(config.model.name)} may draw any of"
    f" {policy.vocab_size}; use a teacher with at least as many",
  )
  return model


def _base_config(
  config: sections.Config,
  pretrained: pathlib.Path | None,
  tokenizer: tokenizer_lib.Tokenizer,
) -> configs.ModelConfig:
  """Return the architecture without adapters, with a sufficient vocabulary.

  A pretrained model keeps its own vocabulary size, which may be larger than the
  tokenizer's. A model of `configs.MODELS` keeps its size too if that is larger,
  as for those with the shapes of a pretrained model. Otherwise it gets the size
  of the tokenizer's vocabulary.

  Raises:
    ConfigError: there is no model of that name, or its files cannot be used.
  """
  name = config.model.name
  if name in configs.MODELS:
    model = configs.MODELS[name]
    return dataclasses.replace(
      model, vocab_size=max(model.vocab_size, tokenizer.vocab_size)
    )
  if pretrained is None:
    raise sections.ConfigError(
      f"model.name: {sections.shown(name)} does not exist; use one of"
      f" {', '.join(configs.MODELS)}, a directory in Hugging Face's format, or"
      " hf:ORG/NAME of the hub"
    )
  try:
    model = hf_config.model_config(pretrained)
    hf_config.check_vocabulary(pretrained, model, tokenizer.num_needed)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"model.name: {error}") from error
  if config.model.max_positions:
    model = dataclasses.replace(model, max_positions=config.model.max_positions)
  return model


def _cut_devices(
  config: sections.Config, devices: Sequence[Any]
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Divide the devices into the train and the rollout mesh.

  Raises:
    ConfigError: the mesh sizes do not suit the devices, or a mesh would contain
      chips of two TPU slices.
  """
  are_apart = config_checks.has_remote_replicas(config)
  train, rollout = mesh_shape.of_slices(
    config.mesh, len(devices), are_apart=are_apart
  )
  if are_apart:
    # What is checked of the rollout mesh is its shape and the kind of its
    # devices.
    stand_ins = [devices[0]] * rollout.num_devices
    return (
      mesh_lib.make_mesh(devices[: train.num_devices], train),
      mesh_lib.make_mesh(stand_ins, rollout),
    )
  meshes = mesh_lib.cut_devices(
    devices, train_shape=train, rollout_shape=rollout
  )
  for side, mesh in zip(("train", "rollout"), meshes, strict=True):
    sections.require(
      len(set(mesh.devices.flat)) == mesh.size,
      f"mesh.{side}_data",
      f"the {side} slice would have chips of two TPU slices; give each mesh the"
      " chips of one",
    )
  return meshes


def of_task(
  task: sections.TaskSection,
  seed: int,
  check: Callable[..., None] = lambda style, item, source: None,
) -> source_lib.Source:
  """Return the source of a task.

  Args:
    task: the section, which `task_sources.check` has passed.
    seed: of the run.
    check: of the rows of files, as `rendering.check_chat`.

  Raises:
    ConfigError: a dataset cannot be used as it is named.
  """
  members = task_sources.members_of(task)
  if not members:
    return _of_dataset(task, seed, check)
  return mixture_lib.Mixture(
    members={
      name: _of_dataset(member, seed, check, name)
      for name, member in members.items()
    },
    weights={name: task_sources.weight_of(task, name) for name in members},
  )


def _of_dataset(
  task: sections.TaskSection,
  seed: int,
  check: Callable[..., None],
  label: str = "",
) -> rows_lib.Rows | gym.ReasoningGym:
  setting = f"task.sources.{label}" if label else "task"
  uri = uri_lib.parse(f"{setting}.dataset", task.dataset)
  if not uri.has_rows:
    return gym.ReasoningGym(
      name=uri.place, params=task.params.to_dict(), seed=seed
    )
  style = rendering.style_of(task, "")
  fields = task.fields.to_dict()
  if uri.kind == uri_lib.VERIFIERS:  # its rewards know what is right
    fields = {"answer": "", **fields}
  return rows_lib.Rows(
    dataset=task.dataset,
    eval_dataset=task.eval_dataset,
    fields=fields,
    environment=task.params.to_dict(),
    in_template=()
    if task.fields.get("messages")
    else rendering.named_fields(task.template),
    eval_percent=task.eval_percent,
    skips_bad_rows=task.on_bad_row is sections.OnBadRow.SKIP,
    seed=seed,
    label=label,
    setting=setting,
    check_item=lambda item: check(style, item, label or uri.label),
  )
