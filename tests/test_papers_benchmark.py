"""The studies of benchmarks/papers.py: their task, stages, rows and claims."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import paper_efficiency
import paper_models
import paper_preference
import paper_rewards
import paper_study
import paper_sums
import pytest
import stored_run

import jaxrl_async
from jaxrl_async import types
from jaxrl_async.policies import policy as policy_lib
from jaxrl_async.storage import columns

ROOT = pathlib.Path(__file__).parents[1]
_SCHEMA = {
  "question": int,
  "sample": int,
  "prompt": str,
  "completion": str,
  "score": float,
  "num_tokens": int,
  "finish_reason": str,
  "parts": str,
}


class Launches:
  """Stands for `launching.launch`; ends the study at the call `fails_at`."""

  def __init__(self, fails_at=None):
    self.fails_at = fails_at
    self.made = []

  def __call__(self, script, *arguments):
    if len(self.made) == self.fails_at:
      raise KeyboardInterrupt
    flags = dict(x.removeprefix("--").split("=", 1) for x in arguments)
    workdir = pathlib.Path(flags["workdir"])
    self.made.append((workdir.name, script, flags))
    workdir.mkdir(exist_ok=True)
    if "labels" in flags:
      path = workdir / "labels.jsonl"
      paper_sums.write_rows(path, [{"question": str(i)} for i in range(15)])
      return {"labels": str(path)}
    return {"params": f"{workdir}/params", "num_rows": 4}

  def flags(self, name):
    (found,) = (x[2] for x in self.made if x[0] == name)
    return {k.removeprefix("config."): v for k, v in found.items()}


def parts(score, budgets=None, **options):
  """Return the parts of a reward; half of a thought of 10 tokens is enough."""
  del options
  cuts = budgets["budgets"] if budgets else ()
  found = {f"budget/{x}": score * (x >= 5) for x in cuts}
  return json.dumps({"budget/thought_tokens": 10.0, **found})


class Models:
  """Stands for `paper_models`; every third answer is right."""

  def __init__(self):
    self.asked = []
    self.serving = None
    self.num_served = 0

  def write_answers(self, output, *, questions, num_questions, **options):
    self.asked.append(output.name)
    given = paper_sums.read_rows(
      pathlib.Path(questions).read_text().split("\n")[:-1]
    )
    rows = []
    for number, row in enumerate(given[:num_questions]):
      for sample in range(options["samples"]):
        is_right = (number + sample) % 3 == 0
        text = f"1+1=2\n1+1=2\n#{row['answer'] if is_right else 99}"
        values = (
          *(number, sample, "", text, float(is_right), 16, "eos"),
          parts(float(is_right), **options),
        )
        rows.append(dict(zip(_SCHEMA, values, strict=True)))
    (output / "completions").mkdir(parents=True)
    columns.write(output / "completions" / "000000.parquet", rows, _SCHEMA)

  def divergence(self, checkpoint, step, reference, answers):
    assert reference.endswith("sft/params") and answers
    return {"kl": float(checkpoint != reference), "kl_error": 0.0}

  def step_scores(self, workdir, rows):
    assert workdir.name == "process_model"
    return [np.full(len(row["steps"]), 0.75) for row in rows]

  @contextlib.contextmanager
  def served(self, workdir, port):
    self.serving = workdir.name, port
    self.num_served += 1
    yield
    self.serving = None


def a_study(directory, launch=None, models=None, seeds=(0,)):
  return paper_study.Study(
    directory=directory,
    seeds=seeds,
    is_quick=True,
    launch_script=launch or Launches(),
    models=models or Models(),
  )


# -- the task ------------------------------------------------------------------


def test_a_solution_has_a_true_line_for_each_operation_and_the_answer():
  rng = np.random.default_rng(0)
  for _ in range(200):
    text = paper_sums.question(rng, 5)
    *lines, last = paper_sums.solution(text, rng).split("\n")
    assert len(lines) == 5 and last == f"#{eval(text)}"
    before = text[0]
    for line in lines:
      left, right = line.split("=")
      assert eval(left) == int(right) and left.startswith(before)
      assert 0 <= int(right) <= 9
      before = right


def test_a_wrong_line_is_carried_on_and_a_line_may_stand_twice():
  rng = np.random.default_rng(0)
  text = "9+8-3-2+5"
  wrong = paper_sums.solution(text, rng, corrupted_frac=1.0).split("\n")
  results = [line.split("=")[1] for line in wrong[:-1]]
  begins = [line.rpartition("=")[0] for line in wrong[1:-1]]
  assert all(b.startswith(r) for r, b in zip(results, begins, strict=False))
  assert all(eval(x.split("=")[0]) != int(x.split("=")[1]) for x in wrong[:-1])
  lines = paper_sums.solution(text, rng, restated_frac=0.9).split("\n")
  assert len(lines) > 8 and len(set(lines)) == 5
  assert paper_rewards.repeated_frac(lines) == 1 - 5 / len(lines)


def test_no_question_is_both_trained_on_and_asked(tmp_path):
  paper_sums.write(
    tmp_path,
    **{"seed": 3, "num_train": 500, "num_test": 50, "num_operations": 2},
    **{"corrupted_frac": 0.5, "restated_frac": 0.0},
  )
  train, test = (
    paper_sums.read_rows((tmp_path / f"{x}.jsonl").read_text().splitlines())
    for x in ("train", "test")
  )
  questions = [row["question"] for row in train + test]
  assert len(questions) == len({*questions})
  right = np.mean(
    [row["solution"].endswith(f"#{row['answer']}") for row in train]
  )
  assert right == pytest.approx(0.5**2, abs=0.1)


# -- pairs and returns ---------------------------------------------------------


def test_a_pair_has_a_right_and_a_wrong_answer_or_the_teachers():
  questions = [
    {"question": "1+1", "answer": "2", "solution": solution}
    for solution in ("1+1=2\n#2", "1+1=2\n#2", "1+1=3\n#3", "1+1=2\n#2", "#2")
  ]
  given = [
    ((0, "a"), (1, "b"), (0, "c")),  # a pair
    ((0, "d"), (0, "e")),  # the teacher's
    ((0, "f"), (None, "g")),  # the teacher is wrong too
    ((1, "h"), (0, " \n")),  # nothing stands against the right one
    ((1, "i"), (1, "j")),
  ]
  answers = [
    {"question": number, "score": score, "completion": text}
    for number, group in enumerate(given)
    for score, text in group
  ]
  pairs, counts = paper_preference.pairs_of(questions, answers)
  assert [(x["chosen"], x["rejected"]) for x in pairs] == [
    ("b", "a"),
    ("1+1=2\n#2", "d"),
  ]
  assert pairs[0].keys() == {"question", "answer", "chosen", "rejected"}
  assert counts == {"pairs": 2, "taught": 1, "none_right": 1, "none_wrong": 2}


def test_returns_of_repeated_lines_grow_with_process_rewards_alone():
  scores = {
    n: [np.array([0.75] * (3 + n) + [0.25])] for n in paper_rewards.REPEATS
  }
  rows = paper_rewards.returns(scores, eta=0.5)
  found = {
    row["reward"]: [row[f"n={n}"] for n in paper_rewards.REPEATS]
    for row in rows
  }
  for row in rows:
    values = row[paper_study.BY_QUESTION]
    assert values == {f"n={n}": [row[f"n={n}"]] for n in paper_rewards.REPEATS}
  alpha = paper_rewards.ALPHA
  assert found["+process"] == pytest.approx(
    [1 + alpha * (0.75 * (3 + n) + 0.25) for n in paper_rewards.REPEATS]
  )
  assert found["+clip"] == pytest.approx([1 - alpha * 0.25] * 5)
  assert found["+delta"] == pytest.approx([1 + alpha * 0.75] * 5)
  assert found["+clip_delta"] == pytest.approx([1.0] * 5)
  assert paper_rewards.repeated(["a", "b", "#1"], 2) == ["a", *"bbb", "#1"]


# -- stages --------------------------------------------------------------------


def test_preference_compares_equal_samples_and_equal_updates(tmp_path):
  launch = Launches()
  rows, claims = paper_preference.run(a_study(tmp_path, launch))
  by_name = {row["method"]: row for row in rows}
  assert {k: (x["samples"], x["updates"]) for k, x in by_name.items()} == {
    "sft": (0, 0),
    "dpo": (32, 8),
    "dpo_iter_1": (16, 4),
    "dpo_iter_2": (32, 8),
    "ppo_64 (equal updates)": (16, 8),
    "ppo_64": (32, 16),
    "+norm (equal updates)": (16, 8),
    "+norm": (32, 16),
    "+512": (32, 8),
    "+ema": (32, 8),
    "+512, beta 0.0": (32, 8),
    "+512, beta 0.1": (32, 8),
  }
  for found in (paper_preference.Sizes(), paper_preference._QUICK):
    assert found.num_prompts * found.samples == found.num_samples
    assert found.num_prompts % found.rounds == 0
    assert found.num_updates % found.rounds == 0
    # At least one pass over the pairs, of which a question has at most one.
    assert found.num_updates * found.pairs_per_update >= found.num_prompts
  assert by_name["dpo"]["passes"] == 8 * 8 / 4
  assert by_name["dpo_iter_2"]["passes"] == 4 * 8 / 4
  assert by_name["+ema"]["passes"] == 0
  # The reference of a round is the policy of the round before.
  first = launch.flags("dpo_iter_1")
  assert first["warm_start.checkpoint"].endswith("/sft/params")
  second = launch.flags("dpo_iter_2")
  assert second["warm_start.checkpoint"].endswith("/dpo_iter_1/params")
  assert first["task.dataset"] != second["task.dataset"]
  assert first["preference.rows_per_batch"] == "8"
  plain, ema = launch.flags("ppo_64"), launch.flags("ppo_512_norm_ema")
  assert plain["algorithm.advantage_scale"] == "none"
  assert ema["algorithm.advantage_scale"] == "batch_std"
  # A run that is stopped after every step still keeps the one that is asked.
  for flags in (plain, ema):
    kept = int(flags["run.keep_checkpoints"])
    assert kept >= int(flags["train.num_steps"])
  assert "algorithm.reference_every" not in plain
  assert ema["algorithm.reference_every"] == "1"
  assert "algorithm.kl_coef" not in launch.flags("ppo_beta_0.0")
  assert by_name["sft"]["kl"] == 0 and by_name["dpo"]["kl"] == 1
  # All answer alike, and nothing is better than anything.
  assert {x["verdict"] for x in claims} == {paper_study.FAILS}
  assert not any(paper_study.BY_QUESTION in row for row in rows)


def test_rewards_are_those_of_the_model_that_a_rule_names(tmp_path):
  launch, models = Launches(), Models()
  served = []
  study = a_study(tmp_path, launch, models)

  def launched(script, *arguments):
    served.append(models.serving)
    return launch(script, *arguments)

  study = a_study(tmp_path, launched, models)
  rows, of_repeats, claims = paper_rewards.run(study)
  port = int((tmp_path / "port").read_text())
  by_stage = dict(zip((x[0] for x in launch.made), served, strict=True))
  assert by_stage["success"] is None
  assert by_stage["outcome_0.1"] == ("outcome_model", port)
  assert by_stage["clip_delta_0.1_median"] == ("process_model", port)
  of_model = launch.flags("process_model")
  for name, count in (("dataset", 13), ("eval_dataset", 2)):
    path = of_model[f"task.{name}"].removeprefix("jsonl:")
    assert len(pathlib.Path(path).read_text().splitlines()) == count
  assert of_model["preference.num_examples"] == "13"
  steps = "task.rewards.steps"
  flags = launch.flags("clip_delta_0.02_p25")
  address = f"http://127.0.0.1:{port}/?reward=clip_delta&threshold=0.750000"
  assert flags[f"{steps}.function"] == address
  assert flags[f"{steps}.weight"] == "0.02"
  assert flags["config"].endswith("papers.py:scored")
  assert launch.flags("delta_0.1")[f"{steps}.function"].endswith("reward=delta")
  assert [row["reward"] for row in rows] == [
    *("sft", "success", "+outcome", "+process", "+clip", "+delta"),
    *("+clip_delta", "+clip_delta"),
  ]
  assert rows[0]["steps"] == 3 and rows[0]["repeated"] == pytest.approx(1 / 3)
  assert rows[0]["process_sum"] == pytest.approx(3 * 0.75)
  verdicts = [x["verdict"] for x in claims]
  assert verdicts.count(paper_study.HOLDS) == 4  # nothing is lost, or grows
  assert verdicts.count(paper_study.FAILS) == 2
  assert len(of_repeats) == 4
  # What is there is read without a server.
  num_served = models.num_served
  paper_rewards.run(study)
  assert models.num_served == num_served > 0
  full = paper_rewards.Sizes()
  assert len({*full.further, *paper_rewards.RULES}) == 6 + 8


@pytest.mark.parametrize(
  "run", [paper_preference.run, paper_rewards.run, paper_efficiency.run]
)
def test_a_study_goes_on_where_it_was_stopped(run, tmp_path):
  whole = Launches()
  expected = run(a_study(tmp_path / "whole", whole))
  made = []
  models = Models()
  for fails_at in (0, 3, 2, None):
    launch = Launches(fails_at)
    study = a_study(tmp_path / "stopped", launch, models)
    if fails_at is None:
      assert run(study) == expected
    else:
      with pytest.raises(KeyboardInterrupt):
        run(study)
    made += [x[0] for x in launch.made]
  assert made == [x[0] for x in whole.made]
  assert len(models.asked) == len({*models.asked})


def test_rows_are_means_over_the_seeds(tmp_path):
  rows, _ = paper_preference.run(a_study(tmp_path, seeds=(0, 1)))
  by_name = {row["method"]: row for row in rows}
  assert by_name["+512"]["num_seeds"] == 2
  assert by_name["+512, beta 0.1"]["num_seeds"] == 1
  of_seeds = [
    {"x": 1.0, "kl": None, "by_question": {"x": [0.0, 2.0]}},
    {"x": 3.0, "kl": 2.0, "by_question": {"x": [3.0, 3.0]}},
  ]
  row = paper_study.mean_row({"a": 1}, of_seeds, "x")
  assert row == {
    **{"a": 1, "num_seeds": 2, "x": 2.0, "kl": None},
    **{"x_std": pytest.approx(2**0.5), "seeds": [1.0, 3.0]},
    "by_question": {"x": [0.0, 2.0, 3.0, 3.0]},
  }


def test_pass_at_5_is_that_of_the_answers_to_each_question():
  answers = [
    {"question": q, "score": s, "num_tokens": 4, "finish_reason": "length"}
    for q, scores in enumerate(((1, 0, 0, 0, 0, 0), (0, None, 0, 0, 0, 0)))
    for s in scores
  ]
  assert paper_study.accuracies(answers) == {
    "sampled": pytest.approx(1 / 12),
    "pass@5": pytest.approx(5 / 6 / 2),
    "tokens": 4,
    "truncated": 1,
  }


# -- claims --------------------------------------------------------------------


def values(mean, num_questions=400):
  """Values of questions with this mean, that differ by the same noise."""
  noise = np.random.default_rng(0).normal(0.0, 0.1, num_questions)
  return (mean + noise - noise.mean()).tolist()


def made_up(column, means, name, num_questions=400):
  """Rows of these means, by the column `name`."""
  return [
    {
      name: key,
      column: mean,
      "by_question": {column: values(mean, num_questions)},
    }
    for key, mean in means.items()
  ]


_AS_THE_PAPER = {
  **{"sft": 0.386, "dpo": 0.35, "dpo_iter_1": 0.36, "dpo_iter_2": 0.342},
  **{"ppo_64": 0.18, "+norm (equal updates)": 0.2, "+norm": 0.381},
  **{"+512": 0.423, "+ema": 0.444, "+512, beta 0.0": 0.4},
  **{"+512, beta 0.1": 0.423, "+512, beta 0.2": 0.41},
}


@pytest.mark.parametrize(
  ("changes", "violated"),
  [
    ({}, []),
    ({"ppo_64": 0.387, "+norm": 0.4}, [0]),
    ({"+norm": 0.17}, [1]),
    ({"+512": 0.37}, [1]),
    ({"+ema": 0.41}, [1]),
    ({"+norm (equal updates)": 0.43}, [2]),
    ({"dpo": 0.39}, [3]),
    ({"dpo_iter_2": 0.39}, [3]),
    # The first round counts too, and only +ema stands for PPO.
    ({"dpo_iter_1": 0.45}, [4]),
    ({"+512": 0.5, "+ema": 0.34}, [1, 4]),
    ({"+512, beta 0.2": 0.43}, [5]),
    ({"+512, beta 0.0": 0.43}, [5]),
  ],
)
def test_a_claim_about_preferences_holds_as_long_as_it_is_true(
  changes, violated
):
  rows = made_up("pass@5", _AS_THE_PAPER | changes, "method")
  claims = paper_preference.claims(rows)
  assert len(claims) == 6
  for number, claim in enumerate(claims):
    is_violated = number in violated
    expected = paper_study.FAILS if is_violated else paper_study.HOLDS
    assert claim["verdict"] == expected, claim


def test_dpo_with_another_beta_and_one_seed_is_compared_by_its_questions():
  rows = made_up("pass@5", _AS_THE_PAPER, "method")
  for mean, expected in ((0.4, paper_study.HOLDS), (0.5, paper_study.FAILS)):
    of_one = made_up("pass@5", {"dpo, beta 0.2": mean}, "method")
    # The others have a second seed, in whose questions nobody differs.
    both = [
      row
      | {
        "by_question": {
          "pass@5": row["by_question"]["pass@5"] + values(row["pass@5"])
        }
      }
      for row in rows
    ]
    claim = paper_preference.claims([*both, *of_one])[4]
    assert claim["verdict"] == expected
    mean_difference, low, high = claim["differences"]["+ema - dpo, beta 0.2"]
    assert mean_difference == pytest.approx(0.444 - mean)
    assert (low, high) == pytest.approx((0.444 - mean,) * 2)  # one noise


_OF_REWARDS = {
  "greedy": {
    **{"sft": 0.25, "success": 0.306, "+outcome": 0.306, "+process": 0.112},
    **{"+clip": 0.3, "+delta": 0.307, "+clip_delta": 0.314},
  },
  "steps": {
    **{"sft": 5.0, "success": 5.0, "+outcome": 5.0, "+process": 9.0},
    **{"+clip": 5.0, "+delta": 5.0, "+clip_delta": 5.1},
  },
}
_OF_REPEATS = {
  "+process": [1.0, 1.1, 1.2, 1.4, 1.8],
  "+clip": [1.0, 0.9, 0.8, 0.6, 0.2],
  "+delta": [1.0] * 5,
  "+clip_delta": [1.0] * 5,
}


@pytest.mark.parametrize(
  ("greedy", "steps", "repeats", "violated"),
  [
    ({}, {}, {}, []),
    ({"+process": 0.25}, {}, {}, [0]),
    ({}, {"+process": 7.0}, {}, [1]),
    ({"+clip_delta": 0.29}, {}, {}, [2]),
    ({}, {"+clip_delta": 5.8}, {}, [3]),
    ({}, {"+clip_delta": 4.2}, {}, [3]),
    ({"+outcome": 0.35}, {}, {}, [4]),
    ({"+outcome": 0.26}, {}, {}, [4]),
    ({}, {}, {"+process": [1.0, 1.1, 1.05, 1.4, 1.8]}, [5]),
    ({}, {}, {"+delta": [1.0, 1.0, 1.0, 1.0, 1.1]}, [5]),
  ],
)
def test_a_claim_about_rewards_holds_as_long_as_it_is_true(
  greedy, steps, repeats, violated
):
  rows = made_up("greedy", _OF_REWARDS["greedy"] | greedy, "reward")
  of_steps = made_up("steps", _OF_REWARDS["steps"] | steps, "reward")
  for row, other in zip(rows, of_steps, strict=True):
    row["steps"] = other["steps"]
    row["by_question"] |= other["by_question"]
  of_repeats = []
  for shape, means in (_OF_REPEATS | repeats).items():
    named = dict(
      zip((f"n={n}" for n in paper_rewards.REPEATS), means, strict=True)
    )
    found = {column: values(mean) for column, mean in named.items()}
    of_repeats.append({"reward": shape, **named, "by_question": found})
  claims = paper_rewards.claims(rows, of_repeats)
  assert len(claims) == 6
  for number, claim in enumerate(claims):
    is_violated = number in violated
    expected = paper_study.FAILS if is_violated else paper_study.HOLDS
    assert claim["verdict"] == expected, claim


def test_what_the_questions_do_not_tell_apart_is_not_decided():
  rng = np.random.default_rng(1)
  first, second = (
    (rng.random(400) < chance).astype(float) for chance in (0.5, 0.5)
  )
  verdicts = []
  for bounds in ({"above": 0.0}, {"above": -0.5}, {"above": 0.5}):
    claim = paper_study.claim(
      *("a claim", "a number", {}),
      [
        paper_study.difference(
          "x - y", first.tolist(), second.tolist(), **bounds
        )
      ],
    )
    verdicts.append(claim["verdict"])
    found, low, high = claim["differences"]["x - y"]
    assert found == pytest.approx(float((first - second).mean()))
    # The normal interval of a mean of paired differences.
    error = 1.96 * (first - second).std() / 20
    assert (found - low, high - found) == pytest.approx((error, error), rel=0.1)
  assert verdicts == [paper_study.OPEN, paper_study.HOLDS, paper_study.FAILS]
  # One condition that fails decides, and one that is open does not.
  conditions = [
    paper_study.difference("x", [1.0, 1.1], [0.0, 0.0], above=0.0),
    paper_study.difference("y", [1.0, -1.0], [0.0, 0.0], above=0.0),
    paper_study.difference("z", [-1.0, -1.1], [0.0, 0.0], above=0.0),
  ]
  for count, expected in ((2, paper_study.OPEN), (3, paper_study.FAILS)):
    claim = paper_study.claim("a claim", "", {}, conditions[:count])
    assert claim["verdict"] == expected


# -- models --------------------------------------------------------------------


def test_the_divergence_is_the_mean_difference_of_summed_logprobs(tmp_path):
  workdir = stored_run.write(tmp_path / "run")
  of_step, newest = stored_run.STEPS
  texts = [("1+1=", "2", "eos"), ("2+3=", "5+5", "length"), ("7=", "77", "eos")]
  sums = []
  for step in (of_step, newest):
    policy = jaxrl_async.load(workdir, step=step)
    completions = []
    for _, text, reason in texts:
      tokens = policy.tokenizer.encode(text)
      if reason == "eos":
        tokens = np.append(tokens, np.int32(policy.tokenizer.eos_id))
      completions.append(
        policy_lib.Completion(
          text=text,
          tokens=tokens,
          logprobs=np.zeros(len(tokens), np.float32),
          finish_reason=types.FinishReason(reason),
        )
      )
    pairs = [
      (prompt, x) for (prompt, _, _), x in zip(texts, completions, strict=True)
    ]
    logprobs = policy.logprobs(pairs)
    assert [len(x) for x in logprobs] == [2, 3, 3]
    sums.append([float(x.sum()) for x in logprobs])
  ratios = np.subtract(*sums)
  answers = [
    {
      "prompt": prompt,
      "completion": text,
      "num_tokens": len(text) + (reason == "eos"),
      "finish_reason": reason,
    }
    for prompt, text, reason in texts
  ]
  # A special token that is not in its text leaves an answer out.
  answers.append({**answers[1], "num_tokens": 9})
  found = paper_models.divergence(str(workdir), of_step, str(workdir), answers)
  assert found == {
    "kl": pytest.approx(ratios.mean(), rel=1e-4),
    "kl_error": pytest.approx(ratios.std() / 3**0.5, rel=1e-4),
  }
  assert abs(found["kl"]) > 0.01


# -- the program ---------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("paper", ["preference", "rewards", "efficiency"])
def test_every_stage_runs_and_a_killed_program_goes_on(paper, tmp_path):
  command = [
    *(sys.executable, str(ROOT / "benchmarks" / "papers.py"), "--quick"),
    *(f"--paper={paper}", f"--workdir={tmp_path}", "--seeds=0"),
  ]
  first = subprocess.Popen(command, start_new_session=True)
  done = tmp_path / "seed_0" / "sft.result.json"
  while not done.exists():
    with contextlib.suppress(subprocess.TimeoutExpired):
      pytest.fail(f"it ended with {first.wait(timeout=1)}")
  os.killpg(first.pid, signal.SIGKILL)
  first.wait()
  made = done.stat().st_mtime_ns
  again = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
  assert done.stat().st_mtime_ns == made
  said = json.loads(again.stdout.splitlines()[-1])
  assert said["paper"] == paper
  num_rows = {"preference": 12, "rewards": 8, "efficiency": 7}
  assert len(said["rows"]) == num_rows[paper]
  verdicts = {paper_study.HOLDS, paper_study.FAILS, paper_study.OPEN}
  assert all(x["verdict"] in verdicts for x in said["claims"])
  if paper == "preference":
    # The policy's divergence from itself.
    assert said["rows"][0]["kl"] in (None, pytest.approx(0.0, abs=1e-3))
