r"""Losses of pairs of completions, of their scores, and of labelled steps.

Everything is float32. A preference says that of two completions of one prompt,
the chosen one y_c is better than the rejected one y_r. All functions are
elementwise: they take arrays of any shape and return the loss of each entry.
Sums over the tokens of a completion, and masks, are the caller's.
"""

import jax
from jaxtyping import Array, Float


def dpo_loss(
  margins: Float[Array, "*pairs"], *, beta: float, label_smoothing: float
) -> Float[Array, "*pairs"]:
  r"""Return DPO's loss of each pair, arXiv:2305.18290 eq. 7.

  L = -(1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h)
  h = log(pi(y_c) / pi_ref(y_c)) - log(pi(y_r) / pi_ref(y_r))

  eps = 0 is the equation of the paper. With eps > 0 the loss assumes that a
  share eps of the pairs is labelled the wrong way round, which Mitchell calls
  conservative DPO (https://ericmitchell.ai/cdpo.pdf). Its minimum is then at
  beta h = log((1 - eps) / eps).

  With log-ratios that are divided by the lengths of their completions, this is
  the length-normalised DPO of Tulu 3, arXiv:2411.15124.

  Args:
    beta: strength of the tie to the reference. A smaller one lets the policy
      move further.
  """
  scaled = beta * margins
  return -(
    (1 - label_smoothing) * jax.nn.log_sigmoid(scaled)
    + label_smoothing * jax.nn.log_sigmoid(-scaled)
  )


def ipo_loss(
  margins: Float[Array, "*pairs"], *, beta: float
) -> Float[Array, "*pairs"]:
  r"""Return IPO's loss of each pair, arXiv:2310.12036 eq. 17.

  L = (h - 1 / (2 beta))^2

  h is that of `dpo_loss`, and beta the paper's tau. The loss asks for one
  margin, and a larger one is an error too, so that pairs that all annotators
  agree on do not push the policy away from the reference without end.
  """
  return (margins - 1 / (2 * beta)) ** 2


def bradley_terry_loss(
  margins: Float[Array, "*pairs"],
) -> Float[Array, "*pairs"]:
  r"""Return the loss of a reward model for each pair, arXiv:2203.02155 eq. 1.

  L = -log sigmoid(r(y_c) - r(y_r))

  By the model of Bradley and Terry, sigmoid of the difference of two scores is
  the probability that the first completion is preferred. The scores are
  determined up to a constant for each prompt.
  """
  return -jax.nn.log_sigmoid(margins)


def step_loss(
  logits: Float[Array, "*steps"], labels: Float[Array, "*steps"]
) -> Float[Array, "*steps"]:
  r"""Return the loss of a process reward model for each step of a solution.

  L = -y log sigmoid(r) - (1 - y) log sigmoid(-r)

  r is the logit at the last token of a step, and y is 1 if the step is right.

  The model of arXiv:2305.20050, section 2.6, predicts after the last token of
  each step whether the step is right. There it writes one of several words.
  Here it has one output, whose sigmoid is the probability that the step is
  right, as in Math-Shepherd, arXiv:2312.08935.
  """
  return -(
    labels * jax.nn.log_sigmoid(logits)
    + (1 - labels) * jax.nn.log_sigmoid(-logits)
  )
