"""Programs that are compiled before they are called."""

import threading
import types as types_lib

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import replayed_run
import test_assembly
import test_run
import tiny

from jaxrl_async import types
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.planning import aot
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.run import assembly
from jaxrl_async.run import compile_ahead
from jaxrl_async.run import initial_params
from jaxrl_async.run import loop as loop_lib
from jaxrl_async.training import batch_loader

DEADLINE_S = 60.0


def program(function):
  return aot.Program(
    name="one",
    function=function,
    arguments=(jax.ShapeDtypeStruct((3,), np.float32),),
  )


def test_programs_are_compiled_in_their_order_and_only_once():
  order = []

  def traced(name):
    def function(x):
      order.append(name)
      return x + len(name)

    return jax.jit(function)

  functions = [traced(name) for name in ("a", "bb", "ccc")]
  ahead = compile_ahead.CompileAhead()
  pending = [ahead.add(lambda one=one: [program(one)]) for one in functions[:2]]
  pending += [ahead.add(lambda: [program(functions[2])])]
  for each in pending:
    each.wait()
  ahead.close(DEADLINE_S)
  with metrics_lib.CompilationCounter() as counter:
    x = np.zeros(3, np.float32)
    found = [float(np.asarray(function(x))[0]) for function in functions]
  assert order == ["a", "bb", "ccc"] and found == [1.0, 2.0, 3.0]
  assert counter.num_programs == 0


def test_what_fails_is_left_to_the_call():
  def wrong(x):
    raise KeyError("a loss of the user's own")

  ahead = compile_ahead.CompileAhead()
  function = jax.jit(wrong)
  failed = ahead.add(lambda: [program(function)])
  fine = ahead.add(lambda: [program(jax.jit(jnp.sin))])
  failed.wait()
  fine.wait()
  ahead.close(DEADLINE_S)
  with pytest.raises(KeyError):
    function(np.zeros(3, np.float32))


def test_nothing_is_compiled_after_the_end_and_nobody_waits():
  begun, may_end = threading.Event(), threading.Event()

  def slow():
    begun.set()
    assert may_end.wait(DEADLINE_S)
    return []

  ahead = compile_ahead.CompileAhead()
  first, second = ahead.add(slow), ahead.add(lambda: pytest.fail("compiled"))
  assert begun.wait(DEADLINE_S)
  assert not ahead._thread.daemon  # the interpreter waits for XLA
  first.wait(lambda: True)  # somebody asked to stop
  may_end.set()
  ahead.close(DEADLINE_S)
  for pending in (first, second, ahead.add(lambda: pytest.fail("compiled"))):
    pending.wait()


def test_a_stop_while_the_train_step_is_compiled_trains_no_step():
  run = object.__new__(loop_lib.Loop)
  run.stop = supervisor_lib.StopRequest()
  run._next_batch = lambda: batch_loader.Loaded(batch=None, taken_s=0.0)

  def stop_meanwhile(is_over):
    run.stop.set()
    assert is_over()

  run.ahead = types_lib.SimpleNamespace(
    train=types_lib.SimpleNamespace(wait=stop_meanwhile)
  )
  # It has no trainer, which would be called.
  assert not run._train()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
  "num_pages", [0, pytest.param(16, marks=pytest.mark.nightly)]
)
def test_an_engine_and_a_trainer_compile_nothing_more(num_pages):
  """Generation, interrupted once, and a train step."""
  pages = {"num_pages": num_pages, "page_tokens": 8}
  config = test_run.make_config("sync", rollout=pages)
  setup = test_assembly.resolved(config)
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  engine = assembly.make_engine(setup)
  supervised = assembly.make_supervised_trainer(setup, config.warm_start)
  ahead = compile_ahead.RunPrograms(trainer, engine, is_alone=True)
  ahead.compile_warm_start(supervised).wait()
  for pending in (ahead.train, ahead.later):
    pending.wait()
  assert ahead.rollout.done.is_set()
  ahead.close(DEADLINE_S)
  params = initial_params.before_training(setup)
  group = replayed_run.group(
    types.Admission(index=0, birth=0, deadline=0), setup.model.vocab_size
  )
  with metrics_lib.CompilationCounter() as starting:
    trainer.start(initial_params.of_models(setup, params))
    batch = trainer.prepare([group])
    scheduler = assembly.make_scheduler(setup, engine, metrics_lib.BusyClock())
  with metrics_lib.CompilationCounter() as counter:
    published = trainer.published()
    scheduler.adopt(engine.load_params(published, 0), 0)
    for member in range(4):
      scheduler.submit(
        tiny.sequence(tiny.prompt(3 + member), member=member, limit=20)
      )
    scheduler.step()
    scheduler.adopt(engine.load_params(published, 1), 1)
    assert scheduler.stats.interruptions == 4
    tiny.finish(scheduler)
    trainer.step(0, batch)
  assert counter.num_programs == 0
  assert starting.num_programs > 0  # it counts
