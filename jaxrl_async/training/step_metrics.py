"""The metrics of a train step, from its groups and its device sums.

A step leaves its sums on the device, so that the next step can be dispatched
before they are fetched. `Pending.metrics` fetches them and names every metric.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jaxtyping import Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import answer_statistics
from jaxrl_async.models import configs
from jaxrl_async.planning import matmul_rate
from jaxrl_async.reporting import metrics as metrics_lib

# Sums over the loss tokens, and the names of the metrics that are their means.
_MEANS = {
  "entropy_sum": "policy/entropy",
  "clip_count": "policy/clip_frac",
  "approx_kl_sum": "policy/approx_kl",
  "behavior_kl_sum": "offpolicy/behavior_kl",
  "behavior_k1_sum": "offpolicy/behavior_kl_k1",
  "behavior_k2_sum": "offpolicy/behavior_kl_k2",
  "behavior_weight_sum": "offpolicy/behavior_weight_mean",
  "behavior_weight_capped_count": "offpolicy/behavior_weight_capped_frac",
  "left_out_count": "offpolicy/left_out_frac",
  "reference_kl_sum": "policy/reference_kl",
  "loglinear_gap_sum": "offpolicy/loglinear_gap",
  "loglinear_kl_sum": "offpolicy/loglinear_kl",
  "reuse_gap_sum": "offpolicy/reuse_gap",
  "teacher_kl_sum": "policy/teacher_kl",
  "value_loss_sum": "critic/loss",
  "value_clip_count": "critic/clip_frac",
  "value_sum": "critic/value_mean",
  "return_sum": "critic/return_mean",
}
# Outputs of an update that are not reported as a mean over all loss tokens.
_NO_MEANS = frozenset(
  [
    "num_loss_tokens",
    "num_trajectories",
    "loss",
    "grad_norm",
    "bad_updates",
    "behavior_weight_square_sum",
    "mismatch_kl_sum",
    "mismatch_count",
    "critic_grad_norm",
    "return_square_sum",
    "value_error_sum",
    "value_error_square_sum",
  ]
)


@dataclasses.dataclass(kw_only=True)
class Pending:
  """A finished train step whose metrics have not been fetched yet.

  Attributes:
    step: completed train steps before this one.
    sums: the outputs of the update, on the device, one value per minibatch and
      epoch.
    models: the architectures that the update has a backward pass through.
    peak_flops: peak matmul rate of the training slice, in FLOP/s.
  """

  step: int
  groups: list[types.RolloutGroup]
  pack_efficiency: float
  num_epochs: int
  sums: Mapping[str, jax.Array]
  learning_rate: Callable[[], Any]
  times_s: dict[str, float]
  programs_s: float
  models: Sequence[configs.ModelConfig]
  peak_flops: float

  def metrics(self) -> tuple[dict[str, Any], list[bool]]:
    """Return the step's metrics by name, and which updates were skipped."""
    sums = {k: np.asarray(v, np.float64) for k, v in self.sums.items()}
    count = max(sums["num_loss_tokens"].sum(), 1.0)

    values = {
      **of_groups(self.groups, self.step),
      **_means(sums, count),
      "policy/loss": sums["loss"].mean(),
      "policy/grad_norm": sums["grad_norm"].mean(),
      "policy/lr": float(self.learning_rate()),
      "train/mfu": self._mfu(),
      "train/pack_efficiency": self.pack_efficiency,
      "train/bad_updates": sums["bad_updates"].sum(),
      **{f"time/{name}": value for name, value in self.times_s.items()},
    }
    if "behavior_weight_square_sum" in sums:
      weights = sums["behavior_weight_sum"].sum()
      squares = sums["behavior_weight_square_sum"].sum()
      values["offpolicy/ess"] = weights**2 / max(count * squares, 1e-30)
    if "critic_grad_norm" in sums:
      values["critic/grad_norm"] = sums["critic_grad_norm"].mean()
    if "return_square_sum" in sums:  # a script's own loss may leave it out
      values["critic/explained_variance"] = explained_variance(sums, count)
    mismatch_count = sums["mismatch_count"].sum()
    if mismatch_count:
      values["offpolicy/mismatch_kl"] = (
        sums["mismatch_kl_sum"].sum() / mismatch_count
      )
    return values, [bool(x) for x in sums["bad_updates"]]

  def _mfu(self) -> float:
    """Return the model FLOPs utilisation of the step."""
    lengths = np.array(
      [
        len(t.tokens)
        for g in self.groups
        for branches in g.branches()
        for t in types.learned(branches)
      ]
    )
    flops = self.num_epochs * sum(
      matmul_rate.model_flops(model, lengths) for model in self.models
    )
    return flops / self.programs_s / self.peak_flops


def explained_variance(sums: Mapping[str, np.ndarray], count: float) -> float:
  """Return 1 - Var(R - V) / Var(R), over loss tokens; 0 if all R are equal."""

  def variance(name: str, squares: str) -> float:
    return sums[squares].sum() / count - (sums[name].sum() / count) ** 2

  of_returns = variance("return_sum", "return_square_sum")
  if of_returns <= 0:
    return 0.0
  return 1 - variance("value_error_sum", "value_error_square_sum") / of_returns


