"""Wrong settings are refused in one line, and useless ones are told.

In what is expected of a message, ... stands for any text.
"""

import importlib.util
import re

from ml_collections import config_dict
import pytest

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections

HERE = "."  # a directory
GAE = {
  "algorithm.advantage": "gae",
  "algorithm.advantage_scale": "batch_std",
}
COUPLED = {
  "algorithm.loss": "coupled_ppo",
  "algorithm.behavior_weight_level": "none",
}
OWN = {"algorithm.loss": "my:loss"}
TEACHER = {"algorithm.teacher": HERE, "algorithm.distill_coef": 1.0}
NOTHING = {
  "algorithm.advantage": "none",
  "algorithm.advantage_scale": "none",
  **TEACHER,
}
IN_REWARD = {
  "algorithm.kl_coef": 0.1,
  "algorithm.kl_in_reward": True,
  "algorithm.kl_estimator": "k1",
}
RAY = {"cluster.kind": "ray"}
LORA = {"model.lora.rank": 4}
KEPT = {
  "rollout.kept_tokens": 64,
  "rollout.num_pages": 8,
  "rollout.prefill_chunk": 64,
}
MIB = "x" * 2**20


def config_of(settings):
  """The defaults with these settings; a dict is made a ConfigDict."""
  config = sections.Config()
  free = {
    field.path
    for field in fields_lib.walk(config)
    if field.kind is config_dict.ConfigDict
  }
  for path, value in settings.items():
    if path in free and isinstance(value, dict):
      value = config_dict.ConfigDict(value)
    fields_lib.set_at(config, path, value)
  return config


def is_refused(check, settings, expected):
  config = config_of(settings)
  with pytest.raises(sections.ConfigError) as refused:
    check(config)
  message = str(refused.value)
  pattern = re.escape(expected).replace(r"\.\.\.", ".*")
  assert re.match(pattern, message), message
  assert "\n" not in message and len(message) < 600


def line(end):
  return {
    "schedule": "linear_schedule",
    "end_value": end,
    "transition_steps": 10,
  }


def test_the_defaults_are_valid():
  config_checks.validate(sections.Config(), 2)
  config_checks.validate(sections.Config(), 1)


