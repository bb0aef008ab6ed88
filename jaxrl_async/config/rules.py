"""The rules between settings: what has to hold of several at once.

A rule is a tuple: whether it holds, the field that is named, and what to say of
it if not. They are made one by one, so that a rule may rely on those before it.
No rule is about a setting that nothing reads. What one setting may be is stated
with it (`setting`). What needs data, files or devices is checked where it is
used.
"""

from collections.abc import Iterator
import importlib.util
import re
import string
from typing import Any

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib

# Whether it holds, the field, and the message.
Rule = tuple[bool, str, str]
# The sections with an optimizer.
TRAINED = ("warm_start", "preference", "train", "critic")
# Losses whose ratio has the proximal policy as its anchor.
_ANCHORED = ("ppo", "gspo", "cispo", "sapo")
# The evaluations of every run, whose names no set of `eval.sets` may have.
_EVALUATIONS = ("held_out", "greedy")
# A host and a port; the host may be an IPv6 address in brackets.
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


def check(config: sections.Config) -> None:
  """Check settings against each other.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  made = fields_lib.settled(config)
  for of in (
    *(
      _lengths,
      _pages,
      _prompts,
      _episode,
      _rewards,
      _adapters,
      _beside,
      _cluster,
    ),
    *(_updates, _loss, _advantage, _reference, _equal_rewards, _bound, _rates),
    _schedules,
  ):
    _require(of(made))


def check_preference(config: sections.Config) -> None:
  """Check what a config of training on preferences needs in addition.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  _require(_preference(fields_lib.settled(config)))


def _require(rules: Iterator[Rule]) -> None:
  for holds, path, message in rules:
    sections.require(holds, path, message)


def _lengths(config: sections.Config) -> Iterator[Rule]:
  rollout, row = config.rollout, config.train.tokens_per_row
  longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
  cache = rollout.cache_tokens
  yield (
    longest <= cache,
    "rollout.cache_tokens",
    f"{cache} is less than max_prompt_tokens + max_completion_tokens;"
    f" use {longest} or more",
  )
  yield (
    rollout.decode_steps_per_call <= cache,
    "rollout.decode_steps_per_call",
    f"{rollout.decode_steps_per_call} is more than a sequence has tokens"
    f" (rollout.cache_tokens); use {cache} or less",
  )
  for name in ("prefill_buckets", "window_buckets"):
    buckets = getattr(rollout, name)
    yield (
      len(buckets) > 0
      and list(buckets) == sorted({*buckets} - {0})
      and buckets[-1] == cache,
      f"rollout.{name}",
      f"{sections.shown(buckets)} are not positive, ascending, and at the end"
      f" cache_tokens; use ({cache},), or more before it",
    )
  yield (
    row >= cache,
    "train.tokens_per_row",
    f"{row} is less than rollout.cache_tokens; use {cache} or more",
  )
  rows, whole = config.train.rows_per_microbatch, config.warm_start
  yield (
    not whole.num_steps or whole.rows_per_batch % rows == 0,
    "train.rows_per_microbatch",
    f"{rows} does not divide {whole.rows_per_batch} warm_start.rows_per_batch;"
    " use numbers that divide",
  )


def _pages(config: sections.Config) -> Iterator[Rule]:
  rollout = config.rollout
  page, cache = rollout.page_tokens, rollout.cache_tokens
  for name in ("prefill_buckets", "window_buckets"):
    buckets, chunk = getattr(rollout, name), rollout.prefill_chunk
    yield (
      not (chunk and name == "prefill_buckets")
      or all(x < chunk or x % chunk == 0 for x in buckets),
      f"rollout.{name}",
      f"{sections.shown(buckets)} are not multiples of prefill_chunk {chunk}",
    )
    yield (
      not rollout.num_pages or all(x % page == 0 for x in buckets),
      f"rollout.{name}",
      f"{sections.shown(buckets)} are not all multiples of page_tokens {page},"
      " as rollout.num_pages wants",
    )
  yield (
    not rollout.num_pages or rollout.num_pages * page >= cache,
    "rollout.num_pages",
    f"{rollout.num_pages} pages of {page} do not hold one sequence of"
    f" cache_tokens {cache}; use {-(-cache // page)} or more",
  )
  yield from _kept_pages(config)


