"""The work of generate.py by `transformers.generate`, batch after batch.

    python benchmarks/transformers_generate.py WORKLOAD.json

This is a process of its own, which generate.py starts and takes turns with.
Sequences go in batches in the order of arrival, padded on the left, and a batch
runs until its longest member is written. As in generate.py, only the drawn
length of each sequence counts.

The fastest variant is determined on the first batch, which is not timed. The
variants are: a static cache (compiled on a GPU, where every batch has the same
shape) or a dynamic one; PyTorch's fused attention or plain attention; and, on a
CPU, a single thread or one per core. Threads sleep while they wait, because on
shared cores threads that spin at each barrier take a hundred times longer.

Prints the result of these trials as a line of JSON. Then it reads lines. For
each line it does the work once and prints a line.
"""

from collections.abc import Sequence
import json
import os
import sys
import time
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers
import transformers_qwen2

_TRIED_TOKENS = 128  # tokens of the first batch in a trial, on a CPU


class Variant(NamedTuple):
  """A way to call `generate`."""

  attention: str
  cache: str
  num_threads: int

  def __str__(self) -> str:
    return f"{self.attention}, {self.cache} cache, threads {self.num_threads}"


class Reference:
  """A model with random weights, and the batches it has to write."""

  def __init__(self, workload: dict[str, Any]):
    self._device = "cuda" if torch.cuda.is_available() else "cpu"
    self._dtype = getattr(torch, workload["dtype"])
    self._config = transformers_qwen2.settings(
      workload["model"], workload["cache_tokens"]
    )
    self._cache_tokens = workload["cache_tokens"]
    self._models = {name: self._model(name) for name in ("sdpa", "eager")}
    prompts, lengths = workload["prompts"], workload["completion_tokens"]
    width = max(map(len, prompts)) if self._is_compiled else None
    slots = workload["slots"]
    self._batches = [
      self._batch(prompts[i : i + slots], max(lengths[i : i + slots]), width)
      for i in range(0, len(prompts), slots)
    ]
    self._useful_tokens = sum(lengths)

  @property
  def _is_compiled(self) -> bool:
    return self._device == "cuda"

  def _model(self, attention: str) -> Any:
    torch.manual_seed(0)
    with torch.device(self._device):
      model = transformers.AutoModelForCausalLM.from_config(
        self._config, dtype=self._dtype, attn_implementation=attention
      )
    return model.eval()

  def _batch(
    self, prompts: Sequence[Sequence[int]], new_tokens: int, width: int | None
  ) -> tuple[torch.Tensor, torch.Tensor, int]:
    width = width or max(map(len, prompts))
    tokens = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
      tokens[row, width - len(prompt) :] = torch.tensor(prompt)
      mask[row, width - len(prompt) :] = 1
    return tokens.to(self._device), mask.to(self._device), new_tokens

  def _write(
    self, variant: Variant, batch: tuple[torch.Tensor, torch.Tensor, int]
  ) -> None:
    tokens, mask, new_tokens = batch
    options: dict[str, Any] = {"cache_implementation": variant.cache}
    if variant.cache == "static" and self._is_compiled:
      options["max_cache_len"] = self._cache_tokens
    torch.set_num_threads(variant.num_threads)
    written = self._models[variant.attention].generate(
      tokens,
      attention_mask=mask,
      max_new_tokens=new_tokens,
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      eos_token_id=None,
      pad_token_id=0,
      disable_compile=not self._is_compiled,
      **options,
    )
    assert written.shape[1] == tokens.shape[1] + new_tokens
    if self._is_compiled:
      torch.cuda.synchronize()

  def choose(self) -> dict[str, float]:
    """Time a first batch by variant; the fastest is used from then on."""
    cores = len(os.sched_getaffinity(0))
    times_s: dict[Variant, float] = {}

    def measure(variant: Variant) -> None:
      tokens, mask, new_tokens = self._batches[0]
      short = new_tokens  # compiles and allocates
      if not self._is_compiled:
        short, new_tokens = 2, min(new_tokens, _TRIED_TOKENS)
      self._write(variant, (tokens, mask, short))
      start_s = time.perf_counter()
      self._write(variant, (tokens, mask, new_tokens))
      times_s[variant] = time.perf_counter() - start_s

    for attention in ("sdpa", "eager"):
      for cache in ("static", "dynamic"):
        measure(Variant(attention, cache, 1))
    if not self._is_compiled and cores > 1:
      fastest = min(times_s, key=times_s.__getitem__)
      measure(fastest._replace(num_threads=cores))
    self._variant = min(times_s, key=times_s.__getitem__)
    # Free the memory of the other models.
    self._models = {self._variant.attention: self._models[self._variant[0]]}
    return {str(v): round(seconds, 3) for v, seconds in times_s.items()}

  def run(self) -> dict[str, Any]:
    """Write every sequence."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for batch in self._batches:
      self._write(self._variant, batch)
    wall_s = time.perf_counter() - start_s
    return {
      "tokens_per_s": self._useful_tokens / wall_s,
      "wall_s": wall_s,
      "cpu_s": time.process_time() - start_cpu_s,
      "variant": str(self._variant),
    }


def main(path: str) -> None:
  """Do the workload for each line of standard input."""
  transformers.logging.set_verbosity_error()
  with open(path) as file:
    reference = Reference(json.load(file))
  with torch.inference_mode():
    print(json.dumps({"first_batch_s": reference.choose()}), flush=True)
    for _ in sys.stdin:
      print(json.dumps(reference.run()), flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
