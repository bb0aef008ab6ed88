"""AReaL's recipe for DeepSeek-R1-Distill-Qwen-1.5B, on a TPU v5p-64.

    uv run --extra tpu launch/train.py --config=configs/deepseek_1p5b.py \
      --workdir=/tmp/deepseek \
      --config.model.name=DeepSeek-R1-Distill-Qwen-1.5B \
      --config.task.dataset=jsonl:math/train.jsonl \
      --config.task.eval_dataset=jsonl:math/test.jsonl

Hardware: the 32 chips of a v5p-64 (v5p:2x4x4), 8 of which train and 24
generate. `--dry_run` estimates 13.4 GiB for a chip that trains and 32.3 GiB for
one that generates, with the built-in shapes of Qwen2 1.5B. The recipe is that
of arXiv:2505.24298: 512 prompts with 16 answers each, four minibatches, Adam
with a learning rate of 2e-5, clipping at 0.2, a staleness of at most 8, and
answers of up to 27 thousand tokens. The rows have the columns problem and
answer, as those of DeepScaleR.

It has not been run: no TPU was at hand. docs/how-to/tpu.md says how a run
over several hosts is started.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections

_TOKENS = 28_672  # 1,024 of the prompt, 27,648 of the answer
_ASK = (
  "{question}\nPlease reason step by step, and put your final answer within"
  " \\boxed{{}}."
)


def get_config() -> sections.Config:
  """Return the run of this file."""
  mesh = sections.MeshSection(train_fsdp=8, rollout_data=24)
  return sections.Config(
    model=sections.ModelSection(
      name="DeepSeek-R1-Distill-Qwen-1.5B", compute_dtype="bfloat16"
    ),
    mesh=mesh,
    task=sections.TaskSection(
      dataset="jsonl:math/train.jsonl",
      eval_dataset="jsonl:math/test.jsonl",
      fields=config_dict.ConfigDict({"question": "problem"}),
      template=_ASK,
      chat=True,
      answer_prefix="",
      reward="mathematics",
      reward_workers=16,
    ),
    rollout=sections.RolloutSection(
      num_slots=mesh.rollout_data * 32,
      max_prompt_tokens=1_024,
      max_completion_tokens=_TOKENS - 1_024,
      cache_tokens=_TOKENS,
      decode_steps_per_call=32,
      # A row for each replica. Most running sequences need the bucket of 7,168
      # tokens when their caches are recomputed, which fills a chip.
      prefill_rows=mesh.rollout_data,
      prefill_buckets=(1_024, 7_168, 14_336, _TOKENS),
      window_buckets=(7_168, 14_336, _TOKENS),
      dtype="bfloat16",
    ),
    algorithm=sections.AlgorithmSection(
      group_size=16,
      groups_per_step=512,
      num_minibatches=4,
      max_staleness=8,
      clip_low=0.2,
      clip_high=0.2,
    ),
    train=sections.TrainSection(
      num_steps=250,
      tokens_per_row=_TOKENS,
      rows_per_microbatch=mesh.train_fsdp,
      # As in configs/gsm8k.py.
      vocab_chunk=16_384,
      optimizer=sections.OptimizerSection(
        learning_rate=2e-5,
        warmup_steps=4,
        b1=0.9,
        b2=0.95,
        eps=1e-5,
        weight_decay=0.05,
      ),
    ),
    # Beside training it would need a second version of the weights and a cache.
    eval=sections.EvalSection(num_items=256, every=25, temperature=0.6),
    # A step has 8,192 trajectories. Recording when they were written, for a
    # replay, would take megabytes a step.
    run=sections.RunSection(record_timing=False),
  )
