r"""The interface for scripts: load a policy, generate, score, train, replay.

    import jaxrl_async

    policy = jaxrl_async.load("/tmp/quickstart")
    for completion in policy.generate("3+4\n", n=4):
      print(completion.text)

It is a front for the parts that the launch scripts use;
docs/reference/python.md shows it.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.policies import policy as policy_lib
from jaxrl_async.policies import stored_policy
from jaxrl_async.replay import replay_settings
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import script
from jaxrl_async.training import objectives

Rows = Sequence[Mapping[str, Any]]


def load(
  path: str | pathlib.Path, *, step: int | None = None, num_slots: int = 0
) -> policy_lib.Policy:
  """Load a policy, to generate with it and to compute logprobs.

  Args:
    path: a run's workdir, WORKDIR/params of launch/sft.py, a directory in
      Hugging Face's format, or hf:ORG/NAME of its hub.
    step: train step of a run's checkpoint; None is the newest.
    num_slots: sequences that are generated side by side; 0 takes the run's
      number.

  Raises:
    ConfigError: there is no policy, or it cannot be used. The message is one
      line.
  """
  stored = stored_policy.find(path, step)
  return policy_lib.load(stored, jax.devices(), num_slots=num_slots)


def train(
  config: sections.Config | str | pathlib.Path,
  workdir: str | pathlib.Path,
  *,
  reward: service_lib.Scorer | None = None,
  dataset: source_lib.Source | Rows | str | None = None,
  eval_dataset: Rows | str | None = None,
  settings: Mapping[str, Any] | None = None,
  loss: objectives.Loss | None = None,
  episode: episode_lib.Episode | None = None,
) -> dict[str, Any]:
  """Start or continue a training run, and return its summary.

  The call belongs under `if __name__ == "__main__":` if the reward is a
  function of the same script, because other processes import that.

  Args:
    config: of the run, or the path of a config file; a variant may follow after
      a colon. It is not changed.
    workdir: directory of this run alone. A run in it is continued.
    reward: a function of (item, completion); None is that of the config.
    dataset: rows with the columns of `task.fields`, which are stored in the
      workdir; a source; or a dataset as `task.dataset` names it. None is the
      config's.
    eval_dataset: held-out rows, or a dataset; None holds out some of the rows
      of `dataset`.
    settings: values of fields by path: {"train.num_steps": 100}.
    loss: the loss to minimise; None is that of the config.
    episode: decides how the turns of a trajectory follow from its prompt; None
      is that of the config.

  Returns:
    The summary of the run, as in summary.json.

  Raises:
    ConfigError: something cannot be used. The message is one line.
    Interrupted: the run was asked to stop. The same call continues it.
    RunError: the run cannot go on in this process. The message says why, and
      `status` is the exit status that asks a launcher to start again.
  """
  return script.train(
    config,
    pathlib.Path(workdir),
    reward=reward,
    dataset=dataset,
    eval_dataset=eval_dataset,
    settings=settings or {},
    loss=loss,
    episode=episode,
  )


def replay(
  workdir: str | pathlib.Path,
  *,
  until: int | None = None,
  from_step: int = 0,
  dataset: source_lib.Source | None = None,
  loss: objectives.Loss | None = None,
  episode: episode_lib.Episode | None = None,
) -> dict[str, Any]:
  """Replay a run from its timing record, and compare it.

  docs/how-to/replay.md says what can be replayed.

  This is launch/replay.py for runs that were given a source, a loss or an
  episode, which have to be given again. Bits can only be equal if XLA has the
  options that it had in the run.

  Args:
    workdir: of the run. Nothing is written to it.
    until: train steps that are completed at the end; None is all.
    from_step: train step of the checkpoint to begin with.
    dataset: the source that the run was given.
    loss: the loss that it was given.
    episode: the episode that it was given.

  Returns:
    What was replayed and compared, as the last line of launch/replay.py.

  Raises:
    ConfigError: the run cannot be replayed, or not in this way.
    replay_differences.Difference: something came out differently.
    Interrupted: the replay was asked to stop.
  """
  wanted = replay_settings.Wanted(until=until, from_step=from_step)
  return script.replay(
    pathlib.Path(workdir), wanted, source=dataset, loss=loss, episode=episode
  )
