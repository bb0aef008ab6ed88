"""An engine in NumPy whose cache says of each token what led up to it.

It stands for the device in tests of who holds which page. Before it draws a
token it checks everything that it reads: each cached token must have been
cached after exactly the tokens before it, and with the adapter of the sequence.
The logprob of a token is the version of the oldest weights that were read.
"""

import copy
import dataclasses

import numpy as np

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import sampling
from jaxrl_async.models import configs

END_TOKEN = 1


@dataclasses.dataclass
class Cells:
  """What is cached in rows or pages: a digest of all tokens, and a version."""

  digests: np.ndarray
  versions: np.ndarray

  @classmethod
  def empty(cls, rows, width):
    return cls(np.zeros((rows, width), np.int64), np.full((rows, width), -1))


class Prefix(decode_state_lib.Prefix):
  def __init__(self, cells, tokens, lengths, adapters):
    vars(self).update(
      cells=cells, tokens=tokens, lengths=lengths, adapters=adapters
    )


@dataclasses.dataclass
class Slot:
  ticket: int = -1
  tokens: list = dataclasses.field(default_factory=list)
  pages: np.ndarray | None = None
  limit: int = 0
  seed: tuple = ()
  adapter: int = 0
  is_active: bool = False


class State(decode_state_lib.DecodeState):
  def __init__(self, cells, slots):
    # It has none of the fields, and is frozen.
    vars(self).update(cells=cells, slots=slots)


class Result(jetstream_api.ResultTokens):
  def __init__(self, result):
    vars(self).update(result=result)


def digest(before, token, adapter):
  """A number for a token after others, with an adapter."""
  return hash((int(before), int(token), int(adapter))) >> 1


def digests(tokens, adapter):
  """The numbers of all tokens of a sequence."""
  found, before = [], 0
  for token in tokens:
    before = digest(before, token, adapter)
    found.append(before)
  return found


