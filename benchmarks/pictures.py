"""Draw the pictures of docs/: SVG files, the same bytes wherever it runs.

    uv run benchmarks/pictures.py

writes every picture into docs/pictures/. What a picture shows is computed by
the code that it is about: the staleness bound by the buffer, the objective by
the loss, memory by the estimate. Colours and text have contrast on a white page
and on a dark one, so one file serves both.

The files are written here and not by matplotlib, whose bytes change with its
version, so tests/test_pictures.py can compare them with the committed ones.
"""

from collections.abc import Callable, Sequence
import dataclasses
import html
import pathlib

from absl import app
import jax.numpy as jnp
import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import losses
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.config import sections

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "docs/pictures"

# Each has a contrast of 4.4 with white text on it, of 3.5 with a dark page.
BLUE, RED, VIOLET = "#2a7f9e", "#c2533b", "#7d68bf"
GREEN, AMBER, GREY = "#47833e", "#9c6d1a", "#737983"
TEXT = "#7a8089"  # as far from white as from a dark page, 4.0
WHITE = "#ffffff"
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"

Point = tuple[float, float]


def _number(x: float) -> str:
  """Return a length with at most one decimal."""
  return f"{x:.1f}".removesuffix(".0")


@dataclasses.dataclass
class Picture:
  """An SVG file that is being drawn; lengths are in pixels.

  Attributes:
    width: of the picture.
    height: of the picture.
    title: its name, for readers that do not see it.
    description: what it shows, in a sentence or two.
    elements: what was drawn, in its order.
  """

  width: int
  height: int
  title: str
  description: str
  elements: list[str] = dataclasses.field(default_factory=list)

  def _add(self, name: str, content: str = "", **attributes: object) -> None:
    values = "".join(
      f' {key.rstrip("_").replace("_", "-")}="'
      f'{_number(x) if isinstance(x, int | float) else html.escape(str(x))}"'
      for key, x in attributes.items()
      if x not in (None, "")
    )
    end = f">{content}</{name}>" if content else "/>"
    self.elements.append(f"<{name}{values}{end}")

  def box(
    self,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    *,
    is_filled: bool = True,
    opacity: float | None = None,
    dash: str = "",
    radius: float = 6,
  ) -> None:
    """Draw a rectangle with round corners, filled or as an outline."""
    self._add(
      "rect",
      x=x,
      y=y,
      width=width,
      height=height,
      rx=radius,
      fill=color if is_filled else "none",
      fill_opacity=None if opacity is None else f"{opacity:g}",
      stroke=None if is_filled else color,
      stroke_width=None if is_filled else 1.5,
      stroke_dasharray=dash,
    )

  def text(
    self,
    x: float,
    y: float,
    words: str,
    *,
    size: float = 13,
    color: str = TEXT,
    anchor: str = "middle",
    is_bold: bool = False,
    is_mono: bool = False,
  ) -> None:
    """Write one line; y is the base line."""
    self._add(
      "text",
      html.escape(words, quote=False),
      x=x,
      y=y,
      font_size=size,
      fill=color,
      text_anchor=None if anchor == "start" else anchor,
      font_weight=600 if is_bold else None,
      font_family="ui-monospace,Menlo,Consolas,monospace" if is_mono else None,
    )

  def line(
    self,
    points: Sequence[Point],
    color: str = GREY,
    *,
    width: float = 1.5,
    dash: str = "",
    has_arrow: bool = False,
  ) -> None:
    """Draw a line through points, with the head of an arrow at its end."""
    points = list(points)
    if has_arrow:
      (x0, y0), (x1, y1) = points[-2:]
      length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
      dx, dy = (x1 - x0) / length, (y1 - y0) / length
      base = x1 - 8 * dx, y1 - 8 * dy
      corners = (
        (x1, y1),
        (base[0] - 4 * dy, base[1] + 4 * dx),
        (base[0] + 4 * dy, base[1] - 4 * dx),
      )
      self._add("polygon", points=_points(corners), fill=color)
      points[-1] = base
    self._add(
      "polyline",
      points=_points(points),
      fill="none",
      stroke=color,
      stroke_width=width,
      stroke_dasharray=dash,
    )

  def dot(self, x: float, y: float, radius: float, color: str) -> None:
    """Draw a filled circle."""
    self._add("circle", cx=x, cy=y, r=radius, fill=color)

  def named_box(
    self,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    name: str,
    *lines: str,
  ) -> None:
    """Draw a filled box with its name and further lines in the middle."""
    self.box(x, y, width, height, color)
    middle = x + width / 2
    first = y + height / 2 + 5 - 8 * len(lines)
    self.text(middle, first, name, size=14, color=WHITE, is_bold=True)
    for i, line in enumerate(lines, 1):
      self.text(middle, first + 16 * i, line, size=12, color=WHITE)

  def legend(
    self, x: float, y: float, entries: Sequence[tuple[str, str, float]]
  ) -> None:
    """Write names behind squares of their colour, each with a width."""
    for color, name, width in entries:
      self.box(x, y - 10, 12, 12, color, radius=2)
      self.text(x + 18, y, name, size=12.5, anchor="start")
      x += width

  def svg(self) -> str:
    """Return the file."""
    head = (
      f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{self.width}"'
      f' height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
      f' font-family="{_FONT}">'
    )
    title = f"<title>{html.escape(self.title, quote=False)}</title>"
    words = f"<desc>{html.escape(self.description, quote=False)}</desc>"
    return "\n".join([head, title, words, *self.elements, "</svg>"]) + "\n"


