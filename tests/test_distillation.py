"""On-policy distillation: the equation, the teacher, a run that follows it."""

import functools
import re

import jax
from jax import numpy as jnp
import metrics_page
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import test_assembly
import test_reference
import test_run
import test_train_step
import tiny

from jaxrl_async.algorithms import distillation
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import continued_settings
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import hf_weights
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import stages as stages_lib
from jaxrl_async.training import train_state

POLICY, TEACHER = train_state.POLICY, train_state.TEACHER


def test_the_advantage_is_the_difference_of_logprobs_under_the_mask():
  rng = np.random.default_rng(0)
  teacher, behavior = -rng.exponential(1.0, (2, 3, 7)).astype(np.float32)
  mask = rng.random((3, 7)) < 0.6
  wanted = np.zeros((3, 7))
  for row, column in np.argwhere(mask):
    difference = float(teacher[row, column]) - float(behavior[row, column])
    wanted[row, column] = 0.3 * difference
  assert (wanted > 0).any() and (wanted < 0).any()

  def of(teacher, behavior):
    # Nothing outside the mask has an influence.
    return distillation.advantages(
      jnp.where(mask, teacher, jnp.nan),
      jnp.where(mask, behavior, jnp.nan),
      jnp.asarray(mask),
      coef=0.3,
    )

  np.testing.assert_allclose(of(teacher, behavior), wanted, atol=1e-6)
  gradient = jax.grad(lambda x: of(x, behavior).sum())(jnp.asarray(teacher))
  assert not np.asarray(gradient).any()


@pytest.mark.parametrize("has_proximal", [False, True])
def test_the_stage_adds_to_the_advantages_that_there_are(has_proximal):
  """What it subtracts is as old as the weights, where their logprobs exist."""
  batch = test_train_step.packed(rows=16)
  policy = batch.behavior_logprobs
  if has_proximal:
    policy = policy + 0.25 * np.cos(np.arange(policy.shape[-1]))
    batch = batch.with_arrays({objectives.PROXIMAL: policy})
  params = tiny.params(seed=3, model=test_train_step.MODEL)
  stage = stages_lib.distillation_stage(0.5)
  made = jax.jit(
    functools.partial(stage.run, {TEACHER: test_train_step.FORWARD})
  )({TEACHER: params}, batch, 0)
  teacher = test_train_step.proximal_program()(params, batch)
  np.testing.assert_allclose(made[objectives.TEACHER], teacher, atol=1e-6)
  wanted = batch.advantages + 0.5 * np.where(
    batch.loss_mask, teacher - policy, 0
  )
  np.testing.assert_allclose(made["advantages"], wanted, atol=1e-6)
  assert np.abs(wanted - batch.advantages).max() > 0.1


def make_config(teacher, **algorithm):
  config = test_run.make_config("sync")
  given = {"distill_coef": 1.0, "advantage": "none"} | algorithm
  for name, value in {"teacher": str(teacher), **given}.items():
    setattr(config.algorithm, name, value)
  return config


def test_the_teacher_comes_after_what_makes_advantages(tmp_path):
  config = make_config(
    tmp_path, kl_coef=0.1, second_moment_bound=0.04, advantage="group"
  )
  setup = setup_lib.resolve(config, jax.devices())
  assert setup.models[TEACHER].optimizer is None
  assert setup.models[TEACHER].model == setup.model
  names = [stage.name for stage in algorithm_lib.stages(setup)]
  assert names == ["proximal", "reference", "teacher", "second_moment"]
  config = make_config("", distill_coef=0.0, advantage="group")
  setup = setup_lib.resolve(config, jax.devices())
  assert TEACHER not in setup.models
  assert test_reference.stage_names(setup) == ["proximal"]


def stored_teacher(tmp_path):
  """Parameters of the policy's architecture in bfloat16, which is another."""
  config = make_config(tmp_path)
  params = tiny.params(model=setup_lib.resolve(config, jax.devices()).model)
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  initial_params.save(tmp_path, params)


def damaged_manifest(tmp_path):
  stored_teacher(tmp_path)
  (tmp_path / "0" / "manifest.json").write_text("{}")


def teacher_without_weights(tmp_path):
  test_assembly.write_pretrained(tmp_path, make_config(tmp_path))
  (tmp_path / hf_weights.WEIGHTS_FILE).unlink()


