r"""Draw the pictures of docs/: SVG files, the same bytes wherever it runs.

    uv run benchmarks/pictures.py

writes every picture into docs/pictures/. What a picture shows is computed by
the code that it is about: the staleness bound by the buffer, the objective by
the loss, memory by the estimate. Colours and text have contrast on a white page
and on a dark one, so one file serves both.

One picture shows what a run wrote, which is kept in completion.json:

    uv run launch/train.py --config=configs/quickstart.py \
      --workdir=/tmp/versions --config.algorithm.groups_per_step=4 \
      --config.algorithm.num_minibatches=1 --config.train.num_steps=40 \
      --config.rollout.decode_steps_per_call=2
    uv run benchmarks/pictures.py --workdir=/tmp/versions

tests/test_pictures.py compares the files with the committed ones.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import operator
import pathlib
import runpy
from typing import Any

from absl import app
from absl import flags
import hardware_table
import jax.numpy as jnp
import numpy as np
from simulation import throughput
import svg

from jaxrl_async import types
from jaxrl_async.algorithms import losses
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.config import mesh_shape
from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import samples as samples_lib
from jaxrl_async.training import packing

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "docs/pictures"
COMPLETION = pathlib.Path(__file__).with_name("completion.json")

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "A run whose completion takes the place of the one kept."
)


def architecture() -> svg.Picture:
  """Return the parts of a run, coloured by the thread that runs them."""
  picture = svg.Picture(
    860,
    444,
    "The parts of a run",
    "The coordinator admits prompts through the buffer, the engine on the"
    " rollout slice writes completions, reward processes score them, and the"
    " buffer hands groups to the batch loader and the trainer on the training"
    " slice, whose weights go back to the engine. Colours are threads.",
  )
  for x, name in ((10, "rollout slice"), (664, "training slice")):
    picture.box(x, 92, 186, 200, svg.GREY, is_filled=False, dash="5 4")
    picture.text(x + 93, 114, name, is_bold=True)
  picture.named_box(26, 132, 154, 84, svg.BLUE, "engine", "continuous batching")
  for i, words in enumerate(
    ("each token keeps", "its logprob and", "its policy version")
  ):
    picture.text(103, 240 + 18 * i, words)
  trainer = "trainer", "proximal logprobs,", "updates"
  picture.named_box(680, 132, 154, 84, svg.RED, *trainer)
  picture.text(757, 240, "train step s makes")
  picture.text(757, 258, "version s + 1")
  coordinator = "coordinator", "episodes,", "admission"
  picture.named_box(256, 132, 112, 84, svg.BLUE, *coordinator)
  picture.named_box(256, 24, 112, 44, svg.AMBER, "prompts")
  picture.named_box(256, 272, 112, 44, svg.AMBER, "rewards")
  picture.box(418, 100, 112, 148, svg.GREY, is_filled=False)
  picture.text(474, 122, "buffer", size=14, is_bold=True)
  _buffer_cells(picture, 434, 136)
  picture.text(474, 66, "staleness bound:")
  picture.text(474, 84, "no group past its deadline")
  picture.named_box(418, 286, 112, 44, svg.GREY, "ledger")
  loader = "loader", "advantages,", "packing"
  picture.named_box(554, 132, 88, 84, svg.GREEN, *loader)
  picture.named_box(335, 364, 190, 40, svg.VIOLET, "weight transfer")
  arrows = (
    (((256, 158), (181, 158)), "turns", (226, 150)),
    (((180, 190), (255, 190)), "tokens", (226, 206)),
    (((312, 68), (312, 131)), "", (0, 0)),
    (((300, 216), (300, 271)), "answers", (268, 250)),
    (((324, 272), (324, 217)), "scores", (350, 250)),
    (((368, 158), (417, 158)), "admit", (393, 150)),
    (((368, 190), (417, 190)), "put", (393, 206)),
    (((474, 248), (474, 285)), "groups that ended", (539, 272)),
    (((530, 174), (553, 174)), "", (0, 0)),
    (((642, 174), (679, 174)), "", (0, 0)),
  )
  for points, label, at in arrows:
    picture.line(points, has_arrow=True)
    if label:
      picture.text(*at, label, size=12.5)
  picture.line([(757, 292), (757, 384), (526, 384)], svg.VIOLET, has_arrow=True)
  picture.text(642, 376, "publish version s + 1", size=12.5)
  picture.line([(335, 384), (103, 384), (103, 293)], svg.VIOLET, has_arrow=True)
  picture.text(218, 376, "adopt between two calls", size=12.5)
  picture.text(10, 434, "threads:", size=12.5, anchor="start")
  picture.legend(
    78,
    434,
    [
      (svg.BLUE, "rollout worker", 140),
      (svg.GREEN, "batch loader", 126),
      (svg.RED, "main", 80),
      (svg.VIOLET, "weight-transfer", 146),
      (svg.AMBER, "processes of their own", 0),
    ],
  )
  return picture


def _buffer_cells(picture: svg.Picture, x: float, y: float) -> None:
  """Draw a buffer of two groups a step; some have finished, some still run."""
  finished = {(0, 0), (0, 1), (1, 0)}
  for column, step in enumerate(("s", "s+1", "s+2")):
    for row in range(2):
      at = x + 28 * column, y + 28 * row
      if (column, row) in finished:
        picture.box(*at, 24, 24, svg.BLUE, radius=3)
      elif column < 2:
        picture.box(*at, 24, 24, svg.BLUE, radius=3, opacity=0.35)
      else:
        picture.box(
          *at, 24, 24, svg.GREY, is_filled=False, radius=3, dash="3 3"
        )
    picture.text(x + 28 * column + 12, y + 72, step, size=12)
  picture.text(x + 40, y + 96, "next train steps", size=11.5)


@dataclasses.dataclass(frozen=True)
class _Group:
  """A group of one token, of the version at which the group was born."""

  admission: types.Admission

  @property
  def index(self) -> int:
    """Its place in the order of admission."""
    return self.admission.index

  def written_versions(self) -> np.ndarray:
    """Return the version of its token."""
    return np.array([self.admission.birth])


def admitted(
  max_staleness: int, groups_per_step: int, num_steps: int
) -> list[tuple[types.Admission, int | None]]:
  """Return the groups that the buffer admits, and the step that trains each.

  The engine holds the newest version, and is faster than the trainer: before
  each train step it starts and finishes what the buffer admits. What is not
  trained by the last step has None.
  """
  buffer = buffer_lib.Buffer[_Group](groups_per_step, max_staleness)
  groups, steps = [], {}
  for step in range(num_steps):
    buffer.set_policy_version(step)
    while admission := buffer.try_admit(step):
      groups.append(admission)
      buffer.put(_Group(admission))
    for group in buffer.get_batch(step, timeout_s=0.0) or ():
      steps[group.index] = step
  return [(admission, steps.get(admission.index)) for admission in groups]


def staleness_bound() -> svg.Picture:
  """Return the groups that are admitted under three bounds, and trained."""
  groups_per_step, num_steps, cell, row = 2, 5, 27, 17
  picture = svg.Picture(
    760,
    344,
    "What the staleness bound admits",
    "For max_staleness 0, 1 and 2, a row for each group and a column for each"
    " train step: the steps from a group's birth to its deadline, and the step"
    " that trains it, with the staleness of its tokens. With 0 each group is"
    " trained at its birth; with 2 the rollout side is up to two steps ahead.",
  )
  num_columns = num_steps + 2
  for bound in range(3):
    x, y = 64 + 240 * bound, 62
    found = admitted(bound, groups_per_step, num_steps)
    ahead = sum(admission.birth == 0 for admission, _ in found)
    picture.text(
      x, 20, f"max_staleness = {bound}", size=14, anchor="start", is_bold=True
    )
    picture.text(
      x, 38, f"up to {ahead} groups outstanding", size=12.5, anchor="start"
    )
    for step in range(num_columns):
      middle = x + cell * (step + 0.5)
      picture.text(middle, 56, str(step), size=12)
    for i, (admission, trained) in enumerate(found):
      top = y + row * i
      first = x + cell * admission.birth
      width = cell * (admission.deadline - admission.birth + 1) - 2
      picture.box(first, top, width, row - 3, svg.BLUE, opacity=0.4, radius=3)
      if trained is not None:
        at = x + cell * trained
        picture.box(at, top, cell - 2, row - 3, svg.RED, radius=3)
        middle, staleness = at + cell / 2 - 1, trained - admission.birth
        picture.text(middle, top + 11, str(staleness), size=11, color=svg.WHITE)
      label = "group 0" if i == bound == 0 else str(i)
      picture.text(x - 8, top + 11, label, size=11, anchor="end")
  picture.text(56, 56, "train step", size=11, anchor="end")
  picture.legend(
    64,
    334,
    [(svg.RED, "the train step, and the staleness of its tokens", 340)],
  )
  picture.box(404, 324, 12, 12, svg.BLUE, opacity=0.4, radius=2)
  picture.text(422, 334, "from birth to deadline", size=12.5, anchor="start")
  return picture


def objective(
  ratios: Sequence[float], advantage: float, clip_low: float, clip_high: float
) -> list[float]:
  """Return the objective of PPO's loss at each ratio."""
  logprobs = jnp.log(jnp.asarray([ratios], jnp.float32))
  values, _ = losses.ppo_objective(
    logprobs,
    jnp.zeros_like(logprobs),
    jnp.full_like(logprobs, advantage),
    jnp.ones_like(logprobs, bool),
    clip_low=clip_low,
    clip_high=clip_high,
  )
  return [float(value) for value in values[0]]