def _means(sums: Mapping[str, np.ndarray], count: float) -> dict[str, Any]:
  """Return means over the loss tokens of the loss's and diagnostic's sums.

  A sum that `_MEANS` does not name belongs to a particular loss. Its mean is
  reported as `loss/<name>`.
  """
  return {
    _MEANS.get(name, f"loss/{name.removesuffix('_sum')}"): x.sum() / count
    for name, x in sums.items()
    if name not in _NO_MEANS
  }


def of_groups(groups: list[types.RolloutGroup], step: int) -> dict[str, Any]:
  """Return metrics of a batch: rewards, completion lengths and staleness.

  They are of members, whose branches are taken together (`types.whole`). Of
  lengths and staleness, branches that only measure others are left out.
  """
  members = [x for g in groups for x in g.branches()]
  num_branches = [len(branches) for branches in members]
  groups = [g.of_members() for g in groups]
  trajectories = [types.completed(branches) for branches in members]
  return {
    **_reward_metrics(groups),
    **_completion_metrics(trajectories),
    **_staleness_metrics(trajectories, step),
    "completion/branches_mean": np.mean(num_branches),
  }


def _reward_metrics(groups: list[types.RolloutGroup]) -> dict[str, Any]:
  rewards = [np.array([t.score for t in g.trajectories]) for g in groups]
  flat = np.concatenate(rewards)
  parts = types.mean_parts(t for g in groups for t in g.trajectories)
  sources: dict[str, list[np.ndarray]] = {}
  for group, scores in zip(groups, rewards, strict=True):
    source = group.prompt.item.get("source", "")
    sources.setdefault(source, []).append(scores)
  if len(sources) == 1:  # its mean is the one of all
    sources.clear()
  return {
    "reward/mean": flat.mean(),
    "reward/std": flat.std(),
    # The computed deviation of three rewards of 0.1 is not 0.
    "reward/frac_groups_zero_std": np.mean([np.ptp(r) == 0 for r in rewards]),
    "reward/unextracted_frac": np.mean(
      [
        not (t.reward and t.reward.answer)
        for g in groups
        for t in g.trajectories
      ]
    ),
    "reward/histogram": metrics_lib.histogram_of(flat),
    **{f"reward/parts/{name}": mean for name, mean in parts.items()},
    **{
      f"reward/source/{name}": np.concatenate(scores).mean()
      for name, scores in sources.items()
    },
  }


def pass_at_k(
  groups: list[types.RolloutGroup], solved_score: float
) -> dict[str, float]:
  """Return estimates that one of k completions solves its prompt.

  Args:
    groups: with their rewards. Their mean is taken; a group of fewer than k
      completions does not count for that k.

  Returns:
    `reward/pass@k` by name, for each power of two k up to the largest group.
  """
  wholes = [g.of_members().trajectories for g in groups]
  counts = [(len(x), sum(t.score >= solved_score for t in x)) for x in wholes]
  values, k = {}, 1
  while used := [(n, c) for n, c in counts if n >= k]:
    estimates = [answer_statistics.pass_at_k(n, c, k) for n, c in used]
    values[f"reward/pass@{k}"] = float(np.mean(estimates))
    k *= 2
  return values


def _completion_metrics(
  trajectories: list[types.Trajectory],
) -> dict[str, Any]:
  lengths = np.array([t.num_completion_tokens for t in trajectories])
  truncated = [
    t.finish_reason is types.FinishReason.LENGTH for t in trajectories
  ]
  return {
    "completion/tokens_mean": lengths.mean(),
    "completion/tokens_max": lengths.max(),
    "completion/tokens_histogram": metrics_lib.histogram_of(lengths),
    "completion/frac_truncated": np.mean(truncated),
  }


def _staleness_metrics(
  trajectories: list[types.Trajectory], step: int
) -> dict[str, Any]:
  # A batch may have 10^8 tokens, in few runs of one version each.
  runs = [_version_runs(t.policy_versions) for t in trajectories]
  staleness = step - np.concatenate([versions for versions, _ in runs])
  counts = np.concatenate([lengths for _, lengths in runs])
  num_versions = [len(set(versions.tolist())) for versions, _ in runs]
  histogram = np.zeros(staleness.max() + 1, np.int64)
  np.add.at(histogram, staleness, counts)
  return {
    "staleness/mean": (staleness * counts).sum() / counts.sum(),
    "staleness/max": int(staleness.max()),
    "staleness/histogram": histogram.tolist(),
    "staleness/versions_per_trajectory": np.mean(num_versions),
    "staleness/versions_histogram": np.bincount(num_versions).tolist(),
  }


def _version_runs(
  versions: Int[np.ndarray, "T"],
) -> tuple[Int[np.ndarray, "R"], Int[np.ndarray, "R"]]:
  """Return versions of generated tokens, not -1, and lengths, run by run."""
  edges = np.flatnonzero(versions[1:] != versions[:-1]) + 1
  begins = np.concatenate([[0], edges])
  lengths = np.concatenate([edges, [len(versions)]]) - begins
  found = versions[begins]
  return found[found >= 0], lengths[found >= 0]
