r"""Rewards of steps, from what a reward model says of them.

A policy that is paid the scores of its steps learns to write more steps. Clip
and delta of arXiv:2410.15115 take that gain away. s_k is the score of step k of
K, in [0, 1], eta the threshold, and r_k the reward of the step:

  process      r_k = s_k
  clip         r_k = min(s_k - eta, 0)
  delta        r_k = s_k - s_k+1,  r_K-1 = s_K-1,  r_K = 0
  clip_delta   delta of min(s_k - eta, 0)

With clip no further step gains anything. With delta the sum of r_j over the
steps j >= k is s_k, for all k < K, so that a step is paid for itself and not
for those after it. The last step is left to the reward of the whole solution.
Neither is safe alone. With delta, all steps but the last have a positive
return, so that a policy gains by answering later. With clip and a threshold
above most scores, every step costs, so that it gains by answering at once.
"""

from jaxtyping import Float
import numpy as np

SHAPES = ("process", "clip", "delta", "clip_delta")
CLIPPED = ("clip", "clip_delta")  # these have a threshold


def shaped(
  scores: Float[np.ndarray, "K"], *, shape: str, threshold: float = 0.0
) -> Float[np.ndarray, "K"]:
  """Return the rewards of the steps of one solution.

  Args:
    scores: of the steps, in their order.
    shape: one of `SHAPES`.
    threshold: eta; only clip and clip_delta read it.

  Raises:
    ValueError: there is no such shape.
  """
  if shape not in SHAPES:
    raise ValueError(f"there is no shape {shape!r}; use {', '.join(SHAPES)}")
  if shape in CLIPPED:
    scores = np.minimum(scores - threshold, 0)
  if shape in ("process", "clip") or not len(scores):
    return scores
  return np.append(-np.diff(scores[:-1], append=0.0), 0.0)
