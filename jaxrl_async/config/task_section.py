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
_EPISODE: dict[str, Any] = {
  "fixed": "stored trajectories were begun with it",
  "of_answers": True,
}


class OnBadRow(enum.Enum):
  """What happens if a row of a dataset cannot be used."""

  ERROR = "error"
  SKIP = "skip"


class OnFailedScore(enum.Enum):
  """What happens to a completion that cannot be scored."""

  DROP = "drop"
  ZERO = "zero"


@dataclasses.dataclass(kw_only=True, slots=True)
class DatasetSection:
  """One dataset, and how its rows become prompts."""

  dataset: str = setting("chain_sum", **_QUESTION)
  """URI of the data, or the name of a dataset of reasoning-gym. See
  `data.tables.uri` for the kinds: jsonl, json, parquet, arrayrecord, datasets,
  hf, verifiers, reasoning_gym."""
  params: config_dict.ConfigDict = setting(config_dict.ConfigDict, **_QUESTION)
  """Parameters of a dataset of reasoning-gym, or settings of an environment of
  verifiers."""
  eval_dataset: str = setting("", **_QUESTION)
  """URI of the held-out rows. "" takes the dataset's own split `test` or
  `validation` if it has one (datasets, hf), and otherwise holds out
  `eval_percent` of the questions."""
  eval_percent: int = setting(10, low=1, high=99, **_QUESTION)
  """Share of the questions that a hash of their text holds out."""
  fields: config_dict.ConfigDict = setting(config_dict.ConfigDict, **_QUESTION)
  """Names the columns of a file that are the question and the answer, if they
  are not called so: {"question": "problem"}; "a.b" is in a column of objects.
  "messages" names a column of chat messages, which are then the prompt, and
  "tools" those that they may call. The other columns become the item's
  metadata."""
  on_bad_row: OnBadRow = setting(OnBadRow.ERROR, **_QUESTION)
  """Whether a row that cannot be used ends the start with an error or is left
  out."""
  template: str = setting("{question}\n", **_QUESTION)
  """A `str.format` template of the prompt. Its fields are "question" and the
  keys of the item's metadata."""
  chat: bool = setting(False, **_QUESTION)
  """The filled-in template is a user's message, and the tokenizer's own chat
  template makes the prompt of it."""
  system: str = setting("", **_QUESTION)
  """Message of the system before it; "" is none."""


@dataclasses.dataclass(kw_only=True, slots=True)
class SourceSection(DatasetSection):
  """An entry of `task.sources`; other settings are those of the task."""

  weight: float = setting(1.0, low=1e-3, high=1e6)
  """Share of the prompts, relative to the others."""


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardSection:
  """An entry of `task.rewards`."""

  function: str = setting("")
  """As `task.reward`; also matches and overlong, which need params."""
  params: config_dict.ConfigDict = setting(config_dict.ConfigDict)
  """Arguments of the function."""
  weight: float = setting(
    1.0, low=-setting_lib.MAX_INT, high=setting_lib.MAX_INT
  )
  """Factor of its scores."""
  timeout_s: float = setting(
    10.0, low=0.1, high=setting_lib.MAX_REWARD_TIMEOUT_S
  )
  """As `task.reward_timeout_s`."""
  retries: int = setting(1, low=0, high=setting_lib.MAX_REWARD_RETRIES)
  """As `task.reward_retries`."""
  sources: list = setting(list)
  """Names of the sources whose items it scores; all without it."""


@dataclasses.dataclass(kw_only=True, slots=True)
class TaskSection(DatasetSection):
  """The source of prompts, and how answers are extracted and scored."""

  sources: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    entries=SourceSection,
    needs=("dataset", "weight"),
    **_QUESTION,
  )
  """A mixture instead of one dataset: its members, by name."""
  answer_prefix: str = setting("=", **_SCORE)
  """The extracted answer is the text between the last occurrence of this prefix
  in the completion and the end of its line; "" takes the whole completion,
  stripped."""
  episode: str = setting("", **_EPISODE)
  """What decides how the turns of a trajectory follow from its prompt: tools,
  openenv, budgets (of thought, see `config.budgets`), or module:function; "" is
  a single turn. The directory in which a launch script is started is searched
  too."""
  episode_params: config_dict.ConfigDict = setting(
    config_dict.ConfigDict, **_EPISODE
  )
  """Keyword arguments of the episode."""
  max_turns: int = setting(0, low=0, high=setting_lib.MAX_INT, **_EPISODE)
  """A trajectory ends after this many turns of the policy; 0 is any number. The
  limits in tokens are in the section rollout."""
  episode_timeout_s: float = setting(
    600.0,
    low=0.1,
    high=setting_lib.MAX_TIMEOUT_S,
    also=(0,),
    free=setting_lib.SUPERVISION,
  )
  """Seconds that the answers of an async episode may take in all, without the
  turns of the policy. Its group fails after that; 0 waits for ever."""
  episode_workers: int = setting(
    2, low=1, high=1024, free=setting_lib.SUPERVISION
  )
  """Number of processes for the calls of episodes that block."""
  reward: str = setting("reasoning_gym", **_SCORE)
  """What scores a completion: reasoning_gym, mathematics, code, exact, numeric,
  answered, ended, episode, module:function of a module that does not
  import JAX, or the address of a server, http://HOST:PORT/PATH. The directory
  in which a launch script is started is searched too."""
  rewards: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    entries=RewardSection,
    needs=("function",),
    fixed="stored groups were scored with them",
    of_answers=True,
  )
  """Several rewards, by name, whose weighted sum is the score. `reward` is then
  not used."""
  solved_score: float = setting(
    1.0, fixed=setting_lib.HELD_OUT, of_answers=True
  )
  """A completion with at least this score counts as solved, in held-out
  accuracies and in the metrics reward/pass@k."""
  reward_timeout_s: float = setting(
    10.0,
    low=0.1,
    high=setting_lib.MAX_REWARD_TIMEOUT_S,
    free=setting_lib.SUPERVISION,
  )
  """Deadline for one score, or for one request to a server, which scores a
  group."""
  reward_workers: int = setting(
    1, low=1, high=1024, free=setting_lib.SUPERVISION
  )
  """Number of scoring processes."""
  reward_retries: int = setting(
    1, low=0, high=1000, free=setting_lib.SUPERVISION
  )
  """Further attempts before a completion, or a request, counts as failed."""
  on_failed_score: OnFailedScore = setting(OnFailedScore.DROP, **_SCORE)
  """Whether a completion whose scorer raises, hangs or dies is left out of its
  group or gets the score 0. If that happens to all of a group, the group
  fails."""
  max_failed_groups: int = setting(8, low=1, free=setting_lib.SUPERVISION)
  """The run ends after this many failed groups in a row."""
  question_workers: int = setting(
    2, low=1, high=1024, free=setting_lib.SUPERVISION
  )
  """Number of processes that make questions ahead of time. More of them help if
  making a question takes longer than answering it."""
