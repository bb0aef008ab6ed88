"""A device without memory is one line, of a real error of XLA."""

import types

import jax
import jax.numpy as jnp
import pytest

from jaxrl_async.devices import memory_error
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import trainer as trainer_lib


def needs_too_much():
  """A program whose result no machine can hold."""
  jax.jit(lambda: jnp.zeros((1 << 50,), jnp.float32))().block_until_ready()


def raised_by(call):
  with pytest.raises(jax.errors.JaxRuntimeError) as raised:
    call()
  return raised.value


def test_the_line_names_the_phase_its_size_and_the_fields():
  trainer = types.SimpleNamespace(
    world=world_lib.alone(),
    state=None,
    _busy=metrics_lib.BusyClock(),
    _changing=lambda state: state,
    _publish=lambda params: needs_too_much(),
  )
  error = raised_by(lambda: trainer_lib.Trainer.published(trainer))
  text = memory_error.explained(error)
  assert text.startswith("out of device memory in training: ")
  assert str(4 << 50) in text and "train.rows_per_microbatch" in text
  assert "\n" not in text


def test_a_failure_of_a_thread_is_explained_by_its_cause():
  supervisor = supervisor_lib.Supervisor(on_failure=lambda error: None)
  supervisor.spawn("rollout worker", needs_too_much)
  assert not supervisor.join(60.0)
  with pytest.raises(supervisor_lib.ThreadFailed) as raised:
    supervisor.check()
  text = memory_error.explained(raised.value)
  assert text.startswith("out of device memory in a device program: ")
  assert "rollout.num_slots" in text


def test_other_errors_are_not_explained():
  assert memory_error.explained(RuntimeError("RESOURCE_EXHAUSTED: no")) == ""
  assert memory_error.explained(raised_by(refuses)) == ""


def refuses():
  raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: something else")
