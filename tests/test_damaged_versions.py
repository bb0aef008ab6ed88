"""Whole runs whose every version is damaged when it is published first."""

import pytest
import test_run

from jaxrl_async.coordination import version_files
from jaxrl_async.engine import row_check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


# Each version is needed: by an evaluation in a pause at the start and at the
# end, by one beside training, by a checkpoint of an exact run, or by a
# synchronous run, which has no other one.
@pytest.mark.parametrize(
  "variant", ["", pytest.param("sync", marks=pytest.mark.nightly)]
)
def test_a_version_that_is_needed_is_written_again(
  tmp_path, monkeypatch, capsys, variant
):
  monkeypatch.setattr(row_check, "depends_on_row", lambda *_, **__: True)
  seal, damaged = version_files.seal, []

  def seal_and_damage(directory, named, layout):
    seal(directory, named, layout)
    if version_files.number_of(directory.name) == 1:
      (directory / "stranger").touch()
      damaged.append(int(directory.name))

  monkeypatch.setattr(version_files, "seal", seal_and_damage)
  config = test_run.make_config(
    variant,
    num_steps=4,
    eval={"num_items": 4, "every": 2},
    run={
      "checkpoint_every": 1,
      "exact_resume": not variant,
      "stall_timeout_s": 20.0,
    },
  )
  summary = test_run.start(config, tmp_path)
  assert summary["train_steps"] == 4 and {0, 2, 4} <= {*damaged}
  test_run.check_ledger(tmp_path, summary)
  metrics = test_run.lines(tmp_path, "metrics")
  evaluated = [x["step"] for x in metrics if "eval/held_out/avg@1" in x]
  assert evaluated == [0, 2, 4]
  said = capsys.readouterr().err
  assert ("run.exact_resume: not exact on this" in said) == (not variant)