def decoupled_ppo() -> svg.Picture:
  """Return three policies and the clip, and the objective by the ratio."""
  section = sections.AlgorithmSection()
  low, high = section.clip_low, section.clip_high
  picture = svg.Picture(
    760,
    440,
    "Decoupled PPO",
    "The behavior policy wrote the token, some versions before the proximal"
    " policy, on which the clip is centred. The weight w leads from behavior to"
    " proximal, the ratio r from proximal to the policy that is updated. Below,"
    " the objective by the ratio is flat beyond the clip where the advantage"
    " favours moving on.",
  )
  _policies(picture, low, high)
  _objectives(picture, low, high)
  return picture


def _policies(picture: svg.Picture, low: float, high: float) -> None:
  """Draw three policies on a line, and the clip around the proximal one."""
  y, behavior, proximal, scale = 112, 120, 470, 450
  left, right = proximal - scale * low, proximal + scale * high
  current = proximal + scale * high * 0.6
  picture.box(left, y - 22, right - left, 44, svg.RED, opacity=0.25)
  picture.line([(30, y), (730, y)])
  for x, color, name, words in (
    (behavior, svg.BLUE, "behavior", "drew the token"),
    (proximal, svg.RED, "proximal", "before the train step"),
    (current, svg.VIOLET, "theta", "is being updated"),
  ):
    at = x + 90 if x == current else x
    picture.text(at, 24, name, is_bold=True, size=14, color=color)
    picture.text(at, 42, words)
    picture.line([(at, 50), (x, y - 12)], color, width=1)
    picture.dot(x, y, 8, color)
  under = y + 44
  picture.line([(behavior, under), (proximal, under)], svg.BLUE, has_arrow=True)
  picture.text(
    (behavior + proximal) / 2,
    under + 18,
    "w = pi_prox / pi_behav, without gradient",
  )
  picture.line(
    [(proximal, under), (current, under)], svg.VIOLET, has_arrow=True
  )
  picture.text(
    proximal + 20, under + 18, "r = pi_theta / pi_prox", anchor="start"
  )
  picture.text(
    right + 10,
    y + 18,
    f"clip: {1 - low:g} to {1 + high:g}",
    color=svg.RED,
    anchor="start",
  )


