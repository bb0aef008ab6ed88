"""Reinforcement learning of a pretrained model: SmolLM2-135M on two cores.

    uv run benchmarks/pretrained.py --directory=/tmp/pretrained \
      --model=/tmp/smollm2/model

Runs configs/smollm2.py, once for each of --variants and --seeds, and compares
the policy at the end with the pretrained model. --model names the model, as the
setting `model.name` does, by a directory or a name of the hub. Where no hub can
be reached, smollm2_model.py writes such a directory.

Everything is kept in --directory. A command that was stopped goes on there with
the run that it was in. Prints, for each run, its held-out accuracies and some
completions of before and after, then a table, and as the last line one JSON
object. Columns of the table:

    sampled, greedy   held-out accuracy before and after; the sampled one at the
                      temperature of training
    tokens            mean length of the sampled answers before and after
    kl                nats by which an answer of the policy is more likely under
                      it than under the pretrained model, both at the
                      temperature of training: the mean over --answers answers
                      to different held-out questions estimates KL(policy ||
                      pretrained) of whole answers
    rl_s              seconds of the RL stage
    train, rollout    share of these in which the slices were busy

Hardware: two CPU cores with nothing else on them. docs/project/results.md has
the result.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import statistics
import sys
from typing import Any

from absl import app
from absl import flags
import launching
import pyarrow.parquet

import jaxrl_async

_DIRECTORY = flags.DEFINE_string(
  "directory", None, "Where runs and results are kept.", required=True
)
_MODEL = flags.DEFINE_string(
  "model", "hf:HuggingFaceTB/SmolLM2-135M-Instruct", "As model.name."
)
_VARIANTS = flags.DEFINE_list(
  "variants", ["full", "lora"], "full and lora, or one of them."
)
flags.register_validator(
  _VARIANTS, lambda names: set(names) <= {"full", "lora"}, "full or lora"
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Seeds, comma-separated.")
_ANSWERS = flags.DEFINE_integer(
  "answers", 64, "Answers from which the KL is estimated.", lower_bound=1
)
_SET = flags.DEFINE_multi_string(
  "set", [], "A further setting of every run, as train.num_steps=10."
)

_SHOWN = 4  # completions of before and after
_SAMPLED, _GREEDY = "eval/held_out/avg@1", "eval/greedy/avg@1"
_LENGTH = "eval/held_out/tokens_mean"


def _completions(workdir: pathlib.Path, step: int) -> list[Mapping[str, Any]]:
  """Return some answers of an evaluation, in the order of the questions."""
  path = workdir / "samples" / f"eval_{step:010}.parquet"
  return pyarrow.parquet.read_table(path).slice(0, _SHOWN).to_pylist()


def _kl(
  first: Any, last: Any, config: Mapping[str, Any], items: Sequence[Any]
) -> float:
  """Return the estimated KL of whole answers, in nats."""
  task, temperature = config["task"], config["rollout"]["temperature"]
  chats = []
  for item in items[: _ANSWERS.value]:
    question = task["template"].format(**item["metadata"])
    chats.append(
      [
        {"role": "system", "content": task["system"]},
        {"role": "user", "content": question},
      ]
    )
  answers = last.generate(
    chats,
    temperature=temperature,
    max_tokens=config["rollout"]["max_completion_tokens"],
  )
  pairs = list(zip(chats, answers, strict=True))
  return statistics.mean(
    float(x.sum() - y.sum())
    for x, y in zip(
      last.logprobs(pairs, temperature=temperature),
      first.logprobs(pairs, temperature=temperature),
      strict=True,
    )
  )


def _row(
  variant: str, seed: str, summary: Mapping[str, Any], workdir: pathlib.Path
) -> dict[str, Any]:
  """Return what the table says of a run, and print its course."""
  lines = [x for x in launching.metrics(workdir) if _SAMPLED in x]
  print(f"\n{variant}, seed {seed}: sampled accuracy by train step")
  print(", ".join(f"{x['step']}: {x[_SAMPLED]:.3f}" for x in lines))
  begin, end = lines[0], lines[-1]
  for when in begin, end:
    print(f"answers at step {when['step']}:")
    for one in _completions(workdir, when["step"]):
      print(
        f"  {one['prompt_id']}, right is {one['expected']}:"
        f" {one['completion']!r}"
      )
  config = json.loads((workdir / "config.json").read_text())
  items = json.loads((workdir / "held_out.json").read_text())["items"]
  last = launching.metrics(workdir)[-1]
  return {
    "variant": variant,
    "seed": seed,
    "steps": end["step"],
    "sampled_before": begin[_SAMPLED],
    "sampled_after": end[_SAMPLED],
    "greedy_before": summary["eval_before_greedy"],
    "greedy_after": summary["eval_after_greedy"],
    "tokens_before": begin[_LENGTH],
    "tokens_after": end[_LENGTH],
    "kl": _kl(
      jaxrl_async.load(_MODEL.value), jaxrl_async.load(workdir), config, items
    ),
    "rl_s": summary["rl_s"],
    "train": last["run/train_busy_s"] / summary["rl_s"],
    "rollout": last["run/rollout_busy_s"] / summary["rl_s"],
    "curve": [[x["step"], x[_SAMPLED]] for x in lines],
  }


def main(argv: Sequence[str]) -> None:
  """Make the runs that are missing, and print what came of them."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  directory = pathlib.Path(_DIRECTORY.value)
  rows = []
  for seed in _SEEDS.value:
    for variant in _VARIANTS.value:
      name = f"{variant}_{seed}"
      suffix = ":lora" if variant == "lora" else ""
      summary = launching.launch_once(
        "train.py",
        directory,
        name,
        f"--compile_cache={directory / 'compiled'}",
        f"--config={launching.ROOT / 'configs' / 'smollm2.py'}{suffix}",
        f"--config.model.name={_MODEL.value}",
        f"--config.seed={seed}",
        *(f"--config.{x}" for x in _SET.value),
      )
      rows.append(_row(variant, seed, summary, directory / name))
  print(launching.markdown(rows))
  print(json.dumps({"rows": rows}))


if __name__ == "__main__":
  app.run(main)
