"""The last line of a run is right, and its picture can be drawn."""

import io
import json

import jax
import numpy as np
from PIL import Image
import pytest
import rich.console

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import summary as summary_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.run import dry_run
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


def make_summary(**changes):
  values = {
    "eval_before": 0.4,
    "eval_after": 0.9,
    "wall_s": 300.0,
    "warm_start_s": 100.0,
    "train_steps": 60,
    "staleness_mean": 1.5,
    "staleness_max": 4,
    "mismatch_kl_mean": 1e-9,
    "tokens": summary_lib.Tokens(
      generated=100, trained=80, filtered=10, failed=6, in_flight=4
    ),
    "rollout_busy_frac": 0.8,
    "train_busy_frac": 0.7,
    "versions_per_trajectory_mean": 1.25,
  }
  return summary_lib.Summary(**{**values, **changes})


def test_the_summary_is_one_line_and_the_same_in_the_file(tmp_path):
  summary = make_summary(extra={"num_compilations": 12})
  notes = []
  line = summary_lib.write(
    tmp_path, summary, max_staleness=4, note=notes.append
  )
  assert not notes
  assert "\n" not in line
  values = json.loads(line)
  assert values == json.loads((tmp_path / "summary.json").read_text())
  assert values.keys() == {
    "eval_before",
    "eval_after",
    "wall_s",
    "warm_start_s",
    "train_steps",
    "staleness_mean",
    "staleness_max",
    "mismatch_kl_mean",
    "tokens",
    "rollout_busy_frac",
    "train_busy_frac",
    "versions_per_trajectory_mean",
    "num_compilations",
  }
  assert values["tokens"] == {
    "generated": 100,
    "trained": 80,
    "filtered": 10,
    "failed": 6,
    "in_flight": 4,
  }


@pytest.mark.parametrize(
  "changes, names",
  [
    (
      {
        "tokens": summary_lib.Tokens(
          generated=100, trained=80, filtered=10, failed=6, in_flight=5
        )
      },
      "do not add up",
    ),
    ({"staleness_max": 5}, "staleness_max 5 exceeds 4"),
    ({"eval_after": 1.2}, "eval_after 1.2 is not a fraction"),
    ({"rollout_busy_frac": 1.0000001}, "rollout_busy_frac 1.0000001 is not"),
    ({"train_busy_frac": -0.1}, "train_busy_frac"),
    ({"mismatch_kl_mean": float("nan")}, "mismatch_kl_mean is nan"),
    ({"warm_start_s": 301.0}, "warm_start_s"),
    ({"extra": {"wall_s": 1}}, "extra has wall_s"),
  ],
)
def test_numbers_that_contradict_each_other_are_written_with_a_warning(
  tmp_path, changes, names
):
  notes = []
  line = summary_lib.write(
    tmp_path, make_summary(**changes), max_staleness=4, note=notes.append
  )
  (note,) = notes
  assert note.startswith("WARNING: summary.json: ") and names in note
  values = json.loads(line)
  assert values["train_steps"] == 60
  assert values["mismatch_kl_mean"] in (1e-9, None)
  assert values == json.loads((tmp_path / "summary.json").read_text())


def timeline_of(*intervals):
  made = timeline_lib.Timeline()
  for interval in intervals:
    made.add(timeline_lib.Interval(*interval))
  return made


def make_history(num_steps, /, **changes):
  train, rollout, ends = [], [], []
  for step in map(float, range(num_steps)):
    train.append((step, step + 0.5, "update"))
    train.append((step + 0.5, step + 0.6, "something new"))
    rollout.append((step, step + 0.9, "decode"))
    ends.append(step + 0.6)
  values = {
    "max_staleness": 4,
    "evaluations": [(0.0, 0.4), (float(num_steps), 0.9)],
    "rewards": [(end, 0.5) for end in ends],
    "signals": [(end, 1.0, None, 0.1, 9.0, 12.0) for end in ends],
    "staleness_counts": [10, 30, 5],
    "versions_counts": [0, 3, 1],
    "lanes": {"train": timeline_of(*train), "rollout": timeline_of(*rollout)},
    "evaluating": timeline_of(
      (num_steps / 2, num_steps / 2 + 0.5, "evaluation")
    ),
    "step_ends_s": ends[-128:],
    "num_steps": num_steps,
    "is_resumed": False,
  }
  return summary_lib.History(**(values | changes))


@pytest.mark.slow
@pytest.mark.parametrize(
  "num_steps", [0, 2, 20, pytest.param(20_000, marks=pytest.mark.nightly)]
)
def test_the_picture_is_drawn_for_runs_of_any_length(tmp_path, num_steps):
  path = tmp_path / "summary.png"
  summary_lib.draw(path, make_history(num_steps))
  with Image.open(path) as image:
    assert image.width > 1000 and image.height > 600
    assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_a_run_that_was_never_evaluated_or_busy_has_a_picture(tmp_path):
  empty = {"train": timeline_of(), "rollout": timeline_of()}
  history = make_history(0, lanes=empty, evaluating=timeline_of())
  summary_lib.draw(tmp_path / "summary.png", history)


def test_signals_are_drawn_over_time_and_gaps_stay_open(tmp_path, monkeypatch):
  drawn = {}
  draw = summary_lib._draw_signals

  def keep(axes, history, title, plot):
    draw(axes, history, title, plot)
    drawn[title] = {
      x.get_label(): (x.get_xdata(), x.get_ydata()) for x in axes.lines
    }

  monkeypatch.setattr(summary_lib, "_draw_signals", keep)
  signals = [
    (1.0, 2.0, None, 0.2, 9.0, 12.0),
    (2.0, None, None, 0.1, 8.0, 11.0),
  ]
  history = make_history(2, signals=signals)
  summary_lib.draw(tmp_path / "summary.png", history)
  np.testing.assert_equal(
    drawn,
    {
      "Entropy per token": {"policy": ([1.0, 2.0], [2.0, np.nan])},
      # Of behavior to proximal there is nothing to draw.
      "KL per token": {"proximal to current": ([1.0, 2.0], [0.2, 0.1])},
      "Tokens per completion": {
        "mean": ([1.0, 2.0], [9.0, 8.0]),
        "longest": ([1.0, 2.0], [12.0, 11.0]),
      },
    },
  )


def test_the_zoom_is_three_steps_without_an_evaluation():
  history = make_history(20)
  start_s, end_s = summary_lib._zoom(history)
  assert end_s - start_s == pytest.approx(3)
  assert start_s in history.step_ends_s
  ((a, b, _),) = history.evaluating.recent
  assert end_s <= a or start_s >= b


def test_the_zoom_of_a_long_or_resumed_run_has_intervals_in_it():
  long = make_history(20_000)
  ends = make_history(20).step_ends_s
  earlier = [end - 100.0 for end in ends]
  resumed = make_history(20, step_ends_s=[*earlier, *ends], num_steps=40)
  for history in (long, resumed):
    start_s, end_s = summary_lib._zoom(history)
    assert end_s - start_s == pytest.approx(3)
    for lane in history.lanes.values():
      shown = [x for x in lane.recent if start_s <= x.start_s < end_s]
      assert len(shown) >= 3


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
