"""The shape of the code: layers, file lengths, words, where globals may be."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxrl_async"

# Imports point to a lower layer. A new module gets its line here.
LAYERS = {
  0: (
    "config",
    "config_bounds",
    "config_json",
    "directories",
    "mesh_shape",
    "mesh",
    "tpu_chips",
    "topology",
    "types",
    "model_files",
    "storage",
    "workdir",
    "item_json",
  ),
  1: (
    "tokenizer",
    "rewards",
    "advantages",
    "batching",
    "divergences",
    "likelihood",
    "models",
    "worked_solutions",
    "manifest",
    "outstanding",
    "pytree_files",
    "supervisor",
    "hlo",
    "series",
    "timeline",
    "side_outputs",
    "events",
  ),
  2: (
    "aot",
    "config_checks",
    "matmul_rate",
    "memory_estimate",
    "losses",
    "questions",
    "buffer",
    "ledger",
    "weight_transfer",
    "transfer_directory",
    "checkpoint",
    "metrics",
  ),
  3: (
    "objectives",
    "batch_loader",
    "question_server",
    "question_stream",
    "prompts",
    "resume",
  ),
  4: ("rollout", "train_step", "trainer", "held_out"),
  5: ("evaluate", "summary", "progress", "sft", "dry_run", "serving"),
  6: (
    "assembly",
    "device_checks",
    "initial_params",
    "recorder",
    "run_record",
    "snapshot",
    "run",
    "serve",
  ),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
# Folders whose files may import each other.
FOLDERS = {"rewards", "models", "rollout", "serving"}
SAME_LAYER = {
  ("config_bounds", "config"),
  ("config_json", "config"),
  ("directories", "config"),
  ("mesh", "config"),
  ("mesh", "mesh_shape"),
  ("mesh_shape", "config"),
  ("assembly", "device_checks"),
  ("config_json", "storage"),
  ("storage", "workdir"),
  ("workdir", "config"),
  ("weight_transfer", "transfer_directory"),
  ("assembly", "initial_params"),
  ("device_checks", "initial_params"),
  ("serve", "device_checks"),
  ("serve", "initial_params"),
  ("topology", "config"),
  ("trainer", "train_step"),
  ("topology", "tpu_chips"),
  ("tpu_chips", "config"),
  ("prompts", "question_stream"),
  ("run", "assembly"),
  ("recorder", "run_record"),
  ("run", "recorder"),
  ("run", "run_record"),
  ("run", "snapshot"),
  ("serve", "assembly"),
}

MAX_LINES = 500
# Where a caught exception is stored or counted, and why.
CATCHES_ALL = {
  "tokenizer.py": "the library raises Exception itself, nothing more special",
  "supervisor.py": "the supervisor",
  "rewards/service.py": "user code",
  "rollout/episode.py": "user code",
  "question_server.py": "user code",
}
BANNED_FILES = {"utils.py", "common.py", "helpers.py"}
BANNED_WORDS = re.compile(
  r"\b(new_logp|old_logp(rob)?s?|(rollout|generation|inference|vllm)_logp"
  r"(rob)?s?|(weight|param)_versions?|rollout_ids?|off_policy_steps?)\b"
)
GLOBAL_SETTINGS = {"jax.config", "os.environ", "os.getenv", "os.putenv"}


def package_files():
  return sorted(PACKAGE.rglob("*.py"))


def python_files():
  folders = ("jaxrl_async", "launch", "configs", "benchmarks", "tests")
  return sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))


def name_of(path):
  return path.relative_to(PACKAGE).as_posix()


def module_of(path):
  """Module (or folder) of the layer table that a file belongs to."""
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def absolute_imports(tree):
  """Dotted names that a file imports, wherever in the file."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"line {node.lineno}: relative import"
      # What is imported may be a module itself.
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree):
  for name in absolute_imports(tree):
    parts = name.split(".")
    if parts[0] == "jaxrl_async" and len(parts) > 1:
      yield parts[1]


def is_allowed(importer, imported):
  if importer == imported:
    return importer in FOLDERS
  return (importer, imported) in SAME_LAYER or (
    LAYER_OF[imported] < LAYER_OF[importer]
  )


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


def parsed(path):
  return ast.parse(path.read_text(), filename=str(path))


def test_every_module_has_a_layer():
  modules = {module_of(path) for path in package_files()} - {"__init__"}
  assert modules <= LAYER_OF.keys()


@pytest.mark.parametrize("path", package_files(), ids=name_of)
def test_imports_point_down_the_layers(path):
  importer = module_of(path)
  if importer == "__init__":
    assert not list(own_imports(parsed(path)))
    return
  wrong = [x for x in own_imports(parsed(path)) if not is_allowed(importer, x)]
  assert not wrong, f"{importer} imports {wrong}"


def test_the_two_sides_do_not_know_each_other():
  assert not is_allowed("rollout", "trainer")
  assert not is_allowed("trainer", "rollout")


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
  assert importers <= {"rollout/jetstream_api.py"}


@pytest.mark.parametrize("path", package_files(), ids=name_of)
def test_global_settings_stay_out_of_the_package(path):
  tree = parsed(path)
  used = {dotted(node) for node in ast.walk(tree)} & GLOBAL_SETTINGS
  assert not used
  imported = set(absolute_imports(tree))
  assert not imported & (GLOBAL_SETTINGS | {"absl.flags", "absl.app"})
  assert "__future__.annotations" not in imported


@pytest.mark.parametrize("path", package_files(), ids=name_of)
def test_only_the_supervisor_and_user_code_catch_everything(path):
  if name_of(path).startswith(tuple(CATCHES_ALL)):
    return
  lines = [
    node.lineno
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
