"""A model, an engine and fakes small enough for tests."""

import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import reference
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step
from jaxrl_async.weights import weight_transfer

MODEL = configs.MODELS["tiny"]
END_TOKENS = (1, 2, 3, 4, 5)
WIDTH = 64  # of the trainer's rows: one compilation
SIZES = decode_state_lib.EngineSizes(
  num_slots=4,
  cache_tokens=32,
  decode_steps_per_call=4,
  prefill_rows=2,
  prefill_buckets=(16, 32),
  window_buckets=(16, 32),
)


@functools.cache
def params(seed=0, model=MODEL):
  """Stacked parameters, none of them at the value it starts training with."""

  @jax.jit
  def init(key):
    leaves, tree = jax.tree.flatten(transformer.init_params(model, key))
    keys = jax.random.split(key, len(leaves))
    noisy = [
      x + 0.1 * jax.random.normal(k, x.shape)
      for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)

  return init(jax.random.key(seed))


@functools.cache
def engine(
  model=MODEL,
  end_tokens=END_TOKENS,
  calls_in_flight=2,
  dtype="float32",
  **sizes,
):
  """One engine for all tests that want these sizes: it has no state.

  It is driven as on a GPU or TPU, if not asked otherwise. Whole runs are driven
  as on a CPU.
  """
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  made = engine_lib.Engine(
    model,
    dataclasses.replace(SIZES, **sizes),
    mesh=mesh,
    seed=7,
    end_tokens=end_tokens,
    dtype=dtype,
  )
  assert made.calls_in_flight == 1
  made.calls_in_flight = calls_in_flight
  return made


@functools.cache
def engine_params(version=0, seed=0):
  """Weights of `params(seed)` as the engine takes them."""
  weights = transformer.unstack(params(seed), MODEL.num_layers)
  return engine().load_params(weights, version)


def policy_settings(model, optimizer):
  """What a trainer holds where the policy is all there is."""
  policy = train_state.ModelSettings(model=model, optimizer=optimizer)
  return {train_state.POLICY: policy}


def policy_state(stacked_params, optimizer):
  """The train state of a policy, all of which this optimizer trains."""
  policy = train_state.ModelState(
    trainable=stacked_params,
    frozen={},
    opt_state=optimizer.init(stacked_params),
  )
  return train_state.TrainState(models={train_state.POLICY: policy})


def prompt(length, seed=0):
  """Random tokens, none of which ends a sequence."""
  rng = np.random.default_rng([length, seed])
  low = max(END_TOKENS) + 1
  return rng.integers(low, MODEL.vocab_size, length, np.int32)


def turn(tokens):
  """Tokens that the policy has written in a turn."""
  return episode_lib.Written(
    tokens,
    np.zeros(len(tokens), np.float32),
    np.zeros(len(tokens), np.int32),
    types.FinishReason.EOS,
  )


def packed(sequences, width=WIDTH):
  """Sequences one after the other in one row, as the trainer packs them."""
  tokens, segments, positions, starts = np.zeros((4, 1, width), np.int32)
  start = 0
  for i, sequence in enumerate(sequences):
    here = slice(start, start + len(sequence))
    tokens[0, here] = sequence
    segments[0, here] = i + 1
    positions[0, here] = np.arange(len(sequence))
    starts[0, here] = start
    start += len(sequence)
  starts[0, start:] = start
  return packing.PackedBatch(
    tokens=tokens,
    segment_ids=segments,
    positions=positions,
    segment_start=starts,
    loss_mask=segments > 0,
    advantages=np.zeros((1, width), np.float32),
    behavior_logprobs=np.zeros((1, width), np.float32),
    policy_versions=np.zeros((1, width), np.int32),
    fields={},
  )


@functools.cache
def _forward(model, temperature):
  settings = train_step.ForwardSettings(
    model=model,
    compute_dtype="float32",
    remat=sections.Remat.NONE,
    attention="xla",
    temperature=temperature,
    vocab_chunk=40,
  )
  return jax.jit(functools.partial(train_step.token_logprobs, settings))


def trainer_logprobs(
  stacked_params, sequences, *, model=MODEL, temperature=1.0
):
  """The trainer's logprobs of each sequence, all of them packed in a row."""
  forward = _forward(model, temperature)
  logprobs, _ = forward(stacked_params, packed(sequences))
  edges = np.cumsum([len(s) for s in sequences])
  return np.split(np.asarray(logprobs)[0], edges)[:-1]


def logits(stacked_params, tokens, model=MODEL):
  """The trainer's logits [T V] of one sequence."""
  padded = np.pad(tokens, (0, WIDTH - len(tokens)))
  return _logits(model)(stacked_params, padded)[: len(tokens)]


