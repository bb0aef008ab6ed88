"""A server of one policy: its parts, its threads and its shutdown.

The main thread waits for a signal or a failure. One thread drives the engine,
and one runs the event loop of the HTTP server. Another runs the gRPC server if
there is one. The request queue connects them. After a signal, the server
accepts no new requests and finishes the accepted ones within a time limit. A
second signal ends it without waiting.
"""

from collections.abc import Callable
import dataclasses
import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.run import assembly
from jaxrl_async.run import device_checks
from jaxrl_async.run import initial_params
from jaxrl_async.run import resume
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.serving import serve_loop as serve_loop_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import train_step

_JOIN_S = 20.0
_SMALLEST_BUCKET = 64
_PRETRAINED_CACHE_TOKENS = 1024  # if the caller names no size


@dataclasses.dataclass(kw_only=True)
class Policy:
  """A policy to serve.

  Attributes:
    setup: of the run. The rollout section of its config sizes the engine.
    params: parameters with stacked layers, as the trainer holds them.
    version: the policy version; 0 for parameters that no run has counted.
    chat_template: turns the messages of a chat into a prompt.
  """

  setup: setup_lib.Setup
  params: Any
  version: int
  chat_template: chat_template_lib.ChatTemplate


# -- what to serve ----------------------------------------------------------


def load_run(
  workdir: pathlib.Path, *, num_slots: int, cache_tokens: int
) -> Policy:
  """Load the policy of a run's newest checkpoint.

  Args:
    workdir: of the run.
    num_slots: replaces the number of slots of the run; 0 keeps it.
    cache_tokens: replaces the cache length of the run; 0 keeps it.

  Raises:
    ConfigError: the workdir holds no checkpoint that can be served.
  """
  directory = workdir / workdir_lib.CHECKPOINTS
  try:
    found = checkpoint.read_newest(
      directory,
      lambda step: resume.stored_config(
        workdir, checkpoint.host_state(directory, step)
      ),
    )
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"workdir: {error}") from error
  if found is None:
    _read_config(workdir)
    raise sections.ConfigError(
      f"workdir: {workdir} holds no checkpoint; launch/train.py writes the"
      " first one after the warm start"
    )
  _, config = found
  _resize(config, num_slots, cache_tokens)
  tokenizer, chat_template = _load_tokenizer(config, workdir / "tokenizer")
  setup = setup_lib.resolve(config, jax.devices(), tokenizer=tokenizer)
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  try:
    found = checkpoint.read_newest(
      directory,
      lambda step: checkpoint.restore(
        directory, step, trainer.abstract_state()
      ),
    )
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"workdir: {error}") from error
  if found is None:
    raise sections.ConfigError(f"workdir: {directory} was removed meanwhile")
  step, (state, _, _) = found
  return Policy(
    setup=setup,
    params=state.policy.params,
    version=step,
    chat_template=chat_template,
  )


def load_checkpoint(
  directory: pathlib.Path, *, num_slots: int, cache_tokens: int
) -> Policy:
  """Load a policy from a directory of parameters alone.

  Args:
    directory: either WORKDIR/params of launch/sft.py, with config.json and
      tokenizer in WORKDIR, or a pretrained model in Hugging Face's format, with
      its tokenizer.
    num_slots: see `load_run`.
    cache_tokens: see `load_run`. For a pretrained model, 0 means 1024.

  Raises:
    ConfigError: the directory holds no such parameters.
  """
  if not directory.is_dir():
    raise sections.ConfigError(f"checkpoint: {directory} does not exist")
  if hf_weights.is_pretrained(directory):
    config = sections.Config()
    config.model.name = str(directory)
    _resize(config, num_slots, cache_tokens or _PRETRAINED_CACHE_TOKENS)
    setup = setup_lib.resolve(config, jax.devices())
    chat_template = front_lib.load_chat_template(directory)
  else:
    config = _read_config(directory.parent)
    _resize(config, num_slots, cache_tokens)
    beside = directory.parent / "tokenizer"
    tokenizer, chat_template = _load_tokenizer(config, beside)
    setup = setup_lib.resolve(config, jax.devices(), tokenizer=tokenizer)
  try:
    params = initial_params.load(str(directory), setup)
  except sections.ConfigError as error:
    text = str(error).removeprefix("warm_start.")
    raise sections.ConfigError(text) from error
  return Policy(
    setup=setup, params=params, version=0, chat_template=chat_template
  )


def _read_config(workdir: pathlib.Path) -> sections.Config:
  config = config_json.read(workdir)
  if config is None:
    raise sections.ConfigError(
      f"workdir: {workdir / config_json.NAME} does not exist"
    )
  return config


def _load_tokenizer(
  config: sections.Config, directory: pathlib.Path
) -> tuple[tokenizer_lib.Tokenizer, chat_template_lib.ChatTemplate]:
  """Load the tokenizer of a workdir and the chat template of its model.

  A workdir does not hold the chat template of a pretrained model, so that is
  read from the model's own directory. If the directory is gone, the result is a
  chat template that refuses every chat.
  """
  try:
    tokenizer = tokenizer_lib.load(directory)
  except (OSError, ValueError) as error:
    raise sections.ConfigError(f"tokenizer: {error}") from error
  if config.model.name in configs.MODELS:
    return tokenizer, front_lib.load_chat_template(directory)
  pretrained = pathlib.Path(config.model.name)
  if hf_weights.is_pretrained(pretrained):
    return tokenizer, front_lib.load_chat_template(pretrained)
  refusal = (
    f"the chat template of this policy was in {pretrained}, which is gone"
  )
  return tokenizer, chat_template_lib.ChatTemplate(None, refusal=refusal)


