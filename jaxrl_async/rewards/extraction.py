"""Which part of a completion is its answer."""


def extract_answer(completion: str, answer_prefix: str) -> str | None:
  """Return what follows the last prefix, up to the end of its line, stripped.

  The scorers of reasoning-gym give partial credit to text that merely contains
  the right answer. What they score is therefore the extracted answer alone.

  Args:
    completion: what the policy wrote, without special tokens.
    answer_prefix: "" takes the whole completion, stripped.

  Returns:
    None where the prefix does not occur.
  """
  if not answer_prefix:
    return completion.strip()
  _, found, rest = completion.rpartition(answer_prefix)
  return rest.partition("\n")[0].strip() if found else None
