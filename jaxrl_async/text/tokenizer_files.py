"""The files of a tokenizer and its chat templates, copied as they are."""

import pathlib
import shutil

from jaxrl_async.storage import model_files
from jaxrl_async.text import chat_template as chat_template_lib

# The class that an export names for transformers; see policies/export.py.
CLASS = "tokenizer_class.py"
_FILES = (
  model_files.TOKENIZER,
  model_files.TOKENIZER_CONFIG,
  model_files.SPECIAL_TOKENS_MAP,
  model_files.ADDED_TOKENS,
  model_files.GENERATION_CONFIG,
  "vocab.json",
  "merges.txt",
  "tokenizer.model",
  CLASS,
  *chat_template_lib.FILES,
)


def copy(
  source: pathlib.Path, target: pathlib.Path, *, with_config: bool = False
) -> None:
  """Copy all files of a tokenizer, chat templates included.

  Args:
    source: in Hugging Face's format.
    target: created if needed; files of the same names are replaced.
    with_config: copy the config.json of the model too.

  Raises:
    OSError: a file cannot be read or written.
  """
  target.mkdir(parents=True, exist_ok=True)
  names = (*_FILES, model_files.CONFIG) if with_config else _FILES
  for name in names:
    path = source / name
    if path.is_dir():
      shutil.copytree(path, target / name, dirs_exist_ok=True)
    elif path.exists():
      shutil.copyfile(path, target / name)
