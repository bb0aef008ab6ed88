"""Pretrained models by name: a directory, or a repository of a hub.

`hf:ORG/NAME` and `hf:ORG/NAME@REVISION` name a repository of Hugging Face's
hub. Its files come through huggingface_hub, which keeps them in its cache and
reads its own environment variables: HF_HOME for the cache, HF_TOKEN for private
and gated repositories, HF_HUB_OFFLINE=1 to use the cache alone, HF_ENDPOINT for
another hub.
"""

import functools
import hashlib
import os
import pathlib
import re

from jaxrl_async.config import sections
from jaxrl_async.models import configs

PREFIX = "hf:"

# Patterns match whole paths, and "*" any part of them, slashes included.
_SETTINGS = ("*.json", "*.jinja")
_WEIGHTS = ("model*.safetensors",)
_SHOWN_CHARACTERS = 160


class HubError(ValueError):
  """A repository cannot be read; one line that says what to do."""


def model_directory(name: str) -> pathlib.Path | None:
  """Return the directory of a pretrained model, without weights from the hub.

  Args:
    name: the value of `model.name`.

  Returns:
    None if the name is that of a model of `configs.MODELS` or of nothing.

  Raises:
    HubError: the hub does not give the files, and they are not in the cache.
  """
  if name.startswith(PREFIX):
    return _snapshot(name, _SETTINGS)
  # os.path accepts any name; pathlib may raise.
  is_directory = name not in configs.MODELS and os.path.isdir(name)
  return pathlib.Path(name) if is_directory else None


def fetch_weights(name: str) -> None:
  """Put the weights beside the other files of a repository of the hub.

  Nothing happens if the name is none of the hub's.

  Raises:
    HubError: as `model_directory`.
  """
  if not name.startswith(PREFIX):
    return
  directory = _snapshot(name, (*_SETTINGS, *_WEIGHTS))
  for pattern in _WEIGHTS:
    for path in directory.glob(pattern):
      _check_digest(name, path.resolve())


def repository(name: str) -> tuple[str, str | None]:
  """Return the repository, as ORG/NAME, and the revision of a name.

  A name that is none of the hub's is returned as it is.
  """
  if not name.startswith(PREFIX):
    return name, None
  path, _, revision = name.removeprefix(PREFIX).partition("@")
  return path, revision or None


def _check_digest(name: str, blob: pathlib.Path) -> None:
  """Check a large file of the cache; its name is its SHA-256 digest."""
  if not re.fullmatch("[0-9a-f]{64}", blob.name):
    return
  with open(blob, "rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
  if found != blob.name:
    raise HubError(
      f"{sections.shown(name)}: {blob} was damaged on its way (its SHA-256 is"
      f" {found}); delete it, and start again"
    )


def _downloaded(
  path: str, revision: str | None, patterns: tuple[str, ...]
) -> str:
  """Return the snapshot of a repository, from the cache if the hub hangs.

  The library waits without end for the first answer of a hub. So that is asked
  for here, with the deadline that the library has for its other requests.
  """
  import httpx2
  import huggingface_hub
  from huggingface_hub import constants
  from huggingface_hub import errors

  download = functools.partial(
    huggingface_hub.snapshot_download,
    path,
    revision=revision,
    allow_patterns=list(patterns),
  )
  try:
    huggingface_hub.HfApi().model_info(
      path,
      revision=revision or constants.DEFAULT_REVISION,
      timeout=constants.HF_HUB_ETAG_TIMEOUT,
    )
  except httpx2.TimeoutException as error:
    try:
      return download(local_files_only=True)
    except errors.LocalEntryNotFoundError:
      raise error from None
  except (OSError, ValueError, httpx2.HTTPError):
    pass  # the library meets it too, and knows what the cache can replace
  return download()


def _snapshot(name: str, patterns: tuple[str, ...]) -> pathlib.Path:
  import httpx2  # these take a third of a second, and few runs need them
  from huggingface_hub import errors

  path, revision = repository(name)
  shown = sections.shown(name)
  try:
    found = _downloaded(path, revision, patterns)
  except errors.RevisionNotFoundError as error:
    raise HubError(
      f"{shown}: there is no revision {sections.shown(revision)}; use a branch,"
      " a tag or a commit of the repository"
    ) from error
  except errors.GatedRepoError as error:
    raise HubError(
      f"{shown}: its owners give access on request; accept their conditions on"
      " the hub, and set HF_TOKEN"
    ) from error
  except errors.RepositoryNotFoundError as error:
    raise HubError(
      f"{shown}: there is no such repository, or it is private; correct the"
      " name, or set HF_TOKEN"
    ) from error
  except (OSError, ValueError, httpx2.HTTPError) as error:
    cause = error.__cause__ or error
    reason = " ".join(str(cause).split())[:_SHOWN_CHARACTERS]
    raise HubError(
      f"{shown}: cannot be downloaded and is not in the cache"
      f" ({type(cause).__name__}: {reason}); use a directory, or try again"
    ) from error
  return pathlib.Path(found)
