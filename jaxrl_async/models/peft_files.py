"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

`read` and `write` are the counterparts of `hf_weights`, for adapters. Nothing
is guessed: whatever PEFT can do beyond plain LoRA is an error that names it.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
from typing import Any

from jaxtyping import Float
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hub
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.storage import model_files

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model.model.layers."
# Our names of kernels by those of PEFT, such as q_proj.
_MODULES = {
  configs.PROJECTIONS[name].stored.partition(".")[2]: name
  for name in sections.LORA_MODULES
}
_DTYPES = {"F32", "F16", "BF16"}
_MAX_RANK = 2**16
# Settings that do not change what an adapter computes once it is trained, and
# those that `_lora` reads.
_HARMLESS = {
  *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
  *("lora_dropout", "task_type", "peft_version", "megatron_core"),
  *("qalora_group_size", "corda_config", "eva_config", "loftq_config"),
  *("lora_ga_config", "exclude_modules", "ensure_weight_tying"),
  *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias"),
  *("init_lora_weights", "layers_pattern"),
}
# Other initialisations change the base as well.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def is_adapter(directory: pathlib.Path) -> bool:
  """Return whether a directory is of this format, even if it is damaged."""
  return any((directory / x).exists() for x in (CONFIG_FILE, WEIGHTS_FILE))


# -- reading ------------------------------------------------------------------


def read(
  directory: str | pathlib.Path, model: configs.ModelConfig
) -> tuple[configs.Lora, dict[str, Any]]:
  """Read an adapter for a model.

  Args:
    directory: holds the two files.
    model: the architecture that the adapter must be for. If it has adapters,
      the one that is read must have their rank, alpha and modules.

  Returns:
    What describes the adapter, and its leaves as float32 numpy arrays with
    stacked layers.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: the files do not hold an adapter of this kind for this model.
  """
  lora = check(directory, model)
  path = pathlib.Path(directory) / WEIGHTS_FILE
  layers: dict[str, np.ndarray] = {}
  for module in lora.modules:
    shapes = lora_lib.shapes(
      lora, module, model.kernel_shapes[module], lora.rank
    )
    for leaf, shape in zip(lora_lib.names(module), shapes, strict=True):
      num_layers = len(model.layers_with(module))
      layers[leaf] = np.empty((num_layers, *shape), np.float32)
  with safetensors.safe_open(path, "numpy") as file:
    for name, (leaf, layer, _) in _places(model, lora).items():
      stored = file.get_tensor(name).astype(np.float32)
      if not np.isfinite(stored).all():
        raise ValueError(f"{path}: {name} has values that are not finite")
      into = layers[leaf][layer]
      np.copyto(into, stored.T.reshape(into.shape))
  return lora, {"layers": layers}


def check(
  directory: str | pathlib.Path, model: configs.ModelConfig
) -> configs.Lora:
  """Check what `read` would check, except for the values of the tensors."""
  directory = pathlib.Path(directory)
  path = directory / CONFIG_FILE
  try:
    lora = _lora(model_files.read_object(path))
  except ValueError as error:
    text = str(error)
    raise ValueError(
      text if text.startswith(str(path)) else f"{path}: {text}"
    ) from error
  if model.lora is not None:
    for name in ("rank", "alpha", "modules"):
      here, wanted = getattr(lora, name), getattr(model.lora, name)
      if here != wanted:
        raise ValueError(
          f"{path}: the adapter has {name} {here}, but model.lora.{name} is"
          f" {wanted}; use model.lora.{name}={here}"
        )
  path = directory / WEIGHTS_FILE
  model_files.check_file(path)
  try:
    with safetensors.safe_open(path, "numpy") as file:
      found = {
        name: (tuple(x.get_shape()), x.get_dtype())
        for name in file.keys()
        for x in [file.get_slice(name)]
      }
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
  places = _places(model, lora)
  for name in sorted(places.keys() | found.keys()):
    if name not in places:
      raise ValueError(
        f"{path}: {sections.shown(name)} is not a tensor of an adapter for this"
        f" model ({model.num_layers} layers,"
        f" target_modules {', '.join(map(_stored_name, lora.modules))})"
      )
    if name not in found:
      raise ValueError(f"{path}: {name} is missing")
    shape, dtype = found[name]
    if shape != places[name][2]:
      raise ValueError(
        f"{path}: {name} has shape {shape}, expected {places[name][2]}; the"
        " adapter is for another model"
      )
    if dtype not in _DTYPES:
      raise ValueError(
        f"{path}: {name} is {dtype}; use one of {', '.join(sorted(_DTYPES))}"
      )
  return lora


def _stored_name(module: str) -> str:
  return configs.PROJECTIONS[module].stored.partition(".")[2]


