"""Runs that are not made: a launcher that writes what they would leave."""

import json
import re


class Launches:
  """Stands for `launching.launch`, and keeps what it was asked for.

  The sampled accuracy of a run is `accuracy` of its settings, a dict by path
  without "config.", with the seed as an integer.
  """

  def __init__(self, accuracy=lambda settings: 0.5, *, fails_at=None):
    self.accuracy = accuracy
    self.fails_at = fails_at
    self.made = []  # names

  def __call__(self, script, *arguments):
    flags = dict(x.removeprefix("--").split("=", 1) for x in arguments)
    workdir = flags.pop("workdir")
    if len(self.made) == self.fails_at:
      raise KeyboardInterrupt
    self.made.append(workdir.rpartition("/")[2])
    if script == "sft.py":
      return {"params": f"{workdir}/params", "wall_s": 10.0}
    settings = {k.removeprefix("config."): v for k, v in flags.items()}
    settings["seed"] = int(settings["seed"])
    return write(workdir, settings, self.accuracy(settings))


def write(workdir, settings, accuracy):
  """Write the files of a run of two steps, and return its summary."""
  import pathlib

  path = pathlib.Path(workdir)
  path.mkdir()
  bound = float(settings.get("algorithm.max_staleness", 4))
  summary = {
    "eval_before": 0.1,
    "eval_after": accuracy,
    "eval_after_greedy": accuracy + 0.1,
    "staleness_mean": bound * 0.9,
    "versions_per_trajectory_mean": 1.0,
    "tokens": {"trained": 3_000},
    "train_steps": 3,
    "first_step_s": 5.0,
    "rl_s": 25.0,
    "wall_s": 40.0,
  }
  lines = [evaluated(0, 0.1)]
  for step in (1, 2, 3):
    lines.append(
      {
        "step": step,
        "policy/clip_frac": 0.1 * step,
        "policy/entropy": 0.5,
        "offpolicy/ess": 0.9,
        "offpolicy/left_out_frac": 0.0,
        "offpolicy/behavior_weight_capped_frac": 0.0,
        "staleness/mean": bound,
        "time/update_s": 0.5,
      }
    )
  lines[-1] |= evaluated(3, accuracy)
  (path / "summary.json").write_text(json.dumps(summary))
  (path / "metrics.jsonl").write_text(
    "".join(f"{json.dumps(x)}\n" for x in lines)
  )
  (path / "config.json").write_text(json.dumps({"eval": {"num_items": 101}}))
  return summary


def evaluated(step, accuracy):
  """A line with an evaluation of four answers to each question."""
  return {
    "step": step,
    "eval/held_out/avg@4": accuracy,
    "eval/held_out/pass@1": accuracy,
    "eval/held_out/pass@2": min(1.0, 1.5 * accuracy),
  }


def minutes(text):
  """What `launching.to_be_made` says: runs missing, all, and minutes."""
  found = re.match(r"(\d+) of (\d+) runs .* about (\d+) s: (\d+) minutes", text)
  return tuple(map(int, found.groups()))
