"""What the web process asks of control: as a native client, one call at a time, each with a deadline.

Nothing is kept attached between the calls; so a daemon that nobody manages over HTTP has no client more.  A warm
prefetch has an attachment of its own while it runs, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.ipc.client import Client

ATTACH_S = 5.0
TURN_S = 5.0  # how long a call waits for the one before it
MAX_PREFETCHES = 4  # that run; finished ones are kept for `KEEP_S`, or until they were asked for
KEPT = 1024
KEEP_S = 600.0
PREFETCH_S = 600.0
_WAIT_S = 30.0  # of one lookup
_NAME = "kvkeep-web"


@dataclass(frozen=True)
class Settings:
    """Of the daemon, as far as its statistics do not tell them."""

    run_dir: str = ""  # "" = there is no daemon to ask
    chunk_size: int = 0
    eviction_policy: str = ""
    prefetch_policy: str = ""
    quotas: dict[str, float] = field(default_factory=dict)  # GiB of L1 by tenant
    admin_uids: frozenset[int] = frozenset()


class Refused(Exception):
    """One sentence, with the HTTP status that it goes with."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Calls:
    def __init__(self, settings: Settings) -> None:
        self._run_dir = settings.run_dir
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """For one call.  Raises Refused for whatever the daemon does not do."""
        if not self._turn.acquire(timeout=TURN_S):
            raise Refused(503, "another request of this kind is still under way: ask again later")
        try:
            with attached(self._run_dir) as client:
                yield client
        finally:
            self._turn.release()


@contextlib.contextmanager
def attached(run_dir: str) -> Iterator[Client]:
    from kvkeep.ipc.client import Client
    from kvkeep.ipc.errors import AttachRefused, Denied, ProtocolError, Unavailable

    if not run_dir:
        raise Refused(503, "this web process was started without a daemon to ask: see --run-dir")
    try:
        with Client.attach(run_dir, name=_NAME, arena=False, deadline_s=ATTACH_S) as client:
            yield client
    except Denied as problem:
        raise Refused(403, str(problem)) from None
    except ProtocolError as problem:
        raise Refused(409, str(problem)) from None
    except (AttachRefused, Unavailable, TimeoutError, OSError) as problem:
        raise Refused(503, f"kvkeepd does not answer: {problem}") from None


@dataclass
class Prefetch:
    total: int  # chunks
    found: int = 0
    problem: str = ""
    done_at: float = 0.0  # 0 = it runs


@dataclass(frozen=True)
class Wanted:
    """A chain of one namespace."""

    manifest: dict[str, Any]
    tenant: str
    shards: int
    shard_bytes: int
    hashes: bytes


class Prefetches:
    """Loads from L2 that nobody waits for."""

    def __init__(self, settings: Settings) -> None:
        self._run_dir = settings.run_dir
        self._lock = threading.Lock()
        self._jobs: dict[str, Prefetch] = {}

    def submit(self, wanted: Sequence[Wanted], total: int) -> str:
        """Raises Refused: too many run."""
        with self._lock:
            self._tidy()
            if sum(not job.done_at for job in self._jobs.values()) >= MAX_PREFETCHES:
                raise Refused(503, f"{MAX_PREFETCHES} prefetches are under way: ask again later")
            number, job = uuid.uuid4().hex, Prefetch(total)
            self._jobs[number] = job
        threading.Thread(target=self._run, args=(job, wanted), name="prefetch", daemon=True).start()
        return number

    def result(self, number: str) -> Prefetch | None:
        """Told once when it is done.  None = there is none (any more)."""
        with self._lock:
            job = self._jobs.get(number)
            if job is not None and job.done_at:
                del self._jobs[number]
            return job

    def _tidy(self) -> None:
        old = time.monotonic() - KEEP_S
        done = [number for number, job in self._jobs.items() if job.done_at]
        for at, number in enumerate(done):
            if self._jobs[number].done_at < old or len(done) - at > KEPT:
                del self._jobs[number]

    def _run(self, job: Prefetch, wanted: Sequence[Wanted]) -> None:
        found = 0
        try:
            with attached(self._run_dir) as client:
                for one in wanted:
                    found += _load(client, one) * one.shards
        except Refused as problem:
            job.problem = str(problem)
        except Exception as problem:
            job.problem = f"the prefetch failed: {problem!r}"
        job.found = found
        job.done_at = time.monotonic()


def _load(client: Client, wanted: Wanted) -> int:
    """How many chunks are in L1 afterwards."""
    namespace = client.register(
        wanted.manifest, shard_bytes=wanted.shard_bytes, shards=wanted.shards, tenant=wanted.tenant
    )
    until, before = time.monotonic() + PREFETCH_S, -1
    while True:
        with client.lookup(namespace, wanted.hashes, wait_s=_WAIT_S, deadline_s=_WAIT_S) as found:
            ready = found.ready
        if ready <= before or ready * 32 >= len(wanted.hashes) or time.monotonic() >= until:
            return ready
        before = ready
