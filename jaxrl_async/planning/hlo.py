"""What a compiled program does on one device, read off XLA's text of it.

XLA's own count takes the body of a loop once; here it is taken as often as the
loop runs. Three numbers come of it: FLOPs of matrix products (of kernels, what
they state), bytes to and from memory (of each fusion what it reads and writes,
slices as slices; what stays in a TPU's fast memory costs nothing), and bytes
that collectives send.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

import numpy as np

_ITEMSIZE = {"pred": 1.0, "token": 0.0, "opaque": 0.0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
# What moves nothing: names for values, or values counted where they are used.
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all while call"
  " conditional partition-id replica-id iota optimization-barrier".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")
# Where they are done in place, only these operands move: what is written.
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
# Bytes that each of n devices sends in a ring, over those of the result.
_SENT = {
  "all-gather": lambda n: (n - 1) / n,
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "reduce-scatter": lambda n: n - 1,
  "all-to-all": lambda n: (n - 1) / n,
  "ragged-all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
  "collective-broadcast": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array, or one of a tuple's."""

  dtype: str
  sizes: tuple[int, ...]
  is_in_hbm: bool

  @property
  def num_bytes(self) -> float:
    """Without the padding of its layout."""
    bits = re.search(r"\d+", self.dtype)
    itemsize = _ITEMSIZE.get(self.dtype, int(bits[0]) / 8 if bits else 0.0)
    return float(math.prod(self.sizes) * itemsize)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: its results, operands by name, and the rest as text."""

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  def called(self, key: str) -> str:
    """The computation of that attribute, or ""."""
    found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one device.

  Attributes:
    collectives: by kind, how many run and how many bytes the device sends, in
      a ring.
  """

  flops: float = 0.0
  hbm_bytes: float = 0.0
  collectives: dict[str, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )

  def plus(self, other: "Cost", times: int = 1) -> "Cost":
    """The sum with some times another."""
    kinds = dict(self.collectives)
    for kind, (count, sent) in other.collectives.items():
      before = kinds.get(kind, (0.0, 0.0))
      kinds[kind] = before[0] + times * count, before[1] + times * sent
    return Cost(
      self.flops + times * other.flops,
      self.hbm_bytes + times * other.hbm_bytes,
      kinds,
    )


Computation = dict[str, Instruction]


def _is_step(this: Instruction) -> bool:
  return "chain_id=" in this.attributes


def _channel(this: Instruction) -> str:
  found = re.search(r"channel_id=(\d+)", this.attributes)
  return found[1] if found else ""


def _is_start(this: Instruction) -> bool:
  return '"AsyncCollectiveStart"' in this.attributes


def _is_done(this: Instruction) -> bool:
  return '"AsyncCollectiveDone"' in this.attributes


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
  depth, end = 1, opcode.end()
  while depth:
    depth += {"(": 1, ")": -1}.get(text[end], 0)
    end += 1
  return Instruction(
    name=found[2],
    opcode=opcode[1],
    shapes=_shapes(text[: opcode.start()]),
    operands=tuple(re.findall(r"%([\w.\-]+)", text[opcode.end() : end])),
    attributes=text[opcode.end() :],
    is_root=bool(found[1]),
  )


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """Computations by name, and the name of the first one to run."""
  computations, entry, current = {}, "", {}
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      current = computations[head[2]] = {}
      entry = head[2] if head[1] else entry
    elif instruction := _instruction(line):
      current[instruction.name] = instruction
  return computations, entry


def group_size(attributes: str, num_devices: int) -> int:
  """Devices of one group of a collective."""
  if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
    return len(found[1].split(","))
  if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
    return int(found[1])
  if found := re.search(
    r"replica_groups=@?mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes
  ):
    sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
    axes = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", found[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  return num_devices


def _pairs(out: int, inner: int, width: int, window: dict[str, int]) -> int:
  """Places of a window, in one direction, where it meets an input."""
  at = np.arange(out)[:, None] * window["stride"]
  at = at + np.arange(width)[None] * window["rhs_dilate"] - window["pad"]
  last = (inner - 1) * window["lhs_dilate"]
  return int(
    ((at >= 0) & (at <= last) & (at % window["lhs_dilate"] == 0)).sum()
  )


