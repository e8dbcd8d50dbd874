"""What crosses processes.  Start with `client.Client`, the library that engines, connectors and scripts use.

client.py      Client, and the client_*.py modules behind it     runs in engines
kvstore.py     KVStore over it, for programs with keys of their own; formats.py: what its values are
keys.py        identity: manifests, digests, chunk hashes, readable keys
attach.py      the attach socket, both sides
server.py      the RPC socket, daemon side                       runs in control
messages.py    the wire
vllm/          the connector for vLLM
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.ipc.client import Client, Lookup, Namespace, PendingLookup, Reading, Reservation, Stored, StoreResult
    from kvkeep.ipc.errors import AttachRefused, Denied, ProtocolError, Unavailable
    from kvkeep.ipc.formats import MemoryFormat, Value
    from kvkeep.ipc.keys import ChunkHasher, Key, Manifest
    from kvkeep.ipc.kvstore import KVStore
    from kvkeep.ipc.kvstore_put import Put

_HOME = {
    **dict.fromkeys(
        ("Client", "Lookup", "Namespace", "PendingLookup", "Reading", "Reservation", "StoreResult", "Stored"), "client"
    ),
    **dict.fromkeys(("AttachRefused", "Denied", "ProtocolError", "Unavailable"), "errors"),
    **dict.fromkeys(("ChunkHasher", "Key", "Manifest"), "keys"),
    **{"KVStore": "kvstore", "Put": "kvstore_put"},
    **dict.fromkeys(("MemoryFormat", "Value"), "formats"),
}

__all__ = [
    "AttachRefused",
    "ChunkHasher",
    "Client",
    "Denied",
    "KVStore",
    "Key",
    "Lookup",
    "Manifest",
    "MemoryFormat",
    "Namespace",
    "PendingLookup",
    "ProtocolError",
    "Put",
    "Reading",
    "Reservation",
    "StoreResult",
    "Stored",
    "Unavailable",
    "Value",
]


def __getattr__(name: str) -> object:
    """Names are imported when they are used: the daemon, which only needs the server side, stays small."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
