"""Evaluate a policy: answer the questions of a dataset, several times each.

uv run launch/evaluate.py --checkpoint=/tmp/quickstart --output=/tmp/evaluation

This asks the held-out questions of a run. Any other dataset is named by
--dataset, for example jsonl:test.jsonl, and a directory in Hugging Face's
format can be evaluated as well. --config.SECTION.FIELD=VALUE changes one
setting of the run, for example --config.task.reward=mathematics. OUTPUT gets
every completion and the results. The same command continues an evaluation that
was stopped. docs/how-to/evaluation.md explains the numbers. The last line on
stdout is JSON.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import contextlib
import json
import pathlib
from typing import Any

from absl import flags
import checkpoint_config

from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.devices import xla_flags
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.storage import config_json
from jaxrl_async.storage import directories

# Slow imports are made where they are used, after all checks.

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  "",
  "A run's workdir, WORKDIR/params of launch/sft.py, a model in Hugging Face's"
  " format, or hf:ORG/NAME of its hub.",
)
_STEP = flags.DEFINE_integer(
  "step", -1, "Train step of a run's checkpoint; -1 is the newest.", -1
)
_DATASET = flags.DEFINE_string(
  "dataset",
  "",
  "Dataset as in task.dataset, all of whose rows are asked. By default the"
  " held-out questions of the run.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples", 1, "Answers to each question.", 1, setting_lib.MAX_SAMPLES
)
_NUM_ITEMS = flags.DEFINE_integer(
  "num_items",
  0,
  "Number of questions; 0 is all of a dataset of rows.",
  0,
  setting_lib.MAX_ITEMS,
)
_CATEGORY = flags.DEFINE_string(
  "category", "", "Column of a row by which the results are divided."
)
_BUDGETS = flags.DEFINE_list(
  "budgets",
  [],
  "Tokens after which thoughts are cut and answers are forced, such as 8,16.",
)
_END = flags.DEFINE_string(
  "end", "", "Text with which a thought ends, with --budgets."
)
_FORCED_SUFFIX = flags.DEFINE_string(
  "forced_suffix",
  "",
  "Text before a forced answer; by default the text of --end.",
)
_FORCED_TOKENS = flags.DEFINE_integer(
  "forced_tokens",
  None,
  "Most tokens of a forced answer; by default those of the policy's config, or"
  f" {budgets_lib.MAX_TOKENS}.",
  lower_bound=1,
)
_OUTPUT = flags.DEFINE_string(
  "output", "", "Directory for the completions and the results."
)


def _check() -> None:
  if command_line.WORKDIR.value:
    raise sections.ConfigError("workdir: not used here; use --output=DIRECTORY")
  checkpoint_config.check(_CHECKPOINT.value)
  sections.require(
    bool(_OUTPUT.value), "output", "missing; use --output=DIRECTORY"
  )
  directories.check_can_write("output", _OUTPUT.value)
  command_line.check_compile_cache()
  budgets_given()


def budgets_given() -> dict[str, Any]:
  """Return the parameters of budgets that were given."""
  more = {
    "end": _END.value,
    "suffix": _FORCED_SUFFIX.value,
    "max_tokens": _FORCED_TOKENS.value,
  }
  given = {name: value for name, value in more.items() if value}
  sections.require(
    bool(_BUDGETS.value) or not given,
    "budgets",
    "missing beside --end, --forced_suffix or --forced_tokens; use for example"
    " --budgets=8,16",
  )
  if not _BUDGETS.value:
    return {}
  sections.require(
    all(text.isdecimal() for text in _BUDGETS.value),
    "budgets",
    f"{','.join(_BUDGETS.value)} are not all numbers of tokens",
  )
  params: dict[str, Any] = {"budgets": tuple(map(int, _BUDGETS.value))}
  params |= given
  budgets_lib.of(**{"end": "...", **params})
  return params


def _given(config: sections.Config) -> set[str]:
  """Return the paths of the settings that differ from the checkpoint's own."""
  own = checkpoint_config.get_config(_CHECKPOINT.value)
  return set(config_json.differences(own, config))


def main(config: sections.Config) -> None:
  """Evaluate, print a table, and print the results as JSON."""
  import jax

  from jaxrl_async.evaluation import answer_results
  from jaxrl_async.evaluation import evaluation
  from jaxrl_async.reporting import progress as progress_lib
  from jaxrl_async.storage import workdir as workdir_lib

  command_line.use_own_compile_cache()
  output = pathlib.Path(_OUTPUT.value).absolute()
  stop = supervisor_lib.StopRequest()
  with (
    progress_lib.Progress(0) as progress,
    stop.on_signals(
      progress.note,
      "stopping; once more ends it now",
      "ended at once; what was written is whole",
    ),
    workdir_lib.Claim(output, progress.note),
  ):
    results = evaluation.evaluate(
      _CHECKPOINT.value,
      None if _STEP.value < 0 else _STEP.value,
      config,
      evaluation.Wanted(
        dataset=_DATASET.value,
        samples=_SAMPLES.value,
        num_items=_NUM_ITEMS.value,
        category=_CATEGORY.value,
        given=_given(config),
        budgets=budgets_given(),
      ),
      output,
      jax.devices(),
      progress=progress,
      stop=stop,
    )
  with contextlib.suppress(BrokenPipeError):
    print(answer_results.describe(results))
    print(json.dumps({"checkpoint": _CHECKPOINT.value, **results}))


if __name__ == "__main__":
  xla_flags.use(xla_flags.of_same_bits())
  command_line.use_config_of("checkpoint", "checkpoint_config.py")
  command_line.start(main, _check, check_config=fields_lib.check)
