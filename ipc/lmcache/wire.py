"""The wire of `lmcache server` 0.5.6, as its engine-driven workers and its scheduler adapter speak it.

    request  [uid][op][payload]…      reply  [uid][op, as it came][result]      None is no third frame

Every frame is a msgpack document of its own: uid an int, op an int or, for some, a string; structs are maps by field
name.  Facts observed with version 0.5.6; `tests/lmcache` compares them with the package where that is installed.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
MAX_DIMENSION = 1 << 24


class Op(enum.IntEnum):
    REGISTER_BY_SERVER = 1
    UNREGISTER_BY_SERVER = 2
    STORE_BY_SERVER = 6
    RETRIEVE_BY_SERVER = 7
    LOOKUP = 8
    QUERY = 9
    WAIT = 10
    FREE = 12
    END_SESSION = 13
    REGISTER = 14
    UNREGISTER = 15
    PREPARE_STORE = 16
    COMMIT_STORE = 17
    PREPARE_RETRIEVE = 18
    COMMIT_RETRIEVE = 19
    CLEAR = 20
    CHUNK_SIZE = 21
    PING = 22
    ALLOCATIONS = 23
    NOOP = 24
    EXPERIMENTAL = 32


class Key(msgspec.Struct):
    """Tokens of a request and the part of them that is meant.  ``token_ids`` stays packed until somebody needs it."""

    model_name: str
    world_size: int
    token_ids: msgspec.Raw
    start: int
    end: int
    request_id: str
    worker_id: int | None = None
    cache_salt: str = ""
    num_kv_readers: int = 0


class Registration(msgspec.Struct, frozen=True):
    """A worker's KV as one object per chunk: [layers, slots, hidden] with MLA, else [2, layers, slots, hidden]."""

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int | None = None

    def shape(self, chunk_tokens: int) -> list[int]:
        slots = self.num_physical_slots or chunk_tokens
        planes = [] if self.use_mla else [2]
        return [*planes, self.num_layers, slots, self.hidden_dim_size]

    def problem(self) -> str:
        """Why it cannot be served; empty if it can."""
        if self.dtype_str not in DTYPE_BYTES:
            return f"dtype {self.dtype_str!r} is not known; it must be one of {', '.join(DTYPE_BYTES)}"
        sizes = {
            "world_size": self.world_size,
            "num_layers": self.num_layers,
            "hidden_dim_size": self.hidden_dim_size,
            "num_physical_slots": self.num_physical_slots or 1,
        }
        for name, value in sizes.items():
            if not 1 <= value <= MAX_DIMENSION:
                return f"{name} is {value}; it must be between 1 and {MAX_DIMENSION}"
        if not self.model_name:
            return "model_name is empty; it names what is cached"
        return ""


_PAYLOADS: dict[Op, tuple[Any, ...]] = {
    Op.LOOKUP: (Key, int),
    Op.QUERY: (str,),
    Op.WAIT: (str, float),
    Op.FREE: (Key, int),
    Op.END_SESSION: (str,),
    Op.REGISTER: (Registration,),
    Op.UNREGISTER: (int,),
    Op.PREPARE_STORE: (Key, int),
    Op.COMMIT_STORE: (Key, int, bytes),
    Op.PREPARE_RETRIEVE: (Key, int),
    Op.COMMIT_RETRIEVE: (Key, int),
    Op.CLEAR: (bool,),
    Op.CHUNK_SIZE: (),
    Op.PING: (int | None,),
    Op.ALLOCATIONS: (msgspec.Raw, msgspec.Raw, msgspec.Raw),
    Op.NOOP: (),
    Op.EXPERIMENTAL: (),
}
_DECODERS = {
    op: tuple(msgspec.msgpack.Decoder(kind, strict=False) for kind in kinds) for op, kinds in _PAYLOADS.items()
}
_encode = msgspec.msgpack.Encoder().encode


class BadRequest(Exception):
    """One sentence for the client's log."""


def operation(frame: bytes | memoryview) -> Op:
    """Raises BadRequest for what 0.5.6 has and we do not, and for what nobody has."""
    try:
        value: object = msgspec.msgpack.decode(frame)
        if isinstance(value, int):
            return Op(value)
    except (msgspec.MsgspecError, ValueError):
        value = bytes(frame[:32])
    raise BadRequest(f"kvkeep does not serve the operation {value!r} of lmcache server")


def payloads(op: Op, frames: list[Any]) -> list[Any]:
    """The decoded arguments of a request.  Raises BadRequest."""
    decoders = _DECODERS.get(op)
    if decoders is None:
        raise BadRequest(
            "kvkeep serves engine-driven workers only: set lmcache.mp.mp_transfer_mode to engine_driven in "
            "kv_connector_extra_config (or LMCACHE_MP_TRANSFER_MODE=engine_driven)"
        )
    if len(decoders) != len(frames):
        raise BadRequest(f"{op.name.lower()} has {len(decoders)} arguments, {len(frames)} came")
    try:
        return [decoder.decode(frame) for decoder, frame in zip(decoders, frames, strict=True)]
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the arguments of {op.name.lower()} cannot be read: {error}") from None


def result(value: object) -> list[bytes]:
    return [] if value is None else [_encode(value)]


def refusal(sentence: str) -> bytes:
    """What stands in a reply for the operation: a client that finds another one there raises at once, and its error
    shows this text.  No answer would cost it its timeout of 300 s."""
    return _encode(sentence)
