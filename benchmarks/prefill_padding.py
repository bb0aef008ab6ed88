"""How much padding there is when caches are recomputed, by arithmetic.

    uv run benchmarks/prefill_padding.py

When new weights are adopted, each running sequence is prefilled again in the
shortest bucket that holds it, `prefill_rows` sequences of one bucket at a time.
Padding is added to the sequences, and to the last call of each bucket in empty
rows.

Lengths are drawn for the slots of the TPU configs in two ways: as if every
completion ran to its limit, and as if completions were exponential with a mean
of a quarter of it. A completion is running at some moment with a probability
proportional to its length, and is then anywhere between its beginning and its
end.

"Two buckets" are the prompt and the whole length, with four rows for each
replica up to 8k tokens. The table is on standard output. Its last line is the
same as JSON.
"""

from collections.abc import Sequence
import json
import pathlib
import runpy
from typing import Any

from absl import app
import numpy as np

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_MODELS = {"1p5b": "1.5B", "7b": "7B", "32b": "32B"}
_NUM_ADOPTIONS = 2_000
_DRAWN = 100_000  # completions from which the running ones are chosen


def padded_tokens(
  lengths: np.ndarray, buckets: Sequence[int], rows: int
) -> np.ndarray:
  """Return the tokens of all prefill calls of an adoption, padding included.

  Args:
    lengths: [N S] of the running sequences of N adoptions.
    buckets: ascending; the last one holds every sequence.
    rows: rows of one call.
  """
  bucket = np.searchsorted(buckets, lengths)
  calls = [
    -(-np.sum(bucket == index, axis=1) // rows) for index in range(len(buckets))
  ]
  return rows * np.asarray(buckets) @ np.array(calls)


def running_lengths(
  rollout: Any, rng: np.random.Generator, *, is_tailed: bool
) -> np.ndarray:
  """Draw [N S] lengths of the sequences in the slots at N adoptions."""
  limit = rollout.max_completion_tokens
  shape = _NUM_ADOPTIONS, rollout.num_slots
  if is_tailed:
    drawn = np.minimum(rng.exponential(limit / 4, _DRAWN), limit)
    completions = rng.choice(drawn, shape, p=drawn / drawn.sum())
    prompts = rng.uniform(0.25, 1.0, shape) * rollout.max_prompt_tokens
  else:
    completions, prompts = limit, rollout.max_prompt_tokens
  written = rng.uniform(size=shape) * completions
  return np.ceil(prompts + written).astype(np.int64)


def _ratios(config: Any, *, is_tailed: bool) -> dict[str, float]:
  """Return padded tokens over needed tokens, with two buckets and now."""
  rollout, tokens = config.rollout, config.rollout.cache_tokens
  rng = np.random.default_rng(0)
  lengths = running_lengths(rollout, rng, is_tailed=is_tailed)
  two = padded_tokens(
    lengths,
    (rollout.max_prompt_tokens, tokens),
    config.mesh.rollout_data * (4 if tokens <= 8_192 else 1),
  )
  now = padded_tokens(lengths, rollout.prefill_buckets, rollout.prefill_rows)
  needed = lengths.sum()
  return {
    "two_buckets": round(float(two.sum() / needed), 2),
    "now": round(float(now.sum() / needed), 2),
  }


def main(argv: list[str]):
  """Print the table."""
  del argv
  results = {}
  print(
    "| config | slots | rows | buckets | to the limit: two buckets | now"
    " | with a tail: two buckets | now |"
  )
  print("| --- " * 8 + "|")
  for name, model in _MODELS.items():
    file = runpy.run_path(str(_CONFIGS / f"tpu_{name}.py"))
    for length in ("1k", "8k", "32k"):
      config = file["get_config"](length)
      rollout = config.rollout
      limit, tail = (_ratios(config, is_tailed=x) for x in (False, True))
      results[f"{name}:{length}"] = {"limit": limit, "tail": tail}
      buckets = ", ".join(f"{x:,}" for x in rollout.prefill_buckets)
      cells = [
        *(f"{model} {length}", rollout.num_slots, rollout.prefill_rows),
        *(buckets, *limit.values(), *tail.values()),
      ]
      print(f"| {' | '.join(map(str, cells))} |")
  print(json.dumps(results))


if __name__ == "__main__":
  app.run(main)
