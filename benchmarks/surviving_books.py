"""Whether the books of a run that was killed hold each group exactly once.

Everything is read from the workdir: the newest checkpoint, the ledger up to
where that checkpoint says it ends, and the metrics. What the run itself checks
is not relied on.
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from jaxrl_async.storage import manifest
from jaxrl_async.storage import outstanding as outstanding_lib


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
  """What a checkpoint says the ledger begins with.

  Attributes:
    step: of the checkpoint.
    num_bytes: length of the ledger.
    digest: of so many bytes.
  """

  step: int
  num_bytes: int
  digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Books:
  """What the newest checkpoint of a run accounts for.

  Attributes:
    prefix: the ledger of the checkpoint.
    lost: indices of groups, and ids of prompts, that are nowhere.
    duplicated: those that are there more than once.
    out_of_bound: indices of groups with a token that was too old for the train
      step that it was trained in, or that were trained after their deadline.
    wrong_steps: train steps without exactly `groups_per_step` groups.
    unaccounted_tokens: generated tokens without those of all groups.
  """

  prefix: Prefix
  lost: list[Any]
  duplicated: list[Any]
  out_of_bound: list[int]
  wrong_steps: list[int]
  unaccounted_tokens: int

  @property
  def is_balanced(self) -> bool:
    """Whether every generated token is accounted for."""
    return self.unaccounted_tokens == 0

  @property
  def are_whole(self) -> bool:
    """Whether nothing is wrong with them."""
    wrong = (self.lost, self.duplicated, self.out_of_bound, self.wrong_steps)
    return self.is_balanced and not any(wrong)


def newest_checkpoint(workdir: pathlib.Path) -> pathlib.Path | None:
  """Return the newest checkpoint that is sealed, or None."""
  sealed = [
    path
    for path in (workdir / "checkpoints").glob("[0-9]*")
    if path.name.isdigit() and (path / manifest.NAME).exists()
  ]
  return max(sealed, key=lambda path: int(path.name), default=None)


def read(
  workdir: pathlib.Path, prompt_ids: Sequence[str] | None = None
) -> Books | None:
  """Check the newest checkpoint of a run that does not run at the moment.

  Args:
    workdir: of the run.
    prompt_ids: those of the prompts in the order of their source, at least as
      many as there are groups. None leaves out the check of the prompts.

  Returns:
    What was found, or None if there is no checkpoint.

  Raises:
    ManifestError: the checkpoint is damaged.
  """
  path = newest_checkpoint(workdir)
  if path is None:
    return None
  manifest.verify(path)
  state = json.loads((path / "host_state.json").read_text())
  outstanding = outstanding_lib.read(path)
  ledger = workdir / "ledger.jsonl"
  content = ledger.read_bytes() if ledger.exists() else b""
  content = content[: state["ledger"]["offset_bytes"]]
  entries = [json.loads(line) for line in content.splitlines()]
  found = {entry["index"]: entry["prompt_id"] for entry in entries}
  indices = [entry["index"] for entry in entries]
  for one in outstanding:
    indices.append(one.group.index)
    found[one.group.index] = one.group.prompt.prompt_id
  lost, duplicated = _compared(indices, range(state["next_index"]))
  if prompt_ids is not None:
    more = _compared(found.values(), prompt_ids[: state["next_index"]])
    lost, duplicated = lost + more[0], duplicated + more[1]
  in_flight = sum(g.group.num_completion_tokens for g in outstanding)
  return Books(
    prefix=Prefix(
      step=int(path.name),
      num_bytes=len(content),
      digest=hashlib.sha256(content).hexdigest(),
    ),
    lost=lost,
    duplicated=duplicated,
    out_of_bound=_out_of_bound(entries, state["max_staleness"]),
    wrong_steps=_wrong_steps(entries, int(path.name), state["groups_per_step"]),
    unaccounted_tokens=_unaccounted(state, entries, in_flight),
  )


def _compared(
  found: Iterable[Any], expected: Iterable[Any]
) -> tuple[list[Any], list[Any]]:
  """Return what is expected and not there, and what is there too often."""
  there, wanted = collections.Counter(found), collections.Counter(expected)
  return [*(wanted - there).elements()], [*(there - wanted).elements()]


def _out_of_bound(
  entries: list[dict[str, Any]], max_staleness: int
) -> list[int]:
  """Return the groups that were trained too late, or on tokens too old."""
  return [
    entry["index"]
    for entry in entries
    if entry["fate"] == "trained"
    and (
      entry["step"] > entry["deadline"]
      or entry["staleness_max"] > max_staleness
      or entry["policy_version_max"] > entry["step"]
      or entry["policy_version_min"] < entry["birth"]
    )
  ]


def _wrong_steps(
  entries: list[dict[str, Any]], num_steps: int, groups_per_step: int
) -> list[int]:
  trained = collections.Counter(
    entry["step"] for entry in entries if entry["fate"] == "trained"
  )
  return [
    step
    for step in sorted({*trained, *range(num_steps)})
    if trained[step] != groups_per_step or step >= num_steps
  ]


def _unaccounted(
  state: dict[str, Any], entries: list[dict[str, Any]], in_flight: int
) -> int:
  """Return how many generated tokens neither have ended nor are in flight."""
  ended = 0
  dropped = [one for entry in entries for one in entry["dropped"]]
  for fate, lost in (("trained", []), ("filtered", []), ("failed", dropped)):
    tokens = sum(one["num_completion_tokens"] for one in lost) + sum(
      sum(entry["num_completion_tokens"])
      for entry in entries
      if entry["fate"] == fate
    )
    if tokens != state["ledger"][f"{fate}_tokens"]:
      return state["ledger"][f"{fate}_tokens"] - tokens
    ended += tokens
  generated = state["metrics"]["totals"]["ledger/generated_tokens"]
  return generated - ended - in_flight


def changed_since(
  workdir: pathlib.Path, prefixes: Iterable[Prefix]
) -> list[int]:
  """Return the steps of checkpoints whose ledger is no longer the beginning.

  A run that goes on from a checkpoint keeps what the ledger held then.
  """
  content = (workdir / "ledger.jsonl").read_bytes()
  return [
    prefix.step
    for prefix in prefixes
    if hashlib.sha256(content[: prefix.num_bytes]).hexdigest() != prefix.digest
  ]


def repeated_metrics(workdir: pathlib.Path) -> list[int]:
  """Return the train steps whose line is missing or there twice."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  steps = [
    line["step"] for line in map(json.loads, lines) if "reward/mean" in line
  ]
  missing, twice = _compared(steps, range(1, max(steps) + 1))
  return [*missing, *twice]
