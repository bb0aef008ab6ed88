"""Settings of a sequence, on device: what is drawn and what ends it."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.engine import sampling


def settled(sequence, **settings):
  sequence.settings = sampling.SamplingSettings(**settings)
  return sequence


def test_sequences_of_all_settings_share_a_call():
  scheduler = tiny.ready()
  plain = tiny.long()
  others = [
    settled(tiny.long(9), top_k=3),
    settled(tiny.long(10), top_p=0.3),
    settled(tiny.long(11), min_p=0.5),
    settled(tiny.long(1), temperature=0.0),
    settled(tiny.long(5), temperature=0.7, top_k=5, top_p=0.9, min_tokens=4),
  ]
  for sequence in [*others[:2], plain, *others[2:]]:
    scheduler.submit(sequence)
  tiny.finish(scheduler)
  # Filters of others change no bit of what is drawn without one.
  assert tiny.record(plain) == tiny.long_alone()
  for sequence in others:
    alone = tiny.ready()
    again = settled(
      tiny.long(sequence.group), **dataclasses.asdict(sequence.settings)
    )
    tiny.write_all(alone, [again])
    assert tiny.record(again) == tiny.record(sequence)


def likeliest(sequence):
  """Ranks of the written tokens among the trainer's logits: 0 is the best."""
  logits = tiny.logits(tiny.params(), sequence.written())
  ranks = []
  for at in np.flatnonzero(sequence.loss_mask[: sequence.length]):
    row = logits[at - 1]
    ranks.append(int((row > row[sequence.tokens[at]]).sum()))
  return ranks


def test_only_the_likeliest_are_drawn():
  scheduler = tiny.ready()
  sequences = [settled(tiny.long(g), top_k=3) for g in tiny.LONG_GROUPS]
  greedy = settled(tiny.long(8), temperature=0.0)
  tiny.write_all(scheduler, [*sequences, greedy])
  ranks = [r for s in sequences for r in likeliest(s)]
  assert set(ranks) == {0, 1, 2}
  assert set(likeliest(greedy)) == {0}


def test_end_tokens_of_a_sequence_end_it_and_no_other():
  base = tiny.ready()
  first = tiny.long(limit=30)
  tiny.write_all(base, [first])
  written = first.written()[5:]
  stop = int(written[6])
  scheduler = tiny.ready()
  stopped = settled(tiny.long(limit=30), end_tokens=(stop,))
  other = tiny.long(limit=30)
  scheduler.submit(stopped)
  tiny.write_all(scheduler, [other])
  end = written.tolist().index(stop) + 1
  assert stopped.written()[5:].tolist() == written[:end].tolist()
  assert stopped.finish_reason == types.FinishReason.STOP
  assert tiny.record(other) == tiny.record(first)


def test_before_the_minimum_nothing_ends_it_and_after_it_something_does():
  lengths = {}
  for min_tokens in (0, 3):
    scheduler = tiny.ready()
    sequences = [
      settled(tiny.sequence(tiny.prompt(4), group=g), min_tokens=min_tokens)
      for g in range(40)
    ]
    tiny.write_all(scheduler, sequences)
    for sequence in sequences:
      written = sequence.written()[4:]
      assert not set(written[:min_tokens]) & set(tiny.END_TOKENS)
    lengths[min_tokens] = [s.length - 4 for s in sequences]
  assert min(lengths[0]) == 1 and min(lengths[3]) == 4 < max(lengths[3])


def test_ends_that_are_ignored_are_tokens_like_any_other():
  scheduler = tiny.ready()
  sequences = [
    settled(tiny.sequence(tiny.prompt(4), group=g), ignore_eos=True)
    for g in range(12)
  ]
  tiny.write_all(scheduler, sequences)
  written = np.concatenate([s.written()[4:] for s in sequences])
  assert np.isin(written, tiny.END_TOKENS).sum() > 5
  for sequence in sequences:
    assert sequence.length == sequence.limit
    assert sequence.finish_reason == types.FinishReason.LENGTH


def test_a_stop_check_cuts_what_was_written_and_frees_the_slot():
  def stop_after(count):
    seen = []

    def check(tokens):
      before = len(seen)
      seen.extend(tokens.tolist())
      return count - before if len(seen) >= count else None

    return check

  scheduler = tiny.ready()
  sequences = [tiny.long(), tiny.long(9), tiny.long(10), tiny.long(11)]
  for count, sequence in zip((1, 4, 6, 7), sequences, strict=True):
    sequence.stop = stop_after(count)
  survivor = tiny.long(15)
  tiny.write_all(scheduler, [*sequences, survivor])
  for count, sequence in zip((1, 4, 6, 7), sequences, strict=True):
    assert sequence.length == 5 + count
    assert sequence.finish_reason == types.FinishReason.STOP
  assert tiny.record(sequences[0]).tokens == tiny.long_alone().tokens[:6]
  expected = sum(int(s.loss_mask.sum()) for s in [*sequences, survivor])
  assert scheduler.stats.generated_tokens == expected


def test_settings_that_cannot_be_drawn_by_are_refused():
  with pytest.raises(ValueError, match="end token 97 is not in the vocabulary"):
    tiny.ready().submit(settled(tiny.long(), end_tokens=(97,)))
