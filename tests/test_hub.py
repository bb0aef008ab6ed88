"""Models of the hub, from a small server that speaks its protocol."""

import hashlib
from http import server as http_server
import json
import pathlib
import shutil
import socket
import threading
import urllib.parse

from huggingface_hub import constants
import jax
import numpy as np
import pytest
import stored_run
import test_assembly

from configs import tiny
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import hub
from jaxrl_async.policies import export
from jaxrl_async.policies import policy as policy_lib
from jaxrl_async.policies import stored_policy
from jaxrl_async.serving import front as front_lib

COMMIT = "5" * 40
# What the hub answers for a repository that it does not show.
REFUSALS = {
  "org/private": (401, "RepoNotFound"),
  "org/gated": (403, "GatedRepo"),
  "org/busy": (429, ""),
  "org/broken": (500, ""),
}


class Handler(http_server.BaseHTTPRequestHandler):
  """The hub's listing of a commit, its files, and its refusals."""

  root: pathlib.Path
  asked: list[str] = []
  damage: dict[str, bytes] = {}  # by file: what is sent instead
  protocol_version = "HTTP/1.1"

  def do_HEAD(self):  # noqa: N802
    self._answer(has_body=False)

  def do_GET(self):  # noqa: N802
    self._answer(has_body=True)

  def _answer(self, has_body):
    path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
    self.asked.append(path)
    name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
    if name in REFUSALS:
      return self._send(*REFUSALS[name])
    if not (self.root / name).is_dir():
      return self._send(404, "RepoNotFound")
    rest = path.partition(name)[2].split("/")[1:]
    if rest[0] == "revision":
      if rest[1] not in ("main", "v1", COMMIT):
        return self._send(404, "RevisionNotFound")
      return self._json({"id": name, "sha": COMMIT, "siblings": []})
    if rest[0] == "tree":
      files = sorted(f for f in (self.root / name).rglob("*") if f.is_file())
      return self._json([self._entry(file, self.root / name) for file in files])
    file = self.root / name / "/".join(rest[2:])
    content = self.damage.get(file.name, file.read_bytes())
    self.send_response(200)
    self.send_header("X-Repo-Commit", COMMIT)
    self.send_header("ETag", f'"{digest(file)}"')
    self.send_header("Content-Length", str(file.stat().st_size))
    self.end_headers()
    if has_body:
      self.wfile.write(content)
      if len(content) < file.stat().st_size:
        self.close_connection = True

  def _entry(self, file, directory):
    size = file.stat().st_size
    entry = {"type": "file", "path": str(file.relative_to(directory))}
    entry |= {"size": size, "oid": "0" * 40}
    if file.suffix == ".safetensors":
      entry["lfs"] = {"oid": digest(file), "size": size, "pointerSize": 100}
    return entry

  def _json(self, value):
    text = json.dumps(value).encode()
    self.send_response(200)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(text)))
    self.end_headers()
    self.wfile.write(text)

  def _send(self, status, code):
    self.send_response(status)
    if code:
      self.send_header("X-Error-Code", code)
    self.send_header("Content-Length", "0")
    self.end_headers()

  def log_message(self, *_):
    pass


def digest(file):
  return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def params(tmp_path, monkeypatch):
  """A hub with org/model, and an empty cache; returns the model's weights."""
  Handler.root, Handler.asked, Handler.damage = tmp_path / "hub", [], {}
  directory = Handler.root / "org" / "model"
  written = test_assembly.write_pretrained(directory, get_config())
  (directory / "onnx").mkdir()
  (directory / "onnx" / "model.onnx").write_bytes(b"x" * 100)
  (directory / "pytorch_model.bin").write_bytes(b"x" * 100)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
  with http_server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield written
    server.shutdown()
    thread.join(10)


def get_config(name=""):
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  config.model.name = name or config.model.name
  return config


def started(name):
  """The parameters that a run of a model of the hub begins with."""
  setup = checks.checked(get_config(name), jax.devices()[:2])
  return initial_params.before_training(setup)


