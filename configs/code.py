"""Programs scored by their tests, with Qwen2.5-Coder-1.5B on one 80 GB GPU.

    uv run --extra cuda12 --extra code launch/train.py \
      --config=configs/code.py --workdir=/tmp/code \
      --config.model.name=Qwen2.5-Coder-1.5B-Instruct \
      --config.task.dataset=jsonl:code/train.jsonl \
      --config.task.eval_dataset=jsonl:code/test.jsonl

Hardware: one 80 GB GPU, and 16 processor cores for the sandbox. Both slices
share the GPU; `--dry_run` estimates 48.2 GiB. A row has a question, and either
`tests` (Python that raises where the program is wrong, with the name of the
function in `entry_point`) or `cases`, a list of {"stdin": ..., "stdout": ...}.
A program whose objects the tests compare is left out and not taken for wrong.
The staleness is at most 4, as AReaL has it for code (arXiv:2505.24298).

It has not been run: no GPU was at hand. configs/code_small.py is a task of this
kind that two CPU cores learn. `--dry_run --topology=gpu:80GB` works without
weights as configs/gsm8k.py says.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections

_ASK = (
  "{question}\n\nWrite the program in Python, in one block that begins with"
  " ```python and ends with ```."
)


def get_config() -> sections.Config:
  """Return the run of this file."""
  return sections.Config(
    model=sections.ModelSection(
      name="Qwen2.5-Coder-1.5B-Instruct", compute_dtype="bfloat16"
    ),
    task=sections.TaskSection(
      dataset="jsonl:code/train.jsonl",
      eval_dataset="jsonl:code/test.jsonl",
      # The tests are columns of their own, and nothing else is compared.
      fields=config_dict.ConfigDict({"answer": ""}),
      template=_ASK,
      chat=True,
      answer_prefix="",
      rewards=config_dict.ConfigDict(
        {"tests": {"function": "code", "params": {"not_plain_fails": True}}}
      ),
      reward_workers=14,
      reward_timeout_s=60.0,
    ),
    rollout=sections.RolloutSection(
      num_slots=64,
      max_prompt_tokens=1_024,
      max_completion_tokens=2_048,
      cache_tokens=3_072,
      decode_steps_per_call=32,
      # 4,096 or 8,192 tokens in the buckets that most running sequences need
      # when their caches are recomputed; configs/gsm8k.py says why not more.
      prefill_rows=4,
      prefill_buckets=(512, 1_024, 2_048, 3_072),
      window_buckets=(1_024, 3_072),
      dtype="bfloat16",
    ),
    algorithm=sections.AlgorithmSection(
      group_size=8,
      groups_per_step=64,
      num_minibatches=4,
      max_staleness=4,
      filter_zero_std=True,
    ),
    train=sections.TrainSection(
      num_steps=200,
      tokens_per_row=3_072,
      rows_per_microbatch=8,
      # As in configs/gsm8k.py.
      vocab_chunk=16_384,
      optimizer=sections.OptimizerSection(
        learning_rate=2e-6, warmup_steps=10, b2=0.95
      ),
    ),
    # Beside training it would need a second version of the weights and a cache.
    eval=sections.EvalSection(num_items=256, every=25),
  )
