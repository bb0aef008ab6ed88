"""The clock that stands still while a program is compiled."""

import threading

import jax
from jax import numpy as jnp
import pytest

from jaxrl_async.processes import compile_clock


def compile_something(while_tracing):
  def function(x):
    while_tracing()
    return x + 1

  jax.jit(function)(jnp.zeros(3))


def test_it_stands_still_while_any_thread_compiles():
  now_s, seen = [0.0], []
  with compile_clock.CompileClock(lambda: now_s[0]) as clock:
    now_s[0] = 5.0
    assert clock() == 5.0 and not clock.is_compiling

    def trace(until_s):
      assert clock.is_compiling
      now_s[0] = until_s
      seen.append(clock())

    def trace_while_another_thread_does():
      now_s[0] = 20.0
      other = threading.Thread(
        target=compile_something, args=(lambda: trace(60.0),)
      )
      other.start()
      other.join(60)
      trace(100.0)

    compile_something(trace_while_another_thread_does)
    assert seen == [5.0, 5.0] and clock() == 5.0 and not clock.is_compiling
    now_s[0] = 103.0
    assert clock() == 8.0
  # Nobody listens any more.
  compile_something(lambda: seen.append(clock()))
  assert seen[-1] == 8.0 and not clock.is_compiling


def test_a_program_that_cannot_be_compiled_does_not_hide_a_hang():
  now_s = [0.0]
  with compile_clock.CompileClock(lambda: now_s[0]) as clock:

    def fail():
      now_s[0] = 5.0
      raise LookupError

    with pytest.raises(LookupError):
      compile_something(fail)
    now_s[0] = 7.0
    assert clock() == 2.0


def test_a_compilation_that_had_begun_before_is_no_other_one():
  now_s = [0.0]
  clock = compile_clock.CompileClock(lambda: now_s[0])
  compile_something(clock.__enter__)
  try:
    now_s[0] = 7.0
    assert clock() == 7.0 and not clock.is_compiling
  finally:
    clock.__exit__()