def _kept_pages(config: sections.Config) -> Iterator[Rule]:
  rollout = config.rollout
  if not rollout.kept_tokens:
    return
  path, kept = "rollout.kept_tokens", rollout.kept_tokens
  yield (
    rollout.num_pages > 0,
    path,
    f"{kept} are kept in pages, and there are none; set rollout.num_pages, or"
    " use 0",
  )
  yield (
    rollout.prefill_chunk > 0,
    path,
    "what follows kept tokens is computed in chunks; set rollout.prefill_chunk"
    " below the longest of rollout.prefill_buckets, or use 0",
  )
  yield (
    rollout.preemption is sections.Preemption.FAST,
    path,
    "pages that other programs have filled do not give the same bits again, as"
    " rollout.preemption=exact wants; use fast, or 0",
  )
  yield (
    not config.run.exact_resume,
    path,
    "pages that other programs have filled do not give the same bits again, as"
    " run.exact_resume wants; use 0",
  )


def _prompts(config: sections.Config) -> Iterator[Rule]:
  task = config.task
  yield from _template("task.template", task.template)
  for path, entries in (
    ("task.sources", task.sources),
    ("eval.sets", config.eval.sets),
  ):
    given: dict[str, Any] = dict(entries.items())
    for name, entry in given.items():
      if "template" in entry:
        yield from _template(f"{path}.{name}.template", entry["template"])
  for name in config.eval.sets:
    yield (
      name not in _EVALUATIONS,
      f"eval.sets.{name}",
      "this is the name of another evaluation; use another one",
    )


def _template(path: str, template: str) -> Iterator[Rule]:
  try:
    parts = [name for _, name, _, _ in string.Formatter().parse(template)]
  except ValueError as error:
    raise sections.ConfigError(
      f"{path}: {sections.shown(template)} is not a str.format template"
      f" ({error}); double a brace that is meant literally"
    ) from error
  named = [name for name in parts if name is not None]
  yield (
    len(named) > 0 and all(name[:1].isidentifier() for name in named),
    path,
    f"{sections.shown(template)} has no field, or one without a name; write"
    " {question}",
  )


def _episode(config: sections.Config) -> Iterator[Rule]:
  task = config.task
  yield (
    bool(task.episode) or not task.episode_params,
    "task.episode_params",
    "an episode of a single turn takes none; name one in task.episode, or leave"
    " them out",
  )
  if (budgets := budgets_lib.of_task(task)) is None:
    return
  last, longest = budgets.budgets[-1], config.rollout.max_completion_tokens
  yield (
    last < longest,
    f"{budgets_lib.PATH}.budgets",
    f"{last} is not less than rollout.max_completion_tokens {longest}, which is"
    " the budget of a whole completion; use fewer",
  )
  yield (
    not task.max_turns,
    "task.max_turns",
    f"{task.max_turns} would leave out answers, of which the episode budgets"
    " has as many as there are budgets; use 0",
  )
  yield (
    config.algorithm.advantage == "segment",
    "algorithm.advantage",
    f"{sections.shown(config.algorithm.advantage)} does not compare the parts"
    " of thoughts that the episode budgets (task.episode) cuts; use segment",
  )
  scale = config.algorithm.advantage_scale
  yield (
    scale is sections.AdvantageScale.NONE,
    "algorithm.advantage_scale",
    f"{scale.value} would divide by deviations what the episode budgets"
    " (task.episode) gives a weight for each part of a thought; use none",
  )


def _rewards(config: sections.Config) -> Iterator[Rule]:
  task = config.task
  yield (
    not task.rewards or task.reward == type(task)().reward,
    "task.reward",
    f"{sections.shown(task.reward)} is not used beside task.rewards; make it an"
    " entry there, or leave one of them out",
  )


def _adapters(config: sections.Config) -> Iterator[Rule]:
  lora, section = config.model.lora, config.algorithm
  yield (
    bool(lora.rank) or not lora.adapter,
    "model.lora.adapter",
    f"{sections.shown(lora.adapter)} is not read while model.lora.rank is 0;"
    " give the adapter's rank",
  )
  if not lora.rank:
    return
  yield (
    len(lora.modules) > 0,
    "model.lora.modules",
    f"() leaves nothing to train; use {', '.join(sections.LORA_MODULES)}",
  )
  yield _not_muon("train", config)
  yield (
    config.critic.trunk is sections.CriticTrunk.SHARED
    or section.advantage != "gae",
    "critic.trunk",
    "a second model would be trained as a whole beside adapters"
    " (model.lora.rank); use shared, or a rank of 0",
  )
  for name in ("reference_every", "reference_decay", "reference_offload"):
    value = getattr(section, name)
    yield (
      not value,
      f"algorithm.{name}",
      f"{value} is of a model of its own, and the reference of adapters"
      f" (model.lora.rank) is the model without them; use {type(value)()}",
    )
  yield (
    not (section.kl_coef and lora.adapter),
    "algorithm.kl_coef",
    "the reference of adapters is the model without them, and"
    " model.lora.adapter starts from others; merge that adapter into the model,"
    " or use 0",
  )


