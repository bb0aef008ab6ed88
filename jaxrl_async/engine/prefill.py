"""Prefill: prompts become cached prefixes, several rows of a bucket per call.

Buckets longer than `prefill_chunk` are prefilled chunk by chunk, so that
running sequences do not have to wait for a long prompt. The tokens that all
prompts begin with (a system prompt) are in this case computed once per policy
version and copied.

The programs that process a prompt depend only on the prompt's own tokens. They
depend neither on what else is being prefilled nor on what is already cached.
The same is therefore true of the resulting bits.
"""

import collections
from collections.abc import Collection, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.reporting import metrics as metrics_lib

Row = tuple[decode_state_lib.Prefix, int]


class Wanted(NamedTuple):
  """A row to prefill: its key, its tokens, and the number of its adapter."""

  key: bytes
  tokens: np.ndarray
  adapter: int


def key_of(tokens: np.ndarray, adapter: int) -> bytes:
  """Return the key of the prefix of these tokens under an adapter."""
  return adapter.to_bytes(4, "little") + tokens.tobytes()


@dataclasses.dataclass(kw_only=True, slots=True)
class _Chunked:
  """A prefix that is being prefilled chunk by chunk.

  Attributes:
    keys: the key of each row.
    prefix: the rows, cached up to `start`.
    start: position of the next chunk.
    end: position up to which the rows must be cached.
  """

  keys: list[bytes]
  prefix: decode_state_lib.Prefix
  start: int
  end: int