@pytest.mark.parametrize(
  ("path", "value", "why"),
  [
    # wrong types
    ("train.num_steps", 1.5, "1.5 is not an integer"),
    ("train.num_steps", True, ""),
    ("train.num_steps", "60", ""),
    ("train.optimizer.learning_rate", "3e-4", "'3e-4' is not a finite number"),
    ("train.optimizer.learning_rate", float("nan"), ""),
    ("train.optimizer.name", "sgd", "'sgd' is not one of adamw, muon"),
    ("rollout.prefill_buckets", (64, 128.0), ""),
    ("rollout.prefill_buckets", [64, 128], "[64, 128] is not a tuple of int"),
    ("model.remat", 1, ""),
    ("task.params", 3, "3 is not a ConfigDict"),
    ("eval", None, "None is not a section"),
    # bounds
    ("algorithm.max_staleness", -1, "-1 is out of range; use 0 or more"),
    ("algorithm.group_size", 1, "1 is out of range; use 2 to 65,536"),
    ("algorithm.clip_low", 1.5, "1.5 is out of range; use 0 to 1"),
    ("critic.normalize_decay", 1.0, "1.0 ...less than 1"),
    ("rollout.temperature", 0.0, ""),
    ("eval.temperature", -1.0, "-1.0 is out of range; use 0, or 0.0001 to"),
    ("mesh.train_data", 0, "0 is out of range; use -1, or 1 or more"),
    ("mesh.rollout_data", -2, ""),
    ("model.compute_dtype", "float31", "'float31' is not one of float32, bf"),
    ("model.lora.base_dtype", "fp8", "'fp8' is not one of"),
    # what float32, timers and the system hold
    ("rollout.temperature", 1e-320, ""),
    ("rollout.temperature", 1e-30, ""),
    ("train.optimizer.learning_rate", 1e30, ""),
    ("train.optimizer.b2", 1 - 1e-9, "0.999999999 ...less than 1 in float32"),
    ("train.optimizer.eps", 1e-45, ""),
    ("train.optimizer.eps", 10**30, "1000...decimal point or an exponent"),
    ("train.optimizer.max_grad_norm", 10**400, ""),
    ("algorithm.behavior_weight_cap", 1e39, ""),
    ("run.stall_timeout_s", 1e30, ""),
    ("algorithm.max_staleness", 2**31, "2147483648 is too large for an integ"),
    ("train.num_steps", 2**31 - 1, "2147483647 of 4 updates each"),
    ("train.num_steps", 10**5_000, "an integer of 16610 bits"),
    ("rollout.prefill_buckets", tuple(range(64, 129)), "65 entries; use at"),
    # what config.json would not give back
    ("task.params", {"a": float("nan")}, "cannot be written as JSON"),
    ("task.params", {"a": object}, "cannot be written as JSON"),
    # entries of a tuple
    ("rollout.stop", ("",), "'' can never be found"),
    ("rollout.stop", ("a\ufffd",), "... can never be found"),
    ("rollout.stop", tuple("abcdefghijklmnopq"), "17 entries; use at most 16"),
    ("rollout.stop_token_ids", (-1,), "-1 is out of range"),
    ("mesh.train_rules.embed", ("fspd",), "'fspd' is not one of data, fsdp"),
    ("mesh.train_rules.embed", "fsdp", "'fsdp' is not a tuple of names"),
    ("mesh.rollout_rules.heads", ("tensor", "tensor"), "...an entry twice"),
    ("model.lora.modules", ("q_proj",), "'q_proj' is not one of query, key"),
    ("model.lora.modules", ("up", "up"), "('up', 'up') has an entry twice"),
    # names and directories
    ("model.name", "", "'' is not a directory"),
    ("model.name", "x" * 5_000, ""),
    ("model.name", "nu\0l", ""),
    ("model.tokenizer", "/no", "'/no' is not a directory; use a directory w"),
    ("warm_start.checkpoint", "/no/such", "... launch/sft.py writes"),
    ("transfer.directory", __file__, ""),
    ("transfer.directory", "/proc/none", ""),
    ("train.attention", "flash", "'flash' is not one of auto, xla"),
    ("rollout.attention", "gpu_paged", "gpu_paged needs pages, but rollout.nu"),
    # templates
    ("task.template", "{question", "'{question' is not a str.format template"),
    ("task.template", "{}", "'{}' has no field, or one without a name"),
    ("task.template", "the same for all", "'the same for all' has no field"),
    ("task.template", MIB, "'xxx"),
  ],
  ids=sections.shown,
)
def test_a_wrong_setting_is_refused_with_its_name(path, value, why):
  settings = {path: value}
  if path == "model.lora.modules":
    settings |= LORA
  if path == "transfer.directory":
    settings["transfer.channel"] = sections.Channel.ORBAX
  is_refused(
    lambda config: config_checks.validate(config, 2), settings, f"{path}: {why}"
  )


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    # lengths
    ({"rollout.cache_tokens": 127}, "rollout.cache_tokens: 127 is less...128"),
    ({"rollout.decode_steps_per_call": 129}, "rollout.decode_steps_per_call"),
    ({"rollout.prefill_buckets": ()}, "rollout.prefill_buckets: () are not"),
    ({"rollout.prefill_buckets": (64, 64, 128)}, "rollout.prefill_buckets"),
    ({"rollout.prefill_buckets": (0, 128)}, "rollout.prefill_buckets"),
    ({"rollout.window_buckets": (64,)}, "rollout.window_buckets: (64,) are"),
    ({"train.tokens_per_row": 127}, "train.tokens_per_row: 127...use 128 or"),
    ({"rollout.num_pages": 7}, "rollout.num_pages: 7 pages of 16...use 8 or"),
    (
      {"rollout.num_pages": 16, "rollout.page_tokens": 48},
      "rollout.prefill_buckets: (64, 128)...page_tokens 48",
    ),
    (
      {"rollout.prefill_chunk": 48},
      "rollout.prefill_buckets: (64, 128)...prefill_chunk 48",
    ),
    ({"rollout.kept_tokens": 64}, "rollout.kept_tokens: 64 are kept in pages"),
    (
      {"rollout.kept_tokens": 64, "rollout.num_pages": 8},
      "rollout.kept_tokens: ...set rollout.prefill_chunk",
    ),
    (
      KEPT | {"rollout.preemption": "exact"},
      "rollout.kept_tokens: ...rollout.preemption=exact",
    ),
    (
      KEPT | {"run.exact_resume": True},
      "rollout.kept_tokens: ...run.exact_resume wants; use 0",
    ),
    (
      {"warm_start.num_steps": 1, "warm_start.rows_per_batch": 12},
      "train.rows_per_microbatch: 8 ...12 warm_start.rows_per_batch",
    ),
    # adapters
    (
      {"model.lora.adapter": "/x"},
      "model.lora.adapter: '/x' ...model.lora.rank is 0",
    ),
    (LORA | {"model.lora.adapter": "/no"}, "model.lora.adapter: '/no' is not "),
    (LORA | {"model.lora.modules": ()}, "model.lora.modules: () leaves nothin"),
    (
      LORA | {"train.optimizer.name": "muon"},
      "train.optimizer.name: muon ...model.lora.rank",
    ),
    (LORA | GAE, "critic.trunk: ...model.lora.rank); use shared"),
    (
      LORA | {"algorithm.kl_coef": 0.1, "algorithm.reference_every": 3},
      "algorithm.reference_every: 3 ...model.lora.rank",
    ),
    (
      LORA | {"algorithm.kl_coef": 0.1, "model.lora.adapter": HERE},
      "algorithm.kl_coef: ...model.lora.adapter",
    ),
    # updates and the loss
    ({"algorithm.num_minibatches": 3}, "algorithm.num_minibatches: 3 does not"),
    (
      {"algorithm.num_minibatches": 64},
      "algorithm.num_minibatches: 64 are more ...algorithm.groups_per_step",
    ),
    (
      {"algorithm.proximal": "reuse"},
      "algorithm.proximal: reuse is wrong after the first of 4 updates; use"
      " algorithm.num_minibatches=1 with algorithm.num_epochs=1",
    ),
    (
      {
        "algorithm.proximal": "reuse",
        "algorithm.num_minibatches": 1,
        "algorithm.num_epochs": 2,
        "algorithm.loss": "sapo",
      },
      "algorithm.proximal: reuse ...2 updates",
    ),
    ({"algorithm.loss": "pppo"}, "algorithm.loss: 'pppo' ...module:function"),
    ({"algorithm.loss": "my module:loss"}, "algorithm.loss: ...module:functio"),
    ({"algorithm.loss": "a:b:c"}, "algorithm.loss: ...module:function"),
    ({"algorithm.advantage": "median"}, "algorithm.advantage: ...leave_one_ou"),
    ({"algorithm.dual_clip": 0.5}, "algorithm.dual_clip: 0.5 would clip every"),
    (
      {"algorithm.loss": "coupled_ppo"},
      "algorithm.behavior_weight_level: token ...coupled_ppo ...use none",
    ),
    (
      COUPLED | {"algorithm.proximal": "loglinear"},
      "algorithm.proximal: loglinear ...algorithm.loss...reuse",
    ),
    (
      {
        "algorithm.second_moment_bound": 0.04,
        "algorithm.proximal": "loglinear",
      },
      "algorithm.second_moment_bound: ...algorithm.proximal=recompute",
    ),
    # advantages
    (
      {"algorithm.advantage": "batch"},
      "algorithm.advantage_scale: std ...batch (algorithm.adv...batch_std",
    ),
    (
      {"algorithm.advantage": "gae"},
      "algorithm.advantage_scale: std ...gae (algorithm.adv...batch_std",
    ),
    (
      GAE | {"algorithm.advantage": "my:advantage"},
      "algorithm.advantage_scale: batch_std ...my:advantage; use none",
    ),
    (
      NOTHING | {"algorithm.advantage_scale": "batch_std"},
      "algorithm.advantage_scale: batch_std ...algorithm.advantage is none",
    ),
    (
      {"algorithm.teacher": HERE},
      "algorithm.distill_coef: 0, ...algorithm.teacher is '.'; set both",
    ),
    (
      {"algorithm.distill_coef": 0.5},
      "algorithm.distill_coef: 0.5, ...algorithm.teacher is ''; set both",
    ),
    (
      {"algorithm.advantage": "none"},
      "algorithm.advantage: none leaves nothing ...algorithm.teacher",
    ),
    (TEACHER | {"algorithm.teacher": "/no/such"}, "algorithm.teacher: '/no/su"),
    (
      GAE | {"critic.warmup_steps": 60},
      "critic.warmup_steps: in 60 ...train.num_steps is 60",
    ),
    (
      IN_REWARD | {"algorithm.kl_estimator": "k3"},
      "algorithm.kl_estimator: k3 ...algorithm.kl_in_reward); use k1",
    ),
    (
      {
        "algorithm.kl_coef": 0.1,
        "algorithm.reference_every": 1,
        "algorithm.reference_decay": 1.0,
      },
      "algorithm.reference_decay: 1.0 ...less than 1",
    ),
    # groups of equal rewards that teach something
    *(
      (
        given | {"algorithm.filter_zero_std": True},
        f"algorithm.filter_zero_std: ...{name}; use False",
      )
      for given, name in (
        (GAE, "algorithm.advantage=gae"),
        (GAE | {"algorithm.advantage": "batch"}, "algorithm.advantage=batch"),
        (IN_REWARD, "algorithm.kl_in_reward"),
        (TEACHER, "algorithm.teacher"),
      )
    ),
    # the moving bound
    (
      {"staleness_control.maximum": 5},
      "staleness_control.maximum: 5 ...algorithm.max_staleness",
    ),
    *(
      (
        {
          "staleness_control.minimum": low,
          "staleness_control.maximum": high,
        },
        f"staleness_control.minimum: {low} is not below {high}",
      )
      for low, high in ((2, 2), (1, 0))
    ),
    *(
      (
        given | {"staleness_control.maximum": 2},
        "staleness_control.maximum: nothing measures ...algorithm.loss",
      )
      for given in (OWN, {"algorithm.behavior_weight_level": "none"})
    ),
    (
      {"train.optimizer.weight_decay": 1e9},
      "train.optimizer.weight_decay: 1e+09 at a learning rate of 0.0003",
    ),
    # processes
    ({"cluster.replicas": 2}, "cluster.replicas: 2 ...use cluster.kind=ray"),
    ({"cluster.trainer_processes": 2}, "cluster.trainer_processes: 2 ...=ray"),
    (
      RAY | {"cluster.replicas": 2, "cluster.min_replicas": 3},
      "cluster.min_replicas: 3 of 2",
    ),
    (RAY | {"transfer.channel": "direct"}, "transfer.channel: direct is for"),
    (RAY | {"cluster.address": "there"}, "cluster.address: 'there' is no addr"),
    (RAY | {"mesh.rollout_data": -1}, "mesh.rollout_data: -1 leaves the size"),
    (RAY | {"cluster.replica_gpus": 2}, "cluster.replica_gpus: 2 ...mesh, 1"),
    (RAY | {"cluster.replica_processes": 2}, "cluster.replica_processes: 2"),
    (
      RAY | {"mesh.rollout_data": 2, "cluster.replica_processes": 2},
      "cluster.replica_processes: 2 ...mesh.rollout_data=2",
    ),
    (
      RAY
      | {
        "mesh.rollout_tensor": 4,
        "cluster.replica_processes": 2,
        "cluster.replica_gpus": 4,
      },
      "cluster.replica_gpus: 4 for each of 2 processes",
    ),
    (RAY | {"cluster.replica_tpu": "v9:2x2"}, "cluster.replica_tpu: 'v9:2x2'"),
    (
      RAY | {"cluster.replica_tpu": "v5e:2x2"},
      "cluster.replica_tpu: v5e:2x2 has 4 chips, and a replica's mesh has 1",
    ),
    (
      RAY
      | {
        "mesh.rollout_data": 4,
        "cluster.replica_tpu": "v5e:2x2",
        "cluster.replica_gpus": 4,
      },
      "cluster.replica_tpu: v5e:2x2 beside cluster.replica_gpus",
    ),
    # sets of questions
    *(
      ({"eval.sets": sets}, f"eval.sets{message}")
      for sets, message in (
        ({"held_out": {"dataset": "chain_sum"}}, ".held_out: this is the name"),
        ({"a b": {"dataset": "chain_sum"}}, ": 'a b' is no name"),
        ({"a": {}}, ".a: it has no dataset"),
        ({"a": 3}, ".a: 3 is not a ConfigDict of dataset, num_items, samples"),
        ({"a": {"dataset": "x", "k": 2}}, ".a: there is no field 'k'"),
        ({"a": {"dataset": "x", "samples": 0}}, ".a.samples: 0 is out of rang"),
        ({"a": {"dataset": "x", "num_items": "5"}}, ".a.num_items: '5' is not"),
        ({"a": {"dataset": "x", "template": "q"}}, ".a.template: 'q' has no"),
      )
    ),
    # rewards
    (
      {
        "task.rewards": {"a": {"function": "exact"}},
        "task.reward": "numeric",
      },
      "task.reward: 'numeric' is not used beside task.rewards",
    ),
    *(
      ({"task.rewards": {"a": entry}}, f"task.rewards.a{message}")
      for entry, message in (
        (1, ": 1 is not a ConfigDict of function"),
        ({"weight": 1.0}, ": it has no function"),
        (
          {"function": "exact", "wait": 1},
          ": there is no field 'wait'; did you mean weight?",
        ),
        ({"function": "exact", "weight": "1"}, ".weight: '1' is not a finite"),
        ({"function": "exact", "weight": True}, ".weight: True is not a finit"),
        (
          {"function": "exact", "timeout_s": 0.0},
          ".timeout_s: 0.0 is out of range; use 0.1 to 86,400",
        ),
        ({"function": "exact", "retries": -1}, ".retries: -1 is out of range"),
        ({"function": "exact", "sources": []}, ".sources: [] is not a list of"),
      )
    ),
    # data
    *(
      (
        {"task.dataset": ""} | {"task.sources": {"a": entry}},
        f"task.sources.a{message}",
      )
      for entry, message in (
        ({"dataset": "jsonl:a"}, ": it has no weight"),
        ({"weight": 1}, ": it has no dataset"),
        ({"dataset": "csv:a", "weight": 1}, ".dataset: 'csv:a' is no dataset"),
        ({"dataset": "jsonl:a", "weight": 0}, ".weight: 0 is out of range"),
        (
          {"dataset": "jsonl:a", "weight": 1, "wieght": 2},
          ": there is no field 'wieght'; did you mean weight",
        ),
        (
          {"dataset": "jsonl:a", "weight": 1, "chat": "yes"},
          ".chat: 'yes' is not a bool",
        ),
        (
          {"dataset": "jsonl:a", "weight": 1, "on_bad_row": "no"},
          ".on_bad_row: 'no' is not one of error, skip",
        ),
        (
          {"dataset": "chain_sum", "weight": 1, "eval_dataset": "jsonl:a"},
          ".eval_dataset: 'jsonl:a' has to be files, as task.sources.a.dataset",
        ),
      )
    ),
    *(
      ({f"task.{name}": value for name, value in given.items()}, message)
      for given, message in (
        ({"dataset": ""}, "task.dataset: '' is no dataset"),
        ({"dataset": "csv:a.csv"}, "task.dataset: 'csv:a.csv' is no dataset"),
        ({"eval_dataset": "jsonl:a"}, "task.eval_dataset: 'jsonl:a' has to be"),
        (
          {"dataset": "jsonl:a", "eval_dataset": "chain_sum"},
          "task.eval_dataset: 'chain_sum' has to be files",
        ),
        (
          {"dataset": "jsonl:a", "fields": {"question": 3}},
          "task.fields: 'question' ...3 is no column",
        ),
        (
          {"dataset": "jsonl:a", "fields": {"source": "x"}},
          "task.fields: 'source' is set by the run",
        ),
        (
          {"dataset": "jsonl:a", "fields": {"question": ""}},
          "task.fields: they name no question",
        ),
        ({"system": "Think."}, "task.system: 'Think.' is a message of a chat"),
        (
          {
            "dataset": "jsonl:a",
            "sources": {"a": {"dataset": "chain_sum", "weight": 1}},
          },
          "task.dataset: 'jsonl:a' is of one dataset, but task.sources names",
        ),
      )
    ),
  ],
  ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused_with_both_names(
  settings, message
):
  is_refused(config_checks.check, settings, message)


