"""Counters of a real engine agree with each other and with vLLM's own; KV events reach a subscriber."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from kvkeep.ipc.client import Client
from tests.conftest import Daemon
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
BLOCK = 32
PATIENCE_S = 30.0  # a bound for a loaded machine, not a target


class Series:
    """The engine's Prometheus registry at one moment: ours without prefix, vLLM's by their whole name."""

    def __init__(self, engine: Engine) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = [tuple(row) for row in engine.ask("series")]

    def __call__(self, name: str, **labels: str) -> float:
        """Sum over all series of that name with these labels; there must be one."""
        name = name if name.startswith("vllm:") else f"vllm:kvkeep_{name}"
        found = [value for of, at, value in self._samples if of == name and labels.items() <= at.items()]
        assert found, f"no series {name} {labels}"
        return sum(found)


class Growth:
    """How much each series grew between its making and now."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._before = engine, Series(engine)
        self._after = self._before

    def now(self) -> Growth:
        self._after = Series(self._engine)
        return self

    def __call__(self, name: str, **labels: str) -> int:
        return round(self._after(name, **labels) - self._before(name, **labels))


class Subscriber:
    """A router's end of vLLM's event stream."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = endpoint
        self._socket.connect(endpoint)

    def until(self, done: Callable[[list[Any]], bool], *media: str) -> list[Any]:
        """Events of these media, of ours if none is named, until `done` says that these are all."""
        events: list[Any] = []
        end = time.monotonic() + PATIENCE_S
        while not done(events):
            left = end - time.monotonic()
            assert left > 0, f"only these events came: {events}"
            if self._socket.poll(left * 1000):
                batch = msgspec.msgpack.decode(self._socket.recv_multipart()[2], type=KVEventBatch)
                events += [event for event in batch.events if getattr(event, "medium", "") in (media or ("CPU",))]
        return events

    def drain(self) -> None:
        time.sleep(0.3)  # the publisher is a thread of its own
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def subscriber() -> Iterator[Subscriber]:
    place = Path(tempfile.mkdtemp(prefix="kvk-"))  # the path of a socket must be short
    subscriber = Subscriber(f"ipc://{place}/events")
    yield subscriber
    subscriber.close()
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine], shared_daemon: Daemon, subscriber: Subscriber) -> Engine:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": subscriber.endpoint}
    options = {"kvkeep.min_hit": 0}
    return make_engine(daemon=shared_daemon, options=options, engine={"kv_events_config": events}).ready()


def test_every_series_is_there_at_zero_before_any_traffic(engine: Engine) -> None:
    series = Series(engine)
    for name in ("lookups_total", "hit_tokens_total", "load_failures_total", "stores_total", "store_seconds_count"):
        assert series(name) == 0
    assert series("pinned_blocks") == series("attached") == 0
    engine.generate([prompt(1, 8)], max_tokens=1)
    assert Series(engine)("attached") == 1


def test_tokens_served_are_those_that_vllm_counts_and_did_not_compute(engine: Engine, reference: Engine) -> None:
    prompts = [prompt(100 + n, CHUNK * (1 + n) + 9) for n in range(6)]
    wanted = reference.generate(prompts)
    grown = Growth(engine)
    assert_same_outputs(engine.generate(prompts), wanted)
    engine.ask("settle")
    stored = sum(len(one) // CHUNK * CHUNK for one in prompts)
    grown.now()
    assert grown("stored_tokens_total") == stored
    assert grown("stores_total", end="done") == grown("store_seconds_count") == grown("stores_total") > 0
    assert grown("lookups_total", result="miss") == grown("lookups_total") == len(prompts)
    assert grown("hit_tokens_total") == 0

    assert engine.ask("forget_local")
    grown = Growth(engine)
    longer = [one + prompt(900 + n, 40) for n, one in enumerate(prompts)]  # partial hits
    assert_same_outputs(engine.generate(prompts + longer), wanted + reference.generate(longer))
    engine.ask("settle")
    grown.now()
    served = grown("loaded_tokens_total")
    assert served >= stored
    assert served == grown("hit_tokens_total") == grown("hit_tokens_total", tier="l1")
    assert served == grown("vllm:external_prefix_cache_hits_total")
    assert served == grown("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    local = grown("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    computed = grown("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert served == sum(map(len, prompts + longer)) - local - computed
    assert grown("loads_total") == grown("load_seconds_count") > 0
    assert grown("load_failures_total") == grown("failed_tokens_total") == 0
    per_token = grown("loaded_bytes_total") / served
    assert grown("hit_bytes_total") == grown("loaded_bytes_total") == per_token * served > 0
    assert Series(engine)("pinned_blocks") == 0


def test_loads_that_fail_are_counted_by_reason_and_their_tokens_apart(engine: Engine, reference: Engine) -> None:
    prompts = [prompt(300 + n, 4 * CHUNK + 9) for n in range(3)]
    wanted = reference.generate(prompts)
    engine.generate(prompts)
    engine.ask("settle")
    for fault, reason in (("fail_loads", "invalid"), ("refuse_loads", "refused")):
        assert engine.ask("forget_local")
        grown = Growth(engine)
        engine.ask("fault", **{fault: 1.0})
        assert_same_outputs(engine.generate(prompts), wanted)
        engine.ask("fault", **{fault: 0.0})
        engine.ask("settle")
        grown.now()
        assert grown("load_failures_total", reason=reason) == grown("load_failures_total") == 3
        assert grown("loads_total") == 0
        assert grown("hit_tokens_total") == grown("vllm:external_prefix_cache_hits_total") == 3 * 4 * CHUNK
        assert grown("loaded_tokens_total") + grown("failed_tokens_total") == 3 * 4 * CHUNK
        assert grown("loaded_bytes_total") + grown("failed_bytes_total") == grown("hit_bytes_total")
        assert grown("failed_tokens_total") > 0


def test_vllms_log_line_has_what_the_connector_did(engine: Engine) -> None:
    engine.ask("log_stats")
    begin = engine.log.stat().st_size
    engine.generate([prompt(400, 2 * CHUNK + 1)], max_tokens=1)
    engine.ask("settle")
    engine.ask("log_stats")
    (line,) = [one for one in engine.log.read_bytes()[begin:].decode().splitlines() if "KV Transfer metrics" in one]
    assert "kvkeep lookups=1, hit tokens=0," in line
    assert f"stored tokens={2 * CHUNK}," in line
    assert "failed" not in line


def test_a_request_that_only_decodes_makes_no_payload(engine: Engine) -> None:
    engine.generate([prompt(500, CHUNK + 1)])
    engine.ask("settle")
    before = engine.ask("report")
    engine.generate([prompt(501, CHUNK // 2)], max_tokens=24)  # no chunk is complete
    after = engine.ask("report")
    assert after["payloads"] == before["payloads"]
    assert after["sent"] == before["sent"]


def test_routers_hear_of_what_was_stored_and_of_what_a_lookup_does_not_find_any_more(
    engine: Engine, subscriber: Subscriber, shared_daemon: Daemon
) -> None:
    engine.ask("settle")
    subscriber.drain()
    tokens = prompt(700, 3 * CHUNK + 9)
    engine.generate([tokens], max_tokens=1)
    engine.ask("settle")
    (stored,) = subscriber.until(lambda events: len(events) == 1)
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == (tokens[: 3 * CHUNK], BLOCK, None)
    assert len(stored.block_hashes) == 3 * CHUNK // BLOCK
    assert (stored.medium, stored.locality, stored.group_idx) == ("CPU", "LOCAL", 0)

    assert engine.ask("forget_local")
    engine.generate([tokens], max_tokens=1)  # served: nothing is stored, nothing has gone
    with Client.attach(shared_daemon.run_dir) as client:
        client.clear()
    assert engine.ask("forget_local")
    engine.generate([tokens], max_tokens=1)
    engine.ask("settle")
    removed, again = subscriber.until(lambda events: len(events) == 2)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == stored.block_hashes
    assert again == stored


def test_the_hashes_are_those_that_vllm_announces_for_the_same_blocks(engine: Engine, subscriber: Subscriber) -> None:
    engine.ask("settle")
    subscriber.drain()
    engine.generate([prompt(710, 2 * CHUNK + 1)], max_tokens=1)
    engine.ask("settle")
    events = subscriber.until(lambda events: {event.medium for event in events} == {"GPU", "CPU"}, "GPU", "CPU")
    told = {event.medium: (event.block_hashes, event.token_ids, event.extra_keys) for event in events}
    assert told["GPU"] == told["CPU"]


def test_a_reset_of_the_cache_takes_back_what_was_announced(engine: Engine, subscriber: Subscriber) -> None:
    engine.generate([prompt(720, CHUNK + 1)], max_tokens=1)
    engine.ask("settle")
    subscriber.drain()
    assert engine.ask("reset_all")
    engine.generate([prompt(721, 8)], max_tokens=1)
    (removed,) = subscriber.until(lambda events: len(events) == 1)
    assert isinstance(removed, BlockRemoved)
    assert len(removed.block_hashes) >= CHUNK // BLOCK


def test_the_gauge_follows_the_daemon(engine: Engine, shared_daemon: Daemon) -> None:
    def until(level: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while Series(engine)("attached") != level:
            assert time.monotonic() < end, f"attached is not {level} after {PATIENCE_S:g} s"
            engine.generate([prompt(800, 8)], max_tokens=2)

    until(1)
    shared_daemon.kill()
    until(0)
    shared_daemon.start()
    until(1)
