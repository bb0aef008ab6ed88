"""Supervised training as a program, on a run's training slice, by a recipe.

It has a validation loss, an early stop, metrics and checkpoints, and writes

    WORKDIR/params/         the result: the parameters with the least validation
                            loss, or the last ones without a validation
    WORKDIR/adapter/        with LoRA, the adapter of that result, if PEFT's
                            format has a place for it. It is merged into
                            WORKDIR/params
    WORKDIR/fine_tuning/    what the same command continues from
    WORKDIR/metrics.jsonl   a line for each step, and TensorBoard's files

A run starts from the result with `warm_start.checkpoint=WORKDIR/params`.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import continued_settings
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import example_stream
from jaxrl_async.data import source as source_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.models import transformer
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import packing
from jaxrl_async.training import preference_objectives
from jaxrl_async.training import sft

PARAMS, ADAPTER = "params", "adapter"
SFT = "sft"
_STAGE = "fine-tuning"


@dataclasses.dataclass(kw_only=True)
class Validation:
  """The validation losses so far.

  They are in the unit of the objective: nats per token, per pair or per step;
  for IPO squared nats.
  """

  first: float | None = None
  best: float | None = None
  best_step: int = 0
  last: float | None = None
  num_worse: int = 0

  def add(self, step: int, loss: float) -> bool:
    """Add the loss after a step, and return whether it is the best so far."""
    self.last = loss
    if self.first is None:
      self.first = loss
    is_best = self.best is None or loss < self.best
    if is_best:
      self.best, self.best_step, self.num_worse = loss, step, 0
    else:
      self.num_worse += 1
    return is_best


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What a fine-tuning learns, and from what.

  Attributes:
    kind: the beginning of the names of its metrics. A workdir is of one kind.
    examples: returns so many examples of a split.
    pack: returns rows of `tokens_per_row` tokens with a list of examples.
    first_params: returns the parameters to start from, with their adapters.
    needs_reference: rows have the field `preference_objectives.REFERENCE`, from
      the parameters before training.
  """

  kind: str
  section: sections.WarmStartSection | sections.PreferenceSection
  objective: sft.Objective
  examples: Callable[[str, int], example_stream.ExampleStream]
  pack: Callable[..., packing.PackedBatch]
  first_params: Callable[[], transformer.Params]
  needs_reference: bool = False