class PagedEngine(engine_lib.Engine):
  """Writes tokens that are drawn from a digest of what the pages hold."""

  def __init__(self, sizes):
    self.sizes = sizes
    self.model = configs.MODELS["tiny"]
    self.end_tokens = (END_TOKEN,)
    self.num_end_tokens = 1 + sampling.MAX_END_TOKENS
    self._has_adapters = True
    self.calls_in_flight = 2

  def init_decode_state(self):
    cells = Cells.empty(self.sizes.num_pages, self.sizes.page_tokens)
    return State(cells, [Slot() for _ in range(self.sizes.num_slots)])

  def _prefix(self, tokens, lengths, adapters, cells):
    assert tokens.shape[1] in self.sizes.prefill_buckets
    assert len(tokens) <= self.sizes.prefill_rows
    return Prefix(cells, tokens.copy(), lengths.copy(), adapters.copy())

  def prefill(
    self,
    *,
    params,
    existing_prefix=None,
    padded_tokens,
    true_length,
    adapters=None,
  ):
    prefix = self.open_prefix(padded_tokens, true_length, adapters)
    for row in range(len(padded_tokens)):
      self._cache(prefix, row, 0, padded_tokens.shape[1], params.version)
    return prefix

  def open_prefix(self, tokens, lengths, adapters=None):
    return self._prefix(tokens, lengths, adapters, Cells.empty(*tokens.shape))

  def open_prefix_of_pages(
    self, tokens, lengths, decode_state, pages, adapters=None
  ):
    cells = Cells.empty(*tokens.shape)
    size = self.sizes.page_tokens
    for row, index in np.argwhere(pages < self.sizes.num_pages):
      part = row, slice(index * size, (index + 1) * size)
      pool, page = decode_state.cells, pages[row, index]
      cells.digests[part] = pool.digests[page]
      cells.versions[part] = pool.versions[page]
    return self._prefix(tokens, lengths, adapters, cells)

  def extend_prefix(self, params, prefix, start):
    prefix, chunk = copy.deepcopy(prefix), self.sizes.prefill_chunk
    starts = np.broadcast_to(start, (len(prefix.tokens),))
    for row, first in enumerate(starts.tolist()):
      assert first + chunk <= prefix.tokens.shape[1]
      self._cache(prefix, row, first, first + chunk, params.version)
    return prefix

  def _cache(self, prefix, row, start, end, version):
    cells = prefix.cells
    for t in range(start, end):
      before = cells.digests[row, t - 1] if t else 0
      cells.digests[row, t] = digest(
        before, prefix.tokens[row, t], prefix.adapters[row]
      )
      cells.versions[row, t] = version

  def fill_pages(self, prefix, row, decode_state, pages):
    size = self.sizes.page_tokens
    assert len(pages) * size == prefix.tokens.shape[1]
    for index in np.flatnonzero(pages < self.sizes.num_pages):
      part = slice(index * size, (index + 1) * size)
      pool = decode_state.cells
      pool.digests[pages[index]] = prefix.cells.digests[row, part]
      pool.versions[pages[index]] = prefix.cells.versions[row, part]
    return decode_state

  def insert(self, prefix, decode_state, slot):
    slots = decode_state.slots
    newest = max(one.ticket for one in slots)
    idle = [i for i, one in enumerate(slots) if not one.is_active]
    for i, place in enumerate(slot.slots.tolist()):
      if place == self.sizes.num_slots:
        continue
      settings, row = slot.settings, slot.sources[i]
      if place == decode_state_lib.PICK:
        if settings.tickets[i] <= newest or not idle:
          continue
        place = idle.pop(0)
      slots[place] = Slot(
        ticket=int(settings.tickets[i]),
        tokens=prefix.tokens[row, : prefix.lengths[row]].tolist(),
        pages=settings.pages[i].copy(),
        limit=int(settings.limits[i]),
        seed=(int(slot.groups[i]), int(slot.members[i])),
        adapter=int(settings.adapters[i]),
        is_active=True,
      )
    return decode_state

  def release(self, decode_state, tickets):
    for slot in decode_state.slots:
      slot.is_active &= slot.ticket not in tickets
    return decode_state

  def generate(
    self,
    params,
    decode_state,
    *,
    window=None,
    is_filtered=False,
    tables=None,
    guided=None,
  ):
    assert guided is None
    shape = self.sizes.num_slots, self.sizes.decode_steps_per_call
    tokens = np.zeros(shape, np.int32)
    is_valid = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    for i, slot in enumerate(decode_state.slots):
      if slot.is_active and tables[0][i] == slot.ticket:
        slot.pages = tables[1][i].copy()
      for step in range(shape[1]):
        if slot.is_active:
          tokens[i, step], logprobs[i, step] = self._draw(
            decode_state.cells, slot, params.version
          )
          is_valid[i, step] = True
    return decode_state, Result(
      decode_state_lib.StepResult(
        tokens=tokens,
        is_valid=is_valid,
        logprobs=logprobs,
        policy_versions=np.full(shape, params.version, np.int32),
        has_ended=np.array([not one.is_active for one in decode_state.slots]),
        tickets=np.array([one.ticket for one in decode_state.slots], np.int32),
      )
    )

  def _draw(self, pool, slot, version):
    size, last = self.sizes.page_tokens, len(slot.tokens) - 1
    places = np.arange(last + 1)
    cells = slot.pages[places // size], places % size
    before = pool.digests[cells[0][-2], cells[1][-2]] if last else 0
    pool.digests[cells[0][-1], cells[1][-1]] = digest(
      before, slot.tokens[-1], slot.adapter
    )
    pool.versions[cells[0][-1], cells[1][-1]] = version
    assert pool.digests[cells].tolist() == digests(slot.tokens, slot.adapter)
    number = hash((int(pool.digests[cells][-1]), *slot.seed))
    token = END_TOKEN if number % 9 == 0 else 6 + number % 3
    slot.tokens.append(token)
    is_whole = len(slot.tokens) >= slot.limit
    slot.is_active = token != END_TOKEN and not is_whole
    return token, pool.versions[cells].min()

  def read(self, result):
    return result.result