def _objectives(picture: svg.Picture, low: float, high: float) -> None:
  """Draw the objective by the ratio, for both signs of the advantage."""
  ratios = [0.4 + 0.05 * i for i in range(25)]
  scale_x, scale_y, top, height = 220, 88, 240, 150
  for x, advantage in ((60, 1.0), (430, -1.0)):
    axis = top + height if advantage > 0 else top

    def place(
      ratio: float, value: float, x: float = x, axis: float = axis
    ) -> svg.Point:
      return x + scale_x * (ratio - 0.4), axis - scale_y * value

    (left, _), (right, _) = place(1 - low, 0), place(1 + high, 0)
    picture.box(left, top, right - left, height, svg.RED, opacity=0.25)
    picture.line([(x, top), (x, top + height)], width=1)
    picture.line([(x, axis), (x + scale_x * 1.25, axis)], width=1)
    straight = [place(r, r * advantage) for r in (ratios[0], ratios[-1])]
    picture.line(straight, svg.GREY, dash="4 4", width=1.2)
    values = objective(ratios, advantage, low, high)
    points = [place(*pair) for pair in zip(ratios, values, strict=True)]
    picture.line(points, svg.VIOLET, width=2.5)
    for ratio in (1 - low, 1.0, 1 + high):
      at, _ = place(ratio, 0)
      picture.text(at, top + height + 18, f"{ratio:g}", size=12)
    sign = ">" if advantage > 0 else "<"
    picture.text(x, top - 10, f"A {sign} 0", is_bold=True, anchor="start")
    picture.text(x + 280, top + height + 18, "r", is_bold=True)
  picture.line([(60, 430), (90, 430)], svg.VIOLET, width=2.5)
  words = f"min(r A, clip(r, {1 - low:g}, {1 + high:g}) A)"
  picture.text(98, 435, words, anchor="start")
  picture.line([(430, 430), (460, 430)], svg.GREY, dash="4 4", width=1.2)
  picture.text(468, 435, "r A", anchor="start")


