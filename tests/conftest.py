"""Session settings: CPU, 8 virtual devices, strict types, shapes checked."""

import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    # On processors with AVX-512 the products of this library depend, in their
    # last bits, on the row that a sequence has in its batch.
    "--xla_cpu_experimental_ynn_fusion_type=",
  ]
)

import jax
import jaxtyping

pytest_plugins = ["skips"]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update(
  "jax_compilation_cache_dir",
  str(pathlib.Path(tempfile.gettempdir()) / "jaxrl_async_test_cache"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

jaxtyping.install_import_hook("jaxrl_async", "beartype.beartype")


def pytest_collection_modifyitems(config, items):
  """Leave tests of the sandbox out where none can be made, and say so."""
  tests = [item for item in items if item.get_closest_marker("sandbox")]
  if not tests:
    return
  from jaxrl_async.rewards import (
    sandbox as sandbox_lib,
  )  # after the import hook above

  try:
    sandbox_lib.find()
  except sandbox_lib.SandboxError as error:
    print(f"{len(tests)} tests of the sandbox are left out: {error}")
    items[:] = [item for item in items if item not in tests]
    config.hook.pytest_deselected(items=tests)
