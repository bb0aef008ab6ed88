"""Samples of completions: which are kept, how they are written and read."""

import os
import pathlib
import pty
import subprocess
import sys

import disks
import numpy as np
import polars as pl
import pytest
import rich.console

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.evaluation import evaluated_sets
from jaxrl_async.reporting import sample_pages
from jaxrl_async.reporting import samples as samples_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

ROOT = pathlib.Path(__file__).parents[1]
TOKENIZER = tokenizer_lib.character_level()


def trajectory(
  text, *, member=0, score=1.0, versions=None, prompt="Q?", **more
):
  """A prompt and a completion, a token a character."""
  tokens = TOKENIZER.encode(prompt + text)
  mask = np.arange(len(tokens)) >= len(TOKENIZER.encode(prompt))
  policy_versions = np.full(len(tokens), -1)
  policy_versions[mask] = 3 if versions is None else versions
  reward = (
    None if score is None else types.Reward(score=score, answer=text[-1:])
  )
  return types.Trajectory(
    **{
      "member": member,
      "tokens": tokens,
      "loss_mask": mask,
      "behavior_logprobs": np.zeros(len(tokens), np.float32),
      "policy_versions": policy_versions,
      "finish_reason": types.FinishReason.EOS,
      "reward": reward,
      **more,
    }
  )


def group(index, *trajectories, item=None):
  return types.RolloutGroup(
    admission=types.Admission(index=index, birth=3, deadline=5),
    prompt=types.Prompt(
      prompt_id=f"set/train/{index}",
      tokens=TOKENIZER.encode("Q?"),
      item={"answer": 7} if item is None else item,
    ),
    trajectories=list(trajectories),
  )


def make_sampler(workdir, *, num_groups=4, first_step=0, notes=None):
  notes = [] if notes is None else notes
  return sampler_lib.Sampler(
    workdir,
    num_groups=num_groups,
    tokenizer=TOKENIZER,
    answer_prefix="=",
    side_outputs=side_outputs_lib.SideOutputs(notes.append),
    first_step=first_step,
  )


def step_rows(workdir, step):
  return pl.read_parquet(
    workdir / "samples" / f"step_{step:010}.parquet"
  ).to_dicts()


def names(workdir):
  return sorted(os.listdir(workdir / "samples"))


# -- which groups -------------------------------------------------------------


def test_the_best_the_worst_and_the_longest_group_are_kept_whole():
  groups = [
    group(4, trajectory("aa", score=0.5), trajectory("a", score=0.5)),
    group(2, trajectory("a", score=0.0), trajectory("a", score=0.2)),
    group(3, trajectory("a", score=1.0), trajectory("a", score=0.9)),
    group(9, trajectory("aaa", score=0.3), trajectory("a", score=0.3)),
    group(1, trajectory("a", score=0.4), trajectory("a", score=0.4)),
  ]
  chosen = sampler_lib.choose(groups, 4)
  assert [(g.index, why) for g, why in chosen] == [
    (3, "best"),
    (2, "worst"),
    (9, "longest"),
    (1, ""),
  ]
  assert [g.index for g, _ in sampler_lib.choose(groups, 2)] == [3, 2]
  assert sampler_lib.choose([], 2) == []


def test_a_group_that_is_several_of_them_is_kept_once():
  groups = [group(1, trajectory("aa")), group(0, trajectory("a"))]
  assert [(g.index, why) for g, why in sampler_lib.choose(groups, 4)] == [
    (0, "best, worst"),
    (1, "longest"),
  ]


# -- what is written ----------------------------------------------------------


def test_of_a_worked_solution_the_answer_is_shown(tmp_path):
  items = [{"answer": "3+4\n=7"}, {"answer": "seven"}, {"question": "x"}]
  sampler = make_sampler(tmp_path)
  for step, item in enumerate(items):
    sampler.write_step(step, [group(step, trajectory("1"), item=item)])
  found = [step_rows(tmp_path, i)[0]["expected"] for i in range(3)]
  assert found == ["7", "seven", None]


