from __future__ import annotations

import random

import numpy as np
import pytest

from kvkeep.shm.index import Index
from kvkeep.shm.layout import ENTRY, ENTRY_BYTES


def table(capacity: int) -> np.ndarray:
    return np.zeros(capacity * ENTRY_BYTES, dtype=np.uint8).view(ENTRY)


def words(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint64).reshape(len(rows), -1)


@pytest.mark.parametrize("buckets_for", [16, 4096], ids=["most keys overflow", "no key overflows"])
def test_the_index_finds_exactly_what_a_dict_would_find(seed: int, buckets_for: int) -> None:
    rng = random.Random(seed)
    rows = table(4096)
    index = Index(words(rows))
    index_small = Index(words(rows)[:buckets_for])
    index._slots, index._flat, index._mask = index_small._slots, index_small._flat, index_small._mask
    model: dict[tuple[bytes, int], int] = {}
    free = list(range(4096))
    for _ in range(300):
        if rng.random() < 0.55 and len(free) > 64:
            n = rng.randint(1, 60)
            namespace = rng.randint(1, 3)
            entries = np.array([free.pop(rng.randrange(len(free))) for _ in range(n)])
            keys = np.frombuffer(rng.randbytes(32 * n), dtype=np.uint64).reshape(n, 4)
            rows["key"][entries] = keys
            rows["namespace"][entries] = namespace
            index.insert(keys, namespace, entries)
            model.update({(k.tobytes(), namespace): int(e) for k, e in zip(keys, entries, strict=True)})
        elif model:
            gone = rng.sample(sorted(model), min(len(model), rng.randint(1, 60)))
            entries = np.array([model.pop(g) for g in gone])
            index.remove(
                np.frombuffer(b"".join(g[0] for g in gone), dtype=np.uint64).reshape(-1, 4),
                np.array([g[1] for g in gone], dtype=np.uint64),
                entries,
            )
            free.extend(entries.tolist())
        for namespace in (1, 2, 3):
            asked = [k for k, _ in rng.sample(sorted(model), min(len(model), 40))] + [rng.randbytes(32)]
            keys = np.frombuffer(b"".join(asked), dtype=np.uint64).reshape(-1, 4)
            assert index.find(keys, namespace).entries.tolist() == [model.get((k, namespace), -1) for k in asked]
    assert index.count == len(model)
    entries = np.array(sorted(model.values()))
    index.check_integrity(rows["key"][entries], rows["namespace"][entries].astype(np.uint64), entries)


def test_two_keys_with_the_same_tag_are_told_apart() -> None:
    rows = table(64)
    index = Index(words(rows))
    index._constants = np.zeros(4, dtype=np.uint64)  # every key gets the same bucket and tag
    keys = np.frombuffer(random.Random(1).randbytes(32 * 40), dtype=np.uint64).reshape(-1, 4)
    rows["key"][:40] = keys
    rows["namespace"][:40] = 1
    index.insert(keys, 1, np.arange(40))
    assert index.find(keys, 1).entries.tolist() == list(range(40))
    index.remove(keys[:20], np.ones(20, dtype=np.uint64), np.arange(20))
    assert index.find(keys, 1).entries.tolist() == [-1] * 20 + list(range(20, 40))


def test_one_changed_bit_of_a_key_is_a_miss() -> None:
    rows = table(16)
    index = Index(words(rows))
    key = np.frombuffer(random.Random(2).randbytes(32), dtype=np.uint64).reshape(1, 4)
    rows["key"][0], rows["namespace"][0] = key, 1
    index.insert(key, 1, np.array([0]))
    for bit in range(256):
        other = key.copy()
        other[0, bit // 64] ^= np.uint64(1 << (bit % 64))
        assert index.find(other, 1).entries[0] == -1
    assert index.find(key, 2).entries[0] == -1
    assert index.find(key, 1).entries[0] == 0
