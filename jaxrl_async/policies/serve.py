"""A server of one policy: its parts, its threads and its shutdown.

The main thread waits for a signal or a failure. One thread drives the engine,
and one runs the event loop of the HTTP server. Another runs the gRPC server if
there is one. The request queue connects them. After a signal, the server
accepts no new requests and finishes the accepted ones within a time limit. A
second signal ends it without waiting.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import engine_sizes
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.training import train_state

_JOIN_S = 20.0
_PRETRAINED_CACHE_TOKENS = 1024  # if the caller names no size


@dataclasses.dataclass(kw_only=True)
class Policy:
  """A policy to serve.

  Attributes:
    setup: of the run. The rollout section of its config sizes the engine.
    params: parameters with stacked layers, as the trainer holds them.
    version: the policy version; 0 for parameters that no run has counted.
    chat_template: turns the messages of a chat into a prompt.
    adapters: further models to serve, in the order of their names in
      `ServeSettings.adapters`. Each is what `peft_files.read` returned.
  """

  setup: setup_lib.Setup
  params: Any
  version: int
  chat_template: chat_template_lib.ChatTemplate
  adapters: list[tuple[configs.Lora, Any]] = dataclasses.field(
    default_factory=list
  )


# -- what to serve ----------------------------------------------------------


def load(
  stored: stored_policy.StoredPolicy,
  *,
  num_slots: int = 0,
  cache_tokens: int = 0,
  kept_tokens: int = 0,
  max_positions: int = 0,
) -> Policy:
  """Load a policy in the format in which the run's devices hold it.

  Args:
    stored: the policy.
    num_slots: replaces the number of slots of its config; 0 keeps it.
    cache_tokens: replaces the cache length of its config; 0 keeps it. For a
      pretrained model, 0 means 1024, or as many as it was made for if these are
      fewer.
    kept_tokens: replaces `rollout.kept_tokens` of its config; 0 keeps it.
    max_positions: replaces `model.max_positions` of its config; 0 keeps it.

  Raises:
    ConfigError: it cannot be read, or not be served with these sizes.
  """
  if stored.kind is stored_policy.Kind.PRETRAINED and not cache_tokens:
    with contextlib.suppress(ValueError):  # which is named when it is read
      most = hf_config.max_positions(stored.directory)
      cache_tokens = min(_PRETRAINED_CACHE_TOKENS, most or 2**31)
  config = stored.config
  config.rollout.num_slots = num_slots or config.rollout.num_slots
  if cache_tokens:
    engine_sizes.set_cache_tokens(config.rollout, cache_tokens)
  if kept_tokens:
    engine_sizes.set_kept_tokens(config.rollout, kept_tokens)
  config.model.max_positions = max_positions or config.model.max_positions
  setup = setup_lib.resolve(
    stored_policy.own_config(stored),
    jax.devices(),
    tokenizer=stored_policy.tokenizer(stored),
  )
  version, params = stored_policy.load(stored, setup)
  return Policy(
    setup=setup,
    params=params,
    version=version,
    chat_template=stored_policy.chat_template(stored),
  )


def add_adapters(
  policy: Policy, directories: Mapping[str, pathlib.Path]
) -> None:
  """Load adapters that are served beside a policy.

  They are for its base, so that a policy with an adapter of its own is not
  changed twice.

  Args:
    policy: gets the adapters, in the order of the mapping.
    directories: an adapter in PEFT's format for each name.

  Raises:
    ConfigError: a directory holds no adapter for the policy's architecture.
  """
  for name, directory in directories.items():
    try:
      found = peft_files.read(directory, policy.setup.model.base)
    except (FileNotFoundError, ValueError) as error:
      raise sections.ConfigError(f"adapter: {name}: {error}") from error
    policy.adapters.append(found)


def _stack(policy: Policy) -> tuple[setup_lib.Setup, Any]:
  """Return setup and parameters with all adapters in a stack.

  Number 0 is the policy: its own adapter, or nothing beside the base.
  """
  setup, params = policy.setup, policy.params
  own = None
  if setup.model.lora is not None:
    own = setup.model.lora, lora_lib.adapters(params)
    params = lora_lib.base(params)
  lora, stack = lora_lib.stacked(setup.model.base, [own, *policy.adapters])
  model = dataclasses.replace(setup.model, lora=lora)
  shardings = train_state.params_sharding(
    setup.train_mesh, setup.config.mesh.train_rules, model
  )
  stack = mesh_lib.put(stack, lora_lib.adapters(shardings))
  setup = dataclasses.replace(setup, model=model)
  return setup, lora_lib.joined(params, stack)


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
  setup, weights = policy.setup, policy.params
  if policy.adapters:
    setup, weights = _stack(policy)
  _check_sizes(setup)
  device_checks.check_weights(setup)
  engine, params = assembly.engine_with(setup, weights, policy.version)
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
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
  loop: requests_lib.ServeLoop | None = None
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
    loop = requests_lib.ServeLoop(front.queue, scheduler)
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
