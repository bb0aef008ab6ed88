"""The last line of a run is right, and its picture can be drawn."""

import io
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
from PIL import Image
import pytest
import rich.console

from jaxrl_async.assembly import dry_run
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import picture
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import summary as summary_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


def step_line(step, **more):
  """A line of a train step that ends `step` seconds after 100."""
  return {
    "step": step,
    "run/wall_s": 100.0 + step,
    "run/warm_start_s": 90.0,
    "run/rl_s": float(step),
    "run/rollout_busy_s": 0.75 * step,
    "run/train_busy_s": 0.5 * step,
    "run/max_staleness": 2,
    "run/num_programs": 20,
    "run/num_compilations": 12,
    "reward/mean": step / 100,
    "policy/entropy": 2.0,
    "offpolicy/behavior_kl": None,
    "policy/approx_kl": 0.1,
    "completion/tokens_mean": 9.0,
    "completion/tokens_max": 12,
    "offpolicy/mismatch_kl": step * 1e-9,
    "staleness/histogram": [1, 3],
    "staleness/versions_histogram": [0, 2, 0, 2],
    "data/prompts_too_long": 3.0,
    "ledger/generated_tokens": 100 * step,
    "ledger/trained_tokens": 80 * step,
    "ledger/filtered_tokens": 10 * step,
    "ledger/failed_tokens": 6 * step,
    "ledger/in_flight_tokens": 4 * step,
    "timelines": timelines(99.0 + step, 100.0 + step),
    **more,
  }


def timelines(start_s, end_s):
  """An update in the first half, and something new in the last eighth."""
  made = {name: timeline_lib.Timeline(start_s) for name in ("train", "rollout")}
  for name, a, b, activity in (
    ("train", 0.0, 0.5, "update"),
    ("train", 0.875, 1.0, "something new"),
    ("rollout", 0.0, 0.9, "decode"),
  ):
    length_s = end_s - start_s
    made[name].add(
      timeline_lib.Interval(
        start_s + a * length_s, start_s + b * length_s, activity
      )
    )
  return {name: timeline.packed() for name, timeline in made.items()}


def of_totals(line):
  """What the line of an evaluation has of a step's: the totals."""
  return {
    name: value
    for name, value in line.items()
    if name.startswith(("step", "run/", "ledger/"))
  }


def evaluation_line(step, accuracy, **more):
  """It took a second after the end of a step, in a pause."""
  line = of_totals(step_line(step))
  line["run/wall_s"] += 1.0
  return {**line, "eval/held_out/avg@1": accuracy, **more}


def write_lines(workdir, *lines, rest=""):
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (workdir / "metrics.jsonl").write_text(text + rest)
  return summary_lib.read(workdir)


def test_a_summary_is_made_of_the_lines_and_is_one_line_too(tmp_path):
  record = write_lines(
    tmp_path,
    evaluation_line(0, 0.25, **{"eval/greedy/avg@1": 0.5}),
    step_line(1),
    step_line(2, **{"offpolicy/mismatch_kl": None}),
    step_line(3),
    # Beside training: it is done after a later step.
    evaluation_line(2, 0.5),
    evaluation_line(
      3, 0.75, **{"eval/greedy/avg@1": 1.0, "eval/mismatch_kl": 8e-9}
    ),
  )
  line = summary_lib.write(tmp_path, record)
  assert "\n" not in line
  values = json.loads(line)
  assert values == json.loads((tmp_path / "summary.json").read_text())
  assert values == {
    "eval_before": 0.25,
    "eval_after": 0.75,
    "eval_before_greedy": 0.5,
    "eval_after_greedy": 1.0,
    "wall_s": 104.0,
    "warm_start_s": 90.0,
    "rl_s": 3.0,
    "first_step_s": 1.0,
    "train_steps": 3,
    "staleness_mean": 0.75,
    "staleness_max": 1,
    "versions_per_trajectory_mean": 2.0,
    "mismatch_kl_mean": pytest.approx(4e-9),
    "mismatch_kl_max": 8e-9,
    "mismatch_kl_not_finite": 1,
    "tokens": {
      "generated": 300,
      "trained": 240,
      "filtered": 30,
      "failed": 18,
      "in_flight": 12,
    },
    "rollout_busy_frac": 0.75,
    "train_busy_frac": 0.5,
    "prompts_too_long": 3,
    "num_programs": 20,
    "num_compilations": 12,
  }


