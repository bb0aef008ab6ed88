"""Makes the calls of episodes: on an event loop, or in other processes.

All async episodes of a run share the event loop, which has a thread of its own.
Functions that block run in a pool of processes.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent import futures
import contextlib
import functools
import inspect
import pickle
import threading
import types as python_types
from typing import Any

import pebble

from jaxrl_async import types
from jaxrl_async.rewards import importable
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rollout import call_outcome

_BROKE = "died: the pool of processes broke"
_LOOK_S = 0.5  # between two looks whether the pool is alive


class Loop:
  """An event loop in a thread of its own, which starts when it is needed.

  Threads: any thread may call any method.
  """

  def __init__(self, name: str):
    """Create a loop that does not run; `name` is that of its thread."""
    self._name = name
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._thread: threading.Thread | None = None
    self._is_closed = False
    self._running: set[futures.Future] = set()
    self._ending: asyncio.Task[None] | None = None

  def start(self, coroutine: Coroutine[Any, Any, None]) -> futures.Future:
    """Run a coroutine; cancelling the future that is returned cancels it."""
    with self._lock:
      if self._is_closed:
        coroutine.close()
        raise RuntimeError("the event loop of the episodes is closed")
      if self._loop is None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
          target=self._run, args=(self._loop,), name=self._name, daemon=True
        )
        self._thread.start()
      future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
      # Its task would be collected if nothing held it.
      self._running.add(future)
    future.add_done_callback(self._forget)
    return future

  def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function on the loop, which has been started."""
    assert self._loop is not None
    with contextlib.suppress(RuntimeError):  # it is closed
      self._loop.call_soon_threadsafe(function, *arguments)

  def close(self, timeout_s: float) -> None:
    """Cancel what runs, and end the thread.

    Raises:
      TimeoutError: the thread did not end in time.
    """
    with self._lock:
      self._is_closed = True
      loop, thread = self._loop, self._thread
    if loop is None or thread is None:
      return
    self.call_soon(self._begin_to_end, loop, timeout_s / 2)
    thread.join(timeout_s)
    if thread.is_alive():
      raise TimeoutError(
        f"the event loop of the episodes did not end within {timeout_s:g} s: an"
        " async episode blocks it"
      )

  def _forget(self, future: futures.Future) -> None:
    with self._lock:
      self._running.discard(future)

  def _begin_to_end(
    self, loop: asyncio.AbstractEventLoop, timeout_s: float
  ) -> None:
    self._ending = loop.create_task(_cancel_all_and_stop(loop, timeout_s))

  def _run(self, loop: asyncio.AbstractEventLoop) -> None:
    try:
      loop.run_forever()
    finally:
      loop.close()


async def _cancel_all_and_stop(
  loop: asyncio.AbstractEventLoop, timeout_s: float
) -> None:
  tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
  for task in tasks:
    task.cancel()
  if tasks:
    await asyncio.wait(tasks, timeout=timeout_s)
  loop.stop()


class Calls:
  """Makes calls, with deadlines and retries.

  Threads: `make` belongs to an event loop, `close` to any thread.
  """

  def __init__(self, num_workers: int):
    """Make no processes before a call needs them."""
    self._num_workers = num_workers
    self._lock = threading.Lock()
    self._processes: pool_lib.Processes | None = None

  async def make(
    self,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    timeout_s: float,
    retries: int,
  ) -> call_outcome.Outcome:
    """Make a call, and return what came of its last attempt."""
    make_once = _awaited if _is_async(function) else self._in_process
    outcome = await make_once(function, arguments, timeout_s)
    for _ in range(retries):
      if outcome[0] is types.EventKind.RESULT:
        break
      outcome = await make_once(function, arguments, timeout_s)
    return outcome

  def close(self, timeout_s: float) -> None:
    """End the processes.

    Raises:
      TimeoutError: they did not end in time.
    """
    with self._lock:
      processes = self._processes
    if processes is not None:
      processes.close(timeout_s)

  async def _in_process(
    self,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_s: float,
  ) -> call_outcome.Outcome:
    try:
      pickled = pickle.dumps((_importable(function), arguments))
    except (
      *(pickle.PicklingError, AttributeError, TypeError, ValueError),
      RecursionError,  # of arguments that are nested too deeply
    ) as error:
      return call_outcome.raised(error)
    # The first processes take a while to start.
    processes = self._processes or await asyncio.to_thread(self._start)
    try:
      running = processes.run(call_outcome.make, (pickled,), timeout_s)
    except pool_lib.Closed:
      return call_outcome.failed(_BROKE)
    ended = asyncio.wrap_future(running.future)
    try:
      while not running.is_done():
        await asyncio.wait([ended], timeout=_LOOK_S)
      return await ended
    except pebble.ProcessExpired as error:
      return call_outcome.failed(
        f"died: the process of {call_outcome.name_of(function)} ended with exit"
        f" code {error.exitcode}"
      )
    except TimeoutError:
      return _too_late(function, timeout_s)
    except (pool_lib.Broke, pool_lib.Closed):
      return call_outcome.failed(_BROKE)
    finally:
      running.future.cancel()  # of a call that nobody waits for any more

  def _start(self) -> pool_lib.Processes:
    with self._lock:
      if self._processes is None:
        processes = pool_lib.Processes(self._num_workers)
        processes.run(int)
        self._processes = processes
      return self._processes


async def _awaited(
  function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float
) -> call_outcome.Outcome:
  try:
    async with asyncio.timeout(timeout_s) as limit:
      return call_outcome.of_value(await function(*arguments))
  except BaseException as error:  # user code
    if is_cancelled():
      raise
    if isinstance(error, TimeoutError) and limit.expired():
      return _too_late(function, timeout_s)
    return call_outcome.raised(error)


def is_cancelled() -> bool:
  """Return whether the running task was cancelled, and not only one of its."""
  task = asyncio.current_task()
  return task is not None and task.cancelling() > 0


def _too_late(
  function: Callable[..., Any], timeout_s: float
) -> call_outcome.Outcome:
  name = call_outcome.name_of(function)
  return call_outcome.failed(
    f"timeout: {name} took longer than {timeout_s:g} s"
  )


def _is_async(function: Callable[..., Any]) -> bool:
  return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
    type(function).__call__
  )


def _importable(function: Callable[..., Any]) -> Callable[..., Any]:
  """Return a function as the processes can import it.

  Raises:
    ValueError: it is defined where they cannot.
  """
  if isinstance(function, functools.partial):
    made = _importable(function.func)
    return functools.partial(made, *function.args, **function.keywords)
  if isinstance(function, python_types.FunctionType):
    return importable.function(function)
  return function
