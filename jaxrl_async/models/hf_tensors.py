"""The tensors of Hugging Face's format: their places in our tree, their parts.

`places` is the one table of where each stored tensor lies in the stacked tree.
Reading and writing both use it. A stored tensor is one of our arrays, or
several whose rows follow one another. A stored matrix is [out, in], and ours is
[in, out], with the heads and the head size as axes of their own.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
import pathlib

import numpy as np
import safetensors

from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hf_config

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_PIECE_BYTES = 16 * 2**20  # read at a time


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a stored tensor in our tree.

  Attributes:
    leaf: its name in our tree.
    layer: index in the stacked leaf; None outside the layers.
    expert: index in the leaf of a layer; None if it has no experts.
    shape: shape as stored, of these rows alone.
    first_row: where its rows begin in the stored tensor.
  """

  leaf: str
  layer: int | None
  shape: tuple[int, ...]
  first_row: int = 0
  expert: int | None = None

  @property
  def index(self) -> tuple[int, ...]:
    """The index of the tensor in its leaf."""
    return tuple(i for i in (self.layer, self.expert) if i is not None)

  @property
  def is_turned(self) -> bool:
    """Whether it is stored with its axes the other way round."""
    return len(self.shape) == 2 and self.leaf != "embedding"


def whole_shape(places: Sequence[Place]) -> tuple[int, ...]:
  """Return the shape of a stored tensor, which has these rows."""
  last = places[-1]
  return (last.first_row + last.shape[0], *last.shape[1:])


def _sizes(shape: tuple[int, ...], num_inputs: int) -> tuple[int, int]:
  """Return the numbers of inputs and of outputs of a kernel."""
  return math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])


