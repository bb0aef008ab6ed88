"""What a caller gives to a run in place of what its configuration names."""

import dataclasses

from jaxrl_async.data import source as source_lib
from jaxrl_async.models import transformer
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.training import objectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
  """Parts that a caller may provide instead of the defaults.

  Attributes:
    source: of the prompts; None is what the config names.
    scorer: a function of an importable module that scores a completion; None
      is that of `task.reward` or `task.rewards`.
    loss: the loss to minimise; None is the loss of the config's algorithm.
    episode: decides how the turns of a trajectory follow from its prompt; None
      is that of `task.episode`.
    initial_params: float32 parameters of the policy with stacked layers, used
      instead of a warm start.
    serving: settings of a server that gives clients access to the policy during
      the run; None starts no server.
    xla_flags: the options that XLA was started with, which are recorded.
  """

  source: source_lib.Source | None = None
  scorer: service_lib.Scorer | None = None
  loss: objectives.Loss | None = None
  episode: episode_lib.Episode | None = None
  initial_params: transformer.Params | None = None
  serving: front_lib.ServeSettings | None = None
  xla_flags: str = ""
