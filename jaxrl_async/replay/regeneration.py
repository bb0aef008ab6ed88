"""The groups of a replay, generated again version by version.

A train step of the record is opened when the first version comes that wrote
a part of it, and forgotten when it has been trained. So there are never more
trajectories than the run itself had at that time. `open` is called for each
train step before the first version that wrote a part of it, `write` for each
version, while the trainer has its weights, and `close` for each train step
after that of its own version.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import replay_differences
from jaxrl_async.replay import replay_prompts
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import rewriting as rewriting_lib
from jaxrl_async.training import trainer as trainer_lib


class Regeneration:
  """Groups that are generated again.

  Attributes:
    num_generated: tokens of the groups that were closed, which were generated.
    num_restored: tokens of these groups that a checkpoint held.
  """

  def __init__(
    self,
    setup: setup_lib.Setup,
    trainer: trainer_lib.Trainer,
    prompts: replay_prompts.RecordedPrompts,
    begun: Sequence[types.RolloutGroup],
    environment: environment_lib.Environment,
  ):
    """Build an engine of the run; groups that `begun` holds go on."""
    self.num_generated = self.num_restored = 0
    self._trainer = trainer
    self._prompts = prompts
    self._begun = {group.index: group for group in begun}
    self._environment = environment
    # A loss decides nothing about how turns are generated.
    self._settings = assembly.coordinator_settings(
      setup.config, has_own_loss=False
    )
    self._engine = assembly.make_engine(setup)
    if trainer.has_base:
      self._engine.hold_base(trainer.published_base())
    self._rewriting = rewriting_lib.Rewriting(
      assembly.make_scheduler(setup, self._engine, metrics_lib.BusyClock()),
      setup.tokenizer,
    )
    self._open: dict[int, list[_Group]] = {}  # by train step

  def open(self, step: recorded_timing.RecordedStep) -> None:
    """Prepare to generate the groups of a train step.

    Raises:
      ConfigError: a group cannot go on from the checkpoint, or its prompt is
        gone.
      Difference: a group cannot be generated as the record says.
    """
    self._open[step.step] = [self._group(step.step, g) for g in step.groups]

  def _group(
    self, step: int, recorded: recorded_timing.RecordedGroup
  ) -> "_Group":
    begun = self._begun.pop(recorded.index, None)
    prompt = self._prompts.take(recorded) if begun is None else begun.prompt
    of_member: Mapping[int, list[types.Trajectory]] = {}
    if begun is not None:
      of_member = {b[0].member: b for b in begun.branches()}
    members, restored = [], []
    for branches in types.by_member(recorded.trajectories):
      member = branches[0].member
      restored += of_member.get(member, [])
      try:
        members.append(
          rewriting_lib.Rewritten(
            recorded.admission,
            prompt,
            [one.cache_builds for one in branches],
            self._environment,
            self._settings,
            begun=of_member.get(member, []),
            events=branches[0].events,
            member=member,
          )
        )
      except (rewriting_lib.RewritingError, episode_lib.EpisodeError) as error:
        if begun is None:
          raise replay_differences.Difference(
            f"train step {step}: {error}"
          ) from error
        raise sections.ConfigError(
          f"from_step: {error}; only checkpoints of a run with"
          " run.exact_resume=True are a beginning"
        ) from error
    self._rewriting.add(members)
    return _Group(
      prompt=prompt, members=members, num_restored=_num_tokens(restored)
    )

  def write(self, version: int) -> Iterator[int]:
    """Generate all that a version has generated, and yield tokens so far.

    The trainer has the weights of the version, and all steps are open of which
    it has generated a part.

    Raises:
      Difference: it does not fit the record.
    """
    weights = self._trainer.published()
    try:
      yield from self._rewriting.write(
        self._engine.load_params(weights, version), version
      )
    except (rewriting_lib.RewritingError, episode_lib.EpisodeError) as error:
      raise replay_differences.Difference(
        f"version {version}: {error}"
      ) from error

  def close(
    self, step: recorded_timing.RecordedStep
  ) -> list[types.RolloutGroup]:
    """Return the groups of a train step, with the recorded rewards."""
    groups = []
    for one, recorded in zip(
      self._open.pop(step.step), step.groups, strict=True
    ):
      rewards = {t.member: t.reward for t in recorded.trajectories}
      group = types.RolloutGroup(
        admission=recorded.admission,
        prompt=one.prompt,
        trajectories=[
          dataclasses.replace(branch, reward=rewards.get(branch.member))
          for member in one.members
          for branch in member.branches
        ],
      )
      self.num_restored += one.num_restored
      self.num_generated += _num_tokens(group.trajectories) - one.num_restored
      groups.append(group)
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
  """A group that is being generated.

  Attributes:
    num_restored: tokens that a checkpoint held of it.
  """

  prompt: types.Prompt
  members: list[rewriting_lib.Rewritten]
  num_restored: int


def _num_tokens(trajectories: Iterable[types.Trajectory]) -> int:
  """Return the number of tokens that the policy generated in all of them."""
  return sum(one.num_completion_tokens for one in trajectories)
