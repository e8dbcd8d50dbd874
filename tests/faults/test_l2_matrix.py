"""What a medium can do wrong, case by case: it costs a miss or a counted failure, health says so, nobody waits longer
than asked, nothing wrong is returned, and when the medium works again so does L2, without a restart.

    store a chain ─► hurt the medium ─► L1 forgets ─► read: ``hits`` of it, in time ─► it is counted, health says so
    ─► mend the medium ─► a new chain is stored and read
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.daemon.l2_helpers import Make, adapter, at_rest, attach, chain, payload, read, register, row, store, stored
from tests.faults.l2_truth import raw_slots
from tests.ipc.conftest import eventually

MIB = 1 << 20
SIZE = 50_000
LENGTH = 10
WAIT_S = 0.6  # of the lookup that meets the fault
SLACK_S = 3.0


def fs(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "fs", "base_path": str(path / "fs"), "capacity_gb": 0.25, "fsync": "data", **more}


def raw(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "raw_block", "path": str(path / "raw"), "size_gb": 1 / 32, "durability": "data", **more}


def failing(operation: str, fault: str, until: int, **more: Any) -> Callable[[Path], dict[str, Any]]:
    """So many calls of it fail, retries and probes among them."""

    def config(path: Path) -> dict[str, Any]:
        rule = {"operation": operation, "fault": fault, "until": until, **more}
        return {"type": "fault_inject", "inner": fs(path), "faults": [rule], "seed": 1}

    return config


# ---- what is done to a medium at rest --------------------------------------------------------------------------------


def files(path: Path) -> list[Path]:
    return sorted((path / "fs" / "objects").glob("*/*"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 16]), at)


def flip_in_files(at: int) -> Callable[[Path], None]:
    """All that are so long: the catalogue's are short."""
    return lambda path: [flip(file, at) for file in files(path) if file.stat().st_size > at] and None


def flip_in_slots(payload: bool) -> Callable[[Path], None]:
    def hurt(path: Path) -> None:
        for slot in raw_slots(path / "raw"):
            flip(path / "raw", slot.payload + 1234 if payload else slot.header + 100)

    return hurt


def cut_files(to: int) -> Callable[[Path], None]:
    return lambda path: [os.truncate(file, to) for file in files(path)] and None


def remove_files(path: Path) -> None:
    for file in files(path):
        file.unlink()


def remove_folder(path: Path) -> None:
    shutil.rmtree(path / "fs")


def replace_files(path: Path) -> None:
    """Rubbish, a link, a folder, a fifo under our names; others beside them."""
    (path / "elsewhere").write_bytes(b"precious")
    for number, file in enumerate(files(path)):
        (file.parent / "README").write_bytes(b"not ours")
        size = file.stat().st_size
        file.unlink()
        if number % 4 == 0:
            file.write_bytes(os.urandom(size))
        elif number % 4 == 1:
            file.symlink_to(path / "elsewhere")
        elif number % 4 == 2:
            file.mkdir()
        else:
            os.mkfifo(file)


def take_them_away(path: Path) -> None:
    """The test's own rubbish; what was not ours is untouched until here."""
    assert (path / "elsewhere").read_bytes() == b"precious"
    assert all(file.read_bytes() == b"not ours" for file in (path / "fs" / "objects").glob("*/README"))
    for file in (path / "fs" / "objects").glob("*/*"):
        if file.is_dir():
            file.rmdir()
        elif not file.is_file() or file.is_symlink():
            file.unlink()


def cut_medium(path: Path) -> None:
    os.truncate(path / "raw", MIB)


def uncut_medium(path: Path) -> None:
    os.truncate(path / "raw", MIB * 1024 // 32)


def fill_disk(path: Path) -> None:
    """Until nothing more goes in."""
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(MIB))
        except OSError:
            pass


def fill_disk_almost(path: Path) -> None:
    """Five objects go in beside it."""
    fill_disk(path)
    os.truncate(path / "filler", (path / "filler").stat().st_size - 5 * 60_000)


def free_disk(path: Path) -> None:
    (path / "filler").unlink()


def nothing(path: Path) -> None:
    pass


class Case(NamedTuple):
    name: str
    config: Callable[[Path], dict[str, Any]]
    counted: str  # of the row in status: a failure, or a counter of the adapter
    says: str  # in health; "" = this says nothing against the medium
    hits: range = range(1)  # of the first chain, after it was hurt
    before: Callable[[Path], None] = nothing  # the daemon starts
    hurt: Callable[[Path], None] = nothing  # after the first chain was stored
    mend: Callable[[Path], None] = nothing
    fill: Callable[[Path], None] = nothing  # before the first chain is stored
    disk: bool = False  # a small file system of its own
    when: str = "load"  # health says so after this
    serves: bool = True  # ... from the start on
    long: bool = False