def teacher_that_lacks_a_tensor(tmp_path):
  test_assembly.write_pretrained(tmp_path, make_config(tmp_path))
  file = tmp_path / hf_weights.WEIGHTS_FILE
  tensors = safetensors_numpy.load_file(file)
  del tensors["model.norm.weight"]
  safetensors_numpy.save_file(tensors, file)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda tmp_path: None, "holds no parameters"),
    (stored_teacher, "bfloat16.*, expected .*float32"),
    (damaged_manifest, "is not a checkpoint"),
    (teacher_without_weights, hf_weights.WEIGHTS_FILE),
    (teacher_that_lacks_a_tensor, "model.norm.weight"),
  ],
)
def test_a_teacher_is_checked_before_anything_is_trained(tmp_path, make, words):
  make(tmp_path)
  with pytest.raises(sections.ConfigError) as refused:
    checks.checked(make_config(tmp_path), jax.devices())
  message = str(refused.value)
  assert re.search(f"^algorithm.teacher: .*{words}", message)
  assert "\n" not in message


def test_a_good_teacher_passes_and_gives_each_token_a_logprob(tmp_path):
  """The policy may draw each token of its padded vocabulary."""
  size, larger = 98, 104
  for directory, vocab_size in (("policy", larger), ("small", size)):
    test_assembly.write_pretrained(
      tmp_path / directory, make_config(tmp_path), vocab_size=vocab_size
    )
  config = make_config(tmp_path / "policy")
  checks.checked(config, jax.devices())
  config.model.name = str(tmp_path / "policy")
  checks.checked(config, jax.devices())
  config.algorithm.teacher = str(tmp_path / "small")
  with pytest.raises(sections.ConfigError) as refused:
    checks.checked(config, jax.devices())
  assert re.search(
    "^algorithm.teacher: .* 98 .*model.name .* 104", str(refused.value)
  )


def test_a_run_keeps_its_teacher(tmp_path):
  stored, wanted = make_config("/a"), make_config("/b")
  check = functools.partial(
    continued_settings.check, stored, wanted, tmp_path, has_outstanding=True
  )
  with pytest.raises(sections.ConfigError, match="teacher: /a and /b"):
    check()
  wanted.algorithm.teacher, wanted.algorithm.distill_coef = "/a", 0.5
  (difference,) = check()
  assert difference.startswith("algorithm.distill_coef: ")
  wanted.model.compute_dtype = "bfloat16"
  with pytest.raises(sections.ConfigError, match="holds a teacher of that"):
    check()


@pytest.mark.slow
@pytest.mark.nightly
def test_adapters_learn_from_a_teacher_over_two_starts(tmp_path):
  """Neither the teacher nor the base under the adapters moves."""
  config = make_config(tmp_path / "teacher")
  config.model.lora.rank = 4
  config.train.optimizer.learning_rate = 3e-2
  model = setup_lib.resolve(config, jax.devices()).model
  teacher = jax.tree.map(np.array, tiny.params(seed=5, model=model.base))
  initial_params.save(tmp_path / "teacher", teacher)
  for num_steps in (2, 6):
    config.train.num_steps = num_steps
    test_run.start(config, tmp_path / "run")
  _, *steps = test_run.lines(tmp_path / "run", "metrics")
  assert not metrics_page.unexplained(set().union(*steps))
  kl = [line["policy/teacher_kl"] for line in steps]
  assert all(line["time/teacher_s"] > 0 for line in steps)
  assert 0 < kl[-1] < kl[0]
  setup = setup_lib.resolve(config, jax.devices())
  assert setup.models[TEACHER].model == setup.model.base
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  states = [
    frozen_base.restore(
      setup, tmp_path / "run", step, trainer.abstract_state()
    )[0]
    for step in (4, 6)
  ]
  for state in states:
    jax.tree.map(
      np.testing.assert_array_equal, state.models[TEACHER].params, teacher
    )
  first, last = (state.policy for state in states)
  jax.tree.map(np.testing.assert_array_equal, first.frozen, last.frozen)
  moved = jax.tree.map(
    lambda x, y: np.abs(x - y).max(), first.trainable, last.trainable
  )
  assert max(jax.tree.leaves(moved)) > 1e-3
