"""Pretrained weights: reading and writing directories in Hugging Face format.

`load` reads models of the families of `families` into the trainer's tree with
stacked layers. `save` writes that tree in the same format.
Nothing is guessed: an unknown tensor, a missing one, or one of another shape is
an error that names it.
"""

import collections
from collections.abc import Mapping
import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_tensors
from jaxrl_async.models import transformer
from jaxrl_async.storage import model_files

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32", "F16", "BF16"}
_UNUSED = "rotary_emb.inv_freq"  # in old files; it follows from the settings
# Where models with images have the layers of their text part.
_TEXT, _OF_TEXT = "model.language_model.", "model."


_SHARD = re.compile(r"[^/\\\0]{1,200}\.safetensors")


def _abstract_params(config: configs.ModelConfig) -> transformer.Params:
  return jax.eval_shape(
    lambda key: transformer.init_params(config, key), jax.random.key(0)
  )


# -- reading ----------------------------------------------------------------


def is_pretrained(directory: pathlib.Path) -> bool:
  """Return whether a directory is of this format, even if it is damaged."""
  names = (hf_config.CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE)
  return any((directory / name).exists() for name in names)


def has_weights(directory: pathlib.Path) -> bool:
  """Return whether there are weights in a directory, even if damaged."""
  return any((directory / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Contents:
  """What the headers of a directory say.

  Attributes:
    config: the architecture.
    places: the places of each tensor of the model, by its stored name.
    copies: tensors that must equal the embedding. Files of models with a tied
      head may repeat it.
    files: the file of each tensor.
    names: the name of each tensor in its file.
  """

  config: configs.ModelConfig
  places: dict[str, tuple[hf_tensors.Place, ...]]
  copies: dict[str, tuple[hf_tensors.Place, ...]]
  files: dict[str, pathlib.Path]
  names: dict[str, str]


def _contents(directory: pathlib.Path) -> _Contents:
  """Check the settings and all headers of a directory."""
  config = hf_config.model_config(directory)
  places = hf_tensors.places(config)
  copies = {}
  if config.has_tied_head:
    copies[hf_tensors.HEAD] = places[hf_tensors.EMBEDDING]
  family = families.FAMILIES[config.family]
  found = _check_headers(directory, places, copies, family)
  copies = {name: place for name, place in copies.items() if name in found}
  return _Contents(
    config=config,
    places=places,
    copies=copies,
    files={name: path for name, (path, _) in found.items()},
    names={name: own for name, (_, own) in found.items()},
  )


def check(directory: str | pathlib.Path) -> configs.ModelConfig:
  """Check a model's settings and headers, and return its architecture.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: the files do not hold a model that this decoder implements.
  """
  return _contents(pathlib.Path(directory)).config


def load(
  directory: str | pathlib.Path,
  dtype: str = "float32",
  shardings: transformer.Params | None = None,
) -> tuple[configs.ModelConfig, transformer.Params]:
  """Read a model: its architecture, and its parameters with stacked layers.

  All headers are checked before any data is read. Then one tensor at a time is
  read and put into its place. With shardings, each process reads the parts of
  it that its own devices hold, and keeps none: beyond what the devices hold,
  its memory grows by the largest such part, in the dtype of the parameters.

  Args:
    directory: holds config.json, and either model.safetensors or shards with
      their index. The embedding has the model's vocabulary, which may be larger
      than the tokenizer's.
    dtype: of the parameters, whatever dtype the files have.
    shardings: a NamedSharding for each parameter. None returns numpy arrays.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: the files do not hold a model that this decoder implements.
  """
  contents = _contents(pathlib.Path(directory))
  kind = jnp.dtype(dtype)

  def stored(name: str, place: hf_tensors.Place) -> hf_tensors.StoredTensor:
    path, own = contents.files[name], contents.names[name]
    return hf_tensors.StoredTensor(path, own, place, kind)

  shapes = _abstract_params(contents.config)
  if shardings is None:
    params = jax.tree.map(lambda x: np.empty(x.shape, kind), shapes)
  else:
    params = {**shapes, "layers": dict(shapes["layers"])}
  # In the order of the names, which is the same in every process.
  every = contents.places.items()
  for name, place in ((n, place) for n, parts in every for place in parts):
    is_layer = place.layer is not None
    leaves = params["layers"] if is_layer else params
    leaf, tensor = leaves[place.leaf], stored(name, place)
    if shardings is None:
      own = leaf[place.index]
      own[...] = tensor.part(own.shape, (slice(None),) * own.ndim)
    elif is_layer:
      sharding = shardings["layers"][place.leaf]
      leaves[place.leaf] = _with_layer(leaf, tensor, sharding)
    else:
      sharding = shardings[place.leaf]
      leaves[place.leaf] = _on_devices(leaf.shape, tensor, sharding)
  embedding = hf_tensors.EMBEDDING
  for name, (place,) in contents.copies.items():
    copy = stored(name, place)
    both = zip(copy.pieces(), stored(embedding, place).pieces(), strict=True)
    if not all(np.array_equal(a, b) for (_, a), (_, b) in both):
      raise ValueError(
        f"{copy.path}: {name} is not the embedding, but tie_word_embeddings is"
        " set"
      )
  return contents.config, params


def _on_devices(
  shape: tuple[int, ...],
  tensor: hf_tensors.StoredTensor,
  sharding: NamedSharding,
) -> jax.Array:
  """Read a tensor onto the devices, one of its parts after the other."""
  holders = collections.defaultdict(list)
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = (s.indices(n) for s, n in zip(index or (), shape, strict=True))
    holders[tuple(bounds)].append(device)
  arrays = []
  for bounds, devices in holders.items():
    part = tensor.part(shape, [slice(*bound) for bound in bounds])
    arrays += [jax.device_put(part, device) for device in devices]
    # The transfers end before the next part is read.
    jax.block_until_ready(arrays)
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _with_layer(
  leaf: jax.Array | jax.ShapeDtypeStruct,
  tensor: hf_tensors.StoredTensor,
  sharding: NamedSharding,
) -> jax.Array:
  """Return a stacked parameter with one more tensor, read onto the devices."""
  index = tensor.place.index
  own = NamedSharding(sharding.mesh, P(*sharding.spec[len(index) :]))
  read = _on_devices(leaf.shape[len(index) :], tensor, own)
  if not isinstance(leaf, jax.Array):
    leaf = _zeros(leaf.shape, tensor.dtype, sharding)
  written = _written(leaf, read, tuple(map(np.int32, index)), sharding)
  # One tensor at a time: the device frees what it was read into.
  return jax.block_until_ready(written)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(
  shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> jax.Array:
  return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _written(
  leaf: jax.Array, tensor: jax.Array, index: Any, sharding: NamedSharding
) -> jax.Array:
  start = (*index, *(np.int32(0) for _ in tensor.shape))
  block = tensor.reshape((1,) * len(index) + tensor.shape)
  leaf = lax.dynamic_update_slice(leaf, block, start)
  return lax.with_sharding_constraint(leaf, sharding)


def _check_headers(
  directory: pathlib.Path,
  places: Mapping[str, tuple[hf_tensors.Place, ...]],
  optional: Mapping[str, tuple[hf_tensors.Place, ...]],
  family: families.Family,
) -> dict[str, tuple[pathlib.Path, str]]:
  """Check all headers; return the file of each tensor, and its name there."""

  def is_unused(name: str) -> bool:
    return name.endswith(_UNUSED) or name.startswith(family.left_out)

  def named(name: str) -> str:
    if family.text_of and name.startswith(_TEXT):
      return _OF_TEXT + name.removeprefix(_TEXT)
    return name

  paths, weight_map = _weight_files(directory)
  known = {**places, **optional}
  found: dict[str, tuple[pathlib.Path, str]] = {}
  for path in paths:
    _check_is_there(path)
    try:
      with safetensors.safe_open(path, "numpy") as file:
        for own in file.keys():
          if is_unused(own):
            continue
          name = named(own)
          if name in found:
            raise ValueError(f"{name} is in {found[name][0].name} as well")
          header = file.get_slice(own)
          _check_tensor(name, header.get_shape(), header.get_dtype(), known)
          found[name] = path, own
    except safetensors.SafetensorError as error:
      raise ValueError(
        f"{path}: {' '.join(str(error).split())}; it is damaged or not whole,"
        " so download it again"
      ) from error
    except (OSError, ValueError) as error:
      raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
  source = directory / (INDEX_FILE if weight_map else WEIGHTS_FILE)
  if missing := [name for name in places if name not in found]:
    raise ValueError(f"{source}: {_first(missing)} missing")
  for own, file_name in weight_map.items():
    name = named(own)
    if name not in found:
      if is_unused(own):
        continue
      raise ValueError(f"{source}: {own} is not in {file_name}")
    path, _ = found[name]
    if path.name != file_name:
      raise ValueError(f"{source}: {own} is in {path.name}, not in {file_name}")
  return found


def _check_is_there(path: pathlib.Path) -> None:
  """Check a file of weights; what a download left unfinished is named."""
  try:
    model_files.check_file(path)
  except FileNotFoundError as error:
    has_part = any(path.parent.glob(f"{path.name}*.incomplete"))
    why = "its download has not ended" if has_part else "a part of the weights"
    raise FileNotFoundError(
      f"{path} does not exist ({why}); download the model again"
    ) from error


def _check_tensor(
  name: str,
  shape: list[int],
  dtype: str,
  places: Mapping[str, tuple[hf_tensors.Place, ...]],
) -> None:
  if name not in places:
    raise ValueError(
      f"{name} is not a tensor of this model; use weights of the architecture"
      f" that {hf_config.CONFIG_FILE} describes"
    )
  expected = hf_tensors.whole_shape(places[name])
  if tuple(shape) != expected:
    raise ValueError(
      f"{name} has shape {tuple(shape)}, expected {expected} by"
      f" {hf_config.CONFIG_FILE}; use the one that came with the weights"
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
      f"{directory}: it has neither {WEIGHTS_FILE} nor {INDEX_FILE}; download"
      " the weights as safetensors"
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
  places = hf_tensors.places(config)
  shards: list[list[str]] = [[]]
  in_shard = total = 0
  for name, parts in places.items():
    shape = hf_tensors.whole_shape(parts)
    size = int(np.prod(shape)) * dtype.itemsize
    if shards[-1] and in_shard + size > max_shard_bytes:
      shards.append([])
      in_shard = 0
    shards[-1].append(name)
    in_shard += size
    total += size
  weight_map = {}
  for number, names in enumerate(shards, start=1):
    file_name = WEIGHTS_FILE
    if len(shards) > 1:
      file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
    tensors = {}
    for name in names:
      parts = [_as_stored(params, place, dtype) for place in places[name]]
      tensors[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    safetensors_numpy.save_file(
      tensors, directory / file_name, metadata={"format": "pt"}
    )
    del tensors  # before those of the next file are made
    weight_map |= dict.fromkeys(names, file_name)
  if len(shards) > 1:
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _as_stored(
  params: transformer.Params, place: hf_tensors.Place, dtype: np.dtype
) -> np.ndarray:
  """Return one tensor on the host, in the stored orientation and dtype."""
  is_layer = place.layer is not None
  leaf = (params["layers"] if is_layer else params)[place.leaf]
  if isinstance(leaf, jax.Array):
    index = tuple(map(np.int32, place.index))
    # Compiled once for all layers and experts.
    alike = dataclasses.replace(place, layer=None, expert=None, first_row=0)
    return np.asarray(_stored(leaf, index, alike, dtype))
  leaf = leaf[place.index]
  leaf = _turned(leaf, place).astype(dtype, copy=False)
  return np.ascontiguousarray(leaf)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _stored(
  leaf: jax.Array, index: Any, place: hf_tensors.Place, dtype: np.dtype
) -> jax.Array:
  """Return one tensor as stored, made on the devices that hold it."""
  for i in index:
    leaf = lax.dynamic_index_in_dim(leaf, i, keepdims=False)
  return _turned(leaf, place).astype(dtype)


def _turned(array: Any, place: hf_tensors.Place) -> Any:
  """Return one of our arrays in the stored shape."""
  if place.is_turned:
    return array.reshape(place.shape[::-1]).T
  return array.reshape(place.shape)