# The levers of docs/how-to/out-of-memory.md, each alone, on configs/gsm8k.py.
LEVERS: tuple[dict[str, object], ...] = (
  {},
  {"train.rows_per_microbatch": 1},
  {"train.optimizer.state_dtype": "bfloat16"},
  {"train.optimizer.offload": True},
  {"mesh.train_fsdp": 4},
  {"model.lora.rank": 16},
)
_MEMORY_CONFIG = "configs/gsm8k.py:1.5b"


def training_memory(lever: Mapping[str, object]) -> memory_estimate.Estimate:
  """Return the estimate for a device that trains in `_MEMORY_CONFIG`.

  Args:
    lever: settings to change, by name.
  """
  file, variant = _MEMORY_CONFIG.split(":")
  run = runpy.run_path(str(ROOT / file))["get_config"](variant)
  model = configs.MODELS["qwen2-1.5b"]
  for name, value in lever.items():
    section, _, field = name.rpartition(".")
    setattr(operator.attrgetter(section)(run), field, value)
  if rank := run.model.lora.rank:
    modules = hardware_table.MODULES
    lora = configs.Lora(rank=rank, alpha=2.0 * rank, modules=modules)
    model = dataclasses.replace(model, lora=lora)
  algorithm, rollout, train = run.algorithm, run.rollout, run.train
  trajectories = algorithm.group_size * algorithm.groups_per_step
  num_microbatches = packing.expected_microbatches(
    trajectories // algorithm.num_minibatches,
    max_tokens=rollout.max_prompt_tokens + rollout.max_completion_tokens,
    tokens_per_row=train.tokens_per_row,
    rows_per_microbatch=train.rows_per_microbatch,
  )
  rows = num_microbatches * train.rows_per_microbatch
  trained = lora_lib.num_params(model) or model.num_params
  frozen = 2 * model.num_params if model.lora else 0
  moments = memory_estimate.BYTES[train.optimizer.state_dtype] + 4
  devices = run.mesh.train_fsdp
  return memory_estimate.training(
    model,
    mesh_shape.MeshShape(fsdp=devices),
    run.mesh.train_rules,
    train,
    run.model,
    policy=memory_estimate.ModelBytes(
      trainable=4 * trained // devices,
      frozen=frozen // devices,
      optimizer=0 if train.optimizer.offload else moments * trained // devices,
    ),
    tokens_per_step=rows * algorithm.num_minibatches * train.tokens_per_row,
  )