def _not_muon(of: str, config: sections.Config) -> Rule:
  return (
    not config.model.lora.rank
    or getattr(config, of).optimizer.name is sections.OptimizerName.ADAMW,
    f"{of}.optimizer.name",
    "muon is for whole matrices, not for the factors of an adapter"
    " (model.lora.rank); use adamw",
  )


def _beside(config: sections.Config) -> Iterator[Rule]:
  """Yield rules of what a run writes beside its checkpoints."""
  run = config.run
  yield (
    not run.wandb_project or importlib.util.find_spec("wandb") is not None,
    "run.wandb_project",
    "the package wandb is not installed; pip install jaxrl_async[wandb], or"
    ' leave it ""',
  )


def _cluster(config: sections.Config) -> Iterator[Rule]:
  section, mesh = config.cluster, config.mesh
  yield (
    section.min_replicas <= section.replicas,
    "cluster.min_replicas",
    f"{section.min_replicas} of {section.replicas} (cluster.replicas); use at"
    " most as many",
  )
  if section.kind is not sections.ClusterKind.RAY:
    for name in ("replicas", "trainer_processes"):
      value = getattr(section, name)
      yield (
        value == 1,
        f"cluster.{name}",
        f"{value} need replicas in other processes; use cluster.kind=ray",
      )
    return
  yield (
    importlib.util.find_spec("ray") is not None,
    "cluster.kind",
    "ray is not installed; install the extra: uv sync --extra ray, or pip"
    " install 'jaxrl_async[ray]'",
  )
  yield (
    section.address in ("", "auto")
    or _ADDRESS.fullmatch(section.address) is not None,
    "cluster.address",
    f'{sections.shown(section.address)} is no address; use HOST:PORT, "auto",'
    ' or ""',
  )
  yield (
    config.transfer.channel is not sections.Channel.DIRECT,
    "transfer.channel",
    "direct is for slices of one process; use orbax",
  )
  for name in ("rollout_data", "rollout_tensor"):
    yield (
      getattr(mesh, name) >= 1,
      f"mesh.{name}",
      f"{getattr(mesh, name)} leaves the size open, but replicas have devices"
      " of their own; give their number",
    )
  needed = mesh.rollout_data * mesh.rollout_tensor
  processes = section.replica_processes
  yield (
    processes == 1 or (mesh.rollout_data == 1 and needed % processes == 0),
    "cluster.replica_processes",
    f"{processes} have to share mesh.rollout_tensor={mesh.rollout_tensor}"
    f" evenly, and mesh.rollout_data={mesh.rollout_data} has to be 1; use more"
    " replicas (cluster.replicas) instead",
  )
  yield (
    section.replica_gpus * processes in (0, needed),
    "cluster.replica_gpus",
    f"{section.replica_gpus} for each of {processes} processes is not the"
    f" number of devices of a replica's mesh, {needed} (mesh.rollout_data *"
    " rollout_tensor)",
  )
  yield (
    not (section.replica_tpu and section.replica_gpus),
    "cluster.replica_tpu",
    f"{section.replica_tpu} beside cluster.replica_gpus; use one of them",
  )


