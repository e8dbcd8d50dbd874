"""What crosses between the scheduler half and the worker half.

Scheduler to worker: one `KVKeepMetadata` a step, empty in nearly all of them.  Worker to scheduler: `WorkerFacts` once,
at the start; `KVKeepWorkerMetadata` when a job has ended.  vLLM moves these between its own processes, so they hold
plain numbers, bytes and strings, and stay small: hashes and block ids, never token ids.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvkeep.ipc.vllm.adapters import Files
from kvkeep.ipc.vllm.groups import BlockTable
from kvkeep.ipc.vllm.memory import Levels


@dataclass(frozen=True)
class NamespaceSpec:
    """An identity as both halves register it.  `generation` grows when the engine resets its cache."""

    manifest: dict[str, object]
    shard_bytes: int
    shards: int
    chunk_tokens: int
    generation: int


@dataclass(frozen=True)
class LoadJob:
    """Fill `blocks` from chunks first_chunk .. first_chunk + chunks - 1 of a looked-up handle.

    `blocks` has the blocks of all these chunks; ABSENT are those that the engine does not need, and those that it has
    already: they may be shared with other requests and are not written.  handle 0: nothing to read, report the job as
    failed.
    """

    request_id: str
    handle: int
    first_chunk: int
    chunks: int
    blocks: BlockTable
    generation: int


@dataclass(frozen=True)
class StoreJob:
    """Store chunks start .. of the chain `hashes` (from the root) out of `blocks`, pinned until all ranks reported.

    `adapter`: files of a LoRA adapter; if they are not as they were, the KV may have been computed with others.
    """

    job_id: int
    hashes: bytes
    start: int
    blocks: BlockTable
    generation: int
    adapter: Files | None = None


class LoadFailure(enum.Enum):
    """Why a load failed; of several ranks' reasons the first that is reported."""

    DEADLINE = "deadline"
    DAEMON_AWAY = "daemon_away"
    REFUSED = "refused"  # the daemon does not give it any more
    INVALID = "invalid"  # a chunk was evicted or written anew under the copy
    CANCELLED = "cancelled"  # the request was aborted
    RESET = "reset"  # the engine's cache was reset meanwhile
    ERROR = "error"  # of ours: the log has it


class StoreEnd(enum.Enum):
    """From good to bad: of what the ranks report, the last one holds."""

    DONE = "done"  # what was granted is in, the rest was there already or is being written by another
    FAILED = "failed"  # daemon away, deadline passed, or an error of ours
    ORPHAN = "orphan"  # a head is not resident any more: store again from `missing`
    FULL = "full"  # no room in the arena


@dataclass(frozen=True)
class StoreReport:
    job_id: int
    end: StoreEnd
    stored: int = 0  # chunks
    missing: int = -1


@dataclass(frozen=True)
class LoadReport:
    request_id: str
    failure: LoadFailure | None  # None = every byte is right
    confirmed: bool  # the daemon is told that the read is over; else the scheduler half releases the handle
    good_chunks: int = 0  # of a load that failed: the leading ones that vLLM keeps
    seconds: float = 0.0  # from its submission to its end, waiting for a copy thread included

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass
class KVKeepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    generation: int = 0  # a load of an older one is stale, however well it ended
    namespace: NamespaceSpec | None = None  # only in the step in which it changes
    step: int = 0  # a number that comes back with the step's output, for steps whose time is taken


@dataclass
class KVKeepWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    loads: list[LoadReport] = field(default_factory=list)
    stores: list[StoreReport] = field(default_factory=list)
    step: int = 0
    levels: dict[int, Levels] = field(default_factory=dict)  # by rank, of those where they have changed
    problem: str = ""  # why a rank can copy nothing any more

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVKeepWorkerMetadata)
        return KVKeepWorkerMetadata(
            self.loads + other.loads,
            self.stores + other.stores,
            max(self.step, other.step),
            self.levels | other.levels,
            self.problem or other.problem,
        )


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What only the worker knows: how the KV memory really lies.  `refused` is a sentence, or empty."""

    refused: str
    block_bytes: tuple[int, ...]  # per group, of one block in all its layers
    layout: dict[str, object]
