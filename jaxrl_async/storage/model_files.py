"""The files of a model's directory in Hugging Face format.

The files are interpreted as transformers interprets them. Every error is one
line that names the file and, where there is one, the field.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

from jaxrl_async.config import sections

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"

_LFS_POINTER = b"version https://git-lfs"
_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_SPECIAL_NAMES = (
  "bos_token",
  "eos_token",
  "unk_token",
  "sep_token",
  "pad_token",
  "cls_token",
  "mask_token",
)
# Defaults of the classes in transformers, for tokens that no file names.
_CLASS_TOKENS = {
  "LlamaTokenizer": {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
  },
  "Qwen2Tokenizer": dict.fromkeys(
    ("unk_token", "eos_token", "pad_token"), "<|endoftext|>"
  ),
  "GPT2Tokenizer": dict.fromkeys(
    ("unk_token", "bos_token", "eos_token"), "<|endoftext|>"
  ),
}


def check_file(path: pathlib.Path) -> None:
  """Check that there is a readable file which is not a placeholder.

  Raises:
    FileNotFoundError: there is nothing at the path.
    ValueError: it is not a file, is empty or is a pointer of Git LFS.
  """
  try:
    is_there = path.exists()
    if is_there and not path.is_file():
      raise ValueError(f"{path} is not a file")
    if not is_there:
      raise FileNotFoundError(f"{path} does not exist")
    with path.open("rb") as file:
      beginning = file.read(len(_LFS_POINTER))
  except FileNotFoundError:
    raise FileNotFoundError(f"{path} does not exist") from None
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror})") from error
  if not beginning:
    raise ValueError(f"{path} is empty")
  if beginning == _LFS_POINTER:
    raise ValueError(
      f"{path} is a pointer of Git LFS, not the file; run `git lfs pull`"
    )


def read_text(path: pathlib.Path) -> str:
  """Return the text of a file.

  Raises:
    FileNotFoundError: there is no file.
    ValueError: it cannot be read, or is not UTF-8 text.
  """
  check_file(path)
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is not UTF-8 text (byte {error.start})"
    ) from error
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror})") from error


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """Return the JSON object that a file holds.

  Raises:
    FileNotFoundError: there is no file.
    ValueError: the file does not hold a JSON object.
  """
  text = read_text(path)
  try:
    value = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  except RecursionError as error:
    raise ValueError(f"{path} is nested too deeply") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} does not hold a JSON object")
  return value


def read_optional(path: pathlib.Path) -> dict[str, Any]:
  """Return the JSON object that a file holds, or {} if there is no file.

  Raises:
    ValueError: the file does not hold a JSON object.
  """
  try:
    return read_object(path)
  except FileNotFoundError:
    return {}


def end_tokens_file(directory: pathlib.Path) -> pathlib.Path:
  """Return the file that transformers reads the end tokens from."""
  path = directory / GENERATION_CONFIG
  return path if path.exists() else directory / CONFIG


def end_tokens(directory: pathlib.Path) -> tuple[int, ...]:
  """Return the ids that end a sequence according to the model; maybe none.

  The rule is that of transformers' `generate`: if there is a
  generation_config.json, config.json is not read.

  Raises:
    ValueError: eos_token_id is not an id or a list of ids.
  """
  path = end_tokens_file(directory)
  ids = read_optional(path).get("eos_token_id")
  if ids is None:
    return ()
  listed = ids if isinstance(ids, list) else [ids]
  if not all(type(i) is int and 0 <= i < 2**31 for i in listed):
    raise ValueError(
      f"{path}: eos_token_id is {sections.shown(ids)}, not a token id or a list"
      " of them"
    )
  return tuple(dict.fromkeys(listed))


def tokenizer_class(directory: pathlib.Path) -> str:
  """Return the name of the tokenizer's class in transformers, without "Fast".

  Raises:
    ValueError: the file is damaged.
  """
  path = directory / TOKENIZER_CONFIG
  name = read_optional(path).get("tokenizer_class")
  if not isinstance(name, str | None):
    raise ValueError(
      f"{path}: tokenizer_class is {sections.shown(name)}, not a name"
    )
  return (name or "").removesuffix("Fast")


def _token_settings(
  directory: pathlib.Path,
) -> dict[str, tuple[pathlib.Path, Any]]:
  """Return the settings of a tokenizer, each with its file.

  special_tokens_map.json counts only beside a tokenizer_config.json without
  `added_tokens_decoder`, which is how older versions wrote these files.
  """
  path = directory / TOKENIZER_CONFIG
  found = {name: (path, value) for name, value in read_optional(path).items()}
  if "added_tokens_decoder" not in found:
    path = directory / SPECIAL_TOKENS_MAP
    found |= {
      name: (path, value) for name, value in read_optional(path).items()
    }
  return found


def added_tokens(directory: pathlib.Path) -> dict[int, dict[str, Any]]:
  """Return the tokens of `added_tokens_decoder`, or of added_tokens.json.

  Returns:
    The arguments of `tokenizers.AddedToken` by id, in order of the ids.

  Raises:
    ValueError: a file is damaged.
  """
  path = directory / TOKENIZER_CONFIG
  given = read_optional(path).get("added_tokens_decoder")
  if given is None:
    path = directory / ADDED_TOKENS
    given = {
      index: {"content": token} for token, index in read_optional(path).items()
    }
  kinds = {"content": str} | dict.fromkeys(_TOKEN_FLAGS, bool)
  try:
    found = {
      int(index): {k: token[k] for k in kinds if k in token}
      for index, token in given.items()
    }
    is_right = all(
      "content" in token and all(type(token[k]) is kinds[k] for k in token)
      for token in found.values()
    )
  except (AttributeError, TypeError, ValueError):
    is_right = False
  if not is_right:
    raise ValueError(f"{path}: its added tokens are not tokens with ids")
  return dict(sorted(found.items()))


def unnamed_special_tokens(directory: pathlib.Path) -> list[str]:
  """Return the special tokens that are listed without a name.

  Raises:
    ValueError: one of them is not text.
  """
  settings, found = _token_settings(directory), []
  for name in ("additional_special_tokens", "extra_special_tokens"):
    path, listed = settings.get(name, (directory, None))
    for token in listed if isinstance(listed, list) else ():
      text = token.get("content") if isinstance(token, Mapping) else token
      if not isinstance(text, str):
        raise ValueError(f"{path}: {name} has {sections.shown(token)}")
      found.append(text)
  return found


def special_tokens(directory: pathlib.Path) -> dict[str, str]:
  """Return the special tokens that have a name, such as eos_token.

  Raises:
    ValueError: one of them is not text.
  """
  named = _token_settings(directory)
  path = directory / TOKENIZER_CONFIG
  _, extra = named.get("extra_special_tokens", (path, None))
  extra = extra if isinstance(extra, Mapping) else {}
  named |= {name: (path, value) for name, value in extra.items()}
  tokens = dict(_CLASS_TOKENS.get(tokenizer_class(directory), {}))
  for name in named.keys() & tokens.keys():
    del tokens[name]  # even where the file says null
  for name, (path, value) in named.items():
    text = value.get("content") if isinstance(value, Mapping) else value
    if isinstance(text, str) and (name.endswith("_token") or name in extra):
      tokens[name] = text
    elif name in _SPECIAL_NAMES and value is not None:
      raise ValueError(
        f"{path}: {name} is {sections.shown(value)}, not a token"
      )
  return tokens
