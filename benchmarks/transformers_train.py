"""An optimizer update on a packed batch by transformers, run after run.

    python benchmarks/transformers_train.py WORK.json

This is a process of its own, for a benchmark that starts it and takes turns
with it. The JSON has `model` (the fields of a ModelConfig of Qwen2's
architecture, because that is what is built), `dtype`, `learning_rate` and
`batch`: an .npz with `tokens`, `segment_ids`, `positions` and `loss_mask`, each
[K B T] and as in `packing.PackedBatch`. Microbatches of padding only are left
out.

The update is that of `train_step.update` with `sft.NEXT_TOKEN`:
cross-entropy in float32 over the loss tokens of the whole batch, gradients
summed over the microbatches, their global norm clipped at 1, AdamW. Weights are
random and float32; a `dtype` of bfloat16 means autocast. A token sees those
before it in its segment.

The fastest variant is determined on the first microbatch, without changing
weights: PyTorch's fused attention or plain attention; on a GPU, where the model
is compiled, with or without gradient checkpoints, if it fits; on a CPU a single
thread or one per core (see transformers_generate.py).

Prints the result of these trials as a line of JSON. Then it reads lines. For
each line it runs one update and prints a line.

    tokens_per_s  tokens of the batch without padding, over wall-clock time
    loss          before the update
    peak_bytes    during the update: of the process, on a GPU of its memory

Hardware: two CPU cores, float32. The path through CUDA has not been run yet.
"""

import json
import os
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import transformers
import transformers_qwen2

_NO_LABEL = -100


class Variant(NamedTuple):
  """A way to compute the gradients."""

  attention: str
  num_threads: int
  has_checkpoints: bool = False

  def __str__(self) -> str:
    checkpoints = ", checkpoints" if self.has_checkpoints else ""
    return f"{self.attention}{checkpoints}, threads {self.num_threads}"


class Microbatch(NamedTuple):
  """[B T] arrays.

  `labels` at t are the token at t + 1, where that token is a loss token.
  """

  tokens: torch.Tensor
  segment_ids: torch.Tensor
  positions: torch.Tensor
  labels: torch.Tensor


