"""A touch makes objects recent and changes nothing of them, on every medium."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvkeep.l2.adapter import OK, Adapter, Item, Key
from kvkeep.l2.registry import create_adapter

SIZE = 1 << 20
SPACE = bytes(32)


def configs(path: Path) -> dict[str, dict[str, Any]]:
    fs = {"type": "fs", "base_path": str(path / "kv"), "capacity_gb": 16 / 1024}
    return {
        "fs": fs,
        "raw_block": {"type": "raw_block", "path": str(path / "raw"), "size_gb": 24 / 1024, "durability": "none"},
        "fault_inject": {"type": "fault_inject", "inner": fs},
    }


def key(n: int) -> Key:
    return Key(SPACE, n.to_bytes(32, "little"), 0, 1)


def put(adapter: Adapter, n: int) -> None:
    assert adapter.store([Item(key(n), memoryview(bytes([n]) * SIZE))]) == [OK]


@pytest.mark.parametrize("kind", ["fs", "raw_block", "fault_inject"])
def test_what_is_touched_stays_and_what_is_not_goes(tmp_path: Path, kind: str) -> None:
    adapter = create_adapter(configs(tmp_path)[kind])
    adapter.open()
    try:
        put(adapter, 0)
        for n in range(1, 60):
            put(adapter, n)
            assert adapter.touch([key(0), key(1)]) == [True, True]
        assert adapter.lookup([key(2)]) == [False]
        assert adapter.touch([key(2), key(1)]) == [False, True]
        into = bytearray(SIZE)
        assert adapter.load([(key(1), memoryview(into))]) == [OK]
        assert into == bytes([1]) * SIZE
    finally:
        adapter.close()


def test_a_restart_of_fs_knows_what_was_touched_and_no_content_was_written(tmp_path: Path) -> None:
    config = configs(tmp_path)["fs"]
    adapter = create_adapter(config)
    adapter.open()
    for n in range(12):
        put(adapter, n)
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > SIZE]
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in files}
    adapter.touch([key(0)])
    adapter.close()
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in files} == before
    assert len(files) == 12
    os.sync()
    adapter = create_adapter(config)
    adapter.open()
    try:
        for n in range(100, 110):
            put(adapter, n)
        assert adapter.lookup([key(0), key(1)]) == [True, False]
    finally:
        adapter.close()
