"""The first stage of a run: a warm start, or what a checkpoint holds.

A new run trains on worked solutions, or takes the weights that it is given. A
continued run restores the train state and the groups that were outstanding.
Either of them then has its held-out questions.
"""

import dataclasses
import functools

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import given as given_lib
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import question_sets
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.data import held_out
from jaxrl_async.data import prompts
from jaxrl_async.models import transformer
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.run import checkpointing
from jaxrl_async.run import resume
from jaxrl_async.run import session as session_lib
from jaxrl_async.training import trainer as trainer_lib


def begin(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  found: resume.Found,
  given: given_lib.Given,
  *,
  trainer: trainer_lib.Trainer,
  buffer: buffer_lib.Buffer,
  stream: prompts.PromptStream,
) -> tuple[frozen_base.Record | None, list[types.RolloutGroup]]:
  """Start a new run, or restore what a checkpoint holds.

  Args:
    setup: of the run.
    session: of this start.
    found: what this start continues from.
    given: may hold the first parameters of a new run.
    trainer: gets the parameters of all models, or its state.
    buffer: gets the outstanding groups.
    stream: of the training prompts, which goes on where it was.

  Returns:
    Where the base of adapters is kept, None without one, and the groups that
    were being generated, which go on from their tokens.

  Raises:
    Interrupted: the run was asked to end.
    CheckpointError: the checkpoint is damaged.
  """
  if found.is_new:
    record = warm_start(setup, session, trainer, given.initial_params)
    with session.side_outputs.attempt("tokenizer/"):
      setup_lib.save_tokenizer(setup, session.workdir / "tokenizer")
    return record, []
  running = restore(setup, session, trainer, buffer, found)
  stream.restore(found.host_state["stream"])
  return found.host_state.get(frozen_base.KEY), running


def warm_start(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  trainer: trainer_lib.Trainer,
  params: transformer.Params | None,
) -> frozen_base.Record | None:
  """Start the trainer of a new run, by default with a warm start."""
  is_given = params is not None
  if params is None:
    session.world.tell("start", evaluated=sorted(setup.evaluated))
    show = functools.partial(
      _show_step, session, setup.config.warm_start.num_steps
    )
    params = assembly.warm_start(
      dataclasses.replace(setup, attention=trainer.forward.attention),
      show,
      session.progress.note,
    )
  params = initial_params.with_adapters(params, setup)
  trainer.start(initial_params.of_models(setup, params))
  if not trainer.has_base:
    return None
  return frozen_base.keep(
    setup,
    session.workdir,
    trainer.state,
    is_given=is_given,
    world=session.world,
  )


def _show_step(
  session: session_lib.Session, num_steps: int, step: int, loss: float
) -> None:
  session.stop.check("stopped in the warm start; it will begin anew")
  session.progress.stage("warm start", step, num_steps, f"loss {loss:.3f}")


def restore(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  trainer: trainer_lib.Trainer,
  buffer: buffer_lib.Buffer,
  found: resume.Found,
) -> list[types.RolloutGroup]:
  """Restore the trainer and the buffer, and return the running groups."""
  assert found.step is not None
  trainer.state, stored, groups = frozen_base.restore(
    setup,
    session.workdir,
    found.step,
    trainer.abstract_state(),
    trainer.world,
    found.verified,
  )
  buffer.restore(
    checkpointing.buffer_state(
      groups,
      groups_per_step=stored["groups_per_step"],
      next_step=found.step,
      next_index=stored["next_index"],
    )
  )
  resume.tell_changed_data(
    stored.get("data"), dict(setup.source.versions), session.progress.note
  )
  return checkpointing.running(groups)


def questions(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  source: prompts.PromptSource,
  stream: prompts.PromptStream,
) -> dict[str, list[questions_lib.Question]]:
  """Return what a run asks in each evaluation, by the name of the set.

  Args:
    setup: of the run.
    session: of this start.
    source: of the questions that a new run holds out. A continued run reads
      those in its workdir.
    stream: of the training prompts; the held-out questions are excluded.

  Raises:
    Interrupted: the run was asked to end.
  """
  config = setup.config

  def show(num_made: int) -> None:
    session.stop.check("stopped in the first stage; it will begin anew")
    session.progress.stage(
      "held-out questions", num_made, config.eval.num_items
    )

  stored = held_out.load_or_make(
    session.workdir / "held_out.json",
    source,
    config.eval.num_items,
    note=session.progress.note,
    on_progress=show,
  )
  stream.exclude(prompt.item["question"] for prompt in stored)
  asked = {question_sets.HELD_OUT: (stored, config.eval.samples)}
  for name in config.eval.sets:
    found, samples = question_sets.of_run(setup, name)
    if found.num_too_long:
      session.progress.note(
        f"eval.sets: {name}: {found.num_too_long} of"
        f" {found.num_too_long + len(found.prompts)} prompts are longer than"
        " rollout.max_prompt_tokens and left out"
      )
    asked[name] = found.prompts, samples
  return {
    name: questions_lib.of_set(
      name, found, assembly.answer_settings(config, samples)
    )
    for name, (found, samples) in asked.items()
  }