def _convolution_flops(left: Shape, right: Shape, this: Instruction) -> float:
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", this.attributes)
  assert labels is not None
  window = re.search(r"window=\{([^}]*)\}", this.attributes)
  fields = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
  out = this.shapes[0].sizes
  flops = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")]
  flops *= right.sizes[labels[2].index("i")]
  for i in range(len(labels[1]) - 2):
    axis = str(i)

    def field(name, default, i=i):
      return (
        int(fields[name].split("x")[i].split("_")[0] or 0)
        if (name in fields)
        else default
      )

    flops *= _pairs(
      out[labels[3].index(axis)],
      left.sizes[labels[1].index(axis)],
      right.sizes[labels[2].index(axis)],
      {
        "stride": field("stride", 1),
        "pad": field("pad", 0),
        "lhs_dilate": field("lhs_dilate", 1),
        "rhs_dilate": field("rhs_dilate", 1),
      },
    )
  groups = re.search(r"batch_group_count=(\d+)", this.attributes)
  return flops / (int(groups[1]) if groups else 1)


class Module:
  """A compiled program's text, counted.

  Args:
    text: of `jax.stages.Compiled.as_text`.
    max_trips: of a loop whose end the data decides; inside another such loop
      it is taken once, which is the least.
  """

  def __init__(self, text: str, max_trips: int = 1):
    self._computations, self._entry = parse(text)
    self._max_trips = max_trips
    self._started = {
      _channel(here[name])
      for here in self._computations.values()
      for this in here.values()
      if _is_start(this)
      for name in this.operands
    }
    found = re.search(r"num_partitions=(\d+)", text)
    self._num_devices = int(found[1]) if found else 1
    self._cost = functools.cache(self._uncached_cost)

  def cost(self) -> Cost:
    """Of the whole program."""
    return self._cost(self._entry, True, self._max_trips)

  def trips(self, loop: Instruction) -> int | None:
    """How often a loop runs; None if the data decides."""
    if found := re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes):
      return int(found[1])
    # As JAX makes them: an index that counts from 0 is below a constant.
    bounds = [
      int(constant[1])
      for here in self._with_fused(loop.called("condition"))
      for this in here.values()
      if this.opcode == "compare" and "direction=LT" in this.attributes
      for operand in this.operands
      if operand in here and here[operand].opcode == "constant"
      if (constant := re.match(r"(\d+)\)", here[operand].attributes))
    ]
    return min(bounds) if bounds else None

  def _with_fused(self, name: str) -> Iterator[Computation]:
    here = self._computations[name]
    yield here
    for this in here.values():
      if this.opcode == "fusion":
        yield from self._with_fused(this.called("calls"))

  def _uncached_cost(
    self, name: str, is_in_memory: bool, max_trips: int
  ) -> Cost:
    """Of one computation; what is fused moves nothing by itself."""
    here, cost = self._computations[name], Cost()
    for this in here.values():
      if this.opcode == "while":
        trips, inside = self.trips(this), max_trips
        if trips is None:
          trips, inside = max_trips, 1
        for key in ("body", "condition"):
          each = self._cost(this.called(key), is_in_memory, inside)
          cost = cost.plus(each, trips)
      elif this.opcode == "conditional":
        branches = re.search(
          r"branch_computations=\{([^}]*)\}", this.attributes
        )
        names = (
          re.findall(r"%?([\w.\-]+)", branches[1])
          if branches
          else [
            this.called(k) for k in ("true_computation", "false_computation")
          ]
        )
        costs = [self._cost(x, is_in_memory, max_trips) for x in names]
        cost = cost.plus(max(costs, key=lambda x: (x.flops, x.hbm_bytes)))
      elif inner := this.called("calls"):
        cost = cost.plus(self._cost(inner, False, max_trips))
      elif this.opcode == "call":
        called = this.called("to_apply")
        cost = cost.plus(self._cost(called, is_in_memory, max_trips))
      cost = cost.plus(self._own_cost(here, this, name, is_in_memory))
    return cost

  def _own_cost(
    self, here: Computation, this: Instruction, name: str, is_in_memory: bool
  ) -> Cost:
    flops, kinds = 0.0, {}
    if this.opcode == "dot":
      left = here[this.operands[0]].shapes[0].sizes
      axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", this.attributes)
      sizes = [left[int(i)] for i in axes[1].split(",") if i] if axes else []
      flops = 2.0 * math.prod(this.shapes[0].sizes) * math.prod(sizes)
    elif this.opcode == "convolution":
      left, right = (here[x].shapes[0] for x in this.operands[:2])
      flops = _convolution_flops(left, right, this)
    elif this.opcode == "custom-call":
      stated = re.search(r"flops\W+(\d+)", this.attributes)
      flops = float(stated[1]) if stated else 0.0
    kind = this.opcode.removesuffix("-start")
    if kind in _SENT and not self._goes_on(here, this):
      # Most starts also return what they were given, a permutation two flags.
      results = [x for x in this.shapes if x.sizes]
      if len(results) > len(this.operands):
        results = results[len(this.operands) : 2 * len(this.operands)]
      size = sum(x.num_bytes for x in results)
      n = group_size(this.attributes, self._num_devices)
      sent = _SENT[kind](n) * size
      if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
        kind, sent = "reduce-scatter", sent / 2
      if n > 1:
        kinds[kind] = 1.0, sent
    moved = self._moved_bytes(here, this) if is_in_memory else 0.0
    return Cost(flops, moved, kinds)

  def _goes_on(self, here: Computation, this: Instruction) -> bool:
    """Whether it is a step, not the start, of a collective in steps.

    Each is fused with what runs meanwhile, which may be a whole loop. Without a
    start in the program every step counts, which is too much.
    """
    return (
      _is_step(this)
      and _channel(this) in self._started
      and not any(
        _is_start(x) and this.name in x.operands for x in here.values()
      )
    )

  def _moved_bytes(self, here: Computation, this: Instruction) -> float:
    if this.opcode in _FREE or this.opcode.endswith("-done"):
      return 0.0

    def size(shapes):
      return float(sum(x.num_bytes for x in shapes if x.is_in_hbm))

    operands = [here[x] for x in this.operands if x in here]
    if this.opcode.removesuffix("-start") in _SLICES:
      # A start gives its operand first, and then what is cut out of it.
      cut = this.shapes[1 if this.opcode.endswith("-start") else 0]
      is_read = operands[0].shapes[0].is_in_hbm
      return size([cut]) + (cut.num_bytes if is_read else 0.0)
    if this.opcode in _UPDATES:
      return 2 * size(operands[_UPDATES[this.opcode]].shapes)
    inner = this.called("calls")
    if inner and this.opcode == "fusion":
      read = sum(
        min(size(x.shapes), self._read_bytes(inner, i))
        for i, x in enumerate(operands)
      )
      return read + min(size(this.shapes), self._written_bytes(inner))
    results = this.shapes[:1] if this.opcode.endswith("-start") else this.shapes
    return size(results) + sum(size(x.shapes) for x in operands)

  def _read_bytes(self, name: str, index: int) -> float:
    """What a fused computation reads of an argument, slices of it as such."""
    here = self._computations[name]
    names = {
      this.name
      for this in here.values()
      if this.opcode == "parameter" and this.attributes.startswith(f"{index})")
    }
    total = 0.0
    for this in here.values():  # each after its operands
      used = [i for i, x in enumerate(this.operands) if x in names]
      if not used:
        continue
      if this.opcode == "bitcast":
        names.add(this.name)
      elif _is_step(this) or _is_done(this):
        continue
      elif this.is_root and this.opcode == "tuple":
        continue  # handed on
      elif this.opcode in _SLICES and used == [0]:
        total += sum(x.num_bytes for x in this.shapes)
      elif this.opcode == "fusion":
        inner = this.called("calls")
        if any(self._hands_on(inner, i) for i in used):
          names.add(this.name)
        total += sum(self._read_bytes(inner, i) for i in used)
      elif not (this.opcode in _UPDATES and used == [0]):
        return math.inf
    return total

  def _hands_on(self, name: str, index: int) -> bool:
    """Whether a fused computation is another name for an argument."""
    here = self._computations[name]
    (this,) = (x for x in here.values() if x.is_root)
    while this.opcode == "bitcast":
      this = here[this.operands[0]]
    return this.opcode == "parameter" and this.attributes.startswith(
      f"{index})"
    )

  def _written_bytes(self, name: str) -> float:
    """What a fused computation writes; of an update in place, the update."""
    here = self._computations[name]
    (root,) = (this for this in here.values() if this.is_root)
    results = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0.0
    for result in results:
      this = here[result]
      while this.opcode == "bitcast":
        this = here[this.operands[0]]
      if this.opcode in _UPDATES:
        this = here[this.operands[_UPDATES[this.opcode]]]
      elif this.opcode == "fusion":
        total += self._written_bytes(this.called("calls"))
        continue
      elif this.opcode == "parameter" or _is_step(this) or _is_done(this):
        continue
      total += sum(x.num_bytes for x in this.shapes)
    return total
