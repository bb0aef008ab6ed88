"""Processes that adopt one version at once; used by benchmarks/cluster.py.

The version's arrays are bfloat16, as they are on accelerators. Before each row
its files are dropped from the page cache, and each reader has adopted a small
version, as a replica that has been running for a while.

    adopt_s         from the start until the last reader has all arrays
    gb_per_s        of all readers together
    cpu_s           CPU time of all readers
    digest_gb       bytes of which all readers together computed digests
    disk_gb         bytes that the kernel read from the disk for all readers
    digest_gb_per_s one process that checks the digests, from the page cache
    load_gb_per_s   one process that reads the arrays into its device, likewise
"""

import hashlib
import multiprocessing
import os
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files
from jaxrl_async.weights import weight_transfer

_ARRAYS = 32
_WARM_BYTES = 1_000_000
_DEADLINE_S = 600.0
_REPEATS = 3


def _target(num_bytes: int) -> dict[str, jax.ShapeDtypeStruct]:
  shape = jax.ShapeDtypeStruct(
    (num_bytes // _ARRAYS // 2,),
    jnp.bfloat16,
    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
  )
  return {str(i): shape for i in range(_ARRAYS)}


def _channel(
  directory: pathlib.Path, num_bytes: int
) -> weight_transfer.OrbaxChannel:
  return weight_transfer.OrbaxChannel(
    directory / str(num_bytes), "fan-out", _target(num_bytes)
  )


def _publish(
  directory: pathlib.Path, num_bytes: int
) -> weight_transfer.OrbaxChannel:
  channel = _channel(directory, num_bytes)
  size = num_bytes // _ARRAYS // 2
  values = 0.02 * np.random.default_rng(0).standard_normal(size, np.float32)
  # Copies, because it is an error to publish an array under two names.
  params = {str(i): jnp.asarray(values, jnp.bfloat16) for i in range(_ARRAYS)}
  channel.publish(params, 0)
  del params
  assert channel.wait_for_version(-1, _DEADLINE_S)
  return channel


def _disk_bytes() -> int:
  """Return the bytes that the kernel has read from disks for this process."""
  lines = pathlib.Path("/proc/self/io").read_text().splitlines()
  return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _counted_digests() -> list[int]:
  """Return a list that gets the size of everything that is hashed from now."""
  sizes: list[int] = []
  sha256 = hashlib.sha256

  def counted(data: bytes = b"") -> Any:
    sizes.append(len(data))
    return sha256(data)

  hashlib.sha256 = counted
  return sizes


def _read(
  directory: pathlib.Path, num_bytes: int, barrier: Any, results: Any
) -> None:
  """Adopt the version, at the same time as the other readers."""
  jax.block_until_ready(_channel(directory, _WARM_BYTES).adopt(-1))
  channel = _channel(directory, num_bytes)
  digested = _counted_digests()
  barrier.wait(_DEADLINE_S)
  cpu_s, disk_bytes = time.process_time(), _disk_bytes()
  adopted = channel.adopt(-1)
  assert adopted is not None
  jax.block_until_ready(adopted[0])
  results.put(
    {
      "cpu_s": time.process_time() - cpu_s,
      "digest_gb": 1e-9 * sum(digested),
      "disk_gb": 1e-9 * (_disk_bytes() - disk_bytes),
    }
  )
  barrier.wait(_DEADLINE_S)


def _drop_from_page_cache(directory: pathlib.Path) -> None:
  os.sync()
  for path in directory.rglob("*"):
    if path.is_file():
      with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _row(
  directory: pathlib.Path, num_bytes: int, num_readers: int
) -> dict[str, float]:
  context = multiprocessing.get_context("spawn")
  barrier, results = context.Barrier(num_readers + 1), context.Queue()
  readers = [
    context.Process(target=_read, args=(directory, num_bytes, barrier, results))
    for _ in range(num_readers)
  ]
  for reader in readers:
    reader.start()
  _drop_from_page_cache(directory)
  barrier.wait(_DEADLINE_S)
  start_s = time.perf_counter()
  barrier.wait(_DEADLINE_S)
  took_s = time.perf_counter() - start_s
  found = [results.get(timeout=_DEADLINE_S) for _ in readers]
  for reader in readers:
    reader.join(_DEADLINE_S)
  return {
    "adopt_s": round(took_s, 2),
    "gb_per_s": round(1e-9 * num_readers * num_bytes / took_s, 3),
  } | {
    key: round(sum(one[key] for one in found), 3)
    for key in ("cpu_s", "digest_gb", "disk_gb")
  }


def _rates(version: pathlib.Path, num_bytes: int) -> dict[str, float]:
  # Orbax compresses what it writes.
  on_disk = sum(x.stat().st_size for x in version.rglob("*") if x.is_file())
  digest_s, load_s = [], []
  for _ in range(_REPEATS):
    start_s = time.perf_counter()
    manifest.verify(version)
    digest_s.append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    jax.block_until_ready(pytree_files.load(version, _target(num_bytes)))
    load_s.append(time.perf_counter() - start_s)
  return {
    "digest_gb_per_s": round(1e-9 * on_disk / statistics.median(digest_s), 2),
    "load_gb_per_s": round(1e-9 * num_bytes / statistics.median(load_s), 2),
  }


def measure(
  directory: pathlib.Path, num_bytes: int, readers: list[int]
) -> dict[str, Any]:
  """Return the rows by number of readers, and the rates of one process.

  Args:
    directory: on the disk that is measured.
    num_bytes: of the version.
    readers: numbers of processes that read it at once.
  """
  start_s = time.perf_counter()
  channels = [_publish(directory, _WARM_BYTES), _publish(directory, num_bytes)]
  found: dict[str, Any] = {"publish_s": round(time.perf_counter() - start_s, 2)}
  for count in readers:
    found[str(count)] = _row(directory, num_bytes, count)
    print(count, found[str(count)], flush=True)
  version = directory / str(num_bytes) / "incarnation-fan-out" / "0"
  found |= _rates(version, num_bytes)
  for channel in channels:
    channel.close()
  return found
