"""Run the warm start alone: supervised training on worked solutions.

python launch/sft.py --config=configs/quickstart.py --workdir=/tmp/sft

This writes config.json, the tokenizer and WORKDIR/params. A run starts from
these parameters with --config.warm_start.checkpoint=WORKDIR/params. The last
line on stdout is JSON with the number of steps, the wall-clock time and the
path of the parameters.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json
import time

from jaxrl_async.config import sections
from jaxrl_async.run import config_checks

# Slow imports are made in main(), after all checks.


def main(config: sections.Config) -> None:
  """Train on worked solutions, and write the parameters."""
  import jax

  from jaxrl_async.reporting import progress as progress_lib
  from jaxrl_async.run import assembly
  from jaxrl_async.run import checks
  from jaxrl_async.run import initial_params
  from jaxrl_async.run import resume
  from jaxrl_async.storage import config_json
  from jaxrl_async.storage import workdir as workdir_lib

  config_checks.validate(config, len(jax.devices()))
  workdir = command_line.workdir()
  setup = checks.checked(config, jax.devices())
  start_s = time.perf_counter()
  with (
    progress_lib.Progress(config.warm_start.num_steps) as progress,
    workdir_lib.Claim(workdir, progress.note) as claim,
  ):
    resume.check_config_file(config, workdir)
    params = assembly.warm_start(
      setup,
      lambda step, loss: progress.stage(
        "warm start", step, config.warm_start.num_steps, f"loss {loss:.3f}"
      ),
    )
    claim.check()
    setup.tokenizer.save(workdir / "tokenizer")
    initial_params.save(workdir / "params", params)
    config_json.write(config, workdir)
  print(
    json.dumps(
      {
        "train_steps": config.warm_start.num_steps,
        "wall_s": time.perf_counter() - start_s,
        "params": str(workdir / "params"),
      }
    )
  )


if __name__ == "__main__":
  command_line.start(main, command_line.check_workdir)
