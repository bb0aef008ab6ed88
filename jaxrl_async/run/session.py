"""What a caller, and a start of the program, add to a run's configuration."""

from collections.abc import Callable
import dataclasses
import pathlib

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import world as world_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import shutdown as shutdown_lib
from jaxrl_async.serving import front as front_lib
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import objectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extensions:
  """Parts that a caller may provide instead of the defaults.

  Attributes:
    source: of the prompts; None is what the config names.
    scorer: a function of an importable module that scores a completion; None
      is that of `task.reward` or `task.rewards`.
    loss: the loss to minimise; None is the loss of the config's algorithm.
    episode: decides how the turns of a trajectory follow from its prompt.
    initial_params: float32 parameters of the policy with stacked layers, used
      instead of a warm start.
    serving: settings of a server that gives clients access to the policy during
      the run; None starts no server.
    xla_flags: the options that XLA was started with, which are recorded.
  """

  source: source_lib.Source | None = None
  scorer: service_lib.Scorer | None = None
  loss: objectives.Loss | None = None
  episode: episode_lib.Episode = episode_lib.single_turn
  initial_params: transformer.Params | None = None
  serving: front_lib.ServeSettings | None = None
  xla_flags: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
  """What belongs to one start of the program rather than to the run.

  Attributes:
    workdir: of the run.
    progress: shows the progress and messages to the user.
    stop: the stop request, which a signal sets.
    claim: ensures that no other process uses the workdir.
    profile_steps: train steps to write traces of.
    seconds: the clock of waits that end with a stall or a timeout. It stands
      still while a program is compiled.
    world: the processes that train together. This one leads them.
    shutdown: starts threads, and closes everything at the end.
  """

  workdir: pathlib.Path
  progress: progress_lib.Progress
  stop: supervisor_lib.StopRequest
  claim: workdir_lib.Claim
  seconds: Callable[[], float]
  shutdown: shutdown_lib.Shutdown
  profile_steps: tuple[int, ...] = ()
  world: world_lib.World = dataclasses.field(default_factory=world_lib.alone)