def test_a_run_that_died_has_a_summary_of_what_it_wrote_whole(tmp_path):
  lines = [evaluation_line(0, 0.25), step_line(1), step_line(2)]
  found = summary_lib.of(
    write_lines(tmp_path, *lines, rest='{"step": 3, "run/wa')
  )
  assert found["train_steps"] == 2 and found["wall_s"] == 102.0
  assert found["eval_before"] == found["eval_after"] == 0.25
  assert found["eval_after_greedy"] is None
  assert found == summary_lib.of(write_lines(tmp_path, *lines))
  nothing = summary_lib.of(write_lines(tmp_path, rest='{"step": 0'))
  assert nothing["eval_before"] is None and nothing["train_steps"] == 0


def show(workdir):
  script = pathlib.Path(__file__).parents[1] / "launch" / "show.py"
  command = [sys.executable, script, f"--workdir={workdir}", "--summary"]
  return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_script_makes_the_summary_of_a_run_that_is_not_over(tmp_path):
  refused = show(tmp_path)
  assert refused.returncode == 1
  assert refused.stderr.startswith(f"error: workdir: '{tmp_path}' has no metr")
  write_lines(tmp_path, evaluation_line(0, 0.25), step_line(1), rest="{")
  ran = show(tmp_path)
  assert ran.returncode == 0, ran.stderr
  values = json.loads(ran.stdout)
  assert values == json.loads((tmp_path / "summary.json").read_text())
  assert values["train_steps"] == 1 and values["eval_after"] == 0.25
  assert (tmp_path / "summary.png").exists()


def record_of(num_steps):
  record = summary_lib.Record()
  for line in (
    evaluation_line(0, 0.4),
    *(step_line(i + 1) for i in range(num_steps)),
    evaluation_line(num_steps, 0.9),
  ):
    record.add(line)
  return record


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 2, 20])
def test_the_picture_is_drawn_for_runs_of_any_length(tmp_path, num_steps):
  picture.draw(tmp_path, record_of(num_steps))
  with Image.open(tmp_path / "summary.png") as image:
    assert image.width > 1000 and image.height > 600
    assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_a_run_that_wrote_nothing_has_a_picture(tmp_path):
  picture.draw(tmp_path, summary_lib.Record())
  assert (tmp_path / "summary.png").exists()


def test_signals_are_drawn_over_time_and_gaps_stay_open(tmp_path, monkeypatch):
  drawn = {}
  draw = picture._draw_signals

  def keep(axes, record, title, plot):
    draw(axes, record, title, plot)
    drawn[title] = {
      x.get_label(): (x.get_xdata(), x.get_ydata()) for x in axes.lines
    }

  monkeypatch.setattr(picture, "_draw_signals", keep)
  record = summary_lib.Record()
  record.add(step_line(1))
  record.add(step_line(2, **{"policy/entropy": None, "policy/approx_kl": 0.2}))
  picture.draw(tmp_path, record)
  np.testing.assert_equal(
    drawn,
    {
      "Entropy per token": {"policy": ([101.0, 102.0], [2.0, np.nan])},
      # Of behavior to proximal there is nothing to draw.
      "KL per token": {"proximal to current": ([101.0, 102.0], [0.1, 0.2])},
      "Tokens per completion": {
        "mean": ([101.0, 102.0], [9.0, 9.0]),
        "longest": ([101.0, 102.0], [12.0, 12.0]),
      },
    },
  )


def test_the_zoom_is_three_steps_in_the_middle_without_a_pause():
  assert picture._zoom(record_of(20)) == (109.0, 112.0)
  record = record_of(20)
  record.pauses.append((110.5, 0.5))
  start_s, end_s = picture._zoom(record)
  assert end_s - start_s == 3 and (end_s <= 110.5 or start_s >= 111.0)


def test_time_that_does_not_count_is_a_pause():
  record = record_of(3)
  assert record.pauses == [(90.0, 11.0), (103.0, 1.0)]
  # A later start of the run, 50 seconds of which came before its RL stage.
  record.add(step_line(4, **{"run/wall_s": 155.0}))
  assert record.pauses[2:] == [(104.0, 50.0)]


def report(step):
  return progress_lib.StepReport(
    step=step,
    reward=0.5,
    staleness_mean=1.25,
    staleness_max=4,
    tokens_per_s=12_345.0,
    rollout_busy_frac=0.8,
    train_busy_frac=0.75,
  )


