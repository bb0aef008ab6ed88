"""The work of head_to_head.py by TRL's GRPOTrainer, on a CPU.

    python benchmarks/peers/trl_grpo.py WORK.json

The environment is that of trl.txt. Generation is `model.generate` on the whole
batch, which ends with its longest completion. TRL's own advice for more speed
is vLLM, which it uses on GPUs; AsyncGRPOTrainer needs vLLM as well. Continuous
batching (`use_transformers_continuous_batching`), which does not wait for the
longest, runs on a CPU, but took 17 s of processor time instead of 4.4 s for a
step with a long tail. Four microbatches instead of one took 4.2 s.
"""

import shared_work  # isort: skip, first: it starts the clock

import importlib.metadata
import os
import sys
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets  # pyright: ignore[reportMissingImports]
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]

_SETTINGS = (
  "one batch a step, no gradient checkpoints, SDPA, fused AdamW, beta=0"
)


class Recording(transformers.TrainerCallback):
  """Records steps and evaluations, and stops at the target."""

  def __init__(self, work: shared_work.Work, tokenizer: Any):
    self._work = work
    self._tokenizer = tokenizer
    self._recorder = shared_work.Recorder(work)

  def reward(
    self, completions: list[str], completion_ids: list, answer: list, **_: Any
  ) -> list[float]:
    """Score completions, as TRL calls its reward functions."""
    rewards = [
      shared_work.score(text, right, self._work.reward_ms)
      for text, right in zip(completions, answer, strict=True)
    ]
    self._recorder.completions(list(map(len, completion_ids)), rewards)
    return rewards

  def on_train_begin(self, args, state, control, model=None, **_):
    self._evaluate(model)

  def on_step_end(self, args, state, control, model=None, **_):
    self._recorder.end_of_step()
    every = self._work.eval_every
    if every and self._recorder.steps % every == 0:
      accuracy = self._evaluate(model)
      control.should_training_stop = accuracy >= self._work.shape.target

  def _evaluate(self, model: Any) -> float:
    """Sample an answer to each held-out question; return the accuracy."""
    if not self._work.held_out:
      return 0.0
    start_s = time.perf_counter()
    inputs = self._tokenizer(
      [question.prompt for question in self._work.held_out],
      return_tensors="pt",
      padding=True,
      padding_side="left",
      return_token_type_ids=False,
    )
    with torch.no_grad():
      written = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=self._work.shape.max_completion_tokens,
        pad_token_id=self._tokenizer.pad_token_id,
      )
    texts = self._tokenizer.batch_decode(
      written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    accuracy = shared_work.mean(
      shared_work.score(text, question.answer)
      for text, question in zip(texts, self._work.held_out, strict=True)
    )
    self._recorder.evaluation(accuracy, time.perf_counter() - start_s)
    return accuracy

  def end(self) -> None:
    """Record the end."""
    names = ("trl", "torch", "transformers")
    self._recorder.end(
      settings=f"{_SETTINGS}, {torch.get_num_threads()} threads",
      versions=", ".join(f"{n} {importlib.metadata.version(n)}" for n in names),
      num_compilations=None,
    )


def _config(work: shared_work.Work) -> Any:
  """Return TRL's settings; those of the algorithm are the same for all."""
  shape = work.shape
  return trl.GRPOConfig(
    output_dir=f"{work.directory}/trl",
    max_steps=work.num_steps,
    num_generations=shape.group_size,
    per_device_train_batch_size=work.completions_per_step,
    max_completion_length=shape.max_completion_tokens,
    temperature=1.0,
    beta=0.0,
    loss_type="dapo",  # the mean over tokens
    epsilon=0.2,
    scale_rewards="group",
    learning_rate=shape.learning_rate,
    lr_scheduler_type="constant_with_warmup",
    # From 0, where the others begin with one part of the peak.
    warmup_steps=shape.warmup_steps + 1 if shape.warmup_steps else 0,
    optim="adamw_torch_fused",
    adam_beta2=0.99,
    weight_decay=0.0,
    max_grad_norm=1.0,
    gradient_checkpointing=False,
    bf16=False,
    shuffle_dataset=False,
    use_cpu=True,
    seed=work.seed,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
  )


def main(path: str) -> None:
  """Train."""
  work = shared_work.read(path)
  transformers.logging.set_verbosity_error()
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(work.policy)
  shared_work.check_tokenizer(work, tokenizer.encode)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    work.policy, dtype=torch.float32
  )
  recording = Recording(work, tokenizer)
  rows = [{"prompt": q.prompt, "answer": q.answer} for q in work.questions]
  trainer = trl.GRPOTrainer(
    model=model,
    reward_funcs=recording.reward,
    args=_config(work),
    train_dataset=datasets.Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[recording],
  )
  trainer.train()
  recording.end()


if __name__ == "__main__":
  main(sys.argv[1])
