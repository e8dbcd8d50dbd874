"""The native protocol, version 1: what a client and the daemon say to each other.

Two channels.  The *attach socket* (``attach.sock``, SOCK_STREAM, frames of u32 little-endian length + msgpack) carries
one `Hello` and one `Welcome` or `Refused`, passes file descriptors, and then stays open: its life is the lease.
The *RPC socket* (``rpc.sock``, ZeroMQ DEALER to ROUTER) carries everything else:

    request   [request id, 8 bytes][msgpack array: tag, lease, epoch, fields...]
    reply     [request id, echoed ][msgpack array: tag, fields...]

Every request gets exactly one reply, `Error` included.  A lookup answered with ``pending`` is followed by one
`LookupDone` under the same request id, and by a write to the client's eventfd.

Hashes travel packed: ``hashes`` is n * 32 bytes.  Positions count chunks from the root of the chain.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import msgspec

PROTOCOL_VERSION = 1
SUPPORTED_VERSIONS = (1,)
HASH_BYTES = 32
REQUEST_ID_BYTES = 8
MAX_CHUNKS = 32768  # per request; a longer chain is a TOO_LARGE error
MAX_MESSAGE_BYTES = MAX_CHUNKS * HASH_BYTES + 65536
MAX_ATTACH_FRAME_BYTES = 65536
MAX_MANIFEST_BYTES = 16128


class ErrorCode(str, enum.Enum):
    """Why a request was refused.  The set is closed: a client may switch on it."""

    BAD_REQUEST = "bad_request"  # not decodable, or a field out of range
    UNKNOWN_OP = "unknown_op"
    UNKNOWN_LEASE = "unknown_lease"  # attach (again)
    STALE_EPOCH = "stale_epoch"  # the daemon restarted since; attach again
    UNKNOWN_NAMESPACE = "unknown_namespace"
    UNKNOWN_HANDLE = "unknown_handle"
    TOO_LARGE = "too_large"
    DENIED = "denied"  # the uid may not do this
    LIMIT = "limit"  # a table is full (namespaces, handles)
    INTERNAL = "internal"  # a bug of ours; logged with its traceback


class Verdict(enum.IntEnum):
    """STORE's answer for one chunk."""

    GRANTED = 0  # an extent is yours: copy, then COMMIT
    PRESENT = 1  # sealed already
    BUSY = 2  # this shard of it is being written by somebody
    FULL = 3  # no room even after eviction; so is everything after it
    ORPHAN = 4  # a head before `start` is not resident: store from StoreReply.missing instead


class Outcome(enum.IntEnum):
    """COMMIT's answer for one granted chunk."""

    SEALED = 0  # readable now
    WAITING = 1  # this shard is in; other shards, or a head that another client writes, are not yet
    ABORTED = 2  # as asked
    LOST = 3  # the chunk, or the head it hangs on, was given up meanwhile


# ---- attach socket -------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    versions: tuple[int, ...]
    name: str = ""  # shown by `kvkeep status`
    previous_lease: int = 0  # lease id held under an earlier epoch: its last copy has ended
    want_arena: bool = True  # False: management client, gets no fds
    abi: int = 0  # the meta segment's ABI version the client can read; 0 = does not map


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Sent with SCM_RIGHTS [meta (read-only), data (read-write), eventfd] when ``want_arena``.

    The meta descriptor also *is* the lease lock: keep it open as long as any view of the arena is alive.
    """

    version: int
    lease: bytes  # 16 random bytes; goes into every request
    lease_id: int
    epoch: int
    boot_id: str
    rpc_endpoint: str  # "ipc:///..."
    meta_bytes: int
    data_bytes: int
    chunk_tokens: int  # the daemon's default; a namespace may say otherwise
    l2: bool = False  # a lookup that waits may find more than what L1 has


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    code: str  # "version" | "denied" | "limit" | "bad_request" | "abi" | "stopping"
    message: str


AttachMessage: TypeAlias = Hello | Welcome | Refused

# ---- requests ------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    lease: bytes
    epoch: int


class Ping(Request, frozen=True, tag="PING"):
    pass


class Register(Request, frozen=True, tag="REGISTER"):
    """Declare a namespace.  Same manifest, same id (within an epoch); geometry is part of the manifest's identity."""

    manifest: bytes  # canonical JSON (see keys.canonical), at most MAX_MANIFEST_BYTES
    shard_bytes: int  # bytes of one rank's part of one chunk, > 0
    shards: int = 1  # ranks that together make a chunk, 1..64


class Lookup(Request, frozen=True, tag="LOOKUP"):
    """Longest sealed prefix of ``hashes``.  Takes one reference per ready chunk, held by the returned handle, until
    every reader confirmed (``readers`` confirmations of each shard), RELEASE, or the death of the owner."""

    namespace: int
    hashes: bytes
    readers: int = 1  # per shard; 0 = only ask: no handle, no reference
    wait_ms: int = 0  # wait this long for chunks that are being written or loaded


class Retrieve(Request, frozen=True, tag="RETRIEVE"):
    handle: int
    shard: int
    start: int  # chunk position
    count: int


class Confirm(Request, frozen=True, tag="CONFIRM"):
    """This reader of this shard has finished with the handle."""

    handle: int
    shard: int


class Release(Request, frozen=True, tag="RELEASE"):
    """Give back the references of chunks ``keep`` and after; ``keep`` 0 ends the handle.  Heads cannot be released
    before tails, so that a tail in use never outlives its head."""

    handle: int
    keep: int = 0


