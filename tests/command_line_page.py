"""Makes docs/reference/command_line.md from what the scripts print for --help.

uv run python tests/command_line_page.py
"""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "command_line.md"
SCRIPTS = (
  "train",
  "sft",
  "prefer",
  "reward_model",
  "control",
  "evaluate",
  "show",
  "serve",
  "export",
  "replay",
  "tune",
  "simulate",
  "trainer_world",
)
_HEAD = """# Command line

What each script of `launch/` prints for `--help`. Made by
`uv run python tests/command_line_page.py`.
"""


def part(script, text):
  """Return the part of the page that has the help of a script."""
  return f"## launch/{script}.py\n\n```text\n{text.strip()}\n```\n"


def main():
  parts = [_HEAD]
  for script in SCRIPTS:
    command = [sys.executable, ROOT / "launch" / f"{script}.py", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    parts.append(part(script, done.stdout))
  PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
  main()
