"""A long run in which something fails every few seconds."""

import benchmark_module
import jax
import pytest


def check(found, steps):
  """Nothing is lost, and each fault was met as it should be."""
  assert found["train_steps"] == steps
  assert found["lost"] == found["duplicated"] == 0
  assert found["ledger_balanced"] and found["bound_held"]
  injected, counted = found["injected"], found["counted"]
  assert all(injected.values()), injected
  assert counted["train/bad_updates"] == injected["loss not finite"]
  # Evaluations of every tenth step, of the start and of the end.
  assert counted["evaluations"] == 1 + steps // 10
  # TensorStore's pool of threads grows to 16.
  for name, slack in (("open_files", 5), ("threads", 16)):
    before, after = found[name]
    assert after <= before + slack, name


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_long_run_with_faults_loses_nothing_and_grows_in_nothing(tmp_path):
  soak = benchmark_module.imported("soak")
  found = soak.measure(
    tmp_path, 1000, 1.0, str(jax.config.jax_compilation_cache_dir)
  )
  check(found, 1000)
  counted = found["counted"]
  assert counted["reward_service/errors"] > counted["failed groups"]
  before, after = found["resident_mb"]
  before_calm, after_calm = found["without_faults"]["resident_mb"]
  assert after - before <= max(0.0, after_calm - before_calm) + 10
  without = found["reward_last_tenth_without_faults"]
  assert without > 12 and abs(found["reward_last_tenth"] - without) < 1


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_replicas_with_faults_lose_nothing(tmp_path):
  pytest.importorskip("ray")
  soak = benchmark_module.imported("soak")
  found = soak.measure(
    tmp_path,
    150,
    2.0,
    str(jax.config.jax_compilation_cache_dir),
    compares=False,
    replicas=2,
  )
  assert found["train_steps"] == 150
  assert found["lost"] == found["duplicated"] == 0
  assert found["ledger_balanced"] and found["bound_held"]
  assert all(found["injected"].values()), found["injected"]
  assert found["reward_last_tenth"] > 12
