"""The pipes between tests and the program that they test, in a sandbox.

The tests run in `sandbox_tests` and the program in `sandbox_candidate`. Each
asks the other one for something by a line of JSON, and gets a line back. Plain
data is copied: numbers, texts, containers, and some types of the standard
library. What is changed in place at one end is changed at the other one. All
else stays where it is, and the other end has a number for it.
"""

from collections.abc import Collection, Sequence
import enum
import importlib
import itertools
import json
import operator
import os
import sys
from typing import Any, BinaryIO

_PLAIN = (bool, float, str, type(None))
_SHORT_BITS = 64
# Methods that tests call by syntax, such as len(x). Those of two operands would
# tell the program what the tests expect, or let it claim to be equal to that.
FORWARDED = tuple(
  f"__{name}__"
  for name in (
    "call len iter next getitem setitem delitem bool int float index str repr"
    " neg abs round enter exit"
  ).split()
)
COMPARISONS = tuple(
  f"__{name}__" for name in "eq ne lt le gt ge contains".split()
)
ARITHMETIC = tuple(
  f"__{name}__"
  for name in (
    "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
  ).split()
  for name in (name, f"r{name}", f"i{name}")
)
RECORD = "record"

# -- plain data ----------------------------------------------------------------


def _pairs(mapping: Any) -> list[Any]:
  return [x for pair in mapping.items() for x in pair]


def _of_pairs(items: list[Any]) -> dict[Any, Any]:
  return dict(zip(items[::2], items[1::2], strict=True))


def _put_all(mapping: Any, items: list[Any]) -> None:
  mapping.clear()
  for key, value in _of_pairs(items).items():
    mapping[key] = value  # a Counter adds what it is updated with


def _put(container: Any, items: list[Any]) -> None:
  container.clear()
  (container.update if isinstance(container, set) else container.extend)(items)


