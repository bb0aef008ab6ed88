"""Prefill: prompts become cached prefixes, several rows of a bucket per call.

Buckets longer than `prefill_chunk` are prefilled chunk by chunk, so that
running sequences do not have to wait for a long prompt.

The programs that process a prompt depend only on the prompt's own tokens. They
depend neither on what else is being prefilled nor on what is already cached.
The same is therefore true of the resulting bits.

This is different with `kept_tokens`: prompts of buckets longer than
`prefill_chunk` then begin with what pages hold of them, and only the rest is
computed. As `prefill_chunk` has to be small there, so that short turns are
cached, a prompt of which no page is cached has several chunks between two
calls, and waits for at most `_MOST_CALLS`.
"""

import collections
from collections.abc import Collection, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import page_admission
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib

_MOST_CALLS = 16


class Row(NamedTuple):
  """A row of a prefix, and how many of its tokens came from kept pages."""

  prefix: decode_state_lib.Prefix
  index: int
  num_cached: int


class Wanted(NamedTuple):
  """A row to prefill.

  Attributes:
    key: its key.
    tokens: its tokens.
    lineage: of its sequence.
    pages: the pages that held its beginning when it was about to be prefilled.
  """

  key: bytes
  tokens: np.ndarray
  lineage: sequence_lib.Lineage
  pages: Sequence[int] = ()


def key_of(tokens: np.ndarray, lineage: sequence_lib.Lineage) -> bytes:
  """Return the key of the prefix of these tokens in a lineage."""
  return b"%d,%d:" % lineage + tokens.tobytes()


@dataclasses.dataclass(kw_only=True, slots=True)
class _Chunked:
  """A prefix that is being prefilled chunk by chunk.

  Attributes:
    keys: the key of each row.
    prefix: the rows, cached up to `start`.
    start: position of the next chunk, of all rows or of each.
    num_left: number of chunks that are left.
    per_call: how many of them are cached between two calls.
    num_cached: of each row, as in `Row`.
  """

  keys: list[bytes]
  prefix: decode_state_lib.Prefix
  start: int | np.ndarray
  num_left: int
  per_call: int
  num_cached: list[int]


