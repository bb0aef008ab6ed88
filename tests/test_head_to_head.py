"""The comparison with other systems: its work, and what it makes of lines."""

import json
import math
import re
import statistics
import subprocess
import sys

from peers import measurements
from peers import shared_work
import pytest


def work_of(directory, case="reward"):
  return shared_work.Work(
    case=case,
    policy="policy",
    model={},
    directory=str(directory),
    num_steps=3,
    questions=shared_work.questions(case, 5, 0),
    held_out=shared_work.held_out(case, 4),
  )


def test_what_all_systems_import_needs_nothing_but_python(tmp_path):
  command = [sys.executable, "-I", "-S", shared_work.__file__]
  subprocess.run(command, check=True, cwd=tmp_path)


def test_work_is_read_as_it_was_written(tmp_path):
  work = work_of(tmp_path)
  work.write(tmp_path / "work.json")
  assert shared_work.read(tmp_path / "work.json") == work
  assert work.completions_per_step == 256


def test_equal_seeds_ask_the_same_and_others_do_not():
  for case in shared_work.CASES:
    first, again, other = (
      shared_work.questions(case, 20, seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_prompts_fit_their_bound():
  for case, shape in shared_work.CASES.items():
    longest = max(len(q.prompt) for q in shared_work.questions(case, 500, 0))
    assert longest <= shape.max_prompt_tokens
    if not shape.target:
      assert longest == 31


def test_answers_of_sums_are_right_and_solutions_sometimes():
  rows = shared_work.examples("reward", 2_000)
  longest = shared_work.CASES["reward"].max_completion_tokens
  rewards = []
  for row in rows:
    assert re.fullmatch(r"\d([+-]\d){2,3}\n", row["question"])
    assert int(row["answer"]) == eval(row["question"])
    assert len(row["solution"]) < longest
    rewards.append(shared_work.score(row["solution"], row["answer"]))
  # Two or three partial sums, each of them right three times out of four.
  expected = (0.75**2 + 0.75**3) / 2
  assert statistics.mean(rewards) == pytest.approx(expected, abs=0.05)


def test_held_out_sums_differ_and_are_in_no_training():
  held_out = shared_work.held_out("reward", 256)
  prompts = {question.prompt for question in held_out}
  assert len(prompts) == 256
  asked = {q.prompt for q in shared_work.questions("reward", 5_000, 0)}
  taught = {row["question"] for row in shared_work.examples("reward", 5_000)}
  assert not prompts & (asked | taught)
  assert shared_work.held_out("fixed", 256) == []


def test_texts_have_the_lengths_of_their_case():
  def lengths(case):
    # The token that ends a text counts.
    rows = shared_work.examples(case, 4_000)
    return [len(row["solution"]) + 1 for row in rows]

  assert min(lengths("fixed")) > 64
  long_tail = lengths("long_tail")
  assert max(long_tail) == 512 and min(long_tail) >= 5
  logs = [math.log(x) for x in long_tail]
  assert statistics.median(long_tail) == pytest.approx(32, rel=0.08)
  assert statistics.stdev(logs) == pytest.approx(1.1, rel=0.08)
  # A batch is waited for much longer than its mean completion takes.
  batches = [long_tail[i : i + 64] for i in range(0, 3_968, 64)]
  ratios = [max(batch) / statistics.mean(batch) for batch in batches]
  assert statistics.mean(ratios) > 6


def test_rewards_without_an_answer_depend_on_the_text():
  rewards = {shared_work.score(text, shared_work.ANY) for text in "abcde"}
  assert len(rewards) == 5 and all(0 <= x < 1 for x in rewards)
  assert shared_work.score("2+2=4\n4-1=3", "3") == 1.0
  assert shared_work.score("2+2=4\n4-1=2", "3") == 0.0
  assert shared_work.score("3", "4") == 0.0


def test_a_tokenizer_that_loses_characters_is_refused(tmp_path):
  work = work_of(tmp_path)
  shared_work.check_tokenizer(work, lambda text: [*text.encode()])
  with pytest.raises(ValueError, match="tokens, not"):
    shared_work.check_tokenizer(work, lambda text: [*text.strip().encode()])


def test_a_child_that_still_runs_counts():
  before_s = shared_work.cpu_s()
  program = (
    "import time\nwhile time.process_time() < 0.4: pass\n"
    "print(flush=True)\ninput()"
  )
  child = subprocess.Popen(
    [sys.executable, "-c", program],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert child.stdout is not None
  child.stdout.readline()
  spent_s, bytes_with_child = (
    shared_work.cpu_s() - before_s,
    shared_work.peak_bytes(),
  )
  child.communicate("\n")
  assert spent_s >= 0.35
  assert bytes_with_child > 5_000_000


def test_a_recorder_counts_no_evaluations_in_its_steps(tmp_path):
  recorder = shared_work.Recorder(work_of(tmp_path))
  recorder.evaluation(0.5, 0.0)
  recorder.completions([3, 9], [0.0, 1.0])
  recorder.end_of_step()
  recorder.evaluation(0.75, 100.0)
  recorder.completions([4], [1.0])
  recorder.completions([6], [0.0])  # of another microbatch
  recorder.end_of_step()
  recorder.end(settings="fast", versions="1", num_compilations=None)
  lines = shared_work.lines_file(tmp_path).read_text().splitlines()
  kinds = [json.loads(line) for line in lines]
  assert [line["kind"] for line in kinds] == [
    "evaluation",
    "step",
    "evaluation",
    "step",
    "end",
  ]
  assert kinds[1]["tokens"] == 12 and kinds[1]["longest_tokens"] == 9
  assert kinds[1]["num_completions"] == 2 and kinds[1]["reward"] == 0.5
  assert kinds[3]["step_s"] < -90
  assert kinds[3]["tokens"] == 10 and kinds[3]["num_completions"] == 2


def test_a_step_is_rollouts_and_then_training(tmp_path, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(shared_work.time, "perf_counter", lambda: now[0])
  recorder = shared_work.Recorder(work_of(tmp_path))
  now[0] += 3.0
  recorder.completions([3], [1.0])
  now[0] += 1.0
  recorder.end_of_step()
  line = json.loads(shared_work.lines_file(tmp_path).read_text())
  assert line["rollout_s"] == 3.0 and line["train_s"] == 1.0
  both_s = line["rollout_s"] + line["train_s"]
  assert both_s == pytest.approx(line["step_s"])


def lines_of(step_s, tokens, accuracies=()):
  """Lines of a run with an evaluation before it and after every second step."""
  lines = []
  accuracies = list(accuracies)
  if accuracies:
    lines.append({"kind": "evaluation", "step": 0, "accuracy": accuracies[0]})
  for i, (time_s, count) in enumerate(zip(step_s, tokens, strict=True), 1):
    lines.append(
      {
        "kind": "step",
        "step": i,
        "at_s": 10.0 + sum(step_s[:i]),
        "step_s": time_s,
        "train_s": time_s / 4,
        "rollout_s": time_s / 2,
        "tokens": count,
        "longest_tokens": 7,
        "num_completions": 2,
        "reward": 0.0,
        "cpu_s": 2.0 * i,
      }
    )
    if accuracies and i % 2 == 0:
      accuracy = accuracies[i // 2]
      lines.append({"kind": "evaluation", "step": i, "accuracy": accuracy})
  end = {"settings": "s", "versions": "v", "peak_bytes": 2**21}
  lines.append({"kind": "end", "num_compilations": 5, **end})
  return lines


def test_first_and_last_steps_are_left_out():
  lines = lines_of([9.0, 1.0, 3.0, 1.0, 50.0], [1, 100, 200, 300, 1])
  run = measurements.run(lines, skip_first=1, skip_last=1)
  assert run["tokens_per_s"] == 600 / 5
  assert run["step_s"] == 1.0 and run["step_cpu_s"] == 2.0
  assert run["first_step_s"] == 19.0
  assert run["train_frac"] == 0.25 and run["rollout_frac"] == 0.5
  assert run["num_compilations"] == 5 and run["peak_mb"] == 2.0
  with pytest.raises(ValueError, match="none of which"):
    measurements.run(lines, skip_first=3, skip_last=2)


def test_the_time_to_a_target_is_that_of_the_steps_before_it():
  lines = lines_of([9.0, 1.0, 3.0, 2.0], [1] * 4, [0.1, 0.5, 0.9])
  run = measurements.run(lines, skip_first=1, skip_last=0, target=0.8)
  assert run["reach_steps"] == 4
  assert run["reach_s"] == 19.0 + 1.0 + 3.0 + 2.0
  assert (run["accuracy_before"], run["accuracy_after"]) == (0.1, 0.9)
  missed = measurements.run(lines, skip_first=1, skip_last=0, target=0.95)
  assert missed["reach_s"] is None and missed["reach_steps"] is None


def test_ratios_are_over_the_fastest_peer_of_the_same_repeat():
  def repeats(*rates):
    lines = lines_of([1.0] * 3, [1] * 3)
    base = measurements.run(lines, skip_first=1, skip_last=0)
    return [{**base, "tokens_per_s": rate} for rate in rates]

  runs = {
    "ours": repeats(300.0, 200.0, 100.0),
    "a": repeats(100.0, 100.0, 10.0),
    "b": repeats(50.0, 200.0, 20.0),
  }
  rows = measurements.rows("fixed", runs, ["a", "b"])
  assert rows[0]["ratio_repeats"] == [3.0, 1.0, 5.0]
  assert [row["ratio"] for row in rows] == [3.0, 0.5, 1.0]
  assert rows[0]["tokens_per_s"] == 200.0 and rows[0]["num_compilations"] == 5
  alone = measurements.rows("fixed", {"ours": runs["ours"]}, [])
  assert alone[0]["ratio"] is None
  assert len(measurements.table([*rows, *alone]).splitlines()) == 6


def test_whoever_does_not_reach_the_target_has_no_ratio():
  def repeat(accuracy):
    lines = lines_of([1.0] * 4, [1] * 4, [0.1, 0.2, accuracy])
    return measurements.run(lines, skip_first=1, skip_last=0, target=0.8)

  slow = {**repeat(0.9), "reach_s": 28.0}
  runs = {"ours": [repeat(0.9)], "a": [slow], "b": [repeat(0.3)]}
  rows = measurements.rows("reward", runs, ["a", "b"])
  assert [row["ratio"] for row in rows] == [2.0, 1.0, None]
  assert "reach_s" in measurements.table(rows)


def test_a_run_that_was_cut_off_is_not_read(tmp_path):
  shared_work.Recorder(work_of(tmp_path))
  with pytest.raises(ValueError, match="not ended"):
    measurements.read(tmp_path)
