"""The shape of the code: layers, file lengths, words, where globals may be."""

import ast
import collections
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxrl_async"

# Each folder of the package, and those that its files may import besides their
# own. A folder may only name folders above it, so the arrows form no cycle.
FOLDERS = {
  "config": "",
  "types": "",
  "environments": "",
  "data/tables": "config environments",
  "devices": "config",
  "storage": "config types",
  "algorithms": "config devices",
  "buffer": "config types storage",
  "models/attention": "config devices",
  "processes": "config storage",
  "reporting": "config storage",
  "text": "config storage",
  "models": "config devices storage models/attention",
  "rewards": "config types text",
  "tools": "config types text rewards",
  "weights": "config devices storage buffer processes",
  "data": "config types data/tables storage text rewards",
  "planning": "config devices models",
  "data/reasoning_gym": "config storage rewards data",
  "engine": "config types devices models/attention reporting models planning",
  "training": (
    "config types devices algorithms buffer models/attention processes"
    " reporting models data planning"
  ),
  "control": (
    "config types storage algorithms buffer processes reporting weights"
    " training"
  ),
  "rollout": (
    "config types devices storage buffer processes reporting text rewards"
    " weights data engine"
  ),
  "serving": "config types processes text tools models engine",
  "sessions": "config environments types storage text engine rollout serving",
  "assembly": (
    "config types data/tables devices storage algorithms models/attention"
    " processes reporting text models rewards tools data planning"
    " data/reasoning_gym engine training rollout serving sessions"
  ),
  "cluster": (
    "config devices storage processes reporting text models weights planning"
    " engine rollout"
  ),
  "policies": (
    "config types devices storage processes reporting text models engine"
    " training serving assembly"
  ),
  "replay": (
    "config types devices storage processes reporting models data engine"
    " training rollout assembly"
  ),
  "evaluation": (
    "config types storage algorithms processes reporting text models rewards"
    " engine rollout assembly policies"
  ),
  "supervised": (
    "config types data/tables devices storage algorithms processes reporting"
    " models rewards data training rollout assembly evaluation"
  ),
  "run": (
    "config types devices storage buffer processes reporting text models"
    " rewards weights data planning engine training rollout serving assembly"
    " cluster replay evaluation"
  ),
  "api": "config rewards data training rollout policies replay run",
}

MAX_LINES = 700
# Where a caught exception is stored or counted, and why.
CATCHES_ALL = {
  "text/tokenizer.py": "the library raises Exception itself",
  "processes/supervisor.py": "the supervisor",
  "reporting/wandb_log.py": "another service; counted as a side output",
  "rewards/scoring.py": "user code",
  "rewards/reasoning.py": "a library parses what a model wrote",
  "rewards/pool.py": "the start of its processes; `warm_up` raises it",
  "rewards/sandbox_candidate.py": "a program that a model wrote",
  "rewards/sandbox_tests.py": "its tests",
  "rewards/sandbox_wire.py": "either of them, told to the other one",
  "config/user_code.py": "user code",
  "environments/verifiers_worker.py": "user code",
  "rollout/episode.py": "user code",
  "sessions/agents.py": "user code",
  "rollout/environment.py": "user code",
  "rollout/calls.py": "user code",
  "rollout/call_outcome.py": "user code",
  "data/reasoning_gym/questions.py": "user code",
  "control/actor.py": "an environment; the run ends with the reason",
}
BANNED_FILES = {"utils.py", "common.py", "helpers.py"}
BANNED_WORDS = re.compile(
  r"\b(new_logp|old_logp(rob)?s?|(rollout|generation|inference|vllm)_logp"
  r"(rob)?s?|(weight|param)_versions?|rollout_ids?|off_policy_steps?)\b"
)
# A script of the user's has no launch script that would set them. Ray reads
# variables, and a replica's process gets the settings of this one. The program
# of an agent inherits the variables, and finds the policy in some more.
USES_SETTINGS = {
  "devices/xla_flags.py": {"os.environ"},
  "cluster/environment.py": {"os.environ", "jax.config"},
  "sessions/agents.py": {"os.environ"},
  "environments/verifiers_worker.py": {"os.environ"},
}
GLOBAL_SETTINGS = {"jax.config", "os.environ", "os.getenv", "os.putenv"}


def package_files():
  return sorted(PACKAGE.rglob("*.py"))


def python_files():
  folders = ("jaxrl_async", "launch", "configs", "benchmarks", "tests")
  return sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))


def name_of(path):
  return path.relative_to(PACKAGE).as_posix()


def folder_of(path):
  """Name of a file's folder in the table; a file at the top is its own."""
  place = path.relative_to(PACKAGE)
  return place.parent.as_posix() if place.parent.name else place.stem


def absolute_imports(tree):
  """Dotted names that a file imports, wherever in the file."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"line {node.lineno}: relative import"
      # What is imported may be a module itself.
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(tree):
  """Paths, without `.py`, of the package's modules that a file imports."""
  for name in absolute_imports(tree):
    parts = name.split(".")
    if parts[0] != "jaxrl_async":
      continue
    while (
      parts and not PACKAGE.parent.joinpath(*parts).with_suffix(".py").exists()
    ):
      parts.pop()  # a name in a module
    assert parts, f"{name} is not a module"
    yield PACKAGE.parent.joinpath(*parts).with_suffix(".py")


