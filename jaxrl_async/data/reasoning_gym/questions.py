"""Questions of reasoning-gym by index, and the processes that make them.

Item i of a split is a function of (seed, split, i). Item i of reasoning-gym
depends only on the dataset's seed + i, so that neighbouring seeds would give
the same data, shifted. Each pair (seed, split) therefore owns a range of
seed + i.

Items of different seeds can still ask the same question, and in a small task
they often do. So a hash of the question's text decides which split it belongs
to, for all seeds alike. That is how a held-out question is never trained on.

Some datasets iterate over sets of strings. Their items are the same in another
process only under the same PYTHONHASHSEED. A run therefore makes no questions
by itself. `gym` starts a server with a fixed hash seed, which imports the
library once (`serve`) and forks a process for each request. The process sends
items first, first + step, first + 2 step, ... through a pipe, and waits while
the pipe is full. It ends as soon as its pipe has no reader. The server ends
when its control connection closes, which the kernel does even if the run is
killed. Both ignore the signals that ask a run to end, because the run still
needs questions for the step that it finishes.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import itertools
from multiprocessing import connection
from multiprocessing import reduction
import os
import random
import select
import signal
import threading
import traceback
from typing import Any

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.rewards import reasoning
from jaxrl_async.storage import item_json

ITEMS_PER_SPLIT = 2**22
# seed + i stays below 2**32, the limit of some random generators.
MAX_SEED = 2**32 // (4 * ITEMS_PER_SPLIT) - 1

# Which range of a seed belongs to which split; the fourth one is free.
_RANGES = (
  source_lib.Split.TRAIN,
  source_lib.Split.WARM_START,
  source_lib.Split.EVAL,
)

# How many of every ten questions belong to a split, in the order of the hash.
TENTHS = {
  source_lib.Split.EVAL: 1,
  source_lib.Split.WARM_START: 4,
  source_lib.Split.TRAIN: 5,
}

# Datasets that build all items at once, or that do not accept a larger size.
_FEWER_ITEMS = {"acre": 2**12, "word_ladder": 20_000}
# Datasets that cannot be used, and why.
REFUSED = {
  "codeio": "its questions hold what programs print that read the clock and"
  " temporary files, so an item is another question each time it is made",
  "composite": "it mixes other datasets; name one of them",
}


def split_of(question: str) -> source_lib.Split:
  """Return the one split that a question belongs to; see `TENTHS`."""
  digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
  tenth = int.from_bytes(digest, "big") % 10
  for split, number in TENTHS.items():
    if tenth < number:
      return split
    tenth -= number
  raise AssertionError("the tenths add up to ten")


def first_dataset_seed(seed: int, split: source_lib.Split) -> int:
  """Return the start of the range of seed + i that (seed, split) owns."""
  return (seed * 4 + _RANGES.index(split)) * ITEMS_PER_SPLIT


def check(dataset: str, seed: int) -> None:
  """Check the dataset's name and the seed without importing the library."""
  if not 0 <= seed <= MAX_SEED:
    raise sections.ConfigError(f"seed: {seed} is not within 0 to {MAX_SEED}")
  if dataset in REFUSED:
    raise sections.ConfigError(
      f"task.dataset: {dataset} cannot be used: {REFUSED[dataset]}"
    )