def _points(points: Sequence[Point]) -> str:
  return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def architecture() -> Picture:
  """Return the parts of a run, coloured by the thread that runs them."""
  picture = Picture(
    860,
    444,
    "The parts of a run",
    "The coordinator admits prompts through the buffer, the engine on the"
    " rollout slice writes completions, reward processes score them, and the"
    " buffer hands groups to the batch loader and the trainer on the training"
    " slice, whose weights go back to the engine. Colours are threads.",
  )
  for x, name in ((10, "rollout slice"), (664, "training slice")):
    picture.box(x, 92, 186, 200, GREY, is_filled=False, dash="5 4")
    picture.text(x + 93, 114, name, is_bold=True)
  picture.named_box(26, 132, 154, 84, BLUE, "engine", "continuous batching")
  for i, words in enumerate(
    ("each token keeps", "its logprob and", "its policy version")
  ):
    picture.text(103, 240 + 18 * i, words)
  trainer = "trainer", "proximal logprobs,", "updates"
  picture.named_box(680, 132, 154, 84, RED, *trainer)
  picture.text(757, 240, "train step s makes")
  picture.text(757, 258, "version s + 1")
  coordinator = "coordinator", "episodes,", "admission"
  picture.named_box(256, 132, 112, 84, BLUE, *coordinator)
  picture.named_box(256, 24, 112, 44, AMBER, "prompts")
  picture.named_box(256, 272, 112, 44, AMBER, "rewards")
  picture.box(418, 100, 112, 148, GREY, is_filled=False)
  picture.text(474, 122, "buffer", size=14, is_bold=True)
  _buffer_cells(picture, 434, 136)
  picture.text(474, 66, "staleness bound:")
  picture.text(474, 84, "no group past its deadline")
  picture.named_box(418, 286, 112, 44, GREY, "ledger")
  loader = "loader", "advantages,", "packing"
  picture.named_box(554, 132, 88, 84, GREEN, *loader)
  picture.named_box(335, 364, 190, 40, VIOLET, "weight transfer")
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
  picture.line([(757, 292), (757, 384), (526, 384)], VIOLET, has_arrow=True)
  picture.text(642, 376, "publish version s + 1", size=12.5)
  picture.line([(335, 384), (103, 384), (103, 293)], VIOLET, has_arrow=True)
  picture.text(218, 376, "adopt between two calls", size=12.5)
  picture.text(10, 434, "threads:", size=12.5, anchor="start")
  picture.legend(
    78,
    434,
    [
      (BLUE, "rollout worker", 140),
      (GREEN, "batch loader", 126),
      (RED, "main", 80),
      (VIOLET, "weight-transfer", 146),
      (AMBER, "processes of their own", 0),
    ],
  )
  return picture


def _buffer_cells(picture: Picture, x: float, y: float) -> None:
  """Draw a buffer of two groups a step; some have finished, some still run."""
  finished = {(0, 0), (0, 1), (1, 0)}
  for column, step in enumerate(("s", "s+1", "s+2")):
    for row in range(2):
      at = x + 28 * column, y + 28 * row
      if (column, row) in finished:
        picture.box(*at, 24, 24, BLUE, radius=3)
      elif column < 2:
        picture.box(*at, 24, 24, BLUE, radius=3, opacity=0.35)
      else:
        picture.box(*at, 24, 24, GREY, is_filled=False, radius=3, dash="3 3")
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


