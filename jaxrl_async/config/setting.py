"""A setting, stated once: its default, and all that is known of it.

A field of a section is made by `setting`, and a section by `section`. The text
under a field says what it is, with its unit. `fields` walks over all of them.
What holds between settings is in `rules`.
"""

from collections.abc import Callable
import dataclasses
import threading
from typing import Any

# Counters on devices, in numpy and in Optax have 32 bits.
MAX_INT = 2**31 - 1
# Devices hold settings as float32 and flush smaller numbers to 0.
MIN_FLOAT, MAX_FLOAT = 1.2e-38, 3.4e38
# Logits differ by less than 1e4. Division by a smaller temperature overflows,
# or loses their differences beyond the 24 bits of float32. Division by a larger
# one leaves no difference at all.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
# The kernel's timers and all waits accept this; a longer timeout overflows.
MAX_TIMEOUT_S = 1e9
MAX_REWARD_TIMEOUT_S = 86_400.0
MAX_REWARD_RETRIES = 1_000
# A group's deadline is the sum of its scores' deadlines.
MAX_GROUP = 2**16
assert MAX_GROUP * MAX_REWARD_TIMEOUT_S < threading.TIMEOUT_MAX
assert MAX_TIMEOUT_S < threading.TIMEOUT_MAX
MAX_ITEMS = 100_000  # questions of an evaluation
MAX_SAMPLES = 4_096  # answers to each of them
MAX_STOPS = 16  # each is looked for in every completion
MAX_STOP_TOKENS = 8  # the engine compares each token with so many
MAX_BUCKETS = 64  # each of them is a program to compile
# All examples are made before the first step. A split has 4 million questions.
MAX_EXAMPLES = 1_000_000
DTYPES = ("float32", "bfloat16")

# Reasons that several settings share: why they may differ when a run goes on.
IN_THE_LOSS = "read when a batch is trained; nothing stored depends on it"
MEMORY = "decides memory and speed of a train step, not what it computes"
PROGRAM = "which program generates; logprobs are recorded as they are drawn"
SUPERVISION = "supervision and persistence of this start"
EACH_UPDATE = "enters each update anew"
# And why they may not.
QUESTIONS = "stored prompts, and the order of those to come, depend on it"
WARM_START = "the stored weights came of it"
HELD_OUT = "accuracies before and after could not be compared"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What is known of a setting.

  Attributes:
    low: smallest value.
    high: largest value.
    below: values that float32 rounds to this or more are refused.
    also: values out of that range which are allowed.
    choices: the values of a text, or of a tuple's entries, which then differ
      from each other; () allows any.
    most: how many entries a tuple may have.
    directory: it is a directory to read, or ""; and what to do if there is
      none of that name.
    entries: it is a ConfigDict of such sections, by name.
    needs: the fields that each of these has to have.
    free: why it may differ when a run goes on from a checkpoint.
    fixed: why it may not.
    fixed_with_groups: why it may not if the checkpoint holds groups that were
      not trained.
    of_answers: whether the answers of an evaluation, or their scores, depend on
      it.
    unread: returns why nothing reads it, "" if something does; called with its
      section and the config. Of several reasons the first counts.
  """

  low: int | float | None = None
  high: int | float | None = None
  below: int | float | None = None
  also: tuple[int | float, ...] = ()
  choices: tuple[str, ...] = ()
  most: int | None = None
  directory: str = ""
  entries: type | None = None
  needs: tuple[str, ...] = ()
  free: str = ""
  fixed: str = ""
  fixed_with_groups: str = ""
  of_answers: bool = False
  unread: tuple[Callable[[Any, Any], str], ...] = ()


def setting(default: Any, **known: Any) -> Any:
  """Return the field of a setting.

  Args:
    default: its value if nobody gives one; a class is called for it.
    **known: see `Setting`.
  """
  metadata = {"setting": Setting(**known)}
  if isinstance(default, type):
    return dataclasses.field(default_factory=default, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


def section(factory: Callable[[], Any], **known: Any) -> Any:
  """Return the field of a section.

  Args:
    factory: makes it.
    **known: of all its settings, see `Setting`. Its `free` is that of settings
      without a reason of their own, and its `fixed` that of all.
  """
  metadata = {"setting": Setting(**known)}
  return dataclasses.field(default_factory=factory, metadata=metadata)
