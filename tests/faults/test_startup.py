"""Starting: on hosts that cannot, beside others, after a kill at any instant, and for clients of other users.

B12 B15 C1 C3 C6 C9 L1 L2 L3 of the cases.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvkeep.ipc.attach import AttachRefused
from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.faults.account import assert_at_rest
from tests.faults.fuzz import drop_rights
from tests.faults.oracle import MANIFEST, chain, contents, read
from tests.faults.processes import Worker, eventually
from tests.faults.raw import Raw

SIZE = 16384
SHM = Path("/dev/shm")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="changes users or mounts")
_unshare = shutil.which("unshare")
own_mounts = pytest.mark.skipif(
    os.getuid() != 0
    or _unshare is None
    or subprocess.run([_unshare, "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="cannot make a mount namespace",
)


def command(name: str, run_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "kvkeep.daemon.main", "--name", name, "--run-dir", str(run_dir), *flags]


def segments(name: str) -> list[Path]:
    return sorted(SHM.glob(f"kvkeep-{name}-*"))


def store_and_load(kv: Client, name: object = "startup", count: int = 10) -> None:
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    packed = chain(name, count)
    result = kv.store(ns, packed, contents(packed, SIZE), deadline_s=20)
    assert result.stored + result.present == count
    with kv.lookup(ns, packed, deadline_s=20) as found:
        assert read(kv, ns, packed, found) == (count, [])


# ---- one at a time -------------------------------------------------------------------------------------------------


def test_a_second_daemon_of_the_same_name_is_refused_in_one_sentence_until_the_first_is_killed(
    daemon: Daemon, tmp_path: Path
) -> None:
    inodes = [p.stat().st_ino for p in segments(daemon.name)]
    for run_dir in (daemon.run_dir, tmp_path / "elsewhere"):  # the folder's lock, and the arena's
        second = subprocess.run(
            command(daemon.name, run_dir, "--l1-size-gb", "0.0625", "--log-format", "text"),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert second.returncode == 4
        complaints = [line for line in second.stderr.splitlines() if "error" in line.lower()]
        assert len(complaints) == 1, second.stderr
        assert "another kvkeepd" in complaints[0]
        assert "--name" in complaints[0]
    with Client.attach(daemon.run_dir) as kv:
        store_and_load(kv)
        assert [p.stat().st_ino for p in segments(daemon.name)] == inodes
        daemon.kill()
        daemon.start()
        eventually(lambda: kv.attached)
        store_and_load(kv)


def test_two_daemons_of_different_names_work_side_by_side(make_daemon: Callable[..., Daemon]) -> None:
    one, two = make_daemon(l1_mib=16), make_daemon(l1_mib=16)
    with Client.attach(one.run_dir) as first, Client.attach(two.run_dir) as second:
        store_and_load(first)
        ns = second.register(MANIFEST, shard_bytes=SIZE)
        assert second.lookup(ns, chain("startup", 10)).ready == 0
        one.kill()
        store_and_load(second)
        one.start()
        eventually(lambda: first.attached)
        assert first.lookup(first.register(MANIFEST, shard_bytes=SIZE), chain("startup", 10)).ready == 10


def test_forget_drops_the_arena_and_nothing_else_does(daemon: Daemon) -> None:
    with Client.attach(daemon.run_dir) as kv:
        store_and_load(kv)
        ns, packed = kv.register(MANIFEST, shard_bytes=SIZE), chain("startup", 10)
        for stop in (daemon.kill, daemon.stop):
            stop()
            daemon.start()
            eventually(lambda: kv.attached)
            assert kv.lookup(ns, packed).ready == 10
        daemon.stop()
        daemon.start("--forget")
        eventually(lambda: kv.attached)
        assert kv.lookup(ns, packed).ready == 0
        assert_at_rest(daemon, kv)
    assert "--forget was given" in daemon.output()


def test_another_size_drops_the_arena_with_one_line_that_says_why(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(l1_mib=16)
    with Client.attach(daemon.run_dir) as kv:
        store_and_load(kv)
        daemon.kill()
        daemon.flags[0] = "--l1-size-gb=0.03125"
        daemon.start()
        eventually(lambda: kv.attached)
        assert kv.lookup(kv.register(MANIFEST, shard_bytes=SIZE), chain("startup", 10)).ready == 0
        store_and_load(kv)
    assert daemon.output().count("was dropped: its size was") == 1


def test_damage_to_the_superblock_drops_the_arena_and_damage_to_an_entry_only_that_entry(daemon: Daemon) -> None:
    from kvkeep.shm import layout

    with Client.attach(daemon.run_dir) as kv:
        store_and_load(kv)
        ns, packed = kv.register(MANIFEST, shard_bytes=SIZE), chain("startup", 10)
        daemon.kill()
        meta = np.memmap(SHM / f"kvkeep-{daemon.name}-meta", np.uint8, "r+")
        entries = meta[layout.ENTRY_OFFSET :][: 10 * layout.ENTRY_BYTES].view(layout.ENTRY)
        assert (entries["state"] == layout.State.SEALED).all()
        which = next(i for i in range(10) if entries["key"][i].tobytes() == packed[7 * 32 : 8 * 32])
        entries["offset"][which] ^= 4096
        daemon.start()
        eventually(lambda: kv.attached)
        with kv.lookup(ns, packed) as found:
            assert read(kv, ns, packed, found) == (7, [])
        daemon.kill()
        meta[16] ^= 1
        daemon.start()
        eventually(lambda: kv.attached)
        assert kv.lookup(ns, packed).ready == 0
        store_and_load(kv)
        assert_at_rest(daemon, kv)
    assert "superblock does not verify" in daemon.output()


# ---- killed while starting -----------------------------------------------------------------------------------------


def killed_while_starting(daemon: Daemon, rng: random.Random, times: int) -> None:
    def listing() -> set[str]:
        return {p.name for p in SHM.iterdir() if daemon.name in p.name}

    for turn in range(times):
        fresh = ["--forget"] if rng.random() < 0.5 else []
        daemon.start(*fresh, wait=False)
        time.sleep(rng.uniform(0.0, 0.6))
        daemon.kill()
        assert listing() <= {f"kvkeep-{daemon.name}-meta", f"kvkeep-{daemon.name}-data"}
        daemon._seen = daemon.output().count(" is ready: epoch ")  # type: ignore[attr-defined]
        if turn % 3 == 2:
            daemon.start()
            with Client.attach(daemon.run_dir, deadline_s=20) as kv:
                store_and_load(kv, turn)
                assert_at_rest(daemon, kv)
            (daemon.kill if turn % 2 else daemon.stop)()
    daemon.start()
    assert len(segments(daemon.name)) == 2
    assert sorted(p.name for p in daemon.run_dir.iterdir()) == ["attach.sock", "lock", "rpc.sock"]
    daemon.stop()


def test_a_start_killed_at_thirty_random_instants_never_poisons_the_next(
    make_daemon: Callable[..., Daemon], seed: int
) -> None:
    killed_while_starting(make_daemon(l1_mib=256, start=False), random.Random(seed), 30)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_start_killed_at_three_hundred_random_instants(make_daemon: Callable[..., Daemon], seed: int) -> None:
    killed_while_starting(make_daemon(l1_mib=256, start=False), random.Random(seed), 300)


def test_clients_attach_and_work_before_all_memory_is_reserved(make_daemon: Callable[..., Daemon]) -> None:
    free = shutil.disk_usage(SHM).free >> 20
    size = min(2048, free // 4)
    daemon = make_daemon(l1_mib=size, start=False)
    daemon.start()
    with Client.attach(daemon.run_dir, deadline_s=20) as kv:
        ready = kv.stats()["l1"]["bytes_ready"]
        store_and_load(kv)
        print(f"{ready >> 20} of {size} MiB were ready when the first client was")
        eventually(lambda: kv.stats()["l1"]["bytes_ready"] == kv.stats()["l1"]["bytes_total"], 60)
        store_and_load(kv, "later")
        assert_at_rest(daemon, kv)


# ---- hosts that cannot ---------------------------------------------------------------------------------------------


@own_mounts
@pytest.mark.parametrize("mib", [1, 64])
def test_a_dev_shm_that_is_too_small_is_one_sentence_and_leaves_nothing(tmp_path: Path, mib: int) -> None:
    """C3: docker's default of 64 MiB."""
    name = unique_name()
    script = f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && "$@"; code=$?; ls /dev/shm | sed s/^/LEFT:/; exit $code'
    began = time.monotonic()
    result = subprocess.run(
        [str(_unshare), "-m", "sh", "-c", script, "sh",
         *command(name, tmp_path / "run", "--l1-size-gb", "1", "--log-format", "text")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    print(f"refused after {time.monotonic() - began:.2f} s: {result.stderr}")
    assert result.returncode == 3
    assert "LEFT:" not in result.stdout
    complaints = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    assert len(complaints) == 1, result.stderr
    for word in ("/dev/shm", f"of {mib}.0 MiB", "GiB", "--shm-size", "--l1-size-gb" if mib > 8 else "make room"):
        assert word in complaints[0]
    assert not (tmp_path / "run" / "attach.sock").exists()


@own_mounts
def test_memory_that_vanishes_after_the_preflight_is_degraded_in_words_and_no_crash(tmp_path: Path) -> None:
    """Somebody else fills /dev/shm while the arena is being reserved: what is ready serves on."""
    name = unique_name()
    script = (
        "mount -t tmpfs -o size=2000m tmpfs /dev/shm && "
        '"$@" & pid=$!; '
        f"until [ -S {tmp_path}/run/attach.sock ]; do sleep 0.01; done; "
        "head -c 1900000000 /dev/zero > /dev/shm/other 2>/dev/null; sleep 1; "
        f"{sys.executable} -c '"
        "from kvkeep.ipc.client import Client; "
        f's = Client.attach("{tmp_path}/run", deadline_s=20).stats(); '
        'print(s["health"], s["l1"]["bytes_ready"] < s["l1"]["bytes_total"], s["reasons"])'
        "'; kill $pid; wait $pid; echo code $?"
    )
    result = subprocess.run(
        [str(_unshare), "-m", "sh", "-c", script, "sh",
         *command(name, tmp_path / "run", "--l1-size-gb", "1.8", "--log-format", "text")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    print(result.stdout, result.stderr)
    assert "code 0" in result.stdout
    if "could be reserved" in result.stderr:  # else the daemon was faster
        assert "degraded True" in result.stdout
    assert "Traceback" not in result.stderr


# ---- rights --------------------------------------------------------------------------------------------------------


def test_sockets_and_folder_have_the_documented_modes(make_daemon: Callable[..., Daemon]) -> None:
    for flags, expected in (((), 0o660), (("--socket-mode", "0600"), 0o600), (("--socket-mode", "0666"), 0o666)):
        daemon = make_daemon(*flags, l1_mib=8)
        for socket in ("attach.sock", "rpc.sock"):
            mode = (daemon.run_dir / socket).stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == expected, (socket, flags)
        assert stat.S_IMODE(daemon.run_dir.stat().st_mode) == 0o755
        assert stat.S_IMODE((daemon.run_dir / "lock").stat().st_mode) == 0o600
        for segment in segments(daemon.name):
            assert stat.S_IMODE(segment.stat().st_mode) == 0o600, "nobody but the daemon opens by name"


def as_nobody(link: Connection, run_dir: str) -> None:
    drop_rights()
    try:
        kv = Client.attach(run_dir, deadline_s=5)
    except AttachRefused as no:
        link.send(("refused", no.code, str(no)))
        return
    except Exception as error:
        link.send(("unavailable", type(error).__name__, str(error)))
        return
    with kv:
        store_and_load(kv, "nobody")
        problems = []
        for what, call in (("clear", kv.clear), ("check", kv.check)):
            try:
                call()
            except Exception as error:
                problems.append((what, type(error).__name__))
        link.send(("attached", os.getuid(), problems))
        link.recv()


@as_root
def test_a_client_of_another_user_shares_bytes_with_root_where_the_socket_lets_it_in(
    make_daemon: Callable[..., Daemon],
) -> None:
    """L2: 0600 segments, and yet nobody maps them: by descriptor."""
    daemon = make_daemon("--socket-mode", "0666", l1_mib=16, start=False)
    daemon.run_dir.parent.chmod(0o755)
    daemon.start()
    with Client.attach(daemon.run_dir) as kv:
        w = Worker(as_nobody, str(daemon.run_dir))
        assert w.expect() == ("attached", 65534, [("clear", "Denied"), ("check", "Denied")])
        ns, packed = kv.register(MANIFEST, shard_bytes=SIZE), chain("nobody", 10)
        with kv.lookup(ns, packed) as found:
            assert read(kv, ns, packed, found) == (10, [])
        assert 65534 in [c["uid"] for c in kv.stats()["clients"]]
        daemon.restart()
        eventually(lambda: kv.attached and kv.stats()["clients_total"] == 2, 15)
        w.end()
        assert_at_rest(daemon, kv)


@as_root
def test_a_user_that_the_socket_or_the_list_does_not_let_in_gets_one_sentence(
    make_daemon: Callable[..., Daemon],
) -> None:
    closed = make_daemon(l1_mib=8, start=False)
    closed.run_dir.parent.chmod(0o755)
    closed.start()
    w = Worker(as_nobody, str(closed.run_dir))
    kind, _, sentence = w.expect()
    assert kind == "unavailable"
    assert "Permission denied" in sentence
    w.end()
    listed = make_daemon("--socket-mode", "0666", "--allow-uids", "1234", l1_mib=8)
    w = Worker(as_nobody, str(listed.run_dir))
    kind, code, sentence = w.expect()
    assert (kind, code) == ("refused", "denied")
    assert "uid 65534" in sentence
    assert "--allow-uids" in sentence
    w.end()
    with Client.attach(listed.run_dir) as kv:  # root, whose daemon it is
        store_and_load(kv)
    assert listed.output().count("uid 65534") == 1


@own_mounts
def test_a_client_with_a_dev_shm_of_its_own_works_by_descriptors_alone(daemon: Daemon) -> None:
    """L1 L3 C6: no common /dev/shm, no common IPC, UTS or PID namespace."""
    code = (
        "import os, sys; from kvkeep.ipc.client import Client; "
        "from tests.faults.test_startup import store_and_load; "
        "assert os.listdir('/dev/shm') == [], os.listdir('/dev/shm'); "
        "kv = Client.attach(sys.argv[1], deadline_s=20); store_and_load(kv, sys.argv[2]); "
        "assert os.listdir('/dev/shm') == []; print('pid', os.getpid(), kv.epoch)"
    )
    run = [str(_unshare), "-m", "-i", "-u", "-p", "--fork", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"']
    twins = [
        subprocess.Popen(
            [*run, "sh", sys.executable, "-c", code, str(daemon.run_dir), twin],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for twin in ("one", "two")
    ]  # fmt: skip
    outputs = [twin.communicate(timeout=60)[0] for twin in twins]
    assert [twin.returncode for twin in twins] == [0, 0]
    assert all(output.startswith("pid 1 ") for output in outputs)  # B12: both are pid 1 in their world
    with Client.attach(daemon.run_dir) as kv:
        assert kv.lookup(kv.register(MANIFEST, shard_bytes=SIZE), chain("one", 10)).ready == 10
        assert_at_rest(daemon, kv)


# ---- clients that come and go, clients that do damage ---------------------------------------------------------------


def visitor(link: Connection, run_dir: str, crash: int) -> None:
    kv = Client.attach(run_dir, deadline_s=20)
    ns = kv.register(MANIFEST, shard_bytes=SIZE)
    found = kv.lookup(ns, chain("startup", 10))
    link.send(found.ready)
    if crash:
        os.kill(os.getpid(), crash)


def test_two_hundred_clients_that_come_and_go_or_crash_leave_the_segments_as_they_are(daemon: Daemon) -> None:
    """B15: attach-only clients whose exit unlinked the daemon's memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with Client.attach(daemon.run_dir) as kv:
        store_and_load(kv)
        before = [(p.name, p.stat().st_ino, p.stat().st_size, p.stat().st_nlink) for p in segments(daemon.name)]
        ends = (0, signal.SIGKILL, 0, signal.SIGSEGV, signal.SIGTERM)
        for turn in range(20):
            visitors = [Worker(visitor, str(daemon.run_dir), ends[(turn + i) % 5]) for i in range(10)]
            assert [v.expect() for v in visitors] == [10] * 10
            for v in visitors:
                v.process.join(20)
                v.end()
        after = [(p.name, p.stat().st_ino, p.stat().st_size, p.stat().st_nlink) for p in segments(daemon.name)]
        assert after == before
        store_and_load(kv)
        assert_at_rest(daemon, kv)
        assert kv.stats()["clients_total"] == 1


def test_a_client_that_cuts_the_data_segment_costs_the_arena_not_the_daemon(daemon: Daemon) -> None:
    """One line, an exit in order, and the next start has a new arena; no SIGBUS."""
    with Raw(daemon.run_dir) as raw:
        raw.register()
        os.ftruncate(raw.fds[1], 4096)
        assert daemon.process is not None
        assert daemon.process.wait(20) == 1
    said = [line for line in daemon.output().splitlines() if "was cut to 4096" in line]
    assert len(said) == 1
    assert segments(daemon.name) == []
    daemon.start()
    with Client.attach(daemon.run_dir) as kv:
        store_and_load(kv)
        assert_at_rest(daemon, kv)


def test_a_segment_that_was_cut_while_no_daemon_ran_is_not_adopted(daemon: Daemon) -> None:
    with Raw(daemon.run_dir) as raw:
        raw.register()
        daemon.kill()
        os.ftruncate(raw.fds[1], 1 << 20)
        daemon.start()
    assert "its data segment has the wrong size" in daemon.output()
    with Client.attach(daemon.run_dir) as kv:
        store_and_load(kv)
