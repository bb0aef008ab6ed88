"""Pools of reward processes as actors of Ray."""

from concurrent import futures
import contextlib
from typing import Any

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import ray_handle
from jaxrl_async.cluster import reward_process
from jaxrl_async.rewards import remote_pools
from jaxrl_async.rewards import scoring

# Methods of one actor that may run at a time.
_CONCURRENCY = 4


def launch(ray: Any, num_workers: int) -> "RewardHandle":
  """Start a process for a pool, on a host with so many free cores.

  It ends with this process. Its scores would be of no use to the next start.
  """
  options: dict[str, Any] = {
    "num_cpus": num_workers,
    "num_gpus": 0,
    "max_concurrency": _CONCURRENCY,
    "max_restarts": 0,
    "scheduling_strategy": "SPREAD",
  }
  actor_class = ray.remote(reward_process.RewardProcess)
  return RewardHandle(ray, actor_class.options(**options).remote())


class RewardHandle:
  """An actor, as `remote_pools.Handle` describes it."""

  def __init__(self, ray: Any, actor: Any):
    """Take over an actor."""
    self._ray = ray
    self._actor = actor

  def attach(self, spec: remote_pools.PoolSpec) -> futures.Future[list[str]]:
    """Start its reward processes; see `remote_pools.Handle`."""
    attached: futures.Future[list[str]] = futures.Future()

    def begin(call: futures.Future) -> None:
      if (error := call.exception()) is not None:
        attached.set_exception(self._translated(error))
        return
      why_not = hosts.version_difference(call.result(), hosts.versions())
      if why_not is not None:
        attached.set_exception(remote_pools.PoolFailed(why_not))
        return
      ray_handle.pass_on(
        self._actor.attach.remote(spec), attached, self._translated
      )

    self._actor.facts.remote().future().add_done_callback(begin)
    return attached

  def collect(
    self,
  ) -> futures.Future[list[tuple[int, scoring.Outcome]]]:
    """Return the outcomes that have arrived; see `remote_pools.Handle`."""
    collected: futures.Future[list[tuple[int, scoring.Outcome]]]
    collected = futures.Future()
    ray_handle.pass_on(
      self._actor.collect.remote(), collected, self._translated
    )
    return collected

  def deliver(self, attempts: list[tuple[int, scoring.Attempt]]) -> None:
    """Send attempts; that the process has ended is learnt from `collect`."""
    self._actor.deliver.remote(attempts)

  def kill(self) -> None:
    """End the process."""
    # One that cannot be reached ends by itself when nobody calls.
    with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
      self._ray.kill(self._actor)

  def _translated(self, error: BaseException) -> BaseException:
    """Return an error of Ray's as one of `remote_pools`."""
    if isinstance(error, self._ray.exceptions.RayTaskError):
      cause = getattr(error, "cause", error)
      if isinstance(cause, remote_pools.PoolFailed):
        return remote_pools.PoolFailed(str(cause))
      return remote_pools.PoolFailed(f"{type(cause).__name__}: {cause}")
    if isinstance(error, self._ray.exceptions.RayError):
      return remote_pools.PoolLost(ray_handle.one_line(error))
    return error