ANY = range(LENGTH + 1)
CASES = [
    Case("store EIO", failing("store", "EIO", 45), "io_error", "injected EIO", when="store"),
    Case("store EINVAL", failing("store", "EINVAL", 45), "io_error", "injected EINVAL", when="store"),
    Case("store ENOSPC", failing("store", "ENOSPC", 10), "no_space", "stores fail: injected ENOSPC", when="store"),
    Case("store short", failing("store", "short", 45), "io_error", "injected short", when="store"),
    Case("store fails at times", failing("store", "EIO", 60, every=2), "injected_EIO", "", ANY),
    Case("load EIO", failing("load", "EIO", 45), "io_error", "injected EIO"),
    Case("load EINVAL", failing("load", "EINVAL", 45), "io_error", "injected EINVAL"),
    Case("load short", failing("load", "short", 45), "io_error", "injected short"),
    Case("load stalls", failing("load", "stall", 4, seconds=2), "jobs_late", "no answer in time"),
    Case("lookup EIO", failing("lookup", "EIO", 10), "injected_EIO", ""),
    Case("lookup stalls", failing("lookup", "stall", 3, seconds=2), "jobs_late", "no answer in time", ANY),
    Case("open EIO", failing("open", "EIO", 1 << 40), "", "open fails with EIO", serves=False, mend=None),  # type: ignore[arg-type]
    Case("bit flip on the way in", failing("store", "bit_flip", 10), "corrupt", "did not verify"),
    Case("bit flip on the way out", failing("load", "bit_flip", 10), "corrupt", "injected bit flip"),
    Case("fs: bit flip in headers", fs, "corrupt", "did not verify", hurt=flip_in_files(100)),
    Case("fs: bit flip in payloads", fs, "corrupt", "did not verify", hurt=flip_in_files(9000)),
    Case("fs: truncated to pages", fs, "corrupt", "did not verify", hurt=cut_files(3 * 4096)),
    Case("fs: truncated to nothing", fs, "", "", hurt=cut_files(0)),
    Case("fs: vanished files", fs, "vanished", "", hurt=remove_files),
    Case("fs: foreign files", fs, "", "", hurt=replace_files, mend=take_them_away),
    Case("fs: vanished folder", fs, "io_error", "No such file", hurt=remove_folder),
    Case("raw_block: bit flip in headers", raw, "corrupt", "did not verify", hurt=flip_in_slots(False)),
    Case("raw_block: bit flip in payloads", raw, "corrupt", "did not verify", hurt=flip_in_slots(True)),
    Case("raw_block: truncated", raw, "unavailable", "was cut", ANY, hurt=cut_medium, mend=uncut_medium),
    Case("fs: disk full", fs, "no_space", "stores fail", fill=fill_disk, mend=free_disk, disk=True, when="store"),
    Case("fs: disk fills", fs, "evicted_for_full_disk", "", ANY, fill=fill_disk_almost, mend=free_disk, disk=True),
    Case("raw_block: no room for it", raw, "", "cannot get its", before=fill_disk, mend=free_disk, disk=True,
         serves=False),
    Case("store stalls for long", failing("store", "stall", 1, seconds=40), "jobs_late", "no answer in time",
         ANY, when="store", long=True),
    Case("load stalls for long", failing("load", "stall", 1, seconds=30), "jobs_late", "no answer in time", long=True),
    Case("lookup stalls for long", failing("lookup", "stall", 1, seconds=30), "jobs_late", "no answer in time",
         ANY, long=True),
]  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=40m,mode=0700"]
    done = subprocess.run(["mount", *options, "kvkeep-test", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def reasons(daemon: Daemon) -> str:
    """As an operator gets them; "" = all is well."""
    command = [sys.executable, "-m", "kvkeep.daemon.cli", "--run-dir", str(daemon.run_dir), "status", "--json"]
    document = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
    assert (document["health"] == "ok") == (document["reasons"] == []), document
    return "; ".join(document["reasons"])


def counted(kv: Client, what: str) -> int:
    found = row(kv)
    return int(found["failures"].get(what) or found["adapter"].get(what) or found.get(what) or 0)


def settled(kv: Client, count: int) -> None:
    """So many chunks were stored or refused, and no job is left (unless it hangs)."""

    def done() -> bool:
        document = kv.stats()
        about = document["l2"][0]
        return about["jobs_late"] or about["chunks_stored"] + document["counters"]["l2_store_failures"] >= count

    eventually(done, 60)


def endure(daemon: Daemon, path: Path, case: Case, *, patient: bool) -> None:
    """``daemon`` is not started yet.  ``patient``: wait until health is well again, too."""
    case.before(path)
    daemon.flags.append(adapter(**case.config(path)))
    daemon.start()
    with attach(daemon, serving=case.serves) as kv:
        ns, first = register(kv, SIZE), chain(1, LENGTH)
        case.fill(path)
        assert store(kv, ns, first, SIZE) == LENGTH, "L1 does not care"
        if case.serves:
            settled(kv, LENGTH)
        if case.says and (case.when == "store" or not case.serves):
            eventually(lambda: case.says in reasons(daemon), 60)
        case.hurt(path)
        kv.delete(ns, first, l1_only=True)
        began = time.monotonic()
        assert read(kv, ns, first, wait_s=WAIT_S, size=SIZE) in (case.hits if case.when == "load" else ANY)
        assert time.monotonic() - began < WAIT_S + SLACK_S
        if case.hurt is remove_folder:
            store(kv, ns, chain(2, LENGTH), SIZE)
        if case.counted:
            eventually(lambda: counted(kv, case.counted) > 0, 20)
        if case.says and case.when == "load" and case.serves:
            eventually(lambda: case.says in reasons(daemon), 10)
        if case.mend is None:
            return
        case.mend(path)
        works(kv, case)
        if patient or not case.says:
            eventually(lambda: kv.stats()["health"] == "ok", 60)
            assert reasons(daemon) == ""
        at_rest(kv)


def works(kv: Client, case: Case) -> None:
    """New chains go into L2 and come out of it again; what it had been refused while it failed is in it, too."""
    eventually(lambda: row(kv)["phase"] == "serving" and row(kv)["breaker"] == "closed", 90)
    ns = register(kv, SIZE)

    def whole(keys: list[bytes]) -> bool:
        before = row(kv)["chunks_stored"]
        kv.store(ns, keys, [payload(key, SIZE) for key in keys])
        until = time.monotonic() + 3
        while row(kv)["chunks_stored"] < before + LENGTH:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        kv.delete(ns, keys, l1_only=True)
        return read(kv, ns, keys, size=SIZE) == LENGTH

    numbers = iter(range(100, 200))
    eventually(lambda: whole(chain(next(numbers), LENGTH)), 90)


def _named(case: Case) -> str:
    return case.name.replace(": ", "-").replace(" ", "_")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.soak] * c.long) for c in CASES], ids=_named)
