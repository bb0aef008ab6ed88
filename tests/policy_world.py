"""Packed trajectories on both sides of every bound, and their losses."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np

from jaxrl_async.algorithms import corrections
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.training import objectives
from jaxrl_async.training import packing

B, T = 2, 16
CLIP_LOW, CLIP_HIGH, FLOOR, CAP, DUAL = 0.2, 0.25, 0.5, 2.5, 3.0
SECOND_MOMENT, SEQUENCE_KL, CONSTANT = 0.35, 0.3, 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
  """A trajectory: where it lies, and the ratios of its loss tokens."""

  row: int
  start: int
  length: int
  tokens: tuple[int, ...]  # positions of loss tokens in the trajectory
  advantage: float
  ratios: tuple[float, ...]  # theta / proximal
  weights: tuple[float, ...]  # proximal / behavior

  @property
  def columns(self):
    return [self.start + i for i in self.tokens]


# Means above and below every bound, with advantages of both signs; and a
# trajectory that has no loss tokens.
MEMBERS = (
  Member(
    row=0,
    start=0,
    length=7,
    tokens=(2, 3, 4, 5, 6),
    advantage=1.5,
    ratios=(1.5, 1.4, 0.9, 1.6, 1.3),
    weights=(3.0, 2.8, 2.6, 2.9, 2.7),
  ),
  Member(
    row=0,
    start=7,
    length=4,
    tokens=(1, 2, 3),
    advantage=-1.2,
    ratios=(0.6, 0.75, 0.5),
    weights=(0.4, 0.3, 0.6),
  ),
  Member(
    row=0,
    start=11,
    length=2,
    tokens=(),
    advantage=0.3,
    ratios=(),
    weights=(),
  ),
  Member(
    row=1,
    start=0,
    length=10,
    tokens=(3, 4, 5, 6, 8, 9),
    advantage=0.8,
    ratios=(1.05, 0.7, 1.3, 0.98, 1.1, 0.9),
    weights=(1.2, 0.8, 3.5, 1.1, 0.3, 1.0),
  ),
  Member(
    row=1,
    start=10,
    length=3,
    tokens=(1, 2),
    advantage=-0.7,
    ratios=(1.4, 4.5),
    weights=(1.5, 0.9),
  ),
  Member(
    row=1,
    start=13,
    length=3,
    tokens=(1, 2),
    advantage=0.5,
    ratios=(0.7, 0.9),
    weights=(0.6, 0.8),
  ),
)

Level, Mode = sections.BehaviorWeightLevel, sections.BehaviorWeightCapMode
Aggregation = sections.Aggregation
CASES = {
  "decoupled ppo": {},
  "icepop": {"behavior_weight_floor": FLOOR},
  "two-sided truncation": {
    "behavior_weight_floor": FLOOR,
    "behavior_weight_cap_mode": Mode.TRUNCATE,
    "aggregation": Aggregation.SEQUENCE_SUM,
  },
  "dual clip": {
    "dual_clip": DUAL,
    "aggregation": Aggregation.SEQUENCE_MEAN,
  },
  "coupled ppo": {
    "loss": "coupled_ppo",
    "behavior_weight_level": Level.NONE,
    "dual_clip": DUAL,
    "aggregation": Aggregation.SEQUENCE_SUM,
    "aggregation_tokens": CONSTANT,
  },
  "gspo": {
    "loss": "gspo",
    "behavior_weight_level": Level.NONE,
    "aggregation": Aggregation.SEQUENCE_MEAN,
  },
  "gspo with weights": {"loss": "gspo", "behavior_weight_floor": FLOOR},
  "cispo": {"loss": "cispo"},
  "sapo": {"loss": "sapo", "aggregation": Aggregation.SEQUENCE_MEAN},
  "reinforce": {
    "loss": "reinforce",
    "proximal": sections.ProximalMode.REUSE,
    "behavior_weight_cap_mode": Mode.TRUNCATE,
  },
  "means of sequences": {
    "behavior_weight_level": Level.SEQUENCE_MEAN,
    "behavior_weight_floor": FLOOR,
  },
  "products of sequences": {
    "behavior_weight_level": Level.SEQUENCE_PRODUCT,
    "behavior_weight_floor": FLOOR,
    "behavior_weight_cap_mode": Mode.TRUNCATE,
  },
  "sequences far off": {"sequence_kl_bound": SEQUENCE_KL},
  "m2po": {
    "second_moment_bound": SECOND_MOMENT,
    "behavior_weight_cap": 1e6,
  },
  "penalties": {"kl_coef": 0.3, "entropy_coef": 0.2},
  "everything": {
    "loss": "gspo",
    "behavior_weight_level": Level.SEQUENCE_MEAN,
    "sequence_kl_bound": SEQUENCE_KL,
    "aggregation": Aggregation.SEQUENCE_MEAN,
    "kl_coef": 0.3,
    "kl_estimator": sections.KlEstimator.K2,
    "entropy_coef": 0.2,
  },
}


# The others differ less from one of these.
QUICK = (
  *("decoupled ppo", "icepop", "dual clip", "gspo", "cispo", "sapo"),
  *("products of sequences", "everything"),
)


def section(case):
  """The settings of a case, with the bounds that its loss reads."""
  made = sections.AlgorithmSection(**CASES[case])
  unread = fields_lib.unread(sections.Config(algorithm=made))
  for name, value in (
    ("clip_low", CLIP_LOW),
    ("clip_high", CLIP_HIGH),
    ("behavior_weight_cap", CAP),
  ):
    if name not in CASES[case] and f"algorithm.{name}" not in unread:
      setattr(made, name, value)
  return made


def arrays():
  """The [B, T] arrays of the trajectories by name, of float64 and bool."""
  rng = np.random.default_rng(0)
  proximal = np.linspace(-2.0, -0.1, B * T).reshape(B, T)
  made = {
    "logprobs": proximal.copy(),
    "proximal": proximal,
    "behavior": proximal.copy(),
    "reference": proximal + rng.normal(0, 0.4, (B, T)),
    "entropy": rng.uniform(0.5, 2.0, (B, T)),
    "advantages": np.zeros((B, T)),
    "mask": np.zeros((B, T), bool),
    "segment_ids": np.zeros((B, T), np.int32),
    "segment_start": np.zeros((B, T), np.int32),
  }
  for member in MEMBERS:
    own = (member.row, slice(member.start, member.start + member.length))
    made["segment_ids"][own] = made["segment_ids"][member.row].max() + 1
    made["segment_start"][own] = member.start
    made["advantages"][own] = member.advantage
    tokens = (member.row, member.columns)
    made["mask"][tokens] = True
    made["logprobs"][tokens] += np.log(member.ratios)
    made["behavior"][tokens] -= np.log(member.weights)
  return made


def microbatch(made, totals, within=None):
  """The arrays as the update passes them to a loss.

  Args:
    made: as of `arrays`; the floats become float32.
    totals: of the minibatch.
    within: the tokens that M2PO keeps; None is what `corrections` finds.
  """
  given = {
    name: jnp.asarray(x, jnp.float32) if x.dtype.kind == "f" else jnp.asarray(x)
    for name, x in made.items()
  }
  mask = given["mask"]
  if within is None:
    within = corrections.within_second_moment(
      given["proximal"],
      given["behavior"],
      given["advantages"],
      mask,
      bound=SECOND_MOMENT,
    )
  zeros = jnp.zeros((B, T), jnp.int32)
  batch = packing.PackedBatch(
    tokens=zeros,
    segment_ids=given["segment_ids"],
    positions=zeros,
    segment_start=given["segment_start"],
    loss_mask=mask,
    advantages=given["advantages"],
    behavior_logprobs=given["behavior"],
    policy_versions=zeros,
    fields={
      objectives.PROXIMAL: given["proximal"],
      objectives.REFERENCE: given["reference"],
      objectives.WITHIN_SECOND_MOMENT: jnp.asarray(within, jnp.float32),
    },
  )
  return objectives.Microbatch(
    logprobs=given["logprobs"],
    entropy=given["entropy"],
    values=None,
    batch=batch,
    totals=totals,
    policy_version=jnp.int32(0),
    minibatch=jnp.int32(0),
  )


@functools.cache
def program(case):
  """Loss, sums, and gradients of logprobs and entropies, compiled once."""
  config = sections.Config(algorithm=section(case))
  config.rollout.max_completion_tokens = CONSTANT
  loss = algorithm_lib.policy_loss(config)

  def of(differentiated, batch, totals):
    logprobs, entropy = differentiated
    return loss(
      objectives.Microbatch(
        logprobs=logprobs,
        entropy=entropy,
        values=None,
        batch=batch,
        totals=totals,
        policy_version=jnp.int32(0),
        minibatch=jnp.int32(0),
      )
    )

  return jax.jit(jax.value_and_grad(of, has_aux=True))


def evaluated(case, micro):
  """Loss, sums, and the gradients of logprobs and of entropies."""
  (loss, sums), gradients = program(case)(
    (micro.logprobs, micro.entropy), micro.batch, micro.totals
  )
  return loss, sums, gradients


def totals(made):
  """Those of a minibatch of one microbatch, by `objectives`."""
  micro = microbatch(made, {}, np.zeros((B, T)))
  batch = jax.tree.map(lambda x: x[None], micro.batch)
  return objectives.minibatch_totals(batch)
