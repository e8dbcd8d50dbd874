"""Faults come on schedule, and the adapter under them finds out what it can."""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest

from kvkeep.l2.adapter import AdapterError, Item, Outcome
from kvkeep.l2.fault_inject import FaultInjectAdapter
from kvkeep.l2.faults import Schedule
from tests.l2.conformance import MISS, OK, content, get, key, put, view


def make(*faults: dict[str, object], seed: int = 1, **more: Any) -> FaultInjectAdapter:
    config = {"type": "fault_inject", "inner": {"type": "mock"}, "faults": list(faults), "seed": seed, **more}
    adapter = FaultInjectAdapter(config)
    adapter.open()
    return adapter


def test_without_rules_it_is_the_inner_adapter() -> None:
    adapter = make()
    assert put(adapter, key(1)) == [OK]
    assert adapter.lookup([key(1), key(2)]) == [True, False]
    assert get(adapter, key(1)) == [OK]
    assert adapter.usage().objects == 1
    assert len(adapter.list(b"", 10).objects) == 1
    assert adapter.delete([key(1)]) == 1
    adapter.close()


@pytest.mark.parametrize(
    ("fault", "outcome", "number"),
    [
        ("EIO", Outcome.IO_ERROR, errno.EIO),
        ("EINVAL", Outcome.IO_ERROR, errno.EINVAL),
        ("ENOSPC", Outcome.NO_SPACE, errno.ENOSPC),
        ("short", Outcome.IO_ERROR, errno.EIO),
    ],
)
def test_a_struck_store_fails_alone(fault: str, outcome: Outcome, number: int) -> None:
    adapter = make({"operation": "store", "fault": fault, "at": [1]})
    results = adapter.store([Item(key(n), view(content(key(n))), 0) for n in range(3)])
    assert [result.outcome for result in results] == [OK, outcome, OK]
    assert results[1].errno == number
    assert adapter.lookup([key(n) for n in range(3)]) == [True, False, True]
    assert adapter.counters[f"injected_{fault}"] == 1


def test_a_struck_load_fails_and_its_object_stays() -> None:
    adapter = make({"operation": "load", "fault": "EIO", "at": [0]}, {"operation": "load", "fault": "short", "at": [1]})
    put(adapter, key(1), key(2))
    assert get(adapter, key(1), key(2)) == [Outcome.IO_ERROR, Outcome.IO_ERROR]
    assert get(adapter, key(1), key(2)) == [OK, OK]


def test_a_bit_that_flips_at_rest_is_found_by_the_inner_adapter() -> None:
    adapter = make({"operation": "store", "fault": "bit_flip", "at": [0]})
    assert put(adapter, key(1), key(2)) == [OK, OK]
    assert get(adapter, key(1), key(2)) == [Outcome.CORRUPT, OK]
    assert adapter.lookup([key(1), key(2)]) == [False, True]


def test_a_bit_that_flips_on_the_way_is_corrupt_and_gone() -> None:
    adapter = make({"operation": "load", "fault": "bit_flip", "at": [0]})
    put(adapter, key(1))
    assert get(adapter, key(1)) == [Outcome.CORRUPT]
    assert get(adapter, key(1)) == [MISS]


def test_a_lookup_or_a_deletion_that_is_struck_finds_nothing() -> None:
    adapter = make({"operation": "lookup", "at": [1]}, {"operation": "delete", "at": [0]})
    put(adapter, key(1), key(2))
    assert adapter.lookup([key(1), key(2)]) == [True, False]
    assert adapter.delete([key(1), key(2)]) == 1


def test_a_stall_takes_its_time_and_ends_with_close() -> None:
    adapter = make({"operation": "store", "fault": "stall", "seconds": 0.05, "at": [0]})
    started = time.monotonic()
    assert put(adapter, key(1)) == [OK]
    assert time.monotonic() - started >= 0.05
    adapter.close()


def test_an_open_that_is_struck_says_so() -> None:
    with pytest.raises(AdapterError, match="EIO, as configured"):
        make({"operation": "open"})


def test_the_same_seed_gives_the_same_faults() -> None:
    def run(seed: int) -> list[bool]:
        schedule = Schedule([{"operation": "load", "fault": "EIO", "rate": 0.1}], seed, ("load",))
        return [schedule.next("load") is not None for _ in range(500)]

    assert run(1) == run(1) != run(2)
    assert 20 < sum(run(1)) < 90


def test_ranges_and_steps_are_counted_per_operation() -> None:
    rules: list[dict[str, object]] = [
        {"operation": "store", "fault": "EIO", "every": 3},
        {"operation": "load", "fault": "EIO", "after": 2, "until": 4},
    ]
    schedule = Schedule(rules, 0, ("store", "load"))
    assert [schedule.next("store") is not None for _ in range(6)] == [False, False, True] * 2
    assert [schedule.next("load") is not None for _ in range(6)] == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"operation": "stroe"}, "did you mean 'store'"),
        ({"fault": "EIOO"}, "did you mean 'EIO'"),
        ({"rates": 0.1}, "did you mean 'rate'"),
        ({"at": "3"}, "a list of whole numbers"),
        ({"rate": 2}, "at most 1"),
    ],
)
def test_a_wrong_rule_is_one_sentence(rule: dict[str, object], says: str) -> None:
    with pytest.raises(AdapterError, match=says.replace("'", ".")):
        make(rule)
    with pytest.raises(AdapterError, match="list of objects"):
        FaultInjectAdapter({"type": "fault_inject", "inner": {"type": "mock"}, "faults": "EIO"})
