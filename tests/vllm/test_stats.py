"""What the connector counts, on its way to vLLM's log line and to Prometheus, without an engine."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from kvkeep.ipc.vllm.connector import KVKeepConnector
from kvkeep.ipc.vllm.memory import Levels
from kvkeep.ipc.vllm.metadata import LoadFailure
from kvkeep.ipc.vllm.stats import BY_NAME, GPU_SERIES, KEEP, PREFIX, SERIES, Kind, KVKeepProm, KVKeepStats, Tally

LABELS = ["model_name", "engine"]


class Registered:
    """Our series in a registry of their own, for two engines."""

    def __init__(self, device: str = "cpu") -> None:
        self.registry = CollectorRegistry()
        kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
        types = {kind: self._in_registry(kind) for kind in kinds}
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(), device_config=SimpleNamespace(device_type=device)
        )
        self.prom = KVKeepConnector.build_prom_metrics(config, types, LABELS, {0: ["m", "0"], 1: ["m", "1"]})

    def _in_registry(self, kind: Any) -> Any:
        return lambda **arguments: kind(registry=self.registry, **arguments)

    def value(self, name: str, engine: int = 0, **own: str) -> float | None:
        labels = {"model_name": "m", "engine": str(engine)} | own
        return self.registry.get_sample_value(PREFIX + name, labels)


@pytest.fixture
def registered() -> Registered:
    return Registered()


def travelled(stats: KVKeepStats | None) -> KVKeepStats:
    """As vLLM takes it to another process."""
    assert stats is not None
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    rebuilt = KVKeepConnector.build_kv_connector_stats(data)
    assert isinstance(rebuilt, KVKeepStats)
    return rebuilt


def test_nothing_happened_is_nothing_to_send() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.add("loads")
    tally.level("attached", 1)
    assert tally.take() is not None
    tally.add("chunks_skipped_pins", 0)
    tally.level("attached", 1)
    tally.add("loads_failed")  # no series: counted, and not sent
    assert tally.take() is None
    assert tally.totals == {"loads": 1, "loads_failed": 1}


def test_each_count_leaves_once_and_the_total_stays() -> None:
    tally = Tally()
    found = []
    for amount in (1, 2):
        tally.add("loaded_tokens", amount)
        found.append(travelled(tally.take()).data["add"])
    assert found == [{"loaded_tokens": 1}, {"loaded_tokens": 2}]
    assert tally.totals == {"loaded_tokens": 3}


def test_intervals_add_up_a_level_is_the_last_one() -> None:
    one, other = Tally(), Tally()
    for tally, level in ((one, 7), (other, 3)):
        tally.add("loads", 2)
        tally.seen("load_seconds", level / 10)
        tally.level("pinned_blocks", level)
    other.add("stores_done")
    both = travelled(one.take()).aggregate(travelled(other.take()))
    assert both.data == {
        "add": {"loads": 4, "stores_done": 1},
        "set": {"pinned_blocks": 3},
        "seen": {"load_seconds": [0.7, 0.3]},
    }
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_adding_up_does_not_change_what_another_logger_was_given() -> None:
    tally = Tally()
    tally.seen("load_seconds", 1.0)
    stats = tally.take()
    assert stats is not None
    payload = stats.to_dict()
    for _ in range(2):
        rebuilt = KVKeepConnector.build_kv_connector_stats(payload)
        assert rebuilt is not None
        rebuilt.aggregate(KVKeepStats.of(payload))
    assert payload["seen"] == {"load_seconds": [1.0]}


def test_a_logger_that_nobody_asks_keeps_a_bounded_number_of_observations() -> None:
    tally, sum_of_all = Tally(), KVKeepStats()
    for _ in range(3):
        for _ in range(KEEP - 5):
            tally.seen("store_seconds", 0.5)
        sum_of_all.aggregate(travelled(tally.take()))
    assert len(sum_of_all.data["seen"]["store_seconds"]) == KEEP
    for _ in range(2 * KEEP):
        tally.seen("store_seconds", 0.5)
    assert len(travelled(tally.take()).data["seen"]["store_seconds"]) == KEEP


def test_the_log_line_shows_traffic_and_only_the_trouble_that_there_was() -> None:
    tally = Tally()
    tally.add("lookups_hit", 2)
    tally.add("lookups_miss", 1)
    tally.add("hit_tokens_l1", 128)
    tally.add("hit_tokens_l2", 64)
    tally.add("loaded_bytes", 2_000_000)
    tally.seen("load_seconds", 0.001)
    tally.seen("load_seconds", 0.003)
    line = travelled(tally.take()).reduce()
    assert line == {
        "kvkeep lookups": 3,
        "hit tokens": 192,
        "loaded tokens": 0,
        "loaded MB": 2.0,
        "avg load ms": 2.0,
        "stored tokens": 0,
        "stored MB": 0.0,
        "avg store ms": 0.0,
    }
    tally.add("load_failures_deadline")
    tally.add("load_failures_invalid")
    tally.level("attached", 0)
    line = travelled(tally.take()).reduce()
    assert (line["failed loads"], line["attached"]) == (2, 0)
    assert "failed stores" not in line


def test_every_series_is_there_at_zero_for_each_engine(registered: Registered) -> None:
    assert len({series.name for series in SERIES}) == len(SERIES)
    for series in SERIES:
        suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[series.kind]
        for own in [{series.label: member.value} for member in series.values or ()] or [{}]:
            for engine in (0, 1):
                assert registered.value(series.name + suffix, engine, **own) == 0, series.name


def test_series_of_the_gpu_are_there_on_a_gpu_only() -> None:
    tally = Tally()
    tally.level("arena_bytes", 2 * Levels(4096, 8192).arena)
    payload = travelled(tally.take()).data
    for device, wanted in (("cuda", 16384), ("cpu", None)):
        registered = Registered(device)
        registered.prom.observe(payload, 0)
        assert [registered.value(series.name) for series in GPU_SERIES] == [wanted, 0 if wanted else None]
        assert registered.value("attached") == 0


def test_every_series_and_every_value_of_its_label_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    table = text[text.index("## Metrics") : text.index("## KV events")]
    for series in BY_NAME.values():
        name = series.name + ("_total" if series.kind is Kind.COUNTER else "")
        assert f"`{name}{{{series.label}}}`" in table if series.label else f"`{name}`" in table, name
        for member in series.values or ():
            assert f"`{member.value}`" in table, (name, member)


def test_names_follow_the_conventions_of_prometheus(registered: Registered) -> None:
    for family in registered.registry.collect():
        name = family.name.removeprefix(PREFIX)
        assert name != family.name
        assert not any(part in name for part in ("_ms", "_mb", "total", "latency")), name
        if family.type == "histogram":
            assert name.endswith("_seconds")


def test_a_payload_arrives_at_the_series_of_its_engine_only(registered: Registered) -> None:
    tally = Tally()
    tally.add("hit_tokens_l2", 64)
    tally.add("load_failures_daemon_away")
    tally.add("stores_orphan", 3)
    tally.level("pinned_blocks", 9)
    tally.seen("lookup_seconds", 0.0)
    tally.seen("lookup_seconds", 0.004)
    assert isinstance(registered.prom, KVKeepProm)
    registered.prom.observe(travelled(tally.take()).data, 1)
    tally.level("pinned_blocks", 0)
    registered.prom.observe(travelled(tally.take()).data, 1)
    for engine, factor in ((0, 0), (1, 1)):
        value = registered.value
        assert value("hit_tokens_total", engine, tier="l2") == 64 * factor
        assert value("hit_tokens_total", engine, tier="l1") == 0
        assert value("load_failures_total", engine, reason="daemon_away") == factor
        assert value("stores_total", engine, end="orphan") == 3 * factor
        assert value("pinned_blocks", engine) == 0
        assert value("lookup_seconds_count", engine) == 2 * factor
        assert value("lookup_seconds_bucket", engine, le="0.0002") == factor
        assert value("lookup_seconds_sum", engine) == 0.004 * factor


def test_what_prometheus_does_not_take_does_not_reach_the_frontend(registered: Registered) -> None:
    registered.prom.observe({"add": {"lookups_hit": 1, "lookups_miss": -1}, "set": {}, "seen": {}}, 0)
    registered.prom.observe({"add": {"lookups_hit": 1}, "set": {}, "seen": {}}, 0)
    assert registered.value("lookups_total", 0, result="hit") == 2


def test_label_values_are_words() -> None:
    for series in SERIES:
        values: list[enum.Enum] = list(series.values or ())
        assert all(str(member.value).replace("_", "").isalnum() for member in values)
    assert len(LoadFailure) == 7
