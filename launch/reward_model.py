r"""Label solutions, train a reward model on pairs or labels, or score with one.

uv run launch/reward_model.py --config=FILE --workdir=/tmp/reward \
    --config.warm_start.checkpoint=/tmp/sft/params
uv run launch/reward_model.py --config=FILE --workdir=/tmp/reward \
    --config.warm_start.checkpoint=/tmp/sft/params --score=jsonl:texts.jsonl
uv run launch/reward_model.py --config=FILE --workdir=/tmp/labels \
    --config.warm_start.checkpoint=/tmp/sft/params --labels=monte_carlo

The section `preference` of the config says with which loss, on which columns of
the data and for how long. The result is WORKDIR/params. The same command on the
same workdir continues from its newest checkpoint. The last line on stdout is
JSON: the number of steps, the wall-clock time, the validation loss before and
after, and the path of the parameters.

With --labels the policy of warm_start.checkpoint solves prompts of the task.
WORKDIR/labels.jsonl gets its solutions in steps with their labels. A reward
model is trained on it with --config.task.dataset=jsonl:WORKDIR/labels.jsonl.

With --score there is one line of JSON for each row of the data instead. With
--port the trained model is a reward server on that port of this machine, until
SIGTERM or Ctrl-C. A run names it as task.reward=http://127.0.0.1:PORT/, and a
model of steps as http://127.0.0.1:PORT/?reward=clip_delta&threshold=0.6.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json
import pathlib
import sys

from absl import flags

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import addresses

# Slow imports are made in main(), after all checks.

_SCORE = flags.DEFINE_string(
  "score",
  "",
  "URI of rows with prompts and completions, which a trained model scores.",
)
_PORT = flags.DEFINE_integer(
  "port",
  None,
  "Serve the scores of a trained model on this port; 0 takes a free one.",
  0,
  65535,
)

_LABELS = flags.DEFINE_enum(
  "labels",
  None,
  ["outcome", "monte_carlo"],
  "Label solutions of the policy: outcome labels each as a whole, monte_carlo"
  " each step by how often the policy solves the problem from there.",
)
_NUM_PROMPTS = flags.DEFINE_integer(
  "num_prompts", 1000, "Prompts that --labels takes a solution of.", 1
)
_COMPLETIONS = flags.DEFINE_integer(
  "completions", 8, "Completions from each step, for monte_carlo.", 1
)


def _check() -> None:
  command_line.check_workdir()
  sections.require(
    not (_LABELS.value and _SCORE.value), "labels", "not together with --score"
  )
  if _PORT.value is None:
    return
  sections.require(not _LABELS.value, "port", "not together with --labels")
  sections.require(not _SCORE.value, "port", "not together with --score")
  addresses.check_can_bind("port", "127.0.0.1", _PORT.value)


def _serve(config: sections.Config, workdir: pathlib.Path) -> None:
  """Answer with scores until a signal arrives."""
  from jaxrl_async.supervised import reward_server

  stop = supervisor_lib.StopRequest()
  with stop.on_signals(
    lambda text: print(text, file=sys.stderr),
    "ending; once more ends it now",
    "ended at once",
  ):
    reward_server.serve(
      config,
      workdir,
      port=_PORT.value or 0,
      stop=stop,
      on_ready=lambda address: print(
        f"serving the scores of {workdir} at {address}", flush=True
      ),
    )


def main(config: sections.Config) -> None:
  """Train or label and print the summary, or print or serve scores."""
  import jax

  from jaxrl_async.supervised import reward_model
  from jaxrl_async.supervised import step_labels

  config_checks.validate(config, len(jax.devices()))
  workdir = command_line.workdir()
  if _PORT.value is not None:
    _serve(config, workdir)
    return
  if _LABELS.value:
    found = step_labels.write(
      config,
      workdir,
      kind=_LABELS.value,
      num_prompts=_NUM_PROMPTS.value,
      completions=_COMPLETIONS.value,
    )
    print(json.dumps(found))
    return
  if not _SCORE.value:
    print(json.dumps(reward_model.train(config, workdir)))
    return
  for line in reward_model.scores(config, workdir, _SCORE.value):
    print(json.dumps(line))


if __name__ == "__main__":
  command_line.start(
    main,
    _check,
    check_config=config_checks.check_preference,
  )
