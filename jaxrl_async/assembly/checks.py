"""All checks of a config before a run starts, and the setup that results."""

from collections.abc import Callable, Sequence
import dataclasses
import sys
from typing import Any

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import question_sets
from jaxrl_async.assembly import rate_schedules
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.data import held_out
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.rewards import reward_terms
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.rollout import forced_answers
from jaxrl_async.sessions import agents

# How long held-out questions are made to see whether there are enough.
_PATIENCE_S = 3.0


def _to_stderr(line: str) -> None:
  print(line, file=sys.stderr)


def checked(
  config: sections.Config,
  devices: Sequence[Any],
  *,
  source: source_lib.Source | None = None,
  scorer: service_lib.Scorer | None = None,
  note: Callable[[str], None] = _to_stderr,
  device_bytes: int | None = None,
  is_supervised: bool = False,
) -> setup_lib.Setup:
  """Check a config completely, and return its setup.

  The checks of `config_checks` come first. Then the episode, the rewards, the
  headers of pretrained weights, the sizes on the devices, the data and the
  template are checked. A reward server is asked to score nothing, and a sandbox
  is tried. Quantised weights are tried out on a rollout device, if that device
  is present. Nothing else is compiled.

  Args:
    config: of the run.
    devices: the devices that are divided into the two slices.
    source: the source of the prompts; None is the dataset of `task.dataset`.
    scorer: the reward of the run; None is what the config names.
    note: is called with lines for the user, such as how programs are isolated.
    device_bytes: as in `setup.Setup`.
    is_supervised: nothing will be generated and scored, so that rewards are not
      checked, and sequences are as long as rows.

  Raises:
    ConfigError: one line that names the field.
  """
  config_checks.validate(config, len(devices))
  config = fields_lib.settled(config, note)
  terms = []
  if not is_supervised:
    assembly.episode_of(config.task)
    if config.task.episode == "agent":
      agents.check(fields_lib.plain(config.task)["episode_params"]["agent"])
    device_checks.check_replicas(config, devices[0].platform)
  if scorer is None and not is_supervised:
    terms = reward_terms.of_task(config.task)
    for line in reward_terms.try_out(terms):
      note(line)
    scorer = reward_terms.in_process(terms)
  if source is None:
    source = setup_lib.source_of(config)
  source.check()  # may import the library of the data set
  setup = setup_lib.resolve(
    config,
    devices,
    source=source,
    device_bytes=device_bytes,
    is_supervised=is_supervised,
  )
  algorithm_lib.check(config.algorithm)
  forced_answers.check(config, setup.tokenizer)
  rate_schedules.check(config)
  _check_stop_tokens(setup)
  initial_params.check(setup)
  device_checks.check_sharding(setup)
  device_checks.check_weights(setup)
  device_checks.check_training_memory(setup)
  device_checks.check_rollout_memory(setup)
  device_checks.check_shared_memory(setup)
  setup = dataclasses.replace(setup, evaluated=_evaluated(setup, terms))
  prompt_source = assembly.prompt_source(setup)
  for found in (
    prompts.validate_task(prompt_source),
    held_out.make(prompt_source, config.eval.num_items, patience_s=_PATIENCE_S),
  ):
    reward_terms.check_prompts(terms, found)
  if config.warm_start.num_steps and not config.warm_start.checkpoint:
    worked_examples_lib.validate(
      prompt_source,
      config.warm_start,
      max_tokens=config.train.tokens_per_row,
      scorer=scorer,
      is_scored=not is_supervised,
    )
  return setup


def _evaluated(
  setup: setup_lib.Setup, terms: list[term_lib.Term]
) -> frozenset[str]:
  """Return the questions of `eval.sets`.

  Raises:
    ConfigError: the questions of a set cannot be read, or not be scored.
  """
  evaluated: set[str] = set()
  for name in setup.config.eval.sets:
    found = question_sets.of_run(setup, name)[0].prompts
    reward_terms.check_prompts(terms, found)
    evaluated.update(prompt.item["question"] for prompt in found)
  return frozenset(evaluated)


def _check_stop_tokens(setup: setup_lib.Setup) -> None:
  vocab_size = setup.model.vocab_size
  for token in setup.config.rollout.stop_token_ids:
    sections.require(
      token < vocab_size,
      "rollout.stop_token_ids",
      f"{token} is not in the vocabulary; use less than {vocab_size}",
    )
