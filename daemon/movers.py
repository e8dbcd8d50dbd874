"""Control's side of one mover: its process, the channel, the jobs it has, and whether to give it more.

    STARTING --Ready--> SERVING --process reaped--> STARTING (a new process, a new channel)

A job is open from `submit` until exactly one call of its ``done``: with the mover's answer, or with LOST for all
chunks when the process has been reaped. Only then may the extents of a job be used for anything else; a mover that
hangs keeps them. A job that is overdue calls ``late`` (its extents stay the mover's) and counts as a failure of the
medium.

The channel is a fresh pair of sockets for each process, so no job can reach a process that it was not meant for.
The child's end always has the same number, because a Child inherits by number.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from kvkeep.daemon.bans import Bans
from kvkeep.daemon.breaker import Breaker, Circuit
from kvkeep.daemon.mover_health import Figures, Health
from kvkeep.daemon.supervise import Child
from kvkeep.l2 import jobs as j
from kvkeep.l2.jobs import Code
from kvkeep.l2.maintenance import Step, What

HEARTBEAT_S = 10.0  # also covers the start of the process on a loaded machine
OVERDUE_LEAST_S = 1.0  # a short deadline that passes says nothing against the medium before this
PROBE_DEADLINE_S = 5.0
RENEW_PROBES = 4  # probes that fail in a row: then a new process opens the medium anew
MEASURE_S = 2.0
ROUND_PACKETS = 64  # read per round of the control loop
RESEND_S = 0.01  # the channel was full
MAX_DESCRIBED = 4096  # namespaces; then all are told again

log = logging.getLogger("kvkeep.movers")

MANAGE_DEADLINE_S = 30.0
MANAGE_JOBS = 4  # steps of management that one mover may be asked for at a time
_WHY_NOT = {
    Code.EXPIRED: "it had other things to do; ask again",
    Code.STOPPING: "it is being stopped",
    Code.LOST: "its process ended meanwhile; ask again when it is back",
}

Done = Callable[[Sequence[int]], None]  # gets one Code per chunk
Managed = Callable[[Step | None, str], None]  # gets the step, or why there is none; called once


class Phase(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"


@dataclass(eq=False)
class OpenJob:
    job: j.AnyJob
    done: Done
    late: Callable[[], None]
    nbytes: int
    overdue: float  # when it is
    is_late: bool = False


def _nothing() -> None:
    pass


class Mover:
    def __init__(
        self,
        index: int,
        config: dict[str, Any],
        *,
        data_fd: int,
        data_bytes: int,
        lease_fd: int,
        log_level: str,
        log_format: str,
    ) -> None:
        """``lease_fd`` carries a lock that shows the next daemon whether this mover still lives (see shm/leases.py)."""
        self.index = index
        self.bit = 1 << index
        self.name = f"l2-{index}"
        self.type_name = str(config.get("type") or config.get("class_name") or "?")
        self.label = str(config.get("name") or self.type_name)
        self.breaker = Breaker()
        self.phase = Phase.STARTING
        self.health = Health(f"{self.name} ({self.label})", self.breaker, time.monotonic())
        self.figures = Figures()
        self.putting = self.getting = 0  # bytes in open jobs
        self.puts = 0  # open Put jobs
        self.bans = Bans()  # what must not be asked of this adapter, nor given to it
        self._steps: dict[int, Step] = {}  # by Manage job, between its answer and its end
        self._whys: dict[int, str] = {}  # likewise, why there is no step
        self.on_serving: Callable[[Mover], None] = lambda mover: None  # from now on it may be given jobs (again)
        self.manifest_of: Callable[[bytes], bytes] = lambda namespace: b""  # b"" = not known
        self._described: set[bytes] = set()  # to this process
        self.watch: Callable[[int, Callable[[], object]], None] = lambda fd, callback: None
        self.unwatch: Callable[[int], None] = lambda fd: None
        self._renewed = False  # by us, because the medium does not work: its being open proves nothing
        self._ids = itertools.count(1)
        self._open: dict[int, OpenJob] = {}
        self._overdue: list[tuple[float, int]] = []
        self._outbox: deque[bytes] = deque()
        self._measure_at = 0.0
        self._active = True  # since the last measurement was asked for: a job was given or answered
        self._ours, theirs = self._pair()
        self._theirs = os.dup(theirs.fileno())
        theirs.close()
        words = {
            "--name": self.name,
            "--config": json.dumps(config),
            "--channel-fd": self._theirs,
            "--data-fd": data_fd,
            "--data-bytes": data_bytes,
            "--log-level": log_level,
            "--log-format": log_format,
        }
        argv = ["kvkeep.daemon.mover", *(str(word) for pair in words.items() for word in pair)]
        self.child = Child(self.name, argv, pass_fds=(self._theirs, data_fd, lease_fd), heartbeat_s=HEARTBEAT_S)

    @staticmethod
    def _pair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return ours, theirs

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.child.start()
        self.watch(self.child.fileno(), self.on_child)
        self.watch(self._ours.fileno(), self.receive)

    def stop(self, deadline: float) -> None:
        """The end: waits for the process, then closes the books."""
        self.child.stop(deadline)
        self._died()

    def close(self) -> None:
        self.unwatch(self._ours.fileno())
        self.unwatch(self.child.fileno())
        self._ours.close()
        os.close(self._theirs)
        self.child.close()

    def filenos(self) -> tuple[int, int]:
        return self.child.fileno(), self._ours.fileno()

    def on_child(self) -> None:
        pid = self.child.pid
        self.child.on_exit()
        if pid and self.child.pid != pid:
            self._died()

    def _died(self) -> None:
        """The process has been reaped: nothing writes for its open jobs any more."""
        while self.receive():
            pass
        self.phase = Phase.STARTING
        self.health.opening(time.monotonic())
        self.unwatch(self._ours.fileno())
        self._ours.close()
        self._ours, theirs = self._pair()
        os.dup2(theirs.fileno(), self._theirs, inheritable=False)
        theirs.close()
        self.watch(self._ours.fileno(), self.receive)
        self._outbox.clear()
        self._described.clear()
        if self._open:
            log.warning("%s died with %d jobs", self.name, len(self._open))
        for open_job in list(self._open.values()):
            self._close_job(open_job, [Code.LOST] * j.chunk_count(open_job.job))

    # ---- jobs --------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        return self.phase is Phase.SERVING and self.breaker.closed

    @property
    def coming(self) -> bool:
        """It serves, or may do so any moment."""
        return self.available or (self.phase is Phase.STARTING and not self.health.trouble)

    @property
    def open_jobs(self) -> int:
        return len(self._open)

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, job: j.AnyJob, done: Done, *, late: Callable[[], None] = _nothing, nbytes: int = 0) -> None:
        """``job.id`` is from `next_id`.  Only when `available` (or for a probe)."""
        now = time.monotonic()
        overdue = max(job.deadline, now + OVERDUE_LEAST_S)
        self._open[job.id] = OpenJob(job, done, late, nbytes, overdue)
        heapq.heappush(self._overdue, (overdue, job.id))
        if isinstance(job, j.Put):
            self.puts += 1
            self.putting += nbytes
        elif isinstance(job, j.Get):
            self.getting += nbytes
        self._active = True
        if isinstance(job, j.Put):
            self._describe(job.namespace)
        self._outbox.append(j.encode(job))
        self._flush()

    def _describe(self, namespace: bytes) -> None:
        """A serde has to know what the bytes are, the medium whose they are.  Who is not told, does without."""
        if namespace in self._described:
            return
        if len(self._described) >= MAX_DESCRIBED:
            self._described.clear()
        self._described.add(namespace)
        packet = j.encode(j.Describe(namespace, self.manifest_of(namespace)))
        if len(packet) <= j.MAX_PACKET:
            self._outbox.append(packet)

    def manage(self, what: What, done: Managed, *, namespace: bytes = b"", cursor: bytes = b"", limit: int = 0) -> None:
        """One step of management.  Asked whatever the breaker says; a late answer is as good as none."""
        if self.phase is not Phase.SERVING:
            done(None, f"{self.name} ({self.label}) is not open: {self.health.trouble or 'it is being started'}")
            return
        if sum(isinstance(o.job, j.Manage) for o in self._open.values()) >= MANAGE_JOBS:
            done(None, f"{self.name} ({self.label}) has {MANAGE_JOBS} steps of management to do already; try again")
            return
        job = j.Manage(self.next_id(), time.monotonic() + MANAGE_DEADLINE_S, what.value, namespace, cursor, limit)
        told = False

        def tell(step: Step | None, problem: str) -> None:
            nonlocal told
            if not told:
                told = True
                done(step, problem)

        def ended(codes: Sequence[int]) -> None:
            step, why = self._steps.pop(job.id, None), self._whys.pop(job.id, "")
            why = why or _WHY_NOT.get(Code(codes[0]), "its adapter failed, its log says how")
            tell(step, "" if step is not None else f"{self.name} ({self.label}) did not do it: {why}")

        def late() -> None:
            tell(None, f"{self.name} ({self.label}) did not answer within {MANAGE_DEADLINE_S:g} s")

        self.submit(job, ended, late=late)

    def is_storing(self, namespace: bytes, keys: Set[bytes] | None = None) -> bool:
        """A Put of this namespace (empty = of any), of one of these chunks (None = any), may still reach the medium."""
        return any(
            isinstance(o.job, j.Put) and namespace in (b"", o.job.namespace) and _touches(o.job.chunks, keys)
            for o in self._open.values()
        )

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._ours.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError:
                return  # it is gone; its end comes by the child
            self._outbox.popleft()

    def receive(self) -> bool:
        """Read what the mover said.  True = there may be more."""
        for _ in range(ROUND_PACKETS):
            try:
                packet = self._ours.recv(j.MAX_PACKET + 1)
            except (BlockingIOError, ConnectionError):
                self._flush()
                return False
            if not packet:
                return False
            try:
                message = j.decode_message(packet)
            except Exception:
                log.exception("%s: a message that is none", self.name)
                continue
            self._take(message)
        return True

    def _take(self, message: j.Message) -> None:
        if isinstance(message, j.Ready):
            self.type_name, self.figures.usage = message.type_name, message.usage
            self.phase = Phase.SERVING
            self.health.opened()
            self.child.proved()
            if self._renewed:
                self.breaker.probe_at_once(time.monotonic())
            else:
                self.breaker.reset()
            self._renewed = False
            log.info("%s (%s) serves: %d objects, %d bytes", self.name, self.label, *_of(message.usage))
            self.on_serving(self)
        elif isinstance(message, j.Failed):
            if self.health.trouble != message.reason:
                log.error("%s (%s) cannot be opened: %s", self.name, self.label, message.reason)
            self.health.trouble = message.reason
        else:
            self._answered(message)

    def _answered(self, answer: j.Answer) -> None:
        open_job = self._open.get(answer.id)
        if open_job is None:
            log.error("%s answered a job that it does not have: %d", self.name, answer.id)
            return
        job = open_job.job
        self._active |= not isinstance(job, j.Measure)
        self.figures.answered(answer)
        if answer.data:
            self._steps[job.id] = _steps.decode(answer.data)
        elif isinstance(job, j.Manage):
            self._whys[job.id] = answer.detail
        codes = answer.codes
        if len(codes) != j.chunk_count(job):
            log.error("%s: %d codes for %d chunks", self.name, len(codes), j.chunk_count(job))
            codes = bytes([Code.UNAVAILABLE]) * j.chunk_count(job)
        self._judge(job, codes, answer)
        self._close_job(open_job, list(codes))

    def _judge(self, job: j.AnyJob, codes: bytes, answer: j.Answer) -> None:
        """What the answer says about the medium."""
        if isinstance(job, j.Manage):
            return
        now, seen = time.monotonic(), set(codes)
        self.health.answered(job, seen, answer, now)
        if isinstance(job, j.Probe):
            self._probed(Code.OK in seen, now)
        elif seen and seen <= j.FAULTS:
            self._fault(job, now)
        elif not seen <= {Code.EXPIRED, Code.STOPPING}:
            self.breaker.success(type(job))

    def _fault(self, job: j.AnyJob, now: float) -> None:
        if self.breaker.failure(type(job), now):
            log.warning(
                "%s (%s): left alone after failures in a row, the last: %s", self.name, self.label, self.health.fault
            )

    def _probed(self, works: bool, now: float) -> None:
        was_closed = self.breaker.closed
        self.breaker.probed(works, now)
        failed = self.breaker.failed_probes
        if failed and failed % RENEW_PROBES == 0:
            log.warning("%s (%s): is opened anew", self.name, self.label)
            self._renewed = True
            self.child.renew()
        if self.breaker.closed and not was_closed:
            self.health.recovered()
            log.info("%s (%s) works again", self.name, self.label)
            if self.phase is Phase.SERVING:
                self.on_serving(self)

    def _close_job(self, open_job: OpenJob, codes: list[int]) -> None:
        job = open_job.job
        del self._open[job.id]
        if isinstance(job, j.Put):
            self.puts -= 1
            self.putting -= open_job.nbytes
        elif isinstance(job, j.Get):
            self.getting -= open_job.nbytes
        self.figures.ended(job, codes)
        open_job.done(codes)

    # ---- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """What is due.  Returns when the next thing is."""
        deadlines = [self._tick_child(now), self._tick_jobs(now), self._tick_breaker(now), self._tick_measure(now)]
        deadlines.append(self.health.next_end(now))
        if self._outbox:
            self._flush()
            deadlines.append(now + RESEND_S if self._outbox else None)
        return min((d for d in deadlines if d is not None), default=None)

    def _tick_child(self, now: float) -> float | None:
        deadline = self.child.next_deadline()
        if deadline is not None and now >= deadline:
            self.child.tick(now)
            deadline = self.child.next_deadline()
        return deadline

    def _tick_jobs(self, now: float) -> float | None:
        while self._overdue:
            due, job_id = self._overdue[0]
            open_job = self._open.get(job_id)
            if open_job is not None and due > now:
                return due
            heapq.heappop(self._overdue)
            if open_job is not None:
                self._late(open_job, now)
        return None

    def _late(self, open_job: OpenJob, now: float) -> None:
        open_job.is_late = True
        self.figures.totals["jobs_late"] += 1
        self.health.late(open_job.job, now)
        if isinstance(open_job.job, j.Probe):
            self.breaker.probed(False, now)
        elif not isinstance(open_job.job, j.Measure | j.Manage):
            self._fault(open_job.job, now)
        open_job.late()

    def _tick_breaker(self, now: float) -> float | None:
        if self.breaker.circuit is not Circuit.OPEN or self.phase is not Phase.SERVING:
            return None
        if now < self.breaker.probe_at:
            return self.breaker.probe_at
        if any(isinstance(o.job, j.Probe) for o in self._open.values()):
            return None  # the last one is still with it; its answer, or its end, will tell
        self.breaker.probing()
        self.submit(j.Probe(self.next_id(), now + PROBE_DEADLINE_S), lambda codes: None)
        return None

    def _tick_measure(self, now: float) -> float | None:
        if not self._active or not self.available:
            return None
        if now >= self._measure_at:
            self._measure_at = now + MEASURE_S
            self.submit(j.Measure(self.next_id(), now + PROBE_DEADLINE_S), lambda codes: None)
            self._active = False
            return None
        return self._measure_at

    # ---- what it looks like ------------------------------------------------------------------------------------------

    def reasons(self) -> list[str]:
        """Why health is degraded; empty when all is well."""
        return self.child.reasons() + self.health.reasons(time.monotonic())

    def row(self) -> dict[str, Any]:
        """For the status document."""
        return {
            "name": self.name,
            "label": self.label,
            "type": self.type_name,
            "phase": self.phase.value,
            "pid": self.child.pid,
            "restarts": self.child.restarts,
            "breaker": self.breaker.circuit.value,
            "breaker_opened": self.breaker.opened,
            "jobs": len(self._open),
            "bytes_storing": self.putting,
            "bytes_loading": self.getting,
            **self.figures.row(),
        }


_steps = msgspec.msgpack.Decoder(Step)


def _touches(chunks: bytes, keys: Set[bytes] | None) -> bool:
    return keys is None or any(chunks[at : at + 32] in keys for at in range(0, len(chunks), 32))


def _of(usage: j.Usage) -> tuple[int, int]:
    return usage.objects, usage.bytes_used