def places(config: configs.ModelConfig) -> dict[str, tuple[Place, ...]]:
  """Return all tensors that a directory must hold, by their stored names.

  Raises:
    ValueError: the format cannot describe this architecture.
  """
  c = config
  family = families.FAMILIES[hf_config.family_of(c)]
  d, h = c.model_dim, c.head_dim
  # Leaves of a layer with their shapes, by stored name.
  block: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    f"{stored}.weight": [(leaf, (d,))]
    for leaf, stored in configs.NORMS[c.norms].items()
  }
  fused = {x: name for name, parts in family.fused.items() for x in parts}
  experts: dict[str, tuple[str, tuple[int, ...]]] = {}
  for leaf, projection in c.projections.items():
    own = c.kernel_shapes[leaf][len(projection.groups) :]
    inputs, outputs = _sizes(own, len(projection.inputs))
    if projection.groups:
      experts[f"{projection.stored}.weight"] = leaf, (outputs, inputs)
      continue
    stored = fused.get(leaf, projection.stored)
    parts = block.setdefault(f"{stored}.weight", [])
    parts.append((leaf, (outputs, inputs)))
  num_experts = 0
  if c.experts is not None:
    num_experts = c.experts.num_experts
    block[f"{configs.ROUTER}.weight"] = [("router", (num_experts, d))]
  if c.has_qkv_bias:
    queries, keys = c.num_heads * h, c.num_kv_heads * h
    block["self_attn.q_proj.bias"] = [("query_bias", (queries,))]
    block["self_attn.k_proj.bias"] = [("key_bias", (keys,))]
    block["self_attn.v_proj.bias"] = [("value_bias", (keys,))]
  if c.qk_norm_shapes:
    of_query, of_key = map(math.prod, c.qk_norm_shapes)
    block["self_attn.q_norm.weight"] = [("query_norm", (of_query,))]
    block["self_attn.k_norm.weight"] = [("key_norm", (of_key,))]
  if c.delta is not None:
    shapes = c.delta.leaf_shapes
    for stored, leaves in configs.DELTA_LEAVES.items():
      # A filter is stored as [channels, 1, tokens].
      block[stored] = [
        (leaf, (math.prod(shape[:-1]), 1, shape[-1]))
        if len(shape := shapes[leaf]) == 3
        else (leaf, shape)
        for leaf in leaves
      ]
  table = (c.vocab_size, d)
  found: dict[str, tuple[Place, ...]] = {
    EMBEDDING: (Place("embedding", None, table),)
  }
  for layer in range(c.num_layers):
    for suffix, leaves in block.items():
      parts, first = [], 0
      for leaf, shape in leaves:
        having = c.layers_with(leaf)
        if layer in having:
          parts.append(Place(leaf, having.index(layer), shape, first))
          first += shape[0]
      if parts:
        found[f"model.layers.{layer}.{suffix}"] = tuple(parts)
    for suffix, (leaf, shape) in experts.items():
      for expert in range(num_experts):
        place = Place(leaf, layer, shape, expert=expert)
        found[f"model.layers.{layer}.{suffix.format(expert)}"] = (place,)
  found["model.norm.weight"] = (Place("final_norm", None, (d,)),)
  if not c.has_tied_head:
    found[HEAD] = (Place("output_head", None, table),)
  return found


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file, which is read a piece at a time.

  Attributes:
    path: of the file. It is opened for each piece, because what was read
      through an open file counts as memory of this process.
    name: of the tensor in the file.
    place: its place in our tree.
    dtype: of what is read, whatever the file has.
  """

  path: pathlib.Path
  name: str
  place: Place
  dtype: np.dtype

  def part(self, shape: tuple[int, ...], index: Sequence[slice]) -> np.ndarray:
    """Read a part of the tensor, in our orientation.

    Args:
      shape: of the whole tensor in our tree, without the axes of layers and of
        experts.
      index: of the part, with a slice for each of these axes.

    Raises:
      ValueError: it has values that are not finite in this dtype.
    """
    index = [slice(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
    if len(self.place.shape) != 2:
      first = self.place.first_row
      with safetensors.safe_open(self.path, "numpy") as file:
        whole = file.get_tensor(self.name)[first : first + self.place.shape[0]]
      return self._converted(whole).reshape(shape)[tuple(index)]
    # The axes of ours that make up the first axis of a matrix, and the second.
    projection = configs.PROJECTIONS.get(self.place.leaf)
    first = len(projection.inputs) if projection else 1
    low, high = (
      _Flat.of(sizes, slices)
      for sizes, slices in (
        (shape[:first], index[:first]),
        (shape[first:], index[first:]),
      )
    )
    matrix = np.empty((low.size, high.size), self.dtype)
    stored, ranges = matrix, (low.range, high.range)
    if self.place.is_turned:
      stored, ranges = matrix.T, (high.range, low.range)
    for rows, piece in self.pieces(*ranges):
      stored[rows] = piece
    return matrix.reshape(low.shape + high.shape)[low.rest + high.rest]

  def pieces(
    self, rows: slice = slice(None), columns: slice = slice(None)
  ) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield parts of a matrix as stored: their rows, and their values.

    Args:
      rows: that are read; the rows yielded count from the first of them.
      columns: that are read.
    """
    begin, end, _ = rows.indices(self.place.shape[0])
    first = self.place.first_row
    row_bytes = self.place.shape[1] * self.dtype.itemsize
    step = max(1, _PIECE_BYTES // row_bytes)
    for low in range(begin, end, step):
      high = min(low + step, end)
      with safetensors.safe_open(self.path, "numpy") as file:
        piece = file.get_slice(self.name)[first + low : first + high, columns]
      yield slice(low - begin, high - begin), self._converted(piece)

  def _converted(self, array: np.ndarray) -> np.ndarray:
    converted = np.empty(array.shape, self.dtype)
    np.copyto(converted, array, casting="unsafe")
    if not np.isfinite(converted).all():
      raise ValueError(
        f"{self.path}: {self.name} has values that are not finite in"
        f" {self.dtype.name}"
      )
    return converted


@dataclasses.dataclass(frozen=True)
class _Flat:
  """A part of axes that are one axis in the file.

  Attributes:
    range: what is read of that axis: whole entries of the first of ours.
    shape: of what is read, in our axes.
    rest: the part of it that is wanted.
  """

  range: slice
  shape: tuple[int, ...]
  rest: tuple[slice, ...]

  @classmethod
  def of(cls, sizes: Sequence[int], index: Sequence[slice]) -> "_Flat":
    """Return the part that `index` takes of axes of these sizes."""
    each = math.prod(sizes[1:])
    low, high = index[0].start, index[0].stop
    return cls(
      range=slice(low * each, high * each),
      shape=(high - low, *sizes[1:]),
      rest=(slice(None), *index[1:]),
    )

  @property
  def size(self) -> int:
    """The number of entries that are read."""
    return self.range.stop - self.range.start