def _updates(config: sections.Config) -> Iterator[Rule]:
  section = config.algorithm
  trajectories = section.group_size * section.groups_per_step
  yield (
    trajectories % section.num_minibatches == 0,
    "algorithm.num_minibatches",
    f"{section.num_minibatches} does not divide {trajectories} trajectories of"
    " a train step (group_size * groups_per_step); use numbers that divide",
  )
  yield (
    section.num_minibatches <= section.groups_per_step,
    "algorithm.num_minibatches",
    f"{section.num_minibatches} are more than the {section.groups_per_step}"
    " groups of a train step (algorithm.groups_per_step), so that an update"
    " would have fewer trajectories than a group; use fewer",
  )
  updates = section.num_minibatches * section.num_epochs
  yield (
    config.train.num_steps * updates <= setting_lib.MAX_INT,
    "train.num_steps",
    f"{config.train.num_steps} of {updates} updates each (num_minibatches *"
    f" num_epochs) are more than {setting_lib.MAX_INT} updates, which is as far"
    " as optimizers count",
  )
  yield (
    section.proximal is not sections.ProximalMode.REUSE
    or updates == 1
    or section.loss not in _ANCHORED,
    "algorithm.proximal",
    f"reuse is wrong after the first of {updates} updates; use"
    " algorithm.num_minibatches=1 with algorithm.num_epochs=1, recompute or"
    " loglinear",
  )


def _loss(config: sections.Config) -> Iterator[Rule]:
  section = config.algorithm
  level = section.behavior_weight_level
  is_coupled = section.loss == "coupled_ppo"
  for name, known in (
    ("loss", algorithm_section.LOSSES),
    ("advantage", algorithm_section.ADVANTAGES),
  ):
    value = getattr(section, name)
    # The form module:function, which is imported later.
    parts = re.split(r"[.:]", value)
    yield (
      value in known
      or (value.count(":") == 1 and all(x.isidentifier() for x in parts)),
      f"algorithm.{name}",
      f"{sections.shown(value)} is not one of {', '.join(known)}, and not"
      " module:function",
    )
  yield (
    section.proximal is not sections.ProximalMode.LOGLINEAR or not is_coupled,
    "algorithm.proximal",
    "loglinear has no effect, because the ratio of coupled_ppo (algorithm.loss)"
    " is to the behavior policy; use reuse, or recompute for more metrics",
  )
  yield (
    section.dual_clip == 0 or section.dual_clip > 1,
    "algorithm.dual_clip",
    f"{section.dual_clip:g} would clip every ratio; use more than 1, such as 3,"
    " or 0 for none",
  )
  yield (
    level is sections.BehaviorWeightLevel.NONE or not is_coupled,
    "algorithm.behavior_weight_level",
    f"{level.value} would correct twice, because the ratio of coupled_ppo"
    " (algorithm.loss) is to the behavior policy already; use none",
  )
  yield (
    section.second_moment_bound == 0
    or section.proximal is sections.ProximalMode.RECOMPUTE,
    "algorithm.second_moment_bound",
    "it needs the proximal logprobs before the first update; use"
    " algorithm.proximal=recompute, or 0",
  )


def _advantage(config: sections.Config) -> Iterator[Rule]:
  section = config.algorithm
  advantage, scale = section.advantage, section.advantage_scale
  yield (
    advantage not in ("batch", "gae")
    or scale is not sections.AdvantageScale.STD,
    "algorithm.advantage_scale",
    f"std is of a group, and {advantage} (algorithm.advantage) compares with no"
    " group; use batch_std or none",
  )
  yield (
    advantage in algorithm_section.ADVANTAGES[:-1]
    or scale is not sections.AdvantageScale.BATCH_STD,
    "algorithm.advantage_scale",
    "batch_std divides no advantages where algorithm.advantage is"
    f" {advantage[:60]}; use none",
  )
  yield (
    bool(section.teacher) == (section.distill_coef > 0),
    "algorithm.distill_coef",
    f"{section.distill_coef:g}, and algorithm.teacher is"
    f" {sections.shown(section.teacher)}; set both, or neither",
  )
  yield (
    advantage != "none" or bool(section.teacher),
    "algorithm.advantage",
    "none leaves nothing to learn without algorithm.teacher; name one, or use"
    " another advantage",
  )
  warmup, num_steps = config.critic.warmup_steps, config.train.num_steps
  yield (
    warmup == 0 or warmup < num_steps,
    "critic.warmup_steps",
    f"in {warmup} steps the policy does not learn, and train.num_steps is"
    f" {num_steps}; use fewer",
  )


def _reference(config: sections.Config) -> Iterator[Rule]:
  section = config.algorithm
  estimator = section.kl_estimator
  yield (
    not section.kl_in_reward or estimator is sections.KlEstimator.K1,
    "algorithm.kl_estimator",
    f"{estimator.value} would be biased in the reward (algorithm.kl_in_reward);"
    " use k1",
  )


