"""The files of a model's directory, in Hugging Face's format.

Whatever is wrong with one is an error of one line that names the file and,
where there is one, the field. What the files mean is read as transformers
reads them.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

_LFS_POINTER = b"version https://git-lfs"
_SPECIAL_NAMES = (
  "bos_token",
  "eos_token",
  "unk_token",
  "sep_token",
  "pad_token",
  "cls_token",
  "mask_token",
)
# What transformers' class takes where no file names it.
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
  """Refuses what is not a file, is empty, or only stands for one.

  Raises:
    FileNotFoundError: nothing is there.
    ValueError: it is something else.
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
      f"{path} is a pointer of Git LFS, not the file; `git lfs pull` gets it"
    )


def read_text(path: pathlib.Path) -> str:
  """A file's text.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it cannot be read, or is no text.
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
  """The JSON object that a file holds.

  Raises:
    FileNotFoundError: there is no file.
    ValueError: it holds something else.
  """
  text = read_text(path)
  try:
    value = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  except RecursionError as error:
    raise ValueError(f"{path} is nested too deeply") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds no JSON object")
  return value


def read_optional(path: pathlib.Path) -> dict[str, Any]:
  """As `read_object`; nothing where there is no such file."""
  try:
    return read_object(path)
  except FileNotFoundError:
    return {}


def shown(value: Any) -> str:
  """A value for a message: on one line, and not a long one."""
  try:
    text = repr(value)
  except ValueError:  # an integer of thousands of digits
    text = "a huge number"
  return text if len(text) <= 60 else text[:57] + "..."


def end_tokens_file(directory: pathlib.Path) -> pathlib.Path:
  """The file that says what ends a sequence, as transformers chooses it."""
  path = directory / GENERATION_CONFIG
  return path if path.exists() else directory / CONFIG


def end_tokens(directory: pathlib.Path) -> tuple[int, ...]:
  """The ids that end a sequence by the model's own account; may be none.

  As transformers' `generate` takes them: where there is a
  generation_config.json, config.json is not asked.

  Raises:
    ValueError: the file says something else.
  """
  path = end_tokens_file(directory)
  ids = read_optional(path).get("eos_token_id")
  if ids is None:
    return ()
  listed = ids if isinstance(ids, list) else [ids]
  if not all(type(i) is int and 0 <= i < 2**31 for i in listed):
    raise ValueError(
      f"{path}: eos_token_id is {shown(ids)}, not a token id or a list of them"
    )
  return tuple(dict.fromkeys(listed))


def tokenizer_class(directory: pathlib.Path) -> str:
  """The class of transformers that a tokenizer is of, by its slow name.

  Raises:
    ValueError: the file is damaged.
  """
  path = directory / TOKENIZER_CONFIG
  name = read_optional(path).get("tokenizer_class")
  if not isinstance(name, str | None):
    raise ValueError(f"{path}: tokenizer_class is {shown(name)}, not a name")
  return (name or "").removesuffix("Fast")


def special_tokens(directory: pathlib.Path) -> dict[str, str]:
  """The special tokens that have a name, such as eos_token.

  special_tokens_map.json counts only beside a tokenizer_config.json without
  `added_tokens_decoder`, which is how the older versions wrote them.

  Raises:
    ValueError: one of them is no text.
  """
  path = directory / TOKENIZER_CONFIG
  settings = read_optional(path)
  named = {name: (path, value) for name, value in settings.items()}
  if "added_tokens_decoder" not in settings:
    path = directory / SPECIAL_TOKENS_MAP
    named |= {
      name: (path, value) for name, value in read_optional(path).items()
    }
  _, extra = named.get("extra_special_tokens", (path, None))
  extra = extra if isinstance(extra, Mapping) else {}
  named |= {name: (path, value) for name, value in extra.items()}
  tokens = dict(_CLASS_TOKENS.get(tokenizer_class(directory), {}))
  for name in named.keys() & tokens.keys():
    del tokens[name]  # be it by a null
  for name, (path, value) in named.items():
    text = value.get("content") if isinstance(value, Mapping) else value
    if isinstance(text, str) and (name.endswith("_token") or name in extra):
      tokens[name] = text
    elif name in _SPECIAL_NAMES and value is not None:
      raise ValueError(f"{path}: {name} is {shown(value)}, not a token")
  return tokens