@functools.cache
def _logits(model):
  @jax.jit
  def compute(params, tokens):
    batch = packing.PackedBatch(*packed([np.zeros(WIDTH, np.int32)]))._replace(
      tokens=tokens[None]
    )
    hidden = hidden_states(model, params, batch)
    head = transformer.bind(model, params, is_stacked=True).head()
    return hidden[0] @ head.T

  return lambda params, tokens: np.asarray(compute(params, tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """What to write in a slot, from which call on."""

  prompt: np.ndarray
  slot: int = 0
  limit: int = 24
  group: int = 0
  member: int = 0
  stream: sampling.Stream = sampling.Stream.TRAIN
  temperature: float = 1.0
  first_call: int = 0


@dataclasses.dataclass
class Written:
  """What an engine wrote in a slot."""

  tokens: list
  logprobs: list
  versions: list


def insertion(engine, row):
  """The engine's form of one row, from row 0 of the prefill."""
  entries = engine.unused_insertion()
  entries.slots[0] = row.slot
  entries.settings.limits[0] = row.limit
  entries.streams[0] = row.stream
  entries.groups[0] = row.group
  entries.members[0] = row.member
  entries.settings.temperature[0] = row.temperature
  entries.settings.end_tokens[0, : len(END_TOKENS)] = END_TOKENS
  return entries


def prefill(engine, params, tokens, bucket=None):
  """Prefills one row, in the smallest bucket that holds it."""
  if bucket is None:
    bucket = next(b for b in engine.sizes.prefill_buckets if b >= len(tokens))
  padded = np.pad(tokens, (0, bucket - len(tokens)))
  return engine.prefill(
    params=params, padded_tokens=padded, true_length=len(tokens)
  )


def write(engine, params, rows, *, num_calls=None, window=None):
  """Drives the engine without a scheduler.

  Returns: what each row wrote, in their order, and the last state.
  """
  state = engine.init_decode_state()
  written = [Written([], [], []) for _ in rows]
  for call in range(num_calls or 32 // engine.sizes.decode_steps_per_call):
    for row in rows:
      if row.first_call == call:
        prefix = prefill(engine, params, row.prompt)
        state = engine.insert(prefix, state, insertion(engine, row))
    state, packed_result = engine.generate(params, state, window=window)
    result = engine.read(packed_result)
    for row, out in zip(rows, written, strict=True):
      if row.first_call <= call:
        valid = result.is_valid[row.slot]
        out.tokens += result.tokens[row.slot, valid].tolist()
        out.logprobs += result.logprobs[row.slot, valid].tolist()
        out.versions += result.policy_versions[row.slot, valid].tolist()
  return written, state


def scheduler(
  *,
  kv_on_adopt=sections.KvOnAdopt.RECOMPUTE,
  cls=scheduler_lib.Scheduler,
  busy=None,
  **sizes,
):
  """A scheduler over the tiny engine, without weights."""
  busy = busy or metrics_lib.BusyClock()
  return cls(engine(**sizes), kv_on_adopt=kv_on_adopt, busy=busy)


def ready(**options):
  """A scheduler that holds version 0."""
  made = scheduler(**options)
  made.adopt(engine_params(), 0)
  return made


def sequence(
  prompt_tokens, *, limit=24, group=0, member=0, deadline=0, owner=None
):
  """A sequence to submit to a scheduler."""
  return sequence_lib.Sequence(
    prompt_tokens,
    limit=limit,
    stream=sampling.Stream.TRAIN,
    group=group,
    member=member,
    settings=sampling.SamplingSettings(),
    deadline=deadline,
    owner=owner,
  )


LONG_GROUPS = (0, 1, 5, 8, 9, 10, 11, 15)  # member 2 of these writes much


def long(group=8, length=5, **options):
  """A sequence of many tokens."""
  return sequence(prompt(length), group=group, member=2, **options)


@functools.cache
def long_alone():
  """What `long()` is when nothing happens to it."""
  (written,) = write_all(ready(), [long()])
  return written


def assorted_prompts(count=11):
  """Prompts of all lengths, no two alike; the last two are equally long."""
  lengths = [1 + 5 * min(i, count - 2) % 19 for i in range(count)]
  return [prompt(length, seed=i) for i, length in enumerate(lengths)]


def assorted(count=11):
  """More sequences than slots, with these prompts."""
  return [
    sequence(one, limit=22 + i % 10, group=i)
    for i, one in enumerate(assorted_prompts(count))
  ]


class Record(NamedTuple):
  """Everything that a sequence says, comparable bit for bit."""

  tokens: list
  loss_mask: list
  logprobs: list
  versions: list
  finish_reason: types.FinishReason | None


def record(sequence):
  t = sequence.trajectory()
  arrays = t.tokens, t.loss_mask, t.behavior_logprobs, t.policy_versions
  return Record(*(a.tolist() for a in arrays), t.finish_reason)


def finish(scheduler, max_calls=200):
  """Steps until nothing is left; returns what ended, in order."""
  ended = []
  for _ in range(max_calls):
    if scheduler.is_idle:
      return ended
    ended += scheduler.step()
  raise AssertionError(f"{len(scheduler.sequences())} sequences do not end")


def write_all(scheduler, sequences):
  """Submits all, steps until nothing is left, and returns the records."""
  for each in sequences:
    scheduler.submit(each)
  finish(scheduler)
  return [record(each) for each in sequences]


def input_dependence(model, stacked_params, tokens, segment_ids):
  """How much each hidden state depends on each input: [T T], summed over D.

  The tokens are distinct and the head is not asked for, so that a row of the
  embedding is an input.
  """
  batch = packed([tokens], len(tokens))
  batch = batch._replace(segment_ids=np.asarray(segment_ids, np.int32)[None])

  def hidden(embedding):
    return hidden_states(
      model, {**stacked_params, "embedding": embedding}, batch
    )[0].sum(-1)

  jacobian = jax.jit(jax.jacrev(hidden))(stacked_params["embedding"])
  return np.abs(np.asarray(jacobian[:, np.asarray(tokens)])).sum(-1)


def hidden_states(model, params, batch, *, is_stacked=True, kept=False):
  """Final hidden states of packed rows; with `kept`, keys and values too."""
  segment_ids = jnp.asarray(batch.segment_ids)
  length = segment_ids.shape[1]
  windows = [x or length for x in model.windows_within(length)]

  def attend(layer, query, key, value):
    window = layer if is_stacked else windows[layer]
    mask = reference.packed_mask(segment_ids, window)
    mixed = reference.xla_attention(query, key, value, mask)
    return mixed, (key, value)

  bound = transformer.bind(model, params, is_stacked=is_stacked)
  hidden, keys_and_values = bound.hidden(
    bound.embed(jnp.asarray(batch.tokens), jnp.dtype("float32")),
    jnp.asarray(batch.positions),
    attend,
    per_layer=jnp.array(windows) if is_stacked else None,
  )
  return (hidden, keys_and_values) if kept else hidden


class Prompts(prompts.PromptStream):
  """Prompts of growing length without a dataset; `item` is the number."""

  def __init__(self, first=0):
    self.count = first

  def is_ready(self, timeout_s=0.0):
    return True

  def metrics(self):
    return {}

  def next(self):
    number = self.count
    self.count += 1
    return types.Prompt(
      prompt_id=f"tiny/train/{number}",
      tokens=prompt(3 + number % 4, seed=number),
      item={"number": number},
    )


def written_group(admission, versions=None):
  """Return the group as admitted: a prompt token, then a token a version."""
  versions = [admission.birth] if versions is None else versions
  versions = np.array([-1, *versions])
  trajectory = types.Trajectory(
    member=0,
    tokens=np.zeros_like(versions),
    loss_mask=np.arange(len(versions)) > 0,
    behavior_logprobs=np.zeros(versions.shape, np.float32),
    policy_versions=versions,
    finish_reason=types.FinishReason.EOS,
    reward=reward(1.0),
  )
  return types.RolloutGroup(
    admission=admission,
    prompt=types.Prompt(prompt_id="tiny/train/0", tokens=np.arange(1), item={}),
    trajectories=[trajectory],
  )


def reward(score):
  """A reward that is a number only, unless it is one already or a failure."""
  if isinstance(score, types.Reward | service_lib.RewardFailure):
    return score
  return types.Reward(score=float(score))


class Score(service_lib.ScoreHandle):
  """A handle whose outcome was known from the start."""

  def __init__(self, outcome, num_polls=0):
    self._outcome = outcome
    self._polls_left = num_polls

  def done(self):
    self._polls_left -= 1
    return self._polls_left < 0

  def wait(self, timeout_s=None):
    return True

  def result(self):
    return self._outcome


class Rewards(service_lib.RewardService):
  """Scores in this thread, by a function of (item, completions).

  Tokens are those of the character-level tokenizer.

  Its scores may be numbers or rewards. It keeps what was submitted; a handle is
  done after `num_polls` polls.
  """

  def __init__(self, score=None, num_polls=0):
    self.submitted = []
    self._tokenizer = tokenizer_lib.character_level()
    self._score_group = score or (lambda item, texts: [*range(len(texts))])
    self._num_polls = num_polls

  def submit(self, item, trajectories):
    completions = completion_lib.of_group(
      completion_lib.pack(trajectories), self._tokenizer
    )
    self.submitted.append((item, completions))
    outcome = self._score_group(item, completions)
    if not isinstance(outcome, service_lib.RewardFailure):
      outcome = [reward(score) for score in outcome]
    return Score(outcome, self._num_polls)


class SteppedScheduler(scheduler_lib.Scheduler):
  """Calls `after_step(number of steps so far)` after each."""

  num_steps = 0
  after_step = staticmethod(lambda num_steps: None)

  def step(self):
    ended = super().step()
    self.num_steps += 1
    self.after_step(self.num_steps)
    return ended


def channel(seed=0):
  """A channel with version 0 published."""
  shardings = engine().params_sharding.weights
  weights = engine_params(0, seed).weights
  target = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    weights,
    shardings,
  )
  channel = weight_transfer.DirectChannel(target)
  channel.publish(weights, 0)
  return channel
