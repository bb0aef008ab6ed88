"""The settings of the questions, and of how answers are scored."""

import dataclasses
import enum
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config.setting import setting

# Of settings that decide which questions there are, and how answers are scored.
_QUESTION: dict[str, Any] = {"fixed": setting_lib.QUESTIONS, "of_answers": True}
_SCORE: dict[str, Any] = {
  "fixed": "stored groups were scored with it",
  "of_answers": True,
}


class OnBadRow(enum.Enum):
  """What happens if a row of a dataset cannot be used."""

  ERROR = "error"
  SKIP = "skip"


@dataclasses.dataclass(kw_only=True, slots=True)
class DatasetSection:
  """One dataset, and how its rows become prompts."""

  dataset: str = setting(
    "chain_sum",
    "URI of the data, or the name of a dataset of reasoning-gym. See"
    " `data.tables.uri` for the kinds: jsonl, json, parquet, arrayrecord,"
    " datasets, hf, reasoning_gym.",
    **_QUESTION,
  )
  params: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    "parameters of a dataset of reasoning-gym",
    **_QUESTION,
  )
  eval_dataset: str = setting(
    "",
    'URI of the held-out rows. "" takes the dataset\'s own split `test` or'
    " `validation` if it has one (datasets, hf), and otherwise holds out"
    " `eval_percent` of the questions.",
    **_QUESTION,
  )
  eval_percent: int = setting(
    10,
    "share of the questions that a hash of their text holds out",
    low=1,
    high=99,
    **_QUESTION,
  )
  fields: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    "names the columns of a file that are the question and the answer, if"
    ' they are not called so: {"question": "problem"}. "messages" names'
    " a column of chat messages, which are then the prompt. The other columns"
    " become the item's metadata.",
    **_QUESTION,
  )
  on_bad_row: OnBadRow = setting(
    OnBadRow.ERROR,
    "whether a row that cannot be used ends the start with an error or is"
    " left out",
    **_QUESTION,
  )
  template: str = setting(
    "{question}\n",
    'str.format template of the prompt; its fields are "question" and the'
    " keys of the item's metadata",
    **_QUESTION,
  )
  chat: bool = setting(
    False,
    "the filled-in template is a user's message, and the tokenizer's own chat"
    " template makes the prompt of it",
    **_QUESTION,
  )
  system: str = setting(
    "", 'message of the system before it; "" is none', **_QUESTION
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class SourceSection(DatasetSection):
  """An entry of `task.sources`; other settings are those of the task."""

  weight: float = setting(
    1.0, "share of the prompts, relative to the others", low=1e-3, high=1e6
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardSection:
  """An entry of `task.rewards`."""

  function: str = setting(
    "", "as `task.reward`; also matches and overlong, which need params"
  )
  params: config_dict.ConfigDict = setting(
    config_dict.ConfigDict, "arguments of the function"
  )
  weight: float = setting(
    1.0,
    "factor of its scores",
    low=-setting_lib.MAX_INT,
    high=setting_lib.MAX_INT,
  )
  timeout_s: float = setting(
    10.0,
    "as `task.reward_timeout_s`",
    low=0.1,
    high=setting_lib.MAX_REWARD_TIMEOUT_S,
  )
  retries: int = setting(
    1, "as `task.reward_retries`", low=0, high=setting_lib.MAX_REWARD_RETRIES
  )
  sources: list = setting(
    list, "names of the sources whose items it scores; all without it"
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class TaskSection(DatasetSection):
  """The source of prompts, and how answers are extracted and scored."""

  sources: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    "a mixture instead of one dataset: its members, by name",
    entries=SourceSection,
    needs=("dataset", "weight"),
    **_QUESTION,
  )
  rest_after: int = setting(
    0,
    "after this many groups in a row whose rewards were all equal, a question"
    " rests; 0 lets none rest",
    low=0,
    high=1000000,
    fixed=setting_lib.QUESTIONS,
  )
  rest_for: int = setting(
    1,
    "so many passes are made without a question that rests",
    low=1,
    high=1000000,
    fixed=setting_lib.QUESTIONS,
  )
  answer_prefix: str = setting(
    "=",
    "the extracted answer is the text between the last occurrence of this"
    ' prefix in the completion and the end of its line; "" takes the whole'
    " completion, stripped",
    **_SCORE,
  )
  reward: str = setting(
    "reasoning_gym",
    "what scores a completion: reasoning_gym, mathematics, code, exact,"
    " numeric, answered, ended, module:function of a module that does not"
    " import JAX, or the address of a server, http://HOST:PORT/PATH. The"
    " directory in which a launch script is started is searched too.",
    **_SCORE,
  )
  rewards: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    "several rewards, by name, whose weighted sum is the score. `reward` is"
    " then not used.",
    entries=RewardSection,
    needs=("function",),
    fixed="stored groups were scored with them",
    of_answers=True,
  )
  solved_score: float = setting(
    1.0,
    "a completion with at least this score counts as solved, in held-out"
    " accuracies and in the metrics reward/pass@k",
    fixed=setting_lib.HELD_OUT,
    of_answers=True,
  )
  reward_timeout_s: float = setting(
    10.0,
    "deadline for one score, or for one request to a server, which scores a"
    " group",
    low=0.1,
    high=setting_lib.MAX_REWARD_TIMEOUT_S,
    free=setting_lib.SUPERVISION,
  )
  reward_workers: int = setting(
    1,
    "number of scoring processes",
    low=1,
    high=1024,
    free=setting_lib.SUPERVISION,
  )
  reward_retries: int = setting(
    1,
    "further attempts before a group is counted as failed",
    low=0,
    high=1000,
    free=setting_lib.SUPERVISION,
  )
  max_failed_groups: int = setting(
    8,
    "the run ends after this many failed groups in a row",
    low=1,
    free=setting_lib.SUPERVISION,
  )
  question_workers: int = setting(
    2,
    "number of processes that make questions ahead of time. More of them help"
    " if making a question takes longer than answering it.",
    low=1,
    high=1024,
    free=setting_lib.SUPERVISION,
  )
