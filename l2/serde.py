"""Serdes: what is done to a payload between the arena and the medium.

    {"type": "fs", ..., "serde": "zstd"}
    {"type": "fs", ..., "serde": ["fp8", {"type": "aesgcm", "key_file": "/etc/kvkeep/keys"}]}

    store:  plain ─► first serde ─► second ─► ... ─► medium       by the configuration
    load:   plain ◄─ first serde ◄─ second ◄─ ... ◄─ medium       by the object's header, whatever the configuration is

A serde has a number that is at rest and never changes.  The header of an object has the numbers of those that were
applied, and their parameters, framed: for each serde a u32 with the bytes that went into it, a u8 with the length of
its own parameters, and these.  So a chain that was changed misreads nothing: what was stored under another one is
decoded if this process can (it knows the serde, and has the key), or else is a miss, counted, and kept.  What does not
decode to exactly the bytes that went in is removed.

A serde may pass an object over (`Unfit`: it does not shrink, it is no float); the header then does not name it, and
the rest of the chain goes on.  A serde that fails in any other way keeps the object from being stored.

Types come from here, or from installed packages (entry point group `kvkeep.l2_serdes`: the name is the type, the object
a class derived from `Serde`, with an id of FIRST_FOREIGN_ID or more).  Their libraries are imported in a mover only.
"""

from __future__ import annotations

import abc
import importlib
import importlib.metadata
import struct
from collections.abc import Mapping
from typing import NamedTuple

from kvkeep.l2.adapter import AdapterError, Encoding, Key
from kvkeep.l2.options import Options, nearest
from kvkeep.l2.record import MAX_SERDES, SERDE_PARAM_BYTES
from kvkeep.l2.serde_layout import Layout

ENTRY_POINTS = "kvkeep.l2_serdes"
FIRST_FOREIGN_ID = 0x8000
MAX_GROWTH = 4096  # bytes that one serde may add to an object
BUILT_IN = {
    "zstd": (1, "kvkeep.l2.serde_zstd", "Zstd"),
    "fp8": (2, "kvkeep.l2.serde_fp8", "Fp8"),
    "aesgcm": (3, "kvkeep.l2.serde_aesgcm", "AesGcm"),
}
_FRAME = struct.Struct("<IB")
_ID = struct.Struct("<H")

Buffer = bytes | bytearray | memoryview


class Unfit(Exception):
    """This object is not for this serde; the text says why."""


class Unreadable(Exception):
    """This process cannot decode this object, though another could: it is kept.  The text says what is missing."""


class Undecodable(Exception):
    """The bytes are not what this serde ever wrote for this object."""


class Context(NamedTuple):
    """What a serde may know about the object in its hands."""

    key: Key
    original_bytes: int  # of the plain payload
    layout: Layout  # of the plain payload; when decoding it is UNKNOWN: parameters must say all that is needed
    before: bytes  # the numbers and parameters of the serdes that were applied before this one; b"" = data is plain


class Encoded(NamedTuple):
    data: Buffer
    params: bytes = b""


class Serde(abc.ABC):
    """One per mover, used by several threads at once.  The constructor reads the options, and touches nothing else."""

    id: int
    name: str

    @abc.abstractmethod
    def __init__(self, options: Options) -> None:
        """Takes its options; the caller does `options.done()`."""

    def open(self) -> None:  # noqa: B027  (most need nothing)
        """Import what is needed, read keys.  Raises AdapterError."""

    @abc.abstractmethod
    def encode(self, data: memoryview, context: Context) -> Encoded:
        """At most MAX_GROWTH bytes more than ``data``.  Raises Unfit."""

    @abc.abstractmethod
    def decode(self, data: memoryview, params: bytes, into: memoryview, context: Context) -> None:
        """Fill ``into``, which has the length that ``data`` had in `encode`.  Raises Unreadable or Undecodable.

        ``data`` and ``params`` may be anything: nothing that they say may cost more memory than ``into`` has."""


class Step(NamedTuple):
    """One serde that was applied to an object."""

    serde: int
    length: int  # of what went into it
    params: bytes
    before: bytes


# ---- the header's side -----------------------------------------------------------------------------------------------


