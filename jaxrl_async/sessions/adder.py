"""An agent that asks the policy for sums, the example of docs/how-to/agents.md.

It knows nothing of the training: it calls a model through OpenAI's client.
"""

from collections.abc import Mapping
import functools
from typing import Any

import openai


async def solve(access: Any, item: Mapping[str, Any]) -> float:
  """Ask for a sum, and return 1 if the answer is right, else 0."""
  client = _client(access.base_url.partition("/sessions/")[0]).copy(
    base_url=access.base_url, api_key=access.api_key
  )
  done = await client.chat.completions.create(
    model=access.model,
    messages=[{"role": "user", "content": item["metadata"]["expression"]}],
  )
  text = done.choices[0].message.content or ""
  answer = text.rpartition("=")[2].partition("\n")[0]
  return float(answer.strip() == item["answer"])


@functools.cache
def _client(server: str) -> openai.AsyncOpenAI:
  """Return a client whose connections all sessions share."""
  # The answer of a policy that many agents ask may take long.
  return openai.AsyncOpenAI(base_url=server, api_key="none", timeout=None)
