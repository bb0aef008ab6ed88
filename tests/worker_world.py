"""A rollout worker with all it works with, for tests of what it does."""

import json

import tiny

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.rollout import worker as worker_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

GROUP_SIZE = 3
MAX_COMPLETION = 14
CLOSE_S = 30.0
ARRAYS = "tokens", "loss_mask", "behavior_logprobs", "policy_versions"


class WatchedBuffer(buffer_lib.Buffer):
  """Calls `on_wait` when the worker has nothing to decode."""

  on_wait = staticmethod(lambda: None)

  def wait_for_admission(self, engine_version, seen_version, timeout_s):
    self.on_wait()
    return super().wait_for_admission(engine_version, seen_version, timeout_s)


class Link:
  """Passes every message on as it is; keeps the names of the verbs."""

  def __init__(self, coordinator):
    self.coordinator = coordinator
    self.said = []

  def carry(self, message):
    return message

  def _say(self, verb, message):
    self.said.append((verb, message))
    answer = getattr(self.coordinator, verb)(self.carry(message))
    return None if answer is None else self.carry(answer)

  def admit(self, ask):
    return self._say("admit", ask)

  def report(self, report):
    return self._say("report", report)

  def adopted(self, adopted):
    return self._say("adopted", adopted)


class World:
  """A worker and what it works with; P = 2 groups a step, staleness 1."""

  def __init__(self, path, *, rewards=None, prompts=None, link=Link, **options):
    self.buffer = WatchedBuffer(2, 1)
    self.rewards = rewards or tiny.Rewards()
    self.channel = tiny.channel()
    self.path = path / "ledger.jsonl"
    self.untrained = []  # what the samples are told of
    self.ledger = ledger_lib.Ledger(
      self.path,
      ledger_lib.LedgerState(),
      on_untrained=lambda *what: self.untrained.append(what),
    )
    self.environment = environment_lib.Environment(
      options.pop("episode", episode_lib.single_turn),
      **options.pop("environment", {}),
    )
    self.requests = options.pop("requests", None)
    engine = options.pop("engine", {})
    settings = {
      "group_size": GROUP_SIZE,
      "max_completion_tokens": MAX_COMPLETION,
      "max_tokens": tiny.SIZES.cache_tokens,
      "num_slots": tiny.SIZES.num_slots,
      "temperature": 1.0,
      "filter_zero_std": False,
      "reads_token_scores": False,
      "max_failed_groups": 3,
      "max_filtered_groups": 1000,
    }
    busy = metrics_lib.BusyClock()
    self.coordinator = coordinator_lib.Coordinator(
      coordinator_settings_lib.CoordinatorSettings(**(settings | options)),
      stream=prompts or tiny.Prompts(),
      buffer=self.buffer,
      rewards=self.rewards,
      ledger=self.ledger,
      busy=busy,
      environment=self.environment,
    )
    self.link = link(self.coordinator)
    self.replica = replica_lib.Replica(
      "replica 0",
      self.link,
      tiny.scheduler(cls=tiny.SteppedScheduler, busy=busy, **engine),
      channel=self.channel,
      tokenizer=tokenizer_lib.character_level(),
      requests=self.requests,
    )
    self.worker = worker_lib.RolloutWorker(self.coordinator, self.replica)

  @property
  def scheduler(self):
    """That of the replica."""
    return self.replica.scheduler

  @property
  def adopted(self):
    """Versions of which the replica told, in order."""
    return [m.version for verb, m in self.link.said if verb == "adopted"]

  def run_until(self, is_over, most_looks=300):
    """Runs in this thread until the buffer's state satisfies `is_over`."""
    num_looks = 0

    def look(num_steps=0):
      nonlocal num_looks
      num_looks += 1
      assert num_looks < most_looks
      if is_over(self.buffer.state()):
        self.worker.stop()

    replica = self.worker.replica
    wait_for_weights = replica.wait_for_weights

    def look_and_wait(timeout_s):
      look()
      wait_for_weights(timeout_s)

    replica.wait_for_weights = look_and_wait
    self.scheduler.after_step = self.buffer.on_wait = look
    self.worker.run()
    self.scheduler.after_step = self.buffer.on_wait = lambda *_: None
    replica.wait_for_weights = wait_for_weights
    self.worker._gate = rollout_side.Gate()

  def lines(self):
    return [json.loads(line) for line in self.path.read_text().splitlines()]

  def in_flight(self):
    return [*self.worker.groups().values(), *self.buffer.state().finished]


def worlds(directory):
  """What the fixture `make_world` yields: makes worlds, closes them after."""
  made = []

  def make(**options):
    path = directory / str(len(made))
    path.mkdir()
    made.append(World(path, **options))
    made[-1].buffer.set_policy_version(0)
    return made[-1]

  yield make
  for world in made:
    world.ledger.close()
    world.channel.close()
    world.environment.close(CLOSE_S)


def finished(count):
  return lambda state: len(state.finished) >= count


def check_balance(world):
  state = world.ledger.state()
  ledger_lib.check_balance(
    generated=world.worker.generated_tokens,
    trained=state.trained_tokens,
    filtered=state.filtered_tokens,
    failed=state.failed_tokens,
    in_flight=sum(g.num_completion_tokens for g in world.in_flight()),
  )
  assert world.scheduler.stats.generated_tokens > 0
