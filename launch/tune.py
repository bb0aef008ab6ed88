"""Find the fastest shapes of a config's train step on these devices.

    uv run launch/tune.py --config=configs/quickstart.py

It measures a train step of the config on random weights and made-up
trajectories, and then other shapes of the same step, which give the same result
up to rounding: rows of a microbatch, rematerialisation, and attention. The best
of each is combined with the others, and measured too. Then it measures
generation, and says which of the two slices will wait for the other.

Every candidate is compiled, which takes 5 s for a small model on a CPU and
minutes for a large one. You write its answer into your config.

Prints a table and, as the last line, one JSON object: `rows` (each with `flags`
and `step_s`, or `refused`), `flags` of the fastest, `speedup` over the config,
`train_s` and `rollout_s`.
"""

import command_line  # isort: skip, first, as in the other scripts

import json
import sys

from absl import flags

from jaxrl_async.config import sections

# Slow imports are made where they are used, after all checks.

_PROMPT = flags.DEFINE_integer(
  "prompt_tokens", 0, "Tokens of a prompt; 0 is half of the longest.", 0
)
_COMPLETION = flags.DEFINE_integer(
  "completion_tokens", 0, "Mean of the completions; 0 is half of the limit.", 0
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed steps of each shape.", 1)


def _check() -> None:
  rollout = command_line.CONFIG.value.rollout
  for name, flag, most in (
    ("prompt_tokens", _PROMPT, rollout.max_prompt_tokens),
    ("completion_tokens", _COMPLETION, rollout.max_completion_tokens // 2),
  ):
    sections.require(
      flag.value <= most, name, f"{flag.value} is too much; use up to {most}"
    )


def main(config: sections.Config) -> None:
  """Measure, and print what is fastest."""
  import jax

  from jaxrl_async.assembly import checks
  from jaxrl_async.assembly import speed

  setup = checks.checked(config, jax.devices())
  lengths = speed.lengths(
    config, prompt=_PROMPT.value, completion=_COMPLETION.value
  )
  print(
    f"assumed: prompts of {lengths.prompt} tokens, completions of"
    f" {lengths.completion} on average",
    file=sys.stderr,
  )
  rows = []
  for row in speed.tried(setup, lengths, repeats=_REPEATS.value):
    step_s = "refused" if row.step_s is None else f"{row.step_s:8.3f} s"
    print(f"{step_s}  {row.flags}", flush=True)
    rows.append(row)
  best = speed.fastest(rows)
  assert best.step_s is not None and rows[0].step_s is not None
  rollout_s = speed.generation_s(setup, lengths)
  print(speed.line(best.step_s, rollout_s))
  print(
    json.dumps(
      {
        "rows": [row.as_json() for row in rows],
        "flags": best.flags,
        "speedup": round(rows[0].step_s / best.step_s, 3),
        "train_s": best.step_s,
        "rollout_s": rollout_s,
      }
    )
  )


if __name__ == "__main__":
  command_line.start(main, _check)