class Prefiller:
  """Prefixes for the current weights, by their adapter and their tokens.

  Attributes:
    num_tokens: tokens that were prefilled so far, without padding.
    num_cached: tokens that did not have to be, because kept pages held them.

  Threads: only the scheduler's thread uses this class.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    *,
    admission: page_admission.CacheAdmission,
    busy: metrics_lib.BusyClock,
  ):
    """Create a prefiller without prefixes.

    Args:
      engine: the engine whose programs run.
      admission: knows what pages hold.
      busy: records the time of every call.
    """
    self.num_tokens = self.num_cached = 0
    self._engine = engine
    self._admission = admission
    self._busy = busy
    self._keeps = engine.sizes.kept_pages > 0
    self._params: decode_state_lib.EngineParams | None = None
    self._ready: dict[bytes, Row] = {}
    self._pending: dict[bytes, Wanted] = {}
    self._chunked: _Chunked | None = None

  def adopt(self, params: decode_state_lib.EngineParams) -> None:
    """Use new weights, and forget all prefixes of older ones."""
    self._params = params
    self._chunked = None
    self._ready.clear()
    self._pending.clear()

  def bucket(self, length: int) -> int:
    """Return the padded length for a number of tokens."""
    return next(b for b in self._engine.sizes.prefill_buckets if b >= length)

  def want(self, tokens: np.ndarray, lineage: sequence_lib.Lineage) -> bytes:
    """Request the prefix of these tokens and return its key.

    Args:
      tokens: without padding.
      lineage: of the sequence that continues them.
    """
    key = key_of(tokens, lineage)
    is_running = self._chunked is not None and key in self._chunked.keys
    if key not in self._ready and not is_running:
      self._pending[key] = Wanted(key, tokens, lineage)
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

  def advance(
    self, state: decode_state_lib.DecodeState, *, is_patient: bool
  ) -> bool:
    """Prefill the requested prefixes.

    Args:
      state: the slots' state, whose pages are read.
      is_patient: whether to process one chunk at most of the chunked prompts,
        or a few with `kept_tokens`, so that running sequences wait less. If
        False, all requests are completed.

    Returns:
      Whether this has to be called again to complete all requests. The caller
      first fills pages with what is ready, and these may hold the beginning of
      what is left.
    """
    by_program = collections.defaultdict(list)
    for row in self._pending.values():
      bucket = self.bucket(len(row.tokens))
      if not self._engine.sizes.is_chunked(bucket):
        by_program[bucket, None].append(row)
      elif not self._keeps:
        by_program[bucket, 0].append(row)
      else:
        row = row._replace(
          pages=self._admission.find(row.tokens[:-1], row.lineage)
        )
        # All rows of a call wait for the one with the most chunks.
        num_chunks = self._num_chunks(row)
        by_program[bucket, num_chunks.bit_length()].append(row)
    rows = self._engine.sizes.prefill_rows
    for (bucket, kind), wanted in by_program.items():
      for start in range(0, len(wanted), rows):
        some = wanted[start : start + rows]
        if kind is None:
          self._prefill(bucket, some)
        elif self._chunked is None or not is_patient:
          self._finish_chunked()
          self._open(bucket, some, state)
          if self._keeps and not is_patient:
            self._finish_chunked()
            return bool(self._pending)
    if is_patient:
      for _ in range(0 if self._chunked is None else self._chunked.per_call):
        self._extend()
    else:
      self._finish_chunked()
    return False

  def _num_chunks(self, row: Wanted) -> int:
    """Return how many chunks must be computed after what the pages hold."""
    sizes = self._engine.sizes
    # The first decode step caches the last token.
    left = len(row.tokens) - 1 - len(row.pages) * sizes.page_tokens
    return -(-left // sizes.prefill_chunk)

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
    adapters = np.array([row.lineage.adapter for row in wanted], np.int32)
    return padded, lengths, adapters

  def _keep(
    self,
    keys: Sequence[bytes],
    prefix: decode_state_lib.Prefix,
    num_cached: Sequence[int],
  ) -> None:
    for i, (key, cached) in enumerate(zip(keys, num_cached, strict=True)):
      self._ready[key] = Row(prefix, i, cached)

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
    self._keep([row.key for row in wanted], prefix, [0] * len(wanted))

  def _open(
    self,
    bucket: int,
    wanted: Sequence[Wanted],
    state: decode_state_lib.DecodeState,
  ) -> None:
    """Open rows that begin with what pages hold of them."""
    sizes = self._engine.sizes
    padded, lengths, adapters = self._padded(bucket, wanted)
    num_left = max(map(self._num_chunks, wanted))
    # The chunks of each row end within it. If they would not, the row begins
    # earlier, and computes again what it had.
    latest = bucket - num_left * sizes.prefill_chunk
    starts = [min(len(row.pages) * sizes.page_tokens, latest) for row in wanted]
    self.num_cached += sum(starts)
    self.num_tokens += int(lengths.sum()) - sum(starts)
    with self._busy.record("prefill"):
      if any(starts):
        pages = np.full(
          (len(wanted), bucket // sizes.page_tokens), sizes.num_pages, np.int32
        )
        for i, row in enumerate(wanted):
          pages[i, : len(row.pages)] = row.pages
        prefix = self._engine.open_prefix_of_pages(
          padded, lengths, state, pages, adapters
        )
      else:
        prefix = self._engine.open_prefix(padded, lengths, adapters)
    self._begin(
      _Chunked(
        keys=[row.key for row in wanted],
        prefix=prefix,
        start=np.array(starts, np.int32) if self._keeps else 0,
        num_left=num_left,
        per_call=-(-num_left // _MOST_CALLS) if self._keeps else 1,
        num_cached=starts,
      )
    )

  def _begin(self, job: _Chunked) -> None:
    for key in job.keys:
      del self._pending[key]
    self._chunked = job
    self._keep_if_whole()

  def _extend(self) -> None:
    if self._chunked is None:
      return
    assert self._params is not None
    job = self._chunked
    with self._busy.record("prefill"):
      job.prefix = self._engine.extend_prefix(
        self._params, job.prefix, job.start
      )
    job.start = job.start + self._engine.sizes.prefill_chunk
    job.num_left -= 1
    self._keep_if_whole()

  def _keep_if_whole(self) -> None:
    job = self._chunked
    if job is not None and job.num_left <= 0:
      self._keep(job.keys, job.prefix, job.num_cached)
      self._chunked = None

  def _finish_chunked(self) -> None:
    while self._chunked is not None:
      self._extend()
