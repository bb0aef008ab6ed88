"""Importing JetStream leaves the process as it was."""

import json
import pathlib
import subprocess
import sys

_SEEN_IN_A_PROCESS_OF_ITS_OWN = """
import json, logging, sys, types
import prometheus_client

sys.modules["seqio"] = installed = types.ModuleType("seqio")

def families():
  return sorted(f.name for f in prometheus_client.REGISTRY.collect())

root = logging.getLogger()
root.setLevel(logging.ERROR)
handler = logging.NullHandler()
root.addHandler(handler)
before = families()

from jaxrl_async.engine import jetstream_api

eager = [m for m in ("grpc", "jetstream.core.orchestrator") if m in sys.modules]
api = jetstream_api.grpc_api()
print(json.dumps({
  "eager": eager,
  "level": root.level,
  "only_handler": root.handlers == [handler],
  "families": sorted(set(families()) - set(before)),
  "modules": sorted(
    m for m in sys.modules
    if m.split(".")[0] in ("seqio", "tensorflow", "sentencepiece")
  ),
  "seqio": sys.modules["seqio"] is installed,
  "servicer": issubclass(
    api.LLMOrchestrator, api.services.OrchestratorServicer
  ),
  "same": jetstream_api.grpc_api() is api,
}))
"""


def test_importing_jetstream_leaves_no_trace():
  done = subprocess.run(
    [sys.executable, "-c", _SEEN_IN_A_PROCESS_OF_ITS_OWN],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
    timeout=60,
    cwd=pathlib.Path(__file__).resolve().parents[1],
  )
  # The whole of stdout: JetStream's handler wrote to it.
  assert json.loads(done.stdout) == {
    "eager": [],
    "level": 40,
    "only_handler": True,
    "families": [],
    "modules": ["seqio"],
    "seqio": True,
    "servicer": True,
    "same": True,
  }
