"""Evaluators of a run: of its held-out questions, and of `eval.sets`."""

from jaxrl_async import types
from jaxrl_async.data import held_out
from jaxrl_async.data import prompts
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.run import assembly
from jaxrl_async.run import evaluate
from jaxrl_async.run import question_sets
from jaxrl_async.run import session as session_lib
from jaxrl_async.run import setup as setup_lib


def make(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  *,
  source: prompts.PromptSource,
  stream: prompts.PromptStream,
  rewards: service_lib.RewardService,
) -> tuple[evaluate.Evaluator, dict[str, evaluate.Evaluator]]:
  """Build the evaluator of the held-out questions, and those of `eval.sets`.

  Args:
    setup: of the run.
    session: of this start.
    source: of the questions that a new run holds out. A continued run reads
      those in its workdir.
    stream: of the training prompts; the held-out questions are excluded.
    rewards: score the answers.

  Returns:
    The former, and the latter by the name of their set.

  Raises:
    Interrupted: the run was asked to end.
  """
  config = setup.config

  def show(num_made: int) -> None:
    session.stop.check("stopped in the first stage; it will begin anew")
    session.progress.stage(
      "held-out questions", num_made, config.eval.num_items
    )

  def evaluator(
    questions: list[types.Prompt], samples: int
  ) -> evaluate.Evaluator:
    return evaluate.Evaluator(
      questions,
      assembly.answer_settings(config, samples),
      tokenizer=setup.tokenizer,
      rewards=rewards,
      num_slots=config.rollout.num_slots,
      solved_score=config.task.solved_score,
    )

  stored = held_out.load_or_make(
    session.workdir / "held_out.json",
    source,
    config.eval.num_items,
    note=session.progress.note,
    on_progress=show,
  )
  stream.exclude(prompt.item["question"] for prompt in stored)
  sets = {}
  for name in config.eval.sets:
    found, samples = question_sets.of_run(setup, name)
    if found.num_too_long:
      session.progress.note(
        f"eval.sets: {name}: {found.num_too_long} of"
        f" {found.num_too_long + len(found.prompts)} prompts are longer than"
        " rollout.max_prompt_tokens and left out"
      )
    sets[name] = evaluator(found.prompts, samples)
  return evaluator(stored, config.eval.samples), sets
