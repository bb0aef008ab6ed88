"""Read the completions that a run has sampled, or make its summary.

uv run launch/show.py --workdir=/tmp/quickstart --sort=reward --num=10
uv run launch/show.py --workdir=/tmp/quickstart --summary

Both also work while the run goes on, and after it died. On a terminal the
completions are shown in a pager, and otherwise as plain text.
"""

import command_line  # isort: skip, first, as in the other scripts

import os
import pathlib
import sys

from absl import flags

from jaxrl_async.config import sections

# Slow imports are made where they are used, after all checks.

_STEP = flags.DEFINE_integer(
  "step", None, "Only this train step; all steps by default.", 0
)
_SORT = flags.DEFINE_enum(
  "sort",
  "step",
  ["step", "reward", "length"],
  "Newest step first and group by group, or the best completions first, or the"
  " longest.",
)
_REVERSE = flags.DEFINE_bool(
  "reverse", False, "The other way round: the worst, or the shortest, first."
)
_PROMPT = flags.DEFINE_string(
  "prompt", "", "Only prompts with this text, or with this prompt_id."
)
_FAILED = flags.DEFINE_bool("failed", False, "Only what could not be scored.")
_EVAL = flags.DEFINE_bool(
  "eval", False, "Completions of evaluations instead of train steps."
)
_NUM = flags.DEFINE_integer(
  "num", 20, "At most this many completions; 0 shows all.", 0
)
_SUMMARY = flags.DEFINE_bool(
  "summary",
  False,
  "Write summary.json and summary.png from the metrics of the run so far, and"
  " print the summary, instead of completions.",
)


def _check() -> None:
  if not command_line.WORKDIR.value:
    raise sections.ConfigError("workdir: missing; use --workdir=DIRECTORY")
  if not os.path.isdir(command_line.WORKDIR.value):
    raise sections.ConfigError(
      f"workdir: {sections.shown(command_line.WORKDIR.value)} is no directory"
    )


def _summary(workdir: pathlib.Path) -> str:
  from jaxrl_async.reporting import picture
  from jaxrl_async.reporting import summary as summary_lib

  try:
    record = summary_lib.read(workdir)
  except (FileNotFoundError, KeyError):
    raise sections.ConfigError(
      f"workdir: {sections.shown(str(workdir))} has no metrics of an RL run"
    ) from None
  except ValueError as error:
    raise sections.ConfigError(
      f"workdir: {workdir / 'metrics.jsonl'} is damaged ({error})"
    ) from None
  picture.draw(workdir, record)
  return summary_lib.write(workdir, record)


def main() -> None:
  """Show what the flags ask for."""
  from jaxrl_async.reporting import sample_pages

  workdir = pathlib.Path(command_line.WORKDIR.value)
  if _SUMMARY.value:
    print(_summary(workdir))
    return
  query = sample_pages.Query(
    step=_STEP.value,
    sort=_SORT.value,
    is_reversed=_REVERSE.value,
    prompt=_PROMPT.value,
    has_failed=_FAILED.value,
    is_evaluation=_EVAL.value,
    max_rows=_NUM.value,
  )
  os.environ.setdefault("LESS", "-R")  # lets colors through
  try:
    sample_pages.show(workdir, query)
  except BrokenPipeError:  # the reader has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
  command_line.start_without_config(main, _check, needs_jax=False)