@pytest.mark.parametrize(
  "settings",
  [
    {
      "algorithm.max_staleness": 0,
      "algorithm.num_minibatches": 32,
      "eval.temperature": 0.0,
      "eval.every": 0,
      "train.tokens_per_row": 128,
      "rollout.prefill_buckets": (128,),
      "train.optimizer.learning_rate": 1,
      "seed": 255,
      "task.template": "{question} {{literally}} {difficulty[terms]}",
    },
    {
      "rollout.num_pages": 8,
      "rollout.prefill_chunk": 64,
      "rollout.preemption": "exact",
    },
    KEPT | {"rollout.kv_on_adopt": "keep"},
    {"algorithm.proximal": "reuse", "algorithm.num_minibatches": 1},
    {
      "algorithm.proximal": "reuse",
      "algorithm.num_minibatches": 1,
      "algorithm.num_epochs": 2,
      "algorithm.loss": "reinforce",
    },
    {"algorithm.proximal": "loglinear"},
    {"warm_start.rows_per_batch": 12},  # there is no warm start
    LORA | {"algorithm.kl_coef": 0.1},
    LORA | GAE | {"critic.trunk": "shared"},
    GAE | {"critic.warmup_steps": 59, "critic.normalize_decay": 0.0},
    {"task.rewards": {"a": {"function": "exact", "params": {"b": [1]}}}},
    RAY | {"mesh.rollout_tensor": 4, "cluster.replica_tpu": "v5e:2x2"},
  ],
)
def test_what_goes_together_is_allowed(settings):
  config_checks.validate(config_of(settings), 8)


