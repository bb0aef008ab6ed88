"""Small models with adapters, and an engine that holds several of them."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import tiny

from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib

LORA = configs.Lora(rank=3, alpha=6.0, modules=sections.LORA_MODULES)
OTHER = configs.Lora(rank=2, alpha=5.0, modules=("key", "output", "down"))
MODEL = dataclasses.replace(tiny.MODEL, lora=LORA)


def adapter(lora, seed=0, model=tiny.MODEL):
  """An adapter whose B is not zero, as stacked numpy arrays."""
  model = dataclasses.replace(model, lora=lora)
  shapes = lora_lib.adapters(
    jax.eval_shape(lambda: transformer.init_params(model, jax.random.key(0)))
  )
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes
  )


def params(seed=0):
  """The base of `tiny.params` with an adapter of `LORA`."""
  return lora_lib.joined(tiny.params(), adapter(LORA, seed))


@functools.cache
def stack():
  """Three numbers: the base, an adapter of LORA, and one of OTHER."""
  lora, leaves = lora_lib.stacked(
    tiny.MODEL, [None, (LORA, adapter(LORA)), (OTHER, adapter(OTHER, 1))]
  )
  return dataclasses.replace(tiny.MODEL, lora=lora), leaves


def merged(number):
  """Parameters of the tiny model that are one of the three numbers."""
  if number == 0:
    return tiny.params()
  lora, seed = ((LORA, 0), (OTHER, 1))[number - 1]
  whole = lora_lib.joined(tiny.params(), adapter(lora, seed))
  return jax.tree.map(jnp.asarray, lora_lib.merged(whole, lora))


def engine(**sizes):
  """An engine that holds the three."""
  return tiny.engine(stack()[0], **sizes)


def engine_params():
  """Their weights as that engine takes them."""
  model, leaves = stack()
  whole = lora_lib.joined(tiny.params(), leaves)
  weights = transformer.unstack(whole, model.num_layers)
  return engine().load_params(weights, 0)


def scheduler(**sizes):
  """A scheduler over an engine that holds the three."""
  made = scheduler_lib.Scheduler(engine(**sizes), busy=metrics_lib.BusyClock())
  made.adopt(engine_params(), 0)
  return made


def sequence(tokens, number, member=0, limit=24):
  """What one of the three is to continue greedily."""
  return sequence_lib.Sequence(
    tokens,
    limit=limit,
    stream=sampling.Stream.EVAL,
    group=0,
    member=member,
    settings=sampling.SamplingSettings(temperature=0.0, ignore_eos=True),
    adapter=number,
  )


def alone(tokens, number, limit=24):
  """What an engine of the merged model writes, with its logprobs."""
  made = tiny.scheduler()
  weights = transformer.unstack(merged(number), tiny.MODEL.num_layers)
  made.adopt(tiny.engine().load_params(weights, 0), 0)
  written = sequence(tokens, 0, limit=limit)
  made.submit(written)
  tiny.finish(made)
  return written
