"""Rows of the library `datasets` (extra `datasets`): directories, and the hub.

A dataset of the hub is taken from the cache if the hub cannot be reached.
Whether it can is found out by one request, because the library itself tries
again for half a minute.
"""

from collections.abc import Iterator, Mapping
import contextlib
import functools
import logging
import types
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data.tables import arrow
from jaxrl_async.data.tables import table as table_lib
from jaxrl_async.data.tables import uri as uri_lib

_HUB_TIMEOUT_S = 5.0
_TRAIN = "train"
_TEST = ("test", "validation")


def open_split(uri: uri_lib.Uri) -> table_lib.Table:
  """Load the split of a dataset, which may download it, into mapped files."""
  rows = _splits(uri)[_chosen(uri)]
  columns = rows.with_format("arrow")
  return table_lib.Table(
    arrow.Rows(len(rows), rows.features.arrow_schema, columns.__getitem__),
    table_lib.plain,
    str(rows._fingerprint),
    lambda row: f"{uri}: row {row}",
  )


def test_split(uri: uri_lib.Uri) -> uri_lib.Uri | None:
  """Return the URI of the split `test`, or `validation`; None without one."""
  for name in _TEST:
    if name in _splits(uri) and name != _chosen(uri):
      return uri.with_option("split", name)
  return None


def _chosen(uri: uri_lib.Uri) -> str:
  """Return the split of a URI: the one it names, else the one for training."""
  splits, name = _splits(uri), uri.option("split")
  if name is None:
    name = next(iter(splits)) if len(splits) == 1 else _TRAIN
  if name not in splits:
    raise table_lib.TableError(
      f"{uri} has no split {name!r}{sections.did_you_mean(name, splits)}"
    )
  return name


def _splits(uri: uri_lib.Uri) -> Mapping[str, Any]:
  if uri.kind == "datasets":
    return _of_directory(uri.place)
  return _of_hub(uri.place, uri.option("name"), uri.option("revision"))


def _library() -> types.ModuleType:
  try:
    import datasets
  except ImportError as error:
    raise table_lib.TableError(
      "datasets: and hf: need the library datasets; pip install"
      " jaxrl_async[datasets]"
    ) from error
  return datasets


@contextlib.contextmanager
def _errors_of(name: str, why: str = "") -> Iterator[None]:
  """Turn what the library raises into one line."""
  import pyarrow

  kinds = (OSError, ValueError, KeyError, pyarrow.ArrowException)
  try:
    yield
  except (*kinds, _library().exceptions.DatasetsError) as error:
    raise table_lib.TableError(
      f"{name} cannot be loaded: {table_lib.reason(error)}{why}"
    ) from error


@functools.cache
def _of_directory(place: str) -> Mapping[str, Any]:
  """Return the splits of a directory that `save_to_disk` wrote."""
  library = _library()
  with _errors_of(place):
    loaded = library.load_from_disk(place)
  if isinstance(loaded, library.Dataset):
    return {str(loaded.split or _TRAIN): loaded}
  return {str(name): rows for name, rows in loaded.items()}


@functools.cache
def _of_hub(
  place: str, name: str | None, revision: str | None
) -> Mapping[str, Any]:
  """Return the splits of a dataset of the hub, or of the cache."""
  library = _library()
  import huggingface_hub
  from huggingface_hub import errors

  logging.getLogger("datasets").setLevel(logging.ERROR)
  why = ""
  try:
    huggingface_hub.HfApi().dataset_info(
      place, revision=revision, timeout=_HUB_TIMEOUT_S
    )
  except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
    raise table_lib.TableError(
      f"hf:{place} cannot be found: {table_lib.reason(error)}"
    ) from error
  # The client's errors of connections, under a name it does not declare.
  except (OSError, errors.HTTPError) as error:  # pyright: ignore
    why = f"; the hub cannot be reached ({table_lib.reason(error)})"
    library.config.HF_HUB_OFFLINE = True  # so that it asks only the cache
  with _errors_of(f"hf:{place}", why):
    loaded = library.load_dataset(place, name, revision=revision)
  return {str(split): rows for split, rows in loaded.items()}