class QuestionSource:
  """reasoning-gym's items of one range of seed + i.

  The questions belong to any split, since `split_of` has not been applied.
  """

  def __init__(
    self,
    dataset: str,
    params: Mapping[str, Any],
    *,
    seed: int,
    split: source_lib.Split,
  ):
    """Create the dataset with the range of seeds of (seed, split)."""
    check(dataset, seed)
    self._name = dataset
    self._params = dict(params)
    self._first_seed = first_dataset_seed(seed, split)
    self._dataset = _create_dataset(
      dataset,
      params,
      seed=self._first_seed,
      size=_FEWER_ITEMS.get(dataset, ITEMS_PER_SPLIT),
    )

  def __len__(self) -> int:
    """Return the number of items after which the source begins again."""
    return len(self._dataset)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Return an item in the form that `source` describes.

    It also holds the entries that scoring needs. After the last item the source
    begins again.
    """
    index %= len(self)
    # A few items draw from the interpreter's and NumPy's global generators.
    random.seed(self._first_seed + index)
    np.random.seed(self._first_seed + index)
    entry = self._dataset[index]
    return {
      "dataset": self._name,
      "params": self._params,
      "index": index,
      "question": entry["question"],
      "answer": entry["answer"],
      "metadata": entry["metadata"],
    }

  def stored(self, index: int) -> Any:
    """Return the item as JSON, for `item_json.decode`."""
    return source_lib.stored(self[index], self._name)


def _create_dataset(
  name: str, params: Mapping[str, Any], *, seed: int, size: int
) -> Any:
  datasets = reasoning.datasets()
  if name not in datasets:
    raise sections.ConfigError(
      f"task.dataset: reasoning-gym has no dataset {name!r}"
      f"{sections.did_you_mean(name, datasets.keys() - REFUSED.keys())}"
    )
  fields = {f.name for f in dataclasses.fields(datasets[name][1])}
  for key in params:
    if key in ("seed", "size"):
      raise sections.ConfigError(
        f"task.params.{key}: is set by the run; leave it out"
      )
    if key not in fields:
      raise sections.ConfigError(
        f"task.params.{key}: {name} has no such parameter"
        f"{sections.did_you_mean(key, fields - {'seed', 'size'})}"
      )
  try:
    return reasoning.create_dataset(name, params, seed=seed, size=size)
  except (AssertionError, ValueError, TypeError, LookupError) as error:
    raise sections.ConfigError(
      f"task.params: {name} refuses {dict(params)}: {error}"
    ) from error


# -- the server's process ------------------------------------------------------


def serve(descriptor: int) -> None:
  """Fork a process for each request until the connection closes.

  Args:
    descriptor: file descriptor of the control connection. A request is a dict
      with the arguments of `_items`, followed by the handle of the pipe to
      write to.
  """
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
  control = connection.Connection(descriptor)
  reasoning.library()
  while True:
    try:
      request = control.recv()
      pipe = reduction.recv_handle(control)
    except (EOFError, ConnectionResetError):
      return
    if os.fork() == 0:
      try:
        control.close()
        _send_items(request, pipe)
      finally:
        os._exit(1)  # never back into the server's loop
    os.close(pipe)


def _send_items(request: dict[str, Any], pipe: int) -> None:
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  threading.Thread(target=_end_with_reader, args=(pipe,), daemon=True).start()
  with connection.Connection(pipe, readable=False) as sending:
    for item in _items(**request):
      sending.send(item)


def _end_with_reader(pipe: int) -> None:
  """End the process when its pipe has no reader, even within an item."""
  poll = select.poll()
  poll.register(pipe, 0)  # only POLLERR, which is always reported
  poll.poll()
  os._exit(0)


def _items(
  dataset: str,
  params: dict[str, Any],
  seed: int,
  split: str,
  first: int,
  step: int,
) -> Iterator[dict[str, Any] | Exception | None]:
  """Yield the item of each index, or None if it belongs to another split."""
  index = first
  try:
    source = QuestionSource(
      dataset, params, seed=seed, split=source_lib.Split(split)
    )
    for index in itertools.count(first, step):
      item = item_json.decode(source.stored(index))
      yield item if split_of(item["question"]) == split else None
  except sections.ConfigError as error:
    yield error
  # The dataset's code may raise anything.
  except Exception as error:
    failure = source_lib.SourceError(
      f"task.dataset: {dataset} failed to make item {index}:"
      f" {type(error).__name__}: {error}"
    )
    failure.add_note(traceback.format_exc())
    yield failure
