"""Sums in the head, with a second attempt after a hint: an environment.

uv run launch/train.py --config=configs/two_attempts.py --workdir=/tmp/attempts

It runs on two CPU cores; docs/how-to/environments.md says what was measured.
`one`, after a colon, is the same run without the second attempt.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections

# The name by which this file is imported.
HERE = "configs.two_attempts"


async def attempts(prompt, context, *, most):
  """Say how the right answer ends, and let the policy try again."""
  right = int(prompt.item["answer"])
  shown = prompt.tokens
  for left in reversed(range(most)):
    completion = yield shown
    text = context.tokenizer.decode(completion).strip().removeprefix("=")
    try:
      answer = int(text)
    except ValueError:
      return  # no number, and no reward
    if answer == right:
      context.reward(1.0)
      return
    if left:
      shown = context.tokenizer.encode(f"ends in {abs(right) % 10}\n")


def tries(item, rng):
  """Return a right answer, or a wrong one, the hint and another answer.

  Half of the other answers do not follow the hint, and are mostly wrong.
  """
  right = int(item["answer"])
  if rng.random() < 0.4:
    return f"={right}\n"
  first = right + error(rng)
  second = right if rng.random() < 0.5 else first + error(rng)
  return f"={first}\nends in {abs(right) % 10}\n={second}\n"


def error(rng):
  """Return how far a wrong answer is away."""
  return int(rng.choice((-1, 1)) * rng.integers(1, 10))


def answered(item, rng):
  """Return the right answer."""
  del rng  # there is one
  return f"={item['answer']}\n"


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are "" and "one"."""
  if variant not in ("", "one"):
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use one or none"
    )
  return sections.Config(
    model=sections.ModelSection(name="quickstart", remat=sections.Remat.DOTS),
    task=sections.TaskSection(
      dataset="chain_sum",
      params=config_dict.ConfigDict(
        {"min_terms": 5, "max_terms": 6, "min_digits": 1, "max_digits": 1}
      ),
      template="{expression}\n",
      answer_prefix="=",
      episode=f"{HERE}:attempts",
      episode_params=config_dict.ConfigDict({"most": 1 if variant else 2}),
      reward="episode",
    ),
    warm_start=sections.WarmStartSection(
      num_steps=400,
      rows_per_batch=16,
      num_examples=20_000,
      solver=f"{HERE}:{'answered' if variant else 'tries'}",
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=3e-3,
        warmup_steps=20,
      ),
    ),
    rollout=sections.RolloutSection(
      num_slots=48,
      max_prompt_tokens=24,
      max_completion_tokens=24,
      cache_tokens=48,
      stop=("\n",),  # an answer is a line
      decode_steps_per_call=8,
      prefill_rows=16,
      prefill_buckets=(32, 48),
      window_buckets=(48,),
    ),
    algorithm=sections.AlgorithmSection(
      max_staleness=4,
      group_size=8,
      groups_per_step=16,
      num_minibatches=2,
      proximal=sections.ProximalMode.LOGLINEAR,
    ),
    train=sections.TrainSection(
      num_steps=60,
      tokens_per_row=96,
      rows_per_microbatch=8,
      decay=0.1,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=4e-4,
        warmup_steps=4,
      ),
    ),
  )
