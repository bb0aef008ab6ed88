"""Pretrained weights: reading and writing directories in Hugging Face format.

`load` reads models of the Qwen2, Qwen3 and Llama families into the trainer's
tree with stacked layers. `save` writes that tree in the same format. Nothing is
guessed: an unknown tensor, a missing one, or one of another shape is an error
that names it.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import transformer
from jaxrl_async.storage import model_files

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_DTYPES = {"F32", "F16", "BF16"}
_UNUSED = "rotary_emb.inv_freq"  # in old files; it follows from the settings


_SHARD = re.compile(r"[^/\\\0]{1,200}\.safetensors")


# -- tensors ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
  """The place of a stored tensor in our tree.

  Attributes:
    leaf: its name in our tree.
    layer: index in the stacked leaf; None outside the layers.
    shape: shape as stored, which is [out, in] for matrices; ours is [in, out].
  """

  leaf: str
  layer: int | None
  shape: tuple[int, ...]


def _places(config: configs.ModelConfig) -> dict[str, _Place]:
  """Return all tensors that a directory must hold, by their stored names."""
  c = config
  d, f = c.model_dim, c.mlp_dim
  queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  block: dict[str, tuple[str, tuple[int, ...]]] = {
    "input_layernorm.weight": ("attention_norm", (d,)),
    "self_attn.q_proj.weight": ("query", (queries, d)),
    "self_attn.k_proj.weight": ("key", (keys, d)),
    "self_attn.v_proj.weight": ("value", (keys, d)),
    "self_attn.o_proj.weight": ("output", (d, queries)),
    "post_attention_layernorm.weight": ("mlp_norm", (d,)),
    "mlp.gate_proj.weight": ("gate", (f, d)),
    "mlp.up_proj.weight": ("up", (f, d)),
    "mlp.down_proj.weight": ("down", (d, f)),
  }
  if c.has_qkv_bias:
    block["self_attn.q_proj.bias"] = ("query_bias", (queries,))
    block["self_attn.k_proj.bias"] = ("key_bias", (keys,))
    block["self_attn.v_proj.bias"] = ("value_bias", (keys,))
  if c.has_qk_norm:
    block["self_attn.q_norm.weight"] = ("query_norm", (c.head_dim,))
    block["self_attn.k_norm.weight"] = ("key_norm", (c.head_dim,))
  table = (c.vocab_size, d)
  places = {EMBEDDING: _Place("embedding", None, table)}
  for layer in range(c.num_layers):
    for suffix, (leaf, shape) in block.items():
      places[f"model.layers.{layer}.{suffix}"] = _Place(leaf, layer, shape)
  places["model.norm.weight"] = _Place("final_norm", None, (d,))
  if not c.has_tied_head:
    places[HEAD] = _Place("output_head", None, table)
  return places


def _as_stored(params: transformer.Params, place: _Place) -> np.ndarray:
  """Return our array in the stored orientation, as a view where possible."""
  if place.layer is None:
    array = params[place.leaf]
  else:
    array = params["layers"][place.leaf][place.layer]
  if len(place.shape) == 1 or place.leaf == "embedding":
    return array.reshape(place.shape)
  return array.reshape(place.shape[::-1]).T


def _abstract_params(config: configs.ModelConfig) -> transformer.Params:
  return jax.eval_shape(
    lambda key: transformer.init_params(config, key), jax.random.key(0)
  )


# -- reading ----------------------------------------------------------------


def is_pretrained(directory: pathlib.Path) -> bool:
  """Return whether a directory is of this format, even if it is damaged."""
  names = (hf_config.CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE)
  return any((directory / name).exists() for name in names)


def load(
  directory: str | pathlib.Path, dtype: str = "float32"
) -> tuple[configs.ModelConfig, transformer.Params]:
  """Read a model: its architecture, and its parameters as numpy arrays.

  The layers of the parameters are stacked. All headers are checked before any
  data is read. Then one tensor at a time is copied into the result, so the peak
  memory is that of the parameters plus the largest tensor.

  Args:
    directory: holds config.json, and either model.safetensors or shards with
      their index. The embedding has the model's vocabulary, which may be larger
      than the tokenizer's.
    dtype: of the parameters, whatever dtype the files have.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: the files do not hold a model that this decoder implements.
  """
  directory = pathlib.Path(directory)
  config = hf_config.model_config(directory)
  places = _places(config)
  # Files of models with a tied head may repeat the embedding.
  copies = {HEAD: places[EMBEDDING]} if config.has_tied_head else {}
  files = _check_headers(directory, places, copies)
  params = jax.tree.map(
    lambda x: np.empty(x.shape, jnp.dtype(dtype)), _abstract_params(config)
  )
  for path, names in files.items():
    with safetensors.safe_open(path, "numpy") as file:
      for name in places.keys() & names:
        array = _as_stored(params, places[name])
        np.copyto(array, file.get_tensor(name), casting="unsafe")
        if not np.isfinite(array).all():
          raise ValueError(
            f"{path}: {name} has values that are not finite in {dtype}"
          )
  for path, names in files.items():
    for name in copies.keys() & names:
      with safetensors.safe_open(path, "numpy") as file:
        copy = file.get_tensor(name).astype(jnp.dtype(dtype), copy=False)
      if not np.array_equal(copy, _as_stored(params, copies[name])):
        raise ValueError(
          f"{path}: {name} is not the embedding, but tie_word_embeddings is set"
        )
  return config, params


def _check_headers(
  directory: pathlib.Path,
  places: Mapping[str, _Place],
  optional: Mapping[str, _Place],
) -> dict[pathlib.Path, set[str]]:
  """Check all headers and return the names of the tensors in each file."""
  files: dict[pathlib.Path, set[str]] = {}
  paths, weight_map = _weight_files(directory)
  known = {**places, **optional}
  found: dict[str, pathlib.Path] = {}
  for path in paths:
    files[path] = set()
    model_files.check_file(path)
    try:
      with safetensors.safe_open(path, "numpy") as file:
        for name in file.keys():
          if name.endswith(_UNUSED):
            continue
          if name in found:
            raise ValueError(f"{name} is in {found[name].name} as well")
          header = file.get_slice(name)
          _check_tensor(name, header.get_shape(), header.get_dtype(), known)
          files[path].add(name)
          found[name] = path
    except (OSError, ValueError, safetensors.SafetensorError) as error:
      raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
  source = directory / (INDEX_FILE if weight_map else WEIGHTS_FILE)
  if missing := [name for name in places if name not in found]:
    raise ValueError(f"{source}: {_first(missing)} missing")
  for name, file_name in weight_map.items():
    if name not in found:
      if name.endswith(_UNUSED):
        continue
      raise ValueError(f"{source}: {name} is not in {file_name}")
    if found[name].name != file_name:
      raise ValueError(
        f"{source}: {name} is in {found[name].name}, not in {file_name}"
      )
  return files


def _check_tensor(
  name: str, shape: list[int], dtype: str, places: Mapping[str, _Place]
) -> None:
  if name not in places:
    raise ValueError(f"{name} is not a tensor of this model")
  if tuple(shape) != places[name].shape:
    raise ValueError(
      f"{name} has shape {tuple(shape)}, expected {places[name].shape}"
    )
  if dtype not in _DTYPES:
    raise ValueError(f"{name} is {dtype}; use one of {', '.join(_DTYPES)}")


def _first(names: list[str]) -> str:
  if len(names) == 1:
    return f"{names[0]} is"
  return f"{names[0]} and {len(names) - 1} more are"


def _weight_files(
  directory: pathlib.Path,
) -> tuple[list[pathlib.Path], dict[str, str]]:
  """Return the weight files, and the file of each tensor per the index.

  The second result is empty if there is no index.
  """
  single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
  if single.exists():
    return [single], {}
  if not index.exists():
    raise FileNotFoundError(
      f"{directory}: it has neither {WEIGHTS_FILE} nor {INDEX_FILE}"
    )
  weight_map = model_files.read_object(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(
      f"{index}: weight_map is {sections.shown(weight_map)}, not an object"
      " of tensors and their files"
    )
  for tensor, name in weight_map.items():
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
      raise ValueError(
        f"{index}: weight_map.{tensor} is {sections.shown(name)}, not"
        " the name of a file beside it"
      )
  return [
    directory / name for name in sorted(set(weight_map.values()))
  ], weight_map


# -- writing ----------------------------------------------------------------


def save(
  directory: str | pathlib.Path,
  config: configs.ModelConfig,
  params: transformer.Params,
  *,
  dtype: str = "float32",
  max_shard_bytes: int = 1_000_000_000,
  settings: Mapping[str, Any] | None = None,
) -> None:
  """Write a model so that transformers and compatible tools can read it.

  config.json is written last, so a directory without one is incomplete.

  Args:
    directory: created if needed; it may hold a tokenizer, but no weights.
    config: the architecture.
    params: the trainer's tree with stacked layers; jax or numpy arrays.
    dtype: of the files.
    max_shard_bytes: largest size of a file, and also of what is held in memory
      at once.
    settings: further entries of config.json that readers need and training does
      not, such as eos_token_id and max_position_embeddings.

  Raises:
    FileExistsError: the directory already holds weights.
    ValueError: the parameters do not fit the architecture, or the format cannot
      describe it.
  """
  directory = pathlib.Path(directory)
  described = hf_config.config_json(config) | {"torch_dtype": dtype}
  settings = dict(settings or {})
  if taken := sorted(settings.keys() & described.keys()):
    raise ValueError(f"settings: {taken[0]} follows from the architecture")
  expected, given = (
    {
      jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
      for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    for tree in (_abstract_params(config), params)
  )
  for name in sorted(expected.keys() | given.keys()):
    here, wanted = given.get(name), expected.get(name)
    if here != wanted:
      raise ValueError(f"params: {name} has shape {here}, expected {wanted}")
  directory.mkdir(parents=True, exist_ok=True)
  for name in (hf_config.CONFIG_FILE, "*.safetensors", INDEX_FILE):
    for path in directory.glob(name):
      raise FileExistsError(f"{path} exists; use another directory")
  _write_shards(directory, config, params, jnp.dtype(dtype), max_shard_bytes)
  text = json.dumps(described | settings, indent=2) + "\n"
  (directory / hf_config.CONFIG_FILE).write_text(text)


def _write_shards(
  directory: pathlib.Path,
  config: configs.ModelConfig,
  params: transformer.Params,
  dtype: np.dtype,
  max_shard_bytes: int,
) -> None:
  """Fill shards in the order of the names; a single one needs no index."""
  places = _places(config)
  shards: list[list[str]] = [[]]
  in_shard = total = 0
  for name, place in places.items():
    size = int(np.prod(place.shape)) * dtype.itemsize
    if shards[-1] and in_shard + size > max_shard_bytes:
      shards.append([])
      in_shard = 0
    shards[-1].append(name)
    in_shard += size
    total += size
  host = jax.tree.map(np.asarray, params)
  weight_map = {}
  for number, names in enumerate(shards, start=1):
    file_name = WEIGHTS_FILE
    if len(shards) > 1:
      file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
    tensors = {
      name: np.ascontiguousarray(
        _as_stored(host, places[name]).astype(dtype, copy=False)
      )
      for name in names
    }
    safetensors_numpy.save_file(
      tensors, directory / file_name, metadata={"format": "pt"}
    )
    weight_map |= dict.fromkeys(names, file_name)
  if len(shards) > 1:
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
