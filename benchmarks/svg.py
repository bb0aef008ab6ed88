"""An SVG file that is readable on a white page and on a dark one.

It is written here and not by matplotlib, whose bytes change with its version.
"""

from collections.abc import Sequence
import dataclasses
import html

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

  def area(self, points: Sequence[Point], color: str) -> None:
    """Draw a filled polygon."""
    self._add("polygon", points=_points(points), fill=color)

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
