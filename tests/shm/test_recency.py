from __future__ import annotations

import random

import numpy as np

from kvkeep.shm import recency
from kvkeep.shm.recency import Clock, LruOrder


def everything(entries: np.ndarray) -> np.ndarray:
    return np.ones(len(entries), dtype=bool)


def test_the_order_is_that_of_a_plain_list(seed: int, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(recency, "SEGMENT", 32)
    monkeypatch.setattr(recency, "_SQUEEZE_SLACK", 0)
    monkeypatch.setattr(recency._Segment.__init__, "__defaults__", (32,))
    rng = random.Random(seed)
    column = np.zeros(200, dtype=np.uint64)
    order, clock = LruOrder(column), Clock()
    model: list[int] = []  # least recent first
    blocked: set[int] = set()

    def evictable(entries: np.ndarray) -> np.ndarray:
        return np.array([int(e) not in blocked for e in entries], dtype=bool)

    for _ in range(600):
        what = rng.random()
        if what < 0.5:
            touched = rng.sample(range(200), rng.randint(1, 40))
            order.touch(np.array(touched), clock.stamps(len(touched)))
            model = [e for e in model if e not in touched] + touched[::-1]
        elif what < 0.6:
            blocked = set(rng.sample(range(200), rng.randint(0, 60)))
            order.released()
        elif what < 0.8:
            want = rng.randint(1, 30)
            expected = [e for e in model if e not in blocked][:want]
            assert order.pop(want, evictable).tolist() == expected
            model = [e for e in model if e not in expected]
        else:
            order.squeeze(len(model))
        assert order.oldest() == (int(column[model[0]]) if model else 0)
        assert order.members().tolist() == model


def test_squeezing_bounds_the_log() -> None:
    column = np.zeros(100, dtype=np.uint64)
    order, clock = LruOrder(column), Clock()
    chain = np.arange(100)
    for _ in range(5000):
        order.touch(chain, clock.stamps(100))
        while order.squeeze(100):
            pass
    assert order.records < 2 * 100 + recency._SQUEEZE_SLACK + 2 * recency.SEGMENT
    assert order.members().tolist() == chain[::-1].tolist()


def test_a_chain_goes_tail_first_whatever_was_touched(seed: int) -> None:
    """Chains share heads (a tree); touches cover a path from the root to any depth; every eviction is a suffix."""
    rng = random.Random(seed)
    parent = {0: -1}
    for node in range(1, 300):
        parent[node] = rng.randrange(max(0, node - 20), node)
    column = np.zeros(300, dtype=np.uint64)
    order, clock = LruOrder(column), Clock()
    resident: set[int] = set()
    for _ in range(500):
        path, node = [], rng.randrange(300)
        while node >= 0:
            path.append(node)
            node = parent[node]
        order.touch(np.array(path[::-1]), clock.stamps(len(path)))
        resident.update(path)
        resident.difference_update(order.pop(rng.randint(0, 30), everything).tolist())
        assert all(parent[n] in resident or parent[n] < 0 for n in resident), "a tail outlived its head"
