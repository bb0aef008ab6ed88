"""GSM8K from nothing on two CPU cores: fine-tuning, then the math reward.

    uv run launch/sft.py --workdir=/tmp/sft \
      --config=configs/gsm8k_small.py:sft \
      --config.model.tokenizer=TOKENIZER \
      --config.task.dataset=jsonl:gsm8k/train.jsonl \
      --config.task.eval_dataset=jsonl:gsm8k/test.jsonl
    uv run launch/train.py --workdir=/tmp/rl \
      --config=configs/gsm8k_small.py (the same three settings) \
      --config.warm_start.checkpoint=/tmp/sft/params

Hardware: two CPU cores, 4 GiB of memory, a few minutes each. TOKENIZER is the
directory of a tokenizer in Hugging Face's format, such as GPT-2's with its
50,257 tokens. A model of 3.4 million parameters, nearly all of them embeddings,
learns to write solutions that look right, and to end them with "#### " and a
number. It does not learn to calculate. The reward is that of mathematics, plus
a small one for the form, which is what improves here.
`benchmarks/end_to_end.py` runs all of it, and evaluates and exports the result.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections

_FORM = r".*\n#### -?[\d,.]+\s*"


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; the variant "sft" is its fine-tuning."""
  sections.require(
    variant in ("", "sft"), "variant", f"{sections.shown(variant)}; use sft"
  )
  return sections.Config(
    model=sections.ModelSection(name="small", remat=sections.Remat.NONE),
    task=sections.TaskSection(
      dataset="jsonl:gsm8k/train.jsonl",
      eval_dataset="jsonl:gsm8k/test.jsonl",
      template="{question}\n",
      answer_prefix="####",
      rewards=config_dict.ConfigDict(
        {
          "mathematics": {"function": "mathematics", "weight": 1.0},
          "form": {
            "function": "matches",
            "params": {"pattern": _FORM},
            "weight": 0.2,
          },
        }
      ),
    ),
    warm_start=sections.WarmStartSection(
      num_steps=200 if variant == "sft" else 0,
      rows_per_batch=8,
      solver="field:answer",
      num_examples=7_000,
      eval_every=50 if variant == "sft" else 0,
      num_eval_examples=64,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=1e-2,
        warmup_steps=10,
      ),
    ),
    rollout=sections.RolloutSection(
      num_slots=32,
      max_prompt_tokens=96,
      max_completion_tokens=128,
      cache_tokens=224,
      decode_steps_per_call=16,
      prefill_rows=8,
      prefill_buckets=(96, 224),
      window_buckets=(96, 224),
    ),
    algorithm=sections.AlgorithmSection(
      group_size=8, groups_per_step=4, num_minibatches=1, max_staleness=4
    ),
    train=sections.TrainSection(
      num_steps=20,
      tokens_per_row=224,
      rows_per_microbatch=4,
      vocab_chunk=8_192,
      optimizer=sections.OptimizerSection(learning_rate=3e-4),
    ),
    eval=sections.EvalSection(num_items=64, every=0),
    run=sections.RunSection(checkpoint_every=50 if variant == "sft" else 10),
  )
