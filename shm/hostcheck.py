"""Preflight: will this host carry the arena?  Answered before anything is created, in milliseconds.

    Findings = check(Need, Host)      each finding is ok, a warning (it works, but), or an error (refuse to start)

Looks at /dev/shm, memory, the cgroup's limit at every level (v1 and v2), locked memory, huge pages, file descriptors
and file size.  A too small limit found here is one sentence; found later it is a SIGBUS or an OOM kill.

What an earlier daemon of the same name left in /dev/shm counts as reserved already: it is adopted, or dropped first.
Page cache counts as free memory of a cgroup (the kernel reclaims it before it kills), shared memory does not.

All paths are below `Host.root`, so that a test can lay out a host of its own.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

OK, WARN, ERROR = "ok", "warn", "error"

OVERHEAD_BYTES = 64 << 20  # the control process and its children beside the arena
FILES_PER_CLIENT = 4  # attach connection, RPC connection, eventfd, one in passing
FILES_OF_OUR_OWN = 128
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a huge number
_CAP_IPC_LOCK = 14
_GIB = 1 << 30


class Finding(NamedTuple):
    level: str  # OK | WARN | ERROR
    check: str  # "shm", "memory", "cgroup", ...
    message: str  # one sentence: value, limit, fix


@dataclass(frozen=True)
class Need:
    """What the daemon is about to ask of the host."""

    name: str
    data_bytes: int
    meta_bytes: int
    mlock: bool = False
    hugepages: bool = False
    max_clients: int = 4096

    @property
    def total(self) -> int:
        return self.data_bytes + self.meta_bytes


@dataclass(frozen=True)
class Host:
    root: str = "/"

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *(part.lstrip("/") for part in parts))

    def read(self, *parts: str) -> str | None:
        try:
            with open(self.path(*parts), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return None


def check(need: Need, host: Host | None = None) -> list[Finding]:
    """All findings, in the order in which an operator would look.  Never raises for what the host lacks."""
    host = host or Host()
    held = already_reserved(need.name, host)
    return [
        *_shm(need, held, host),
        *_memory(need, held, host),
        *_cgroup(need, held, host),
        *_memlock(need, host),
        *_hugepages(need, host),
        *_files(need),
        *_file_size(need),
    ]


def already_reserved(name: str, host: Host | None = None) -> int:
    """Bytes of shared memory that an earlier daemon called ``name`` left behind."""
    host = host or Host()
    total = 0
    for part in ("meta", "data"):
        try:
            total += os.stat(host.path("dev/shm", f"kvkeep-{name}-{part}")).st_blocks * 512
        except OSError:
            continue
    return total


def raise_file_limit() -> int:
    """Lift the soft limit on open files to the hard one; returns what is in force now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS-like oddities; the soft limit stays
            return soft
    return hard


def gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB // 10 else f"{count / (1 << 20):.1f} MiB"


def _fix(room: int, need: Need) -> str:
    """The largest --l1-size-gb whose arena, metadata included, fits into ``room`` bytes, rounded down."""
    hundredths = max(0, room) * need.data_bytes // max(1, need.total) * 100 // _GIB
    return f"lower --l1-size-gb to {hundredths / 100:.2f}" if hundredths > 0 else "make room"


# ---- the looks -----------------------------------------------------------------------------------------------------


def _shm(need: Need, held: int, host: Host) -> Iterator[Finding]:
    path = host.path("dev/shm")
    try:
        stat = os.statvfs(path)
    except OSError as problem:
        yield Finding(ERROR, "shm", f"{path} cannot be used ({problem.strerror}): mount a tmpfs there")
        return
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding(ERROR, "shm", f"{path} is not writable for uid {os.geteuid()}: mount it read-write, mode 1777")
        return
    free = stat.f_bavail * stat.f_frsize
    size = stat.f_blocks * stat.f_frsize
    if size and free + held < need.total:  # size 0 = a tmpfs without a limit
        yield Finding(
            ERROR,
            "shm",
            f"{path} has {gib(free + held)} free of {gib(size)}, the arena needs {gib(need.total)}: enlarge it "
            f"(mount -o remount,size=…, docker --shm-size, a memory emptyDir) or "
            f"{_fix(free + held, need)}",
        )
        return
    kept = f", {gib(held)} of that in the arena of this name already" if held else ""
    yield Finding(OK, "shm", f"{path} has room: {gib(free + held)} for {gib(need.total)}{kept}")


def _memory(need: Need, held: int, host: Host) -> Iterator[Finding]:
    missing = max(0, need.total - held)
    available = _meminfo(host).get("MemAvailable")
    if available is None:
        yield Finding(WARN, "memory", f"{host.path('proc/meminfo')} does not tell MemAvailable: memory is not checked")
    elif available < missing + OVERHEAD_BYTES:
        yield Finding(
            ERROR,
            "memory",
            f"the host has {gib(available)} of memory available, the daemon needs another "
            f"{gib(missing + OVERHEAD_BYTES)}: free some, or {_fix(available + held - OVERHEAD_BYTES, need)}",
        )
    else:
        yield Finding(OK, "memory", f"the host has {gib(available)} available for {gib(missing + OVERHEAD_BYTES)}")


