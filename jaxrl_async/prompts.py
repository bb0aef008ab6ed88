"""Questions of reasoning-gym as prompts, through Grain.

A source is random access: item i of a split is a function of (seed, split, i).
reasoning-gym's item i depends on its own seed + i only, so neighbouring seeds
would be the same data shifted; each (seed, split) therefore owns a range of
seed + i. Different seeds still make equal questions, the more so the smaller
the task, so every question text also belongs to exactly one split, by a hash:
what hashes elsewhere is left out. Held-out questions are never trained on.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import difflib
import enum
import hashlib
import itertools
import string
from typing import Any

import grain
from jaxtyping import Int32
import numpy as np

from jaxrl_async import config
from jaxrl_async import tokenizer as tokenizer_lib
from jaxrl_async import types
from jaxrl_async import worked_solutions
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import reasoning

ITEMS_PER_SPLIT = 2**22
# seed + i stays below 2**32, which is as far as some random generators go.
MAX_SEED = 2**32 // (4 * ITEMS_PER_SPLIT) - 1

# Datasets that are built whole, or that refuse more.
_FEWER_ITEMS = {"acre": 2**12, "word_ladder": 20_000}
# So many items in a row without a usable one, and there are no more to come.
_MAX_BARREN = 2_000
# Or so many tokens of prompts that are all too long: a long template would
# otherwise be tokenized two thousand times before anybody is told.
_MAX_BARREN_TOKENS = 5_000_000


class Split(enum.StrEnum):
  """What a question is used for."""

  TRAIN = "train"
  WARM_START = "warm_start"
  EVAL = "eval"


def split_of(question: str) -> Split:
  """The one split a question text belongs to: 5, 4 and 1 of 10."""
  digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
  tenth = int.from_bytes(digest, "big") % 10
  if tenth == 0:
    return Split.EVAL
  return Split.WARM_START if tenth <= 4 else Split.TRAIN


def first_dataset_seed(seed: int, split: Split) -> int:
  """Start of the range of seed + i that (seed, split) owns."""
  return (seed * 4 + list(Split).index(split)) * ITEMS_PER_SPLIT


class QuestionSource(grain.sources.RandomAccessDataSource):
  """reasoning-gym's items of one range of seed + i, of whatever text.

  Raises:
    config.ConfigError: the dataset or its parameters do not exist, or the seed
      is out of range.
  """

  def __init__(self, task: config.TaskSection, *, seed: int, split: Split):
    if not 0 <= seed <= MAX_SEED:
      raise config.ConfigError(f"seed: {seed} is not within 0 to {MAX_SEED}")
    self._name = task.dataset
    self._params = task.params.to_dict()
    self._dataset = _create_dataset(
      self._name,
      self._params,
      seed=first_dataset_seed(seed, split),
      size=_FEWER_ITEMS.get(self._name, ITEMS_PER_SPLIT),
    )

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """What scoring needs, which becomes `types.Prompt.item`."""
    entry = self._dataset[int(index)]
    return {
      "dataset": self._name,
      "params": self._params,
      "index": int(index),
      "question": entry["question"],
      "answer": entry["answer"],
      "metadata": entry["metadata"],
    }


class PromptSource:
  """The prompts of a split, at random access. Immutable."""

  def __init__(
    self,
    task: config.TaskSection,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    seed: int,
    split: Split,
  ):
    self.task = task
    self.tokenizer = tokenizer
    self.seed = seed
    self.split = split
    self._dataset = (
      grain.MapDataset.source(QuestionSource(task, seed=seed, split=split))
      .filter(lambda item: split_of(item["question"]) is split)
      .map(self._prompt)
    )

  def prompt_at(self, index: int) -> types.Prompt | None:
    """Prompt of an item, whatever its length; None is another split's.

    Past the last item the source begins again.
    """
    return self._dataset[index]

  def _prompt(self, item: dict[str, Any]) -> types.Prompt:
    text = render(self.task.template, item)
    prompt_id = f"{item['dataset']}/{self.split}/{item['index']}"
    try:
      tokens = self.tokenizer.encode_prompt(text)
    except ValueError as error:
      raise config.ConfigError(
        f"task.dataset: {prompt_id} cannot be tokenized: {error}"
      ) from error
    return types.Prompt(prompt_id=prompt_id, tokens=tokens, item=item)


class PromptStream:
  """A split's prompts in order, from a place that can be saved.

  Threads: belongs to one thread, the one that admits groups; who saves its
  state does so while that thread does not call `next`.
  """

  def __init__(self, source: PromptSource, *, max_prompt_tokens: int):
    self._source = source
    self._max_prompt_tokens = max_prompt_tokens
    self._next_index = 0
    self.num_too_long = 0

  def next(self) -> types.Prompt:
    """Next prompt that fits; longer ones are skipped and counted, never cut.

    Raises:
      config.ConfigError: there is none, in a long stretch of items.
    """
    shortest, num_tokens, num_items = None, 0, 0
    while num_items < _MAX_BARREN and num_tokens < _MAX_BARREN_TOKENS:
      num_items += 1
      prompt = self._source.prompt_at(self._next_index)
      self._next_index += 1
      if prompt is None:
        continue
      if len(prompt.tokens) <= self._max_prompt_tokens:
        return prompt
      self.num_too_long += 1
      num_tokens += len(prompt.tokens)
      shortest = min(shortest or len(prompt.tokens), len(prompt.tokens))
    task = self._source.task
    if shortest is not None:
      raise config.ConfigError(
        f"rollout.max_prompt_tokens: {self._max_prompt_tokens}, but the "
        f"shortest prompt of {num_items} items of {task.dataset} has "
        f"{shortest} tokens"
      )
    raise config.ConfigError(
      f"task.dataset: none of {_MAX_BARREN} items of {task.dataset} is a "
      f"question of the split {self._source.split}; it has too few questions"
    )

  def state(self) -> dict[str, int]:
    """Where the stream stands, for a checkpoint."""
    return {"next_index": self._next_index, "num_too_long": self.num_too_long}

  def restore(self, state: Mapping[str, int]) -> None:
    """Continue where `state` was taken, with the very same prompts."""
    self._next_index = state["next_index"]
    self.num_too_long = state["num_too_long"]


def held_out(
  task: config.TaskSection,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  seed: int,
  max_prompt_tokens: int,
  num_items: int,
) -> list[types.Prompt]:
  """First prompts of the evaluation split, each question once.

  Raises:
    config.ConfigError: the split has fewer.
  """
  source = PromptSource(task, tokenizer, seed=seed, split=Split.EVAL)
  stream = PromptStream(source, max_prompt_tokens=max_prompt_tokens)
  prompts: dict[str, types.Prompt] = {}
  num_barren = 0
  while len(prompts) < num_items:
    prompt = stream.next()
    if prompt.item["question"] not in prompts:
      prompts[prompt.item["question"]] = prompt
      num_barren = 0
    elif (num_barren := num_barren + 1) == _MAX_BARREN:
      raise config.ConfigError(
        f"eval.num_items: {num_items}, but {task.dataset} has about "
        f"{len(prompts)} distinct held-out questions"
      )
  return list(prompts.values())


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkedExample:
  """A prompt and its worked solution.

  Attributes:
    prompt_tokens: token ids of the filled-in template.
    completion_tokens: token ids of the solution and the end of sequence.
  """

  prompt_tokens: Int32[np.ndarray, "P"]
  completion_tokens: Int32[np.ndarray, "C"]


def worked_examples(
  task: config.TaskSection,
  warm_start: config.WarmStartSection,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  seed: int,
  max_prompt_tokens: int,
  max_tokens: int,
) -> Iterator[WorkedExample]:
  """Yield `num_examples` worked solutions of the warm-start split.

  A question may come again with other mistakes in its solution, or with the
  same: leaving repetitions out would leave out right solutions, which are all
  alike, before wrong ones. Example n is a function of the seed and n.

  Raises:
    config.ConfigError: prompt and solution are longer than `max_tokens`.
  """
  solver = worked_solutions.SOLVERS[warm_start.solver]
  source = PromptSource(task, tokenizer, seed=seed, split=Split.WARM_START)
  stream = PromptStream(source, max_prompt_tokens=max_prompt_tokens)
  for _ in range(warm_start.num_examples):
    prompt = stream.next()
    # Of the place in the stream, not of the item: in a second pass over a
    # small dataset the mistakes are others.
    rng = np.random.default_rng((seed, stream.state()["next_index"]))
    solution = solver(prompt.item, rng, warm_start.corrupted_frac)
    completion = np.append(
      tokenizer.encode(solution), np.int32(tokenizer.eos_id)
    )
    length = len(prompt.tokens) + len(completion)
    if length > max_tokens:
      raise config.ConfigError(
        f"train.tokens_per_row: {max_tokens}, but the worked solution of"
        f" {prompt.prompt_id} has {length} tokens with its prompt; use more"
      )
    yield WorkedExample(
      prompt_tokens=prompt.tokens, completion_tokens=completion
    )


def render(template: str, item: Mapping[str, Any]) -> str:
  """Fill the template in with the question and the item's metadata.

  Raises:
    config.ConfigError: the template asks for what the item does not have.
  """
  fields = {**item["metadata"], "question": item["question"]}
  try:
    wanted = [name for _, name, _, _ in string.Formatter().parse(template)]
    for name in wanted:
      # "a.b" and "a[0]" look into the field a.
      root = (name or "question").partition(".")[0].partition("[")[0]
      if root not in fields:
        raise config.ConfigError(
          f"task.template: {item['dataset']} has no field {root!r}"
          f"{_did_you_mean(root, map(str, fields))}"
        )
    return string.Formatter().vformat(template, (), fields)
  except config.ConfigError:
    raise
  except (ValueError, LookupError, AttributeError, TypeError) as error:
    raise config.ConfigError(
      f"task.template: {template!r} cannot be filled in: {error}"
    ) from error


def validate_task(
  task: config.TaskSection,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  seed: int,
  max_prompt_tokens: int,
) -> None:
  """Check dataset, parameters, template and alphabet on a few prompts.

  Raises:
    config.ConfigError: one of them is wrong; the line says what would be right.
  """
  source = PromptSource(task, tokenizer, seed=seed, split=Split.TRAIN)
  stream = PromptStream(source, max_prompt_tokens=max_prompt_tokens)
  for _ in range(4):
    stream.next()


def validate_warm_start(
  task: config.TaskSection,
  warm_start: config.WarmStartSection,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  seed: int,
  max_prompt_tokens: int,
  max_tokens: int,
) -> None:
  """Check that the solver solves this task, in a form that can be scored.

  The first examples have to fit rows of `max_tokens`; the rest is checked when
  they are made.

  Raises:
    config.ConfigError: it does not; the line says what would be right.
  """
  if warm_start.solver not in worked_solutions.SOLVERS:
    raise config.ConfigError(
      f"warm_start.solver: {warm_start.solver!r} does not exist"
      f"{_did_you_mean(warm_start.solver, worked_solutions.SOLVERS)}"
    )
  item = QuestionSource(task, seed=seed, split=Split.WARM_START)[0]
  solver = worked_solutions.SOLVERS[warm_start.solver]
  try:
    solution = solver(item, np.random.default_rng(seed), 0.0)
  except (LookupError, ValueError, TypeError, AttributeError) as error:
    raise config.ConfigError(
      f"warm_start.solver: {warm_start.solver!r} cannot solve {task.dataset}"
    ) from error
  answer = extraction.extract_answer(solution, task.answer_prefix)
  if reasoning.score(item, answer) != 1.0:
    raise config.ConfigError(
      f"task.answer_prefix: {task.answer_prefix!r} finds {answer!r} in a right "
      f"solution of the solver {warm_start.solver!r}, {solution!r}"
    )
  examples = worked_examples(
    task,
    warm_start,
    tokenizer,
    seed=seed,
    max_prompt_tokens=max_prompt_tokens,
    max_tokens=max_tokens,
  )
  for _ in itertools.islice(examples, 100):
    pass


def _create_dataset(
  name: str, params: Mapping[str, Any], *, seed: int, size: int
) -> Any:
  datasets = reasoning.datasets()
  if name not in datasets or name == "composite":
    raise config.ConfigError(
      f"task.dataset: reasoning-gym has no dataset {name!r}"
      f"{_did_you_mean(name, datasets)}"
    )
  fields = {f.name for f in dataclasses.fields(datasets[name][1])}
  for key in params:
    if key in ("seed", "size"):
      raise config.ConfigError(
        f"task.params.{key}: is set by the run; leave it out"
      )
    if key not in fields:
      raise config.ConfigError(
        f"task.params.{key}: {name} has no such parameter"
        f"{_did_you_mean(key, fields - {'seed', 'size'})}"
      )
  try:
    return reasoning.create_dataset(name, params, seed=seed, size=size)
  except (AssertionError, ValueError, TypeError, LookupError) as error:
    raise config.ConfigError(
      f"task.params: {name} refuses {dict(params)}: {error}"
    ) from error


def _did_you_mean(name: str, known: Any) -> str:
  known = sorted(known)
  close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  if close:
    return f"; did you mean {' or '.join(close)}?"
  shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
  return f"; there is {shown}"
