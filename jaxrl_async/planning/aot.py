"""Ahead-of-time compilation: the memory that the programs of a run need.

Programs are compiled but not run, for the devices of this machine or for a
slice that it does not have (`topology`).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
import time
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A jitted function with the arguments of a run.

  Attributes:
    arguments: arrays, or shapes with their shardings.
    settings: static arguments by name.
    resident: what else is in the memory of the same devices while it runs.
  """

  name: str
  function: Any
  arguments: tuple[Any, ...]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  resident: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The result of compiling a program; bytes are per device.

  Attributes:
    memory_bytes: arguments, results, temporaries, code, and what else is
      resident.
    temporary_bytes: the temporaries among them.
    refusal: why it did not compile, or "".
    compile_s: time until it compiled or was refused.
    executable: the compiled program, unless it was refused.
  """

  name: str
  memory_bytes: int = 0
  temporary_bytes: int = 0
  refusal: str = ""
  compile_s: float = 0.0
  executable: jax.stages.Compiled | None = None


def placed(shapes: Any, shardings: Any) -> Any:
  """Return shapes with their shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def bytes_a_device(shapes: Any) -> int:
  """Return the memory of arrays on each device.

  An array without a sharding counts as a whole. Arrays in host memory do not
  count.
  """
  total = 0
  for x in jax.tree.leaves(shapes):
    if x.sharding and x.sharding.memory_kind == "pinned_host":
      continue
    shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
    total += math.prod(shape) * x.dtype.itemsize
  return total


def compile_program(program: Program) -> Compiled:
  """Compile a program; a program too large for the devices is a result.

  Raises:
    ConfigError: the program covers a part of a slice that can only be used as a
      whole.
  """
  start_s = time.perf_counter()
  resident = bytes_a_device(program.resident)
  lowered = program.function.lower(*program.arguments, **program.settings)
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    text = str(error)
    sections.require(
      "limited ICI routing" not in text,
      "topology",
      f"{program.name}: on slices of this kind and size a program must use"
      " all chips; use two slices, such as 2xv5e:4x4",
    )
    if "RESOURCE_EXHAUSTED" not in text:
      raise
    return Compiled(
      name=program.name,
      refusal=_out_of_memory(text),
      compile_s=time.perf_counter() - start_s,
    )
  memory = compiled.memory_analysis()
  own = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.generated_code_size_in_bytes
  )
  return Compiled(
    name=program.name,
    memory_bytes=own + resident,
    temporary_bytes=memory.temp_size_in_bytes,
    compile_s=time.perf_counter() - start_s,
    executable=compiled,
  )


def _out_of_memory(text: str) -> str:
  """Return the sentence of XLA's error that has the numbers."""
  line = next(x for x in text.splitlines() if "RESOURCE_EXHAUSTED" in x)
  # ... in memory space hbm. Used 20.51G of 15.75G hbm. Exceeded hbm ...
  found = re.search(r"Used \S+ of \S+ hbm", text)
  return found[0] if found else line.partition("RESOURCE_EXHAUSTED: ")[2]


def misfit(
  slices: Mapping[str, Sequence[Compiled]], chip: tpu_chips.Chip
) -> str:
  """Return which program does not fit a device, and by how much, or ""."""
  for side, programs in slices.items():
    for program in programs:
      if program.refusal:
        return f"{program.name} of the {side} slice: {program.refusal}"
    largest = max(programs, key=lambda x: x.memory_bytes)
    if largest.memory_bytes > chip.hbm_bytes:
      return (
        f"{largest.name} of the {side} slice needs"
        f" {largest.memory_bytes / _GIB:.2f} GiB a device, which has"
        f" {chip.hbm_bytes / _GIB:.2f}"
      )
  return ""


def _bytes(value: float | int) -> str:
  unit, name = (_GIB, "GiB") if value >= _GIB / 10 else (2**20, "MiB")
  return f"{value / unit:,.2f} {name}"


def program_line(program: Compiled) -> str:
  """Return a line about the memory of a program."""
  if program.refusal:
    return f"  {program.name:<10} does not fit: {program.refusal}"
  return (
    f"  {program.name:<10} {_bytes(program.memory_bytes)}"
    f" ({_bytes(program.temporary_bytes)} of temporaries); compiled in"
    f" {program.compile_s:.0f} s"
  )


def slice_line(
  side: str, programs: Sequence[Compiled], chip: tpu_chips.Chip | None
) -> str:
  """Return a line about the memory that a slice needs."""
  largest = max(programs, key=lambda x: x.memory_bytes)
  has = f" of {_bytes(chip.hbm_bytes)}" if chip else ""
  return (
    f"  {side} slice: {_bytes(largest.memory_bytes)}{has} a device, in"
    f" {largest.name}"
  )
