"""The preflight: what is too small is one sentence within a second, and nothing was created."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.shm.hostcheck import ERROR, OK, WARN, Finding, Host, Need, already_reserved, check

GIB = 1 << 30
MIB = 1 << 20
_numbers = itertools.count()


def unique() -> str:
    return f"kvk-test-{os.getpid()}-{next(_numbers)}"


def need(gib: float = 4.0, **other: object) -> Need:
    return Need(name="x", data_bytes=int(gib * GIB), meta_bytes=16 * MIB, **other)  # type: ignore[arg-type]


class MadeUpHost:
    """A host laid out in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("dev/shm/.keep", "")
        self.write("proc/meminfo", "MemTotal: 99 kB\nMemAvailable:   104857600 kB\n")  # 100 GiB
        self.write("proc/self/status", "CapEff:\t0000000000000000\n")
        self.write("proc/self/cgroup", "0::/pod/me\n")
        self.write("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, folder: str, limit: str, usage: int, file: int = 0, shmem: int = 0) -> None:
        at = f"sys/fs/cgroup/{folder}".rstrip("/")
        self.write(f"{at}/memory.max", limit + "\n")
        self.write(f"{at}/memory.current", f"{usage}\n")
        self.write(f"{at}/memory.stat", f"anon 1\nfile {file}\nshmem {shmem}\n")

    def finding(self, about: str, wanted: Need) -> Finding:
        return next(f for f in check(wanted, Host(str(self.root))) if f.check == about)


@pytest.fixture
def host(tmp_path: Path) -> MadeUpHost:
    return MadeUpHost(tmp_path)


def test_a_host_without_limits_has_nothing_to_say(host):
    assert all(f.level == OK for f in check(need(0.01, max_clients=16), Host(str(host.root))))


def test_too_little_memory_is_refused_with_value_limit_and_fix(host):
    host.write("proc/meminfo", "MemAvailable: 2097152 kB\n")
    found = host.finding("memory", need(4))
    assert found.level == ERROR
    for part in ("2.00 GiB", "4.08 GiB", "--l1-size-gb to 1.9"):
        assert part in found.message


def test_the_tightest_level_of_the_cgroup_counts(host):
    host.v2("pod/me", "max", 0)
    host.v2("pod", str(3 * GIB), 1 * GIB)
    host.v2("", str(64 * GIB), 1 * GIB)
    found = host.finding("cgroup", need(4))
    assert found.level == ERROR
    for part in ("/sys/fs/cgroup/pod ", "3.00 GiB", "1.00 GiB", "memory.max", "--l1-size-gb to 1.9"):
        assert part in found.message
    assert host.finding("cgroup", need(1)).level == OK


def test_page_cache_of_the_cgroup_is_free_memory_and_shared_memory_is_not(host):
    host.v2("pod/me", str(8 * GIB), 7 * GIB, file=6 * GIB)
    assert host.finding("cgroup", need(4)).level == OK
    host.v2("pod/me", str(8 * GIB), 7 * GIB, file=6 * GIB, shmem=6 * GIB)
    assert host.finding("cgroup", need(4)).level == ERROR


def test_a_container_with_its_own_cgroup_namespace_is_read_at_the_mount(host):
    host.write("proc/self/cgroup", "0::/\n")
    host.v2("", str(2 * GIB), 1 * GIB)
    assert host.finding("cgroup", need(4)).level == ERROR


def test_a_container_on_cgroup_v1_is_read_below_the_root_of_its_mount(host):
    host.write("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n")
    host.write("proc/self/mountinfo", "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    host.write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    host.write("sys/fs/cgroup/memory/memory.usage_in_bytes", str(MIB))
    host.write("sys/fs/cgroup/memory/memory.stat", "total_cache 0\ntotal_shmem 0\n")
    found = host.finding("cgroup", need(4))
    assert found.level == ERROR
    assert "/sys/fs/cgroup/memory " in found.message
    host.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert host.finding("cgroup", need(4)).level == OK


def test_an_arena_that_will_be_adopted_counts_as_reserved_already(host):
    host.v2("pod/me", str(256 * MIB), 100 * MIB, shmem=100 * MIB)
    wanted = Need(name="x", data_bytes=128 * MIB, meta_bytes=16 * MIB)
    assert host.finding("cgroup", wanted).level == ERROR
    left = host.root / "dev/shm/kvkeep-x-data"
    with left.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 128 * MIB)
    assert already_reserved("x", Host(str(host.root))) >= 128 * MIB
    assert already_reserved("y", Host(str(host.root))) == 0
    assert host.finding("cgroup", wanted).level == OK


def test_a_low_memlock_limit_is_a_warning_that_names_the_limit_and_the_fix(host, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (MIB, MIB))
    found = host.finding("memlock", need(4, mlock=True))
    assert found.level == WARN
    for part in ("1.0 MiB", "4.02 GiB", "LimitMEMLOCK"):
        assert part in found.message
    host.write("proc/self/status", "CapEff:\t0000000000004000\n")
    assert host.finding("memlock", need(4, mlock=True)).level == OK


def test_few_open_files_and_a_file_size_limit_are_told(host, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert "about 224 clients" in host.finding("files", need(0.1, max_clients=4096)).message
    assert host.finding("file-size", need(0.1)).level == ERROR


def test_huge_pages_that_are_off_are_a_warning(host):
    host.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
    assert host.finding("hugepages", need(0.1, hugepages=True)).level == WARN
    host.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n")
    assert host.finding("hugepages", need(0.1, hugepages=True)).level == OK


def test_a_host_without_any_of_these_files_is_no_crash(tmp_path):
    found = {f.check: f.level for f in check(need(0.1, mlock=True, hugepages=True), Host(str(tmp_path)))}
    assert found["shm"] == ERROR
    assert found["memory"] == WARN
    assert found["cgroup"] == OK


def test_a_read_only_shared_memory_folder_is_told(host, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "not writable" in host.finding("shm", need(0.01)).message


# ---- for real ------------------------------------------------------------------------------------------------------

KVKEEPD = [sys.executable, "-m", "kvkeep.daemon.main"]
needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")


def environ() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}


@needs_root
def test_a_container_with_64_mib_of_shared_memory_is_refused_before_anything_is_created(tmp_path):
    """As `docker run --shm-size=64m`."""
    name = unique()
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 77; "$@"; status=$?; ls -A /dev/shm; exit $status'
    command = ["unshare", "-m", "sh", "-c", script, "sh", *KVKEEPD]
    argv = ["--name", name, "--run-dir", str(tmp_path / "run"), "--l1-size-gb", "1", "--log-format", "text"]
    began = time.monotonic()
    done = subprocess.run([*command, *argv], capture_output=True, text=True, env=environ(), timeout=60, check=False)
    print(f"refused after {time.monotonic() - began:.2f} s, start of the interpreter included")
    if done.returncode == 77:
        pytest.skip("cannot mount a tmpfs here")
    assert done.returncode == 3
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()
    (line,) = [line for line in done.stderr.splitlines() if "cannot start" in line]
    for part in ("/dev/shm has 64.0 MiB free", "the arena needs 1.01 GiB", "--shm-size", "--l1-size-gb to 0.06"):
        assert part in line


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A cgroup of our own with a limit, v1 or v2, that a child can be put into."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, file = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    folder = parent / unique()
    try:
        folder.mkdir()
        (folder / file).write_text(str(limit))
    except OSError as problem:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"cannot make a memory cgroup here: {problem}")
    try:
        yield folder
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)


@needs_root
def test_a_cgroup_limit_is_seen_before_the_kernel_kills(tmp_path):
    with memory_cgroup(256 * MIB) as folder:
        command = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *KVKEEPD]
        argv = ["--name", unique(), "--run-dir", str(tmp_path / "run"), "--l1-size-gb", "1", "--log-format", "json"]
        done = subprocess.run([*command, *argv], capture_output=True, text=True, env=environ(), timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert f"the cgroup {folder} allows 0.25 GiB" in done.stderr
    assert "--l1-size-gb to 0.1" in done.stderr