def test_a_row_has_the_texts_the_reward_and_the_versions(tmp_path):
  reward = types.Reward(score=1.5, parts={"a": 1.0, "b": 0.5}, answer="7")
  written = trajectory(
    "1+6=7",
    member=2,
    versions=[3, 3, 4, 4, 4],
    reward=reward,
    finish_reason=types.FinishReason.LENGTH,
  )
  make_sampler(tmp_path).write_step(12, [group(5, written)])
  assert step_rows(tmp_path, 12) == [
    {
      "step": 12,
      "fate": "trained",
      "chosen": "best, worst, longest",
      "group": 5,
      "member": 2,
      "prompt_id": "set/train/5",
      "prompt": "Q?",
      "completion": "1+6=7",
      "answer": "7",
      "expected": "7",
      "reward": 1.5,
      "parts": [{"name": "a", "value": 1.0}, {"name": "b", "value": 0.5}],
      "finish_reason": "length",
      "num_tokens": 5,
      "version_min": 3,
      "version_max": 4,
      "versions": [
        {"version": 3, "num_tokens": 2},
        {"version": 4, "num_tokens": 3},
      ],
      "turns": [],
      "failure": None,
    }
  ]


def test_the_turns_of_an_episode_are_kept_apart(tmp_path):
  one = trajectory("ab?cd")
  one.loss_mask[4] = False  # the environment's question mark
  make_sampler(tmp_path).write_step(1, [group(0, one)])
  (row,) = step_rows(tmp_path, 1)
  assert row["completion"] == "abcd"
  assert row["turns"] == [
    {"prompt": "Q?", "completion": "ab"},
    {"prompt": "?", "completion": "cd"},
  ]


def test_groups_that_were_not_trained_are_written_with_the_next_step(tmp_path):
  sampler = make_sampler(tmp_path, num_groups=2)
  for index in range(3):  # the first of them is one too many
    sampler.add_untrained(
      group(index, trajectory("x=2", score=None)),
      types.Fate.FAILED,
      "timeout: slow",
    )
  half = trajectory("ab", score=None, finish_reason=None)
  bare = group(7, half, item={})
  sampler.add_untrained(bare, types.Fate.FILTERED, "")
  sampler.write_step(1, [group(8, trajectory("a"))])
  rows = step_rows(tmp_path, 1)
  found = [
    (row["group"], row["fate"], row["answer"], row["failure"]) for row in rows
  ]
  assert found == [
    (8, "trained", "a", None),
    (1, "failed", "2", "timeout: slow"),
    (2, "failed", "2", "timeout: slow"),
    (7, "filtered", None, None),
  ]
  assert rows[-1]["finish_reason"] == "aborted" and rows[-1]["expected"] is None
  sampler.write_step(2, [group(9, trajectory("a"))])
  assert [row["group"] for row in step_rows(tmp_path, 2)] == [9]


def test_what_failed_last_is_written_when_the_run_ends(tmp_path):
  sampler = make_sampler(tmp_path)
  sampler.close()
  assert not (tmp_path / "samples").exists()
  failed = group(0, trajectory("a", score=None))
  sampler.add_untrained(failed, types.Fate.FAILED, "error: it raised")
  sampler.close()
  (row,) = step_rows(tmp_path, 1)
  assert row["failure"] == "error: it raised"


def test_an_evaluation_has_a_file_of_its_own(tmp_path):
  prompts = [group(i).prompt for i in range(100)]
  trajectories = [trajectory("7") for _ in prompts]
  trajectories[1].reward = None
  asked = questions_lib.of_set(
    "held_out",
    prompts,
    questions_lib.AnswerSettings(temperature=1.0, max_completion_tokens=4),
  )
  answers = list(map(questions_lib.Answer, asked, trajectories))
  failure = service_lib.RewardFailure("timeout: slow")
  answers[1] = answers[1]._replace(failure=failure)
  evaluation = evaluated_sets.Evaluation(answers, {"pass@1": 0.0})
  make_sampler(tmp_path).write_evaluation(0, evaluation)
  rows = pl.read_parquet(tmp_path / "samples" / "eval_0000000000.parquet")
  assert rows.height == 64
  failed = rows.row(1, named=True)
  assert (failed["fate"], failed["failure"]) == ("evaluated", "timeout: slow")


def test_no_text_is_too_odd_and_no_column_changes_its_type(tmp_path):
  odd = types.Reward(score=float(2**60), parts={"\ud800": 1.0}, answer="\udfff")
  item = {"answer": "a\ud800\0"}
  sampler = make_sampler(tmp_path)
  sampler.write_step(1, [group(0, trajectory("a", reward=odd), item=item)])
  sampler.write_step(2, [group(0, trajectory("", score=None), item={})] * 0)
  sampler.add_untrained(
    group(0, trajectory("", score=None), item={}), types.Fate.FAILED, ""
  )
  sampler.write_step(3, [])
  files = [
    pl.read_parquet(tmp_path / "samples" / name) for name in names(tmp_path)
  ]
  assert len(files) == 2 and files[0].schema == files[1].schema
  assert files[0]["answer"].to_list() == ["?"]
  assert pl.concat(files).height == 2


