"""Traces of single steps."""

import disks
import jax
from jax import numpy as jnp
from jax._src import profiler as jax_profiler

from jaxrl_async.reporting import profile as profile_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib


def work():
  jax.block_until_ready(jnp.ones((4, 4)) @ jnp.ones((4, 4)))


def test_the_steps_that_were_asked_for_are_traced(tmp_path):
  notes = []
  profiler = profile_lib.Profiler(
    tmp_path, (2, 4), side_outputs_lib.SideOutputs(notes.append)
  )
  for step in range(1, 5):
    with profiler.step(step):
      work()
  found = {
    path.relative_to(tmp_path).parts[1]
    for path in tmp_path.glob("profile/**/*.xplane.pb")
  }
  assert found == {"step_2", "step_4"} and not notes


def test_a_trace_that_fails_is_said_and_the_step_is_made(tmp_path, monkeypatch):
  # What JAX would refuse other tests of this process for.
  state = type(jax_profiler._profile_state)()
  monkeypatch.setattr(jax_profiler, "_profile_state", state)
  notes = []
  profiler = profile_lib.Profiler(
    tmp_path, (1, 2), side_outputs_lib.SideOutputs(notes.append)
  )
  (tmp_path / "profile").touch()  # where the directory would be
  steps = []
  for step in (1, 2):
    with disks.files_of_at_most(100), profiler.step(step):
      steps.append(step)
  assert steps == [1, 2]
  assert len(notes) == 1 and "profile/ could not be written" in notes[0]
