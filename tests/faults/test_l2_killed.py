"""Movers and daemons are killed under load: what was acknowledged to L2 is in L2, right, and counted right.

Acknowledged is what the store controller said of a mover's answer, chunk by chunk, in its DEBUG log ("stored by"): the
line is out before anybody could learn of it.  After every few kills L1 is dropped, and L2 has to have all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvkeep.ipc.client import Client, Namespace
from kvkeep.ipc.errors import Unavailable
from tests.conftest import Daemon
from tests.daemon.l2_helpers import Make, adapter, at_rest, attach, chain, payload, read, register, store
from tests.faults.l2_truth import Truth, Watch, fs_bytes, fs_truth, raw_truth
from tests.ipc.conftest import eventually

MIB = 1 << 20
SIZE = 20_000  # not whole pages
LENGTH = 12
CHAINS = 60
WAIT_S = 0.4  # of each lookup, for L2; its own deadline is 5 s later
CALL_S = 1.0  # of each store
SLACK_S = 3.0  # what a machine with more processes than cores may add

KILLED = ("mover", "daemon", "both")


class Load:
    """A client that looks up, judges, stores what is missing, and makes L1 forget, until told to end."""

    def __init__(self, daemon: Daemon, number: int, seed: int, chains: int = CHAINS) -> None:
        self.daemon, self.number, self.chains = daemon, number, chains
        self.rng = random.Random(seed * 100 + number)
        self.given: dict[str, bytes] = {}  # chunks that were offered, by what the log calls them
        self.hits = self.rounds = 0
        self.longest: dict[str, float] = {}
        self.problem: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Client.attach(self.daemon.run_dir, name=f"load-{self.number}", deadline_s=60) as kv:
                ns = register(kv, SIZE)
                while not self._end.is_set():
                    self._one(kv, ns, chain(self.number * 1000 + self.rng.randrange(self.chains), LENGTH))
                    self.rounds += 1
        except BaseException as e:
            self.problem = e

    def _one(self, kv: Client, ns: Namespace, keys: list[bytes]) -> None:
        began = time.monotonic()
        good = read(kv, ns, keys, wait_s=WAIT_S, size=SIZE)
        looked = time.monotonic()
        self.hits += good
        self._took("lookup", looked - began - WAIT_S - 5.0)
        if good < len(keys):
            self.given.update((key.hex()[:12], key) for key in keys)
            kv.store(ns, keys, [payload(key, SIZE) for key in keys[good:]], start=good, deadline_s=CALL_S)
            self._took("store", time.monotonic() - looked - CALL_S)
        if self.rng.random() < 0.5:
            with contextlib.suppress(Unavailable):
                kv.delete(ns, keys, l1_only=True)

    def _took(self, what: str, beyond: float) -> None:
        self.longest[what] = max(self.longest.get(what, -9.0), beyond)

    def end(self) -> None:
        self._end.set()
        self._thread.join(90)
        assert not self._thread.is_alive(), "a client is stuck"
        if self.problem is not None:
            raise self.problem
        late = {what: beyond for what, beyond in self.longest.items() if beyond > SLACK_S}
        assert not late, f"seconds beyond the deadline: {late}"


def acknowledged(daemon: Daemon) -> tuple[set[str], list[tuple[int, int]]]:
    """Chunks as the log calls them, and of each start of a mover (objects it found, objects acknowledged before)."""
    said: set[str] = set()
    starts: list[tuple[int, int]] = []
    for line in daemon.output().splitlines():
        if (match := re.search(r"(?<!not )stored by l2-0/\d+: \d+ chunks: ([0-9a-f ]+)", line)) is not None:
            said.update(match[1].split())
        elif (match := re.search(r"l2-0 \(\w+\) serves: (\d+) objects", line)) is not None:
            starts.append((int(match[1]), len(said)))
    return said, starts


def descendants(daemon: Daemon) -> list[int]:
    """Movers of this daemon, by /proc: it need not answer."""
    found = []
    for task in Path(f"/proc/{daemon.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in task.read_text().split()]
    movers = []
    for pid in found:
        with contextlib.suppress(OSError):
            if b"kvkeep.daemon.mover" in Path(f"/proc/{pid}/cmdline").read_bytes():
                movers.append(pid)
    return movers


def kill(daemon: Daemon, which: str) -> None:
    movers = descendants(daemon) if which != "daemon" else []
    if which == "both":
        daemon.process.kill()  # type: ignore[union-attr]
    for pid in movers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if which != "mover":
        daemon.kill()


def medium(kind: str, path: Path) -> tuple[str, Callable[[], Truth], Callable[[], list[tuple[str, int, int]]]]:
    """Flag, truth, and what `Watch` looks at.  Durable, and so large that nothing is ever evicted."""
    if kind == "fs":
        flag = adapter(type="fs", base_path=str(path / "fs"), capacity_gb=0.25, fsync="data")
        return flag, lambda: fs_truth(path / "fs"), lambda: [("fs", fs_bytes(path / "fs"), 256 * MIB)]
    flag = adapter(type="raw_block", path=str(path / "raw"), size_gb=0.1, durability="data")
    most = int(0.1 * (1 << 30)) // 4096 * 4096 + PAGE_OF_THE_FILE_SYSTEM
    return flag, lambda: raw_truth(path / "raw"), lambda: [("raw", _blocks(path / "raw"), most)]


PAGE_OF_THE_FILE_SYSTEM = 1 << 16  # its own blocks for the extents of a file


def _blocks(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0


def kill_under_load(
    daemon: Daemon, path: Path, kind: str, rng: random.Random, kills: int, *, rest_every: int = 10
) -> dict[str, Any]:
    """``daemon`` is not started yet.  Kills, and every ``rest_every`` kills drops L1 and demands everything."""
    flag, truth, sizes = medium(kind, path)
    daemon.flags += [flag, "--log-level=debug"]
    daemon.start()
    watch = Watch(daemon, sizes)
    given: dict[str, bytes] = {}
    killed: dict[str, int] = dict.fromkeys(KILLED, 0)
    hits = 0
    for start in range(0, kills, rest_every):
        loads = [Load(daemon, number, rng.getrandbits(32)) for number in range(2)]
        for _ in range(min(rest_every, kills - start)):
            which = rng.choice(KILLED)
            time.sleep(rng.random() ** 2 * 1.5)  # often while everything is still starting
            kill(daemon, which)
            killed[which] += 1
            if which != "mover":
                if rng.random() < 0.5:
                    said, _ = acknowledged(daemon)
                    there = {chunk.hex()[:12] for chunk in truth().chunks}
                    assert said <= there, f"{len(said - there)} acknowledged and not on the medium"
                daemon.start()
        time.sleep(0.3)
        for load in loads:
            load.end()
            given |= load.given
            hits += load.hits
        rest(daemon, truth, given)
    said, starts = acknowledged(daemon)
    forgot = [start for start in starts if start[0] < start[1]]
    assert not forgot, f"movers that found less than was acknowledged: {forgot}"
    return {"killed": killed, "acknowledged": len(said), "hits": hits, "starts": len(starts), "highest": watch.end()}


def rest(daemon: Daemon, truth: Callable[[], Truth], given: dict[str, bytes]) -> None:
    """L1 is dropped by an end without notice; L2 counts right and has all that was acknowledged, with its bytes."""
    with attach(daemon) as kv:
        at_rest(kv)
    daemon.kill()
    said, _ = acknowledged(daemon)
    on_medium = truth()
    daemon.start("--forget")
    with attach(daemon) as kv:
        row = kv.stats()["l2"][0]
        assert row["objects"] == len(on_medium.objects), "objects are counted wrong"
        assert row["bytes_used"] == on_medium.nbytes, "bytes are counted wrong"
        ns = register(kv, SIZE)
        missing = []
        for name in sorted(said):  # one by one: a chain is as good as its first gap
            if not read(kv, ns, [given[name]], size=SIZE):
                missing.append(name)
        assert not missing, f"{len(missing)} of {len(said)} acknowledged chunks are lost: {missing[:3]}"
        assert kv.stats()["l2"][0]["failures"] == {}
        at_rest(kv)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["fs", "raw_block"])
def test_what_l2_acknowledged_survives_kills(make_daemon: Make, tmp_path: Path, seed: int, kind: str) -> None:
    daemon = make_daemon(l1_mib=16, start=False)
    print(kill_under_load(daemon, tmp_path, kind, random.Random(seed), 8))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["fs", "raw_block"])
def test_what_l2_acknowledged_survives_a_hundred_kills(make_daemon: Make, tmp_path: Path, seed: int, kind: str) -> None:
    daemon = make_daemon(l1_mib=16, start=False)
    print(json.dumps(kill_under_load(daemon, tmp_path, kind, random.Random(seed), 120)))


def kill_while_evicting(daemon: Daemon, path: Path, rng: random.Random, kills: int) -> dict[str, Any]:
    """Both media at once, both far too small: what is there is right, and neither ever holds more than its limit."""
    capacity = 12 * MIB
    raw_mib = 16
    daemon.flags += [
        adapter(type="raw_block", path=str(path / "raw"), size_gb=raw_mib / 1024, durability="data"),
        adapter(type="fs", base_path=str(path / "fs"), capacity_gb=capacity / (1 << 30), fsync="data"),
    ]
    daemon.start()
    watch = Watch(
        daemon,
        lambda: [
            ("fs", fs_bytes(path / "fs" / "objects"), capacity),
            ("raw", _blocks(path / "raw"), raw_mib * MIB + PAGE_OF_THE_FILE_SYSTEM),
        ],
    )
    loads = [Load(daemon, number, rng.getrandbits(32), 200) for number in range(2)]
    for _ in range(kills):
        which = rng.choice(KILLED)
        time.sleep(rng.random() ** 2 * 1.5)
        kill(daemon, which)
        if which != "mover":
            daemon.start()
    time.sleep(0.5)
    for load in loads:
        load.end()
    with attach(daemon) as kv:
        at_rest(kv)
        eventually(lambda: all(row["breaker"] == "closed" for row in kv.stats()["l2"]), 60)
    daemon.kill()
    on_medium = fs_truth(path / "fs")
    daemon.start("--forget")
    with attach(daemon) as kv:
        rows = kv.stats()["l2"]
        assert (rows[1]["objects"], rows[1]["bytes_used"]) == (len(on_medium.objects), on_medium.nbytes)
        assert rows[0]["objects"] <= len(raw_truth(path / "raw", evicting=True).objects), (
            "a slot without a header that verifies"
        )
        ns = register(kv, SIZE)
        for keys in (chain(number * 1000 + i, LENGTH) for number in range(2) for i in range(0, 200, 5)):
            read(kv, ns, keys, size=SIZE)
        assert all(row["failures"] == {} for row in kv.stats()["l2"])
        keys = chain(999_999, 10)
        before = [row["chunks_stored"] for row in kv.stats()["l2"]]
        assert store(kv, ns, keys, SIZE) == 10
        eventually(lambda: all(r["chunks_stored"] == b + 10 for r, b in zip(kv.stats()["l2"], before, strict=True)))
        kv.delete(ns, keys, l1_only=True)
        assert read(kv, ns, keys, size=SIZE) == 10
        at_rest(kv)
    return {"kills": kills, "hits": sum(load.hits for load in loads), "highest": watch.end()}


@pytest.mark.timeout(240)
def test_media_that_evict_stay_right_and_within_their_limits_through_kills(
    make_daemon: Make, tmp_path: Path, seed: int
) -> None:
    print(kill_while_evicting(make_daemon(l1_mib=16, start=False), tmp_path, random.Random(seed), 6))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_media_that_evict_stay_right_through_a_hundred_kills(make_daemon: Make, tmp_path: Path, seed: int) -> None:
    print(json.dumps(kill_while_evicting(make_daemon(l1_mib=16, start=False), tmp_path, random.Random(seed), 120)))
