"""Writes a policy as a directory in Hugging Face's format.

transformers, vLLM and other tools load such a directory. Only the parameters
are read, on the host, and no device is used.
"""

import json
import pathlib
from typing import Any

import jax

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.policies import stored_policy
from jaxrl_async.storage import disk
from jaxrl_async.storage import model_files
from jaxrl_async.text import tokenizer_files

# transformers 5 builds the tokenizer of some families anew, whatever class
# tokenizer_config.json names, and one of another kind then loses characters.
# Where auto_map names a class, it does not. Only a caller who trusts the code
# of the directory runs that class, which reads tokenizer.json as well.
_TOKENIZER_CLASS = '''"""Reads tokenizer.json as it is."""

import transformers


class AsWritten(transformers.PreTrainedTokenizerFast):
  """The tokenizer of this directory."""
'''
_BUILT_ANEW = ("qwen2",)  # families, by model_type
# Entries of a pretrained model's config.json that follow from nothing here, and
# that programs which generate read.
_KEPT_SETTINGS = (
  "max_position_embeddings",
  "bos_token_id",
  "pad_token_id",
)


def check_output(output: pathlib.Path) -> None:
  """Check that an export would overwrite nothing.

  Raises:
    ConfigError: there are files at the path.
  """
  if output.exists() and (not output.is_dir() or any(output.iterdir())):
    raise sections.ConfigError(
      f"output: {output} exists and is not empty; use another directory"
    )


def export(
  stored: stored_policy.StoredPolicy,
  output: pathlib.Path,
  *,
  dtype: str,
  max_shard_bytes: int = 5_000_000_000,
) -> dict[str, Any]:
  """Write a policy's weights, config, generation config and tokenizer.

  config.json is written last: a directory without one is incomplete.

  Args:
    stored: the policy. Adapters are merged into their base.
    output: the directory, which must not exist or be empty.
    dtype: of the weights.
    max_shard_bytes: largest file of weights.

  Returns:
    The policy version and the number of parameters, by name.

  Raises:
    ConfigError: the policy cannot be read, the format cannot describe it, or
      the directory is not empty.
    StorageError: the directory cannot be written.
  """
  check_output(output)
  tokenizer = stored_policy.tokenizer(stored)
  setup = setup_lib.on_all_devices(
    stored_policy.own_config(stored),
    jax.devices("cpu")[:1],
    tokenizer=tokenizer,
  )
  described = _described(setup.model.base)
  step, params = stored_policy.load(stored, setup)
  if setup.model.lora is not None:
    params = lora_lib.merged(params, setup.model.lora)
  with disk.writing(output):
    output.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(stored, output, setup.model.base)
    # Adds the end tokens that the run knows to those of the model.
    tokenizer.save_end_tokens(output)
    hf_weights.save(
      output,
      setup.model.base,
      params,
      dtype=dtype,
      max_shard_bytes=max_shard_bytes,
      settings={
        name: value
        for name, value in _settings(stored, tokenizer.end_tokens).items()
        if name not in described
      },
    )
  return {"step": step, "parameters": setup.model.base.num_params}


def _described(model: configs.ModelConfig) -> dict[str, Any]:
  """Return the entries of config.json that follow from the architecture."""
  try:
    return hf_config.config_json(model)
  except ValueError as error:
    raise sections.ConfigError(f"model.name: {error}") from error


def export_adapter(
  stored: stored_policy.StoredPolicy, output: pathlib.Path
) -> dict[str, Any]:
  """Write the adapter of a run with LoRA in PEFT's format.

  Args:
    stored: the policy.
    output: the directory, which must not exist or be empty.

  Returns:
    The policy version and the number of parameters, by name.

  Raises:
    ConfigError: the policy cannot be read, has no adapter, or has one that the
      format has no place for; or the directory is not empty.
    StorageError: the directory cannot be written.
  """
  check_output(output)
  sections.require(
    stored.config.model.lora.rank > 0 and stored.kind is stored_policy.Kind.RUN,
    "adapter",
    f"{stored.directory} has no adapter (model.lora.rank is 0); leave the flag"
    " out",
  )
  tokenizer = stored_policy.tokenizer(stored)
  setup = setup_lib.on_all_devices(
    stored_policy.own_config(stored),
    jax.devices("cpu")[:1],
    tokenizer=tokenizer,
  )
  why = peft_files.why_no_places(setup.model)
  sections.require(not why, "adapter", why)
  step, params = stored_policy.load(stored, setup)
  with disk.writing(output):
    peft_files.write(
      output, setup.model, params, base_model=stored.config.model.name
    )
  return {"step": step, "parameters": lora_lib.num_params(setup.model)}


def _copy_tokenizer(
  stored: stored_policy.StoredPolicy,
  output: pathlib.Path,
  model: configs.ModelConfig,
) -> None:
  """Copy the tokenizer, that of the pretrained model if there is one."""
  source = stored_policy.model_directory(stored)
  is_own = source is None or not (source / model_files.TOKENIZER).exists()
  if is_own or source is None:
    source = stored_policy.tokenizer_directory(stored)
  tokenizer_files.copy(source, output)
  if is_own and hf_config.config_json(model)["model_type"] in _BUILT_ANEW:
    path = output / model_files.TOKENIZER_CONFIG
    mention = {"AutoTokenizer": [None, "tokenizer_class.AsWritten"]}
    settings = model_files.read_object(path) | {"auto_map": mention}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    (output / tokenizer_files.CLASS).write_text(_TOKENIZER_CLASS)


def _settings(
  stored: stored_policy.StoredPolicy, end_tokens: tuple[int, ...]
) -> dict[str, Any]:
  """Return further entries of config.json."""
  config = stored.config
  longest = max(config.train.tokens_per_row, config.rollout.cache_tokens)
  settings: dict[str, Any] = {"max_position_embeddings": longest}
  source = stored_policy.model_directory(stored)
  if source is not None:
    found = model_files.read_optional(source / hf_config.CONFIG_FILE)
    settings |= {
      n: found[n] for n in _KEPT_SETTINGS if found.get(n) is not None
    }
  ends = list(end_tokens)
  return settings | {"eos_token_id": ends if len(ends) > 1 else ends[0]}