def staleness_bound() -> Picture:
  """Return the groups that are admitted under three bounds, and trained."""
  groups_per_step, num_steps, cell, row = 2, 5, 27, 17
  picture = Picture(
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
      picture.box(first, top, width, row - 3, BLUE, opacity=0.4, radius=3)
      if trained is not None:
        at = x + cell * trained
        picture.box(at, top, cell - 2, row - 3, RED, radius=3)
        middle, staleness = at + cell / 2 - 1, trained - admission.birth
        picture.text(middle, top + 11, str(staleness), size=11, color=WHITE)
      label = "group 0" if i == bound == 0 else str(i)
      picture.text(x - 8, top + 11, label, size=11, anchor="end")
  picture.text(56, 56, "train step", size=11, anchor="end")
  picture.legend(
    64,
    334,
    [(RED, "the train step, and the staleness of its tokens", 340)],
  )
  picture.box(404, 324, 12, 12, BLUE, opacity=0.4, radius=2)
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


def decoupled_ppo() -> Picture:
  """Return three policies and the clip, and the objective by the ratio."""
  section = sections.AlgorithmSection()
  low, high = section.clip_low, section.clip_high
  picture = Picture(
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


def _policies(picture: Picture, low: float, high: float) -> None:
  """Draw three policies on a line, and the clip around the proximal one."""
  y, behavior, proximal, scale = 112, 120, 470, 450
  left, right = proximal - scale * low, proximal + scale * high
  current = proximal + scale * high * 0.6
  picture.box(left, y - 22, right - left, 44, RED, opacity=0.25)
  picture.line([(30, y), (730, y)])
  for x, color, name, words in (
    (behavior, BLUE, "behavior", "drew the token"),
    (proximal, RED, "proximal", "before the train step"),
    (current, VIOLET, "theta", "is being updated"),
  ):
    at = x + 90 if x == current else x
    picture.text(at, 24, name, is_bold=True, size=14, color=color)
    picture.text(at, 42, words)
    picture.line([(at, 50), (x, y - 12)], color, width=1)
    picture.dot(x, y, 8, color)
  under = y + 44
  picture.line([(behavior, under), (proximal, under)], BLUE, has_arrow=True)
  picture.text(
    (behavior + proximal) / 2,
    under + 18,
    "w = pi_prox / pi_behav, without gradient",
  )
  picture.line([(proximal, under), (current, under)], VIOLET, has_arrow=True)
  picture.text(
    proximal + 20, under + 18, "r = pi_theta / pi_prox", anchor="start"
  )
  picture.text(
    right + 10,
    y + 18,
    f"clip: {1 - low:g} to {1 + high:g}",
    color=RED,
    anchor="start",
  )


def _objectives(picture: Picture, low: float, high: float) -> None:
  """Draw the objective by the ratio, for both signs of the advantage."""
  ratios = [0.4 + 0.05 * i for i in range(25)]
  scale_x, scale_y, top, height = 220, 88, 240, 150
  for x, advantage in ((60, 1.0), (430, -1.0)):
    axis = top + height if advantage > 0 else top

    def place(
      ratio: float, value: float, x: float = x, axis: float = axis
    ) -> Point:
      return x + scale_x * (ratio - 0.4), axis - scale_y * value

    (left, _), (right, _) = place(1 - low, 0), place(1 + high, 0)
    picture.box(left, top, right - left, height, RED, opacity=0.25)
    picture.line([(x, top), (x, top + height)], width=1)
    picture.line([(x, axis), (x + scale_x * 1.25, axis)], width=1)
    straight = [place(r, r * advantage) for r in (ratios[0], ratios[-1])]
    picture.line(straight, GREY, dash="4 4", width=1.2)
    values = objective(ratios, advantage, low, high)
    points = [place(*pair) for pair in zip(ratios, values, strict=True)]
    picture.line(points, VIOLET, width=2.5)
    for ratio in (1 - low, 1.0, 1 + high):
      at, _ = place(ratio, 0)
      picture.text(at, top + height + 18, f"{ratio:g}", size=12)
    sign = ">" if advantage > 0 else "<"
    picture.text(x, top - 10, f"A {sign} 0", is_bold=True, anchor="start")
    picture.text(x + 280, top + height + 18, "r", is_bold=True)
  picture.line([(60, 430), (90, 430)], VIOLET, width=2.5)
  words = f"min(r A, clip(r, {1 - low:g}, {1 + high:g}) A)"
  picture.text(98, 435, words, anchor="start")
  picture.line([(430, 430), (460, 430)], GREY, dash="4 4", width=1.2)
  picture.text(468, 435, "r A", anchor="start")


PICTURES: dict[str, Callable[[], Picture]] = {
  "architecture": architecture,
  "staleness_bound": staleness_bound,
  "decoupled_ppo": decoupled_ppo,
}


def main(argv: Sequence[str]) -> None:
  """Write every picture."""
  if argv[1:]:
    raise app.UsageError(f"unexpected arguments {' '.join(argv[1:])}")
  DIRECTORY.mkdir(exist_ok=True)
  for name, draw in PICTURES.items():
    (DIRECTORY / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
  app.run(main)