def _resize(config: sections.Config, num_slots: int, cache_tokens: int) -> None:
  """Change the sizes of the engine in a config; 0 keeps a size as it is."""
  rollout = config.rollout
  if cache_tokens == 1:
    raise sections.ConfigError(
      "cache_tokens: 1 holds a prompt of one token and no completion"
    )
  if num_slots:
    rollout.num_slots = num_slots
  if cache_tokens:
    sizes = []
    size = min(_SMALLEST_BUCKET, cache_tokens)
    while size < cache_tokens:
      sizes.append(size)
      size *= 2
    buckets = (*sizes, cache_tokens)
    rollout.cache_tokens = cache_tokens
    rollout.num_pages = rollout.prefill_chunk = 0
    rollout.prefill_buckets = rollout.window_buckets = buckets


# -- serving it -------------------------------------------------------------


def _check_sizes(setup: setup_lib.Setup) -> None:
  """Check that the mesh divides the slots and that the memory is sufficient."""
  rollout, rules = setup.config.rollout, setup.config.mesh.rollout_rules
  parts = mesh_lib.shape_of(setup.rollout_mesh).parts(rules.batch)
  sections.require(
    rollout.num_slots % parts == 0,
    "num_slots",
    f"{rollout.num_slots} are not split evenly over {parts} replicas; use a"
    " multiple",
  )
  device_checks.check_rollout_memory(setup)


def make_scheduler(policy: Policy) -> scheduler_lib.Scheduler:
  """Build a scheduler and its engine, and let it adopt the policy's weights.

  The engine holds the weights in the format of the run's rollout slice.
  """
  setup = policy.setup
  config = setup.config
  _check_sizes(setup)
  device_checks.check_weights(setup)
  engine = assembly.make_engine(setup)
  publish = train_step.make_publish(
    setup.model,
    mesh_lib.Layout(mesh=setup.train_mesh, rules=config.mesh.train_rules),
    dtype=config.rollout.dtype,
    weights=config.rollout.weights,
  )
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  params = engine.load_params(publish(policy.params), policy.version)
  scheduler.adopt(params, policy.version)
  return scheduler


def _compile(
  scheduler: scheduler_lib.Scheduler, stop: supervisor_lib.StopRequest
) -> None:
  """Generate a token at each padded length, which compiles all programs.

  Otherwise the first clients would wait for XLA. A stop request ends this.
  """
  sizes = scheduler.engine.sizes
  # Prompts that fill a prefill bucket, and prompts whose next token fills a
  # window.
  lengths = {min(b, sizes.cache_tokens - 1) for b in sizes.prefill_buckets}
  lengths |= {max(w - 1, 1) for w in sizes.window_buckets}
  for length, top_p in itertools.product(sorted(lengths), (1.0, 0.5)):
    sequence = sequence_lib.Sequence(
      np.zeros((length,), np.int32),
      limit=length + 1,
      stream=sampling.Stream.SERVE,
      group=0,
      member=0,
      settings=sampling.SamplingSettings(top_p=top_p),
    )
    scheduler.submit(sequence)
    while not scheduler.is_idle:
      if stop.is_set:
        return
      scheduler.step()


def serve(
  policy: Policy,
  settings: front_lib.ServeSettings,
  *,
  stop: supervisor_lib.StopRequest,
  on_ready: Callable[[str], None],
) -> None:
  """Serve a policy until a stop request, then finish the accepted requests.

  Args:
    policy: its `params` are set to None once the engine has the weights.
    settings: of the servers.
    stop: the stop request, which a signal sets.
    on_ready: is called with the address once requests are answered.

  Raises:
    ConfigError: the policy cannot be served with these settings.
    ThreadFailed: a thread failed. All requests have failed with it.
    TimeoutError: a thread did not end in time.
  """
  loop: serve_loop_lib.ServeLoop | None = None
  front = front_lib.Front(
    settings,
    tokenizer=policy.setup.tokenizer,
    chat_template=policy.chat_template,
    cache_tokens=policy.setup.config.rollout.cache_tokens,
    vocab_size=policy.setup.model.vocab_size,
    is_alive=lambda: loop is not None and loop.is_running,
  )
  this = supervisor_lib.Supervisor(on_failure=lambda error: stop.set())
  front.start(note=lambda text: stop.set())
  try:
    scheduler = make_scheduler(policy)
    policy.params = None
    _compile(scheduler, stop)
    loop = serve_loop_lib.ServeLoop(front.queue, scheduler)
    this.spawn("serve loop", loop.run)
    while not (stop.is_set or (front.has_started and front.is_ready)):
      stop.wait(0.01)
    if not stop.is_set:
      on_ready(front.address)
    while not stop.is_set:
      stop.wait(1.0)
    front.queue.drain()
    end_s = time.monotonic() + settings.drain_s
    while not front.queue.is_empty and time.monotonic() < end_s:
      time.sleep(0.02)
  finally:
    if loop is not None:
      loop.stop()  # the remaining requests get an error before `front` ends
    front.stop()
    late = this.join(_JOIN_S) + front.join(_JOIN_S)
  this.check()
  front.check()
  if late:
    raise TimeoutError(f"{', '.join(late)} did not end in {_JOIN_S} s")
