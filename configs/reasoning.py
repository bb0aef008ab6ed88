"""Sums in steps, a line each, which are to be right at any length of thought.

uv run launch/train.py --config=configs/reasoning.py --workdir=/tmp/reasoning
uv run launch/evaluate.py --checkpoint=/tmp/reasoning --output=/tmp/curve \
  --budgets=0,4,8,16,32,64 --end='#' --samples=4

The variants, after a colon, are the rewards that arXiv:2506.07104 compares:
outcome (the default), length_penalty, fixed (a third of the tokens), and
exponential, uniform and oracle, the budgets of thought that are scored
(docs/reference/algorithms.md).

A run takes 5 to 10 minutes on two CPU cores. That is too short for a result: in
one run each, beside other work, the sampled held-out accuracy rose from 0.25 to
0.36 (outcome) and to 0.27 (exponential). More steps were not tried.

The worked solutions say some lines twice, have mistakes, and a quarter of them
stop somewhere and answer at once. What is cut off like this is shown and not
learned, so that policies are able to answer early, but do not try to.
"""

from ml_collections import config_dict

from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import sections

# The name by which this file is imported.
HERE = "configs.reasoning"
LONGEST = 96  # tokens of a completion
END = "#"
CUT, MISTAKEN, REPEATED = 0.25, 0.08, 0.5  # shares of solutions, and of lines
BUDGETS = {
  "exponential": budgets_lib.exponential(4, LONGEST, 5),
  "uniform": budgets_lib.uniform(LONGEST, 5),
  # A guess; `algorithms.budget_curves.greedy` finds those of a known curve.
  "oracle": (16, 24, 32, 40, 64),
}
VARIANTS = "outcome", "length_penalty", "fixed", *BUDGETS


def solution(item, rng):
  """Return a sum in steps and its answer, or the part that is shown and it."""
  first, *rest = item["metadata"]["expression"].split()
  total, lines = int(first), []
  for operator, term in zip(rest[::2], rest[1::2], strict=True):
    step = f"{total}{operator}{term}"
    total += int(term) if operator == "+" else -int(term)
    if rng.random() < MISTAKEN:
      total += int(rng.choice((-1, 1)))
    lines += [f"{step}={total}\n"] * (1 + int(rng.random() < REPEATED))
  return some_cut("".join(lines), str(total), item, rng)


def of_row(item, rng):
  """Return what `solution` does, of a row with the column solution."""
  thought, _, answer = item["metadata"]["solution"].rpartition(END)
  return some_cut(thought, answer, item, rng)


def some_cut(thought, answer, item, rng):
  """Return a thought and its answer, or a part of it and the right answer."""
  if rng.random() >= CUT:
    return f"{thought}{END}{answer}"
  at = int(rng.integers(len(thought)))
  return f"{thought[:at]}{END}", item["answer"]


def short(item, completion):
  """Score a right answer 1, and less for each token, down to a half."""
  is_right = completion.answer == item["answer"]
  return is_right * (1 - 0.5 * len(completion.tokens) / LONGEST)


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; the variants are `VARIANTS`."""
  variant = variant or VARIANTS[0]
  if variant not in VARIANTS:
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use one of {', '.join(VARIANTS)}"
    )
  has_budgets = variant in BUDGETS
  return sections.Config(
    model=sections.ModelSection(name="reasoning", remat=sections.Remat.DOTS),
    task=sections.TaskSection(
      dataset="chain_sum",
      params=config_dict.ConfigDict(
        {"min_terms": 4, "max_terms": 6, "min_digits": 1, "max_digits": 1}
      ),
      template="{expression}\n",
      answer_prefix=END,
      reward=f"{HERE}:short" if variant == "length_penalty" else "exact",
      # Right in the most tokens still is.
      solved_score=0.5 if variant == "length_penalty" else 1.0,
      episode=budgets_lib.EPISODE if has_budgets else "",
      episode_params=config_dict.ConfigDict(
        {"budgets": BUDGETS[variant], "end": END, "max_tokens": 4}
        if has_budgets
        else {}
      ),
    ),
    warm_start=sections.WarmStartSection(
      num_steps=600,
      rows_per_batch=16,
      num_examples=20_000,
      solver=f"{HERE}:solution",
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=3e-3,
        warmup_steps=20,
      ),
    ),
    rollout=sections.RolloutSection(
      num_slots=64,
      max_prompt_tokens=24,
      max_completion_tokens=LONGEST // 3 if variant == "fixed" else LONGEST,
      cache_tokens=120,
      decode_steps_per_call=8,
      prefill_rows=16,
      prefill_buckets=(32, 64, 120),
      window_buckets=(64, 120),
    ),
    algorithm=sections.AlgorithmSection(
      max_staleness=2,
      group_size=8,
      groups_per_step=16,
      num_minibatches=2,
      advantage="segment" if has_budgets else "leave_one_out",
      advantage_scale=sections.AdvantageScale.NONE,
      proximal=sections.ProximalMode.LOGLINEAR,
    ),
    train=sections.TrainSection(
      num_steps=60,
      tokens_per_row=120,
      rows_per_microbatch=16,
      decay=0.1,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=4e-4,
        warmup_steps=4,
      ),
    ),
  )
