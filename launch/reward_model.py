r"""Train a reward model on pairs or labelled steps, or score texts with one.

python launch/reward_model.py --config=FILE --workdir=/tmp/reward \
    --config.warm_start.checkpoint=/tmp/sft/params
python launch/reward_model.py --config=FILE --workdir=/tmp/reward \
    --config.warm_start.checkpoint=/tmp/sft/params --score=jsonl:texts.jsonl

The section `preference` of the config says with which loss, on which columns of
the data and for how long. The result is WORKDIR/params. The same command on the
same workdir continues from its newest checkpoint. The last line on stdout is
JSON: the number of steps, the wall-clock time, the validation loss before and
after, and the path of the parameters.

With --score there is one line of JSON for each row of the data instead.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json

from absl import flags

from jaxrl_async.config import sections
from jaxrl_async.run import config_checks
from jaxrl_async.run import preference_checks

# Slow imports are made in main(), after all checks.

_SCORE = flags.DEFINE_string(
  "score",
  "",
  "URI of rows with prompts and completions, which a trained model scores.",
)


def main(config: sections.Config) -> None:
  """Train a reward model and print the summary, or print scores."""
  import jax

  from jaxrl_async.run import reward_model

  config_checks.validate(config, len(jax.devices()))
  workdir = command_line.workdir()
  if not _SCORE.value:
    print(json.dumps(reward_model.train(config, workdir)))
    return
  for line in reward_model.scores(config, workdir, _SCORE.value):
    print(json.dumps(line))


if __name__ == "__main__":
  command_line.start(
    main,
    command_line.check_workdir,
    check_config=preference_checks.check_reward_model,
  )