def framed(number: int, length: int, params: bytes) -> tuple[bytes, bytes]:
    """One step as `Encoding.params` and as `Context.before` have it.  Raises Unfit for what has no room."""
    if length > 0xFFFFFFFF or len(params) > SERDE_PARAM_BYTES - _FRAME.size:
        raise Unfit(f"{length} bytes, {len(params)} bytes of parameters")
    frame = _FRAME.pack(length, len(params)) + params
    return frame, _ID.pack(number) + frame


def steps_of(encoding: Encoding) -> list[Step]:
    """In the order in which they were applied.  Raises Undecodable."""
    steps: list[Step] = []
    at, before = 0, b""
    for number in encoding.serdes:
        if at + _FRAME.size > len(encoding.params):
            raise Undecodable("the parameters end too early")
        length, size = _FRAME.unpack_from(encoding.params, at)
        params = encoding.params[at + _FRAME.size : at + _FRAME.size + size]
        if len(params) != size:
            raise Undecodable("the parameters end too early")
        steps.append(Step(number, length, params, before))
        before += _ID.pack(number) + _FRAME.pack(length, size) + params
        at += _FRAME.size + size
    if not steps or steps[0].length != encoding.original_bytes:
        raise Undecodable("the header contradicts itself")
    if any(step.length > encoding.original_bytes + MAX_SERDES * MAX_GROWTH for step in steps):
        raise Undecodable("a step that is larger than it can be")
    return steps


# ---- the configuration's side ----------------------------------------------------------------------------------------


def check(config: Mapping[str, object]) -> None:
    """An adapter's configuration has a good "serde", or none.  AdapterError otherwise.  Third parties' classes are not
    imported, no library is, and no key file is read: the mover does that."""
    for name, options in _entries(config):
        if name in BUILT_IN:
            _made(_built_in(name), name, options)


def chain_of(config: Mapping[str, object]) -> list[Serde]:
    """The serdes of an adapter's configuration, not opened yet.  AdapterError says what is wrong with it."""
    return [_made(_class(name), name, options) for name, options in _entries(config)]


def serde_with(number: int) -> Serde | None:
    """One without options, for decoding what another configuration stored.  None = nobody has this number.
    AdapterError if it cannot be without."""
    for name, (its_number, *_) in BUILT_IN.items():
        if its_number == number:
            return _made(_built_in(name), name, {})
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        found = _foreign(entry)
        if found.id == number:
            return _made(found, entry.name, {})
    return None


def serde_types() -> list[str]:
    found = {entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    return sorted({*BUILT_IN, *found})


def _entries(config: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    """(type, the object with its options)"""
    raw = config.get("serde")
    items = raw if isinstance(raw, list) else [] if raw is None else [raw]
    found: list[tuple[str, Mapping[str, object]]] = []
    for item in items:
        entry = {"type": item} if isinstance(item, str) else item
        name = entry.get("type") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not isinstance(entry, Mapping):
            raise AdapterError(
                f"'serde' holds {item!r}; each entry is a name or an object with a 'type', one of "
                + ", ".join(serde_types())
            )
        if name not in serde_types():
            types = serde_types()
            raise AdapterError(f"there is no serde '{name}'{nearest(name, types)}; there are {', '.join(types)}")
        found.append((name, entry))
    if len(found) > MAX_SERDES:
        raise AdapterError(f"'serde' has {len(found)} entries; the limit is {MAX_SERDES}")
    return found


def _class(name: str) -> type[Serde]:
    if name in BUILT_IN:
        return _built_in(name)
    (entry, *_) = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    return _foreign(entry)


def _built_in(name: str) -> type[Serde]:
    number, module, class_name = BUILT_IN[name]
    found: type[Serde] = getattr(importlib.import_module(module), class_name)
    assert found.id == number
    return found


def _foreign(entry: importlib.metadata.EntryPoint) -> type[Serde]:
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise AdapterError(f"serde '{entry.name}': its package does not load: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Serde)):
        raise AdapterError(f"serde '{entry.name}': {found!r} is not a class derived from kvkeep.l2.serde.Serde")
    if not FIRST_FOREIGN_ID <= found.id <= 0xFFFF:
        raise AdapterError(f"serde '{entry.name}' has the id {found.id}; it must be {FIRST_FOREIGN_ID} to 65535")
    return found


def _made(cls: type[Serde], name: str, entry: Mapping[str, object]) -> Serde:
    options = Options(f"serde {name}", entry, ignore=("type",))
    made = cls(options)
    options.done()
    return made
