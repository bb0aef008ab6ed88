"""A program of tests: one process of a replica, or a replica of one process.

    python led_engine.py alone|lead|follow|stray|blind DIRECTORY [lora]

All of them generate with an engine whose weights are split over two devices:
those of one process (`alone`), or one of each of two. `stray` is a follower
that reads other tokens than its engine has written. `blind` is a follower that
sees damage in version 1. With `lora`, versions are adapters of a base that they
read once.
"""

import dataclasses
import json
import os
import pathlib
import pickle
import string
import sys
import time

import jax
import lora_world
import tiny

from jaxrl_async.cluster import led_replica
from jaxrl_async.cluster import replica_spec
from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import transformer
from jaxrl_async.processes import rendezvous
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.weights import weight_transfer

TOKENIZER = tokenizer_lib.character_level()
# Its embeddings can be split in two.
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=tiny.MODEL.vocab_size + 1)


LORA = dataclasses.replace(MODEL, lora=lora_world.LORA)


def weights_of(seed):
  return transformer.unstack(tiny.params(seed, MODEL), MODEL.num_layers)


def base_of_lora():
  return lora_lib.base(weights_of(0))


def adapters_of(seed):
  named = lora_world.adapter(lora_world.LORA, seed, LORA)
  whole = lora_lib.joined(tiny.params(0, MODEL), named)
  return lora_lib.adapters(transformer.unstack(whole, MODEL.num_layers))


def weights_spec(directory, weights):
  return replica_spec.WeightsSpec(
    directory=directory,
    incarnation="it",
    shapes=jax.eval_shape(weights),
  )


def spec_of(directory, has_lora):
  return replica_spec.ReplicaSpec(
    engine=replica_spec.EngineSpec(
      model=LORA if has_lora else MODEL,
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
    tokenizer=TOKENIZER,
    weights=weights_spec(
      directory,
      lambda: adapters_of(0) if has_lora else weights_of(0),
    ),
    base=weights_spec(directory / "base", base_of_lora) if has_lora else None,
    probe=(directory, ""),
    versions={},
    report_every_s=1.0,
    heartbeat_s=1.0,
    coordinator_timeout_s=1.0,
  )


def sequence(i):
  """A sequence; every third one looks for a stop string."""
  stop = tuple(string.ascii_lowercase) if i % 3 == 0 else ()
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


def generate(scheduler, channel, engine):
  """Write sequences with three versions, and cancel one."""
  newest = -1
  published = iter(sys.stdin)  # the test publishes a version for each line
  ended, step = [], 0
  for i in range(12):
    scheduler.submit(sequence(i))
  while not scheduler.is_idle:
    if step % 3 == 0 and step < 9:
      print("next version", flush=True)
      next(published)
      weights, newest = channel.adopt(newest)
      params = engine.load_params(weights, newest)
      scheduler.adopt(params, newest)
    if step == 2:
      scheduler.cancel(sequence_lib.Owner("group", 11))
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


def lead(directory, spec):
  listener = rendezvous.listen(("127.0.0.1", 0))
  invitation = rendezvous.Invitation(
    size=2,
    address=listener.getsockname(),
    key=rendezvous.new_key(),
    timeout_s=60.0,
    of="replica",
  )
  written = directory / "invitation.new"
  written.write_bytes(pickle.dumps(invitation))
  written.rename(directory / "invitation")
  world = rendezvous.gather(listener, invitation, {})
  rendezvous.connect_jax(world, 60.0)

  def end(failure):
    print(f"lost: {failure}", flush=True)

  leading = led_replica.Lead(world, end)
  leading.attach(spec)
  engine, channel = replica_spec.engine_and_channel(
    spec, None, None, led_replica.LedChannel
  )
  channel.lead = leading
  scheduler = led_replica.LedScheduler(
    engine, leading, busy=metrics_lib.BusyClock()
  )
  written = generate(scheduler, channel, engine)
  print(json.dumps(written), flush=True)
  os._exit(0)


def follow(directory, role):
  invitation = directory / "invitation"
  while not invitation.exists():
    time.sleep(0.05)
  if role == "stray":
    read = engine_lib.Engine.read

    def misread(engine, result):
      found = read(engine, result)
      return dataclasses.replace(found, tokens=found.tokens ^ 1)

    engine_lib.Engine.read = misread
  read_version = weight_transfer.OrbaxChannel.read

  def read_late(channel, version):
    if role == "blind" and version == 1:
      raise weight_transfer.UnreadableVersionError("version 1 is damaged here")
    time.sleep(0.5)  # who does not wait for it adopts too early
    return read_version(channel, version)

  weight_transfer.OrbaxChannel.read = read_late
  led_replica.follow(pickle.loads(invitation.read_bytes()), 1)
  time.sleep(600)


def alone(spec):
  engine, channel = replica_spec.engine_and_channel(spec, None, None)
  assert isinstance(channel, weight_transfer.OrbaxChannel)
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
  print(json.dumps(generate(scheduler, channel, engine)), flush=True)


if __name__ == "__main__":
  role, where = sys.argv[1], pathlib.Path(sys.argv[2])
  if role == "alone":
    alone(spec_of(where, "lora" in sys.argv))
  elif role == "lead":
    lead(where, spec_of(where, "lora" in sys.argv))
  else:
    follow(where, role)
