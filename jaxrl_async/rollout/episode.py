"""Episodes: generators that yield prompts and receive completions.

    def episode(prompt):
      completion = yield prompt.tokens          # first turn
      completion = yield environment(completion)  # next turn
      # returning ends the trajectory

The tokens that an episode yields are appended to the trajectory with a False
`loss_mask`. The completion that the policy generates after them is sent into
the generator. With `Anew`, another trajectory of the same member begins
instead. With `Until`, the completion may end earlier. An episode may be an
async generator, and may take a `Context` as its second argument:

    async def episode(prompt, context):
      completion = yield prompt.tokens
      found = await context.call(search, context.tokenizer.decode(completion))
      yield context.tokenizer.encode(found)

A group fails if one of its episodes raises, yields no tokens or returns before
its first turn. `environment.Environment` runs the episodes.
"""

from collections.abc import (
  AsyncGenerator,
  Awaitable,
  Callable,
  Generator,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np

from jaxrl_async import types
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.rollout import messages
from jaxrl_async.storage import item_json
from jaxrl_async.text import stop_strings


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Anew:
  """The prompt of a turn that does not follow the tokens before it.

      completion = yield episode.Anew(tokens)

  What the policy has been shown and has written so far is put aside as a
  finished branch of the member, and a new branch begins with these tokens. They
  may be any, also what the policy has written in earlier branches: that is
  shown to the policy here and is not learned from again, so that each token
  that was written is learned from once. What is yielded after that without
  `Anew` is appended to the new branch.

  As the first prompt of an episode it is the same as its tokens alone.

  A branch may be as long as a trajectory that does not branch. The turns of all
  branches of a member count for `task.max_turns`. If a new branch has no room
  for its prompt, or would be one more than `MAX_BRANCHES`, the episode ends and
  the last branch has the finish reason length.

  Attributes:
    tokens: the whole prompt, an array of token ids or what becomes one.
  """

  tokens: Any


class Until:
  r"""The prompt of a turn that may end earlier than the run says.

      completion = yield episode.Until(tokens, max_tokens=8, stop=("\n",))

  A turn that has `max_tokens` tokens has the finish reason length. One that a
  text or a token of the turn ends has the reason stop, and its completion holds
  that.

  With a `guide`, which needs the extra of that name, the completion follows a
  grammar in the notation of llguidance. Tokens at which the grammar changes the
  policy's distribution (`sampling.is_steered`) are not learned from. The group
  fails if the grammar cannot be read.

  Attributes:
    shown: the tokens, or an `Anew` with them.
    ends: what ends the turn, besides what ends all turns of the run.
  """

  def __init__(
    self,
    shown: Any,
    *,
    max_tokens: int = 0,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    guide: str = "",
  ):
    """Show tokens, or an `Anew`; see `messages.Ends` for the rest.

    Raises:
      ValueError: a value is out of range, or a guide is no text.
    """
    if not isinstance(guide, str):
      raise ValueError(f"guide {guide!r:.100} is not the text of a grammar")
    self.shown = shown
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    self.ends = messages.Ends(max_tokens, strings, tuple(stop_token_ids), guide)
    if max_tokens < 0:
      raise ValueError(f"max_tokens {max_tokens} is less than 0")
    if not stop_strings.are_allowed(self.ends.stop):
      raise ValueError(f"stop {self.ends.stop!r}: one can never be found")
    ids = self.ends.stop_token_ids
    if len(ids) > MAX_STOP_TOKENS or not all(0 <= i < 2**31 for i in ids):
      raise ValueError(
        f"stop_token_ids {ids!r}: at most {MAX_STOP_TOKENS} token ids"
      )


# Without a limit an episode that begins anew for ever would not end.
MAX_BRANCHES = 64
MAX_STOP_TOKENS = setting_lib.MAX_STOP_TOKENS  # of a turn
Shown = np.ndarray | Anew | Until  # what an episode yields
Turns = Generator[Shown, np.ndarray, None]
AsyncTurns = AsyncGenerator[Shown, np.ndarray]
# A function of a prompt and, if it wants one, of a context.
Episode = Callable[..., Turns | AsyncTurns]
# Makes a call with a deadline and retries, and returns what came of it.
MakeCall = Callable[..., Awaitable[tuple[types.EventKind, str]]]


class EpisodeError(RuntimeError):
  """An episode failed, and its group with it.

  If the episode raised an exception, it is the `__cause__`.
  """


class CallError(RuntimeError):
  """A call of an episode failed: it raised, took too long or cannot be stored.

  Attributes:
    reason: one line. It begins with "error:", "timeout:", "died:" or
      "unstorable:".
  """

  def __init__(self, reason: str):
    """Keep the reason."""
    super().__init__(reason)
    self.reason = reason


class Context:
  """What an episode may use besides its prompt.

  The results of calls are recorded in the trajectory, the first one of a member
  that has several. A run that goes on from a
  checkpoint and a replay run the episode again from its beginning and give it
  the recorded results.

  Threads: the episode's. Any thread may read `events`.

  Attributes:
    tokenizer: `text.tokenizer.Tokenizer` of the run.
    template: `text.chat_template.ChatTemplate` of the run; None if the model
      has none.
    temperature: with which the run samples, except in evaluations.
    member: index of the trajectory within its group.
    num_turns: turns that the policy has written so far, in all branches.
    written: the turn that the policy has written last; None before the first.
    limit: a trajectory ends when it has this many tokens, and so does each
      branch. The prompt of `Anew` has to be shorter than that.
    max_turns: turns that the policy may write in all; 0 is any number.
    vocab_size: token ids are smaller than that.
    room: tokens by which the trajectory may still grow, the prompt of the next
      turn included. A prompt has to be shorter than that. It is 0 after the
      last turn that `task.max_turns` allows.
  """

  def __init__(
    self,
    *,
    member: int = 0,
    limit: int,
    tokenizer: Any = None,
    template: Any = None,
    max_turns: int = 0,
    vocab_size: int = 2**31,
    temperature: float = 1.0,
    make_call: MakeCall | None = None,
    may_call: bool = True,
    recorded: Iterable[types.Event] = (),
  ):
    """Create the context of a trajectory that has not begun.

    Args:
      limit: a trajectory ends when it has this many tokens.
      max_turns: it ends after this many turns; 0 is any number.
      vocab_size: token ids are smaller than that.
      make_call: makes a call that is not recorded; None makes none.
      may_call: whether the episode can wait for calls.
      recorded: events of an earlier run of the same episode.
    """
    self.tokenizer = tokenizer
    self.template = template
    self.member = member
    self.num_turns = 0
    self.written: Written | None = None
    self.limit = limit
    self.max_turns = max_turns
    self.vocab_size = vocab_size
    self.temperature = temperature
    self._length = 0
    self._ends = messages.Ends()
    self._make_call = make_call
    self._may_call = may_call
    self._num_calls = 0
    self._calls = {event.number: event for event in recorded if event.is_call}
    self._rewards: list[types.Event] = []

  @property
  def room(self) -> int:
    """Tokens by which the trajectory may still grow."""
    if self.max_turns and self.num_turns >= self.max_turns:
      return 0
    return max(0, self.limit - self._length)

  @property
  def events(self) -> tuple[types.Event, ...]:
    """The calls in the order in which they were begun, and the rewards."""
    calls = self._calls.copy()
    return *(calls[number] for number in sorted(calls)), *self._rewards

  def call(
    self,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 10.0,
    retries: int = 0,
  ) -> Awaitable[Any]:
    """Call a function, or take the recorded result of this call.

    Only async generators can await it.

    Args:
      function: a coroutine function, which is awaited on the event loop of the
        episodes, or a function of an importable module, which is run in another
        process.
      arguments: of the function.
      timeout_s: after which an attempt is given up. It begins when a process
        has taken the call up.
      retries: further attempts after one that failed.

    Returns:
      What the function returns, as it is after it was stored.

    Raises:
      CallError: the function raised, took too long, ended its process, or
        returned what cannot be stored (`storage.item_json`) or is too large.
        This is recorded as well.
    """
    if not self._may_call:
      raise EpisodeError("only an async generator can call functions")
    number = self._num_calls
    self._num_calls += 1
    return self._call(number, function, arguments, timeout_s, retries)

  async def _call(
    self,
    number: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_s: float,
    retries: int,
  ) -> Any:
    event = self._calls.get(number)
    if event is None:
      turn = self.num_turns
      if self._make_call is None:
        raise EpisodeError(f"made call {number}, which is not in the record")
      kind, text = await self._make_call(
        function, arguments, timeout_s=timeout_s, retries=retries
      )
      event = types.Event(kind.value, turn, number, text)
      self._calls[number] = event
    if event.kind == types.EventKind.ERROR:
      raise CallError(event.text)
    return item_json.decode(json.loads(event.text))

  def reward(
    self, value: int | float, *, parts: Mapping[str, float] | None = None
  ) -> None:
    """Add to the reward of the turn that the policy has just written.

    Args:
      value: what is added.
      parts: named numbers, which are recorded beside it and not learned from.
        Those of a name add up.

    Raises:
      ValueError: there is no such turn, a number is not finite, or the name of
        a part begins with `types.BUDGET_PARTS`, which is not for others.
    """
    given = {name: float(part) for name, part in (parts or {}).items()}
    value = float(value)
    for name in given:
      if name.startswith(types.BUDGET_PARTS):
        raise ValueError(
          f"the part {name!r} is given: names that begin with"
          f" {types.BUDGET_PARTS!r} are those of the episode budgets"
        )
    if not self.num_turns:
      raise ValueError("a reward was given before the first turn was written")
    for what, number in {"": value, **given}.items():
      if not math.isfinite(number):
        raise ValueError(
          f"the reward {what and what + ' '}{number} is not finite"
        )
    self._record(types.EventKind.REWARD, value)
    if given:
      self._record(types.EventKind.PARTS, given)

  def cut(self, parts: Mapping[str, float]) -> None:
    """Say that the turn just written is cut, and what its thought is like.

    The branches that follow then only measure it (`types.learned`). The episode
    `budgets` calls this, and the rewards of a run with it expect it.

    Args:
      parts: named numbers as those of `reward`, whose names begin with
        `types.BUDGET_PARTS`; one is `types.THOUGHT_TOKENS`.
    """
    self._record(types.EventKind.PARTS, dict(parts))

  def _record(self, kind: types.EventKind, value: Any) -> None:
    event = types.Event(kind.value, self.num_turns - 1, -1, json.dumps(value))
    self._rewards.append(event)

  def shown(self, answer: "Answer") -> None:
    """Count the tokens of a prompt that was yielded."""
    assert answer.tokens is not None
    self._length = len(answer.tokens) + (0 if answer.is_anew else self._length)
    self._ends = answer.ends

  def wrote(self, written: "Written") -> None:
    """Keep a turn that the policy has written."""
    self._length += len(written.tokens)
    # The same when the episode runs again, where the reason is not known.
    is_full = len(written.tokens) == self._ends.max_tokens
    is_cut = is_full or self._length >= self.limit
    reason = types.FinishReason.EOS
    if is_cut and not self._has_end(written.tokens):
      reason = types.FinishReason.LENGTH
    self.written = written._replace(finish_reason=reason)
    self.num_turns += 1

  def _has_end(self, tokens: np.ndarray) -> bool:
    """Return whether tokens end a turn that has room for more."""
    tokenizer, ends = self.tokenizer, self._ends
    if tokenizer is None:
      return False
    if int(tokens[-1]) in (*tokenizer.end_tokens, *ends.stop_token_ids):
      return True
    check = stop_strings.check_of(tokenizer, ends.stop)
    return check is not None and check(tokens) is not None


def single_turn(prompt: types.Prompt) -> Turns:
  """Yield the prompt and end after one completion."""
  yield prompt.tokens


def check_tokens(tokens: Any, vocab_size: int) -> np.ndarray:
  """Return what an episode has yielded, if it is the prompt of a turn.

  Raises:
    EpisodeError: it is empty, or no array of token ids.
  """
  try:
    array = np.asarray(tokens)
  except Exception as error:  # an object of the user may raise anything
    raise EpisodeError(f"yielded {_shown(tokens)}, not token ids") from error
  if array.ndim != 1:
    raise EpisodeError(f"yielded {_shown(tokens)}, not an array of token ids")
  if not array.size:
    raise EpisodeError("yielded a turn without tokens")
  if array.dtype.kind not in "iu":
    raise EpisodeError(f"yielded {_shown(tokens)}, not integers")
  least, most = int(array.min()), int(array.max())
  if least < 0 or most >= vocab_size:
    raise EpisodeError(
      f"yielded token {least if least < 0 else most}, and the vocabulary has"
      f" {vocab_size}"
    )
  return array


def _shown(value: Any) -> str:
  if isinstance(value, np.ndarray):
    return f"an array of {value.dtype} with shape {value.shape}"
  return f"{type(value).__name__} {value!r:.60}"


def advance(turns: Turns, written: np.ndarray | None) -> Any:
  """Send a completion to an episode and return what it yields next.

  None starts the first turn. None is returned if the episode has ended.

  Raises:
    EpisodeError: the episode raised, or returned before its first turn.
  """
  is_first = written is None
  try:
    # Before the first turn a generator takes None.
    tokens = turns.send(written)  # pyright: ignore[reportArgumentType]
  except StopIteration as end:
    if is_first:
      raise EpisodeError("returned before its first turn") from end
    return None
  # User code may raise anything. It counts as a failed group, never as a score.
  except Exception as error:
    raise failure_of(error) from error
  return not_none(tokens)


def not_none(tokens: Any) -> Any:
  """Return what was yielded; None stands for the end of an episode.

  Raises:
    EpisodeError: it is None.
  """
  if tokens is None:
    raise EpisodeError("yielded None, not token ids")
  return tokens


def no_room(first: np.ndarray, limit: int) -> EpisodeError:
  """Return the failure of an episode whose first prompt is too long."""
  return EpisodeError(
    f"its first turn of {len(first)} tokens leaves nothing of {limit}"
  )


def failure_of(error: BaseException) -> EpisodeError:
  """Return the failure of an episode that raised this."""
  if isinstance(error, EpisodeError | CallError):
    return EpisodeError(str(error))
  return EpisodeError(repr(error))


class First:
  """The first prompt of an episode, from which trajectories begin.

  The trajectories share its arrays, which are therefore read-only.
  """

  def __init__(self, tokens: np.ndarray):
    """Make the arrays."""
    n = len(tokens)
    self._arrays = (
      np.array(tokens, np.int32),
      np.zeros(n, bool),
      np.zeros(n, np.float32),
      np.full(n, -1, np.int32),
    )
    for array in self._arrays:
      array.setflags(write=False)
    self._content = self._arrays[0].tobytes()

  def is_equal(self, tokens: np.ndarray) -> bool:
    """Return whether these are the same tokens."""
    return np.asarray(tokens, np.int32).tobytes() == self._content

  def trajectory(self, member: int) -> types.Trajectory:
    """Return a trajectory that holds only the prompt."""
    tokens, loss_mask, behavior_logprobs, policy_versions = self._arrays
    return types.Trajectory(
      member=member,
      tokens=tokens,
      loss_mask=loss_mask,
      behavior_logprobs=behavior_logprobs,
      policy_versions=policy_versions,
    )


_NOTHING = First(np.zeros(0, np.int32))


def nothing(member: int) -> types.Trajectory:
  """Return the trajectory of an episode that has shown no prompt yet."""
  return _NOTHING.trajectory(member)


def num_turns(trajectory: types.Trajectory) -> int:
  """Return the number of turns that the policy has written, or begun."""
  mask = trajectory.loss_mask
  return int(np.count_nonzero(mask[1:] & ~mask[:-1]))


def extend(
  trajectory: types.Trajectory, tokens: np.ndarray
) -> types.Trajectory:
  """Return the trajectory with the prompt of its next turn appended.

  The result has no finish reason, so that a replica can continue it.
  """
  n = len(tokens)
  return dataclasses.replace(
    trajectory,
    tokens=_and(trajectory.tokens, np.asarray(tokens, np.int32)),
    loss_mask=_and(trajectory.loss_mask, np.zeros(n, bool)),
    behavior_logprobs=_and(
      trajectory.behavior_logprobs, np.zeros(n, np.float32)
    ),
    policy_versions=_and(trajectory.policy_versions, np.full(n, -1, np.int32)),
    finish_reason=None,
  )


def _and(array: np.ndarray, more: np.ndarray) -> np.ndarray:
  return np.concatenate([array, more], dtype=array.dtype)


class Written(NamedTuple):
  """What the policy has written in a turn.

  Attributes:
    tokens: ids of the tokens.
    logprobs: of each of them, under the distribution from which it was sampled.
    policy_versions: of the weights that sampled each of them.
    finish_reason: why the turn ended. In a context a stop counts as the end of
      sequence, because the record does not tell them apart.
    num_cached: tokens of the trajectory that did not have to be prefilled for
      it. The record does not have it.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  policy_versions: np.ndarray
  finish_reason: types.FinishReason | None
  num_cached: int = 0


def last_completion(
  trajectory: types.Trajectory, *more: types.Trajectory
) -> Written:
  """Return a copy of what the policy generated in the last turn.

  Args:
    trajectory: in which the turn was begun.
    more: what the policy wrote in this turn after it.
  """
  start = trajectory.turn_start
  parts = trajectory, *more
  last = parts[-1]

  def joined(name: str) -> np.ndarray:
    first, *others = [getattr(part, name) for part in parts]
    return np.concatenate([first[start:], *others])

  return Written(
    joined("tokens"),
    joined("behavior_logprobs"),
    joined("policy_versions"),
    last.finish_reason,
  )


class RecordedTurn(NamedTuple):
  """A prompt of a trajectory, and the completion if that has ended.

  Attributes:
    is_anew: whether it is the first one of a branch that follows another.
  """

  prompt: np.ndarray
  completion: Written | None
  is_anew: bool = False


def recorded_turns(
  branches: Iterable[types.Trajectory],
) -> Iterator[RecordedTurn]:
  """Yield the turns of a member's branches, the last of which may go on."""
  for trajectory in branches:
    mask, tokens = trajectory.loss_mask, trajectory.tokens
    if not len(tokens):
      return
    edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    runs = np.split(np.arange(len(tokens)), edges)
    for at in range(0, len(runs), 2):
      is_last = at + 2 >= len(runs)
      has_ended = not is_last or trajectory.finish_reason is not None
      completion = None
      if at + 1 < len(runs) and has_ended:
        own = runs[at + 1]
        completion = Written(
          tokens[own],
          trajectory.behavior_logprobs[own],
          trajectory.policy_versions[own],
          # That of earlier turns is not kept.
          trajectory.finish_reason if is_last else types.FinishReason.EOS,
        )
      is_anew = at == 0 and trajectory.member >= types.MEMBERS
      yield RecordedTurn(tokens[runs[at]], completion, is_anew)


class Answer(NamedTuple):
  """What an episode answers: its next prompt, or None if it has ended.

  The prompt is empty if a recorded trajectory stopped within a completion.

  Attributes:
    is_anew: whether a new branch begins with the prompt.
    ends: what ends the turn, besides what ends all turns.
  """

  tokens: np.ndarray | None
  is_anew: bool = False
  ends: messages.Ends = messages.Ends()


def check_recorded(answer: Answer, turn: RecordedTurn) -> Answer:
  """Check that an episode that runs again has shown the recorded prompt.

  Returns:
    The answer of an episode whose completion goes on.

  Raises:
    EpisodeError: it has shown another one, or ended.
  """
  shown = answer.tokens
  if (
    shown is None
    or answer.is_anew != turn.is_anew
    or not np.array_equal(turn.prompt, shown)
  ):
    raise EpisodeError("yielded other prompts than were recorded")
  return Answer(shown[:0], ends=answer.ends)


def followed(trajectory: types.Trajectory, answer: Answer) -> types.Trajectory:
  """Return the trajectory in which an episode that goes on is continued.

  That is the same one with the next prompt, or the member's next branch.
  """
  assert answer.tokens is not None
  if not answer.is_anew:
    return extend(trajectory, answer.tokens)
  return First(answer.tokens).trajectory(trajectory.member + types.MEMBERS)
