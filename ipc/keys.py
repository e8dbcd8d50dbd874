"""Identity: what a stored byte depends on, as a manifest, a digest, chunk hashes and a readable key.

*Manifest* - everything the bytes depend on except the tokens.  `canonical` is its one JSON text; `digest`, a blake3 of
that text and the geometry, names the namespace.  Change one field and it is another; ``kvkeep ls`` shows both.

*Chunk hash* - 32 bytes of blake3, chained, so that equal hashes mean an equal prefix:

    root   H("kvkeep.root.v1\\0" | namespace digest | chunk_tokens u32 | adapter | salt | tags)
    chunk  H(parent | chunk_tokens * token id u32 | per media item in the chunk: offset i64, length u32, hash)

Optional fields are written as presence byte, length, bytes: absent is not empty, and nothing can be moved from one
field to its neighbour.  All numbers are little-endian.  There is no seed, no environment variable, no Python `hash`:
two processes, hosts or years agree.  ``tests/ipc/test_keys.py`` holds golden vectors; a change of any of them makes
all stored data unreachable, so it needs a new version tag above.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3

from kvkeep.ipc.messages import HASH_BYTES, MAX_MANIFEST_BYTES
from kvkeep.shm.namespaces import namespace_digest

MANIFEST_FORMAT = 1
MAX_DEPTH = 16

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of them
Tokens: TypeAlias = "Sequence[int] | np.ndarray[Any, Any]"

_U32 = struct.Struct("<I")
_MEDIA = struct.Struct("<qI")


# ---- manifest ------------------------------------------------------------------------------------------------------


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share one KV layout (full attention, sliding window, MLA, ...)."""

    layers: tuple[str, ...]
    kind: str  # "full", "mla", "sliding_window:4096", ...
    shape: tuple[int, ...]  # of one block of one layer
    order: str  # what the dimensions of `shape` are, e.g. "kv,token,head,dim"
    strides: tuple[int, ...] = ()  # in bytes; empty = contiguous
    page_bytes: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of DESIGN section 7.  A field that does not apply stays None, which is not the same as empty."""

    model: str
    kv_dtype: str
    block_size: int
    chunk_tokens: int
    revision: str | None = None
    fingerprint: str | None = None  # of the weights, where there is no revision
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    groups: tuple[Group, ...] = ()
    scales: str | None = None  # digest of the KV quantisation scales
    connector_abi: str = ""
    engine: str = ""
    hash_algorithm: str = "kvkeep.v1"  # or the engine's, when its block hashes are used
    hash_seed: str | None = None
    extras: dict[str, Json] = {}
    format: int = MANIFEST_FORMAT


def canonical(manifest: Mapping[str, Json] | Manifest) -> bytes:
    """The one JSON text of a manifest: keys sorted, no spaces, ASCII.  Raises ValueError for what has no such form."""
    tree = msgspec.to_builtins(manifest) if isinstance(manifest, Manifest) else manifest
    if not isinstance(tree, Mapping):
        raise ValueError(f"a manifest is a mapping or a Manifest, not {type(manifest).__name__}")
    text = json.dumps(_plain(tree, "manifest", 0), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"the manifest has {len(text)} bytes, the limit is {MAX_MANIFEST_BYTES}; put a digest where a list is long"
        )
    return text


def digest(canonical_manifest: bytes, *, shard_bytes: int, shards: int = 1) -> bytes:
    """The namespace digest: geometry is part of the identity.  The daemon computes the same."""
    return namespace_digest(canonical_manifest, shards, shard_bytes)


def _plain(value: Json, where: str, depth: int) -> Json:
    """A copy in plain JSON types; names the first part that is not JSON."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{where} = {value} does not fit into 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} = {value} has no JSON form")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; keys are strings")
        return {_text(key, where): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}, which has no JSON form")


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} contains a lone surrogate; use real Unicode text") from None
    return str(value)


# ---- chunk hashes --------------------------------------------------------------------------------------------------


class Media(NamedTuple):
    """A multimodal item: its content hash, and where its placeholder tokens lie (relative to the tokens given)."""

    hash: bytes
    start: int
    length: int


