"""What three papers of the group behind AReaL claim, and what is seen on sums.

    python benchmarks/papers.py --paper=preference --workdir=/tmp/preference
    python benchmarks/papers.py --paper=rewards --workdir=/tmp/rewards
    python benchmarks/papers.py --paper=efficiency --workdir=/tmp/efficiency

The studies, one for each value of --paper:

    preference  DPO against PPO (arXiv:2404.10719): supervised training, DPO,
                DPO in four rounds, and PPO with what makes it good, one by one;
                then several coefficients of the divergence
    rewards     learned rewards beside success (arXiv:2410.15115): of outcomes,
                of steps, and of steps with clip and delta
    efficiency  how long to think (arXiv:2506.07104): rewards of right answers
                after parts of a thought, beside others, and the accuracy at
                each length

docs/project/papers.md says what each does, and where it differs from its paper.
The models have half a million parameters, and the questions are sums that are
worked out with one operation a line.

Everything is kept in --workdir. A command that was stopped, in whatever way,
goes on there with the stage that it was in. Another --paper needs another
directory. More --seeds add to what is there. --quick makes every stage as short
as it can be: the numbers mean nothing then, only that there are some.

Prints tables and, as the last line, one JSON object: `paper`, `rows`, and
`claims`, each with what was `expected`, what was `seen`, the `differences` with
95 % intervals, and the `verdict`: "holds", "does not hold" or "not decided".
The study `rewards` has `returns` as well, and `efficiency` has `curves` and
`quadrature`. Hardware: two CPU cores.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import signal
import sys
from typing import Any

from absl import app
from absl import flags
from absl import logging
import launching
import paper_efficiency
import paper_models
import paper_preference
import paper_rewards
import paper_study

# Models this small are fastest there.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_STUDIES = ("preference", "rewards", "efficiency")
_PAPER = flags.DEFINE_enum("paper", None, _STUDIES, "Which.", required=True)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where everything is kept.", required=True
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, comma-separated.")
flags.register_validator(
  _SEEDS,
  lambda seeds: (
    bool(seeds)
    and all(map(str.isdecimal, seeds))
    and len(seeds) == len({*map(int, seeds)})
  ),
  message="different integers, separated by commas, as 0,1,2",
)
_QUICK = flags.DEFINE_bool("quick", False, "Only whether every stage runs.")


def main(argv: Sequence[str]) -> None:
  """Make the stages that are missing, and print the tables."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  logging.set_verbosity(logging.WARNING)  # Orbax tells what it reads
  # The launch script that runs is ended too, as after Ctrl-C.
  signal.signal(signal.SIGTERM, paper_study.stop_early)
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  launching.once(workdir, "study", [_PAPER.value, _QUICK.value], lambda: {})
  study = paper_study.Study(
    directory=workdir,
    seeds=list(map(int, _SEEDS.value)),
    is_quick=_QUICK.value,
  )
  paper_models.use_compile_cache(workdir / "compile_cache")
  said: dict[str, Any] = {"paper": _PAPER.value}
  if _PAPER.value == "preference":
    said["rows"], said["claims"] = paper_preference.run(study)
  elif _PAPER.value == "rewards":
    found = paper_rewards.run(study)
    said["rows"], said["returns"], said["claims"] = found
  else:
    said |= paper_efficiency.run(study)
  for table in (x for x in said if x != "paper"):
    print(f"{launching.markdown(said[table])}\n")
  print(json.dumps(said))


if __name__ == "__main__":
  app.run(main)
