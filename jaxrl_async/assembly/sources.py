"""The source of a task: one dataset, or a mixture of several."""

from jaxrl_async.config import sections
from jaxrl_async.data import mixture as mixture_lib
from jaxrl_async.data import rendering
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import task_sources
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.data.tables import uri as uri_lib


def of_task(task: sections.TaskSection, seed: int) -> source_lib.Source:
  """Return the source of a task.

  Args:
    task: the section, which `task_sources.check` has passed.
    seed: of the run.

  Raises:
    ConfigError: a dataset cannot be used as it is named.
  """
  members = task_sources.members_of(task)
  if not members:
    return _of_dataset(task, seed)
  return mixture_lib.Mixture(
    members={
      name: _of_dataset(member, seed, name) for name, member in members.items()
    },
    weights={name: task_sources.weight_of(task, name) for name in members},
  )


def _of_dataset(
  task: sections.TaskSection, seed: int, label: str = ""
) -> rows_lib.Rows | gym.ReasoningGym:
  setting = f"task.sources.{label}" if label else "task"
  uri = uri_lib.parse(f"{setting}.dataset", task.dataset)
  if not uri.has_rows:
    return gym.ReasoningGym(
      name=uri.place, params=task.params.to_dict(), seed=seed
    )
  return rows_lib.Rows(
    dataset=task.dataset,
    eval_dataset=task.eval_dataset,
    fields=task.fields.to_dict(),
    in_template=()
    if task.fields.get("messages")
    else rendering.named_fields(task.template),
    eval_percent=task.eval_percent,
    skips_bad_rows=task.on_bad_row is sections.OnBadRow.SKIP,
    seed=seed,
    label=label,
    setting=setting,
  )
