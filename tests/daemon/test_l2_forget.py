"""Clears by themselves: what is merged, what is waited for, and that nothing but what was meant goes."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvkeep.daemon import admin as admin_module
from kvkeep.daemon.admin import Admin
from kvkeep.daemon.engine import Engine
from kvkeep.daemon.forget import ANSWER_S, PUTS_S, Forget
from kvkeep.daemon.ledger import NAME, Ledger
from kvkeep.daemon.movers import Mover
from tests.daemon.controllers import FakeMover
from tests.ipc.conftest import eventually
from tests.shm.helpers import Memory, chain, prefix_length, store

A, B = b"a" * 32, b"b" * 32


class Adapter(FakeMover):
    """Away until the test says otherwise; removes at once."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.available = False
        self.wipes: list[bytes] = []

    @property
    def coming(self) -> bool:
        return self.available

    def reasons(self) -> list[str]:
        return ["it is away"]

    def is_storing(self, namespace: bytes, keys: Any = None) -> bool:
        return False

    def manage(self, what: Any, done: Any, *, namespace: bytes = b"", cursor: bytes = b"", limit: int = 0) -> None:
        from kvkeep.l2.maintenance import Step

        self.wipes.append(namespace)
        done(Step(), "")


class Bench:
    def __init__(self, run_dir: Path, adapters: int = 1) -> None:
        self.movers = [Adapter(index) for index in range(adapters)]
        self.ledger = Ledger(str(run_dir))
        self.run_dir = run_dir
        self.answers: list[dict[str, Any]] = []
        self.now = 0.0
        self.forget = self.made()

    def made(self) -> Forget:
        media = [[f"mock {mover.index}"] for mover in self.movers]
        movers = cast("list[Mover]", self.movers)
        return Forget(movers, media, self.ledger, doom=lambda *_: None, resume=lambda mover: None)

    def clear(self, namespace: bytes, keys: list[bytes] | None = None) -> Any:
        def nothing() -> Iterator[int]:
            yield from ()

        hashes = None if keys is None else b"".join(keys)
        return self.forget.begin(namespace, 1, hashes, nothing(), lambda dropped, report: self.answers.append(report))

    def step(self, more_s: float = 0.0, removal: Any = None) -> None:
        for _ in range(3):
            self.forget.step((removal.began if removal else 0.0) + more_s)

    def settle(self) -> None:
        """Until everything that was asked is answered."""

        def settled() -> bool:
            self.forget.step(0.0)
            return all(removal.answer is None for removal in self.forget._removals)

        eventually(settled)

    @property
    def left(self) -> list[tuple[bytes, int | None]]:
        return [
            (removal.namespace, None if removal.keys is None else len(removal.keys))
            for removal in self.forget._removals
        ]

    def on_disk(self) -> int:
        eventually(lambda: self.ledger.saved == self.ledger._number)
        return sum(map(len, Ledger(str(self.run_dir)).load().values()))


def let_go(bench: Bench) -> None:
    """Of what waits in opening the fifo."""
    reader = os.open(bench.run_dir / f"{NAME}.new", os.O_RDONLY | os.O_NONBLOCK)
    eventually(lambda: not bench.ledger._running)
    os.close(reader)


def keys(n: int, start: int = 0) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(start, start + n)]


# ---- merging ---------------------------------------------------------------------------------------------------------


