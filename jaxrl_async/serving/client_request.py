"""Client requests, the updates that answer them, and reasons for refusals."""

import dataclasses
import enum

from jaxtyping import Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.engine import sampling
from jaxrl_async.text import guides as guides_lib

MAX_SEED = 2**31 - 1


class QueueFull(RuntimeError):
  """There is no room for a further request now."""


class TooLong(ValueError):
  """A prompt and its completion do not fit into the cache."""


class Draining(RuntimeError):
  """The server is shutting down and accepts no further requests."""


class RequestError(enum.StrEnum):
  """Why a request ended without being finished."""

  DEADLINE = "the request's deadline passed"
  SHUT_DOWN = "the server is shutting down"
  FAILED = "the engine failed"
  GUIDE = "the grammar of the request took too much to follow"
  OVER = "the session is over, or may make no further call"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
  """A client's request for completions of one or more prompts.

  Choice c of the request continues prompt c // num_choices.

  Attributes:
    prompts: token ids of each prompt. There is at least one prompt.
    max_tokens: the largest number of tokens of each choice, at least one.
    settings: the sampling settings.
    seed: seed of the sampling. The randomness of a choice depends only on the
      seed and on the choice's number, counted over all prompts.
    num_choices: completions of each prompt.
    stop_strings: a choice ends when one of these has been generated. The
      completion contains the tokens of that string but not its text.
    deadline_s: when the request expires, on the clock of `time.monotonic`.
    client: name of the client, if it is known. Slots are shared fairly between
      clients.
    adapter: number of the adapter that continues the prompts; 0 is the policy.
    guide: of which each choice gets a copy; None allows all tokens.
  """

  prompts: tuple[Int[np.ndarray, "_"], ...]
  max_tokens: int
  settings: sampling.SamplingSettings
  seed: int
  num_choices: int = 1
  stop_strings: tuple[str, ...] = ()
  deadline_s: float
  client: str = ""
  adapter: int = 0
  guide: guides_lib.Guide | None = None

  @property
  def all_choices(self) -> int:
    """Number of completions of all prompts together."""
    return len(self.prompts) * self.num_choices

  def prompt_of(self, choice: int) -> Int[np.ndarray, "T"]:
    """Return the token ids of the prompt that a choice continues."""
    return self.prompts[choice // self.num_choices]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
  """The tokens of one choice that were generated since its last update.

  Attributes:
    choice: number of the choice.
    tokens: ids of the new tokens. The arrays may be empty in the last update.
    logprobs: logprob of each new token.
    policy_versions: version of the weights that sampled each new token.
    num_cached: tokens of its prompt that did not have to be prefilled.
    finish_reason: why the choice ended; set only in its last update.
    error: a `RequestError`. It ends all unfinished choices of the request, and
      no further update follows.
  """

  choice: int
  tokens: Int[np.ndarray, "T"]
  logprobs: Float[np.ndarray, "T"]
  policy_versions: Int[np.ndarray, "T"]
  num_cached: int = 0
  finish_reason: types.FinishReason | None = None
  error: str | None = None
