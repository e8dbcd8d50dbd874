"""The mock adapter passes for a medium, also a slow one."""

from __future__ import annotations

import threading
import time

import pytest

from kvkeep.l2.adapter import Adapter, Key
from kvkeep.l2.mock import MockAdapter
from kvkeep.l2.record import HEADER_BYTES
from tests.l2.conformance import MIB, AdapterConformance, Medium, get, key, put


class MockMedium(Medium):
    persistent = False

    def adapter(self, capacity: int) -> Adapter:
        return MockAdapter({"type": "mock", "capacity_gb": capacity / (1 << 30)})

    def flip(self, adapter: Adapter, key: Key, part: str, at: int) -> None:
        assert isinstance(adapter, MockAdapter)
        adapter.objects[key][at + (HEADER_BYTES if part == "payload" else 0)] ^= 1


class TestMock(AdapterConformance):
    @pytest.fixture
    def medium(self) -> Medium:
        return MockMedium()


def test_bandwidth_is_shared_by_all_threads() -> None:
    adapter = MockAdapter({"type": "mock", "bandwidth_gb": 0.1, "latency_ms": 1})
    adapter.open()
    started = time.monotonic()
    threads = [threading.Thread(target=put, args=(adapter, key(n)), kwargs={"length": MIB}) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 4 * MIB / 0.1e9
    assert get(adapter, key(3), length=MIB) == [0]