def _fields(record: Any) -> dict[str, Any]:
  fields = dict(getattr(record, "__dict__", ()))
  for base in type(record).__mro__:
    slots = vars(base).get("__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
      if name[:2] != "__" and hasattr(record, name):
        fields[name] = getattr(record, name)
  return fields


def _put_fields(record: Any, items: list[Any]) -> None:
  fields = _of_pairs(items)
  for name in _fields(record).keys() - fields:
    object.__delattr__(record, name)
  for name, value in fields.items():
    # It would stand before a method of the class, or before the class itself.
    if name[:2] == "__" or callable(getattr(type(record), name, None)):
      raise ValueError(f"{name:.80} is no field")
    object.__setattr__(record, name, value)


_FACTORIES = {x.__name__: x for x in (int, float, str, list, dict, set, tuple)}


def named(name: str) -> Any:
  """Return what a module has."""
  module, _, own = name.rpartition(".")
  return getattr(importlib.import_module(module), own)


# What can be changed in place: how it is taken apart, how it is filled, and
# what it is made with. A subclass is its nearest base.
_MUTABLE = {
  "builtins.list": (list, _put, None),
  "builtins.set": (list, _put, None),
  "builtins.bytearray": (list, _put, None),
  "collections.deque": (list, _put, lambda x: x.maxlen),
  "builtins.dict": (_pairs, _put_all, None),
  "collections.OrderedDict": (_pairs, _put_all, None),
  "collections.Counter": (_pairs, _put_all, None),
  "collections.defaultdict": (
    _pairs,
    _put_all,
    lambda x: getattr(x.default_factory, "__name__", None),
  ),
  RECORD: (
    lambda x: _pairs(_fields(x)),
    _put_fields,
    lambda x: type(x).__name__,
  ),
}
# What cannot: how it is taken apart, and made again.
_FIXED = {
  "builtins.tuple": (list, tuple),
  "builtins.frozenset": (list, frozenset),
  "builtins.complex": (lambda x: [x.real, x.imag], lambda x: complex(*x)),
  "builtins.bytes": (lambda x: [x.hex()], lambda x: bytes.fromhex(*x)),
  "builtins.range": (
    lambda x: [x.start, x.stop, x.step],
    lambda x: range(*x),
  ),
  "builtins.slice": (
    lambda x: [x.start, x.stop, x.step],
    lambda x: slice(*x),
  ),
  "builtins.dict_keys": (list, lambda x: dict.fromkeys(x).keys()),
  "builtins.dict_values": (list, lambda x: dict(enumerate(x)).values()),
  "builtins.dict_items": (list, lambda x: dict(x).items()),
  "fractions.Fraction": (
    lambda x: [x.numerator, x.denominator],
    lambda x: named("fractions.Fraction")(*x),
  ),
  "decimal.Decimal": (
    lambda x: [str(x)],
    lambda x: named("decimal.Decimal")(*x),
  ),
  "datetime.timedelta": (
    lambda x: [x.days, x.seconds, x.microseconds],
    lambda x: named("datetime.timedelta")(*x),
  ),
  **{
    name: (
      lambda x: [x.isoformat()],
      lambda x, name=name: named(name).fromisoformat(*x),
    )
    for name in ("datetime.datetime", "datetime.date", "datetime.time")
  },
}


def _kind(value: Any) -> str:
  """Return which plain data a value is, or nothing."""
  for base in type(value).__mro__:
    name = f"{base.__module__}.{base.__qualname__}"
    if name in _FIXED or name in _MUTABLE:
      return name
  return ""


class Held(list):
  """The containers of one exchange, which both ends number alike.

  A container is sent as its number, and what is in it beside all others, so
  that none is too deep. The other end has the same references, and what it
  changes in place is changed here too.
  """

  def __init__(self):
    super().__init__()
    self.numbers: dict[int, int] = {}
    self.kinds: list[str] = []

  def add(self, container: Any, kind: str) -> list[Any]:
    self.numbers[id(container)] = len(self)
    self.kinds.append(kind)
    self.append(container)
    return ["held", len(self) - 1]

  def forget(self, first: int) -> None:
    """Remove all from this number on, because they are not sent."""
    for container in self[first:]:
      del self.numbers[id(container)]
    del self[first:], self.kinds[first:]

  def contents(self) -> list[list[Any]]:
    return [
      _MUTABLE[kind][0](x) for x, kind in zip(self, self.kinds, strict=True)
    ]


class TooLong(ValueError):
  """A line is longer than it may be."""


# -- the pipes -----------------------------------------------------------------


class Wire:
  """One end of the pipes between the tests and the program.

  Plain data is copied. Of anything else the other end gets a number.
  """

  def __init__(self, reading: BinaryIO, writing: BinaryIO, most: int):
    """Take the pipes.

    Args:
      reading: lines of the other end.
      writing: lines to the other end.
      most: bytes of an answer, apart from what it was asked with.
    """
    self._reading, self._writing, self._most = reading, writing, most
    self._given: list[Any] = []
    self._numbers: dict[int, int] = {}
    self._tuples: dict[tuple[str, ...], Any] = {}
    self._shared: Collection[str] = ()

  def give(self, value: Any, **about: Any) -> list[Any]:
    """Return the number of something that stays here."""
    number = self._numbers.setdefault(id(value), len(self._given))
    if number == len(self._given):
      self._given.append(value)
    return ["number", number, about]

  def leave(self, value: Any, held: Held) -> list[Any]:
    """Return what the other end gets of a value that is no plain data."""
    raise NotImplementedError

  def take(self, number: int, about: dict[str, Any]) -> Any:
    """Return what stands here for something that stays at the other end."""
    raise NotImplementedError

  def shared(self, name: str) -> type:
    """Return a class that both ends have, or one that stands for it."""
    raise NotImplementedError

  def find(self, module: str, name: str) -> Any:
    """Return what the other end knows under the same name."""
    raise ValueError(f"{module:.80}.{name:.80} is no data")

  def create(self, kind: str, about: Any) -> Any:
    """Return an empty container."""
    if kind == RECORD:
      return object.__new__(self.shared(about))
    if kind == "collections.deque":
      return named(kind)(maxlen=about)
    if kind == "collections.defaultdict":
      return named(kind)(_FACTORIES.get(about))
    return named(kind)()

  def do(self, what: str, args: Sequence[Any]) -> Any:
    """Do what the other end asks."""
    raise NotImplementedError

  def written(self) -> str:
    """Return what has been printed here since the last answer."""
    return ""

  def encode(self, value: Any, held: Held) -> Any:
    """Return a value as JSON that keeps its type."""
    if type(value) in _PLAIN:
      return value
    for base in (int, float, str):
      if isinstance(value, base):
        value = getattr(base, f"__{base.__name__}__")(value)
        # Reading and writing decimals takes quadratic time.
        is_long = base is int and value.bit_length() > _SHORT_BITS
        return ["int", hex(value)] if is_long else value
    if isinstance(value, enum.Enum) and type(value).__name__ in self._shared:
      return ["member", type(value).__name__, value.name]
    if id(value) in held.numbers:
      return ["held", held.numbers[id(value)]]
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
      items = [self.encode(x, held) for x in tuple(value)]
      return ["named", type(value).__name__, fields, items]
    kind = _kind(value)
    if kind in _MUTABLE:
      return held.add(value, kind)
    if kind in _FIXED:
      return [kind, [self.encode(x, held) for x in _FIXED[kind][0](value)]]
    return self.leave(value, held)

  def pack(
    self, value: Any, held: Held, before: Sequence[list[Any]] = ()
  ) -> dict[str, Any]:
    """Return a value as JSON, with what is in the containers that are sent.

    Args:
      value: to send.
      held: the containers that the other end has, and gets.
      before: what was in those that it has when it sent them.
    """
    stored = self.encode(value, held)
    contents = []
    for i, was in enumerate(before):
      now = _MUTABLE[held.kinds[i]][0](held[i])
      if len(was) != len(now) or not all(map(operator.is_, was, now)):
        contents.append([i, [self.encode(x, held) for x in now]])
    created = []
    for container in itertools.islice(held, len(before), None):  # it grows
      kind = held.kinds[len(before) + len(created)]
      apart, _, about = _MUTABLE[kind]
      items = [self.encode(x, held) for x in apart(container)]
      contents.append([len(before) + len(created), items])
      created.append([kind, about and about(container)])
    return {"value": stored, "new": created, "contents": contents}

  def unpack(self, message: dict[str, Any], held: Held) -> Any:
    """Return the value that the other end has packed.

    Raises:
      ValueError, TypeError, LookupError, ArithmeticError: it is none.
    """
    for kind, about in message["new"]:
      if kind not in _MUTABLE:
        raise ValueError(f"{kind!r:.80} is no container")
      held.add(self.create(kind, about), kind)
    # Records first, because sets and dicts hash them.
    for is_record in True, False:
      for i, items in reversed(message["contents"]):
        if i < 0:
          raise ValueError("a container has no such number")
        if (held.kinds[i] == RECORD) is is_record:
          items = [self.decode(x, held) for x in items]
          _MUTABLE[held.kinds[i]][1](held[i], items)
    return self.decode(message["value"], held)

  def decode(self, stored: Any, held: Held) -> Any:
    """Return the value that the other end has encoded; see `unpack`."""
    if not isinstance(stored, list):
      if isinstance(stored, dict):
        raise ValueError("an object of JSON is no data")
      return stored
    kind, *content = stored
    if kind == "member":
      return getattr(self.shared(content[0]), content[1])
    if kind == "held":
      return held[content[0]]
    if kind == "int":
      return int(content[0], 16)
    if kind == "named":
      name, fields, items = content
      key = name, *fields
      if key not in self._tuples:
        self._tuples[key] = named("collections.namedtuple")(name, fields)
      return self._tuples[key](*[self.decode(x, held) for x in items])
    if kind == "number":
      return self.take(int(content[0]), dict(content[1]))
    if kind == "yours":
      return self._given[int(content[0])]
    if kind == "named in Python":
      return self.find(*content)
    return _FIXED[kind][1]([self.decode(x, held) for x in content[0]])

  def _send(self, message: dict[str, Any]) -> int:
    """Write a line, and return its length."""
    line = json.dumps(message).encode() + b"\n"
    self._writing.write(line)
    self._writing.flush()
    return len(line)

  def _read(self, most: int) -> dict[str, Any] | None:
    """Return a line of the other end, or nothing at its end."""
    line = self._reading.readline(most + 1)
    if len(line) > most:
      raise TooLong("output limit")
    return json.loads(line) if line.endswith(b"\n") else None

  def ask(self, what: str, *args: Any) -> Any:
    """Let the other end do something, and return what comes of it.

    It may ask for something itself before it answers.
    """
    # Whoever writes answers has at least to have read what was asked.
    number = int.from_bytes(os.urandom(8))
    held = Held()
    asked = self.pack(args, held)
    num_sent = self._send({"number": number, "do": what, **asked})
    while True:
      # What was sent may come back, changed.
      message = self._read(self._most + 2 * num_sent)
      if message is None:
        raise EOFError("the program ended")
      if "do" not in message:
        break
      self.answer(message)
    if message["number"] != number:
      raise ValueError("the program answered what was not asked")
    sys.stdout.write(message["wrote"])
    value = self.unpack(message, held)
    if "error" in message:
      names = [str(name) for name in message["error"]]
      raise self.error(names, str(message.get("message")), value)
    return value

  def error(self, names: list[str], message: str, state: Any) -> BaseException:
    """Return what the other end raised.

    Args:
      names: of the exception's class and of those that it is derived from.
      message: of the exception.
      state: its arguments and its attributes, if they can be known.
    """
    raise NotImplementedError

  def answer(self, message: dict[str, Any]) -> None:
    """Do what the other end asks, and say what comes of it."""
    held = Held()
    before: list[list[Any]] = []
    try:
      args = self.unpack(message, held)
      before = held.contents()
      said = self.pack(self.do(message["do"], args), held, before)
    except BaseException as error:  # SystemExit too: the program's own affair
      held.forget(len(before))
      said = self._failure(error, held, before)
    self._send({**said, "number": message["number"], "wrote": self.written()})

  def _failure(
    self, error: BaseException, held: Held, before: Sequence[list[Any]]
  ) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
      state = self.pack((error.args, vars(error)), held, before)
    except Exception:
      held.forget(len(before))
      state = self.pack(None, held, before)
    return {"error": names, "message": str(error)[:200], **state}
