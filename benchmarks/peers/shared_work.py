"""The work that all systems of head_to_head.py do, and how it is measured.

Each system is a program in an environment of its own. It gets one JSON file, a
`Work`, and writes what it measured through a `Recorder`. This module is
imported by all of them, first of all imports, and needs nothing but Python.

How long completions become is decided by the policy that all begin with, so
that no system has to be changed: it was fine-tuned on texts of those lengths
(`examples`), and the learning rate is too small to move it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import random
import re
import statistics
import string
import time
from typing import Any
import zlib

START_S = time.perf_counter()  # seconds are counted from this import
STEP, EVALUATION, END = "step", "evaluation", "end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What is trained on, and for how long completions are written.

  Attributes:
    max_prompt_tokens: a bound, not the length of every prompt.
    median_tokens: of the lengths, nearly lognormal, of the texts that the
      policy was fine-tuned on; 0 is for texts that are longer than any
      completion.
    sigma: deviation of these lengths, in logarithms.
    learning_rate: of AdamW. 1e-9 does the work of an update and changes
      nothing.
    warmup_steps: in which the learning rate rises linearly.
    target: held-out accuracy to be reached; 0 measures throughput instead.
  """

  max_prompt_tokens: int
  max_completion_tokens: int
  median_tokens: int = 0
  sigma: float = 0.0
  prompts_per_step: int = 8
  group_size: int = 8
  learning_rate: float = 1e-9
  warmup_steps: int = 0
  target: float = 0.0


CASES = {
  "fixed": Case(max_prompt_tokens=32, max_completion_tokens=64),
  "long_tail": Case(
    max_prompt_tokens=32,
    max_completion_tokens=512,
    median_tokens=32,
    sigma=1.2,
  ),
  "reward": Case(
    max_prompt_tokens=16,
    max_completion_tokens=48,
    prompts_per_step=32,
    learning_rate=3e-4,
    warmup_steps=10,
    target=0.6,
  ),
}


