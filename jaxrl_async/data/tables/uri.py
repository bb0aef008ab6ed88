"""URIs of datasets: a kind, a place, and options for the kinds that have them.

    jsonl:train.jsonl               parquet:data/train-*.parquet
    arrayrecord:train.arrayrecord   json:test.json
    datasets:my_data?split=train    hf:openai/gsm8k?name=main&split=train
    verifiers:my_env?split=train    verifiers:my-env
    reasoning_gym:chain_sum         chain_sum

This module reads nothing, so that a URI can be checked before slow imports.
"""

import dataclasses
import pathlib
import re
import urllib.parse

from jaxrl_async.config import sections

REASONING_GYM = "reasoning_gym"
VERIFIERS = "verifiers"
_ANY = ("OPTION",)
# What follows the colon, and the options after a question mark.
KINDS = {
  "jsonl": ("PATH", ()),
  "json": ("PATH", ()),
  "parquet": ("PATH", ()),
  "arrayrecord": ("PATH", ()),
  "datasets": ("DIRECTORY", ("split",)),
  "hf": ("NAME", ("name", "split", "revision")),
  VERIFIERS: ("NAME", _ANY),
  REASONING_GYM: ("NAME", ()),
}
_FORMS = ", ".join(f"{kind}:{place}" for kind, (place, _) in KINDS.items())
_SUFFIXES = (".gz", ".jsonl", ".json", ".parquet", ".arrayrecord")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uri:
  """Where a dataset is.

  Attributes:
    kind: one of `KINDS`.
    place: a path, which may be a pattern, or a name.
    options: names and values, in the order in which they were given.
  """

  kind: str
  place: str
  options: tuple[tuple[str, str], ...] = ()

  @property
  def has_rows(self) -> bool:
    """Whether it names files and not a program that makes items."""
    return self.kind != REASONING_GYM

  @property
  def label(self) -> str:
    """A short name for prompt ids and messages."""
    name = pathlib.PurePath(self.place).name
    for suffix in _SUFFIXES:
      name = name.removesuffix(suffix)
    return re.sub(r"[^\w.-]+", "_", name) or self.kind

  def option(self, name: str) -> str | None:
    """Return an option's value, or None if it was not given."""
    return dict(self.options).get(name)

  def with_option(self, name: str, value: str) -> "Uri":
    """Return the URI with another value of an option."""
    options = {**dict(self.options), name: value}
    return dataclasses.replace(self, options=tuple(options.items()))

  def __str__(self) -> str:
    """Return the URI as it is written in a config."""
    options = urllib.parse.urlencode(self.options, safe="/")
    return f"{self.kind}:{self.place}" + (f"?{options}" if options else "")


def parse(field: str, text: str) -> Uri:
  """Return the parts of a URI.

  Args:
    text: the URI. A name without a colon is a dataset of reasoning-gym.
  """
  kind, has_colon, place = text.partition(":")
  if not has_colon:
    kind, place = REASONING_GYM, text
  sections.require(
    kind in KINDS and bool(place),
    field,
    f"{sections.shown(text)} is no dataset; use {_FORMS}, or the name of a"
    " dataset of reasoning-gym alone",
  )
  known = KINDS[kind][1]
  if not known:  # in a path, a question mark is part of a pattern
    return Uri(kind=kind, place=place)
  place, _, query = place.partition("?")
  try:
    options = urllib.parse.parse_qsl(query, strict_parsing=bool(query))
  except ValueError as error:
    raise sections.ConfigError(
      f"{field}: {sections.shown(text)} has options that cannot be read; write"
      f" {kind}:{KINDS[kind][0]}?{known[0]}=VALUE"
    ) from error
  for name, _ in options:
    sections.require(
      name in known or known is _ANY,
      field,
      f"{sections.shown(text)} has an option {sections.shown(name)}"
      f"{sections.did_you_mean(name, known)}",
    )
  sections.require(
    bool(place), field, f"{sections.shown(text)} names no {KINDS[kind][0]}"
  )
  return Uri(kind=kind, place=place, options=tuple(options))
