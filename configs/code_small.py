"""Small programs, scored by their unit tests in the sandbox: a CPU learns it.

    uv run benchmarks/code_task.py --output=/tmp/code_task
    uv run launch/train.py --config=configs/code_small.py --workdir=/tmp/code \
      --config.task.dataset=jsonl:/tmp/code_task/train.jsonl \
      --config.task.eval_dataset=jsonl:/tmp/code_task/test.jsonl

Hardware: two CPU cores, 2 GiB of memory, a few minutes. A policy of 400
thousand parameters writes a function of two numbers that a question describes
in words. Its warm start learns from solutions of which 40 percent are wrong.
Then the reward is whether the unit tests pass. `benchmarks/end_to_end.py` runs
all of it and prints the pass rates.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections


def get_config() -> sections.Config:
  """Return the run of this file; the dataset has to be named."""
  return sections.Config(
    model=sections.ModelSection(name="three-layers", remat=sections.Remat.NONE),
    task=sections.TaskSection(
      dataset="jsonl:/tmp/code_task/train.jsonl",
      eval_dataset="jsonl:/tmp/code_task/test.jsonl",
      fields=config_dict.ConfigDict({"answer": "draft"}),
      template="{question}\n",
      answer_prefix="",
      reward="code",
      reward_workers=2,
    ),
    warm_start=sections.WarmStartSection(
      num_steps=100,
      rows_per_batch=8,
      solver="field:answer",
      num_examples=4_000,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=1e-2,
        warmup_steps=20,
        max_grad_norm=0.3,
      ),
    ),
    rollout=sections.RolloutSection(
      num_slots=32,
      max_prompt_tokens=48,
      max_completion_tokens=48,
      cache_tokens=96,
      decode_steps_per_call=16,
      prefill_rows=8,
      prefill_buckets=(48, 96),
      window_buckets=(96,),
    ),
    algorithm=sections.AlgorithmSection(
      group_size=8,
      groups_per_step=8,
      num_minibatches=1,
      max_staleness=4,
      filter_zero_std=True,
      max_filtered_groups=400,
    ),
    train=sections.TrainSection(
      num_steps=30,
      tokens_per_row=192,
      rows_per_microbatch=4,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=7e-4,
        max_grad_norm=0.3,
      ),
    ),
    eval=sections.EvalSection(num_items=64, every=0),
    run=sections.RunSection(checkpoint_every=10),
  )