def _lora(settings: Mapping[str, Any]) -> configs.Lora:
  """Return what an adapter_config.json describes.

  Raises:
    ValueError: it is not plain LoRA on known modules.
  """

  def require(holds: bool, name: str, use: str) -> None:
    if not holds:
      value = sections.shown(settings.get(name))
      raise ValueError(f"{name} is {value}; {use}")

  require(settings.get("peft_type") == "LORA", "peft_type", "use LORA")
  require(settings.get("bias", "none") == "none", "bias", "use none")
  for name in sorted(settings.keys() - _HARMLESS):
    plain = "only plain LoRA can be read"
    require(not settings[name], name, plain)
  initialised = settings.get("init_lora_weights", True)
  require(
    any(initialised is x or initialised == x for x in _INITIALISATIONS),
    "init_lora_weights",
    "it changes the base as well; convert the adapter to plain LoRA with PEFT",
  )
  rank, alpha = settings.get("r"), settings.get("lora_alpha")
  require(
    type(rank) is int and 0 < rank <= _MAX_RANK, "r", "use a positive integer"
  )
  if type(alpha) not in (int, float):
    require(False, "lora_alpha", "use a positive number")
  assert isinstance(rank, int) and isinstance(alpha, int | float)
  require(0 < alpha < math.inf, "lora_alpha", "use a positive number")
  if settings.get("use_rslora"):  # alpha / sqrt(r), arXiv:2312.03732
    alpha *= math.sqrt(rank)
  targets = settings.get("target_modules")
  if not isinstance(targets, list) or not targets:
    require(False, "target_modules", "use a list of names")
  assert isinstance(targets, list)
  for target in targets:
    # PEFT accepts the end of a path, such as self_attn.q_proj.
    if not isinstance(target, str) or target.rpartition(".")[2] not in _MODULES:
      raise ValueError(
        f"target_modules has {sections.shown(target)}; this decoder has"
        f" adapters on {', '.join(_MODULES)}"
      )
  names = {_MODULES[target.rpartition(".")[2]] for target in targets}
  return configs.Lora(
    rank=rank,
    alpha=float(alpha),
    modules=tuple(m for m in sections.LORA_MODULES if m in names),
  )


def why_no_places(model: configs.ModelConfig) -> str:
  """Return why the format has no place for the adapters of a model, or "".

  It has none for adapters of kernels that are stored together with others, as
  in Phi-3: an adapter of PEFT is one for all of them, and ours are not.
  """
  family, lora = families.FAMILIES.get(model.family), model.lora
  if family is None or lora is None:
    return ""
  for stored, parts in family.fused.items():
    if both := [module for module in lora.modules if module in parts]:
      name = stored.partition(".")[2]
      return (
        f"model.lora.modules has {both[0]}, which {model.family} stores in"
        f" {name} with others; merge the adapter instead, or leave"
        f" {', '.join(parts)} out"
      )
  return ""


def _places(
  model: configs.ModelConfig, lora: configs.Lora
) -> dict[str, tuple[str, int, tuple[int, ...]]]:
  """Return leaf, layer and stored shape of each tensor, by its stored name.

  Raises:
    ValueError: one has no place, see `why_no_places`.
  """
  if why := why_no_places(dataclasses.replace(model, lora=lora)):
    raise ValueError(why)
  places = {}
  for module in lora.modules:
    kernel = model.kernel_shapes[module]
    a, b = lora_lib.shapes(lora, module, kernel, lora.rank)
    stored = (lora.rank, math.prod(a[:-1])), (math.prod(b[1:]), lora.rank)
    for index, layer in enumerate(model.layers_with(module)):
      start = f"{_PREFIX}{layer}.{configs.PROJECTIONS[module].stored}.lora_"
      for letter, leaf, shape in zip(
        "AB", lora_lib.names(module), stored, strict=True
      ):
        places[f"{start}{letter}.weight"] = leaf, index, shape
  return places


# -- writing ------------------------------------------------------------------


def write(
  directory: str | pathlib.Path,
  model: configs.ModelConfig,
  params: Any,
  *,
  base_model: str = "",
) -> None:
  """Write the adapters of a model so that PEFT can load them.

  The tensors are float32. adapter_config.json is written last, so that a
  directory without one is incomplete.

  Args:
    directory: created if needed.
    model: the architecture, with its adapters.
    params: their leaves, with stacked layers; jax or numpy arrays. Other leaves
      are left out.
    base_model: directory of the base, or its name as `hub` reads it.

  Raises:
    FileExistsError: the directory already holds an adapter.
    ValueError: the model has no adapters, or they have no place.
  """
  directory = pathlib.Path(directory)
  lora = model.lora
  if lora is None or lora.num_adapters:
    raise ValueError("model: it has no adapters of its own to write")
  places = _places(model, lora)
  directory.mkdir(parents=True, exist_ok=True)
  if is_adapter(directory):
    raise FileExistsError(
      f"{directory} holds an adapter; use another directory"
    )
  host = {
    name: np.asarray(x, np.float32)
    for name, x in lora_lib.adapters(params)["layers"].items()
  }
  tensors = {
    name: _as_stored(host[leaf][layer], shape)
    for name, (leaf, layer, shape) in places.items()
  }
  safetensors_numpy.save_file(
    tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"}
  )
  alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
  name, revision = hub.repository(base_model)
  settings = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": name or None,
    "revision": revision,
    "r": lora.rank,
    "lora_alpha": alpha,
    "lora_dropout": 0.0,
    "target_modules": [_stored_name(module) for module in lora.modules],
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "inference_mode": True,
  }
  text = json.dumps(settings, indent=2) + "\n"
  (directory / CONFIG_FILE).write_text(text)


def _as_stored(
  array: Float[np.ndarray, "..."], shape: tuple[int, ...]
) -> Float[np.ndarray, "_ _"]:
  """Return a matrix [in, out] in the stored orientation, [out, in]."""
  return np.ascontiguousarray(array.reshape(shape[::-1]).T)
