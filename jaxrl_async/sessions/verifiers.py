"""The agent that runs a rollout of an environment of the package verifiers.

task.dataset = "verifiers:my_env"
task.episode = "agent"
task.episode_params = {"agent": "jaxrl_async.sessions.verifiers:rollout"}
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_async.environments import verifiers
from jaxrl_async.environments import worker
from jaxrl_async.sessions import agents
from jaxrl_async.types import Reward


async def rollout(
  access: agents.Access,
  item: Mapping[str, Any],
  *,
  tokenizer: str = "",
  renderer: Mapping[str, Any] | None = None,
) -> Reward:
  """Run one rollout of the environment that an item is from.

  Args:
    access: to the session.
    item: of a dataset `verifiers:`.
    tokenizer: directory of the policy's tokenizer, for `renderer`.
    renderer: config of the package renderers, such as {"name": "qwen3"}. It
      writes prompts and reads calls of tools beside the environment, which then
      exchanges tokens with the session. Without one the environment exchanges
      messages, and the session keeps the tokens.

  Returns:
    The reward. The single rewards of the environment, without their weights,
    and its metrics are parts.

  Raises:
    WorkerError: the rollout failed, and so has no reward.
  """
  metadata = item.get("metadata", {})
  if verifiers.COLUMN not in metadata:
    raise worker.WorkerError(
      "the item is not of an environment; set task.dataset=verifiers:NAME"
    )
  task = metadata[verifiers.COLUMN]
  answer = await worker.of_loop(verifiers.WORKER).ask(
    {
      "what": "rollout",
      "taskset": task["taskset"],
      "options": task["options"],
      "params": task["params"],
      "task": task["task"],
      "policy": {
        "base_url": access.base_url,
        "api_key": access.api_key,
        "model": access.model,
        "tokenizer": tokenizer,
        "renderer": None if renderer is None else dict(renderer),
      },
    }
  )
  return Reward(score=answer["reward"], parts=answer["parts"])