def memory() -> svg.Picture:
  """Return the memory of a device that trains, a bar for each lever."""
  estimates = [training_memory(lever) for lever in LEVERS]
  picture = svg.Picture(
    760,
    230,
    "Memory of a device that trains",
    f"The estimate for {_MEMORY_CONFIG} in GiB, stacked from weights, moments,"
    " gradients, activations and the largest temporary arrays: as it is, and"
    " with one setting changed. Offloading the moments saves a third, and"
    " four devices or LoRA save three quarters.",
  )
  colors = {
    "weights": svg.BLUE,
    "optimizer": svg.RED,
    "gradients": svg.AMBER,
    "activations": svg.GREEN,
    "layer": svg.VIOLET,
    "logits": svg.VIOLET,
  }
  left, scale = 276, 400 / max(x.total for x in estimates)
  for i, (lever, estimate) in enumerate(zip(LEVERS, estimates, strict=True)):
    y, x = 12 + 30 * i, float(left)
    words = _MEMORY_CONFIG
    for name, value in lever.items():
      words = f"{name}={value}"
    picture.text(264, y + 15, words, size=12, anchor="end", is_mono=True)
    for part, color in colors.items():
      width = scale * estimate.parts.get(part, 0)
      if width >= 1:
        picture.box(x, y, width - 1, 22, color, radius=1)
      x += width
    total = f"{estimate.total / 2**30:.1f} GiB"
    picture.text(x + 6, y + 16, total, anchor="start", is_bold=True)
  picture.legend(
    120,
    216,
    [
      (svg.BLUE, "weights", 88),
      (svg.RED, "moments", 96),
      (svg.AMBER, "gradients", 102),
      (svg.GREEN, "activations", 112),
      (svg.VIOLET, "one layer, or logits", 0),
    ],
  )
  return picture


