"""An environment of verifiers of several turns: a number is guessed."""

import verifiers.v1 as vf


class Data(vf.TaskData):
  number: int = 0


class Guess(vf.Task[Data]):
  @vf.reward
  async def found(self, task, trace) -> float:
    return float(trace.last_reply == str(task.number))


class Guesses(vf.Taskset[Guess]):
  def load(self):
    for number in range(10):
      yield Guess(Data(prompt="Guess.", number=number), self.config.task)


class GameConfig(vf.EnvConfig):
  agent: vf.AgentConfig = vf.AgentConfig()
  turns: int = 4


class Game(vf.Env[GameConfig]):
  async def run(self, task, agents):
    async with agents.agent.interaction(task) as game:
      said = await game.turn()
      for _ in range(self.config.turns - 1):
        guess = int(said.last_reply)
        if said.terminated or guess == task.data.number:
          return
        hint = "higher" if guess < task.data.number else "lower"
        said = await game.turn(hint)


__all__ = ["Game", "Guesses"]
