"""A program of tests: one process of a replica, or a replica of one process.

    python led_engine.py alone|lead|follow|stray DIRECTORY

All of them generate with an engine whose weights are split over two devices:
those of one process (`alone`), or one of each of two. `stray` is a follower
that reads other tokens than its engine has written.
"""

import dataclasses
import json
import os
import pathlib
import pickle
import sys
import time

import jax
import numpy as np
import tiny

from jaxrl_async.cluster import led_replica
from jaxrl_async.cluster import replica_spec
from jaxrl_async.cluster import replica_world
from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.character_level()
# Its embeddings can be split in two.
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=tiny.MODEL.vocab_size + 1)


def weights_of(seed):
  return transformer.unstack(tiny.params(seed, MODEL), MODEL.num_layers)


def spec_of(directory):
  shapes = jax.eval_shape(lambda: weights_of(0))
  return replica_spec.ReplicaSpec(
    engine=replica_spec.EngineSpec(
      model=MODEL,
      sizes=dataclasses.replace(tiny.SIZES, num_pages=12, page_tokens=8),
      mesh=MeshShape(tensor=2),
      rules=mesh_lib.ROLLOUT_RULES,
      seed=7,
      end_tokens=tiny.END_TOKENS,
      dtype="float32",
      weights=sections.WeightFormat.FLOAT,
      attention="xla",
    ),
    kv_on_adopt=sections.KvOnAdopt.RECOMPUTE,
    shared_tokens=np.zeros((0,), np.int32),
    tokenizer=TOKENIZER,
    weights=replica_spec.WeightsSpec(
      directory=directory,
      incarnation="it",
      shapes=shapes,
      is_written_again=True,
    ),
    base=None,
    probe=(directory, ""),
    versions={},
    report_every_s=1.0,
    heartbeat_s=1.0,
    coordinator_timeout_s=1.0,
  )


def sequence(i):
  """A sequence; every third one looks for a stop string."""
  stop = tuple("aeiou012345") if i % 3 == 0 else ()
  return sequence_lib.Sequence(
    tiny.prompt(4 + i % 5, seed=i % 7),
    limit=28,
    stream=sampling.Stream.TRAIN,
    group=i,
    member=0,
    settings=sampling.SamplingSettings(temperature=1.0),
    stop=stop_strings.check_of(TOKENIZER, stop),
    deadline=i,
    owner=sequence_lib.Owner("group", i),
  )


def generate(scheduler, channel, engine, forget=lambda: None):
  """Write sequences with three versions, cancel one, answer a question."""
  newest = -1
  published = iter(sys.stdin)  # the test publishes a version for each line
  ended, step, questions = [], 0, None
  for i in range(12):
    scheduler.submit(sequence(i))
  while not scheduler.is_idle or questions is not None:
    if step % 4 == 0 and step < 12:
      print("next version", flush=True)
      next(published)
      while (adopted := channel.adopt(newest)) is None:
        print(f"refused {channel.refusal.copy}", flush=True)
        next(published)
      weights, newest = adopted
      params = engine.load_params(weights, newest)
      scheduler.adopt(params, newest)
    if step == 2:
      scheduler.cancel(sequence_lib.Owner("group", 11))
    if step == 6:
      # It keeps its version when the groups adopt the next one.
      questions = scheduler.fresh(metrics_lib.BusyClock())
      questions.adopt(params, newest)
      questions.submit(sequence(20))
    if questions is not None:
      ended += questions.step()
      if questions.is_idle:
        questions = None
        forget()
    ended += scheduler.step()
    step += 1
  return [
    {
      "group": one.group,
      "tokens": one.written().tolist(),
      "logprobs": one.behavior_logprobs[: one.length].tolist(),
      "versions": one.policy_versions[: one.length].tolist(),
      "reason": str(one.finish_reason),
    }
    for one in ended
  ]


def lead(directory):
  spec = spec_of(directory)
  listener = replica_world.Listener("127.0.0.1", 2, 60.0)
  written = directory / "invitation.new"
  written.write_bytes(pickle.dumps(listener.invitation))
  written.rename(directory / "invitation")
  peers = listener.meet()

  def fail(error):
    print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(3)

  leading = led_replica.Lead(peers, 2, fail)
  leading.attach(spec)
  engine, channel = replica_spec.engine_and_channel(
    spec, None, None, led_replica.LedChannel
  )
  channel.lead = leading
  scheduler = led_replica.LedScheduler(
    engine, leading, busy=metrics_lib.BusyClock()
  )
  written = generate(scheduler, channel, engine, leading.forget_questions)
  print(json.dumps(written), flush=True)
  os._exit(0)


def follow(directory, is_stray):
  invitation = directory / "invitation"
  while not invitation.exists():
    time.sleep(0.05)
  if is_stray:
    read = engine_lib.Engine.read

    def misread(engine, result):
      found = read(engine, result)
      return dataclasses.replace(found, tokens=found.tokens ^ 1)

    engine_lib.Engine.read = misread
  read_copy = weight_transfer.OrbaxChannel.read

  def read_late(channel, copy):
    time.sleep(0.5)  # who does not wait for it adopts too early
    return read_copy(channel, copy)

  weight_transfer.OrbaxChannel.read = read_late
  process = led_replica.FollowerProcess(60.0)
  process.join(pickle.loads(invitation.read_bytes()), 1)
  time.sleep(600)


def alone(directory):
  spec = spec_of(directory)
  engine, channel = replica_spec.engine_and_channel(spec, None, None)
  assert isinstance(channel, weight_transfer.OrbaxChannel)
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  print(json.dumps(generate(scheduler, channel, engine)), flush=True)


if __name__ == "__main__":
  role, where = sys.argv[1], pathlib.Path(sys.argv[2])
  if role == "alone":
    alone(where)
  elif role == "lead":
    lead(where)
  else:
    follow(where, role == "stray")