class FineTuning:
  """One start of a fine-tuning, over a claimed workdir.

  Threads: everything belongs to the main thread.
  """

  def __init__(
    self,
    setup: setup_lib.Setup,
    recipe: Recipe,
    workdir: pathlib.Path,
    progress: progress_lib.Progress,
    stop: supervisor_lib.StopRequest,
    claim: workdir_lib.Claim,
  ):
    """Pack the examples, and restore the newest checkpoint if there is one."""
    self._setup = setup
    self._recipe = recipe
    self._section = recipe.section
    self._workdir = workdir
    self._progress = progress
    self._stop = stop
    self._claim = claim
    self._validation = Validation()
    # Of the train and the held-out rows, what `with_reference` takes.
    self._reference: dict[str, list[float]] = {}
    self._rows_digest = ""
    stored = self._newest()
    continued_settings.check_file(setup.config, workdir)
    if why := peft_files.why_no_places(setup.model):
      progress.note(f"{workdir / ADAPTER} will not be written: {why}")
    self._is_new = stored is None
    if stored is None:
      sections.require(
        not (workdir / workdir_lib.CHECKPOINTS).exists(),
        "workdir",
        f"{workdir} holds a run of launch/train.py; use another one",
      )
      workdir_lib.check_unused(workdir)
    self._rows = self._packed(
      source_lib.Split.WARM_START, self._section.num_examples
    )
    self._held_out = None
    if self._section.eval_every:
      self._held_out = self._packed(
        source_lib.Split.EVAL, self._section.num_eval_examples
      )
    if recipe.needs_reference:
      self._rows_digest = preference_objectives.digest(*self._parts().values())
      if stored is not None:
        self._check_rows(stored[1])
    self._trainer = assembly.make_supervised_trainer(
      setup, recipe.section, recipe.objective
    )
    self._trainer.use(self._rows)
    self._writer = metrics_lib.MetricsWriter(
      workdir, side_outputs_lib.SideOutputs(progress.note)
    )
    if stored is None:
      self._trainer.start(recipe.first_params())
    else:
      self._restore(stored)
    if recipe.needs_reference:
      self._add_reference(None if stored is None else stored[1])

  def run(self) -> dict[str, Any]:
    """Train to the end, and return the fields of the summary."""
    start_s = time.perf_counter()
    setup_lib.save_tokenizer(self._setup, self._workdir / "tokenizer")
    trainer, section = self._trainer, self._section
    # The checkpoint is written first. In a workdir that has metrics but no
    # checkpoint, the checkpoint was lost.
    if self._is_new:
      self._save()
      config_json.write(self._setup.config, self._workdir)
    if self._held_out is not None and self._validation.first is None:
      self._validate({})
    while trainer.num_steps_done < section.num_steps and not self._is_over():
      if self._stop.is_set:
        self._save()
        raise supervisor_lib.Interrupted(
          f"stopped after step {trainer.num_steps_done}; the same command on"
          f" {self._workdir} goes on"
        )
      self._step()
    self._save()
    if self._held_out is None:
      self._write_params()
    validation = self._validation
    return {
      "train_steps": trainer.num_steps_done,
      "wall_s": time.perf_counter() - start_s,
      "num_rows": len(self._rows.tokens),
      "validation_loss_before": validation.first,
      "validation_loss": validation.best,
      "best_step": None if validation.best is None else validation.best_step,
      "stopped_early": trainer.num_steps_done < section.num_steps,
      "params": str(self._workdir / PARAMS),
    }

  def close(self) -> None:
    """Close the files."""
    self._writer.close()

  def _step(self) -> None:
    trainer, section = self._trainer, self._section
    start_s = time.perf_counter()
    values = trainer.step()
    values["step_s"] = time.perf_counter() - start_s
    step = trainer.num_steps_done
    self._progress.stage(
      _STAGE, step, section.num_steps, f"loss {values['loss']:.3f}"
    )
    self._claim.check()
    is_last = step == section.num_steps
    named = self._named(values)
    if self._held_out is not None and (
      is_last or step % section.eval_every == 0
    ):
      self._validate(named)
    else:
      self._writer.write(step, named)
    if step % self._setup.config.run.checkpoint_every == 0 and not is_last:
      self._save()

  def _named(self, values: Mapping[str, float], prefix: str = "") -> Any:
    """Return values under the names of their metrics."""
    kind = self._recipe.kind
    return {f"{kind}/{prefix}{name}": value for name, value in values.items()}

  def _is_over(self) -> bool:
    """Return whether the validation loss has stopped falling."""
    patience = self._section.patience
    return bool(patience) and self._validation.num_worse >= patience

  def _validate(self, values: Mapping[str, float]) -> None:
    """Measure the validation loss, and keep the parameters that are best."""
    assert self._held_out is not None
    step = self._trainer.num_steps_done
    found = self._trainer.measure(self._held_out)
    loss = found["loss"]
    if self._validation.add(step, loss):
      self._write_params()
    self._writer.write(step, {**values, **self._named(found, "validation_")})
    self._progress.note(
      f"step {step}: validation loss {loss:.4f}, best"
      f" {self._validation.best:.4f} at step {self._validation.best_step}"
    )

  def _write_params(self) -> None:
    self._check_in_place()
    params, model = self._trainer.state.policy.params, self._setup.model
    if model.lora is not None:
      # PEFT has no place for a scalar head.
      if not (model.has_scalar_head or peft_files.why_no_places(model)):
        self._write_adapter(params)
      params = initial_params.placed(
        lora_lib.merged(params, model.lora), self._setup
      )
    initial_params.save(
      self._workdir / PARAMS, params, updates=self._trainer.num_steps_done
    )

  def _write_adapter(self, params: transformer.Params) -> None:
    target = self._workdir / ADAPTER
    config = self._setup.config
    name = config.warm_start.checkpoint or config.model.name
    with disk.replacing(target) as incomplete:
      peft_files.write(incomplete, self._setup.model, params, base_model=name)
      disk.remove(target)

  def _packed(self, split: str, num_examples: int) -> packing.PackedBatch:
    """Return the packed examples of a split, and tell what was left out."""
    examples = self._recipe.examples(split, num_examples)
    rows = self._recipe.pack(
      list(examples), tokens_per_row=self._setup.config.train.tokens_per_row
    )
    for line in examples.left_out():
      self._progress.note(f"split {split}: {line}")
    return rows

  # -- checkpoints ------------------------------------------------------------

  @property
  def _directory(self) -> pathlib.Path:
    return self._workdir / workdir_lib.FINE_TUNING

  def _check_in_place(self) -> None:
    """Check the workdir, so that none is made anew where it was."""
    with disk.writing(self._workdir):
      self._claim.check_in_place()

  def _save(self) -> None:
    self._check_in_place()
    checkpoint.save(
      self._directory,
      self._trainer.num_steps_done,
      self._trainer.state,
      {
        "kind": self._recipe.kind,
        "fine_tuning": self._trainer.position(),
        "validation": dataclasses.asdict(self._validation),
        "metrics": self._writer.state(),
        "reference": self._reference,
        "rows_digest": self._rows_digest,
        "config": config_json.to_stored(self._setup.config),
      },
      [],
      keep=self._setup.config.run.keep_checkpoints,
    )

  def _newest(self) -> tuple[int, dict[str, Any]] | None:
    """Return step and host state of the newest whole checkpoint, if any."""
    try:
      checkpoint.recover(self._directory)
      whole = checkpoint.newest_whole(self._directory, self._progress.note)
      if whole is None:
        return None
      step, stored = whole.step, whole.host_state
    except checkpoint.CheckpointError as error:
      raise workdir_lib.WorkdirError(f"workdir: {error}") from error
    there, here = stored.get("kind", SFT), self._recipe.kind
    sections.require(
      there == here,
      "workdir",
      f"{self._workdir} holds a training of the kind {there}, not {here}; use"
      " another one",
    )
    then = continued_settings.stored_config(self._workdir, stored)
    continued_settings.check(
      then, self._setup.config, self._workdir, has_outstanding=False
    )
    continued_settings.check_length(
      self._setup.model,
      then,
      self._setup.config,
      self._workdir,
      is_supervised=True,
    )
    if self._recipe.needs_reference:
      dtype = self._setup.config.model.compute_dtype
      sections.require(
        dtype == then.model.compute_dtype,
        "model.compute_dtype",
        f"{dtype}, but the checkpoint in {self._workdir} has reference logprobs"
        f" that were computed in {then.model.compute_dtype}; use that, or an"
        " empty workdir",
      )
    checkpoint.set_aside(self._directory, whole.damaged)
    with disk.writing(self._directory):
      checkpoint.make_ready(self._directory)
    return step, stored

  def _parts(self) -> dict[str, packing.PackedBatch]:
    """Return the train rows, and the held-out ones if there are any."""
    named = {"train": self._rows, "held_out": self._held_out}
    return {name: rows for name, rows in named.items() if rows is not None}

  def _check_rows(self, stored: Mapping[str, Any]) -> None:
    """Check that the reference of a checkpoint is of the rows of this start."""
    sections.require(
      stored["rows_digest"] == self._rows_digest,
      "train.tokens_per_row",
      f"the checkpoint in {self._workdir} has reference logprobs of other rows"
      " of pairs; use what it was written with, which is the data,"
      " train.tokens_per_row, eval.sets and the functions of preference.chosen"
      " and preference.rejected, or an empty workdir",
    )

  def _add_reference(self, stored: Mapping[str, Any] | None) -> None:
    """Add what the parameters before training say of the rows.

    It is computed once and stored with each checkpoint. So it stays the same
    bits, and the parameters before training are not needed again.
    """
    parts = self._parts()
    if stored is None:
      for name, rows in parts.items():
        sums = self._trainer.logprob_sums(rows)
        is_first = preference_objectives.is_first_token(rows)
        self._reference[name] = sums[is_first].tolist()
    else:
      self._reference = stored["reference"]
    parts = {
      name: preference_objectives.with_reference(rows, self._reference[name])
      for name, rows in parts.items()
    }
    self._rows, self._held_out = parts["train"], parts.get("held_out")
    self._trainer.use(self._rows)

  def _restore(self, newest: tuple[int, dict[str, Any]]) -> None:
    step, stored = newest
    state, _, _ = checkpoint.restore(
      self._directory, step, self._trainer.abstract_state()
    )
    self._trainer.restore(state, stored["fine_tuning"])
    self._validation = Validation(**stored["validation"])
    self._writer.restore(stored["metrics"])
    self._progress.note(f"continuing {self._workdir} from step {step}")


def train(
  config: sections.Config,
  workdir: pathlib.Path,
  recipe_of: Callable[[setup_lib.Setup], tuple[setup_lib.Setup, Recipe]],
) -> dict[str, Any]:
  """Start or continue a training by a recipe, and return its summary.

  Args:
    config: `model`, `task`, `mesh` and `train` say what is trained, on what,
      and in which shapes. The section of the recipe says how.
    workdir: directory of this training alone.
    recipe_of: returns the recipe, and the setup of the model that it trains.

  Raises:
    ConfigError: a setting is wrong, or the examples or the workdir cannot be
      used.
    Interrupted: a signal asked to stop. The same call continues.
    WarmStartError: too many updates in a row were not finite.
    StorageError: a file could not be written.
  """
  setup, recipe = recipe_of(
    checks.checked(config, jax.devices(), is_supervised=True)
  )
  stop = supervisor_lib.StopRequest()
  with (
    progress_lib.Progress(recipe.section.num_steps) as progress,
    stop.on_signals(progress.note),
    workdir_lib.Claim(workdir, progress.note) as claim,
  ):
    fine_tuning = FineTuning(setup, recipe, workdir, progress, stop, claim)
    with contextlib.closing(fine_tuning):
      return fine_tuning.run()
