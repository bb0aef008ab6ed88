"""The benchmark of the books measures at every size it is asked for."""

import benchmark_module
import jaxtyping
import pytest


@pytest.fixture
def unchecked():
  """The benchmark has stand-ins where the types ask for a worker."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
def test_books_and_buffer_are_measured_at_each_size(monkeypatch):
  bookkeeping = benchmark_module.imported("bookkeeping", monkeypatch)
  steps = bookkeeping.measure_steps([3, 120], repeats=2)
  assert steps.keys() >= {"step_ms", "totals_us", "memory_mb"}
  groups = bookkeeping.measure_buffer([10, 50], repeats=2)
  assert groups.keys() >= {"admit_us", "refuse_us", "poll_us", "state_ms"}
  for found, sizes in ((steps, {"3", "120"}), (groups, {"10", "50"})):
    for row in found.values():
      assert row.keys() == sizes and all(x > 0 for x in row.values())


@pytest.mark.slow
def test_a_killed_run_of_a_large_batch_has_the_same_books(monkeypatch):
  bookkeeping = benchmark_module.imported("bookkeeping", monkeypatch)
  found = bookkeeping.measure_batches([1, 4], 512)
  assert found["survives"] == {"16": 0.0, "64": 1.0}
  for name in ("ledger_bytes", "timing_bytes", "message_mb", "memory_mb"):
    assert all(x > 0 for x in found[name].values())
