"""SmolLM2-135M-Instruct learns to pick the largest or the smallest number.

    uv run launch/train.py --config=configs/smollm2.py --workdir=/tmp/smollm2

Hardware: two CPU cores and 16 GB of memory, for most of an hour. The model has
135 million parameters and comes from Hugging Face's hub; --config.model.name
may also be its directory, which benchmarks/smollm2_model.py can write.

    Which is smallest, 72.164, 105.884 or 38.510?

The pretrained model mostly begins to explain how one would find out, and is cut
off after 24 tokens. The variant "lora" trains adapters of rank 16 alone.
benchmarks/pretrained.py runs both, and docs/project/results.md has the results.

Products are in bfloat16 on a processor that has instructions for them, and in
float32 on others. To continue a run on another kind of processor, set
--config.model.compute_dtype and --config.rollout.dtype as they are in its
config.json.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections
from jaxrl_async.devices import xla_flags


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; the variant "lora" trains adapters."""
  sections.require(
    variant in ("", "lora"), "variant", f"{sections.shown(variant)}; use lora"
  )
  is_lora = variant == "lora"
  dtype = "bfloat16" if xla_flags.has_bfloat16() else "float32"
  return sections.Config(
    model=sections.ModelSection(
      name="hf:HuggingFaceTB/SmolLM2-135M-Instruct",
      compute_dtype=dtype,
      remat=sections.Remat.DOTS,
      lora=sections.LoraSection(rank=16 if is_lora else 0),
    ),
    # Each of two cores is a device that trains. Generation shares them.
    mesh=sections.MeshSection(train_fsdp=2),
    task=sections.TaskSection(
      dataset="number_format",
      # A number between 60 and 90, and two that are up to 50 above or below.
      params=config_dict.ConfigDict(
        {
          "min_num_candidates": 3,
          "max_num_candidates": 3,
          "min_n": 60.0,
          "max_n": 90.0,
          "max_delta": 50.0,
        }
      ),
      chat=True,
      system="Pick a number.",
      template="Which is {size}, {candidates[0]:.3f}, {candidates[1]:.3f} or"
      " {candidates[2]:.3f}?",
      answer_prefix="",
      reward="numeric",
    ),
    rollout=sections.RolloutSection(
      dtype=dtype,
      num_slots=64,
      max_prompt_tokens=56,
      max_completion_tokens=24,
      cache_tokens=80,
      decode_steps_per_call=4,
      prefill_rows=8,
      prefill_buckets=(56, 80),
      window_buckets=(80,),
      temperature=0.7,
      kv_on_adopt=sections.KvOnAdopt.KEEP,
    ),
    algorithm=sections.AlgorithmSection(
      group_size=8,
      groups_per_step=8,
      num_minibatches=1,
      max_staleness=2,
      # Groups that are all right or all wrong teach nothing.
      filter_zero_std=True,
      proximal=sections.ProximalMode.REUSE,
    ),
    train=sections.TrainSection(
      num_steps=60,
      # Rows of four trajectories, and of 1,216 tokens a microbatch and device.
      tokens_per_row=304,
      rows_per_microbatch=8,
      vocab_chunk=16_384,
      optimizer=sections.OptimizerSection(
        learning_rate=2e-4 if is_lora else 2e-5, warmup_steps=3, b2=0.95
      ),
    ),
    transfer=sections.TransferSection(channel=sections.Channel.DIRECT),
    eval=sections.EvalSection(num_items=256, every=20, temperature=0.7),
  )
