"""The type and range of each setting, taken by itself.

The bounds are wide. They exclude only values that cannot work on any machine,
because they do not fit a device's float32 or int32, a timer or an operating
system limit. A value that is merely unwise passes.
"""

from collections.abc import Callable
import struct
import threading
from typing import Any

from jaxrl_async.config import field_types
from jaxrl_async.config import lora_section
from jaxrl_async.config import sections

# Counters on devices, in numpy and in Optax have 32 bits.
MAX_INT = 2**31 - 1
# Devices hold settings as float32 and flush smaller numbers to 0.
_MIN_FLOAT, _MAX_FLOAT = 1.2e-38, 3.4e38
# Logits differ by less than 1e4. Division by a smaller temperature overflows,
# or loses their differences beyond the 24 bits of float32. Division by a larger
# one leaves no difference at all.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-4, 1e4
# The kernel's timers and all waits accept this; a longer timeout overflows.
_MAX_TIMEOUT_S = 1e9
MAX_REWARD_TIMEOUT_S = 86_400.0
MAX_REWARD_RETRIES = 1_000
# A group's deadline is the sum of its scores' deadlines.
_MAX_GROUP = 2**16
assert _MAX_GROUP * MAX_REWARD_TIMEOUT_S < threading.TIMEOUT_MAX
assert _MAX_TIMEOUT_S < threading.TIMEOUT_MAX
MAX_ITEMS = 100_000  # questions of an evaluation
MAX_SAMPLES = 4_096  # answers to each of them
_MAX_STOPS = 16  # each is looked for in every completion
_MAX_STOP_CHARACTERS = 1_000
MAX_STOP_TOKENS = 8  # the engine compares each token with so many
_MAX_BUCKETS = 64  # each of them is a program to compile
DTYPES = ("float32", "bfloat16")

