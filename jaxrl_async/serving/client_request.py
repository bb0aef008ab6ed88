"""What a client asks of the engine, what it is told, and why it is refused."""

import dataclasses
import enum

from jaxtyping import Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.engine import sampling

MAX_SEED = 2**31 - 1


class QueueFull(RuntimeError):
  """There is no room for another request.

  Attributes:
    retry_after_s: when there will probably be room.
  """

  def __init__(self, message: str, retry_after_s: float):
    super().__init__(message)
    self.retry_after_s = retry_after_s


class TooLong(ValueError):
  """Prompt and completion do not fit into the cache."""


class Draining(RuntimeError):
  """Nothing is taken any more: the server is shutting down."""


class RequestError(enum.StrEnum):
  """Why a request ended without being finished."""

  DEADLINE = "the request's deadline passed"
  SHUT_DOWN = "the server is shutting down"
  FAILED = "the engine failed"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
  """What a client wants written.

  Choice c of the request continues prompt c // num_choices.

  Attributes:
    prompts: token ids of each, at least one.
    max_tokens: of each choice, at least one.
    settings: how tokens are drawn.
    seed: with the number of the choice, counted over all prompts, all that the
      randomness is a function of.
    num_choices: completions of each prompt.
    stop_strings: the first of them to be written ends a choice; its tokens
      are part of the completion, its text is not.
    deadline_s: on the clock of `time.monotonic`.
    client: who asks, as far as anybody knows; slots are shared between
      clients.
  """

  prompts: tuple[Int[np.ndarray, "_"], ...]
  max_tokens: int
  settings: sampling.SamplingSettings
  seed: int
  num_choices: int = 1
  stop_strings: tuple[str, ...] = ()
  deadline_s: float
  client: str = ""

  @property
  def all_choices(self) -> int:
    """Completions of all prompts together."""
    return len(self.prompts) * self.num_choices

  def prompt_of(self, choice: int) -> Int[np.ndarray, "T"]:
    """What that choice continues."""
    return self.prompts[choice // self.num_choices]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
  """What was written of one choice since its last update.

  Attributes:
    choice: which of them.
    tokens, logprobs, policy_versions: may be empty in the last update.
    finish_reason: given in the choice's last update.
    error: a `RequestError`. It ends all choices that have not finished; no
      update of the request follows.
  """

  choice: int
  tokens: Int[np.ndarray, "T"]
  logprobs: Float[np.ndarray, "T"]
  policy_versions: Int[np.ndarray, "T"]
  finish_reason: types.FinishReason | None = None
  error: str | None = None
