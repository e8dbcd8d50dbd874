"""What control and a mover say to each other: jobs one way, answers the other.

    control ── Find, Touch, Put, Get, Drop, Measure, Probe, Manage ──► mover
            ◄── Ready | Failed (once), then one Answer per job ──

The channel is a pair of connected AF_UNIX SOCK_SEQPACKET sockets: one message is one packet of at most MAX_PACKET
bytes, an end that died reads as EOF, and nothing of a packet is ever lost half-way.
Its readability is the completion signal (an eventfd beside it could only say the same thing later, and would be
lost with a kill between the two writes).

A job speaks of whole chunks of one namespace; the mover makes one object per shard of it. ``deadline`` is in
seconds of CLOCK_MONOTONIC, which all processes of a host share. A job that is overdue when its turn comes is
answered EXPIRED without being started. **After its answer the mover does not touch the extents of a job any more**;
until then, or until the process is known to be dead, they are the mover's.

SIGTERM asks the mover to stop: it finishes what runs and gives back what waits.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import msgspec

MAX_PACKET = 60 * 1024
MAX_KEYS = 512  # per Find
MAX_CHUNKS = 64  # per Put and Get
MAX_CHUNK_BYTES = 64 << 20  # per Put and Get, unless one chunk alone is larger


class Code(enum.IntEnum):
    """What became of one chunk of a job: the adapter's outcomes, and the mover's own."""

    OK = 0
    MISS = 1
    CORRUPT = 2
    NO_SPACE = 3
    IO_ERROR = 4
    TOO_LARGE = 5
    BUSY = 6
    UNAVAILABLE = 7
    # 8 is Outcome.ENCODED: between mover and adapter only
    EXPIRED = 9  # not started: its deadline had passed
    STOPPING = 10  # not started: the mover was told to stop
    LOST = 11  # said by control: the mover died with the job


FAULTS = frozenset({Code.IO_ERROR, Code.UNAVAILABLE, Code.LOST})  # speak against the medium, not against the object


class Job(msgspec.Struct, frozen=True, array_like=True):
    id: int
    deadline: float


class Chunks(Job, frozen=True):
    """n chunks of one namespace."""

    namespace: bytes  # 32-byte digest
    shards: int
    chunks: bytes  # n * 32


class Extents(Chunks, frozen=True):
    """... and where they lie in the arena: shard s of chunk i at offsets[i] + s * stride."""

    shard_bytes: int
    stride: int
    offsets: bytes  # n u64


class Find(Chunks, frozen=True, tag="find"):
    """Which are there.  Answer: OK for those of which all shards are, MISS for the others."""


class Touch(Chunks, frozen=True, tag="touch"):
    """They are in use, though not from here.  Answer: as of Find."""


class Put(Extents, frozen=True, tag="put"):
    checksums: bytes  # n * shards u64 xxh3_64, 0 = not computed; or empty


class Get(Extents, frozen=True, tag="get"):
    pass


class Describe(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """No job, and not answered: what a namespace is, said once to each process before the first Put of it.  Serdes
    need to know what the bytes are, and the medium whose they are (catalogue.py)."""

    namespace: bytes
    manifest: bytes


class Drop(Chunks, frozen=True, tag="drop"):
    """Answer: OK for every chunk that is gone for certain, there before or not."""


class Measure(Job, frozen=True, tag="measure"):
    """Usage only."""


class Probe(Job, frozen=True, tag="probe"):
    """Does the medium work again?  A small object is stored, read back and deleted."""


class Manage(Job, frozen=True, tag="manage"):
    """One small step of management (see maintenance.py).  Answer: `data` is a maintenance.Step."""

    what: str  # a maintenance.What
    namespace: bytes = b""  # only of this digest; empty = all
    cursor: bytes = b""
    limit: int = 0  # objects, 0 = as many as make a step


AnyJob: TypeAlias = Find | Touch | Put | Get | Drop | Measure | Probe | Manage


class Usage(msgspec.Struct, frozen=True, array_like=True):
    bytes_used: int
    bytes_limit: int
    objects: int
    manifests: int = 0  # of the objects, those that only say what the others are


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    type_name: str
    usage: Usage


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The adapter cannot be opened; the mover ends after saying so."""

    reason: str


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    id: int
    codes: bytes  # one Code per chunk of the job
    errno: int = 0  # of the first IO_ERROR
    detail: str = ""  # one sentence about the first failure
    usage: Usage | None = None
    counters: dict[str, int] | None = None  # the adapter's, with Measure
    data: bytes = b""  # with Manage


Message: TypeAlias = Ready | Failed | Answer

encode = msgspec.msgpack.Encoder().encode
_jobs: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyJob | Describe)
_messages: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def decode_job(packet: bytes) -> AnyJob | Describe:
    return _jobs.decode(packet)  # type: ignore[no-any-return]


def decode_message(packet: bytes) -> Message:
    return _messages.decode(packet)  # type: ignore[no-any-return]


def chunk_count(job: AnyJob) -> int:
    """Codes that its answer carries."""
    return len(job.chunks) // 32 if isinstance(job, Chunks) else 1
