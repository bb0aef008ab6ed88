"""The pictures of the documents: as the code draws them, and readable."""

import re
import xml.etree.ElementTree as ET

import benchmark_module
import pytest

pictures = benchmark_module.imported("pictures")
svg = benchmark_module.imported("svg")

_PAGES = sorted((pictures.ROOT / "docs").rglob("*.md"))
_SVG = "{http://www.w3.org/2000/svg}"


def luminance(color):
  """Relative luminance of a colour such as #2a7f9e, as WCAG 2 defines it."""
  parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  linear = [
    x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
  ]
  return sum(
    share * x for share, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
  )


def contrast(one, other):
  """Contrast ratio of two colours, from 1 to 21."""
  dark, light = sorted((luminance(one), luminance(other)))
  return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_committed_picture_is_what_the_code_draws_today(name):
  committed = (pictures.DIRECTORY / f"{name}.svg").read_text()
  drawn = pictures.PICTURES[name]().svg()
  assert drawn == committed, "run benchmarks/pictures.py"
  assert len(committed.encode()) < 60_000


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_has_a_title_and_every_element_lies_inside(name):
  root = ET.fromstring((pictures.DIRECTORY / f"{name}.svg").read_text())
  for child in ("title", "desc"):
    assert root.findtext(f"{_SVG}{child}")
  width, height = float(root.attrib["width"]), float(root.attrib["height"])
  boxes = [x.attrib for x in root.iter(f"{_SVG}rect")]
  assert boxes
  for box in boxes:
    assert float(box["x"]) + float(box["width"]) <= width
    assert float(box["y"]) + float(box["height"]) <= height
  for words in root.iter(f"{_SVG}text"):
    assert 0 <= float(words.attrib["x"]) <= width
    assert 0 <= float(words.attrib["y"]) <= height


def test_every_picture_stands_in_a_page_with_words_in_its_place():
  shown = {}
  for page in _PAGES:
    for words, file in re.findall(
      r"^!\[([^\]]*)\]\((\S*pictures/\S+)\)$", page.read_text(), re.MULTILINE
    ):
      shown[(page.parent / file).resolve()] = words
  files = {pictures.DIRECTORY / f"{name}.svg" for name in pictures.PICTURES}
  assert set(shown) == files == set(pictures.DIRECTORY.iterdir())
  assert all(len(words) > 40 for words in shown.values())


def test_colours_can_be_told_from_a_white_page_and_from_a_dark_one():
  colors = svg.BLUE, svg.RED, svg.VIOLET, svg.GREEN, svg.AMBER, svg.GREY
  for color in colors:
    assert contrast(color, svg.WHITE) > 4.2, color  # of text on it, too
    assert contrast(color, "#1e2129") > 3, color
  for page in (svg.WHITE, "#1e2129"):
    assert contrast(svg.TEXT, page) > 3.9


def test_the_picture_of_the_bound_has_the_groups_of_the_gate():
  # N <= (version + max_staleness + 1) * P over all groups ever admitted.
  for bound in range(4):
    found = pictures.admitted(bound, 2, 5)
    for version in range(5):
      num = sum(admission.birth <= version for admission, _ in found)
      assert num == (version + bound + 1) * 2
    for admission, step in found:
      assert step is None or 0 <= step - admission.birth <= bound


def test_the_memory_of_the_config_is_the_one_that_it_states():
  training = pictures.training_memory({})
  assert f"{training.total / 2**30:.1f}" == "33.8"
  smaller = [pictures.training_memory(x).total for x in pictures.LEVERS[1:]]
  assert max(smaller) < training.total
