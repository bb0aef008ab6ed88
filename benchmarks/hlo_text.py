"""The text of a compiled program, read as instructions.

`jax.stages.Compiled.as_text` returns a list of computations, each of which is a
list of instructions; one computation is the entry, where execution begins. XLA
has no public parser for this text, so regular expressions read the parts that
a count needs. The comments show an example line beside each of them.
"""

import dataclasses
import math
import re

_ITEMSIZE = {"pred": 1.0, "token": 0.0, "opaque": 0.0}
# %fused_computation.1 (p: bf16[8,128]) -> bf16[2,128] {
# ENTRY %main.5 (x: f32[8]) -> f32[8] {
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
#   ROOT %sum.3 = f32[8,4]{1,0} add(%x, %y), metadata={op_name="jit(f)/add"}
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
# What follows "=" begins with the type. The opcode is the first word between a
# space and "(", which the "T(8,128)" of a layout is not:
#  bf16[8,128]{1,0:T(8,128)(2,1)} all-gather(%x), dimensions={0}
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
# bf16[8,128]{1,0:T(8,128)(2,1)S(1)}: dtype, sizes and layout. S(1) places the
# array in memory space 1, the fast memory of a TPU; space 0 is not written out.
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
# add(%x, %y.2)
_OPERAND = re.compile(r"%([\w.\-]+)")
# all-gather(%x), channel_id=5, dimensions={0}
_CHANNEL = re.compile(r"channel_id=(\d+)")
# Devices that communicate with each other, in one of three notations:
# replica_groups={{0,1},{2,3}}      the members of each group
# replica_groups=[2,4]<=[8]         2 groups of 4
# replica_groups=mesh['a'=4,'b'=2] {'a'}         all devices along these axes
# replica_groups=mesh['a'=4,'b'=2] {'a':(1)2}    2 of the 4 along 'a'
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=@?mesh\[([^\]]*)\] ?\{([^}]*)\}")
_AXIS_SIZE = re.compile(r"('\w+')=(\d+)")
_AXIS_IN_GROUP = re.compile(r"('\w+')(?::\(\d+\)(\d+))?")
# HloModule jit_f, is_scheduled=true, num_partitions=4
_NUM_PARTITIONS = re.compile(r"num_partitions=(\d+)")


@dataclasses.dataclass(frozen=True)
class Shape:
  """The type of one array; a tuple has several."""

  dtype: str
  sizes: tuple[int, ...]
  is_in_hbm: bool

  @property
  def num_bytes(self) -> float:
    """The size of the array without the padding of its layout."""
    # The first number of a dtype is that of its bits: bf16, s4, f8e4m3fn.
    bits = re.search(r"\d+", self.dtype)
    itemsize = _ITEMSIZE.get(self.dtype, int(bits[0]) / 8 if bits else 0.0)
    return float(math.prod(self.sizes) * itemsize)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: without the leading "%".
    opcode: such as "add".
    shapes: of the results; more than one if the result is a tuple.
    operands: names of the operands.
    attributes: everything after the opcode's "(" as text, operands included.
    is_root: whether the computation returns the result.
  """

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  def called(self, key: str) -> str:
    """Return the computation that an attribute names, or "".

    In "fusion(%x), kind=kLoop, calls=%step" the key "calls" names "step".
    """
    found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
    return found[1] if found else ""

  @property
  def channel(self) -> str:
    """The channel of a collective, or ""."""
    found = _CHANNEL.search(self.attributes)
    return found[1] if found else ""

  @property
  def is_step(self) -> bool:
    """Whether this is a part of a collective that is cut into steps.

    Its attributes have frontend_attributes={chain_id="0"}.
    """
    return "chain_id=" in self.attributes

  @property
  def is_start(self) -> bool:
    """Whether this begins a collective in steps."""
    return '"AsyncCollectiveStart"' in self.attributes

  @property
  def is_done(self) -> bool:
    """Whether this ends a collective in steps."""
    return '"AsyncCollectiveDone"' in self.attributes


Computation = dict[str, Instruction]


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """Return the computations by name, and the name of the entry."""
  computations, entry, current = {}, "", {}
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      current = computations[head[2]] = {}
      entry = head[2] if head[1] else entry
    elif instruction := _instruction(line):
      current[instruction.name] = instruction
  return computations, entry


def num_partitions(text: str) -> int:
  """Return the number of devices that a program is compiled for."""
  found = _NUM_PARTITIONS.search(text)
  return int(found[1]) if found else 1


def group_size(attributes: str, num_devices: int) -> int:
  """Return the number of devices in one group of a collective.

  Args:
    attributes: of the collective.
    num_devices: of the program; they form one group if no groups are given.
  """
  if found := _LISTED_GROUPS.search(attributes):
    return len(found[1].split(","))
  if found := _COUNTED_GROUPS.search(attributes):
    return int(found[1])
  if found := _MESH_GROUPS.search(attributes):
    sizes = dict(_AXIS_SIZE.findall(found[1]))
    axes = _AXIS_IN_GROUP.findall(found[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  return num_devices


def _shapes(text: str) -> tuple[Shape, ...]:
  return tuple(
    Shape(
      dtype,
      tuple(int(size) for size in sizes.split(",") if size),
      "S(" not in layout,
    )
    for dtype, sizes, layout in _SHAPE.findall(text)
  )


def _instruction(line: str) -> Instruction | None:
  found = _INSTRUCTION.match(line)
  opcode = found and _OPCODE.search(" " + found[3])
  if not found or not opcode:
    return None
  text = " " + found[3]
  # Operands may hold parentheses themselves, so the closing one is counted out.
  depth, end = 1, opcode.end()
  while depth:
    depth += {"(": 1, ")": -1}.get(text[end], 0)
    end += 1
  return Instruction(
    name=found[2],
    opcode=opcode[1],
    shapes=_shapes(text[: opcode.start()]),
    operands=tuple(_OPERAND.findall(text[opcode.end() : end])),
    attributes=text[opcode.end() :],
    is_root=bool(found[1]),
  )
