r"""GSM8K, and MATH beside it, with Qwen models on one GPU or one TPU host.

    uv run --extra cuda12 launch/train.py --config=configs/gsm8k.py:0.5b \
      --workdir=/tmp/gsm8k --config.task.dataset=jsonl:gsm8k/train.jsonl \
      --config.task.eval_dataset=jsonl:gsm8k/test.jsonl

The variant after the colon is the hardware that the sizes are for. The memory
is what `--dry_run` estimates for a device: of both slices together on a single
GPU, and of each slice on the TPU.

| variant       | model                 | hardware          | memory           |
| ------------- | --------------------- | ----------------- | ---------------- |
| 0.5b          | Qwen2.5-0.5B-Instruct | one 24 GB GPU     | 14.4 GiB         |
| 1.5b          | Qwen2.5-1.5B-Instruct | one 80 GB GPU     | 42.6 GiB         |
| 1.5b@v5e:2x4  | Qwen2.5-1.5B-Instruct | TPU v5e-8         | 8.6 and 6.6 GiB  |
| 8b            | Qwen3-8B, LoRA        | one 80 GB GPU     | 52.6 GiB         |
| 8b@v5e:2x4    | Qwen3-8B, LoRA        | TPU v5e-8         | 6.3 and 5.9 GiB  |

The models come from the Hugging Face hub (`hf:Qwen/...`); `model.name` may be a
directory instead. Qwen3-8B is asked not to think first, by `/no_think`.

`-math` after it, as in `1.5b-math`, trains on a mixture of GSM8K and MATH.
`math/train.jsonl` has to have the columns problem and answer. `-tools`, as in
`1.5b-tools`, lets the policy run Python in the sandbox, and keeps the caches of
conversations that wait for a result, which are 0.6 GiB and 1.3 GiB more on a
GPU by arithmetic.

None of these has been run yet: no such device was at hand. To see what a
variant needs without the weights, name the built-in shapes and any tokenizer:

    uv run launch/train.py --config=configs/gsm8k.py:0.5b --dry_run \
      --topology=gpu:24GB --config.model.name=qwen2-0.5b \
      --config.model.tokenizer=TOKENIZER --config.task.chat=False
"""

from ml_collections import config_dict

from jaxrl_async.config import sections

_ASK = (
  "{question}\nThink step by step, and put the final answer into \\boxed{{}}."
)
_MATH, _TOOLS = "-math", "-tools"
_MODELS = {
  "0.5b": "hf:Qwen/Qwen2.5-0.5B-Instruct",
  "1.5b": "hf:Qwen/Qwen2.5-1.5B-Instruct",
  "8b": "hf:Qwen/Qwen3-8B",
}
# Slots and prefilled rows of a replica, and rows of a microbatch in all.
_SIZES = {
  "0.5b": (64, 4, 4),
  "1.5b": (64, 4, 8),
  "1.5b@v5e:2x4": (16, 2, 8),
  "8b": (64, 4, 4),
  "8b@v5e:2x4": (32, 4, 4),
}


def get_config(variant: str = "0.5b") -> sections.Config:
  """Return the run of this file; variants are described above."""
  size = (variant or "0.5b").removesuffix(_MATH).removesuffix(_TOOLS)
  sections.require(
    size in _SIZES,
    "variant",
    f"{sections.shown(variant)}; use {', '.join(_SIZES)}, and {_MATH} or"
    f" {_TOOLS} after it",
  )
  slots, prefill_rows, rows = _SIZES[size]
  model, _, has_tpu = size.partition("@")
  is_lora = model == "8b"
  mesh = sections.MeshSection()
  if has_tpu and is_lora:
    mesh = sections.MeshSection(train_fsdp=4, rollout_tensor=4)
  elif has_tpu:
    mesh = sections.MeshSection(train_fsdp=4, rollout_data=4)
    slots *= mesh.rollout_data
    prefill_rows *= mesh.rollout_data
  config = sections.Config(
    model=sections.ModelSection(
      name=_MODELS[model],
      compute_dtype="bfloat16",
      lora=sections.LoraSection(rank=16 if is_lora else 0, alpha=32.0),
    ),
    mesh=mesh,
    task=_task(has_math=variant.endswith(_MATH), suffix=" /no_think" * is_lora),
    rollout=sections.RolloutSection(
      num_slots=slots,
      max_prompt_tokens=512,
      max_completion_tokens=1_024,
      cache_tokens=1_536,
      decode_steps_per_call=32,
      # The caches of running sequences are recomputed for each version, mostly
      # in buckets of 512 and 1,024 tokens: 4 rows of them fill a GPU, and 2 a
      # TPU. A group's prompt is prefilled once, but mostly alone, and it pays
      # for all rows: with 8, by arithmetic, prompts would cost more than
      # recomputing saves.
      # As many sequences as rows wait for slots that end in the next call, so
      # with a single row the other slots that end would idle for a call.
      prefill_rows=prefill_rows,
      prefill_buckets=(256, 512, 1_024, 1_536),
      window_buckets=(512, 1_536),
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
      num_steps=150,
      tokens_per_row=2_048,
      rows_per_microbatch=rows,
      # Ten passes over the hidden states; docs/project/scaling.md has the
      # memory of other chunks.
      vocab_chunk=16_384,
      optimizer=sections.OptimizerSection(
        learning_rate=1e-5 if is_lora else 1e-6, warmup_steps=10, b2=0.95
      ),
    ),
    # Beside training it would need a second version of the weights and a cache.
    eval=sections.EvalSection(num_items=512, every=25),
  )
  if variant.endswith(_TOOLS):
    _use_tools(config)
  return config


def _use_tools(config: sections.Config) -> None:
  config.task.episode = "tools"
  config.task.episode_params = config_dict.ConfigDict(
    {"tools": ["python"], "max_calls": 4}
  )
  rollout = config.rollout
  rollout.prefill_chunk = 256
  # As many conversations may wait for a result as there are slots, if they are
  # half as long as the longest.
  rollout.kept_tokens = rollout.num_slots * rollout.cache_tokens // 2
  num_tokens = rollout.num_slots * rollout.cache_tokens + rollout.kept_tokens
  rollout.num_pages = num_tokens // rollout.page_tokens


def _task(*, has_math: bool, suffix: str) -> sections.TaskSection:
  task = sections.TaskSection(
    dataset="jsonl:gsm8k/train.jsonl",
    eval_dataset="jsonl:gsm8k/test.jsonl",
    template=_ASK + suffix,
    chat=True,
    answer_prefix="####",
    reward="mathematics",
    on_failed_score=sections.OnFailedScore.ZERO,
    reward_workers=4,
  )
  if has_math:
    task.dataset = task.eval_dataset = ""
    task.sources = config_dict.ConfigDict(
      {
        "gsm8k": {
          "dataset": "jsonl:gsm8k/train.jsonl",
          "eval_dataset": "jsonl:gsm8k/test.jsonl",
          "weight": 1.0,
        },
        "math": {
          "dataset": "jsonl:math/train.jsonl",
          "fields": {"question": "problem"},
          "weight": 1.0,
        },
      }
    )
  return task