def test_what_a_medium_does_wrong_costs_a_miss_or_a_counted_failure(
    make_daemon: Make, tmp_path: Path, request: pytest.FixtureRequest, case: Case
) -> None:
    path = request.getfixturevalue("small_disk") if case.disk else tmp_path
    endure(make_daemon(start=False), path, case, patient=case.long)


def test_a_buffer_is_emptied_after_the_medium_refused_something(make_daemon: Make, tmp_path: Path) -> None:
    """Where L1 only buffers nothing else makes room: what was refused once is given again."""
    config = failing("store", "ENOSPC", 14, every=3)(tmp_path)
    daemon = make_daemon(adapter(**config), "--l2-store-policy=skip_l1", "--eviction-policy=noop", l1_mib=16)
    with attach(daemon) as kv:
        ns = register(kv, SIZE)
        for number in range(4):
            assert store(kv, ns, chain(number, LENGTH), SIZE) == LENGTH
        eventually(lambda: kv.stats()["l1"]["entries"] == 0, 60)
        assert sum(read(kv, ns, chain(number, LENGTH), size=SIZE) for number in range(4)) == 4 * LENGTH
        at_rest(kv)


def test_a_buffer_does_not_keep_what_can_never_be_stored(make_daemon: Make, tmp_path: Path) -> None:
    limit, size = 120_000, 150_000
    config = {"type": "fs", "base_path": str(tmp_path), "capacity_gb": limit / (1 << 30)}
    daemon = make_daemon(adapter(**config), "--l2-store-policy=skip_l1", "--eviction-policy=noop", l1_mib=16)
    with attach(daemon) as kv:
        ns = register(kv, size)
        assert store(kv, ns, chain(1, LENGTH), size) == LENGTH
        eventually(lambda: row(kv)["failures"].get("too_large") == LENGTH)
        eventually(lambda: kv.stats()["l1"]["entries"] == 0)
        at_rest(kv)


def test_what_a_full_disk_refused_is_stored_when_there_is_room(make_daemon: Make, small_disk: Path) -> None:
    daemon = make_daemon(adapter(**fs(small_disk)))
    with attach(daemon) as kv:
        fill_disk(small_disk)
        ns, keys = register(kv, SIZE), chain(1, LENGTH)
        store(kv, ns, keys, SIZE)
        eventually(lambda: row(kv)["failures"].get("no_space", 0) >= LENGTH)
        free_disk(small_disk)
        stored(kv, LENGTH, deadline_s=40)
        eventually(lambda: kv.stats()["health"] == "ok", 30)
        kv.delete(ns, keys, l1_only=True)
        assert read(kv, ns, keys, size=SIZE) == LENGTH
        at_rest(kv)
