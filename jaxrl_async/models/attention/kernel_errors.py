"""The errors with which a kernel refuses a device, a dtype or a shape."""

import sys

# Errors of Pallas, which have neither a public name nor a common base class.
_PALLAS_ERRORS = {
  "jax._src.pallas.mosaic.error_handling": "MosaicError",
  "jax._src.pallas.mosaic.lowering": "LoweringException",
  "jax._src.pallas.mosaic_gpu.lowering": "LoweringError",
  "jax._src.pallas.triton.lowering": "LoweringError",
}


def refusals() -> tuple[type[Exception], ...]:
  """Return the errors that mean that a kernel does not fit a device.

  RuntimeError includes JaxRuntimeError (errors of the compiler and the device),
  NotImplementedError and a missing cuDNN. An error of a module that nobody has
  imported has not been raised.
  """
  loaded = (
    getattr(sys.modules.get(module), name, None)
    for module, name in _PALLAS_ERRORS.items()
  )
  return (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    ImportError,
    *(error for error in loaded if error is not None),
  )
