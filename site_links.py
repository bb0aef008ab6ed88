"""Makes links to source files plain text in the site, which lacks them."""

from markdown import extensions
from markdown import treeprocessors


class _SourceLinks(treeprocessors.Treeprocessor):
  """Unlinks what lies beside docs/; in the repository these links work."""

  def run(self, root):
    for link in root.iter("a"):
      # Pages are one folder deep, so two steps up leave docs/.
      if link.get("href", "").startswith("../../"):
        del link.attrib["href"]


class SiteLinks(extensions.Extension):
  """The extension that zensical.toml names."""

  def extendMarkdown(self, md):  # noqa: N802, the name of Python-Markdown
    md.treeprocessors.register(_SourceLinks(md), "source_links", 0)


def makeExtension(**kwargs):  # noqa: N802, the name of Python-Markdown
  """Return the extension."""
  return SiteLinks(**kwargs)
