"""An environment of verifiers with one turn, and all ways to fail."""

import asyncio
import os
import time

import verifiers.v1 as vf


class Data(vf.TaskData):
  total: int = 0


class Config(vf.TaskConfig):
  fails: str = ""


class Sum(vf.Task[Data, vf.State, Config]):
  @vf.reward
  async def right(self, task, trace) -> float:
    if self.config.fails == "raises":
      raise KeyError("no such sum")
    if self.config.fails == "hangs":
      await asyncio.sleep(3600)
    if self.config.fails == "blocks":
      time.sleep(3600)
    if self.config.fails == "dies":
      os._exit(7)
    if self.config.fails == "is_nan":
      return float("nan")
    if self.config.fails == "is_text":
      return "right"  # type: ignore[return-value]
    return float(str(task.total) == trace.last_reply)

  @vf.reward(weight=0.25)
  async def is_short(self, trace) -> float:
    return float(len(trace.last_reply) < 5)


class SumsConfig(vf.TasksetConfig):
  num: int = 20
  is_endless: bool = False
  task: Config = Config()


class Sums(vf.Taskset[Sum, SumsConfig]):
  INFINITE = False

  def __init__(self, config):
    super().__init__(config)
    self._bounded = not config.is_endless

  def load(self):
    print("this would disturb the answers")
    number = 0
    while self.config.is_endless or number < self.config.num:
      data = Data(prompt=f"{number} + 1", total=number + 1)
      yield Sum(data, self.config.task)
      number += 1


__all__ = ["Sums"]
