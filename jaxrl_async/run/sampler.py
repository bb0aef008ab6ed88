"""Which completions a run keeps for a reader, and what is written of them.

Of each train step some groups are kept whole, so that the completions of one
prompt can be compared: the one with the best mean reward, the worst, the one
with the longest completion, and then others. Groups that failed or were
filtered since the step before are kept beside them.
"""

import collections
from collections.abc import Sequence
import dataclasses
import pathlib
import threading
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.evaluation import evaluated_sets
from jaxrl_async.reporting import samples as samples_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import extraction
from jaxrl_async.text import tokenizer as tokenizer_lib

_MAX_EVALUATED = 64
_NAME = "samples/"


@dataclasses.dataclass(frozen=True, slots=True)
class _Untrained:
  group: types.RolloutGroup
  fate: types.Fate
  reason: str


class Sampler:
  """Chooses completions, decodes them and writes them to the workdir.

  Threads: `add_untrained` may be called from any thread; the lock guards what
  it adds. The other methods belong to one thread at a time.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    *,
    num_groups: int,
    tokenizer: tokenizer_lib.Tokenizer,
    answer_prefix: str,
    side_outputs: side_outputs_lib.SideOutputs,
    first_step: int,
  ):
    """Remove what an interrupted run wrote after its last checkpoint.

    Args:
      workdir: of the run.
      num_groups: groups of each step, and at most as many that failed and as
        many that were filtered; 0 writes nothing, and neither does a run that
        cannot (`samples.can_be_written`).
      tokenizer: turns tokens into text.
      answer_prefix: see `extraction.extract_answer`. It is needed for
        completions that were not scored.
      side_outputs: guards the files.
      first_step: completed train steps.
    """
    self._files = samples_lib.SampleFiles(workdir)
    self._num_groups = num_groups if samples_lib.can_be_written() else 0
    self._tokenizer = tokenizer
    self._answer_prefix = answer_prefix
    self._side_outputs = side_outputs
    self._last_step = first_step
    self._lock = threading.Lock()
    self._untrained = self._empty()
    with side_outputs.attempt(_NAME):
      self._files.forget_after(first_step)

  def add_untrained(
    self, group: types.RolloutGroup, fate: types.Fate, reason: str
  ) -> None:
    """Keep a group, or a member of one, that was not trained, until a file."""
    with self._lock:
      self._untrained[fate].append(_Untrained(group, fate, reason))

  def write_step(self, step: int, groups: list[types.RolloutGroup]) -> None:
    """Write samples of a train step, and of the groups that were not trained.

    Args:
      step: completed train steps, with this one.
      groups: of the step.
    """
    if not self._num_groups:
      return
    with self._lock:
      untrained, self._untrained = self._untrained, self._empty()
    if groups:
      self._last_step = step
    rows = []
    for group, chosen in choose(groups, self._num_groups):
      rows += self._rows_of(step, group, types.Fate.TRAINED, chosen)
    for other in (x for kept in untrained.values() for x in kept):
      rows += self._rows_of(
        step, other.group, other.fate, str(other.fate), other.reason
      )
    if rows:
      part = samples_lib.Part(samples_lib.TRAIN, step)
      with self._side_outputs.attempt(_NAME):
        self._files.write(part, rows)

  def write_evaluation(
    self,
    step: int,
    evaluation: evaluated_sets.Evaluation,
  ) -> None:
    """Write the first completions of an evaluation.

    The prompts have the same order in each evaluation, so a reader can follow
    one of them.
    """
    if not self._num_groups:
      return
    rows = [
      {
        "step": step,
        "fate": "evaluated",
        "chosen": "",
        "group": None,
        "prompt_id": prompt.prompt_id,
        **self._row(
          prompt, answer.completed, failure.reason if failure else ""
        ),
      }
      for answer in evaluation.first[:_MAX_EVALUATED]
      for (*_, prompt, _), _, failure, _ in [answer]
    ]
    part = samples_lib.Part(samples_lib.EVAL, step)
    with self._side_outputs.attempt(_NAME):
      self._files.write(part, rows)

  def close(self) -> None:
    """Write the groups that failed after the last step, and ended the run."""
    self.write_step(self._last_step + 1, [])

  def _empty(self) -> dict[types.Fate, collections.deque[_Untrained]]:
    return {
      fate: collections.deque(maxlen=self._num_groups)
      for fate in (types.Fate.FAILED, types.Fate.FILTERED)
    }

  def _rows_of(
    self,
    step: int,
    group: types.RolloutGroup,
    fate: types.Fate,
    chosen: str,
    failure: str = "",
  ) -> list[dict[str, Any]]:
    return [
      {
        "step": step,
        "fate": str(fate),
        "chosen": chosen,
        "group": group.index,
        "prompt_id": group.prompt.prompt_id,
        **self._row(group.prompt, trajectory, failure),
      }
      for trajectory in map(types.completed, group.branches())
    ]

  def _row(
    self, prompt: types.Prompt, trajectory: types.Trajectory, failure: str
  ) -> dict[str, Any]:
    """Return the columns that the prompt and one trajectory fill."""
    reason, reward = trajectory.finish_reason, trajectory.reward
    if reason is None:  # of a group that failed while it was written
      trajectory = dataclasses.replace(
        trajectory, finish_reason=types.FinishReason.ABORTED
      )
    made = completion_lib.of_trajectory(trajectory, self._tokenizer)
    if reward is None:
      answer = extraction.extract_answer(made.text, self._answer_prefix)
    else:
      answer = reward.answer
    versions = _runs(trajectory.policy_versions[trajectory.loss_mask])
    expected = prompt.item.get("answer")
    if expected is not None:  # the last line of a worked solution, as in GSM8K
      expected = extraction.extract_answer(
        str(expected), self._answer_prefix
      ) or str(expected)
    turns = made.turns if len(made.turns) > 1 else ()
    first = made.turns[0].prompt if made.turns else ""
    return {
      "member": trajectory.member,
      "prompt": _plain(first),
      "completion": _plain(made.text),
      "answer": None if answer is None else _plain(answer),
      "expected": None if expected is None else _plain(expected),
      "reward": None if reward is None else reward.score,
      "parts": [
        {"name": _plain(name), "value": value}
        for name, value in (reward.parts if reward else {}).items()
      ],
      "finish_reason": str(made.finish_reason),
      "num_tokens": trajectory.num_completion_tokens,
      "version_min": min((v["version"] for v in versions), default=None),
      "version_max": max((v["version"] for v in versions), default=None),
      "versions": versions,
      "turns": [
        {"prompt": _plain(x.prompt), "completion": _plain(x.completion)}
        for x in turns
      ],
      "failure": _plain(failure) or None,
    }


def choose(
  groups: Sequence[types.RolloutGroup], num_groups: int
) -> list[tuple[types.RolloutGroup, str]]:
  """Return the groups to keep, and why each of them was chosen.

  Args:
    groups: with their rewards.
    num_groups: how many; the first ones are the best, the worst and the one
      with the longest completion, and others follow in their order.
  """
  if not groups:
    return []

  def reward(group: types.RolloutGroup) -> float:
    wholes = group.of_members().trajectories
    return float(np.mean([t.score for t in wholes]))

  def length(group: types.RolloutGroup) -> int:
    wholes = group.of_members().trajectories
    return max(t.num_completion_tokens for t in wholes)

  # The first of equal ones: a step that is done again keeps the same.
  candidates = [
    (min(groups, key=lambda g: (-reward(g), g.index)), "best"),
    (min(groups, key=lambda g: (reward(g), g.index)), "worst"),
    (min(groups, key=lambda g: (-length(g), g.index)), "longest"),
    *((group, "") for group in sorted(groups, key=lambda g: g.index)),
  ]
  chosen: dict[int, tuple[types.RolloutGroup, list[str]]] = {}
  for group, why in candidates:
    if group.index not in chosen and len(chosen) == num_groups:
      continue
    _, reasons = chosen.setdefault(group.index, (group, []))
    reasons.append(why)
  return [
    (group, ", ".join(filter(None, reasons)))
    for group, reasons in chosen.values()
  ]


def _runs(versions: np.ndarray) -> list[dict[str, int]]:
  """Return the versions of a completion's tokens, run by run."""
  begins = np.flatnonzero(np.diff(versions, prepend=-2))
  lengths = np.diff(np.append(begins, len(versions)))
  return [
    {"version": int(versions[begin]), "num_tokens": int(length)}
    for begin, length in zip(begins, lengths, strict=True)
  ]


def _plain(text: str) -> str:
  """Return a text that UTF-8 can hold."""
  return text.encode("utf-8", "replace").decode()