ANY = "any"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """A prompt, and its answer, which is `ANY` where the reward needs none."""

  prompt: str
  answer: str = ANY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What a program reads.

  Attributes:
    case: a key of `CASES`.
    policy: directory of the policy in Hugging Face's format.
    model: its shapes, the fields of the project's `ModelConfig`.
    directory: of the run; the program may write there.
    num_steps: train steps of the run. With a target it ends there at the
      latest.
    questions: in the order in which they are asked, `prompts_per_step` a step.
    held_out: questions of evaluations.
    eval_every: train steps between two evaluations.
    reward_ms: milliseconds of processor time that each reward takes, besides
      those it needs.
  """

  case: str
  policy: str
  model: dict[str, Any]
  directory: str
  num_steps: int
  questions: list[Question]
  held_out: list[Question]
  eval_every: int = 0
  reward_ms: float = 0.0
  seed: int = 0

  @property
  def shape(self) -> Case:
    """The case itself."""
    return CASES[self.case]

  @property
  def completions_per_step(self) -> int:
    """Completions of a train step."""
    return self.shape.prompts_per_step * self.shape.group_size

  def write(self, path: pathlib.Path) -> None:
    """Write the JSON file."""
    path.write_text(json.dumps(dataclasses.asdict(self)))


def read(path: str | pathlib.Path) -> Work:
  """Read the JSON file."""
  fields = json.loads(pathlib.Path(path).read_text())
  for name in ("questions", "held_out"):
    fields[name] = [Question(**question) for question in fields[name]]
  return Work(**fields)


def check_tokenizer(work: Work, encode: Callable[[str], Sequence[int]]) -> None:
  """Check that each character of the prompts is a token.

  Transformers' AutoTokenizer takes this policy's tokenizer for that of Qwen2,
  and loses the ends of lines without a word.

  Raises:
    ValueError: a prompt has another number of tokens.
  """
  for question in [*work.questions, *work.held_out]:
    count, text = len(encode(question.prompt)), question.prompt
    if count != len(text):
      raise ValueError(f"{text!r} has {count} tokens, not {len(text)}")


# -- questions, and texts to fine-tune on -----------------------------------

_LETTERS = string.ascii_lowercase
_NUM_SIZES = 13  # of texts with a long tail
# Partial sums of the worked examples that are wrong: what is left to learn.
_WRONG_FRACTION = 0.25
# Of how many sums one is held out.
_HELD_OUT = 10


def questions(case: str, count: int, seed: int) -> list[Question]:
  """Return questions of a case; equal seeds give equal questions."""
  rng = random.Random(f"{case} {seed}")
  return [_example(case, rng, is_held_out=False)[0] for _ in range(count)]


def held_out(case: str, count: int) -> list[Question]:
  """Return different questions that are neither trained on nor in examples."""
  if not CASES[case].target:
    return []
  rng = random.Random(f"held out of {case}")
  found: dict[str, Question] = {}
  while len(found) < count:
    question, _ = _example(case, rng, is_held_out=True)
    found[question.prompt] = question
  return list(found.values())


def examples(case: str, count: int) -> list[dict[str, str]]:
  """Return rows to fine-tune on: question, answer and solution.

  Solutions of the throughput cases are letters. In "fixed" they are random, and
  three times as many as completions may have; `_phases` makes those of
  "long_tail".
  """
  rng = random.Random(f"examples of {case}")
  drawn = [_example(case, rng, is_held_out=False) for _ in range(count)]
  return [
    {"question": q.prompt, "answer": q.answer, "solution": solution}
    for q, solution in drawn
  ]


def _example(
  case: str, rng: random.Random, *, is_held_out: bool
) -> tuple[Question, str]:
  shape = CASES[case]
  if not shape.target:
    prompt = "".join(rng.choices(_LETTERS, k=shape.max_prompt_tokens - 1))
    if shape.median_tokens:
      return Question(prompt=prompt), _phases(shape, rng)
    text = "".join(rng.choices(_LETTERS, k=3 * shape.max_completion_tokens))
    return Question(prompt=prompt), text
  while True:
    question, solution = _sum(rng)
    if (zlib.crc32(question.prompt.encode()) % _HELD_OUT == 0) is is_held_out:
      return question, solution


def _phases(case: Case, rng: random.Random) -> str:
  """Return a text whose length is nearly lognormal.

  It has one of 13 sizes and consists of the four letters of this size, each
  repeated for a geometrically distributed number of times. Whether a letter is
  repeated depends on nothing but the letter, so a policy learns the whole
  distribution of lengths in a few steps.

  The logarithm of a sum of four exponentials with mean 1 has the mean 1.256 and
  the variance 0.284 (digamma and trigamma of 4). The sizes are the quantiles of
  the lognormal distribution that adds the rest of the case's variance.
  """
  size = rng.randrange(_NUM_SIZES)
  quantile = statistics.NormalDist().inv_cdf((size + 0.5) / _NUM_SIZES)
  spread = math.sqrt(case.sigma**2 - 0.284)
  repeats = case.median_tokens * math.exp(spread * quantile - 1.256)
  letters = string.ascii_letters[4 * size : 4 * size + 4]
  text = ""
  for letter in letters:
    text += letter
    while rng.random() > 1 / repeats:
      text += letter
  # One more token ends the text.
  return text[: case.max_completion_tokens - 1]


def _sum(rng: random.Random) -> tuple[Question, str]:
  r"""Return a sum of three or four digits, and the sum worked out.

  "4-1+7\n" is worked out as "4-1=3\n3+7=10", sometimes wrongly.
  """
  total = right = rng.randrange(1, 10)
  expression, lines = str(total), []
  for _ in range(rng.choice((2, 3))):
    term, sign = rng.randrange(1, 10), rng.choice((1, -1))
    operation = f"{'+' if sign > 0 else '-'}{term}"
    expression += operation
    right += sign * term
    line = f"{total}{operation}"
    total += sign * term
    if rng.random() < _WRONG_FRACTION:
      total += rng.choice((-3, -2, -1, 1, 2, 3))
    lines.append(f"{line}={total}")
  question = Question(prompt=expression + "\n", answer=str(right))
  return question, "\n".join(lines)


# -- rewards ----------------------------------------------------------------


def score(text: str, answer: str, reward_ms: float = 0.0) -> float:
  """Return the reward of a completion.

  With an answer it is whether the text ends with "=" and the answer. Without
  one it is a number in [0, 1) that depends on each character, and that no
  policy can learn.
  """
  deadline = time.thread_time() + reward_ms / 1e3
  while reward_ms and time.thread_time() < deadline:
    pass
  if answer == ANY:
    return zlib.crc32(text.encode()) / 2**32
  return float(text.rpartition("=")[2].strip() == answer)


def score_item(item: Mapping[str, Any], completion: Any) -> float:
  """Return the same reward as this project calls it."""
  reward_ms = float(item["metadata"]["reward_ms"])
  return score(completion.text, item["answer"], reward_ms)


# -- what is measured -------------------------------------------------------


class Recorder:
  """Writes a line of JSON for each train step, evaluation, and the end.

  Attributes:
    steps: number of train steps so far.
  """

  def __init__(self, work: Work):
    """Begin the file `lines.jsonl` of the run's directory."""
    self._path = lines_file(work.directory)
    self._path.write_text("")
    self._last_s = self._generated_s = time.perf_counter()
    self._spent_s = 0.0
    self._tokens: list[int] = []
    self._rewards: list[float] = []
    self.steps = 0

  def completions(
    self, tokens: Sequence[int], rewards: Sequence[float]
  ) -> None:
    """Note completions of the step that is going on, which has generated them.

    Args:
      tokens: of each completion, with the token that ended it.
      rewards: of each.
    """
    self._generated_s = time.perf_counter()
    self._tokens += tokens
    self._rewards += rewards

  def end_of_step(self) -> None:
    """Record the end of a train step on the completions that were noted.

    For a system that trains only when all completions of a step are there.
    """
    now_s = time.perf_counter()
    step_s = now_s - self._last_s - self._spent_s
    self.step(
      tokens=sum(self._tokens),
      longest_tokens=max(self._tokens),
      num_completions=len(self._tokens),
      reward=mean(self._rewards),
      step_s=step_s,
      train_s=now_s - self._generated_s,
      rollout_s=step_s - (now_s - self._generated_s),
    )
    self._tokens, self._rewards = [], []
    self._last_s, self._spent_s = now_s, 0.0

  def step(
    self,
    *,
    tokens: int,
    longest_tokens: int,
    num_completions: int,
    reward: float,
    step_s: float,
    train_s: float,
    rollout_s: float,
  ) -> None:
    """Record the end of a train step.

    Args:
      tokens: of all its completions, with the token that ended each.
      longest_tokens: of the longest completion.
      num_completions: that were trained on.
      reward: mean of the rewards.
      step_s: time since the step before, without evaluations.
      train_s: the part of it in which there was training.
      rollout_s: the part in which completions were written and scored.
    """
    self.steps += 1
    self._write(
      STEP,
      step=self.steps,
      step_s=step_s,
      train_s=train_s,
      rollout_s=rollout_s,
      tokens=tokens,
      longest_tokens=longest_tokens,
      num_completions=num_completions,
      reward=reward,
      cpu_s=cpu_s(),
    )

  def evaluation(self, accuracy: float, spent_s: float) -> None:
    """Record an evaluation and the seconds that it took."""
    self._spent_s += spent_s
    self._write(EVALUATION, step=self.steps, accuracy=accuracy)

  def end(
    self, *, settings: str, versions: str, num_compilations: int | None
  ) -> None:
    """Record the end of the run.

    Args:
      settings: those that make the system fast, for the table.
      versions: of the system and what it runs on.
      num_compilations: programs that XLA compiled; None if there is no XLA.
    """
    self._write(
      END,
      settings=settings,
      versions=versions,
      num_compilations=num_compilations,
      peak_bytes=peak_bytes(),
    )

  def _write(self, kind: str, **fields: Any) -> None:
    line = {"kind": kind, "at_s": time.perf_counter() - START_S, **fields}
    with self._path.open("a") as file:
      file.write(json.dumps(line) + "\n")


