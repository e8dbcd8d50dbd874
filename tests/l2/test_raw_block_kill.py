"""raw_block: a process that stores, loads and deletes is killed at random points; what it had acknowledged is there.

The writer runs in a fork, says on a pipe what was acknowledged, and is killed with SIGKILL.  Every object's length and
bytes follow from its number, so whatever is found can be checked.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kvkeep.l2.adapter import Item, Key, Outcome
from kvkeep.l2.raw_block import RawBlockAdapter
from tests.l2.conformance import content, get, key, view

LENGTHS = (900, 5_000, 70_000, 70_001, 300_000, 1 << 20)
WRITERS = 3


def length_of(number: int) -> int:
    return LENGTHS[number * 7919 % len(LENGTHS)]


def adapter_on(path: Path, *, evicts: bool, durability: str = "none", io: str = "auto") -> RawBlockAdapter:
    return RawBlockAdapter({
        "type": "raw_block", "path": str(path), "size_gb": 64 / 1024, "durability": durability, "io": io,
        "eviction": {"eviction_policy": "LRU" if evicts else "noop"},
    })  # fmt: skip


def write_until_killed(adapter: RawBlockAdapter, say: int, first: int) -> None:
    """In the fork.  Lines: S number = stored; d number = will be deleted; D number = deleted."""

    def work(lane: int) -> None:
        chance = random.Random(first * WRITERS + lane)
        number, mine = first + lane, []
        while True:
            batch = [number + i * WRITERS for i in range(chance.randint(1, 5))]
            number = batch[-1] + WRITERS
            items = [Item(key(n), view(content(key(n), length_of(n))), 0) for n in batch]
            results = adapter.store(items)
            done = [n for n, result in zip(batch, results, strict=True) if result.outcome == Outcome.OK]
            os.write(say, b"".join(b"S %d\n" % n for n in done))
            mine += done
            if mine and chance.random() < 0.4:
                victims = [mine.pop(chance.randrange(len(mine))) for _ in range(min(len(mine), chance.randint(1, 6)))]
                os.write(say, b"".join(b"d %d\n" % n for n in victims))
                adapter.delete([key(n) for n in victims])
                os.write(say, b"".join(b"D %d\n" % n for n in victims))
            if mine and chance.random() < 0.3:
                n = chance.choice(mine)
                get(adapter, key(n), length=length_of(n))

    for lane in range(WRITERS):
        threading.Thread(target=work, args=(lane,), daemon=True).start()
    while True:
        time.sleep(1)


def one_life(path: Path, after_s: float, first: int, **how: object) -> dict[str, set[int]]:
    """Write, be killed; what was said."""
    hear, say = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(hear)
            adapter = adapter_on(path, **how)  # type: ignore[arg-type]
            adapter.open()
            os.write(say, b"O 0\n")
            write_until_killed(adapter, say, first)
        finally:
            os._exit(1)
    os.close(say)
    said = bytearray(os.read(hear, 65536))  # open
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    while data := os.read(hear, 65536):
        said += data
    os.close(hear)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the writer ended by itself"
    heard: dict[str, set[int]] = {"S": set(), "d": set(), "D": set()}
    for line in said.decode().splitlines():
        kind, number = line.split()
        if kind != "O":
            heard[kind].add(int(number))
    return heard


def everything(adapter: RawBlockAdapter) -> set[int]:
    """Numbers of all objects; each is loaded and compared."""
    found: set[int] = set()
    cursor = b""
    while True:
        page = adapter.list(cursor, 50)
        for one, length in page.objects:
            number = int.from_bytes(one.chunk, "little")
            assert one == key(number)
            assert length == length_of(number)
            assert number not in found
            found.add(number)
        cursor = page.cursor
        if not cursor:
            break
    for length in LENGTHS:
        same = [key(number) for number in found if length_of(number) == length]
        for i in range(0, len(same), 16):
            assert set(get(adapter, *same[i : i + 16], length=length)) <= {Outcome.OK}
    return found


def used_by(adapter: RawBlockAdapter, numbers: set[int]) -> int:
    from kvkeep.l2.raw_layout import blocks_of

    geometry = adapter.geometry
    kinds = Counter(blocks_of(length_of(n), geometry.block) for n in numbers)
    return sum(count * (geometry.slab_bytes // geometry.slots(blocks)) for blocks, count in kinds.items())


def live_through(path: Path, kills: int, seed: int, *, evicts: bool, durability: str, io: str) -> int:
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    total = 0
    for life in range(kills):
        how = {"evicts": evicts, "durability": durability, "io": io}
        heard = one_life(path, chance.uniform(0.005, 0.15), (life + 1) * 1_000_000, **how)
        total += len(heard["S"])
        adapter = adapter_on(path, **how)  # type: ignore[arg-type]
        adapter.open()
        found = everything(adapter)
        acknowledged = (acknowledged | heard["S"]) - heard["d"]
        if not evicts:
            assert acknowledged <= found, "acknowledged, and lost"
        assert not heard["D"] & found, "deleted, and back again"
        unheard = {n for n in found - acknowledged - heard["d"] if n < (life + 1) * 1_000_000}
        assert not unheard or evicts
        acknowledged = set(found)
        usage = adapter.usage()
        assert usage.objects == len(found)
        assert usage.bytes_used == used_by(adapter, found)
        assert adapter.counters["corrupt"] == 0
        assert adapter.counters["slabs_scanned"] <= 8, "more than the tables that were just being written"
        assert adapter.counters["journal_gaps"] == 0
        if not evicts and usage.bytes_used > usage.bytes_limit // 2:
            going = set(chance.sample(sorted(found), len(found) * 3 // 4))
            assert adapter.delete([key(n) for n in going]) == len(going)
            acknowledged -= going
        adapter.check_integrity()
        adapter.close()
    return total


@pytest.mark.parametrize(
    ("evicts", "durability", "io"), [(False, "none", "auto"), (False, "data", "threads"), (True, "none", "auto")]
)
def test_what_was_acknowledged_survives_kills_at_random_points(
    tmp_path: Path, evicts: bool, durability: str, io: str
) -> None:
    kills = 14 if durability == "none" else 4
    assert live_through(tmp_path / "kv.raw", kills, 1, evicts=evicts, durability=durability, io=io) > kills


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("durability", ["none", "data"])
def test_a_hundred_kills(tmp_path: Path, evicts: bool, durability: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    assert live_through(tmp_path / "kv.raw", 100, seed, evicts=evicts, durability=durability, io="auto") > 100


def test_a_second_owner_is_refused_and_the_next_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.l2 import raw_medium
    from kvkeep.l2.adapter import AdapterError

    monkeypatch.setattr(raw_medium, "_LOCK_WAIT_S", 0.1)
    first, second = adapter_on(tmp_path / "kv.raw", evicts=True), adapter_on(tmp_path / "kv.raw", evicts=True)
    first.open()
    with pytest.raises(AdapterError, match="belongs to another process"):
        second.open()
    assert first.store([Item(key(1), view(b"x" * 100), 0)])[0].outcome == Outcome.OK
    first.close()
    second.open()
    assert second.lookup([key(1), Key(bytes(32), bytes(32), 0, 1)]) == [True, False]
    second.close()