class Store(Request, frozen=True, tag="STORE"):
    """Ask for extents for chunks ``start`` .. end of the chain.  ``hashes`` is the whole chain from the root: what lies
    before ``start`` is touched and held until COMMIT, so that heads stay younger than tails."""

    namespace: int
    shard: int
    hashes: bytes
    start: int = 0


class Commit(Request, frozen=True, tag="COMMIT"):
    """Ends a STORE.  One byte per granted chunk, in order: 1 = bytes are complete, 0 = abort."""

    handle: int
    results: bytes
    checksums: bytes = b""  # u64 LE xxh3_64 per granted chunk, or empty = not computed


class Abort(Request, frozen=True, tag="ABORT"):
    handle: int


class Pin(Request, frozen=True, tag="PIN"):
    """Protect the sealed prefix from eviction until UNPIN, the ttl, or the daemon's end."""

    namespace: int
    hashes: bytes
    ttl_s: float = 3600.0


class Unpin(Request, frozen=True, tag="UNPIN"):
    pin: int


class Delete(Request, frozen=True, tag="DELETE"):
    """Drop these chunks unless referenced, from L1 and from L2."""

    namespace: int
    hashes: bytes
    l1_only: bool = False


class Clear(Request, frozen=True, tag="CLEAR"):
    """Drop all unreferenced chunks of a namespace (0 = of all) from L1, and all that L2 has of it."""

    namespace: int = 0
    l1_only: bool = False
    digest: bytes = b""  # instead of the id, for a namespace that only L2 knows; 32 bytes


class Manage(Request, frozen=True, tag="L2"):
    """One step of management of one L2 adapter (see l2/maintenance.py).  The Document has the cursor for the next."""

    adapter: str  # its name: "l2-0", or the "name" in its configuration
    what: str  # "list" | "tally" | "verify" | "compact"
    namespace: bytes = b""  # digest; empty = all
    cursor: bytes = b""
    limit: int = 0  # objects; 0 = as many as make a step


class Stats(Request, frozen=True, tag="STATS"):
    pass


class List(Request, frozen=True, tag="LIST"):
    """Namespaces (``namespace`` 0) or the entries of one, a page at a time."""

    namespace: int = 0
    cursor: int = 0
    limit: int = 1000


class Check(Request, frozen=True, tag="CHECK"):
    """Run the integrity check now.  Pauses the daemon about 0.5 s per million entries: for tests and doctors."""


AnyRequest: TypeAlias = (
    Ping | Register | Lookup | Retrieve | Confirm | Release | Store | Commit | Abort | Pin | Unpin | Delete | Clear
    | Manage | Stats | List | Check
)  # fmt: skip

# ---- replies -------------------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, array_like=True):
    pass


class Error(Reply, frozen=True, tag="error"):
    code: str  # an ErrorCode value
    message: str
    epoch: int  # of the daemon, so that a restart is noticed whatever was asked


class Ok(Reply, frozen=True, tag="ok"):
    epoch: int
    count: int = 0  # RELEASE: references dropped; DELETE, CLEAR: chunks dropped from L1
    detail: bytes = b""  # DELETE, CLEAR with L2: a JSON document, see daemon/forget.py


class Registered(Reply, frozen=True, tag="registered"):
    epoch: int
    namespace: int  # > 0
    digest: bytes  # 32 bytes
    stride: int  # bytes from one shard to the next inside a chunk's extent


class LookupReply(Reply, frozen=True, tag="lookup"):
    epoch: int
    handle: int  # 0 = no references were taken
    ready: int  # chunks
    pending: bool = False  # a LookupDone follows


class LookupDone(Reply, frozen=True, tag="lookup_done"):
    epoch: int
    handle: int
    ready: int


class Extents(Reply, frozen=True, tag="extents"):
    epoch: int
    length: int  # bytes of the shard, the same for all
    offsets: bytes  # u64 LE per chunk, into the data segment
    entries: bytes  # u32 LE per chunk: index into the entry table, to validate after the copy
    generations: bytes  # u32 LE per chunk
    checksums: bytes  # u64 LE per chunk; 0 = none was given


class StoreReply(Reply, frozen=True, tag="store"):
    epoch: int
    handle: int  # 0 = nothing granted
    length: int
    verdicts: bytes  # u8 per chunk from `start`
    offsets: bytes  # u64 LE per GRANTED chunk, in order
    missing: int = -1  # position of the first head that is not resident, when verdicts say ORPHAN


class CommitReply(Reply, frozen=True, tag="commit"):
    epoch: int
    outcomes: bytes  # u8 per granted chunk


class Pinned(Reply, frozen=True, tag="pinned"):
    epoch: int
    pin: int  # 0 = nothing was there
    count: int


class Document(Reply, frozen=True, tag="document"):
    """STATS, LIST, CHECK, L2: one JSON document."""

    epoch: int
    json: bytes


AnyReply: TypeAlias = (
    Error | Ok | Registered | LookupReply | LookupDone | Extents | StoreReply | CommitReply | Pinned | Document
)

_attach_encoder = msgspec.msgpack.Encoder()
_attach_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AttachMessage)
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyReply)

encode = _attach_encoder.encode


def decode_attach(frame: bytes) -> AttachMessage:
    """Raises msgspec.DecodeError or msgspec.ValidationError on anything that is not one of the attach messages."""
    return _attach_decoder.decode(frame)  # type: ignore[no-any-return]


def decode_request(frame: bytes) -> AnyRequest:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _request_decoder.decode(frame)  # type: ignore[no-any-return]


def decode_reply(frame: bytes) -> AnyReply:
    """Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _reply_decoder.decode(frame)  # type: ignore[no-any-return]
