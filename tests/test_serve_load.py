"""What the benchmark of the server under load takes for a leak."""

import os
import threading

import benchmark_module


def test_a_descriptor_that_is_about_to_be_closed_is_no_leak(monkeypatch):
  serve_load = benchmark_module.imported("serve_load", monkeypatch)
  monkeypatch.setattr(serve_load, "_COUNT_S", 0.3)
  process = os.getpid()
  before = serve_load._held(process)["descriptors"]
  soon, stays = os.open(os.devnull, os.O_RDONLY), os.open("/", os.O_RDONLY)
  timer = threading.Timer(0.1, os.close, [soon])
  timer.start()
  assert serve_load._held(process)["descriptors"] == before + 1
  timer.join()
  os.close(stays)
  assert serve_load._held(process)["descriptors"] == before
