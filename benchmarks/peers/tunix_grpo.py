"""The work of head_to_head.py by Tunix's GRPOLearner, on a CPU.

    python benchmarks/peers/tunix_grpo.py WORK.json

The environment is that of tunix.txt. Generation is Tunix's own sampler
("vanilla"), because its others, vLLM and SGLang-JAX, need an accelerator. It
ends with the longest completion of the batch. Training pads each completion to
the longest that is allowed. Packed sequences (`max_seq_token_per_tpu`) would be
one update for each sequence instead of one for each step.

Tunix leaves the token that ends a completion out of what it trains on.
"""

import shared_work  # isort: skip, first: it starts the clock

from collections.abc import Iterator
import importlib.metadata
import os
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from absl import logging
import compilations
import jax
import numpy as np
import optax
import transformers
from tunix.models.qwen2 import model as model_lib  # pyright: ignore[reportMissingImports]
from tunix.models.qwen2 import params as params_lib  # pyright: ignore[reportMissingImports]
from tunix.rl import rl_cluster  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo import grpo_learner  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

_SETTINGS = (
  "vanilla sampler, trainer and sampler share weights, one batch a step, no"
  " remat, beta=0"
)


class Training:
  """Feeds prompts, and records a step when the next one asks for its prompts.

  Attributes:
    cluster: set before training begins; evaluations generate with it.
  """

  cluster: Any

  def __init__(self, work: shared_work.Work):
    self._work = work
    self._recorder = shared_work.Recorder(work)
    self._num_asked = 0  # steps whose prompts were asked for

  def reward(
    self, prompts: Any, completions: list[str], answer: Any, **_: Any
  ) -> list[float]:
    """Score completions, as Tunix calls its reward functions."""
    longest = self._work.shape.max_completion_tokens
    rewards = [
      shared_work.score(text, str(right), self._work.reward_ms)
      for text, right in zip(completions, answer, strict=True)
    ]
    tokens = [min(len(text) + 1, longest) for text in completions]
    self._recorder.completions(tokens, rewards)
    return rewards

  def batches(self) -> Iterator[dict[str, np.ndarray]]:
    """Yield the prompts of each step."""
    size = self._work.shape.prompts_per_step
    accuracy = self._evaluate()
    for step in range(self._work.num_steps):
      if step:
        self.record()
        every = self._work.eval_every
        if every and step % every == 0:
          accuracy = self._evaluate()
      if self._work.held_out and accuracy >= self._work.shape.target:
        return
      # Without a new seed every step would draw the same random numbers.
      for config in self.cluster.cluster_config.rollout_config.values():
        config.seed = jax.random.PRNGKey(self._work.seed * 1_000_003 + step)
      self._num_asked += 1
      asked = self._work.questions[step * size : (step + 1) * size]
      yield {
        "prompts": np.array([question.prompt for question in asked]),
        "answer": np.array([question.answer for question in asked]),
      }

  def record(self) -> None:
    """Record the step that has ended, if it was not yet."""
    if self._recorder.steps == self._num_asked:
      return
    # The next generation would wait for the update as well.
    jax.block_until_ready(jax.live_arrays())
    self._recorder.end_of_step()

  def _evaluate(self) -> float:
    """Sample an answer to each held-out question; return the accuracy."""
    if not self._work.held_out:
      return 0.0
    start_s = time.perf_counter()
    written = self.cluster.generate(
      [question.prompt for question in self._work.held_out],
      mode=rl_cluster.Mode.EVAL,
    )
    accuracy = shared_work.mean(
      shared_work.score(text, question.answer)
      for text, question in zip(written.text, self._work.held_out, strict=True)
    )
    self._recorder.evaluation(accuracy, time.perf_counter() - start_s)
    return accuracy

  def end(self, counted: compilations.Compilations) -> None:
    """Record the end."""
    names = ("google-tunix", "jax", "flax")
    self._recorder.end(
      settings=_SETTINGS,
      versions=", ".join(f"{n} {importlib.metadata.version(n)}" for n in names),
      num_compilations=counted.count,
    )


def _model(work: shared_work.Work, mesh: jax.sharding.Mesh) -> Any:
  m = work.model
  return params_lib.create_model_from_safe_tensors(
    work.policy,
    model_lib.ModelConfig(
      num_layers=m["num_layers"],
      vocab_size=m["vocab_size"],
      embed_dim=m["model_dim"],
      hidden_dim=m["mlp_dim"],
      num_heads=m["num_heads"],
      head_dim=m["head_dim"],
      num_kv_heads=m["num_kv_heads"],
      rope_theta=m["rope_theta"],
      norm_eps=m["norm_eps"],
      use_tied_embedding=m["has_tied_head"],
    ),
    mesh,
  )


def _cluster_config(work: shared_work.Work, mesh: jax.sharding.Mesh) -> Any:
  shape = work.shape
  longest = shape.max_prompt_tokens + shape.max_completion_tokens
  rollout = {
    mode: base_rollout.RolloutConfig(
      max_tokens_to_generate=shape.max_completion_tokens,
      max_prompt_length=shape.max_prompt_tokens,
      kv_cache_size=longest,
      temperature=1.0,
      top_p=1.0,
      top_k=None,
    )
    for mode in rl_cluster.Mode
  }
  peak, warmup = shape.learning_rate, shape.warmup_steps
  rate = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(rate if warmup else peak, b1=0.9, b2=0.99, weight_decay=0.0),
  )
  roles = rl_cluster.Role
  return rl_cluster.ClusterConfig(
    role_to_mesh=dict.fromkeys((roles.ACTOR, roles.ROLLOUT), mesh),
    rollout_engine="vanilla",
    training_config=rl_cluster.RLTrainingConfig(
      actor_optimizer=optimizer,
      eval_every_n_steps=work.num_steps + 1,
      max_steps=work.num_steps,
      mini_batch_size=shape.prompts_per_step,
      train_micro_batch_size=shape.prompts_per_step,
    ),
    rollout_config=rollout,
  )


def main(path: str) -> None:
  """Train."""
  work = shared_work.read(path)
  logging.set_verbosity(logging.WARNING)
  counted = compilations.Compilations()
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1])[:, None], ("fsdp", "tp"))
  training = Training(work)
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(work.policy)
  shared_work.check_tokenizer(work, tokenizer.encode)
  training.cluster = rl_cluster.RLCluster(
    actor=_model(work, mesh),
    tokenizer=tokenizer,
    cluster_config=_cluster_config(work, mesh),
  )
  learner = grpo_learner.GRPOLearner(
    rl_cluster=training.cluster,
    algo_config=grpo_learner.GRPOConfig(
      num_generations=work.shape.group_size,
      num_iterations=1,
      beta=0.0,
      epsilon=0.2,
      loss_agg_mode="token-mean",
    ),
    reward_fns=training.reward,
  )
  learner.train(training.batches())
  training.record()
  training.end(counted)


if __name__ == "__main__":
  main(sys.argv[1])