def test_progress_off_a_terminal_is_plain_lines():
  console = rich.console.Console(file=io.StringIO(), width=40)
  with progress_lib.Progress(3, console=console, every_s=0.0) as shown:
    shown.note("reads [/tmp/x]")
    shown.step(report(1))
    shown.step(report(2))
  lines = console.file.getvalue().splitlines()
  assert lines[0] == "reads [/tmp/x]"
  assert len(lines) == 3
  assert lines[2].startswith("step 2/3 reward 0.500 · staleness 1.2 (max 4)")
  assert "12,345 tokens/s · busy: rollout 80%, train 75%" in lines[2]


def test_progress_is_silent_between_its_lines_but_not_at_the_end():
  console = rich.console.Console(file=io.StringIO(), width=200)
  with progress_lib.Progress(30, console=console, every_s=1000.0) as shown:
    for step in range(1, 31):
      shown.step(report(step))
  lines = console.file.getvalue().splitlines()
  assert [line.split()[1] for line in lines] == ["1/30", "30/30"]


def test_progress_on_a_terminal_is_live():
  console = rich.console.Console(
    file=io.StringIO(), width=160, force_terminal=True
  )
  with progress_lib.Progress(30, console=console) as shown:
    shown.stage("warm start", 5, 10)
    shown.step(report(1))
  assert "reward 0.500" in console.file.getvalue()


def test_time_left_ignores_the_first_step():
  left = progress_lib._Left(10)
  assert left.after(1, 100.0) == "?"
  assert left.after(3, 104.0) == "0:14"
  assert left.after(10, 4000.0) == "0:00"
  assert progress_lib._clock(3725.0) == "1:02:05"


POLICY = memory_estimate.ModelBytes(
  trainable=1 << 20, frozen=0, optimizer=8 << 20
)


def dry_run_report(train_mesh, rollout_mesh, **others):
  return dry_run.report(
    setup_lib.Setup(
      config=sections.Config(),
      tokenizer=tokenizer_lib.character_level(),
      model=configs.MODELS["quickstart"],
      pretrained=None,
      train_mesh=train_mesh,
      rollout_mesh=rollout_mesh,
      source=setup_lib.source_of(sections.Config()),
    ),
    models={"policy": POLICY, **others},
    training=memory_estimate.Estimate(
      weights=1 << 20,
      optimizer=8 << 20,
      gradients=2 << 20,
      activations=4 << 20,
      layer=3 << 20,
      logits=5 << 20,
      batch=1 << 20,
      least_activations=1 << 20,
      least_working=1 << 20,
    ),
    generation={"weights": 6 << 20},
  )


def test_a_dry_run_says_what_a_config_asks_of_the_machine():
  devices = jax.devices()
  text = dry_run_report(
    mesh_lib.make_mesh(devices[:1]), mesh_lib.make_mesh(devices[1:2])
  )
  assert "32 groups x 16 = 512 trajectories" in text
  assert "128 trajectories; 4 updates a step, 240 in the run" in text
  assert "at most 160 groups = 2,560 trajectories" in text
  assert f"{configs.MODELS['quickstart'].num_params:,} parameters" in text
  assert "training slice   21.0 MiB: optimizer 8.0 MiB, logits 5.0 MiB" in text
  assert "rollout slice    6.0 MiB: weights 6.0 MiB" in text
  assert "share" not in text
  assert "reference" not in text and "policy  " not in text


def test_a_dry_run_lists_the_models_where_there_are_several():
  one = mesh_lib.make_mesh(jax.devices()[:1])
  frozen = memory_estimate.ModelBytes(trainable=0, frozen=3 << 20, optimizer=0)
  text = dry_run_report(one, one, reference=frozen)
  assert (
    "\n    policy         11.0 MiB: optimizer 8.0 MiB, gradients 2.0 MiB,"
    " weights 1.0 MiB\n    reference      3.0 MiB: weights 3.0 MiB\n"
  ) in text


def test_a_dry_run_names_devices_and_tells_one_slice_from_two():
  devices = jax.devices()
  one = mesh_lib.make_mesh(devices[:1])
  assert "both slices share a device" in dry_run_report(one, one)
  # Two TPU slices that are not here are the same devices twice.
  eight = mesh_lib.make_mesh(devices, mesh_lib.MeshShape(data=2, fsdp=4))
  text = dry_run_report(eight, eight)
  assert f"8 devices, {devices[0]} to {devices[7]}   (data 2 x fsdp 4" in text
  assert "share" not in text