@pytest.mark.parametrize("name", ["hf:org/model", "hf:org/model@v1"])
def test_a_run_begins_with_the_weights_of_a_model_of_the_hub(params, name):
  jax.tree.map(np.testing.assert_array_equal, params, started(name))
  # Nothing was downloaded that the run does not read.
  assert not any("onnx/" in path or ".bin" in path for path in Handler.asked)


def test_checks_and_dry_runs_do_not_download_weights(params):
  checks.checked(get_config("hf:org/model"), jax.devices()[:2])
  assert any("config.json" in path for path in Handler.asked)
  assert not any("safetensors" in path for path in Handler.asked)


def test_what_is_in_the_cache_needs_no_hub(params, monkeypatch):
  started("hf:org/model")
  monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
  jax.tree.map(np.testing.assert_array_equal, params, started("hf:org/model"))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  jax.tree.map(np.testing.assert_array_equal, params, started("hf:org/model"))


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("hf:org/none", "there is no such repository, or it is private"),
    ("hf:org/private", "there is no such repository, or it is private"),
    ("hf:org/gated", "give access on request.*HF_TOKEN"),
    ("hf:org/model@v9", "there is no revision 'v9'"),
    ("hf:org/busy", "is not in the cache.*429"),
    ("hf:org/broken", "is not in the cache.*500"),
    ("hf:", "is not in the cache"),
    ("hf:a/b/c", "is not in the cache"),
    ("hf:../up", "is not in the cache"),
  ],
)
def test_what_the_hub_refuses_is_one_line(params, name, message):
  with pytest.raises(sections.ConfigError, match=message) as error:
    started(name)
  assert str(error.value).startswith("model.name: ")
  assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_one_line(params, monkeypatch):
  monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
  with pytest.raises(
    sections.ConfigError, match="is not in the cache"
  ) as error:
    started("hf:org/model")
  assert "\n" not in str(error.value)


def test_a_hub_that_does_not_answer_is_one_line_or_the_cache(
  params, monkeypatch
):
  monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
  with socket.create_server(("127.0.0.1", 0)) as silent:
    address = f"http://127.0.0.1:{silent.getsockname()[1]}"
    with monkeypatch.context() as patch:
      patch.setattr(constants, "ENDPOINT", address)
      with pytest.raises(
        sections.ConfigError, match="is not in the cache .*Timeout"
      ) as error:
        started("hf:org/model")
      assert "\n" not in str(error.value)
    started("hf:org/model")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    jax.tree.map(np.testing.assert_array_equal, params, started("hf:org/model"))


def test_weights_that_were_damaged_on_the_way_are_refused(params):
  weights = Handler.root / "org" / "model" / "model.safetensors"
  Handler.damage = {weights.name: weights.read_bytes()[:-1] + b"\0"}
  with pytest.raises(sections.ConfigError, match="damaged.*delete"):
    started("hf:org/model")


@pytest.mark.slow  # huggingface_hub tries five times
def test_half_of_a_file_is_never_in_the_snapshot(params):
  weights = Handler.root / "org" / "model" / "model.safetensors"
  Handler.damage = {weights.name: weights.read_bytes()[:1_000]}
  with pytest.raises(
    sections.ConfigError, match="is not in the cache"
  ) as error:
    started("hf:org/model")
  assert "\n" not in str(error.value)
  Handler.damage = {}
  jax.tree.map(np.testing.assert_array_equal, params, started("hf:org/model"))


