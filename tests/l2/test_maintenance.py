"""Management of a medium, on every adapter: steps, what they find, and that they are no use of what they look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvkeep.l2.adapter import Adapter, Key, Outcome
from kvkeep.l2.maintenance import Maintenance, Step, What
from kvkeep.l2.mock import MockAdapter
from kvkeep.l2.registry import create_adapter
from tests.l2.conformance import OBJECT, get, key, put

OTHER = bytes(31) + b"x"


class Plain(MockAdapter):
    """Has none of the optional calls."""

    erase = Adapter.erase
    serdes = Adapter.serdes
    verify = Adapter.verify
    compact = Adapter.compact


def make(kind: str, path: Path, **more: Any) -> Adapter:
    if kind == "plain":
        return Plain({"type": "mock"})
    configs: dict[str, dict[str, Any]] = {
        "fs": {"type": "fs", "base_path": str(path / "fs"), "capacity_gb": 0.05},
        "fs_roots": {"type": "fs", "base_path": [str(path / "a"), str(path / "b")], "capacity_gb": 0.05},
        "raw_block": {"type": "raw_block", "path": str(path / "raw"), "size_gb": 0.0625, "durability": "none"},
        "mock": {"type": "mock"},
        "fault_inject": {"type": "fault_inject", "inner": {"type": "mock"}},
    }
    return create_adapter({**configs[kind], **more})


Open = Callable[..., Adapter]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    adapters: list[Adapter] = []

    def open_it(kind: str, **more: Any) -> Adapter:
        adapters.append(make(kind, tmp_path, **more))
        adapters[-1].open()
        return adapters[-1]

    yield open_it
    for adapter in adapters:
        adapter.close()


def elsewhere(n: int) -> Key:
    return key(n)._replace(namespace=OTHER)


def steps(adapter: Adapter, what: What, namespace: bytes = b"", limit: int = 0) -> list[Step]:
    maintenance, cursor, found = Maintenance(adapter), b"", []
    while True:
        found.append(maintenance.step(what, namespace, cursor, limit))
        cursor = found[-1].cursor
        if not cursor:
            return found


EVERY = pytest.mark.parametrize("kind", ["fs", "fs_roots", "raw_block", "mock", "fault_inject", "plain"])


@EVERY
def test_steps_list_and_count_everything_once(opened: Open, kind: str) -> None:
    adapter = opened(kind)
    put(adapter, *map(key, range(30)), *map(elsewhere, range(10)))
    pages = steps(adapter, What.LIST, limit=7)
    assert max(len(page.rows) for page in pages) <= 7
    rows = [row for page in pages for row in page.rows]
    named = {Key(row.namespace, row.chunk, row.shard, row.shards) for row in rows}
    assert named == {*map(key, range(30)), *map(elsewhere, range(10))}
    assert len(rows) == 40
    assert {(row.nbytes, row.serdes) for row in rows} == {(OBJECT, ())}
    mine = [row for page in steps(adapter, What.LIST, OTHER) for row in page.rows]
    assert len(mine) == 10
    spaces: Counter[bytes] = Counter()
    for step in steps(adapter, What.TALLY):
        spaces.update({space: count for space, (count, _) in step.spaces.items()})
    assert spaces == {key(0).namespace: 30, OTHER: 10}


@EVERY
def test_a_wipe_takes_one_namespace_or_everything(opened: Open, kind: str) -> None:
    adapter = opened(kind)
    put(adapter, *map(key, range(30)), *map(elsewhere, range(10)))
    assert sum(step.objects for step in steps(adapter, What.WIPE, OTHER, limit=3)) == 10
    assert adapter.lookup([elsewhere(3), key(3)]) == [False, True]
    assert sum(step.objects for step in steps(adapter, What.WIPE, limit=4)) == 30
    assert adapter.usage().objects == 0
    assert adapter.erase([key(1), key(99)]) == [True, True], "gone is gone, there before or not"


@EVERY
def test_verification_reads_everything_and_finds_nothing_on_a_good_medium(opened: Open, kind: str) -> None:
    adapter = opened(kind)
    put(adapter, *map(key, range(25)))
    found = steps(adapter, What.VERIFY)
    assert sum(step.objects for step in found) == 25
    assert sum(step.nbytes for step in found) == 25 * OBJECT
    assert sum(step.corrupt + step.unreadable for step in found) == 0
    for _ in steps(adapter, What.COMPACT):
        pass
    assert get(adapter, *map(key, range(25))) == [Outcome.OK] * 25


@pytest.mark.parametrize("kind", ["fs", "raw_block"])
def test_management_is_no_use_of_what_it_looks_at(opened: Open, kind: str) -> None:
    adapter = opened(kind)
    n = 0
    while not adapter.counters["evicted"]:
        put(adapter, key(n))
        n += 1
        assert n < 2000
    there = {Key(row.namespace, row.chunk, row.shard, row.shards) for s in steps(adapter, What.LIST) for row in s.rows}
    kept = [i for i in range(n) if key(i) in there]  # a lookup would be a use
    for what in (What.LIST, What.VERIFY, What.COMPACT):
        steps(adapter, what)
    for i in range(n, n + 40):
        put(adapter, key(i))
    assert adapter.lookup([key(i) for i in kept[-20:]]) == [True] * 20, "the newest before it are still there"
    assert adapter.lookup([key(i) for i in kept[:5]]) == [False] * 5, "and the oldest went"


def test_what_cannot_be_looked_at_is_told(opened: Open) -> None:
    deaf = opened("fault_inject", faults=[{"operation": "list", "fault": "EIO"}])
    put(deaf, key(1))
    for what in (What.LIST, What.TALLY, What.WIPE):
        assert steps(deaf, what)[-1].unreadable == 1
    stubborn = opened("fault_inject", faults=[{"operation": "delete", "fault": "EIO"}])
    put(stubborn, key(1), key(2))
    (step,) = steps(stubborn, What.WIPE)
    assert (step.objects, step.unreadable) == (0, 2)
    blind = opened("fault_inject", faults=[{"operation": "verify", "fault": "EIO"}])
    assert steps(blind, What.VERIFY)[-1].unreadable == 1


def test_a_file_that_no_root_answers_for_any_more_is_given_back(opened: Open, tmp_path: Path) -> None:
    one = opened("fs", base_path=[str(tmp_path / "a")])
    put(one, *map(key, range(40)))
    one.close()
    two = opened("fs", base_path=[str(tmp_path / "a"), str(tmp_path / "b")])
    found = sum(two.lookup([key(n) for n in range(40)]))
    assert found < 40, "what ranks highest in the new root is not looked for in the old one"
    did: Counter[str] = Counter()
    for step in steps(two, What.COMPACT):
        did.update(step.did)
    assert did["unreachable_files_removed"] == 40 - found
    assert two.usage().objects == found
    assert get(two, *[key(n) for n in range(40)]).count(Outcome.OK) == found