def _cgroup(need: Need, held: int, host: Host) -> Iterator[Finding]:
    missing = max(0, need.total - held)
    tightest: tuple[int, str, int, int] | None = None
    for folder, limit, usage in _cgroup_levels(host):
        room = limit - usage
        if tightest is None or room < tightest[0]:
            tightest = (room, folder, limit, usage)
    if tightest is None:
        yield Finding(OK, "cgroup", "no cgroup limits this process's memory")
        return
    room, folder, limit, usage = tightest
    if room < missing + OVERHEAD_BYTES:
        yield Finding(
            ERROR,
            "cgroup",
            f"the cgroup {folder} allows {gib(limit)} of memory and {gib(usage)} is in use, the daemon needs "
            f"another {gib(missing + OVERHEAD_BYTES)}: raise the limit (memory.max, docker --memory, the pod's memory "
            f"limit), or {_fix(room + held - OVERHEAD_BYTES, need)}",
        )
    else:
        yield Finding(OK, "cgroup", f"the cgroup {folder} has {gib(room)} left for {gib(missing + OVERHEAD_BYTES)}")


def _memlock(need: Need, host: Host) -> Iterator[Finding]:
    if not need.mlock:
        return
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if _has_capability(_CAP_IPC_LOCK, host) or hard == resource.RLIM_INFINITY or hard >= need.total:
        yield Finding(OK, "memlock", f"{gib(need.total)} can be locked in memory")
        return
    yield Finding(
        WARN,
        "memlock",
        f"RLIMIT_MEMLOCK is {gib(hard)}, --l1-mlock needs {gib(need.total)}: the arena stays unlocked; set "
        "LimitMEMLOCK=infinity (systemd), ulimit -l unlimited, or add CAP_IPC_LOCK",
    )


def _hugepages(need: Need, host: Host) -> Iterator[Finding]:
    if not need.hugepages:
        return
    path = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = host.read(path)
    chosen = text[text.find("[") + 1 : text.find("]")] if text and "[" in text else ""
    if chosen in ("always", "within_size", "advise", "force"):
        yield Finding(OK, "hugepages", f"huge pages for shared memory are {chosen!r}")
        return
    yield Finding(
        WARN,
        "hugepages",
        f"{host.path(path)} says {chosen or 'nothing'!r}, --l1-use-hugepages needs 'advise': the arena uses 4 KiB "
        "pages; echo advise into that file",
    )


def _files(need: Need) -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = need.max_clients * FILES_PER_CLIENT + FILES_OF_OUR_OWN
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        yield Finding(OK, "files", f"{wanted} files can be open at once")
        return
    clients = max(0, hard - FILES_OF_OUR_OWN) // FILES_PER_CLIENT
    yield Finding(
        WARN,
        "files",
        f"RLIMIT_NOFILE allows {hard} open files, --max-clients {need.max_clients} may need {wanted}: about {clients} "
        "clients can attach; set LimitNOFILE (systemd) or ulimit -n, or lower --max-clients",
    )


def _file_size(need: Need) -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if hard != resource.RLIM_INFINITY and hard < max(need.data_bytes, need.meta_bytes):
        yield Finding(
            ERROR,
            "file-size",
            f"RLIMIT_FSIZE is {gib(hard)}, the arena's segment has {gib(need.data_bytes)}: set ulimit -f unlimited",
        )


# ---- reading the host ----------------------------------------------------------------------------------------------


def _meminfo(host: Host) -> dict[str, int]:
    values: dict[str, int] = {}
    for line in (host.read("proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[key] = int(words[0]) * 1024
    return values


def _has_capability(bit: int, host: Host) -> bool:
    for line in (host.read("proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def _cgroup_levels(host: Host) -> Iterator[tuple[str, int, int]]:
    """(folder, limit, bytes in use that cannot be reclaimed) of each level above this process that has a limit."""
    memberships = _memberships(host)
    for mount_point, mount_root, v2 in _cgroup_mounts(host):
        path = memberships.get("" if v2 else "memory")
        if path is None:
            continue
        # The mount shows the hierarchy from `mount_root` down: what lies above it belongs to somebody else.
        inside = os.path.relpath(path, mount_root) if path.startswith(mount_root) else "."
        folder = "" if inside.startswith("..") or inside == "." else inside
        read = _v2_level if v2 else _v1_level
        while True:
            level = read(host, os.path.join(mount_point, folder))
            if level is not None:
                yield os.path.join(mount_point, folder).rstrip("/"), *level
            if not folder:
                break
            folder = os.path.dirname(folder)


def _memberships(host: Host) -> dict[str, str]:
    """Controller -> path of this process; "" is the v2 hierarchy."""
    found: dict[str, str] = {}
    for line in (host.read("proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                found[controller] = parts[2]
    return found


def _cgroup_mounts(host: Host) -> Iterator[tuple[str, str, bool]]:
    """(mount point, root of the hierarchy seen there, whether it is v2) of memory controllers."""
    for line in (host.read("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield fields[4], fields[3], True
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield fields[4], fields[3], False


def _v2_level(host: Host, folder: str) -> tuple[int, int] | None:
    return _level(host, folder, "memory.max", "memory.current", "file", "shmem")


def _v1_level(host: Host, folder: str) -> tuple[int, int] | None:
    return _level(host, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")


def _level(host: Host, folder: str, limit_file: str, usage_file: str, cache: str, shmem: str) -> tuple[int, int] | None:
    limit = (host.read(folder, limit_file) or "").strip()
    usage = (host.read(folder, usage_file) or "").strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return None
    stat: dict[str, int] = {}
    for line in (host.read(folder, "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if value.isdigit():
            stat[key] = int(value)
    reclaimable = max(0, stat.get(cache, 0) - stat.get(shmem, 0))
    return int(limit), max(0, int(usage) - reclaimable)