def _equal_rewards(config: sections.Config) -> Iterator[Rule]:
  """Yield the rule of what leaves out groups of equal rewards.

  They have to teach nothing; `types.teach_nothing` says which are dropped.
  """
  section = config.algorithm
  teaching = [
    text
    for text, does_teach in (
      (
        f"algorithm.advantage={section.advantage}",
        section.advantage in ("batch", "gae", "none"),
      ),
      ("algorithm.teacher", bool(section.teacher)),
      ("algorithm.kl_in_reward", section.kl_in_reward),
    )
    if does_teach
  ]
  yield (
    not section.filter_zero_std or not teaching,
    "algorithm.filter_zero_std",
    "groups of equal rewards do teach something with"
    f" {' and '.join(teaching)}; use False",
  )


def _bound(config: sections.Config) -> Iterator[Rule]:
  control, section = config.staleness_control, config.algorithm
  path = "staleness_control.maximum"
  yield (
    control.maximum <= section.max_staleness,
    path,
    f"{control.maximum} is more than the hard limit"
    f" {section.max_staleness} (algorithm.max_staleness); use at most that",
  )
  yield (
    control.minimum < control.maximum
    or control.minimum == control.maximum == 0,
    "staleness_control.minimum",
    f"{control.minimum} is not below {control.maximum} ({path}), so that"
    " nothing could move; use less, or 0 for both to switch the control off",
  )
  yield (
    not control.maximum
    or section.loss == "coupled_ppo"
    or section.loss in algorithm_section.LOSSES
    and (
      section.behavior_weight_level is not sections.BehaviorWeightLevel.NONE
      or section.second_moment_bound > 0
      or section.sequence_kl_bound > 0
    ),
    path,
    f"nothing measures how old the data is with {sections.shown(section.loss)}"
    " (algorithm.loss) and without a weight (algorithm.behavior_weight_level);"
    " use 0, or another one of these",
  )


def _rates(config: sections.Config) -> Iterator[Rule]:
  for name in TRAINED:
    optimizer = getattr(config, name).optimizer
    rate, decay = optimizer.learning_rate, optimizer.weight_decay
    yield (
      rate * decay <= 1,
      f"{name}.optimizer.weight_decay",
      f"{decay:g} at a learning rate of {rate:g} removes more than the whole"
      " weight at each update; use less",
    )


def _schedules(config: sections.Config) -> Iterator[Rule]:
  """Yield rules of the names in schedules; `assembly.checks` tries values."""
  for name in TRAINED:
    entry = getattr(config, name).optimizer.rate_schedule.to_dict()
    if entry:
      yield from _schedule(f"{name}.optimizer.rate_schedule", entry)


def _schedule(path: str, entry: Any) -> Iterator[Rule]:
  yield (
    isinstance(entry, dict) and "schedule" in entry,
    path,
    f"{sections.shown(entry)} names no schedule; use an entry like"
    ' {"schedule": "linear_schedule", "end_value": 0.1, "transition_steps":'
    " 100}",
  )
  yield (
    entry["schedule"] in algorithm_section.SCHEDULES,
    path,
    f"{sections.shown(entry['schedule'])} is not one of"
    f" {', '.join(algorithm_section.SCHEDULES)}",
  )
  for name, value in entry.items():
    yield (
      isinstance(value, bool | int | float | str | dict),
      path,
      f"{sections.shown(name)} is {sections.shown(value)}; use a number, a text"
      " or a ConfigDict of numbers",
    )


def _preference(config: sections.Config) -> Iterator[Rule]:
  section, warm_start = config.preference, config.warm_start
  yield (
    bool(warm_start.checkpoint) or not warm_start.num_steps,
    "warm_start.num_steps",
    f"{warm_start.num_steps}, but this program makes no warm start; use 0, or"
    " name the result of launch/sft.py in warm_start.checkpoint",
  )
  yield _not_muon("preference", config)
  yield (
    ":" in section.rejected or warm_start.corrupted_frac > 0,
    "preference.rejected",
    f"{sections.shown(section.rejected)} makes no mistakes, because"
    " warm_start.corrupted_frac is 0, so that right solutions would be"
    " rejected; use more than 0 there, such as 0.5",
  )
  rows = config.train.rows_per_microbatch
  yield (
    section.rows_per_batch % rows == 0,
    "preference.rows_per_batch",
    f"{section.rows_per_batch} is no multiple of train.rows_per_microbatch"
    f" {rows}; use one",
  )
