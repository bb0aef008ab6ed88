"""Whether a thread goes on: beats, and programs that it compiles."""

import threading

import jax
from jax import numpy as jnp

from jaxrl_async.rollout import pulse as pulse_lib


def compile_something(while_tracing):
  def function(x):
    while_tracing()
    return x + 1

  jax.jit(function)(jnp.zeros(3))


def test_what_is_compiled_is_no_standing_still():
  now_s, seen = [0.0], []
  with pulse_lib.Pulse(lambda: now_s[0]) as pulse:
    now_s[0] = 5.0
    assert pulse.still_s == 5.0
    pulse.beat()
    assert pulse.still_s == 0.0

    def trace():
      now_s[0] = 100.0
      seen.append(pulse.still_s)

    compile_something(trace)
    assert seen == [0.0] and pulse.still_s == 0.0
    assert pulse.compile_s == 95.0
    now_s[0] = 103.0
    assert pulse.still_s == 3.0
    # As that of another process, for which this one waits.
    pulse.excuse()
    assert pulse.still_s == 0.0
    now_s[0] = 106.0
    # Another thread says nothing of this one.
    other = threading.Thread(
      target=compile_something, args=(lambda: seen.append(pulse.still_s),)
    )
    other.start()
    other.join(60)
    assert seen == [0.0, 3.0] and pulse.still_s == 3.0
    assert pulse.compile_s == 95.0
  # Nobody listens any more.
  compile_something(lambda: seen.append(pulse.still_s))
  assert seen[-1] == 3.0


def test_a_program_that_cannot_be_compiled_does_not_hide_a_hang():
  now_s = [0.0]
  with pulse_lib.Pulse(lambda: now_s[0]) as pulse:

    def fail():
      raise LookupError

    try:
      compile_something(fail)
    except LookupError:
      pass
    now_s[0] = 2.0
    assert pulse.still_s == 2.0
