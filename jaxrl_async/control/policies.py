"""Policies of observations: networks with an actor's and a critic's head.

Weights begin orthogonal, biases at zero, and the actor's head small, so that
the first policy is nearly uniform (arXiv:2005.12729, arXiv:2006.05990).
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Num
import numpy as np

from jaxrl_async.control import actor as actor_lib
from jaxrl_async.weights import weight_transfer

Params = dict[str, Any]
# Features, kernel and stride of each convolution.
_CONVOLUTIONS = (32, 8, 4), (64, 4, 2), (64, 3, 1)
_SMALLEST_SIDE = 36  # of which one pixel is left
_HIDDEN_SCALE, _ACTOR_SCALE, _CRITIC_SCALE = math.sqrt(2), 0.01, 1.0
_LOG_2_PI = math.log(2 * math.pi)


class Outputs(NamedTuple):
  """What the network says of some observations.

  Attributes:
    head: logits of discrete actions, or the mean of a vector.
    log_std: of the entries of a vector; of no use for discrete actions.
    values: what the critic predicts to follow.
  """

  head: Float[Array, "n A"]
  log_std: Float[Array, "A"]
  values: Float[Array, "n"]


def _linear(layer: Params, x: Float[Array, "n I"]) -> Float[Array, "n O"]:
  return x @ layer["kernel"] + layer["bias"][None]


def _mlp(trunk: Params, observations: Num[Array, "n *shape"]) -> Array:
  x = observations.reshape(len(observations), -1).astype(jnp.float32)
  return jnp.tanh(
    _linear(trunk["second"], jnp.tanh(_linear(trunk["first"], x)))
  )


def _cnn(trunk: Params, images: Num[Array, "n height width channels"]) -> Array:
  x = images.astype(jnp.float32) / 255
  for i, (_, _, stride) in enumerate(_CONVOLUTIONS):
    layer = trunk[f"convolution_{i}"]
    x = jax.lax.conv_general_dilated(
      x,
      layer["kernel"],
      (stride, stride),
      "VALID",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = jax.nn.relu(x + layer["bias"][None, None, None])
  return jax.nn.relu(_linear(trunk["last"], x.reshape(len(x), -1)))


class Network:
  """The functions of an architecture; its parameters are a dict of arrays.

  For vectors, these are two layers of tanh under each head. Images, which are
  [height, width, channels] and have sides of 36 at least, go through the
  convolutions of DQN (Nature 2015), which both heads share.
  """

  def __init__(self, spaces: actor_lib.Spaces, hidden_size: int):
    self._spaces, self._size = spaces, hidden_size
    *sides, _ = spaces.observation_shape or (0,)
    self._is_cnn = len(sides) == 2 and min(sides) >= _SMALLEST_SIDE

  def init_params(self, key: jax.Array) -> Params:
    """Return fresh parameters."""
    spaces, size = self._spaces, self._size
    num_outputs = spaces.num_actions or spaces.action_shape[0]
    keys = map(jax.random.fold_in, itertools.repeat(key), itertools.count())

    def layer(scale: float, *shape: int) -> Params:
      init = jax.nn.initializers.orthogonal(scale)
      return {"kernel": init(next(keys), shape), "bias": jnp.zeros(shape[-1])}

    def mlp() -> Params:
      inputs = math.prod(spaces.observation_shape)
      first = layer(_HIDDEN_SCALE, inputs, size)
      return {"first": first, "second": layer(_HIDDEN_SCALE, size, size)}

    def cnn() -> Params:
      *sides, channels = spaces.observation_shape
      trunk = {}
      for i, (features, kernel, stride) in enumerate(_CONVOLUTIONS):
        shape = kernel, kernel, channels, features
        trunk[f"convolution_{i}"] = layer(_HIDDEN_SCALE, *shape)
        channels = features
        sides = [(side - kernel) // stride + 1 for side in sides]
      inputs = channels * math.prod(sides)
      return {**trunk, "last": layer(_HIDDEN_SCALE, inputs, size)}

    trunks = (
      {"trunk": cnn()}
      if self._is_cnn
      else {"trunk": mlp(), "critic_trunk": mlp()}
    )
    return {
      **trunks,
      "actor": layer(_ACTOR_SCALE, size, num_outputs),
      "critic": layer(_CRITIC_SCALE, size, 1),
      "log_std": jnp.zeros(num_outputs),
    }

  def outputs(
    self, params: Params, observations: Num[Array, "n *shape"]
  ) -> Outputs:
    """Return what the network says of observations."""
    trunk = _cnn if self._is_cnn else _mlp
    hidden = of_critic = trunk(params["trunk"], observations)
    if not self._is_cnn:
      of_critic = trunk(params["critic_trunk"], observations)
    values = _linear(params["critic"], of_critic)[:, 0]
    return Outputs(_linear(params["actor"], hidden), params["log_std"], values)

  def logprobs(
    self, outputs: Outputs, actions: Num[Array, "n *action"]
  ) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    r"""Return the logprobs of actions, and the entropy of each distribution.

    vector   log p = -sum_i (((a_i - mu_i) / s_i)^2 + 2 log s_i + log 2 pi) / 2
             H     = sum_i (log s_i + (1 + log 2 pi) / 2)
    """
    if self._spaces.num_actions:
      all_logprobs = jax.nn.log_softmax(outputs.head)
      taken = jnp.take_along_axis(all_logprobs, actions[:, None], axis=-1)
      entropy = -(jnp.exp(all_logprobs) * all_logprobs).sum(-1)
      return taken[:, 0], entropy
    log_std = jnp.broadcast_to(outputs.log_std, outputs.head.shape)
    distance = (actions - outputs.head) / jnp.exp(log_std)
    logprobs = -(distance**2 + 2 * log_std + _LOG_2_PI).sum(-1) / 2
    return logprobs, (log_std + (1 + _LOG_2_PI) / 2).sum(-1)

  def sample(self, outputs: Outputs, key: jax.Array) -> Num[Array, "n *action"]:
    """Return an action for each observation."""
    if self._spaces.num_actions:
      return jax.random.categorical(key, outputs.head).astype(jnp.int32)
    noise = jax.random.normal(key, outputs.head.shape)
    return outputs.head + jnp.exp(outputs.log_std)[None] * noise


class Policy:
  """What inference acts with: a network with the newest weights of a channel.

  Threads: one at a time adopts, any number act.
  """

  def __init__(
    self,
    network: Network,
    channel: weight_transfer.WeightChannel,
    key: jax.Array,
  ):
    """Take the first version, which has to be published by then."""
    self._channel, self._key = channel, key
    self._newest: tuple[Params, int] = {}, -1
    self._calls = itertools.count()
    self.adopt()

    @jax.jit
    def act(
      params: Params, observations: Any, key: jax.Array, call: Any
    ) -> tuple[Array, Array]:
      outputs = network.outputs(params, observations)
      actions = network.sample(outputs, jax.random.fold_in(key, call))
      return actions, network.logprobs(outputs, actions)[0]

    self._act = act

  def adopt(self) -> int:
    """Take the newest version of the weights, and return its number."""
    self._newest = self._channel.adopt(self._newest[1]) or self._newest
    return self._newest[1]

  def act(
    self, observations: Num[np.ndarray, "n *observation"]
  ) -> tuple[Num[np.ndarray, "n *action"], Float[np.ndarray, "n"], int]:
    """Return actions, their logprobs, and the version that drew them.

    The batch is padded to a power of two, so that few programs are compiled.
    """
    params, version = self._newest
    count = len(observations)
    shape = 1 << (count - 1).bit_length(), *observations.shape[1:]
    padded = np.zeros(shape, observations.dtype)
    padded[:count] = observations
    call = np.uint32(next(self._calls))
    found = self._act(params, padded, self._key, call)
    actions, logprobs = (np.asarray(x)[:count] for x in found)
    return actions, logprobs, version
