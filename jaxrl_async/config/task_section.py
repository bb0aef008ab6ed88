"""The settings of the questions, and of how answers are scored."""

import dataclasses
import enum

from ml_collections import config_dict

from jaxrl_async.config import setting as setting_lib


class OnBadRow(enum.Enum):
  """What happens if a row of a dataset cannot be used."""

  ERROR = "error"
  SKIP = "skip"


@dataclasses.dataclass(kw_only=True, slots=True)
class TaskSection:
  """The source of prompts, and how answers are extracted and scored."""

  dataset: str = setting_lib.setting(
    "chain_sum",
    "URI of the data, or the name of a dataset of reasoning-gym. See"
    " `data.tables.uri` for the kinds: jsonl, json, parquet, arrayrecord,"
    " datasets, hf, reasoning_gym.",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  sources: config_dict.ConfigDict = setting_lib.setting(
    config_dict.ConfigDict,
    "a mixture instead of one dataset. By name, each has a `dataset`, a"
    " `weight`, and any of params, eval_dataset, eval_percent, fields,"
    " on_bad_row, template, chat and system that differ from those here.",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  params: config_dict.ConfigDict = setting_lib.setting(
    config_dict.ConfigDict,
    "parameters of a dataset of reasoning-gym",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  eval_dataset: str = setting_lib.setting(
    "",
    'URI of the held-out rows. "" takes the dataset\'s own split `test` or'
    " `validation` if it has one (datasets, hf), and otherwise holds out"
    " `eval_percent` of the questions.",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  eval_percent: int = setting_lib.setting(
    10,
    "share of the questions that a hash of their text holds out",
    low=1,
    high=99,
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  fields: config_dict.ConfigDict = setting_lib.setting(
    config_dict.ConfigDict,
    "names the columns of a file that are the question and the answer, if"
    ' they are not called so: {"question": "problem"}. "messages" names'
    " a column of chat messages, which are then the prompt. The other columns"
    " become the item's metadata.",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  on_bad_row: OnBadRow = setting_lib.setting(
    OnBadRow.ERROR,
    "whether a row that cannot be used ends the start with an error or is"
    " left out",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  rest_after: int = setting_lib.setting(
    0,
    "after this many groups in a row whose rewards were all equal, a question"
    " rests; 0 lets none rest",
    low=0,
    high=1000000,
    fixed=setting_lib.QUESTIONS,
  )
  rest_for: int = setting_lib.setting(
    1,
    "so many passes are made without a question that rests",
    low=1,
    high=1000000,
    fixed=setting_lib.QUESTIONS,
  )
  template: str = setting_lib.setting(
    "{question}\n",
    'str.format template of the prompt; its fields are "question" and the'
    " keys of the item's metadata",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  chat: bool = setting_lib.setting(
    False,
    "the filled-in template is a user's message, and the tokenizer's own chat"
    " template makes the prompt of it",
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  system: str = setting_lib.setting(
    "",
    'message of the system before it; "" is none',
    fixed=setting_lib.QUESTIONS,
    of_answers=True,
  )
  answer_prefix: str = setting_lib.setting(
    "=",
    "the extracted answer is the text between the last occurrence of this"
    ' prefix in the completion and the end of its line; "" takes the whole'
    " completion, stripped",
    fixed="stored groups were scored with it",
    of_answers=True,
  )
  reward: str = setting_lib.setting(
    "reasoning_gym",
    "what scores a completion: reasoning_gym, mathematics, code, exact,"
    " numeric, answered, ended, module:function of a module that does not"
    " import JAX, or the address of a server, http://HOST:PORT/PATH. The"
    " directory in which a launch script is started is searched too.",
    fixed="stored groups were scored with it",
    of_answers=True,
  )
  rewards: config_dict.ConfigDict = setting_lib.setting(
    config_dict.ConfigDict,
    "several rewards, whose weighted sum is the score. Each entry has a name,"
    " and the fields function (as `reward`; also matches and overlong, which"
    " need params), params (of the function), weight, timeout_s, retries, and"
    " sources, the names of the sources whose items it scores. Only function"
    " is required. `reward` is then not used.",
    fixed="stored groups were scored with them",
    of_answers=True,
  )
  solved_score: float = setting_lib.setting(
    1.0,
    "a completion with at least this score counts as solved, in held-out"
    " accuracies and in the metrics reward/pass@k",
    fixed=setting_lib.HELD_OUT,
    of_answers=True,
  )
  reward_timeout_s: float = setting_lib.setting(
    10.0,
    "deadline for one score, or for one request to a server, which scores a"
    " group",
    low=0.1,
    high=setting_lib.MAX_REWARD_TIMEOUT_S,
    free=setting_lib.SUPERVISION,
  )
  reward_workers: int = setting_lib.setting(
    1,
    "number of scoring processes",
    low=1,
    high=1024,
    free=setting_lib.SUPERVISION,
  )
  reward_retries: int = setting_lib.setting(
    1,
    "further attempts before a group is counted as failed",
    low=0,
    high=1000,
    free=setting_lib.SUPERVISION,
  )
  max_failed_groups: int = setting_lib.setting(
    8,
    "the run ends after this many failed groups in a row",
    low=1,
    free=setting_lib.SUPERVISION,
  )
  question_workers: int = setting_lib.setting(
    2,
    "number of processes that make questions ahead of time. More of them help"
    " if making a question takes longer than answering it.",
    low=1,
    high=1024,
    free=setting_lib.SUPERVISION,
  )