def dotted(node):
  """`jax.config` of the expression jax.config, else ""."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
    return f"{base}.{node.attr}"
  return ""


def catches_everything(handler):
  """Whether a handler takes any exception, be it to raise it again."""
  caught = handler.type
  kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
  return any(
    kind is None or dotted(kind) in ("Exception", "BaseException")
    for kind in kinds
  )


@functools.cache
def parsed(path):
  return ast.parse(path.read_text(), filename=str(path))


def test_every_folder_is_in_the_table_after_those_it_imports():
  in_use = {folder_of(path) for path in package_files()} - {"__init__"}
  assert in_use == FOLDERS.keys()
  above = set()
  for folder, imported in FOLDERS.items():
    assert set(imported.split()) <= above, folder
    above.add(folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_those_of_its_line_and_no_others(folder):
  imported = {
    folder_of(module)
    for path in package_files()
    if folder_of(path) == folder
    for module in imported_modules(parsed(path))
  }
  assert imported - {folder} == set(FOLDERS[folder].split())


def test_folders_are_at_most_two_levels_deep_and_hold_two_files():
  for folder in FOLDERS.keys() - {"types", "api"}:
    assert folder.count("/") <= 1
    assert len(list((PACKAGE / folder).glob("[!_]*.py"))) >= 2, folder


def test_a_module_has_one_name_wherever_it_is_imported():
  aliases = collections.defaultdict(set)
  for path in python_files():
    for node in ast.walk(parsed(path)):
      if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
          file = ROOT / node.module.replace(".", "/") / f"{alias.name}.py"
          if node.module.startswith("jaxrl_async") and file.exists():
            aliases[name_of(file)].add(alias.asname or alias.name)
  several = {name: used for name, used in aliases.items() if len(used) > 1}
  assert aliases and not several


def test_the_two_sides_do_not_know_each_other():
  for side in ("rollout", "engine", "serving"):
    assert "training" not in FOLDERS[side].split()
    assert side not in FOLDERS["training"].split()


def test_nothing_outside_a_folder_of_the_package_is_imported_from_the_tests():
  for path in package_files():
    outside = {"tests", "launch", "configs", "benchmarks"}
    roots = {name.split(".")[0] for name in absolute_imports(parsed(path))}
    assert not roots & outside, path


def test_files_stay_short():
  long = {
    str(path.relative_to(ROOT)): lines
    for path in python_files()
    if (lines := len(path.read_text().splitlines())) > MAX_LINES
  }
  assert not long


def test_files_are_named_after_a_concept():
  assert not [path for path in python_files() if path.name in BANNED_FILES]


def test_one_file_imports_jetstream():
  importers = {
    name_of(path)
    for path in package_files()
    for name in absolute_imports(parsed(path))
    if name.split(".")[0] == "jetstream"
  }
  assert importers <= {"engine/jetstream_api.py"}


def test_global_settings_stay_out_of_the_package():
  for path in package_files():
    tree = parsed(path)
    used = {dotted(node) for node in ast.walk(tree)} & GLOBAL_SETTINGS
    assert not used - USES_SETTINGS.get(name_of(path), set()), path
    imported = set(absolute_imports(tree))
    assert not imported & (GLOBAL_SETTINGS | {"absl.flags", "absl.app"}), path
    assert "__future__.annotations" not in imported, path


def test_only_the_supervisor_and_user_code_catch_everything():
  lines = [
    f"{name_of(path)}: line {node.lineno}"
    for path in package_files()
    if not name_of(path).startswith(tuple(CATCHES_ALL))
    for node in ast.walk(parsed(path))
    if isinstance(node, ast.ExceptHandler) and catches_everything(node)
  ]
  assert not lines


def test_words_mean_one_thing():
  used = [
    f"{path.relative_to(ROOT)}: {found.group()}"
    for path in python_files()
    if path.name != "test_layout.py"
    for found in BANNED_WORDS.finditer(path.read_text())
  ]
  assert not used


def test_the_page_of_the_structure_names_what_a_user_starts_and_each_folder():
  page = (ROOT / "docs/project/structure.md").read_text()
  for folder in ("launch", "configs"):
    for path in (ROOT / folder).rglob("*.*"):
      if path.parent.name != "__pycache__":
        assert f" {path.name} " in page, path
  for path in package_files():
    if path.name == "__init__.py" and path.parent != PACKAGE:
      folder = path.parent.relative_to(PACKAGE).as_posix()
      assert f"| `{folder}/` |" in page, folder


def test_the_first_line_of_each_file_says_what_it_is():
  silent = [
    path
    for path in python_files()
    if path.name not in ("__init__.py", "conftest.py")
    and not (ast.get_docstring(parsed(path)) or "").strip()
  ]
  assert not silent


@pytest.mark.parametrize(
  "page", ["README.md", "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
def test_links_of_the_documents_lead_to_files(page):
  page = ROOT / page
  text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
  links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
  files = [link for link in links if "://" not in link]
  missing = [link for link in files if not (page.parent / link).exists()]
  assert not missing


def test_each_page_that_a_file_names_exists():
  files = [*python_files(), ROOT / "README.md", ROOT / "CHANGELOG.md"]
  files += [ROOT / "pyproject.toml", *(ROOT / "launch").rglob("*.*")]
  files += [ROOT / "CONTRIBUTING.md", ROOT / "zensical.toml"]
  missing = {
    f"{path.relative_to(ROOT)}: {page}"
    for path in files
    if path.parent.name != "__pycache__"
    for page in re.findall(r"(?<![\w/])docs/[\w/-]*\.md", path.read_text())
    if not (ROOT / page).exists()
  }
  assert not missing
