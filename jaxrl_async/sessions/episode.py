"""The episode of an agent that has a loop of its own.

    task.episode = "agent"
    task.episode_params = {"agent": "my_agent:solve"}

The agent gets the address of a session, and calls the policy in training there
with any client of OpenAI's interface.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
import copy
import functools
from typing import Any

import numpy as np

from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.sessions import agents
from jaxrl_async.sessions import server as server_lib
from jaxrl_async.sessions import session as session_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.types import Prompt, Reward


async def run_agent(
  prompt: Prompt,
  context: episode_lib.Context,
  *,
  agent: str | Sequence[str],
  params: Mapping[str, Any] | None = None,
  timeout_s: float = 600.0,
  gives_reward: bool = True,
  host: str = "127.0.0.1",
  tool_format: str = "",
) -> AsyncGenerator[episode_lib.Shown, np.ndarray]:
  """Let an agent call the policy until the agent ends.

  Each call is a turn. A call that continues an earlier one goes on with its
  tokens, and any other begins a new branch. The calls of an agent are answered
  one after the other.

  The agent's calls are recorded, so that a replay does not run the agent. A run
  that goes on from a checkpoint starts the agents again that had not ended, and
  answers their calls from the record as long as they ask the same; if one asks
  something else, its group fails.

  Args:
    prompt: whose item the agent gets. Its tokens only bound the length: a
      branch has at most that many, and `rollout.max_completion_tokens`, in all.
    context: of the trajectory.
    agent: "module:function" of a function of an `agents.Access`, the item and
      `params`, which may return a number or a `types.Reward`. A coroutine
      function runs on the event loop of the episodes, and any other one in a
      thread of its own. Or the command of a program with its arguments, which
      reads the item and `params` as JSON from its standard input.
    params: keyword arguments of the agent.
    timeout_s: most time between two calls of the agent.
    gives_reward: whether an agent without a reward fails. Otherwise the run's
      reward scores the text.
    host: address at which the sessions are served.
    tool_format: how the policy writes calls of tools, "hermes" or "llama"; ""
      finds it in the chat template.
  """
  template = context.template or chat_template_lib.ChatTemplate(None)
  given = dict(params or {})

  async def start(session: session_lib.Session) -> Reward | None:
    server = await server_lib.of_loop(host)
    with server.open(session, context, tool_format) as access:
      # An agent may change them, and the other members have the same ones.
      own = copy.deepcopy((prompt.item, given))
      return await agents.run(agent, access, *own)

  session = session_lib.Session(
    start,
    tokenizer=context.tokenizer,
    template=template,
    limit=context.limit,
    max_turns=context.max_turns,
  )
  next_call = functools.partial(context.call, session.next_call)
  try:
    while "tokens" in (step := await next_call(timeout_s=timeout_s)):
      tokens = np.array(step["tokens"], np.int32)
      shown = episode_lib.Anew(tokens) if step["is_anew"] else tokens
      yield episode_lib.Until(shown, **step["ends"])
      assert context.written is not None
      session.wrote(step, context.written)
    if not context.num_turns:
      return  # which fails, as the first prompt is missing
    if step["reward"] is not None:
      context.reward(step["reward"], parts=step["parts"])
    elif gives_reward:
      raise session_lib.AgentError("the agent ended without a reward")
  finally:
    await session.close()
