"""Extraction of the answer from a completion."""


def extract_answer(completion: str, answer_prefix: str) -> str | None:
  """Return the text after the last prefix, up to the end of the line, stripped.

  The scorers of reasoning-gym give partial credit to text that merely contains
  the right answer. They are therefore given only the extracted answer.

  Args:
    completion: text of the completion, without special tokens.
    answer_prefix: the prefix. "" selects the whole completion, stripped.

  Returns:
    The answer, or None if the prefix does not occur.
  """
  if not answer_prefix:
    return completion.strip()
  _, found, rest = completion.rpartition(answer_prefix)
  return rest.partition("\n")[0].strip() if found else None