# Lowest value, highest value, and the fields with this range.
_INTEGERS = (
  (0, 255, "seed"),
  (
    0,
    MAX_INT,
    """algorithm.max_staleness staleness_control.minimum
    staleness_control.maximum""",
  ),
  (1, MAX_INT, "staleness_control.patience"),
  (2, _MAX_GROUP, "algorithm.group_size"),
  (
    1,
    _MAX_GROUP,
    """algorithm.groups_per_step warm_start.rows_per_batch
    preference.rows_per_batch""",
  ),
  (1, 1_024, "task.reward_workers task.question_workers"),
  (0, MAX_REWARD_RETRIES, "task.reward_retries"),
  (0, 2**16, "model.lora.rank"),
  (1, 99, "task.eval_percent"),
  (0, 1_000_000, "task.rest_after"),
  (1, 1_000_000, "task.rest_for"),
  # All examples are made before the first step. A split has 4 million
  # questions.
  (
    1,
    1_000_000,
    """warm_start.num_examples warm_start.num_eval_examples
    preference.num_examples preference.num_eval_examples""",
  ),
  (1, MAX_ITEMS, "eval.num_items"),
  (1, MAX_SAMPLES, "eval.samples"),
  (0, 1_024, "run.sample_groups"),
  (
    1,
    MAX_INT,
    """task.max_failed_groups rollout.num_slots rollout.max_prompt_tokens
    rollout.max_completion_tokens rollout.cache_tokens
    rollout.decode_steps_per_call rollout.prefill_rows rollout.page_tokens
    algorithm.num_minibatches algorithm.num_epochs train.num_steps
    train.tokens_per_row train.rows_per_microbatch train.max_bad_updates
    train.vocab_chunk run.checkpoint_every run.keep_checkpoints
    run.max_checkpoint_failures preference.num_steps""",
  ),
  (
    1,
    4_096,
    "cluster.replicas cluster.replica_processes cluster.trainer_processes",
  ),
  (0, 65_536, "cluster.replica_gpus"),
  (0, 4_096, "cluster.min_replicas"),
  (
    0,
    MAX_INT,
    """rollout.prefill_chunk rollout.num_pages eval.every
    algorithm.aggregation_tokens algorithm.reference_every
    warm_start.num_steps warm_start.eval_every warm_start.patience
    warm_start.optimizer.warmup_steps train.optimizer.warmup_steps
    critic.optimizer.warmup_steps critic.warmup_steps
    preference.eval_every preference.patience
    preference.optimizer.warmup_steps""",
  ),
)
_NUMBERS = (
  (
    0,
    1,
    """warm_start.corrupted_frac warm_start.decay train.decay
    algorithm.clip_low algorithm.behavior_weight_floor algorithm.gamma
    algorithm.gae_lambda algorithm.reference_decay preference.decay
    staleness_control.min_ess staleness_control.max_clip_frac
    staleness_control.max_left_out_frac staleness_control.max_wait_frac""",
  ),
  (
    0,
    _MAX_FLOAT,
    """algorithm.clip_high algorithm.dual_clip algorithm.second_moment_bound
    algorithm.sequence_kl_bound algorithm.reward_clip algorithm.kl_coef
    algorithm.entropy_coef algorithm.distill_coef algorithm.kl_reward_clip
    critic.value_clip critic.value_coef""",
  ),
  (
    _MIN_FLOAT,
    _MAX_FLOAT,
    """algorithm.sapo_positive algorithm.sapo_negative algorithm.reward_scale
    preference.beta""",
  ),
  (-_MAX_FLOAT, _MAX_FLOAT, "algorithm.reward_bias"),
  (-_MAX_FLOAT, _MAX_FLOAT, "task.solved_score"),
  (_MIN_FLOAT, _MAX_FLOAT, "model.lora.alpha"),
  (1, _MAX_FLOAT, "algorithm.behavior_weight_cap"),
  (_MIN_TEMPERATURE, _MAX_TEMPERATURE, "rollout.temperature"),
  (0.1, MAX_REWARD_TIMEOUT_S, "task.reward_timeout_s"),
  (1, _MAX_TIMEOUT_S, "run.stall_timeout_s"),
  (0.1, _MAX_TIMEOUT_S, "run.join_timeout_s"),
  (0, _MAX_TIMEOUT_S, "rollout.max_group_seconds run.preemption_grace_s"),
  (0, 65_536, "cluster.replica_cpus"),
  (
    1,
    _MAX_TIMEOUT_S,
    """cluster.replica_timeout_s cluster.hang_timeout_s
    cluster.start_timeout_s cluster.coordinator_timeout_s""",
  ),
  (0.1, _MAX_TIMEOUT_S, "cluster.report_every_s"),
)
_OPTIMIZERS = (
  "warm_start.optimizer.",
  "preference.optimizer.",
  "train.optimizer.",
  "critic.optimizer.",
)
# Fields of each optimizer. An update moves a weight by about the learning rate.
_OPTIMIZER = (
  (0, 1, "learning_rate"),
  (0, _MAX_FLOAT, "weight_decay"),
  (_MIN_FLOAT, _MAX_FLOAT, "eps max_grad_norm"),
)


def _float32(number: int | float) -> float:
  """Return the number as float32 holds it."""
  return struct.unpack("f", struct.pack("f", number))[0]


def _check_float(path: str, value: int | float) -> None:
  # JAX adds a float of any size to an array, but fails for an integer that does
  # not fit into 32 bits.
  """Raise a ConfigError if the field holds an integer beyond 32 bits."""
  sections.require(
    type(value) is float or abs(value) <= MAX_INT,
    path,
    f"{sections.shown(value)} is too large for an integer; write it with a"
    " decimal point or an exponent, such as 1e30",
  )


def _check_float32(path: str, value: int | float) -> None:
  """Raise a ConfigError if float32 cannot hold the number."""
  sections.require(
    value == 0 or _MIN_FLOAT <= abs(value) <= _MAX_FLOAT,
    path,
    f"{sections.shown(value)} is out of range; use 0, or {_MIN_FLOAT} to"
    f" {_MAX_FLOAT}, which float32 can hold",
  )


def _check_int(path: str, value: int) -> None:
  """Raise a ConfigError if the integer does not fit into 32 bits."""
  sections.require(
    abs(value) <= MAX_INT,
    path,
    f"{sections.shown(value)} is out of range; use at most {MAX_INT}",
  )


