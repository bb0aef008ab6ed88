"""The staleness bound over thousands of schedules, on a virtual clock."""

import collections
import dataclasses
import heapq
import itertools
import random

from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib

many = settings(
  max_examples=1000,
  deadline=None,
  derandomize=True,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def fits(deadlines, step, groups_per_step):
  """Hall's condition: what is due by d fits into the steps from here to d."""
  return all(
    sum(other <= d for other in deadlines) <= (d - step + 1) * groups_per_step
    for d in deadlines
  )


def is_schedulable(deadlines, step, groups_per_step):
  """The definition: d_j >= step + j // P, in the order of the deadlines."""
  return all(
    deadline >= step + j // groups_per_step
    for j, deadline in enumerate(sorted(deadlines))
  )


def urgency(group):
  return group.admission.deadline, group.index  # the order of a batch


class CheckedBuffer(buffer_lib.Buffer):
  """Compares each decision with the definition, made from all groups."""

  def deadlines(self, *, taken=()):
    running = list(self._running.values())
    finished = [
      group.admission for heap in self._finished.values() for _, group in heap
    ]
    taken = {group.index for group in taken}
    return [a.deadline for a in [*running, *finished] if a.index not in taken]

  def try_admit(self, engine_version):
    deadlines = [*self.deadlines(), engine_version + self._max_staleness]
    admission = super().try_admit(engine_version)
    assert (admission is not None) == is_schedulable(
      deadlines, self._next_step, self._groups_per_step
    )
    assert admission is None or admission.deadline == deadlines[-1]
    return admission

  def get_batch(self, step, timeout_s):
    p = self._groups_per_step
    finished = [g for heap in self._finished.values() for _, g in heap]
    oldest = sorted(finished, key=urgency)[:p]
    is_allowed = len(oldest) == p and is_schedulable(
      self.deadlines(taken=oldest), step + 1, p
    )
    batch = super().get_batch(step, timeout_s)
    assert batch == (oldest if is_allowed else None)
    counts = collections.Counter(self.deadlines())
    assert self._num_due == counts and all(self._num_due.values())
    return batch


def make_buffer(deadlines, step, groups_per_step, num_finished):
  """Return a buffer at that step whose first num_finished groups are done."""
  admissions = [
    types.Admission(index=i, birth=0, deadline=d)
    for i, d in enumerate(deadlines)
  ]
  buffer = buffer_lib.Buffer(groups_per_step, 0)
  buffer.restore(
    buffer_lib.BufferState(
      groups_per_step=groups_per_step,
      next_step=step,
      next_index=len(deadlines),
      running=admissions[num_finished:],
      finished=[tiny.written_group(a) for a in admissions[:num_finished]],
    )
  )
  return buffer


@dataclasses.dataclass
class Engine:
  version: int
  num_free: int
  is_refused: bool = False
  running: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Case:
  """One random world; times are in units of a mean generation."""

  seed: int
  groups_per_step: int
  max_staleness: int
  later_max_staleness: int
  tune_frac: float
  num_engines: int
  num_places: int
  train_s: float
  adopt_s: float
  drop_frac: float
  move_frac: float
  prefetches: bool
  restart_at: int
  num_steps: int


cases = st.builds(
  Case,
  seed=st.integers(0, 2**32),
  groups_per_step=st.integers(1, 5),
  max_staleness=st.integers(0, 6),
  later_max_staleness=st.integers(0, 6),
  tune_frac=st.sampled_from([0.0, 0.3, 1.0]),
  num_engines=st.integers(1, 4),
  num_places=st.integers(1, 8),
  train_s=st.sampled_from([0.01, 0.5, 3.0]),
  adopt_s=st.sampled_from([0.0, 0.1, 10.0]),
  drop_frac=st.sampled_from([0.0, 0.1, 0.6]),
  move_frac=st.sampled_from([0.0, 0.2]),
  prefetches=st.booleans(),
  restart_at=st.integers(0, 12),
  num_steps=st.integers(1, 12),
)


class World:
  """Engines, a trainer and a buffer on a virtual clock.

  What is checked does not use the birth and deadline of the buffer: `bounds`
  has the bound under which each group was begun, `versions` its tokens. Both
  sides ask the buffer again only after a change that would wake them, so that a
  wake-up the buffer does not promise shows as a deadlock.
  """

  def __init__(self, case):
    self.case = case
    self.rng = random.Random(case.seed)
    self.now = 0.0
    self.events = []
    self.order = itertools.count()
    self.buffer = CheckedBuffer(case.groups_per_step, case.max_staleness)
    self.max_staleness = case.max_staleness
    self.published = 0
    self.step = 0
    self.engines = [Engine(0, case.num_places) for _ in range(case.num_engines)]
    self.versions = {}
    self.bounds = {}
    self.put = set()
    self.trained = {}
    self.batches = []
    self.num_waits = 0
    self.num_tunes = 0
    self.has_news = True
    self.training = None
    self.has_restarted = False
    self.has_given_back = False

  def at(self, delay_s, call, *args):
    entry = self.now + delay_s, next(self.order), call, args
    heapq.heappush(self.events, entry)

  def duration(self, scale):
    return scale * min(self.rng.paretovariate(1.1), 200.0)

  def run(self):
    self.trainer_looks()
    for _ in range(20_000):
      if self.step == self.case.num_steps and self.training is None:
        return self
      for engine in self.engines:
        self.fill(engine)
      assert self.events, f"deadlock: {self.buffer.state()}"
      self.now, _, call, args = heapq.heappop(self.events)
      call(*args)
      self.trainer_looks()
    raise AssertionError("no end in sight")

  def fill(self, engine):
    seen = self.buffer.policy_version
    while engine.num_free and not engine.is_refused:
      admission = self.buffer.try_admit(engine.version)
      if admission is None:
        assert not self.buffer.wait_for_admission(engine.version, seen, 0.0)
        engine.is_refused = True
        return
      assert admission.index == len(self.bounds)
      self.bounds[admission.index] = self.max_staleness
      self.versions[admission.index] = [engine.version]
      self.start(engine, admission)

  def start(self, engine, admission):
    """Run it on this engine; ends that were planned elsewhere are void."""
    engine.num_free -= 1
    ticket = object()
    engine.running[admission.index] = admission, ticket
    self.at(self.duration(1.0), self.end, engine, admission, ticket)

  def end(self, engine, admission, ticket):
    if engine.running.get(admission.index) != (admission, ticket):
      return
    del engine.running[admission.index]
    engine.num_free += 1
    index = admission.index
    if self.rng.random() < self.case.move_frac:
      # The engine died near the end: another goes on, adopting first if it is
      # behind the birth.
      other = self.rng.choice(self.engines)
      if other.version < admission.birth:
        self.adopt(other)
      self.versions[index].append(other.version)
      self.start(other, admission)
    elif self.is_dropped(index):
      self.buffer.drop(index)
      self.has_news = True
      for other in self.engines:
        other.is_refused = False
    else:
      self.put.add(index)
      self.buffer.put(tiny.written_group(admission, self.versions[index]))
      self.has_news = True

  def is_dropped(self, index):
    """Return the fate of a group, which its content decides, not its time."""
    rng = random.Random(self.case.seed * 1_000_003 + index)
    return rng.random() < self.case.drop_frac

  def adopt(self, engine):
    engine.version = self.published
    engine.is_refused = False
    for index in engine.running:
      self.versions[index].append(engine.version)

  def trainer_looks(self):
    """Take a batch if the trainer wants one and there is one."""
    if not self.has_news or self.step == self.case.num_steps:
      return
    if self.training is not None and not self.case.prefetches:
      return
    if self.step > self.published + (self.training is not None):
      return
    batch = self.buffer.get_batch(self.step, 0.0)
    if batch is None:
      self.num_waits += 1
      self.has_news = False
      return
    assert len(batch) == self.case.groups_per_step
    for group in batch:
      staleness = self.step - min(self.versions[group.index])
      assert 0 <= staleness <= self.bounds[group.index]
      assert group.index in self.put and group.index not in self.trained
      self.trained[group.index] = self.step
    self.batches.append([group.index for group in batch])
    self.step += 1
    if self.training is None:
      self.train(self.step - 1)

  def train(self, step):
    self.training = step
    self.at(self.duration(self.case.train_s), self.train_ends)

  def tune(self):
    """Set another bound; one that is larger wakes who waits for admission."""
    bound = self.rng.randint(0, 6)
    for engine in self.engines:
      engine.is_refused &= bound <= self.max_staleness
    self.max_staleness = bound
    self.num_tunes += 1
    self.buffer.set_max_staleness(bound)

  def train_ends(self):
    if self.rng.random() < self.case.tune_frac:
      self.at(self.duration(self.case.train_s), self.tune)
    self.published = self.training + 1
    self.training = None
    self.has_news = True
    self.buffer.set_policy_version(self.published)
    for engine in self.engines:
      self.at(self.duration(self.case.adopt_s), self.adopt, engine)
    if self.published >= self.case.restart_at and not self.has_restarted:
      self.restart()
    elif self.step > self.published:
      self.train(self.published)

  def give_back(self, state):
    """A batch that was taken and not trained is as good as never taken."""
    self.has_given_back = True
    batch = self.batches.pop()
    self.step -= 1
    assert self.step == self.published == state.next_step
    assert {*batch} <= {group.index for group in state.finished}
    for index in batch:
      del self.trained[index]
    deadlines = [a.deadline for a in state.admissions()]
    assert fits(deadlines, self.step, self.case.groups_per_step)

  def restart(self):
    """Go on from a checkpoint in a new buffer, perhaps with another bound."""
    self.has_restarted = True
    state = self.buffer.state()
    if self.step > self.published:
      self.give_back(state)
    self.max_staleness = self.case.later_max_staleness
    self.buffer = CheckedBuffer(self.case.groups_per_step, self.max_staleness)
    self.buffer.restore(state)
    self.buffer.set_policy_version(self.published)
    self.events = []
    self.engines = [
      Engine(self.published, self.case.num_places) for _ in self.engines
    ]
    for admission in state.running:
      engine = self.rng.choice(self.engines)
      self.versions[admission.index].append(engine.version)
      self.start(engine, admission)


@pytest.mark.usefixtures("unchecked")
@given(cases)
@many
def test_any_schedule_keeps_the_bound_and_loses_nothing_and_ends(case):
  world = World(case).run()
  state = world.buffer.state()
  left = {group.index for group in state.finished}
  assert left | world.trained.keys() == world.put
  assert not left & world.trained.keys()
  deadlines = [a.deadline for a in state.admissions()]
  assert all(deadline >= world.step for deadline in deadlines)
  assert fits(deadlines, world.step, case.groups_per_step)


@pytest.mark.usefixtures("unchecked")
def test_the_schedules_reach_what_they_are_about():
  seen = collections.Counter()

  @given(cases)
  @settings(many, max_examples=100)
  def run(case):
    world = World(case).run()
    spans = [len(set(world.versions[i])) for i in world.trained]
    stale = [s - min(world.versions[i]) for i, s in world.trained.items()]
    flat = [index for batch in world.batches for index in batch]
    seen["several versions in a group"] += max(spans) > 1
    seen["at the bound"] += max(stale) == case.max_staleness > 1
    seen["trainer waited"] += world.num_waits > 0
    seen["out of order"] += flat != sorted(flat)
    seen["restarted"] += world.has_restarted
    seen["gave a batch back"] += world.has_given_back
    seen["bound moved"] += world.num_tunes > 1

  run()
  # A batch is seldom there before the step before it has ended.
  assert seen.pop("gave a batch back") >= 4
  assert len(seen) == 6 and min(seen.values()) >= 10, seen


@pytest.mark.nightly
@pytest.mark.usefixtures("unchecked")
@given(cases)
@many
def test_synchronous_batches_are_the_survivors_in_order(case):
  """Whatever the durations; with nothing dropped, step * P and on."""
  bounds = {"max_staleness": 0, "later_max_staleness": 0, "tune_frac": 0.0}
  case = dataclasses.replace(case, **bounds)
  world = World(case).run()
  survivors = [i for i in range(len(world.bounds)) if not world.is_dropped(i)]
  p = case.groups_per_step
  for step, batch in enumerate(world.batches):
    assert batch == survivors[step * p : (step + 1) * p]
    assert case.drop_frac or batch == [*range(step * p, (step + 1) * p)]


@pytest.mark.slow
@given(
  groups_per_step=st.integers(1, 5),
  max_staleness=st.integers(0, 6),
  moves=st.lists(st.sampled_from("aapst"), max_size=120),
)
@many
def test_with_current_engines_admission_is_the_gate_of_areal(
  groups_per_step, max_staleness, moves
):
  buffer = buffer_lib.Buffer(groups_per_step, max_staleness)
  num_admitted, step, version = 0, 0, 0
  running = []
  for move in moves:
    if move == "a":
      gate = (version + max_staleness + 1) * groups_per_step
      admission = buffer.try_admit(version)
      assert (admission is not None) == (num_admitted + 1 <= gate)
      if admission is not None:
        num_admitted += 1
        running.append(admission)
    elif move == "p" and running:
      # From both ends, so that groups finish out of order.
      buffer.put(tiny.written_group(running.pop(-(num_admitted % 2))))
    elif move == "s" and version == step:
      step += buffer.get_batch(step, 0.0) is not None
    elif move == "t" and version < step:
      version += 1
      buffer.set_policy_version(version)


outstanding = st.fixed_dictionaries(
  {
    "deadlines": st.lists(st.integers(3, 7), max_size=9),
    "num_finished": st.integers(0, 9),
    "groups_per_step": st.integers(1, 3),
  }
)


@given(outstanding)
@many
def test_schedulable_is_what_halls_condition_and_the_counts_say(kwargs):
  deadlines, p = kwargs["deadlines"], kwargs["groups_per_step"]
  for step in range(2, 7):
    expected = is_schedulable(deadlines, step, p)
    assert expected == fits(deadlines, step, p)
    num_due = collections.Counter(deadlines)
    assert expected == buffer_lib.fits(num_due, step, p)


@given(outstanding)
@many
def test_a_batch_is_taken_whenever_any_choice_leaves_a_schedule(kwargs):
  deadlines, p = kwargs["deadlines"], kwargs["groups_per_step"]
  if not fits(deadlines, 3, p):
    return
  num_finished = min(kwargs["num_finished"], len(deadlines))
  choices = [
    taken
    for taken in itertools.combinations(range(num_finished), p)
    if fits([d for i, d in enumerate(deadlines) if i not in taken], 4, p)
  ]
  batch = make_buffer(deadlines, 3, p, num_finished).get_batch(3, 0.0)
  assert (batch is not None) == bool(choices)
  if batch is not None:
    oldest = sorted((deadlines[i], i) for i in range(num_finished))[:p]
    assert [urgency(group) for group in batch] == oldest


@pytest.mark.slow
@given(outstanding, st.integers(0, 3))
@many
def test_a_batch_makes_no_admission_possible(kwargs, engine_version):
  """So `get_batch` has nobody to wake."""
  buffer = make_buffer(
    kwargs["deadlines"],
    3,
    kwargs["groups_per_step"],
    min(kwargs["num_finished"], len(kwargs["deadlines"])),
  )
  buffer.set_max_staleness(4)
  if not fits(kwargs["deadlines"], 3, kwargs["groups_per_step"]):
    return
  could = buffer.wait_for_admission(engine_version, 3, 0.0)
  if buffer.get_batch(3, 0.0) is not None:
    assert could or not buffer.wait_for_admission(engine_version, 3, 0.0)