@pytest.mark.parametrize(
  ("package", "settings", "message"),
  [
    ("ray", RAY, "cluster.kind: ray is not installed; ...uv sync --extra ray"),
    (
      "wandb",
      {"run.wandb_project": "mine"},
      "run.wandb_project: ...not installed; pip install jaxrl_async[wandb]",
    ),
  ],
)
def test_a_package_that_is_missing_is_named(
  package, settings, message, monkeypatch
):
  find, found = importlib.util.find_spec, [object()]

  def fake(name, *more):
    return found[0] if name == package else find(name, *more)

  monkeypatch.setattr(importlib.util, "find_spec", fake)
  config_checks.check(config_of(settings))
  found[0] = None
  is_refused(config_checks.check, settings, message)
  config_checks.check(sections.Config())


PAIRS = {
  "warm_start.checkpoint": HERE,
  "warm_start.corrupted_frac": 0.5,
  "preference.chosen": "chain_sum",
  "preference.rejected": "chain_sum",
}


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"preference.chosen": "messages"}, "preference.chosen: 'messages' ...:re"),
    (
      {"preference.chosen": "field:a", "preference.rejected": "field:a"},
      "preference.rejected: 'field:a' is preference.chosen too",
    ),
    ({"preference.chosen": "chain"}, "preference.chosen: 'chain' ...chain_sum"),
    (
      {"warm_start.checkpoint": ""},
      "warm_start.checkpoint: it is empty...'quickstart' has no weights",
    ),
    (
      {"warm_start.checkpoint": "", "model.name": HERE}
      | {"warm_start.num_steps": 300},
      "warm_start.num_steps: 300, ...warm_start.checkpoint",
    ),
    (
      LORA | {"preference.optimizer.name": "muon"},
      "preference.optimizer.name: muon ...model.lora.rank",
    ),
    (
      {"preference.rows_per_batch": 6},
      "preference.rows_per_batch: 6 ...train.rows_per_microbatch 8",
    ),
    (
      {"warm_start.corrupted_frac": 0.0},
      "preference.rejected: 'chain_sum' ...warm_start.corrupted_frac is 0",
    ),
  ],
  ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_preferences_that_contradict_each_other_are_one_line(settings, message):
  config_checks.check_preference(config_of(PAIRS))
  is_refused(config_checks.check_preference, PAIRS | settings, message)