def _check_stops(texts: tuple[str, ...], tokens: tuple[int, ...]) -> None:
  """Check what ends a completion; the vocabulary is checked with the model."""
  path = "rollout.stop"
  sections.require(
    len(texts) <= _MAX_STOPS,
    path,
    f"{len(texts)} texts; use at most {_MAX_STOPS}",
  )
  for text in texts:
    sections.require(
      0 < len(text) <= _MAX_STOP_CHARACTERS and "\ufffd" not in text,
      path,
      f"{sections.shown(text)} can never be found; use texts of 1 to"
      f" {_MAX_STOP_CHARACTERS} characters without U+FFFD",
    )
  path = "rollout.stop_token_ids"
  sections.require(
    len(tokens) <= MAX_STOP_TOKENS,
    path,
    f"{len(tokens)} tokens; use at most {MAX_STOP_TOKENS}",
  )
  for token in tokens:
    sections.require(
      0 <= token <= MAX_INT,
      path,
      f"{sections.shown(token)} is no token id; use 0 or more",
    )


def check(config: sections.Config) -> None:
  """Check the type and the range of every field.

  Raises:
    ConfigError: one line that names the field and says what would be right.
  """
  values: dict[str, Any] = {}
  for path, kind, value in field_types.leaves(config):
    field_types.check_type(path, kind, value)
    if kind is float:
      _check_float(path, value)
    elif kind is int:
      _check_int(path, value)
    values[path] = value

  def range_of(low: int | float, high: int | float, paths: str) -> None:
    for path in paths.split():
      value = values[path]
      at_most = "or more" if high in (MAX_INT, _MAX_FLOAT) else f"to {high:,g}"
      sections.require(
        low <= value <= high,
        path,
        f"{sections.shown(value)} is out of range; use {low:g} {at_most}",
      )

  def holds(path: str, test: Callable[[Any], bool], use: str) -> None:
    message = f"{sections.shown(values[path])} is out of range; use {use}"
    sections.require(test(values[path]), path, message)

  bound = values["algorithm.max_staleness"]
  message = f"{bound} is negative; use 0 (synchronous) or more"
  sections.require(bound >= 0, "algorithm.max_staleness", message)
  holds(
    "algorithm.group_size",
    lambda x: x >= 2,
    "2 or more, which are compared",
  )
  for low, high, paths in (*_INTEGERS, *_NUMBERS):
    range_of(low, high, paths)
  if values["eval.temperature"]:  # 0 is greedy
    range_of(_MIN_TEMPERATURE, _MAX_TEMPERATURE, "eval.temperature")
  for name in ("prefill_buckets", "window_buckets"):
    path = f"rollout.{name}"
    buckets = values[path]
    sections.require(
      len(buckets) <= _MAX_BUCKETS,
      path,
      f"{len(buckets)} buckets, each of which is a program to compile; use at"
      f" most {_MAX_BUCKETS}",
    )
    for bucket in buckets:
      _check_int(path, bucket)
  _check_stops(values["rollout.stop"], values["rollout.stop_token_ids"])
  for path in ("model.compute_dtype", "rollout.dtype"):
    sections.require_one_of(path, values[path], DTYPES)
  path = "model.lora.base_dtype"
  sections.require_one_of(path, values[path], lora_section.BASE_DTYPES)
  # A decay that rounds to 1 in float32 would leave the statistics at 0.
  holds(
    "critic.normalize_decay",
    lambda x: 0 <= x < 1 and _float32(x) < 1,
    "0 (normalises nothing) or more, and less than 1 in float32",
  )
  holds(
    "preference.label_smoothing",
    lambda x: 0 <= x < 0.5,
    "0 or more, and less than 0.5",
  )
  for section in _OPTIMIZERS:
    for low, high, names in _OPTIMIZER:
      for name in names.split():
        range_of(low, high, section + name)
    for name in ("b1", "b2"):
      # A value that rounds to 1 in float32 would lead to a division by zero.
      holds(
        section + name,
        lambda x: 0 <= x < 1 and _float32(x) < 1,
        "0 or more, and less than 1 in float32",
      )
    rate = values[section + "learning_rate"]
    decay = values[section + "weight_decay"]
    sections.require(
      rate * decay <= 1,
      section + "weight_decay",
      f"{decay:g} at a learning rate of {rate:g} removes more than the whole"
      " weight at each update; use less",
    )
    sections.require_one_of(
      section + "state_dtype", values[section + "state_dtype"], DTYPES
    )
  # Checked last, because the error about a field's own range says more.
  for path, kind, value in field_types.leaves(config):
    if kind is float:
      _check_float32(path, value)