def lines_file(directory: str | pathlib.Path) -> pathlib.Path:
  """Return the path of what a run measured."""
  return pathlib.Path(directory) / "lines.jsonl"


def cpu_s() -> float:
  """Return the processor time of this process and all its descendants.

  getrusage leaves out children that still run.
  """
  ticks = 0
  for pid in _family():
    stat = _proc(pid, "stat").rpartition(")")[2].split()
    ticks += sum(map(int, stat[11:15]))  # own and of children that ended
  return ticks / 100  # USER_HZ, which is 100 for every Linux program


def peak_bytes() -> int:
  """Return the sum of their largest resident sizes."""
  found = (
    re.search(r"VmHWM:\s*(\d+) kB", _proc(pid, "status")) for pid in _family()
  )
  return sum(1024 * int(match[1]) for match in found if match)


def _family() -> list[str]:
  """Return the ids of this process and its descendants."""
  parents = {}
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    if stat := _proc(path.name, "stat"):
      parents[path.name] = stat.rpartition(")")[2].split()[1]
  family = [pathlib.Path("/proc/self").readlink().name]
  for pid in family:
    family += [child for child, parent in parents.items() if parent == pid]
  return family


def _proc(pid: str, name: str) -> str:
  """Return a file of a process, or "" if it has ended."""
  try:
    return pathlib.Path("/proc", pid, name).read_text()
  except (FileNotFoundError, ProcessLookupError):
    return ""


def mean(values: Iterable[float]) -> float:
  """Return the mean; of nothing it is 0."""
  values = list(values)
  return math.fsum(values) / len(values) if values else 0.0
