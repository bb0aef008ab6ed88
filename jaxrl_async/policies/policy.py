"""A policy in memory, for scripts: it generates, and gives logprobs."""

from collections.abc import Mapping, Sequence
import copy
import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import engine_sizes
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import transformer
from jaxrl_async.policies import stored_policy
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import stop_strings
from jaxrl_async.training import packing
from jaxrl_async.training import train_step

Messages = Sequence[Mapping[str, Any]]
_SMALLEST_ROW = 64  # tokens of a row that logprobs are computed in
_ROWS = 8  # rows at a time, or as many as there are devices
_MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
  """What the policy wrote after a prompt.

  Attributes:
    text: without special tokens, and without the stop text that ended it.
    tokens: all tokens that were written, those of the stop text included.
    logprobs: of each token, when it was drawn.
    finish_reason: "eos", "stop" or "length".
  """

  text: str
  tokens: Int[np.ndarray, "T"]
  logprobs: Float[np.ndarray, "T"]
  finish_reason: types.FinishReason


class Policy:
  """A policy on the devices of this process.

  Threads: one at a time.

  Attributes:
    version: the policy version, which is the number of completed train steps.
    tokenizer: of the policy.
    config: that of the run, or the default config of a pretrained model.
  """

  def __init__(
    self,
    setup: setup_lib.Setup,
    params: transformer.Params,
    version: int,
    chat_template: chat_template_lib.ChatTemplate,
  ):
    """Take over parameters; programs are compiled when they are first used."""
    self.version = version
    self.tokenizer = setup.tokenizer
    self.config = setup.config
    self._setup = setup
    self._params = params
    self._chat_template = chat_template
    self._engine: engine_lib.Engine | None = None
    self._engine_params: decode_state_lib.EngineParams | None = None
    self._forwards: dict[tuple[int, float], Any] = {}

  # -- generating -------------------------------------------------------------

  def generate(
    self,
    prompts: str | Messages | Sequence[str | Messages],
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    n: int = 1,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    seed: int = 0,
    top_p: float = 1.0,
    top_k: int = 0,
  ) -> list[Completion]:
    """Complete prompts.

    Equal arguments give equal completions. They are those that a server of the
    policy would return for the same seed.

    Args:
      prompts: a text, or the messages of a chat, or several of these. Messages
        go through the policy's chat template.
      max_tokens: longest completion.
      temperature: 0 takes the most likely token.
      n: completions of each prompt.
      stop: texts each of which ends a completion.
      stop_token_ids: tokens each of which ends a completion.
      seed: of the random numbers, from 0 on.
      top_p: draw from the most likely tokens of this total probability.
      top_k: draw from so many of the most likely tokens; 0 is all.

    Returns:
      The completions in the order of the prompts, n for each of them.

    Raises:
      ValueError: an argument cannot be used; the message is one line.
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not stop_strings.are_allowed(strings):
      raise ValueError(f"stop: one of {strings!r} can never be found")
    for name, value, low, high in (
      ("max_tokens", max_tokens, 1, 2**24),
      ("n", n, 1, 2**16),
      ("seed", seed, 0, _MAX_SEED),
    ):
      if not low <= value <= high:
        raise ValueError(
          f"{name}: {value} is out of range; use {low} to {high}"
        )
    settings = sampling.SamplingSettings(
      temperature=temperature,
      top_p=top_p,
      top_k=top_k,
      end_tokens=tuple(stop_token_ids),
    )
    tokens = [self._prompt_tokens(prompt) for prompt in _several(prompts)]
    if not tokens:
      return []
    scheduler = self._scheduler(max(map(len, tokens)) + max_tokens)
    sequences = [
      sequence_lib.Sequence(
        tokens[choice // n],
        limit=len(tokens[choice // n]) + max_tokens,
        stream=sampling.Stream.SERVE,
        group=seed,
        member=choice,
        settings=settings,
        stop=stop_strings.check_of(self.tokenizer, strings),
      )
      for choice in range(n * len(tokens))
    ]
    for sequence in sequences:
      scheduler.submit(sequence)
    while not scheduler.is_idle:
      scheduler.step()
    return [self._completion(sequence, strings) for sequence in sequences]

  def _prompt_tokens(self, prompt: str | Messages) -> np.ndarray:
    if isinstance(prompt, str):
      tokens = self.tokenizer.encode_prompt(prompt)
    else:
      messages = [dict(message) for message in prompt]
      tokens = self._chat_template.tokens(messages, tokenizer=self.tokenizer)
    if not len(tokens):
      raise ValueError("prompts: one of them has no tokens")
    return tokens

  def _completion(
    self, sequence: sequence_lib.Sequence, strings: tuple[str, ...]
  ) -> Completion:
    trajectory = sequence.trajectory()
    mask = trajectory.loss_mask
    tokens = trajectory.tokens[mask]
    text = stop_strings.CompletionText(self.tokenizer, strings)
    assert trajectory.finish_reason is not None
    return Completion(
      text=text.add(tokens) + text.finish(),
      tokens=tokens,
      logprobs=trajectory.behavior_logprobs[mask],
      finish_reason=trajectory.finish_reason,
    )

  def _scheduler(self, num_tokens: int) -> scheduler_lib.Scheduler:
    """Return a scheduler of an engine for sequences of so many tokens.

    An engine that is too small is replaced by one of at least twice its length.
    """
    self._check_length(num_tokens)
    rollout = self._setup.config.rollout
    if self._engine is None or num_tokens > rollout.cache_tokens:
      self._make_room(num_tokens)
      self._engine = self._engine_params = None  # before there are two
      engine_sizes.fit_slots(self._setup)
      self._engine, self._engine_params = assembly.engine_with(
        self._setup, self._params, self.version
      )
    assert self._engine_params is not None
    scheduler = scheduler_lib.Scheduler(
      self._engine, busy=metrics_lib.BusyClock()
    )
    scheduler.adopt(self._engine_params, self.version)
    return scheduler

  def _check_length(self, num_tokens: int) -> None:
    most = self._setup.model.max_positions
    if most is not None and num_tokens > most:
      raise ValueError(
        f"max_tokens: a prompt and its completion may have {num_tokens} tokens,"
        f" but the model was made for {most}; use fewer, or set"
        " model.max_positions"
      )

  def _make_room(self, num_tokens: int) -> None:
    """Let sequences have at least so many tokens, if they may not already.

    A model whose rotary embeddings depend on the longest sequence is then
    another one, in logprobs and the engine alike.
    """
    rollout = self._setup.config.rollout
    if num_tokens <= rollout.cache_tokens:
      return
    size = 1 << (num_tokens - 1).bit_length()
    scaling = self._setup.model.rope_scaling
    if scaling is not None and num_tokens <= scaling.original_max_tokens:
      size = min(size, scaling.original_max_tokens)
    engine_sizes.set_cache_tokens(rollout, size)
    model = self._setup.model.within(size)
    if model != self._setup.model:
      self._setup = dataclasses.replace(self._setup, model=model)
      self._engine = self._engine_params = None
      self._forwards.clear()

  # -- logprobs ---------------------------------------------------------------

  def logprobs(
    self,
    texts: Sequence[str | tuple[str | Messages, str | Completion]],
    *,
    temperature: float = 1.0,
  ) -> list[Float[np.ndarray, "_"]]:
    """Return the logprob of each token, as training computes it.

    Args:
      texts: each is a text, or a prompt and its completion. A completion may be
        one that `generate` returned.
      temperature: divisor of the logits.

    Returns:
      For each pair the logprobs of the completion's tokens, and for each text
      those of all tokens but the first.

    Raises:
      ValueError: one of them has too few tokens.
    """
    trajectories = [self._trajectory(text) for text in texts]
    if not trajectories:
      return []
    longest = max(len(t.tokens) for t in trajectories)
    if longest > self._setup.config.rollout.cache_tokens:
      if self._setup.model.within(longest) != self._setup.model:
        self._make_room(longest)
    width = max(_SMALLEST_ROW, 1 << (longest - 1).bit_length())
    forward, sharding, num_rows = self._forward(width, temperature)
    packed, segments = packing.pack(
      [packing.without_prompt(trajectories)],
      np.zeros((len(trajectories),), np.float32),
      tokens_per_row=width,
      rows_per_microbatch=num_rows,
      num_minibatches=1,
    )
    values = np.zeros(segments.shape, np.float32)
    for i in range(segments.shape[1]):
      batch = jax.tree.map(lambda x, i=i: x[0, i], packed)
      found, _ = forward(self._params, mesh_lib.put(batch, sharding))
      values[0, i] = np.asarray(found)
    return [
      logprobs[trajectory.loss_mask]
      for trajectory, logprobs in zip(
        trajectories, packing.unpack(values, segments), strict=True
      )
    ]

  def _trajectory(
    self, text: str | tuple[str | Messages, str | Completion]
  ) -> types.Trajectory:
    if isinstance(text, str):
      tokens = self.tokenizer.encode_prompt(text)
      num_given = 1
    else:
      prompt, completion = text
      begin = self._prompt_tokens(prompt)
      written = (
        completion.tokens
        if isinstance(completion, Completion)
        else self.tokenizer.encode(completion)
      )
      tokens, num_given = np.concatenate([begin, written]), len(begin)
    if len(tokens) <= num_given:
      raise ValueError(
        f"texts: {sections.shown(text)} has no token that follows another"
      )
    return types.Trajectory(
      member=0,
      tokens=tokens,
      loss_mask=np.arange(len(tokens)) >= num_given,
      behavior_logprobs=np.zeros(len(tokens), np.float32),
      policy_versions=np.zeros(len(tokens), np.int32),
      finish_reason=types.FinishReason.EOS,
    )

  def _forward(self, width: int, temperature: float) -> tuple[Any, Any, int]:
    """Return the compiled forward pass, the sharding and number of its rows."""
    setup = self._setup
    rules = setup.config.mesh.train_rules
    layout = mesh_lib.Layout(mesh=setup.train_mesh, rules=rules)
    if (width, temperature) not in self._forwards:
      config = copy.deepcopy(setup.config)
      config.train.tokens_per_row = width
      settings = assembly.forward_settings(
        dataclasses.replace(setup, config=config), temperature
      )
      settings = dataclasses.replace(settings, layout=layout)
      self._forwards[width, temperature] = jax.jit(
        functools.partial(train_step.token_logprobs, settings)
      )
    return (
      self._forwards[width, temperature],
      mesh_lib.sharding(setup.train_mesh, rules, "batch", "tokens"),
      -(-_ROWS // layout.parts("batch")) * layout.parts("batch"),
    )


def _several(
  prompts: str | Messages | Sequence[str | Messages],
) -> list[str | Messages]:
  """Return a list of prompts; a list of messages is one prompt."""
  if isinstance(prompts, str):
    return [prompts]
  if prompts and all(isinstance(entry, Mapping) for entry in prompts):
    return [prompts]  # pyright: ignore[reportReturnType]
  return list(prompts)  # pyright: ignore[reportReturnType]


def load(
  stored: stored_policy.StoredPolicy,
  devices: Sequence[Any],
  *,
  num_slots: int = 0,
) -> Policy:
  """Read a stored policy onto devices.

  Args:
    stored: the policy.
    devices: all of them are used.
    num_slots: sequences that are generated side by side; 0 takes the config's.

  Raises:
    ConfigError: the policy cannot be read.
  """
  config = stored_policy.own_config(stored)
  if num_slots:
    config.rollout.num_slots = num_slots
  is_pretrained = stored.kind is stored_policy.Kind.PRETRAINED
  if is_pretrained and devices[0].platform != "cpu":
    config.rollout.dtype = config.model.compute_dtype = "bfloat16"
  setup = setup_lib.on_all_devices(
    config, devices, tokenizer=stored_policy.tokenizer(stored)
  )
  version, params = stored_policy.load(stored, setup)
  return Policy(setup, params, version, stored_policy.chat_template(stored))
