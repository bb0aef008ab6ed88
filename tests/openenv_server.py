"""A server of OpenEnv, for tests: a digit is to be guessed.

python openenv_server.py PATH

The first line of its output is its port. It appends what it is asked to the
file PATH.
"""

import asyncio
import socket
import sys

from openenv.core import env_server
import uvicorn

PATH = sys.argv[1]


class Guess(env_server.Action):
  number: int


class Hint(env_server.Observation):
  text: str


class Digit(env_server.Environment):
  """Says whether the digit is more or less; faults happen by name."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, fault="", **_):
    note(f"reset {seed}")
    if fault == "reset raises":
      raise LookupError("no such page")
    self.digit, self.fault = (seed or 0) % 10, fault
    return Hint(
      text="guess",
      reward=0.5 if fault == "reset gives" else None,
      done=fault == "reset ends",
    )

  def step(self, action, timeout_s=None, **_):
    raise AssertionError("it has an async one")

  async def step_async(self, action, timeout_s=None, **_):
    note(f"step {action.number}")
    if self.fault == "step raises":
      raise LookupError("no such page")
    if self.fault == "hangs":
      await asyncio.sleep(600.0)
    if self.fault == "floods":
      return Hint(text="x" * 20_000_000)
    if self.fault == "writes much":
      return Hint(text="x" * 1_000_000, reward=0.25)
    if action.number == self.digit:
      return Hint(text="right", reward=1.0, done=True)
    hint = "more" if action.number < self.digit else "less"
    return Hint(text=hint, reward=-0.25)

  @property
  def state(self):
    return env_server.State()


def note(line):
  with open(PATH, "a") as file:
    file.write(line + "\n")


if __name__ == "__main__":
  listening = socket.create_server(("127.0.0.1", 0))
  print(listening.getsockname()[1], flush=True)
  app = env_server.create_fastapi_app(Digit, Guess, Hint, 100)
  uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])
