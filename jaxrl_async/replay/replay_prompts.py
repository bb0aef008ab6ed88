"""The prompts of a timing record, made again from the source of the data."""

import collections
from collections.abc import Iterable, Mapping
import pathlib
from typing import Any

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import held_out
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.reporting import progress as progress_lib


class RecordedPrompts:
  """Draws the prompts that the run has drawn, and keeps those that are needed.

  The run gave the group of each index the next prompt of its stream. A prompt
  that does not come by then has gone from the data.
  """

  def __init__(
    self,
    source: prompts.PromptSource,
    needed: Iterable[str],
    *,
    excluded: Iterable[str],
    host_state: Mapping[str, Any],
    stop: supervisor_lib.StopRequest,
  ):
    """Prepare to draw; nothing is made before the first use.

    Args:
      source: of the prompts of the run.
      needed: ids of the prompts of all groups, with repetitions.
      excluded: questions that the run has passed over.
      host_state: of the checkpoint to begin with; empty if there is none.
      stop: ends the search.
    """
    self._needed = collections.Counter(needed)
    self._found: dict[str, types.Prompt] = {}
    self._stop = stop
    self._num_drawn = 0
    self._first_index = host_state.get("next_index", 0)
    self._name = source.items.name
    self._stream = prompts.PromptStream(source, source_lib.Split.TRAIN)
    self._stream.exclude(excluded)
    if host_state:
      self._stream.restore(host_state["stream"])

  def take(self, group: recorded_timing.RecordedGroup) -> types.Prompt:
    """Return the prompt of a group, once for each group.

    Raises:
      ConfigError: the data no longer have it.
    """
    wanted = group.prompt_id
    while wanted not in self._found:
      if self._num_drawn > group.index - self._first_index:
        raise sections.ConfigError(
          f"task.dataset: {self._name} no longer has the question {wanted} of"
          f" group {group.index}; the data are not those of the run"
        )
      prompt = self._stream.next()
      self._num_drawn += 1
      if self._needed[prompt.prompt_id]:
        self._found[prompt.prompt_id] = prompt
      self._stop.check("stopped while it looked for the prompts")
    self._needed[wanted] -= 1
    if self._needed[wanted]:
      return self._found[wanted]
    return self._found.pop(wanted)

  def close(self) -> None:
    """End what makes questions."""
    self._stream.close()


def of_run(
  setup: setup_lib.Setup,
  workdir: pathlib.Path,
  needed: Iterable[str],
  *,
  host_state: Mapping[str, Any],
  progress: progress_lib.Progress,
  stop: supervisor_lib.StopRequest,
) -> RecordedPrompts:
  """Return the prompts of a run, whose held-out questions it passed over.

  Args:
    setup: of the run.
    workdir: of the run, which may hold these questions.
    needed: as in `RecordedPrompts`.
    host_state: the same.
    progress: is told if the questions are made again.
    stop: ends the search.
  """
  source = assembly.prompt_source(setup)
  kept = held_out.load_or_make(
    workdir / "held_out.json",
    source,
    setup.config.eval.num_items,
    note=progress.note,
    on_progress=lambda num_made: stop.check("stopped at the beginning"),
    is_kept=False,
  )
  return RecordedPrompts(
    source,
    needed,
    excluded=[prompt.item["question"] for prompt in kept],
    host_state=host_state,
    stop=stop,
  )
