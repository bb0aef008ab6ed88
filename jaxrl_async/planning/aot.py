"""Ahead-of-time compilation: what the programs of a run need and cost.

Programs are compiled but not run, for the devices of this machine or for a
slice that it does not have (`topology`). The results are the memory, FLOPs,
memory traffic and collectives of each program, and the least time they take at
the peak rates of a chip.
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
from jaxrl_async.planning import hlo

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A jitted function with the arguments of a run.

  Attributes:
    arguments: arrays, or shapes with their shardings.
    settings: static arguments by name.
    resident: what else is in the memory of the same devices while it runs.
    max_trips: of loops whose number of trips depends on the data.
  """

  name: str
  function: Any
  arguments: tuple[Any, ...]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  resident: Any = ()
  max_trips: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The result of compiling a program; bytes and FLOPs are per device.

  Attributes:
    memory_bytes: arguments, results, temporaries, code, and what else is
      resident.
    temporary_bytes: the temporaries among them.
    refusal: why it did not compile, or "".
    compile_s: time until it compiled or was refused.
  """

  name: str
  memory_bytes: int = 0
  temporary_bytes: int = 0
  cost: hlo.Cost = hlo.Cost()
  refusal: str = ""
  compile_s: float = 0.0


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
    cost=hlo.Module(compiled.as_text(), program.max_trips).cost(),
    compile_s=time.perf_counter() - start_s,
  )


def _out_of_memory(text: str) -> str:
  """Return the sentence of XLA's error that has the numbers."""
  line = next(x for x in text.splitlines() if "RESOURCE_EXHAUSTED" in x)
  # ... in memory space hbm. Used 20.51G of 15.75G hbm. Exceeded hbm ...
  found = re.search(r"Used \S+ of \S+ hbm", text)
  return found[0] if found else line.partition("RESOURCE_EXHAUSTED: ")[2]


def roofline_s(cost: hlo.Cost, chip: tpu_chips.Chip) -> dict[str, float]:
  """Return the least seconds at each peak rate of a chip.

  The largest of them is the least time of the program.
  """
  sent = sum(sent for _, sent in cost.collectives.values())
  return {
    "products": cost.flops / chip.flops_per_s,
    "memory": cost.hbm_bytes / chip.hbm_bytes_per_s,
    "links": sent / chip.ici_bytes_per_s,
  }


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


def _number(value: float) -> str:
  return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(value: float | int) -> str:
  unit, name = (_GIB, "GiB") if value >= _GIB / 10 else (2**20, "MiB")
  return f"{value / unit:,.2f} {name}"


def _collectives(cost: hlo.Cost) -> str:
  return ", ".join(
    f"{count:,.0f} {kind} {_number(sent / 1e9)} GB"
    for kind, (count, sent) in sorted(cost.collectives.items())
  )


def program_lines(program: Compiled, chip: tpu_chips.Chip | None) -> str:
  """Return lines about one program; without a chip they have no times."""
  cost = program.cost
  if program.refusal:
    return f"  {program.name:<10} does not fit: {program.refusal}"
  lines = [
    f"  {program.name:<10} {_bytes(program.memory_bytes)}"
    f" ({_bytes(program.temporary_bytes)} of temporaries),"
    f" {_number(cost.flops / 1e12)} TFLOP, {_number(cost.hbm_bytes / 1e9)} GB"
    " moved;"
    f" compiled in {program.compile_s:.0f} s",
    f"{'':<13}sends {_collectives(cost) or 'nothing'}",
  ]
  if chip is not None:
    times_s = roofline_s(cost, chip)
    bound = max(times_s, key=lambda name: times_s[name])
    each = ", ".join(
      f"{name} {_number(1e3 * s)}" for name, s in times_s.items()
    )
    lines.append(
      f"{'':<13}at least {_number(1e3 * times_s[bound])} ms, bound by {bound}"
      f" ({each})"
    )
  return "\n".join(lines)


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
