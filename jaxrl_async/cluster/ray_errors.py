"""Errors of Ray as text."""

import re

_LONGEST = 300
_LOG_LINE = re.compile(r"^\[.*?\]\s*|\x1b\[[0-9;]*m")


def one_line(error: BaseException) -> str:
  """Return the text of an error, without colours and line breaks."""
  text = " ".join(_LOG_LINE.sub("", str(error)).split())
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
