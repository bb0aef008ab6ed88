"""Runs the episodes of a run: those that answer at once, and those that wait.

A `Conversation` is the episode of one member of a group. That of a sync
generator answers in the thread that sends a completion. That of an async
generator answers later: it runs on the event loop of the episodes, and the
conversation is put into `Environment.answers` when it has answered. There can
be thousands of them.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
import contextlib
import inspect
import queue
import time
from typing import Any, Protocol, runtime_checkable

from jaxrl_async import types
from jaxrl_async.rollout import calls as calls_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.text import guides as guides_lib

# An episode on the event loop is cancelled when its time is up. One that holds
# the loop is given up so many seconds later.
_GRACE_S = 5.0
_CLOSE_S = 5.0  # for what an episode does when it is closed
_LOOK_S = 1.0
_EVERY_TOKEN = 2**31


@runtime_checkable
class Conversation(Protocol):
  """The episode of one member of a group.

  Attributes:
    key: index of the group, and the member. Its owner sets the number of each
      branch that it begins.
    context: what the episode gets besides its prompt, if it wants that.
  """

  key: tuple[int, int]
  context: episode_lib.Context | None

  def begin(self) -> episode_lib.Answer | None:
    """Go to the first prompt, or where the recorded trajectory stopped.

    Returns:
      The answer; None if it comes later.

    Raises:
      EpisodeError: the episode failed, or it has shown other prompts than were
        recorded.
    """
    ...

  def send(self, written: episode_lib.Written) -> episode_lib.Answer | None:
    """Send a completion; otherwise as `begin`."""
    ...

  def taken(self) -> episode_lib.Answer:
    """Return the answer that has come.

    Raises:
      EpisodeError: as in `begin`.
    """
    ...

  def close(self) -> None:
    """End the episode, and the calls that it waits for."""
    ...


class Environment:
  """The episodes of a run.

  Threads: any thread may call any method. Each conversation belongs to one
  thread at a time.

  Attributes:
    answers: conversations that have answered later, in that order.
    is_single_turn: whether the episodes are those of `episode.single_turn`.
  """

  def __init__(
    self,
    episode: episode_lib.Episode = episode_lib.single_turn,
    *,
    tokenizer: Any = None,
    template: Any = None,
    vocab_size: int = _EVERY_TOKEN,
    temperature: float = 1.0,
    max_turns: int = 0,
    timeout_s: float = 0.0,
    num_workers: int = 1,
    is_replay: bool = False,
  ):
    """Start nothing yet: threads and processes start when they are needed.

    Args:
      episode: the function; whether it is async and whether it wants a context
        is found from it.
      tokenizer: for contexts.
      template: for contexts.
      vocab_size: an episode that shows a token beyond it fails.
      temperature: for contexts.
      max_turns: a trajectory ends after this many turns; 0 is any number.
      timeout_s: an async episode fails whose answers take longer in all; 0 lets
        them take their time.
      num_workers: processes that make calls.
      is_replay: no calls are made: all of them are recorded.
    """
    self.answers: queue.SimpleQueue[Conversation] = queue.SimpleQueue()
    self._episode = episode
    self.is_single_turn = episode is episode_lib.single_turn
    self._is_async = is_async(episode)
    self._wants_context = wants_context(episode)
    self._tokenizer = tokenizer
    self._template = template
    self._vocab_size = vocab_size
    self._temperature = temperature
    self.max_turns = max_turns
    self.timeout_s = timeout_s
    self._loop = calls_lib.Loop("episodes")
    self._calls = calls_lib.Calls(num_workers)
    self._make_call = None if is_replay else self._calls.make
    # Those that have to answer, in the order in which they were asked.
    self.waiting: dict[_Later, None] = {}
    self._look_s = time.monotonic()

  def open(
    self,
    prompt: types.Prompt,
    *,
    key: tuple[int, int],
    limit: int,
    recorded: Sequence[types.Trajectory] = (),
    events: Iterable[types.Event] = (),
  ) -> Conversation:
    """Return the conversation of a member.

    Args:
      prompt: of the group.
      key: index of the group, and the member.
      limit: a trajectory ends when it has this many tokens.
      recorded: what there is of the member's branches.
      events: the calls that its episode has made before, or in the run that is
        replayed.

    Raises:
      EpisodeError: the episode raised.
    """
    context = None
    if self._wants_context:
      context = episode_lib.Context(
        member=key[1],
        limit=limit,
        tokenizer=self._tokenizer,
        template=self._template,
        max_turns=self.max_turns,
        vocab_size=self._vocab_size,
        temperature=self._temperature,
        make_call=self._make_call,
        may_call=self._is_async,
        recorded=events,
      )
    kind = _Later if self._is_async else _AtOnce
    return kind(self, prompt, key, context, recorded)

  @property
  def num_waiting(self) -> int:
    """The number of conversations that have to answer."""
    return len(self.waiting)

  def settled(self, answer: episode_lib.Answer | None) -> episode_lib.Answer:
    """Return an answer, after waiting for it if it comes later.

    Nothing else may be awaited.

    Raises:
      EpisodeError: the episode failed.
    """
    while answer is None:
      self.fail_late()
      with contextlib.suppress(queue.Empty):
        answer = self.answers.get(timeout=_LOOK_S).taken()
    return answer

  def may_go_on(
    self,
    branches: Sequence[types.Trajectory],
    answer: episode_lib.Answer,
    limit: int,
  ) -> bool:
    """Return whether a member may have another turn, with this prompt.

    An empty prompt continues a turn that was begun.

    Args:
      branches: of the member so far, with a turn at least.
      answer: what its episode shows next.
      limit: a branch ends when it has this many tokens.
    """
    more = answer.tokens
    assert more is not None
    begun = 0 if answer.is_anew else len(branches[-1].tokens)
    if begun + len(more) >= limit:
      return False
    if answer.is_anew and len(branches) >= episode_lib.MAX_BRANCHES:
      return False
    if not self.max_turns or not len(more):
      return True
    return sum(map(episode_lib.num_turns, branches)) < self.max_turns

  def fail_late(self) -> None:
    """Let those fail that hold the event loop longer than they may."""
    now_s = time.monotonic()
    if not self.timeout_s or now_s - self._look_s < _LOOK_S:
      return
    self._look_s = now_s
    for conversation in list(self.waiting):
      if conversation.is_late(now_s):
        conversation.fail(_late(self.timeout_s))

  def close(self, timeout_s: float) -> None:
    """End all episodes and calls.

    Raises:
      TimeoutError: they did not end in time.
    """
    self._loop.close(timeout_s)
    self._calls.close(timeout_s)

  def _generator(
    self, prompt: types.Prompt, context: episode_lib.Context | None
  ) -> Any:
    """Call the episode function."""
    arguments = (prompt,) if context is None else (prompt, context)
    try:
      return self._episode(*arguments)
    # User code may raise anything, as in `episode.advance`.
    except Exception as error:
      raise episode_lib.failure_of(error) from error

  def _answer(
    self, shown: Any, context: episode_lib.Context | None, *, is_first: bool
  ) -> episode_lib.Answer:
    """Return the answer of an episode that has yielded this."""
    if self.is_single_turn:
      return episode_lib.Answer(shown)
    ends = messages.Ends()
    if isinstance(shown, episode_lib.Until):
      shown, ends = shown.shown, shown.ends
      self._check_guide(ends.guide)
    is_anew = isinstance(shown, episode_lib.Anew)
    tokens = episode_lib.check_tokens(
      shown.tokens if is_anew else shown, self._vocab_size
    )
    answer = episode_lib.Answer(tokens, is_anew and not is_first, ends)
    if context is not None:
      context.shown(answer)
    return answer

  def _check_guide(self, grammar: str) -> None:
    """Check that an engine can follow the grammar of a turn.

    Raises:
      EpisodeError: it cannot.
    """
    if not grammar:
      return
    try:
      guides_lib.of(self._tokenizer).guide(grammar)
    except ImportError as error:
      raise episode_lib.EpisodeError(
        "a guide needs the extra `guided`"
      ) from error
    except ValueError as error:
      raise episode_lib.EpisodeError(f"guide: {error}") from error


def is_async(episode: Callable[..., Any]) -> bool:
  """Return whether an episode is an async generator."""
  return inspect.isasyncgenfunction(episode) or inspect.isasyncgenfunction(
    type(episode).__call__
  )


def wants_context(episode: Callable[..., Any]) -> bool:
  """Return whether an episode takes a context as its second argument.

  That is a second positional parameter that has no value yet.
  """
  try:
    parameters = [*inspect.signature(episode).parameters.values()]
  except (ValueError, TypeError):
    return False
  if len(parameters) < 2:
    return False
  second = parameters[1]
  return (
    second.kind in (second.POSITIONAL_ONLY, second.POSITIONAL_OR_KEYWORD)
    and second.default is second.empty
  )


def _late(timeout_s: float) -> episode_lib.EpisodeError:
  return episode_lib.EpisodeError(
    f"timeout: its answers took longer than {timeout_s:g} s"
    " (task.episode_timeout_s)"
  )


class _AtOnce:
  """A sync generator, which answers in the thread of its caller."""

  __slots__ = "_environment", "_recorded", "_turns", "context", "key"

  def __init__(
    self,
    environment: Environment,
    prompt: types.Prompt,
    key: tuple[int, int],
    context: episode_lib.Context | None,
    recorded: Sequence[types.Trajectory],
  ):
    self.key = key
    self.context = context
    self._environment = environment
    self._recorded = recorded
    self._turns: episode_lib.Turns = environment._generator(prompt, context)

  def begin(self) -> episode_lib.Answer:
    answer = self.send(None)
    for turn in episode_lib.recorded_turns(self._recorded):
      answer = episode_lib.check_recorded(answer, turn)
      if turn.completion is not None:
        answer = self.send(turn.completion)
    self._recorded = ()
    return answer

  def send(self, written: episode_lib.Written | None) -> episode_lib.Answer:
    context = self.context
    if context is not None and written is not None:
      context.wrote(written)
    shown = episode_lib.advance(
      self._turns, None if written is None else written.tokens
    )
    if shown is None:
      return episode_lib.Answer(None)
    return self._environment._answer(shown, context, is_first=written is None)

  def taken(self) -> episode_lib.Answer:
    raise AssertionError("it has answered at once")

  def close(self) -> None:
    """Do nothing: a generator that nobody holds is closed."""


class _Later:
  """An async generator, which runs on the event loop.

  One task of the loop runs the whole episode, because an `async with` of the
  episode may have to be left by the task that has entered it.

  Invariant: whoever takes it out of `Environment.waiting` is the one that
  answers, so that there is one answer to each question.

  Threads: the methods without an underscore belong to the caller's thread, the
  others to the loop's.
  """

  def __init__(
    self,
    environment: Environment,
    prompt: types.Prompt,
    key: tuple[int, int],
    context: episode_lib.Context | None,
    recorded: Sequence[types.Trajectory],
  ):
    self.key = key
    self.context = context
    self._environment = environment
    self._prompt = prompt
    self._recorded = recorded
    self._left_s = environment.timeout_s or None
    self._asked_s = 0.0
    self._sent: asyncio.Queue[episode_lib.Written] = asyncio.Queue()
    self._answer: episode_lib.Answer | episode_lib.EpisodeError | None = None
    self._playing: Any = None

  def begin(self) -> None:
    self._wait()
    self._playing = self._environment._loop.start(self._play())

  def send(self, written: episode_lib.Written) -> None:
    self._wait()
    self._environment._loop.call_soon(self._sent.put_nowait, written)

  def taken(self) -> episode_lib.Answer:
    assert self._answer is not None
    if isinstance(self._answer, episode_lib.Answer):
      return self._answer
    raise self._answer

  def close(self) -> None:
    self._environment.waiting.pop(self, None)
    if self._playing is not None:
      self._playing.cancel()

  def is_late(self, now_s: float) -> bool:
    """Return whether it should have failed on the event loop by now."""
    left_s = self._left_s
    return left_s is not None and now_s - self._asked_s > left_s + _GRACE_S

  def fail(self, error: episode_lib.EpisodeError) -> None:
    """Answer that it has failed."""
    self._tell(error)

  def _wait(self) -> None:
    self._asked_s = time.monotonic()
    self._environment.waiting[self] = None

  def _tell(
    self, answer: episode_lib.Answer | episode_lib.EpisodeError
  ) -> None:
    if self in self._environment.waiting:
      self._answer = answer
      # `pop` is atomic.
      if self._environment.waiting.pop(self, answer) is None:
        self._environment.answers.put(self)

  async def _play(self) -> None:
    """Run the episode to its end."""
    generator = None
    try:
      generator = self._environment._generator(self._prompt, self.context)
      answer = await self._ask(generator, None)
      for turn in episode_lib.recorded_turns(self._recorded):
        answer = episode_lib.check_recorded(answer, turn)
        if turn.completion is not None:
          answer = await self._ask(generator, turn.completion)
      self._recorded = ()
      self._tell(answer)
      while answer.tokens is not None:
        answer = await self._ask(generator, await self._sent.get())
        self._tell(answer)
    except episode_lib.EpisodeError as error:
      self._tell(error)
    finally:
      if generator is not None:
        # What an episode raises when it is closed changes nothing any more.
        with contextlib.suppress(BaseException):
          async with asyncio.timeout(_CLOSE_S):
            await generator.aclose()

  async def _ask(
    self, generator: Any, written: episode_lib.Written | None
  ) -> episode_lib.Answer:
    """Send a completion, and return what the episode answers."""
    context = self.context
    if context is not None and written is not None:
      context.wrote(written)
    asked_s = time.monotonic()
    try:
      async with asyncio.timeout(self._left_s) as limit:
        shown = await generator.asend(
          None if written is None else written.tokens
        )
    except StopAsyncIteration as end:
      if written is None:
        raise episode_lib.EpisodeError(
          "returned before its first turn"
        ) from end
      return episode_lib.Answer(None)
    except BaseException as error:  # user code, as in `episode.advance`
      if calls_lib.is_cancelled():
        raise
      if isinstance(error, TimeoutError) and limit.expired():
        raise _late(self._environment.timeout_s) from error
      raise episode_lib.failure_of(error) from error
    finally:
      if self._left_s is not None:
        spent_s = time.monotonic() - asked_s
        self._left_s = max(0.0, self._left_s - spent_s)
    return self._environment._answer(
      episode_lib.not_none(shown), context, is_first=written is None
    )
