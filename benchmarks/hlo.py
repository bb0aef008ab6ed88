"""What a compiled program does on one device, counted from its HLO text.

XLA's own cost analysis counts the body of a loop once. Here it counts as often
as the loop runs. There are three numbers:

- FLOPs of matrix products. For kernels these are the FLOPs that they state.
- Bytes to and from memory. A fusion reads its operands and writes its results;
  if it uses only a slice of an operand, the slice counts. Arrays in the fast
  memory of a TPU cost nothing.
- Bytes that the device sends in collectives.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import functools
import math
import re

import hlo_text
import numpy as np

from jaxrl_async.devices import tpu_chips

# dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# convolution(%x, %k), window={size=3x3 pad=1_1x1_1 stride=2x2},
# dim_labels=b01f_01io->b01f: batch, input and output features, and the window's
# axes by number, of the two operands and of the result.
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_WINDOW_FIELD = re.compile(r"(\w+)=(\S+)")
_BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")
# conditional(%i, %a, %b), branch_computations={%first, %second.1}
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COMPUTATION_NAME = re.compile(r"%?([\w.\-]+)")
# while(%x), body=%b, backend_config={"known_trip_count":{"n":"7"}}
_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")
# The attributes of %bound = s32[] constant(7) begin with its value.
_CONSTANT = re.compile(r"(\d+)\)")
# custom-call(%q), backend_config={... "cost_estimate":{"flops":"123", ...
_STATED_FLOPS = re.compile(r"flops\W+(\d+)")
# Opcodes that move no bytes: they only name values, or their values are counted
# where they are used.
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all while call"
  " conditional partition-id replica-id iota optimization-barrier".split()
)
# A fusion-start begins a fusion that runs beside what follows it, on a GPU.
_FUSIONS = ("fusion", "fusion-start")
_SLICES = ("dynamic-slice", "slice", "gather")
# These are done in place, so only the operand with this index moves: the values
# that are written.
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
_WINDOW_DEFAULTS = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
# Bytes that each of n devices sends in a ring, divided by those of the result.
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
class Cost:
  """The cost of a program, or of a part of it, on one device.

  Attributes:
    collectives: for each kind, how many run and how many bytes the device sends
      if they run in a ring.
  """

  flops: float = 0.0
  hbm_bytes: float = 0.0
  collectives: dict[str, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )

  def plus(self, other: "Cost", times: int = 1) -> "Cost":
    """Return the sum of this cost and `times` times the other."""
    kinds = dict(self.collectives)
    for kind, (count, sent) in other.collectives.items():
      before = kinds.get(kind, (0.0, 0.0))
      kinds[kind] = before[0] + times * count, before[1] + times * sent
    return Cost(
      self.flops + times * other.flops,
      self.hbm_bytes + times * other.hbm_bytes,
      kinds,
    )


def _pairs(out: int, inner: int, width: int, window: dict[str, int]) -> int:
  """Return how many pairs of window position and element meet an input.

  The count is along one axis. The rest of the pairs fall on padding or into the
  gaps of a dilated input, and need no product.

  Args:
    out: size of the result.
    inner: size of the input.
    width: size of the window.
    window: stride, low padding and dilations.
  """
  at = np.arange(out)[:, None] * window["stride"]
  at = at + np.arange(width)[None] * window["rhs_dilate"] - window["pad"]
  last = (inner - 1) * window["lhs_dilate"]
  return int(
    ((at >= 0) & (at <= last) & (at % window["lhs_dilate"] == 0)).sum()
  )


def _window_field(
  fields: dict[str, str], name: str, axis: int, default: int
) -> int:
  """Return one number of a window; of "pad=1_2x0_0" the low pads 1 and 0."""
  if name not in fields:
    return default
  return int(fields[name].split("x")[axis].split("_")[0] or 0)


def _convolution_flops(
  left: hlo_text.Shape, right: hlo_text.Shape, this: hlo_text.Instruction
) -> float:
  labels = _DIM_LABELS.search(this.attributes)
  assert labels is not None
  window = _WINDOW.search(this.attributes)
  fields = dict(_WINDOW_FIELD.findall(window[1])) if window else {}
  out = this.shapes[0].sizes
  flops = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")]
  flops *= right.sizes[labels[2].index("i")]
  for i in range(len(labels[1]) - 2):
    axis = str(i)
    flops *= _pairs(
      out[labels[3].index(axis)],
      left.sizes[labels[1].index(axis)],
      right.sizes[labels[2].index(axis)],
      {
        name: _window_field(fields, name, i, default)
        for name, default in _WINDOW_DEFAULTS.items()
      },
    )
  groups = _BATCH_GROUPS.search(this.attributes)
  return flops / (int(groups[1]) if groups else 1)


class Module:
  """A compiled program, whose cost is counted from its text.

  Args:
    text: of `jax.stages.Compiled.as_text`.
    max_trips: trips of loops whose number depends on the data. A loop of this
      kind inside another one counts once, which makes the result a lower bound.
  """

  def __init__(self, text: str, max_trips: int = 1):
    self._computations, self._entry = hlo_text.parse(text)
    self._max_trips = max_trips
    self._started = {
      here[name].channel
      for here in self._computations.values()
      for this in here.values()
      if this.is_start
      for name in this.operands
    }
    self._num_devices = hlo_text.num_partitions(text)
    self._cost = functools.cache(self._uncached_cost)

  def cost(self) -> Cost:
    """Return the cost of the whole program."""
    return self._cost(self._entry, True, self._max_trips)

  def trips(self, loop: hlo_text.Instruction) -> int | None:
    """Return how often a loop runs, or None if that depends on the data."""
    if found := _TRIP_COUNT.search(loop.attributes):
      return int(found[1])
    # Otherwise this is a loop as JAX makes it: an index that counts from 0 is
    # compared with a constant.
    #   ROOT %lt = pred[] compare(%i, %bound), direction=LT
    bounds = [
      int(constant[1])
      for here in self._with_fused(loop.called("condition"))
      for this in here.values()
      if this.opcode == "compare" and "direction=LT" in this.attributes
      for operand in this.operands
      if operand in here and here[operand].opcode == "constant"
      if (constant := _CONSTANT.match(here[operand].attributes))
    ]
    return min(bounds) if bounds else None

  def _with_fused(self, name: str) -> Iterator[hlo_text.Computation]:
    """Yield a computation and those that its fusions call."""
    here = self._computations[name]
    yield here
    for this in here.values():
      if this.opcode in _FUSIONS:
        yield from self._with_fused(this.called("calls"))

  def _uncached_cost(
    self, name: str, is_in_memory: bool, max_trips: int
  ) -> Cost:
    """Return the cost of one computation.

    Args:
      name: of the computation.
      is_in_memory: False inside a fusion, whose intermediate values are not
        written to memory.
      max_trips: as in the class.
    """
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
        branches = _BRANCHES.search(this.attributes)
        names = (
          _COMPUTATION_NAME.findall(branches[1])
          if branches
          else [
            this.called(k) for k in ("true_computation", "false_computation")
          ]
        )
        # Which branch runs depends on the data; the most expensive one counts.
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
    self,
    here: hlo_text.Computation,
    this: hlo_text.Instruction,
    name: str,
    is_in_memory: bool,
  ) -> Cost:
    """Return the cost of one instruction, without the computations it calls."""
    flops, kinds = 0.0, {}
    if this.opcode == "dot":
      left = here[this.operands[0]].shapes[0].sizes
      axes = _CONTRACTED.search(this.attributes)
      sizes = [left[int(i)] for i in axes[1].split(",") if i] if axes else []
      flops = 2.0 * math.prod(this.shapes[0].sizes) * math.prod(sizes)
    elif this.opcode == "convolution":
      left, right = (here[x].shapes[0] for x in this.operands[:2])
      flops = _convolution_flops(left, right, this)
    elif this.opcode == "custom-call":
      stated = _STATED_FLOPS.search(this.attributes)
      flops = float(stated[1]) if stated else 0.0
    kind = this.opcode.removesuffix("-start")
    if kind in _SENT and not self._goes_on(here, this):
      # The result of a start is a tuple. It usually holds the operands, then
      # the results; a collective-permute adds two flags without sizes.
      #   (bf16[2,8], bf16[8,8]) all-gather-start(%x), dimensions={0}
      results = [x for x in this.shapes if x.sizes]
      if len(results) > len(this.operands):
        results = results[len(this.operands) : 2 * len(this.operands)]
      size = sum(x.num_bytes for x in results)
      n = hlo_text.group_size(this.attributes, self._num_devices)
      sent = _SENT[kind](n) * size
      # XLA for TPUs writes a reduce-scatter as a fusion of this name, which
      # holds an all-reduce and a slice.
      if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
        kind, sent = "reduce-scatter", sent / 2
      if n > 1:
        kinds[kind] = 1.0, sent
    moved = self._moved_bytes(here, this) if is_in_memory else 0.0
    return Cost(flops, moved, kinds)

  def _goes_on(
    self, here: hlo_text.Computation, this: hlo_text.Instruction
  ) -> bool:
    """Return whether this continues a collective in steps that has begun.

    Each step is fused with the computation it overlaps, which may be a whole
    loop. If the program has no start of this collective, every step is counted,
    which is too much.
    """
    return (
      this.is_step
      and this.channel in self._started
      and not any(x.is_start and this.name in x.operands for x in here.values())
    )

  def _moved_bytes(
    self, here: hlo_text.Computation, this: hlo_text.Instruction
  ) -> float:
    """Return the bytes that an instruction moves to and from memory."""
    if this.opcode in _FREE or this.opcode.endswith("-done"):
      return 0.0

    def size(shapes: Iterable[hlo_text.Shape]) -> float:
      return float(sum(x.num_bytes for x in shapes if x.is_in_hbm))

    operands = [here[x] for x in this.operands if x in here]
    if this.opcode.removesuffix("-start") in _SLICES:
      # The result of a start holds the operand first and then the slice.
      cut = this.shapes[1 if this.opcode.endswith("-start") else 0]
      is_read = operands[0].shapes[0].is_in_hbm
      return size([cut]) + (cut.num_bytes if is_read else 0.0)
    if this.opcode in _UPDATES:
      return 2 * size(operands[_UPDATES[this.opcode]].shapes)
    inner = this.called("calls")
    if inner and this.opcode in _FUSIONS:
      read = sum(
        min(size(x.shapes), self._read_bytes(inner, i))
        for i, x in enumerate(operands)
      )
      return read + min(size(this.shapes), self._written_bytes(inner))
    results = this.shapes[:1] if this.opcode.endswith("-start") else this.shapes
    return size(results) + sum(size(x.shapes) for x in operands)

  def _read_bytes(self, name: str, index: int) -> float:
    """Return the bytes that a fused computation reads of one argument.

    If only slices of the argument are used, the slices count. The result is
    infinite if the whole argument is needed.
    """
    here = self._computations[name]
    names = {
      this.name
      for this in here.values()
      if this.opcode == "parameter" and this.attributes.startswith(f"{index})")
    }
    total = 0.0
    for this in here.values():  # instructions come after their operands
      used = [i for i, x in enumerate(this.operands) if x in names]
      if not used:
        continue
      if this.opcode == "bitcast":
        names.add(this.name)
      elif this.is_step or this.is_done:
        continue
      elif this.is_root and this.opcode == "tuple":
        continue  # passed through without being read
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
    """Return whether a fused computation returns an argument unchanged."""
    here = self._computations[name]
    (this,) = (x for x in here.values() if x.is_root)
    while this.opcode == "bitcast":
      this = here[this.operands[0]]
    return this.opcode == "parameter" and this.attributes.startswith(
      f"{index})"
    )

  def _written_bytes(self, name: str) -> float:
    """Return the bytes that a fused computation writes.

    For an update in place, these are the bytes of the update.
    """
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
      elif this.opcode == "parameter" or this.is_step or this.is_done:
        continue
      total += sum(x.num_bytes for x in this.shapes)
    return total


def roofline_s(cost: Cost, chip: tpu_chips.Chip) -> dict[str, float]:
  """Return the least seconds at each peak rate of a chip.

  The largest of them is the least time of the program.
  """
  sent = sum(sent for _, sent in cost.collectives.values())
  return {
    "products": cost.flops / chip.flops_per_s,
    "memory": cost.hbm_bytes / chip.hbm_bytes_per_s,
    "links": sent / chip.ici_bytes_per_s,
  }
