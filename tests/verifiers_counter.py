"""An environment of verifiers with tools, whose state its reward looks at."""

import verifiers.v1 as vf


class Data(vf.TaskData):
  goal: int = 0


class Count(vf.State):
  value: int = 0


class Counter(vf.Toolset[vf.SharedToolsetConfig, Count]):
  TOOL_PREFIX = "counter"

  @vf.tool
  def add(self, number: int) -> int:
    """Add a number to the counter, and return what it shows then."""
    self.state.value += number
    return self.state.value


class Reach(vf.Task[Data, Count]):
  @vf.reward
  async def reached(self, task, trace) -> float:
    return float(trace.state.value == task.goal)

  @vf.metric
  async def calls(self, trace) -> float:
    return float(len(trace.tool_messages))


class ReachesConfig(vf.TasksetConfig):
  counter: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Reaches(vf.Taskset[Reach, ReachesConfig]):
  def toolsets(self, config):
    return [Counter(config.counter)]

  def load(self):
    for goal in range(2, 12):
      data = Data(prompt=f"Bring the counter to {goal}.", goal=goal)
      yield Reach(data, self.config.task)


__all__ = ["Reaches"]

if __name__ == "__main__":
  Counter.run()
