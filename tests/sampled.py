"""Compares the samples of a whole run with its ledger."""

from jaxrl_async.reporting import samples as samples_lib


def check(workdir, ledger):
  """Of each step whole groups, as the ledger has them; returns the rows."""
  found = samples_lib.read(workdir, ["step"], is_newest_first=False)
  by_step = {part.step: rows for part, rows in found}
  assert [*by_step] == sorted({entry["step"] + 1 for entry in ledger})
  for step, rows in by_step.items():
    of_step = [x for x in ledger if x["step"] == step - 1]
    assert {row["group"] for row in rows} == {x["index"] for x in of_step}
    for entry in of_step:  # four groups a step: all of them are kept
      own = [row for row in rows if row["group"] == entry["index"]]
      assert [row["reward"] for row in own] == entry["rewards"]
      assert {row["prompt_id"] for row in own} == {entry["prompt_id"]}
      lengths = [row["num_tokens"] for row in own]
      assert lengths == entry["num_completion_tokens"]
      lowest = min(row["version_min"] for row in own)
      assert lowest == entry["policy_version_min"]
  return by_step


def failed(workdir):
  """The rows of groups that failed."""
  found = samples_lib.read(workdir, ["step"], is_newest_first=False)
  return [row for _, rows in found for row in rows if row["fate"] == "failed"]