class Reference:
  """A model with random weights, its optimizer and the batch."""

  def __init__(self, work: dict[str, Any]):
    self._device = "cuda" if torch.cuda.is_available() else "cpu"
    self._dtype = getattr(torch, work["dtype"])
    self._learning_rate = work["learning_rate"]
    with np.load(work["batch"]) as batch:
      self._microbatches = self._load(batch)
    self._num_tokens = sum(
      int((m.segment_ids > 0).sum()) for m in self._microbatches
    )
    self._num_loss_tokens = sum(
      int((m.labels != _NO_LABEL).sum()) for m in self._microbatches
    )
    self.model = self._model(work["model"])
    self._optimizer = self._adamw(self._learning_rate)
    self.variant = Variant("sdpa", 1)

  def _load(self, batch: Any) -> list[Microbatch]:
    tokens, mask = batch["tokens"], batch["loss_mask"]
    segment_ids, positions = batch["segment_ids"], batch["positions"]
    if (mask & ((segment_ids == 0) | (positions == 0))).any():
      sys.exit("error: a loss token that is padding or begins its segment")
    labels = np.full_like(tokens, _NO_LABEL)
    labels[..., :-1] = np.where(mask, tokens, _NO_LABEL)[..., 1:]
    used = segment_ids.any(axis=(1, 2))
    return [
      Microbatch(
        *(torch.tensor(x, dtype=torch.long).to(self._device) for x in m)
      )
      for m in zip(
        tokens[used],
        segment_ids[used],
        positions[used],
        labels[used],
        strict=True,
      )
    ]

  def _model(self, m: dict[str, Any]) -> Any:
    settings = transformers_qwen2.settings(
      m, self._microbatches[0].tokens.shape[1], use_cache=False
    )
    torch.manual_seed(0)
    with torch.device(self._device):
      model = transformers.Qwen2ForCausalLM(settings).train()
    if self._device == "cuda":
      model.compile()
    return model

  def _adamw(self, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
      self.model.parameters(),
      learning_rate,
      betas=(0.9, 0.99),
      weight_decay=0.0,
      fused=True,
    )

  def _mask(self, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens see which, [B 1 T T], as the attention expects it."""
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    # Padding sees the padding before it: no row of the mask is empty.
    seen = same.tril()
    if self.variant.attention == "sdpa":
      return seen
    hidden = torch.finfo(self._dtype).min
    return torch.zeros_like(seen, dtype=self._dtype).masked_fill(~seen, hidden)

  def use(self, variant: Variant) -> None:
    torch.set_num_threads(variant.num_threads)
    self.model.set_attn_implementation(variant.attention)
    if variant.has_checkpoints:
      self.model.activation_checkpointing_enable()
    elif self.model.is_activation_checkpointing:
      self.model.activation_checkpointing_disable()
    self.variant = variant

  def _update(
    self, optimizer: torch.optim.Optimizer, microbatches: list[Microbatch]
  ) -> float:
    """Do one optimizer step; return the loss before it."""
    total = torch.zeros((), device=self._device)
    for tokens, segment_ids, positions, labels in microbatches:
      with torch.autocast(
        self._device, self._dtype, enabled=self._dtype != torch.float32
      ):
        logits = self.model(
          input_ids=tokens,
          attention_mask=self._mask(segment_ids),
          position_ids=positions,
        ).logits
      loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=_NO_LABEL,
        reduction="sum",
      )
      loss = loss / self._num_loss_tokens
      loss.backward()
      total += loss.detach()
    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = total.item()
    if self._device == "cuda":
      torch.cuda.synchronize()
    return value

  def choose(self) -> dict[str, float]:
    """Time a first microbatch by variant; the fastest is used from then on."""
    cores = len(os.sched_getaffinity(0))
    times_s: dict[Variant, float] = {}

    def measure(variant: Variant) -> None:
      self.use(variant)
      optimizer = self._adamw(0.0)  # the same work and memory, no change
      try:
        # The first update compiles and allocates.
        self._update(optimizer, self._microbatches[:1])
        start_s = time.perf_counter()
        self._update(optimizer, self._microbatches[:1])
        times_s[variant] = time.perf_counter() - start_s
      except torch.cuda.OutOfMemoryError:
        self.model.zero_grad()

    for attention in ("sdpa", "eager"):
      measure(Variant(attention, 1))
      if self._device == "cuda":
        measure(Variant(attention, 1, has_checkpoints=True))
    if not times_s:
      sys.exit("error: one microbatch does not fit the device's memory")
    if self._device == "cpu" and cores > 1:
      fastest = min(times_s, key=times_s.__getitem__)
      measure(fastest._replace(num_threads=cores))
    self.use(min(times_s, key=times_s.__getitem__))
    return {str(v): round(seconds, 3) for v, seconds in times_s.items()}

  def run(self) -> dict[str, Any]:
    """Update the weights once."""
    self._forget_peak()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    loss = self._update(self._optimizer, self._microbatches)
    wall_s = time.perf_counter() - start_s
    return {
      "tokens_per_s": self._num_tokens / wall_s,
      "wall_s": wall_s,
      "cpu_s": time.process_time() - start_cpu_s,
      "loss": loss,
      "variant": str(self.variant),
      "peak_bytes": self._peak_bytes(),
    }

  def _forget_peak(self) -> None:
    if self._device == "cuda":
      torch.cuda.reset_peak_memory_stats()
    else:
      pathlib.Path("/proc/self/clear_refs").write_text("5")

  def _peak_bytes(self) -> int:
    if self._device == "cuda":
      return torch.cuda.max_memory_allocated()
    # ru_maxrss would include the memory of the parent process.
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert found
    return 1024 * int(found[1])


def main(path: str) -> None:
  """Do an update for each line of standard input."""
  transformers.logging.set_verbosity_error()
  with open(path) as file:
    reference = Reference(json.load(file))
  print(json.dumps({"first_microbatch_s": reference.choose()}), flush=True)
  for _ in sys.stdin:
    print(json.dumps(reference.run()), flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