class ChunkHasher:
    """Hashes of the chunks of one kind of request: one namespace, adapter, salt and set of tags.

    ``adapter`` must name the weights, not only the slot ("sql-lora" reloaded with other weights is another adapter).
    """

    __slots__ = ("chunk_tokens", "root")

    def __init__(
        self,
        namespace_digest: bytes,
        *,
        chunk_tokens: int = 256,
        adapter: str | bytes | None = None,
        salt: str | bytes | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        if len(namespace_digest) != HASH_BYTES:
            raise ValueError(f"a namespace digest has {HASH_BYTES} bytes, not {len(namespace_digest)}")
        if not 0 < chunk_tokens < 2**32:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be positive")
        parts = [b"kvkeep.root.v1\0", namespace_digest, _U32.pack(chunk_tokens), _optional(adapter), _optional(salt)]
        if tags is None:
            parts.append(b"\0")
        else:
            parts += [b"\1", _U32.pack(len(tags))]
            for name, value in sorted((k.encode(), v.encode()) for k, v in tags.items()):
                parts += [_optional(name), _optional(value)]
        self.chunk_tokens = chunk_tokens
        self.root: bytes = blake3(b"".join(parts)).digest()

    def chunk_hashes(self, token_ids: Tokens, *, media: Iterable[Media] = (), parent: bytes | None = None) -> bytes:
        """32 bytes for each full chunk of ``token_ids``, packed; a partial chunk at the end has no hash.

        To continue a chain pass its last hash as ``parent`` and the tokens after it; ``media`` positions are relative
        to these tokens, and negative for an item that began before them.
        """
        tokens = _u32(token_ids)
        size = self.chunk_tokens
        count = len(tokens) // size
        if parent is None:
            parent = self.root
        elif len(parent) != HASH_BYTES:
            raise ValueError(f"a parent hash has {HASH_BYTES} bytes, not {len(parent)}")
        body = tokens[: count * size].tobytes()
        step = size * 4
        extra = _media_by_chunk(media, size, count)
        out = bytearray(count * HASH_BYTES)
        for i in range(count):
            data = parent + body[i * step : (i + 1) * step]
            if i in extra:
                data += extra[i]
            parent = blake3(data).digest()
            out[i * HASH_BYTES : (i + 1) * HASH_BYTES] = parent
        return bytes(out)


def _u32(token_ids: Tokens) -> np.ndarray[Any, np.dtype[np.uint32]]:
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"token ids are a flat list of integers, not {array.dtype} of shape {array.shape}")
    if array.size and (array.min() < 0 or array.max() >= 2**32):
        raise ValueError(f"token ids lie between 0 and 2**32-1; found {array.min()} to {array.max()}")
    return array.astype("<u4")


def _optional(value: str | bytes | None) -> bytes:
    if value is None:
        return b"\0"
    data = value.encode() if isinstance(value, str) else bytes(value)
    return b"\1" + _U32.pack(len(data)) + data


def _media_by_chunk(media: Iterable[Media], size: int, count: int) -> dict[int, bytes]:
    """What to append for each chunk that an item touches; items in the order of their place, then of their hash."""
    extra: dict[int, bytes] = {}
    for item in sorted(media, key=lambda m: (m.start, m.length, m.hash)):
        if item.length <= 0:
            raise ValueError(f"a media item covers {item.length} tokens; it must cover at least one")
        if not item.hash:
            raise ValueError("a media item has an empty hash; hash its content at full width")
        first = max(0, item.start // size)
        last = min(count - 1, (item.start + item.length - 1) // size)
        for i in range(first, last + 1):
            record = _MEDIA.pack(item.start - i * size, len(item.hash)) + item.hash
            extra[i] = extra.get(i, b"") + record
    return extra


# ---- readable key --------------------------------------------------------------------------------------------------

_RESTRICTED = re.compile(r"[@%\s\x00-\x1f\x7f]")


class Key(NamedTuple):
    """``model@world@rank@hash@dtype[@layer][@tag%value...]``: a chunk's name for people, logs and other tools."""

    model: str
    world: int
    rank: int
    hash: bytes
    dtype: str
    layer: int | None = None
    tags: tuple[tuple[str, str], ...] = ()

    def to_string(self) -> str:
        for what, text in (("model", self.model), ("dtype", self.dtype)):
            _check(what, text)
        if min(self.world, self.rank) < 0 or (self.layer is not None and self.layer < 0):
            raise ValueError(f"world, rank and layer of a key are not negative: {self}")
        parts = [self.model, str(self.world), str(self.rank), self.hash.hex(), self.dtype]
        if self.layer is not None:
            parts.append(str(self.layer))
        for name, value in self.tags:
            _check("tag", name)
            _check(f"value of tag {name}", value, may_be_empty=True)
            parts.append(f"{name}%{value}")
        return "@".join(parts)

    def layers(self, count: int) -> list[Key]:
        """The keys of this chunk's layers 0 to ``count - 1``: each is a key of its own."""
        return [self._replace(layer=layer) for layer in range(count)]

    @classmethod
    def from_string(cls, text: str) -> Key:
        """Raises ValueError with one sentence; ``from_string(k.to_string()) == k``."""
        parts = text.split("@")
        if len(parts) < 5:
            raise ValueError(f"key {text[:200]!r} has {len(parts)} parts, needs model@world@rank@hash@dtype")
        model, world, rank, digits, dtype, *rest = parts
        layer = int(rest.pop(0)) if rest and _number(rest[0]) else None
        if not (_number(world) and _number(rank)):
            raise ValueError(f"key {text[:200]!r}: world and rank must be decimal numbers")
        if len(digits) % 2 or not re.fullmatch(r"[0-9a-f]+", digits):
            raise ValueError(f"key {text[:200]!r}: the hash must be lower-case hexadecimal")
        tags = []
        for part in rest:
            name, percent, value = part.partition("%")
            if not percent:
                raise ValueError(f"key {text[:200]!r}: {part!r} is neither a layer (right after dtype) nor tag%value")
            tags.append((name, value))
        key = cls(model, int(world), int(rank), bytes.fromhex(digits), dtype, layer, tuple(tags))
        if key.to_string() != text:
            raise ValueError(f"key {text[:200]!r} is not in its one readable form, which is {key.to_string()[:200]!r}")
        return key


def _number(text: str) -> bool:
    return re.fullmatch(r"0|[1-9][0-9]{0,17}", text) is not None


def _check(what: str, text: str, *, may_be_empty: bool = False) -> None:
    if not text and not may_be_empty:
        raise ValueError(f"the {what} of a key must not be empty")
    if bad := _RESTRICTED.search(text):
        raise ValueError(
            f"the {what} {text[:200]!r} contains {bad.group()!r}; '@', '%' and white space separate the parts"
        )
