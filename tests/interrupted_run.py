"""A run on a dataset that depends on the hash seed, to be killed and resumed.

    python interrupted_run.py WORKDIR NUM_STEPS

Its reward tells questions apart.
"""

import dataclasses
import pathlib
import sys

import conftest  # noqa: F401  session settings, also as a script
from ml_collections import config_dict
import reward_scorers

from jaxrl_async.run import train as train_lib

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from configs import tiny  # noqa: E402


def get_config(num_steps):
  """configs/tiny.py on ransom_note, in prompts of 8 characters at most."""
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  config.task = dataclasses.replace(
    config.task,
    dataset="ransom_note",
    params=config_dict.ConfigDict(
      {
        "min_note_length": 1,
        "max_note_length": 2,
        "min_magazine_length": 3,
        "max_magazine_length": 4,
      }
    ),
    template="{ransom_note}?{magazine}\n",
  )
  config.eval.num_items = 4
  config.train.num_steps = num_steps
  return config


if __name__ == "__main__":
  train_lib.run(
    get_config(int(sys.argv[2])),
    pathlib.Path(sys.argv[1]),
    scorer=reward_scorers.tells_questions_apart,
  )