def test_without_groups_nothing_is_written(tmp_path):
  sampler = make_sampler(tmp_path, num_groups=0)
  sampler.add_untrained(group(1, trajectory("a")), types.Fate.FAILED, "no")
  sampler.write_step(1, [group(0, trajectory("a"))])
  sampler.close()
  assert not (tmp_path / "samples").exists()


def test_without_polars_nothing_is_written(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "polars", None)  # as if not installed
  sampler = make_sampler(tmp_path)
  sampler.add_untrained(group(1, trajectory("a")), types.Fate.FAILED, "no")
  sampler.write_step(1, [group(0, trajectory("a"))])
  sampler.close()
  assert not (tmp_path / "samples").exists()


def test_a_full_disk_is_said_once_and_counted(tmp_path):
  notes = []
  sampler = make_sampler(tmp_path, notes=notes)
  with disks.files_of_at_most(100):
    for step in (1, 2):
      sampler.write_step(step, [group(0, trajectory("a"))])
  assert not [n for n in names(tmp_path) if n.endswith(".incomplete")]
  assert len(notes) == 1 and "samples/ could not be written" in notes[0]
  sampler.write_step(3, [group(0, trajectory("a"))])
  assert [n for n in names(tmp_path) if n.endswith(".parquet")] == [
    "step_0000000003.parquet"
  ]


# -- how many files, and which after a restart --------------------------------


def test_the_number_of_files_is_bounded(monkeypatch):
  steps = {*range(0, 10**6, 32), *range(10**6 - 1000, 10**6)}
  assert 256 < sum(samples_lib.is_kept(s, 10**6) for s in steps) <= 512
  monkeypatch.setattr(samples_lib, "_NUM_RECENT", 8)
  monkeypatch.setattr(samples_lib, "_MAX_OLDER", 24)
  kept = set()
  for newest in range(1, 500):
    kept = {s for s in kept | {newest} if samples_lib.is_kept(s, newest)}
    assert len(kept) <= 32
    # What was dropped on the way is what would be dropped now.
    assert kept == {
      s for s in range(1, newest + 1) if samples_lib.is_kept(s, newest)
    }
  assert kept == {*range(492, 500), *range(32, 500, 32)}


def test_files_are_dropped_as_the_run_goes_on(tmp_path, monkeypatch):
  monkeypatch.setattr(samples_lib, "_NUM_RECENT", 2)
  monkeypatch.setattr(samples_lib, "_MAX_OLDER", 2)
  sampler = make_sampler(tmp_path, num_groups=1)
  for step in range(1, 10):
    sampler.write_step(step, [group(0, trajectory("a"))])
  steps = [p.step for p in samples_lib.parts_in(tmp_path / "samples")]
  assert steps == [8, 9]


def test_a_continued_run_forgets_what_will_be_done_again(tmp_path):
  sampler = make_sampler(tmp_path)
  for step in (1, 2, 3):
    sampler.write_step(step, [group(step, trajectory("a"))])
  (tmp_path / "samples" / "step_0000000004.incomplete").touch()
  (tmp_path / "samples" / "notes.txt").touch()
  sampler = make_sampler(tmp_path, first_step=2)
  assert names(tmp_path) == [
    "notes.txt",
    "step_0000000001.parquet",
    "step_0000000002.parquet",
  ]


# -- reading them -------------------------------------------------------------


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  path = tmp_path_factory.mktemp("run")
  sampler = make_sampler(path)
  for step in (1, 2, 3):
    sampler.write_step(
      step,
      [
        group(
          10 * step + i,
          trajectory("ab" * step, member=0, score=step + i / 10),
          trajectory("c", member=1, score=-1.0 * step, prompt=f"Q{step}?"),
        )
        for i in range(2)
      ],
    )
  sampler.add_untrained(
    group(99, trajectory("xxxxxxx=5", score=None)),
    types.Fate.FAILED,
    "error: no",
  )
  sampler.write_step(4, [])
  return path


def selected(workdir, **query):
  rows = sample_pages.select(workdir, sample_pages.Query(**query))
  return [(row["step"], row["group"], row["member"]) for row in rows]


def test_the_newest_step_comes_first_and_its_groups_stay_together(workdir):
  assert selected(workdir, max_rows=4) == [
    (4, 99, 0),
    (3, 31, 0),
    (3, 31, 1),
    (3, 30, 0),
  ]
  first = selected(workdir, max_rows=2, is_reversed=True)
  assert first == [(1, 11, 0), (1, 11, 1)]
  assert len(selected(workdir, max_rows=0)) == 13


