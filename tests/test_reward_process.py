"""A real pool of reward processes behind a transport of threads."""

from concurrent import futures
import pathlib
import pickle
import sys

import pytest
import reward_groups
import reward_scorers

from jaxrl_async import types
from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import reward_process
from jaxrl_async.rewards import code
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rewards import remote_pools
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rewards import term as term_lib

DEADLINE_S = 60.0


class Handle:
  """Calls the process as Ray would; everything is pickled on its way."""

  def __init__(self, place):
    self.process = reward_process.RewardProcess()
    self.threads = futures.ThreadPoolExecutor(4)

  def _call(self, method, *arguments):
    packed = pickle.dumps(arguments)
    return self.threads.submit(
      lambda: pickle.loads(pickle.dumps(method(*pickle.loads(packed))))
    )

  def attach(self, spec):
    return self._call(self.process.attach, spec)

  def collect(self):
    return self._call(self.process.collect)

  def deliver(self, attempts):
    self._call(self.process.deliver, attempts)

  def kill(self):
    self.process.end()
    self.threads.shutdown(wait=True)


def make_term(name, scorer, **fields):
  return term_lib.Term(
    **{"name": name, "scorer": scorer, "timeout_s": 5.0, "num_retries": 0}
    | fields
  )


@pytest.fixture(scope="module")
def service():
  """Scores by four terms, which sources choose, in one process elsewhere."""
  scorers = reward_groups.scorers(
    make_term("says", reward_scorers.adds_up, sources=("fine",)),
    make_term("late", reward_scorers.hangs, sources=("late",), timeout_s=0.3),
    make_term("dies", reward_scorers.dies, sources=("dies",), num_retries=1),
    make_term("shown", reward_scorers.describes, sources=("shown",)),
  )
  pools = remote_pools.RemotePools(
    scorers,
    num_pools=1,
    num_workers=1,
    silence_s=DEADLINE_S,
    start_timeout_s=DEADLINE_S,
    note=lambda line: None,
  )
  made = service_lib.RewardService(scorers, pools)
  pools.start(Handle)
  made.warm_up()
  yield made
  made.close(DEADLINE_S)


def test_scores_are_those_of_processes_on_this_host(service):
  item = {"source": "fine"}
  rewards = reward_groups.submit(service, item, ["a\n=b\n", "a"]).result()
  assert rewards == [
    types.Reward(
      score=2.0,
      parts={"says": 2.0, "says/answered": 1.0, "says/lines": 1.0},
      token_scores={1: 0.5, 4: 0.5},
      answer="b",
    ),
    types.Reward(
      score=0.0,
      parts={"says": 0.0, "says/answered": 0.0, "says/lines": 0.0},
      token_scores={},
    ),
  ]


def test_what_misbehaves_there_is_a_failure_and_others_go_on(service):
  handles = {
    source: reward_groups.submit(service, {"source": source}, ["x=a"])
    for source in ("late", "dies", "fine", "shown")
  }
  assert handles["late"].result().reason == (
    "timeout: a score took longer than 0.3 s (reward late)"
  )
  assert handles["dies"].result().reason == (
    "error: the reward process died with exit code 3 (reward dies)"
  )
  assert handles["fine"].result()[0].score == 1.0
  assert "text='x=a', answer='a'" in handles["shown"].result().reason
  metrics = service.metrics()
  assert metrics["reward_service/late/timeouts"] == 1
  assert metrics["reward_service/dies/errors"] == 2


def spec_of(*terms):
  return remote_pools.PoolSpec(
    pickled=pickle.dumps(reward_groups.scorers(*terms)),
    num_workers=1,
    search_path=(),
  )


def test_a_reward_that_only_the_start_can_import_is_one_line(
  tmp_path, monkeypatch
):
  (tmp_path / "local_reward.py").write_text("def score(item, x): return 1.0\n")
  monkeypatch.syspath_prepend(tmp_path)
  import local_reward  # pyright: ignore[reportMissingImports]

  spec = spec_of(make_term("", local_reward.score))
  monkeypatch.delitem(sys.modules, "local_reward")
  monkeypatch.setattr(sys, "path", [x for x in sys.path if x != str(tmp_path)])
  with pytest.raises(remote_pools.PoolFailed) as wrong:
    reward_process.RewardProcess().attach(spec)
  assert "a reward cannot be imported on " in str(wrong.value)
  assert "No module named 'local_reward'; put its module" in str(wrong.value)
  assert "\n" not in str(wrong.value)


def test_a_host_without_a_sandbox_cannot_score_programs(monkeypatch):
  def find(*, allow_unsafe):
    assert not allow_unsafe
    raise sandbox_lib.SandboxError("bubblewrap is not installed")

  monkeypatch.setattr(sandbox_lib, "find", find)
  term = make_term("tests", code.score)
  with pytest.raises(remote_pools.PoolFailed) as wrong:
    reward_process.RewardProcess().attach(spec_of(term))
  assert str(wrong.value).startswith("reward tests on ")
  assert str(wrong.value).endswith(": bubblewrap is not installed")


def test_a_pool_that_cannot_start_is_one_line(monkeypatch):
  def warm_up(self, timeout_s):
    raise RuntimeError("no library")

  monkeypatch.setattr(pool_lib.LocalPool, "warm_up", warm_up)
  with pytest.raises(remote_pools.PoolFailed, match="^on .*: no library$"):
    reward_process.RewardProcess().attach(
      spec_of(make_term("", reward_scorers.length))
    )


def test_facts_without_a_shared_directory_and_versions_that_differ():
  found = hosts.facts()
  assert found.probe is None
  assert hosts.version_difference(found, hosts.versions()) is None
  other = hosts.versions() | {"numpy": "0.1"}
  assert "instead of 0.1; install the same versions" in str(
    hosts.version_difference(found, other)
  )
  here = pathlib.Path(__file__)
  assert hosts.facts((here, here.read_text())).probe is not None
