"""Each published method on one task: what it reaches, compared with GRPO.

    python benchmarks/algorithms.py --directory=/tmp/algorithms

Every run is configs/staleness.py with the fields in which a function of
`config.algorithms` differs from the defaults, for the same number of train
steps of the same size. The runs of a seed begin from the same warm start and
are evaluated on the same held-out questions. The learning rate, the minibatches
and the group size are those of that file. They were not tuned for any method,
so that the comparison says how the methods train with the same settings, and
not which one is best.

--methods takes names of these functions, and variants of them:

    sequence_weights  areal() with the geometric mean of a trajectory's weights,
                      between 0.9 and 1.1
    sequence_mask     areal() with sequence_kl_bound=0.02
    dual_clip         areal() with dual_clip=3
    two_epochs        areal() with two passes over each batch
    gspo_02, gspo_05  gspo() with clips of 0.02 and 0.05 on both sides

With little staleness the corrections have little to do.
--set=algorithm.max_staleness=16 gives them more.

Everything is kept in --directory. A command that was stopped goes on there with
the run that it was in. Other settings need another directory. What is still to
be made, and about how long it takes, is said at the start.

Prints a table and, as the last line, one JSON object. `table` has a row for
each method, with means over the seeds: the accuracies, `difference` from the
sampled accuracy of GRPO with the same seed, and what the metrics say of the
updates. `noise` is the standard error of a difference, GRPO's own noise
included, with its `degrees_of_freedom`. `is_within_noise` says that a
difference is not significant at 5 %; of twenty methods that do not differ, one
is expected outside. Hardware: two CPU cores.
"""

from collections.abc import Sequence
import json
import pathlib
import sys

from absl import app
from absl import flags
import compared_methods as methods
import launching

_DIRECTORY = flags.DEFINE_string(
  "directory", None, "Where runs and results are kept.", required=True
)
_NAMES = flags.DEFINE_list(
  "methods",
  [*methods.METHODS],
  "Functions of algorithms, and variants of them.",
)
flags.register_validator(
  _NAMES,
  lambda names: (
    {methods.REFERENCE} < set(names) <= methods.METHODS.keys()
    and len(names) == len({*names})
  ),
  message=f"{methods.REFERENCE} and others of {', '.join(methods.METHODS)}",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, comma-separated.")
flags.register_validator(
  _SEEDS,
  lambda seeds: (
    all(map(str.isdecimal, seeds)) and 1 < len(seeds) == len({*map(int, seeds)})
  ),
  message="two or more different integers, separated by commas, as 0,1,2",
)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of each run.", lower_bound=2)
_SET = flags.DEFINE_multi_string(
  "set",
  [],
  "A further setting of every run and of its warm start, as eval.num_items=64.",
)


def main(argv: Sequence[str]) -> None:
  """Make the runs that are missing, and print the table."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  comparison = methods.Comparison(
    directory=pathlib.Path(_DIRECTORY.value),
    methods=_NAMES.value,
    seeds=list(map(int, _SEEDS.value)),
    num_steps=_STEPS.value,
    further=_SET.value,
  )
  said = methods.said(methods.made(comparison))
  print(launching.markdown(said["table"]))
  print(json.dumps(said))


if __name__ == "__main__":
  app.run(main)