def test_completions_are_ordered_by_reward_or_length(workdir):
  assert selected(workdir, sort="reward", max_rows=2) == [
    (3, 31, 0),
    (3, 30, 0),
  ]
  worst = selected(workdir, sort="reward", is_reversed=True, max_rows=0)
  assert worst[0][:1] == (3,) and worst[-1] == (4, 99, 0)
  assert selected(workdir, sort="length", max_rows=1) == [(4, 99, 0)]


def test_completions_are_found_by_step_prompt_and_failure(workdir):
  assert {row[0] for row in selected(workdir, step=2)} == {2}
  assert selected(workdir, prompt="set/train/21") == [(2, 21, 0), (2, 21, 1)]
  assert {row[0] for row in selected(workdir, prompt="Q2")} == {2}
  assert selected(workdir, has_failed=True) == [(4, 99, 0)]
  assert selected(workdir, is_evaluation=True) == []


def test_a_file_that_is_damaged_or_dropped_meanwhile_is_left_out(
  workdir, monkeypatch
):
  damaged = workdir / "samples" / "step_0000000009.parquet"
  damaged.write_bytes(b"PAR1 and no more")
  try:
    listed = samples_lib.parts_in(workdir / "samples")
    gone = samples_lib.Part("step", 8)
    monkeypatch.setattr(samples_lib, "parts_in", lambda _: [*listed, gone])
    assert selected(workdir, max_rows=1) == [(4, 99, 0)]
  finally:
    damaged.unlink()


def test_what_commands_a_terminal_is_shown_and_not_obeyed(workdir):
  (row,) = sample_pages.select(workdir, sample_pages.Query(has_failed=True))
  row["completion"] = "\x1b[31m=5\x07"
  console = rich.console.Console(force_terminal=True, color_system=None)
  with console.capture() as shown:
    for line in sample_pages.lines([row]):
      console.print(line)
  text = shown.get()
  assert "\x1b[31m" not in text and "\x07" not in text
  assert "\u241b[31m=5\u2407" in text and "error: no" in text


def show(workdir, *flags, **options):
  return subprocess.run(
    [
      sys.executable,
      str(ROOT / "launch" / "show.py"),
      f"--workdir={workdir}",
      *flags,
    ],
    text=True,
    timeout=120,
    **options,
  )


def test_the_script_prints_plain_text_into_a_pipe_without_jax(workdir):
  ran = show(
    workdir,
    "--num=3",
    capture_output=True,
    env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
  )
  assert ran.returncode == 0, ran.stderr[-2000:]
  assert " jax\n" not in ran.stderr and " polars\n" in ran.stderr
  assert "\x1b" not in ran.stdout
  assert "step 3 · group 31 · set/train/31 · best" in ran.stdout
  assert (
    "── 0: reward 3.100 · 6 tokens · ended by eos · version 3" in ran.stdout
  )
  assert "ababab\nanswer: 'b', expected: '7'\n" in ran.stdout


@pytest.mark.slow
def test_a_terminal_gets_a_pager(workdir, tmp_path):
  own, other = pty.openpty()
  env = {**os.environ, "PAGER": f"cat > {tmp_path}/paged", "TERM": "xterm"}
  env.pop("NO_COLOR", None)
  try:
    ran = show(
      workdir, stdin=other, stdout=other, stderr=subprocess.PIPE, env=env
    )
  finally:
    os.close(own)
    os.close(other)
  assert ran.returncode == 0, ran.stderr
  text = (tmp_path / "paged").read_text()
  assert "\x1b[1m" in text and "set/train/31" in text


@pytest.mark.parametrize(
  ("flags", "line"),
  [
    (["--step=7"], "step: there are no samples of step 7, but of 4 steps from"),
    (["--prompt=zzz"], "prompt: none of the samples matches, of 4 steps from"),
    (["--eval"], "workdir: "),
  ],
)
def test_nothing_to_show_is_one_line(workdir, flags, line):
  query = {
    "--step=7": {"step": 7},
    "--prompt=zzz": {"prompt": "zzz"},
    "--eval": {"is_evaluation": True},
  }[flags[0]]
  with pytest.raises(sections.ConfigError) as nothing:
    sample_pages.show(workdir, sample_pages.Query(**query))
  assert str(nothing.value).startswith(line) and "\n" not in str(nothing.value)
