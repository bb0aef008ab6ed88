"""What a start goes on from, and what it refuses; without a run."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.assembly import continued_settings
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.replay import timing_start
from jaxrl_async.run import resume
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import outstanding as outstanding_lib

KNOWN = {
  field.path: field.known for field in fields_lib.walk(sections.Config())
}
LINE = b'{"step": 0}\n'
STATE = {"weights": jnp.zeros(3)}


def put(config, path, value):
  *sections, name = path.split(".")
  for section in sections:
    config = getattr(config, section)
  setattr(config, name, value)


def outstanding_group(num_tokens, finish_reason=None):
  """A group of one trajectory of that length."""
  array = np.zeros(num_tokens, np.int32)
  group = types.RolloutGroup(
    admission=types.Admission(index=0, birth=0, deadline=2),
    prompt=types.Prompt(prompt_id="a/train/0", tokens=array[:1], item={}),
    trajectories=[
      types.Trajectory(
        member=0,
        tokens=array,
        loss_mask=array.astype(bool),
        behavior_logprobs=array.astype(np.float32),
        policy_versions=array,
        finish_reason=finish_reason,
      )
    ],
  )
  return outstanding_lib.OutstandingGroup(status="running", group=group)


def write_run(workdir, *, steps=(2, 4), groups=(), **changes):
  """A workdir as a run leaves it, with next to no weights."""
  config = sections.Config()
  state = {
    "groups_per_step": config.algorithm.groups_per_step,
    "max_staleness": config.algorithm.max_staleness,
    timing_start.KEY: 0,
    "next_index": 0,
    "stream": {},
    "ledger": {"offset_bytes": len(LINE)},
    "metrics": {"num_bytes": len(LINE), "last_step": 0},
    "config": config_json.to_stored(config),
  }
  state = {k: v for k, v in (state | changes).items() if v is not None}
  for step in steps:
    checkpoint.save(
      workdir / "checkpoints", step, STATE, state, list(groups), keep=5
    )
  for name in ("metrics.jsonl", "ledger.jsonl"):
    (workdir / name).write_bytes(LINE + b"torn")
  config_json.write(config, workdir)


@pytest.fixture
def workdir(tmp_path):
  write_run(tmp_path / "run")
  return tmp_path / "run"


def find(workdir, config=None):
  notes = []
  found = resume.find(
    config or sections.Config(), configs.MODELS["tiny"], workdir, notes.append
  )
  return found.step, notes


def test_a_resume_keeps_its_rotary_embeddings(workdir):
  scaling = configs.RopeScaling(
    kind="longrope",
    short_factors=(1.0,) * 4,
    long_factors=(2.0,) * 4,
    original_max_tokens=200,
  )
  model = dataclasses.replace(configs.MODELS["tiny"], rope_scaling=scaling)
  stored = sections.Config().rollout.cache_tokens
  for cache_tokens, is_same in ((stored, True), (200, True), (201, False)):
    config = sections.Config()
    config.rollout.cache_tokens = cache_tokens
    own = model.within(cache_tokens)
    if is_same:
      assert resume.find(config, own, workdir, print).step
      continue
    with pytest.raises(
      sections.ConfigError, match="^rollout.cache_tokens: .* 201 tokens, and"
    ):
      resume.find(config, own, workdir, print)


def refusal(workdir, config=None):
  before = content(workdir)
  with pytest.raises(sections.ConfigError) as caught:
    find(workdir, config)
  assert content(workdir) == before
  message = str(caught.value)
  assert "\n" not in message
  return message


def content(workdir):
  return {
    path: path.read_bytes() if path.is_file() else None
    for path in workdir.rglob("*")
  }


def test_every_field_says_why_it_may_differ_or_not():
  for path, known in KNOWN.items():
    reasons = known.free, known.fixed, known.fixed_with_groups
    assert sum(map(bool, reasons)) == 1, path


def test_the_newest_checkpoint_is_taken_and_said(workdir):
  step, notes = find(workdir)
  assert step == 4
  assert notes == [
    f"continuing {workdir} from step 4 with 0 outstanding groups"
  ]


def test_a_reward_server_may_move_but_not_become_another_reward(tmp_path):
  def terms(function, **fields):
    config = sections.Config()
    entry = {"function": function, "weight": 1.0, **fields}
    config.task.rewards = config_dict.ConfigDict({"judge": entry})
    return config

  stored = terms("http://a:1/score", retries=2)
  moved = terms("https://b:2/judge", timeout_s=9.0)

  def allowed(wanted):
    return continued_settings.check(
      stored, wanted, tmp_path, has_outstanding=True
    )

  (difference,) = allowed(moved)
  assert "http://a:1" in difference and "https://b:2" in difference
  for other in (
    terms("exact", retries=2),
    terms("http://a:1/score", weight=2.0),
    sections.Config(),
  ):
    with pytest.raises(sections.ConfigError, match="were scored with them"):
      allowed(other)
  single, other = sections.Config(), sections.Config()
  single.task.reward, other.task.reward = "http://a:1", "http://b:1"
  assert continued_settings.check(single, other, tmp_path, has_outstanding=True)
  other.task.reward = "exact"
  with pytest.raises(sections.ConfigError, match="were scored with it"):
    continued_settings.check(single, other, tmp_path, has_outstanding=True)


def test_what_may_differ_is_said_and_what_may_not_is_refused_with_reasons(
  workdir,
):
  config = sections.Config()
  config.rollout.num_slots = 4
  config.transfer.channel = sections.Channel.DIRECT
  _, notes = find(workdir, config)
  assert notes[1:] == [
    "the config differs from then: rollout.num_slots: 32 and now 4;"
    " transfer.channel: auto and now direct"
  ]
  config.seed = 1
  config.eval.num_items = 3
  config.task.template = "{question}" + 300 * "x"
  message = refusal(workdir, config)
  assert message.startswith(f"workdir: {workdir} holds another config (seed: 0")
  for path in ("seed", "eval.num_items", "task.template"):
    assert f"{path}: " in message and KNOWN[path].fixed in message
  assert "num_slots" not in message and "channel" not in message
  assert len(message) < 800


def test_what_nothing_reads_may_differ(tmp_path):
  stored, wanted = sections.Config(), sections.Config()
  stored.algorithm.reference_every = 5  # an older version let it stand
  allowed = continued_settings.check(
    stored, wanted, tmp_path, has_outstanding=False
  )
  assert allowed == ["algorithm.reference_every: 5 and now 0"]
  for config in (stored, wanted):
    config.algorithm.kl_coef = 0.1
  with pytest.raises(sections.ConfigError, match="reference_every: 5 and 0"):
    continued_settings.check(stored, wanted, tmp_path, has_outstanding=False)


@pytest.mark.parametrize(
  "path, value",
  [("algorithm.group_size", 8), ("algorithm.groups_per_step", 16)],
)
def test_sizes_of_groups_stay_while_groups_are_stored(tmp_path, path, value):
  config = sections.Config()
  put(config, path, value)
  write_run(tmp_path / "none")
  assert find(tmp_path / "none", config)[0] == 4
  write_run(tmp_path / "some", groups=[outstanding_group(4)])
  message = refusal(tmp_path / "some", config)
  assert KNOWN[path].fixed_with_groups in message


def test_limits_hold_what_is_stored(tmp_path):
  finished = outstanding_group(90, types.FinishReason.EOS)
  write_run(tmp_path / "a", groups=[outstanding_group(70), finished])
  config = sections.Config()
  config.rollout.cache_tokens, config.train.tokens_per_row = 70, 90
  assert find(tmp_path / "a", config)[0] == 4
  config.train.tokens_per_row = 89
  assert refusal(tmp_path / "a", config).startswith(
    "train.tokens_per_row: 89 is less than the 90 tokens"
  )
  config.train.tokens_per_row = 90
  config.rollout.cache_tokens = 69
  assert refusal(tmp_path / "a", config).startswith(
    "rollout.cache_tokens: 69 is less than the 70 tokens"
  )


@pytest.mark.parametrize("kind", ["missing", "link", "file", "unsealed"])
def test_books_whose_checkpoints_cannot_be_reached_are_kept(workdir, kind):
  path = workdir / "checkpoints"
  if kind == "unsealed":
    for manifest in path.glob("*/manifest.json"):
      manifest.unlink()
  else:
    shutil.rmtree(path)
  if kind == "link":
    path.symlink_to("/nowhere/at/all")
  elif kind == "file":
    path.write_text("")
  message = refusal(workdir)
  assert message.startswith("workdir: ") or kind != "missing"
  expected = {
    "missing": "bring the checkpoints back",
    "link": "is a link to /nowhere/at/all, which does not exist",
    "file": "checkpoints cannot be read (Not a directory)",
    "unsealed": "4 has no manifest",
  }
  assert expected[kind] in message


def test_a_link_to_nothing_is_no_place_to_begin(tmp_path):
  (tmp_path / "checkpoints").symlink_to("/nowhere/at/all")
  assert "is its disk mounted?" in refusal(tmp_path)


def test_a_passed_over_checkpoint_is_said(workdir):
  (workdir / "checkpoints" / "4" / "manifest.json").unlink()
  step, notes = find(workdir)
  assert step == 2
  assert f"{workdir}/checkpoints/4 has no manifest and is passed over" in notes


def test_a_damaged_newest_is_said_and_set_aside_unless_the_start_is_refused(
  workdir,
):
  groups = workdir / "checkpoints" / "4" / "groups.json"
  groups.write_bytes(groups.read_bytes() + b" ")
  config = sections.Config()
  config.seed = 1
  assert "seed: 0 and 1" in refusal(workdir, config)
  step, notes = find(workdir)
  assert step == 2
  assert notes[0].startswith("WARNING: checkpoint of step 4: ")
  assert "groups.json is corrupted" in notes[0]
  assert "from step 2" in notes[1]
  kept = sorted(path.name for path in (workdir / "checkpoints").iterdir())
  assert kept == ["2", "4.damaged"]
  assert find(workdir) == (2, notes[1:])


def test_what_a_killed_start_left_of_checkpoints_is_removed(workdir):
  """A run that has finished saves no checkpoint that would clean up."""
  path = workdir / "checkpoints"
  for name in ("1.removed", "5.incomplete", "4.old"):
    shutil.copytree(path / "2", path / name)
  config = sections.Config()
  config.seed = 1
  assert "seed: 0 and 1" in refusal(workdir, config)
  assert len(list(path.iterdir())) == 5  # it may be another run's
  assert find(workdir)[0] == 4
  assert sorted(each.name for each in path.iterdir()) == ["2", "4"]


def test_the_config_is_checked_without_config_json(workdir):
  config = sections.Config()
  config.algorithm.num_minibatches = 2
  before = refusal(workdir, config)
  (workdir / "config.json").unlink()
  assert refusal(workdir, config) == before
  assert find(workdir)[0] == 4


# As a loss of power may leave a file, and worse.
NOT_JSON = (b"", bytes(64), b'{"algorithm', bytes(range(256)), b"[" * 100_000)


@pytest.mark.parametrize(
  "data",
  [
    *NOT_JSON,
    b"[]",
    b"3",
    b'"text"',
    b"{}",
    b'{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 8}',
    b'{"algorithm": 3}',
    b'{"algorithm": {"group_size": "many"}}',
    b'{"algorithm": {}, "format": "x"}',
    b'{"algorithm": {}, "format": 1000}',
    b'{"algorithm": {}, "task": {"params": {"a.b": 1}}}',
    None,
  ],
)
@pytest.mark.parametrize("has_run", [True, False])
def test_a_config_json_of_another_kind_is_one_line(tmp_path, data, has_run):
  if has_run:
    write_run(tmp_path)
    (tmp_path / "config.json").unlink()
  path = tmp_path / "config.json"
  path.mkdir() if data is None else path.write_bytes(data)
  if has_run and data in NOT_JSON:
    step, notes = find(tmp_path)
    assert step == 4
    assert notes[0] == f"{path} is damaged, and is written anew"
  else:
    assert refusal(tmp_path).startswith(f"workdir: {path} ")


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("data", [b"", bytes(50), b"[1, 2, 3,\n\n\n", None])
def test_a_book_of_another_kind_is_one_line(workdir, name, data):
  path = workdir / name
  path.unlink()
  path.mkdir() if data is None else path.write_bytes(data)
  assert refusal(workdir).startswith(f"workdir: {path} ")


def test_a_checkpoint_of_another_kind_is_one_line(tmp_path):
  workdir = tmp_path
  write_run(workdir, steps=(4,))
  newest = workdir / "checkpoints" / "4"
  sealed = (newest / "manifest.json").read_bytes()
  for data in (b"", b"{}", bytes(range(256)), sealed[:-1], None):
    (newest / "manifest.json").unlink()
    if data is None:
      (newest / "manifest.json").mkdir()
    else:
      (newest / "manifest.json").write_bytes(data)
    assert "checkpoint of step 4: " in refusal(workdir)


def test_parameters_alone_are_no_run(tmp_path):
  checkpoint.save(tmp_path / "checkpoints", 0, STATE, {}, [])
  assert "is not the checkpoint of a run" in refusal(tmp_path)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_checkpoint_of_another_format_is_refused(workdir, monkeypatch, more):
  known = checkpoint.FORMAT + more
  monkeypatch.setattr(checkpoint, "FORMAT", known)
  message = refusal(workdir)
  assert f"of another version than this one, which knows {known}" in message


def test_a_stored_config_of_a_newer_version_is_refused_by_its_field(tmp_path):
  values = config_json.to_stored(sections.Config())
  values["rollout"]["speculation"] = 3
  write_run(tmp_path, config=values)
  message = refusal(tmp_path)
  assert "rollout.speculation: unknown in this version" in message
  assert "use the version that wrote it" in message
  path = tmp_path / "config.json"
  path.write_text(json.dumps(values))
  assert refusal(tmp_path).startswith(f"workdir: {path} is not the config of")


def test_data_that_has_changed_since_the_checkpoint_is_told():
  notes = []
  for then in (None, {"a": "1", "b": "2"}):
    resume.tell_changed_data(then, {"a": "1", "b": "2"}, notes.append)
  assert not notes
  resume.tell_changed_data({"a": "1", "b": "2"}, {"a": "3"}, notes.append)
  assert "(a, b)" in notes[0]
