"""An evaluation of its own: its files, and that a stop changes nothing."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
from ml_collections import config_dict
import polars
import pytest
import stored_run

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import question_sets
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.evaluation import answer_results
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.evaluation import evaluation
from jaxrl_async.policies import stored_policy
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

ROOT = pathlib.Path(__file__).parents[1]
NUM_ROWS = 9


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  """A run, and rows to evaluate it on; two questions make a block."""
  path = tmp_path_factory.mktemp("evaluation")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluation, "_ANSWERS_PER_BLOCK", 6)
    stored_run.write(path / "run")
    rows = stored_run.random_rows(NUM_ROWS)
    dataset = stored_run.write_rows(path / "rows.jsonl", rows)
    yield path, dataset


def run(world, output, *, step=5, stop=None, config=None, **wanted):
  path, dataset = world
  settings = {"dataset": dataset, "samples": 3, "category": "kind"} | wanted
  return evaluation.evaluate(
    path / "run",
    step,
    config or stored_run.config_for_rows(),
    evaluation.Wanted(**settings),
    output,
    jax.devices()[:2],
    progress=progress_lib.Progress(0),
    stop=stop or supervisor_lib.StopRequest(),
  )


class StopAfter(supervisor_lib.StopRequest):
  """A stop request that arrives with an answer."""

  def __init__(self, num_answers):
    super().__init__()
    self.num_left = num_answers

  def check(self, text):
    self.num_left -= 1
    if self.num_left < 0:
      raise supervisor_lib.Interrupted(text)


def files(output):
  return {p.name: p.read_bytes() for p in (output / "completions").iterdir()}


@pytest.fixture(scope="module")
def whole(world):
  """What an evaluation without a stop writes."""
  output = world[0] / "whole"
  return output, run(world, output)


@pytest.mark.slow
def test_an_evaluation_that_was_stopped_ends_with_the_same_bits(world, whole):
  output = world[0] / "stopped"
  stops = 0
  for num_answers in (5, 13, 11):
    with pytest.raises(supervisor_lib.Interrupted, match="goes on with"):
      # The step is that of the evaluation, also if a newer one has been saved.
      step = 5 if not stops else None
      run(world, output, stop=StopAfter(num_answers), step=step)
    stops += 1
  assert 0 < len(files(output)) < 5
  (output / "completions" / "000004.incomplete").write_bytes(b"half")
  results = run(world, output, step=None)
  expected, expected_results = whole
  (output / "completions" / "000004.incomplete").unlink(missing_ok=True)
  assert files(output) == files(expected) and len(files(output)) == 5
  assert results == expected_results
  stored = json.loads((output / "results.json").read_text())
  assert stored == json.loads(json.dumps(results))


@pytest.mark.slow
def test_results_name_the_rewards_that_were_used(world, tmp_path):
  config = stored_run.config_for_rows()
  config.task.reward = sections.TaskSection().reward
  terms = {"exact": {"function": "exact", "weight": 1.0}}
  config.task.rewards = config_dict.ConfigDict(terms)
  results = run(
    world, tmp_path / "named", config=config, samples=1, num_items=2
  )
  assert results["task.rewards"] == terms and "task.reward" not in results


@pytest.mark.slow
def test_every_answer_is_kept_and_counted(world, whole):
  output, results = whole
  table = polars.read_parquet(output / "completions" / "*.parquet")
  assert len(table) == 3 * NUM_ROWS == results["answers"]
  pairs = table.select("question", "sample").rows()
  assert pairs == [(q, s) for q in range(NUM_ROWS) for s in range(3)]
  rows = stored_run.random_rows(NUM_ROWS)
  for row in table.to_dicts():
    asked = rows[row["question"]]
    assert row["prompt"] == asked["question"] + "\n"
    assert row["category"] == asked["kind"]
    assert row["failure"] is None and row["parts"] == "{}"
    assert row["score"] == float(row["answer"] == asked["answer"])
    assert row["num_tokens"] >= 1
  assert results["results"]["tokens_mean"]["mean"] == pytest.approx(
    table["num_tokens"].mean()
  )
  assert results["by_category"].keys() == {r["kind"] for r in rows}
  text = answer_results.describe(results)
  assert "avg@3" in text and "even" in text
  # Nothing is generated again.
  run(world, output, stop=StopAfter(0))


@pytest.mark.slow
def test_samples_differ_and_do_not_depend_on_their_number(world, whole):
  found = run(world, world[0] / "one", samples=1, num_items=4)
  assert found["questions"] == 4 and "maj@1" not in found["results"]
  one = polars.read_parquet(world[0] / "one" / "completions" / "*.parquet")
  three = polars.read_parquet(whole[0] / "completions" / "*.parquet")
  first = three.filter(
    (polars.col("sample") == 0) & (polars.col("question") < 4)
  )
  assert one["completion"].to_list() == first["completion"].to_list()
  assert three["completion"].n_unique() > NUM_ROWS


@pytest.mark.slow
def test_another_evaluation_in_the_same_place_is_refused(world, whole):
  output, _ = whole
  for wanted, named in (
    ({"samples": 2}, "samples 3 and not 2"),
    ({"step": 2}, "step 5 and not 2"),
    ({"category": ""}, "category 'kind' and not ''"),
  ):
    with pytest.raises(sections.ConfigError, match=named):
      run(world, output, **wanted)
  config = stored_run.config_for_rows()
  config.task.template = "{question}?"
  with pytest.raises(sections.ConfigError, match="task.template"):
    run(world, output, config=config)
  copy = world[0] / "damaged"
  shutil.copytree(output, copy)
  (copy / "completions" / "000001.parquet").write_bytes(b"no Parquet")
  with pytest.raises(sections.ConfigError, match="000001.parquet is not a"):
    run(world, copy)
  (copy / "evaluation.json").unlink()
  with pytest.raises(sections.ConfigError, match="but no evaluation.json"):
    run(world, copy)


def test_a_question_that_lacks_the_category_is_named(world):
  with pytest.raises(
    sections.ConfigError, match="category: rows/eval/0 .*kind"
  ):
    run(world, world[0] / "none", category="knd")
  with pytest.raises(sections.ConfigError, match="num_items"):
    run(world, world[0] / "none", num_items=10)
  empty = stored_run.write_rows(world[0] / "empty.jsonl", [])
  with pytest.raises(sections.ConfigError, match="empty.jsonl has no rows"):
    run(world, world[0] / "none", dataset=empty)
  config = stored_run.config_for_rows()
  config.eval.temperature = 0.0
  with pytest.raises(sections.ConfigError, match="samples: 3 greedy"):
    run(world, world[0] / "none", config=config)


@pytest.mark.slow
def test_an_evaluation_none_of_whose_answers_can_be_scored_ends(world):
  config = stored_run.config_for_rows()
  config.task.reward = "reward_scorers:raises"
  with pytest.raises(answers_lib.EvaluationError, match="could be scored"):
    run(world, world[0] / "unscored", config=config, num_items=2)


def prepared(kind, rows, given=(), config=None, **wanted):
  path, dataset = rows
  stored = stored_policy.find(path / "run", 5)
  stored = dataclasses.replace(
    stored, kind=kind, config=config or stored_run.config_for_rows()
  )
  return evaluation.prepare(
    stored,
    evaluation.Wanted(dataset=dataset, given=given, **wanted),
    tokenizer_lib.character_level(),
    is_cpu=True,
  )


def test_the_engine_of_a_run_grows_for_longer_questions(world, tmp_path):
  long = {"question": "1+" * 40 + "1", "answer": "41"}
  rows = [*stored_run.random_rows(3), long]
  there = world[0], stored_run.write_rows(tmp_path / "long.jsonl", rows)
  plan = prepared(stored_policy.Kind.RUN, there)
  rollout = plan.config.rollout
  assert rollout.max_prompt_tokens == 82 and rollout.cache_tokens == 88
  assert rollout.prefill_buckets == (64, 88) and len(plan.prompts) == 4
  # A size that was given is kept, and the question is counted.
  plan = prepared(
    stored_policy.Kind.RUN, there, given={"rollout.max_prompt_tokens"}
  )
  assert plan.config.rollout.cache_tokens == 24 and len(plan.prompts) == 3
  assert plan.made_from["prompts_too_long"] == 1


def test_rows_are_scored_as_mathematics_unless_something_else_is_said(world):
  def reward(given):
    config = stored_run.config_for_rows()
    config.task.reward = "reasoning_gym"
    plan = prepared(stored_policy.Kind.RUN, world, given=given, config=config)
    return plan.config.task.reward

  assert reward(()) == "mathematics"
  with pytest.raises(sections.ConfigError, match="no question of reasoning-"):
    reward({"task.reward"})


@pytest.mark.slow
def test_without_a_dataset_the_questions_are_the_held_out_ones_of_the_run():
  config = stored_run.get_config()
  tokenizer = tokenizer_lib.character_level()
  found = question_sets.held_out_of(config, tokenizer, num_items=4)
  asked = [prompt.item["question"] for prompt in found.prompts]
  assert len(set(asked)) == 4
  again = question_sets.read(
    question_sets.task_of(config, "chain_sum"), tokenizer, num_items=4
  )
  assert [prompt.item["question"] for prompt in again.prompts] == asked


def test_sets_have_their_own_rows_template_and_samples(tmp_path):
  rows = stored_run.random_rows(4)
  config = stored_run.get_config()
  entries = {"dataset": stored_run.write_rows(tmp_path / "a.jsonl", rows)}
  config.eval.sets.sums = entries | {"template": "{question}!", "samples": 2}
  config.eval.sets.two = entries | {
    "template": "{question}{question}{question}",
    "num_items": 2,
  }
  tokenizer = tokenizer_lib.character_level()
  setup = setup_lib.resolve(config, jax.devices(), tokenizer=tokenizer)
  sums, samples = question_sets.of_run(setup, "sums")
  asked = [tokenizer.decode(prompt.tokens) for prompt in sums.prompts]
  assert asked == [row["question"] + "!" for row in rows] and samples == 2
  config.rollout.max_prompt_tokens = 8
  with pytest.raises(
    sections.ConfigError, match="eval.sets: two: .*all 2 prom"
  ):
    question_sets.of_run(setup, "two")


def test_questions_of_a_set_are_in_no_other_split(tmp_path):
  rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
  config = stored_run.get_config()
  config.task.template = "{question}"
  config.task.dataset = stored_run.write_rows(tmp_path / "all.jsonl", rows)
  config.task.reward, config.warm_start.num_steps = "exact", 0
  config.eval.num_items = 2
  entries = {"dataset": stored_run.write_rows(tmp_path / "a.jsonl", rows[:9])}
  config.eval.sets.some = entries | {"num_items": 5}
  setup = checks.checked(config, jax.devices())
  for split in ("train", "warm_start"):
    stream = prompts.PromptStream(assembly.prompt_source(setup), split)
    seen = {stream.next().item["question"] for _ in range(100)}
    assert not seen & {row["question"] for row in rows[:5]}
    assert seen & {row["question"] for row in rows[5:9]}


def launched(*arguments):
  inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.run(
    [sys.executable, str(ROOT / "launch" / "evaluate.py"), *arguments],
    capture_output=True,
    text=True,
    env=inherited,
    timeout=150,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "shown"),
  [
    (["--budgets=0,4", "--end=>", "--forced_tokens=12"], "12"),
    (["--budgets=0,4", "--end=>"], "None"),
    (["--forced_tokens=12"], "missing beside"),
    (["--budgets=0,4", "--end=>", "--forced_tokens=0"], "forced_tokens"),
  ],
)
def test_the_length_of_forced_answers_is_a_flag(arguments, shown):
  code = (
    "import sys; sys.path.insert(0, 'launch'); import evaluate;"
    "from absl import flags; flags.FLAGS(sys.argv);"
    "print(evaluate.budgets_given().get('max_tokens'))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=150,
  )
  assert shown in (done.stdout or done.stderr).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_script_evaluates_with_the_config_of_the_run(world, tmp_path):
  path, dataset = world
  done = launched(
    *("--checkpoint", str(path / "run")),
    f"--dataset={dataset}",
    f"--output={tmp_path}",
    "--samples=2",
    "--step=2",
    "--config.task.template={question}\n",
    "--config.rollout.max_completion_tokens=3",
  )
  assert done.returncode == 0, done.stderr
  results = json.loads(done.stdout.splitlines()[-1])
  assert results["step"] == 2 and results["answers"] == 2 * NUM_ROWS
  assert results["task.reward"] == "mathematics"
  assert results["results"]["tokens_mean"]["high"] <= 3
  assert "pass@2" in done.stdout.splitlines()[3]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([], "checkpoint: missing"),
    (["--checkpoint=RUN"], "output: missing"),
    (["--checkpoint=RUN", "--workdir=x"], "workdir: not used here"),
    (
      ["--checkpoint=no", "--output=OUT"],
      "checkpoint: 'no' is not a directory",
    ),
    pytest.param(
      ["--checkpoint=/", "--output=OUT"],
      "checkpoint: / holds no policy",
      marks=pytest.mark.nightly,
    ),
    pytest.param(
      ["--checkpoint=RUN", "--output=OUT", "--step=3"],
      "step: .* 2, 5",
      marks=pytest.mark.nightly,
    ),
    (
      ["--checkpoint=RUN", "--config.eval.temperature=-1.0"],
      "eval.temperature: -1.0 is out of range",
    ),
  ],
)
def test_bad_input_is_one_line(world, tmp_path, arguments, words):
  places = {"RUN": str(world[0] / "run"), "OUT": str(tmp_path / "out")}
  for word, place in places.items():
    arguments = [argument.replace(word, place) for argument in arguments]
  done = launched(*arguments)
  assert done.returncode == 1 and done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert re.match(f"error: {words}", line), line