@pytest.mark.parametrize("kind", ["name", "directory"])
def test_a_run_is_used_without_the_model_it_began_with(
  params, tmp_path, monkeypatch, kind
):
  source = Handler.root / "org" / "model"
  template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
  (source / "chat_template.jinja").write_text(template)
  (source / "generation_config.json").write_text(
    json.dumps({"eos_token_id": [1], "top_k": 20})
  )
  config = get_config("hf:org/model" if kind == "name" else str(source))
  setup = checks.checked(config, jax.devices()[:2])
  workdir = stored_run.write(tmp_path / "run", config, setup.model)
  shutil.rmtree(workdir / "tokenizer")
  setup_lib.save_tokenizer(setup, workdir / "tokenizer")
  shutil.rmtree(source)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  messages = [{"role": "user", "content": "1+2"}]
  policy = policy_lib.load(stored_policy.find(workdir), jax.devices()[:1])
  assert policy._chat_template.render(messages) == "<user>1+2"
  out = tmp_path / "out"
  export.export(stored_policy.find(workdir), out, dtype="float32")
  exported = policy_lib.load(stored_policy.find(out), jax.devices()[:1])
  jax.tree.map(np.testing.assert_array_equal, policy._params, exported._params)
  assert exported._chat_template.render(messages) == "<user>1+2"
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation == {"eos_token_id": [1], "top_k": 20}
  plan_config = stored_policy.own_config(stored_policy.find(workdir))
  assert plan_config.model.name == str(workdir / "tokenizer")


@pytest.mark.filterwarnings("ignore")
def test_transformers_renders_the_chat_of_an_export(params, tmp_path):
  transformers = pytest.importorskip("transformers")
  source = Handler.root / "org" / "model"
  template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
  (source / "chat_template.jinja").write_text(template + "{{ eos_token }}")
  out = tmp_path / "out"
  stored = stored_policy.find("hf:org/model")
  export.export(stored, out, dtype="float32")
  messages = [{"role": "user", "content": "1+2"}]
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  theirs = tokenizer.apply_chat_template(messages, tokenize=False)
  assert theirs == stored_policy.chat_template(stored).render(messages)
  assert theirs.startswith("[1+2]") and len(theirs) > 5
  ids = tokenizer("[1+2]").input_ids
  assert ids == stored_policy.tokenizer(stored).encode("[1+2]").tolist()


@pytest.mark.parametrize("name", ["hf:org/none", "hf:org/gated", "hf:a/b/c"])
def test_a_policy_of_the_hub_that_cannot_be_read_is_one_line(params, name):
  with pytest.raises(sections.ConfigError, match="^checkpoint: ") as error:
    stored_policy.find(name)
  assert "\n" not in str(error.value)


def test_a_served_run_has_the_chat_template_of_its_model(params):
  template = "{{ messages[0].content }}!"
  source = Handler.root / "org" / "model"
  (source / "chat_template.jinja").write_text(template)
  setup = checks.checked(get_config("hf:org/model"), jax.devices()[:2])
  front = front_lib.of_a_run(
    front_lib.ServeSettings(port=0),
    setup.config,
    setup.model,
    setup.tokenizer,
    setup.pretrained,
    lambda: True,
  )
  messages = [{"role": "user", "content": "1"}]
  front.start(print)  # or its sockets stay open
  try:
    assert front._service.chat_template.render(messages) == "1!"
  finally:
    front.close(10.0, print)


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{% for m in messages %}{{ m.content }", "chat_template.jinja.*line 1"),
    ("{{ messages | nofilter }}", "chat_template.jinja.*nofilter"),
    (
      "{% if not tools %}{{ raise_exception('tools\nplease') }}{% endif %}",
      "the chat template refused: tools please",
    ),
  ],
)
def test_a_template_that_cannot_render_the_task_is_one_line(
  params, template, message
):
  source = Handler.root / "org" / "model"
  (source / "chat_template.jinja").write_text(template)
  config = get_config("hf:org/model")
  config.task.chat = True
  with pytest.raises(sections.ConfigError, match=message) as error:
    checks.checked(config, jax.devices()[:2])
  assert "\n" not in str(error.value)


def test_names_are_split_at_the_revision():
  assert hub.repository("hf:org/model@v1") == ("org/model", "v1")
  assert hub.repository("hf:org/model") == ("org/model", None)
  assert hub.repository("/a@b/model") == ("/a@b/model", None)