def hardware() -> svg.Picture:
  """Return which devices train and which generate, on five machines."""
  picture = svg.Picture(
    760,
    370,
    "Who runs where",
    "One GPU trains and generates in turn. Of eight GPUs or the eight chips of"
    " one TPU host, half train and half generate in one process. On a slice of"
    " four hosts, host 0 trains and each other host is a replica. With several"
    " slices, slice 0 trains and each other slice is a replica.",
  )
  table, chips = hardware_table.HARDWARE, tpu_chips.num_chips("v5e:4x4")
  four_hosts = [_CHIPS_OF_A_HOST] * (chips // _CHIPS_OF_A_HOST)
  for i, (name, words, slices, num_train) in enumerate(
    (
      ("one GPU", "trains and generates", [[1]], 0),
      ("8 GPUs", "one process", [[8]], table["8 x 80 GB"].train),
      ("v5e-8", "one host, one process", [[8]], table["v5e-8"].train),
      (
        "v5e-16",
        "host 0 trains, others are replicas",
        [four_hosts],
        table["v5e-16"].train,
      ),
      (
        "two v5e-16, or more",
        "slice 0 trains, others are replicas",
        [four_hosts] * 2,
        table["2 x v5e-16"].train,
      ),
    )
  ):
    y = 10 + 66 * i
    picture.text(14, y + 22, name, size=14, anchor="start", is_bold=True)
    picture.text(14, y + 40, words, anchor="start")
    _draw_slices(picture, 286, y, slices, num_train)
  picture.text(704, 304, "…", size=18, is_bold=True)
  picture.legend(
    14,
    358,
    [(svg.RED, "trains", 90), (svg.BLUE, "generates", 120)],
  )
  picture.box(224, 348, 12, 12, svg.GREY, is_filled=False, radius=2)
  picture.text(242, 358, "a host", size=12.5, anchor="start")
  picture.box(314, 348, 12, 12, svg.GREY, is_filled=False, dash="3 2", radius=2)
  picture.text(332, 358, "a slice of a TPU", size=12.5, anchor="start")
  return picture


_CHIPS_OF_A_HOST = 4


def _draw_slices(
  picture: svg.Picture,
  x: float,
  y: float,
  slices: Sequence[Sequence[int]],
  num_train: int,
) -> None:
  """Draw the devices of each host of each slice in two rows.

  Args:
    slices: for each slice the devices of its hosts.
    num_train: devices that train; the first ones. With 0 a device does both.
  """
  size, is_tpu, drawn = 15, len(slices[0]) > 1, 0
  for hosts in slices:
    first = x
    x += 6
    for num_devices in hosts:
      columns = -(-num_devices // 2)
      width = columns * (size + 3) + 5
      height = min(num_devices, 2) * (size + 3) + 5
      picture.box(x, y + 6, width, height, svg.GREY, is_filled=False)
      for i in range(num_devices):
        at = (
          x + 4 + (size + 3) * (i % columns),
          y + 10 + (size + 3) * (i // columns),
        )
        color = svg.RED if drawn < num_train else svg.BLUE
        picture.box(*at, size, size, color, radius=2)
        if not num_train:
          picture.box(*at, size / 2, size, svg.RED, radius=2)
        drawn += 1
      x += width + 4
    if is_tpu:
      picture.box(
        first, y, x - first + 2, 53, svg.GREY, is_filled=False, dash="4 3"
      )
    x += 10


# Training a batch takes about as long as decoding it. The longest of the 64
# completions of a batch has about five times as many tokens as the mean.
_CLUSTER = throughput.Cluster(
  num_devices=2,
  rollout_frac=0.5,
  groups_per_step=8,
  group_size=8,
  lengths=throughput.lognormal(800, 800, limit=4_096),
  slots=32,
  step_s=0.008,
  slot_s=0.0001,
  cached_s=1e-8,
  adopt_s=0.5,
  train_device_s=0.0006,
  call_tokens=64,
)


def lanes() -> svg.Picture:
  """Return when two slices work under two bounds, in a simulation."""
  seconds, bounds, num_steps = 240.0, (0, 2), 40
  picture = svg.Picture(
    760,
    300,
    "Two slices over time, simulated",
    "With max_staleness 0 the rollout slice empties while it waits for the"
    " longest completion, and idles while the training slice trains. With"
    " max_staleness 2 both work at the same time. The real buffer decides on a"
    " virtual clock; rates and lengths are made up.",
  )
  left, scale, height = 84, 660 / seconds, 44
  for i, bound in enumerate(bounds):
    run = throughput.lanes(_CLUSTER, bound, num_steps=num_steps)
    y = 30 + 136 * i
    words = f"max_staleness = {bound}"
    picture.text(left, y - 8, words, size=14, anchor="start", is_bold=True)
    for name, bottom in (("rollout", y + height), ("training", y + 96)):
      picture.text(left - 10, bottom - 17, name, anchor="end")
      picture.line([(left, bottom), (left + 660, bottom)], width=1)
    edge, base = 0.0, float(y + height)
    outline = [(float(left), base)]
    for start_s, end_s, share in run.generating:
      if start_s >= seconds:
        break
      start, end = (left + scale * min(x, seconds) for x in (start_s, end_s))
      if start_s > edge + 1e-6:
        outline += [(left + scale * edge, base), (start, base)]
      top = base - height * share
      outline += [(start, top), (end, top)]
      edge = min(end_s, seconds)
    picture.area([*outline, (left + scale * edge, base)], svg.BLUE)
    for start_s, end_s, _ in run.training:
      if start_s < seconds:
        width = scale * (min(end_s, seconds) - start_s) - 1
        x = left + scale * start_s
        picture.box(x, y + 96 - height, width, height, svg.RED, radius=1)
  picture.legend(
    left,
    290,
    [(svg.BLUE, "slots in use", 130), (svg.RED, "trains", 100)],
  )
  picture.text(744, 290, f"{seconds:g} s, simulated", anchor="end")
  return picture


def pick_completion(workdir: pathlib.Path) -> dict[str, Any]:
  """Return the right answer of a run that the most versions wrote, evenly.

  Args:
    workdir: of a run whose tokens are single characters.
  """
  rows = [
    row
    for _, part in samples_lib.read(workdir, ["step"], is_newest_first=False)
    for row in part
    if row["reward"] == 1.0
  ]
  row = max(rows, key=lambda row: _shares(row["versions"]))
  return {
    "step": row["step"],
    "prompt": row["prompt"],
    "completion": row["completion"],
    "versions": [[x["version"], x["num_tokens"]] for x in row["versions"]],
  }


def _shares(written: Sequence[Mapping[str, int]]) -> tuple[int, int]:
  """Return how many versions wrote a completion, and the least they wrote."""
  return len(written), min(x["num_tokens"] for x in written)


def versions() -> svg.Picture:
  """Return a completion, each token on the colour of its version."""
  found = json.loads(COMPLETION.read_text())
  text, runs = found["completion"], found["versions"]
  picture = svg.Picture(
    760,
    118,
    "The versions that wrote a completion",
    f"A completion of {sum(count for _, count in runs)} tokens, each a"
    " character or the end. The weights changed while it was written: versions"
    f" {', '.join(str(version) for version, _ in runs)} wrote parts of it, and"
    f" train step {found['step'] - 1} trained it.",
  )
  colors = svg.BLUE, svg.RED, svg.GREEN, svg.VIOLET, svg.AMBER
  cell = min(26.0, 736 / (len(text) + 1))
  picture.text(12, 22, "prompt", anchor="start")
  prompt = found["prompt"].strip()
  picture.text(80, 22, prompt, size=15, anchor="start", is_mono=True)
  # The token after the last character ends the sequence.
  shown = [*text.replace("\n", "↵"), "end"]
  place = 0
  for i, (version, count) in enumerate(runs):
    color = colors[i % len(colors)]
    x = 12 + cell * place
    for character in shown[place : place + count]:
      at = 12 + cell * place
      picture.box(at, 42, cell - 2, 30, color, radius=3)
      picture.text(
        at + cell / 2 - 1,
        62,
        character,
        size=9 if character == "end" else 15,
        color=svg.WHITE,
        is_mono=True,
      )
      place += 1
    middle = (x + 12 + cell * place - 2) / 2
    picture.line([(x, 78), (12 + cell * place - 2, 78)], color, width=2)
    picture.text(middle, 95, f"v{version}", size=12)
  return picture


PICTURES: dict[str, Callable[[], svg.Picture]] = {
  "architecture": architecture,
  "staleness_bound": staleness_bound,
  "decoupled_ppo": decoupled_ppo,
  "lanes": lanes,
  "versions": versions,
  "memory": memory,
  "hardware": hardware,
}


def main(argv: Sequence[str]) -> None:
  """Write every picture."""
  if argv[1:]:
    raise app.UsageError(f"unexpected arguments {' '.join(argv[1:])}")
  if _WORKDIR.value:
    found = pick_completion(pathlib.Path(_WORKDIR.value))
    COMPLETION.write_text(json.dumps(found, indent=2) + "\n")
  DIRECTORY.mkdir(exist_ok=True)
  for name, draw in PICTURES.items():
    (DIRECTORY / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
  app.run(main)