class Prefiller:
  """Prefixes for the current weights, by their adapter and their tokens.

  Attributes:
    num_tokens: tokens that were prefilled so far, without padding.

  Threads: only the scheduler's thread uses this class.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    *,
    shared_tokens: np.ndarray,
    busy: metrics_lib.BusyClock,
  ):
    """Create a prefiller without prefixes.

    Args:
      engine: the engine whose programs run.
      shared_tokens: tokens that prompts commonly begin with. Whole chunks of
        them are computed once for all chunked prompts that begin with them.
      busy: records the time of every call.
    """
    self.num_tokens = 0
    self._engine = engine
    self._busy = busy
    chunk = engine.sizes.prefill_chunk
    whole = len(shared_tokens) // chunk * chunk if chunk else 0
    self._shared_tokens = shared_tokens[:whole]
    self._shared: decode_state_lib.Prefix | None = None
    self._params: decode_state_lib.EngineParams | None = None
    self._ready: dict[bytes, Row] = {}
    self._pending: dict[bytes, Wanted] = {}
    self._chunked: _Chunked | None = None

  def adopt(self, params: decode_state_lib.EngineParams) -> None:
    """Use new weights, and forget all prefixes of older ones."""
    self._params = params
    self._shared = self._chunked = None
    self._ready.clear()
    self._pending.clear()

  def bucket(self, length: int) -> int:
    """Return the padded length for a number of tokens."""
    return next(b for b in self._engine.sizes.prefill_buckets if b >= length)

  def want(self, tokens: np.ndarray, adapter: int = 0) -> bytes:
    """Request the prefix of these tokens and return its key.

    Args:
      tokens: without padding.
      adapter: number of the adapter that continues them.
    """
    key = key_of(tokens, adapter)
    is_running = self._chunked is not None and key in self._chunked.keys
    if key not in self._ready and not is_running:
      self._pending[key] = Wanted(key, tokens, adapter)
    return key

  def is_ready(self, key: bytes) -> bool:
    """Return whether `get` has this prefix."""
    return key in self._ready

  def get(self, key: bytes) -> Row:
    """Return the prefix that holds a key, and the key's row in it.

    Raises:
      KeyError: the prefix is not ready.
    """
    return self._ready[key]

  def keep_only(self, keys: Collection[bytes]) -> None:
    """Forget all prefixes and requests except those with these keys."""
    self._ready = {k: row for k, row in self._ready.items() if k in keys}
    self._pending = {k: t for k, t in self._pending.items() if k in keys}

  def may_wait(self) -> bool:
    """Return whether the requests so far fill no call, and none is chunked."""
    return (
      self._chunked is None
      and len(self._pending) < self._engine.sizes.prefill_rows
      and not any(
        self._engine.sizes.is_chunked(self.bucket(len(row.tokens)))
        for row in self._pending.values()
      )
    )

  def advance(self, *, is_patient: bool) -> None:
    """Prefill the requested prefixes.

    Args:
      is_patient: whether to process at most one chunk of the chunked prompts,
        so that running sequences wait less. The tokens that all prompts share
        are not counted. If False, all requests are completed.
    """
    by_program = collections.defaultdict(list)
    for row in self._pending.values():
      bucket = self.bucket(len(row.tokens))
      if self._engine.sizes.is_chunked(bucket):
        by_program[bucket, self._begins_as_all(row)].append(row)
      else:
        by_program[bucket, None].append(row)
    rows = self._engine.sizes.prefill_rows
    for (bucket, is_shared), wanted in by_program.items():
      for start in range(0, len(wanted), rows):
        some = wanted[start : start + rows]
        if is_shared is None:
          self._prefill(bucket, some)
        elif self._chunked is None or not is_patient:
          self._finish_chunked()
          self._open(bucket, some, is_shared)
    if is_patient:
      self._extend()
    else:
      self._finish_chunked()

  def _begins_as_all(self, row: Wanted) -> bool:
    n = len(self._shared_tokens)
    # The shared tokens are cached without an adapter, which is number 0.
    return (
      0 < n < len(row.tokens)
      and row.adapter == 0
      and np.array_equal(row.tokens[:n], self._shared_tokens)
    )

  def _padded(
    self, bucket: int, wanted: Sequence[Wanted]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows of the bucket's length, their lengths and their adapters.

    The lengths are those without padding.
    """
    padded = np.zeros((len(wanted), bucket), np.int32)
    for i, row in enumerate(wanted):
      padded[i, : len(row.tokens)] = row.tokens
    lengths = np.array([len(row.tokens) for row in wanted], np.int32)
    return padded, lengths, np.array([row.adapter for row in wanted], np.int32)

  def _keep(
    self, keys: Sequence[bytes], prefix: decode_state_lib.Prefix
  ) -> None:
    for row, key in enumerate(keys):
      self._ready[key] = prefix, row

  def _prefill(self, bucket: int, wanted: Sequence[Wanted]) -> None:
    assert self._params is not None
    padded, lengths, adapters = self._padded(bucket, wanted)
    self.num_tokens += int(lengths.sum())
    with self._busy.record("prefill"):
      prefix = self._engine.prefill(
        params=self._params,
        padded_tokens=padded,
        true_length=lengths,
        adapters=adapters,
      )
    for row in wanted:
      del self._pending[row.key]
    self._keep([row.key for row in wanted], prefix)

  def _open(
    self, bucket: int, wanted: Sequence[Wanted], is_shared: bool
  ) -> None:
    start = len(self._shared_tokens) if is_shared else 0
    if is_shared and self._shared is None:
      self._shared = self._prefill_shared()
    shared = self._shared if is_shared else None
    padded, lengths, adapters = self._padded(bucket, wanted)
    self.num_tokens += int((lengths - start).sum())
    with self._busy.record("prefill"):
      prefix = self._engine.open_prefix(padded, lengths, shared, adapters)
    for row in wanted:
      del self._pending[row.key]
    self._chunked = _Chunked(
      keys=[row.key for row in wanted],
      prefix=prefix,
      start=start,
      # The first decode step caches the last token.
      end=int(lengths.max()) - 1,
    )
    self._keep_if_whole()

  def _prefill_shared(self) -> decode_state_lib.Prefix:
    tokens = self._shared_tokens
    row = Wanted(key_of(tokens, 0), tokens, 0)
    padded, lengths, adapters = self._padded(self.bucket(len(tokens)), [row])
    self.num_tokens += len(tokens)
    with self._busy.record("prefill"):
      prefix = self._engine.open_prefix(padded, lengths, None, adapters)
      for start in range(0, len(tokens), self._engine.sizes.prefill_chunk):
        assert self._params is not None
        prefix = self._engine.extend_prefix(self._params, prefix, start)
    return prefix

  def _extend(self) -> None:
    if self._chunked is None:
      return
    assert self._params is not None
    job = self._chunked
    with self._busy.record("prefill"):
      job.prefix = self._engine.extend_prefix(
        self._params, job.prefix, job.start
      )
    job.start += self._engine.sizes.prefill_chunk
    self._keep_if_whole()

  def _keep_if_whole(self) -> None:
    job = self._chunked
    if job is not None and job.start >= job.end:
      self._keep(job.keys, job.prefix)
      self._chunked = None

  def _finish_chunked(self) -> None:
    while self._chunked is not None:
      self._extend()