def test_a_clear_that_is_repeated_while_an_adapter_is_away_is_one_removal(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in range(50):
        bench.clear(A)
        bench.settle()
    assert (bench.left, bench.on_disk()) == ([(A, None)], 1)
    assert bench.movers[0].bans.all_of(A)
    bench.movers[0].available = True
    bench.settle()
    bench.step()
    assert (bench.left, bench.on_disk(), bench.movers[0].wipes) == ([], 0, [A])
    assert not bench.movers[0].bans


@pytest.mark.parametrize(
    ("first", "then", "left"),
    [
        ((A, keys(4)), (A, None), [(A, None)]),
        ((A, None), (A, keys(4)), [(A, None)]),
        ((A, None), (b"", None), [(b"", None)]),
        ((b"", None), (A, keys(2)), [(b"", None)]),
        ((A, keys(4)), (A, keys(2)), [(A, 4)]),
        ((A, keys(2)), (A, keys(4, 1)), [(A, 2), (A, 4)]),
        ((A, None), (B, None), [(A, None), (B, None)]),
        ((A, keys(2)), (B, None), [(A, 2), (B, None)]),
    ],
)
def test_a_removal_that_another_covers_is_left_to_it(tmp_path: Path, first: Any, then: Any, left: Any) -> None:
    bench = Bench(tmp_path)
    for one in (first, then):
        bench.clear(*one)
        bench.settle()
    assert (bench.left, bench.on_disk()) == (left, len(left))
    for namespace, chunks in (first, then):
        banned = bench.movers[0].bans.of(
            namespace or A, np.frombuffer(b"".join(chunks or keys(1)), "<u8").reshape(-1, 4)
        )
        assert banned is not None
        assert banned.all()
    bench.forget = bench.made()
    assert bench.left == left, "a later daemon goes on with the same"


def test_what_is_done_on_one_adapter_is_not_left_to_a_removal_of_another(tmp_path: Path) -> None:
    bench = Bench(tmp_path, adapters=2)
    bench.movers[1].available = True
    bench.clear(A)
    bench.settle()
    bench.movers[1].available = False
    bench.clear(A)
    bench.settle()
    assert bench.left == [(A, None)]
    assert [mover.bans.all_of(A) for mover in bench.movers] == [True, True]
    for mover in bench.movers:
        mover.available = True
    bench.settle()
    bench.step()
    assert bench.left == []
    assert [len(mover.wipes) for mover in bench.movers] == [1, 2]


def test_any_order_of_clears_ends_with_all_banned_and_then_with_none(tmp_path: Path, seed: int) -> None:
    rng, bench = random.Random(seed), Bench(tmp_path, adapters=2)
    every: list[tuple[bytes, list[bytes] | None]] = []
    for _ in range(60):
        one = (rng.choice([A, B]), rng.choice([None, keys(rng.randrange(1, 5), rng.randrange(4))]))
        every.append(one)
        bench.clear(*one)
        if rng.random() < 0.7:
            bench.settle()
    bench.settle()
    assert len(bench.left) <= 2 + 60 // 4
    for namespace, chunks in every:
        for mover in bench.movers:
            rows = np.frombuffer(b"".join(chunks or keys(1)), "<u8").reshape(-1, 4)
            assert mover.bans.of(namespace, rows).all()  # type: ignore[union-attr]
    assert len(bench.answers) == 60


# ---- the ledger ------------------------------------------------------------------------------------------------------


def test_a_run_directory_that_hangs_delays_the_answer_and_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{NAME}.new")  # whoever opens it waits for somebody who reads it
    bench = Bench(tmp_path)
    removal = bench.clear(A)
    bench.step(PUTS_S, removal)
    assert bench.answers == [], "what is left to the ledger is waited for"
    bench.step(ANSWER_S + 1, removal)
    (report,) = bench.answers
    assert report["l2"][0]["state"] == "remembered"
    assert report["problem"].startswith(f"{tmp_path / NAME} is not written after 20 s, its disk hangs: a restart")
    let_go(bench)


def test_what_leaves_nothing_to_the_ledger_does_not_wait_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{NAME}.new")
    bench = Bench(tmp_path)
    bench.movers[0].available = True
    removal = bench.clear(A)
    bench.step(0.1, removal)
    (report,) = bench.answers
    assert (report["l2"][0]["state"], "problem" in report) == ("removed", False)
    let_go(bench)


def test_what_counts_as_saved_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name too: the directory is flushed after the rename, and after the file is removed."""
    real, log = os.fsync, []

    def fsync(fd: int) -> None:
        log.append(("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file", (tmp_path / NAME).exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    ledger = Ledger(str(tmp_path))
    number = ledger.save({"mock": [(A, 1, None)]})
    eventually(lambda: ledger.saved >= number)
    assert log == [("file", False), ("folder", True)]
    number = ledger.save({})
    eventually(lambda: ledger.saved >= number)
    assert log[2:] == [("folder", False)]


# ---- L1 --------------------------------------------------------------------------------------------------------------


def cleared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any, Iterator[Any]]:
    """An arena that is full of chunks of one namespace, another one, and a clear of the first, two chunks at a time."""
    monkeypatch.setattr(admin_module, "CLEAR_STEP", 2)
    arena = Memory(units=1, slab_bytes=1 << 16, capacity=64).arena()
    admin = Admin(
        Engine(arena, epoch=1, send=lambda *_: None, notify=lambda session: None),
        name="t",
        version="0",
        admin_uids=(),
    )
    one, two = (arena.namespaces.add(number, b'{"m":%d}' % number, 1, 1 << 13) for number in (1, 2))
    assert store(arena, one, chain("one", 8)) == 8
    return arena, one, two, admin._dropping(one.id, one)


def test_a_clear_drops_nothing_that_came_in_the_place_of_what_it_was_to_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, _, two, clear = cleared_in_pieces(monkeypatch)
    assert next(clear) == (2, 0)
    assert store(arena, two, chain("two", 8)) == 8, "evicts the rest of the first"
    list(clear)
    assert prefix_length(arena, two, chain("two", 8)) == 8


def test_a_clear_that_waits_does_not_clear_the_next_namespace_of_that_number(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, one, _, clear = cleared_in_pieces(monkeypatch)
    arena.drop_namespace(one, 8)
    arena.remove_namespace(one)
    other = arena.namespaces.add(one.id, b'{"m":3}', 1, 1 << 13)
    assert store(arena, other, chain("three", 8)) == 8
    list(clear)
    assert prefix_length(arena, other, chain("three", 8)) == 8
