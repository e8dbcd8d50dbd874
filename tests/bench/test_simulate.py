"""The trace simulator: that it counts right, and that the policies keep what they promise on a short piece of trace."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest

from kvkeep.bench import simulate
from kvkeep.bench.simulate import Cache, Chain, distinct, hit_rate, read_trace, synthetic
from kvkeep.shm.policies import POLICIES

EVICTING = [name for name, policy in POLICIES.items() if policy.evicts]
SIZES = (3, 10, 30)


@pytest.fixture(scope="module")
def trace() -> list[Chain]:
    """The first 1000 requests of the real trace; a made-up chat where there is none."""
    path = simulate.default_trace()
    return read_trace(path, 1000) if path.exists() else dict(synthetic(1, 170))["chat"]


def by_a_plain_list(capacity: int, chains: list[Chain]) -> float:
    """LRU, tail first, as simple as can be."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        n = 0
        while n < len(chain) and chain[n] in cache:
            n += 1
        hits += n
        for block in reversed(chain[:capacity]):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / sum(map(len, chains))


@pytest.mark.parametrize("percent", SIZES)
def test_lru_hits_what_a_plain_list_hits(trace: list[Chain], percent: int) -> None:
    capacity = distinct(trace) * percent // 100
    assert hit_rate("LRU", capacity, trace) == pytest.approx(by_a_plain_list(capacity, trace), abs=0.002)


@pytest.mark.parametrize("policy", EVICTING)
def test_what_is_kept_of_a_chain_is_a_prefix(trace: list[Chain], policy: str) -> None:
    cache = Cache(policy, distinct(trace) * 3 // 100)
    for number, chain in enumerate(trace[:600]):
        cache.request(chain)
        blocks = cache.blocks
        assert len(blocks) <= cache.capacity
        for earlier in trace[max(0, number - 20) : number + 1]:
            there = [block in blocks for block in earlier]
            assert all(there[: sum(there)]), f"request {number}: a hole in a chain"


def test_the_recommended_policy_is_not_below_lru(trace: list[Chain]) -> None:
    for percent in SIZES:
        capacity = distinct(trace) * percent // 100
        ours, plain = hit_rate(simulate.RECOMMENDED, capacity, trace), hit_rate("LRU", capacity, trace)
        assert ours >= plain - 0.005, f"at {percent}%"


def test_the_recommended_policy_stands_other_loads() -> None:
    for name, chains in synthetic(7, 150):
        capacity = distinct(chains) // 10
        ours, plain = hit_rate(simulate.RECOMMENDED, capacity, chains), hit_rate("LRU", capacity, chains)
        assert ours >= plain - 0.03, name


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1, 2]}\n{"hash": 3}\n')
    assert simulate.main(["--trace", str(file)]) == 1
    assert f"{file}:2" in capsys.readouterr().err


def test_json_has_a_line_a_policy_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text("".join(json.dumps({"hash_ids": list(range(n, n + 8))}) + "\n" for n in range(0, 400, 8)) * 2)
    assert simulate.main(["--trace", str(file), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == [f"small {p}% {name}" for p in simulate.SIZES for name in EVICTING]
    assert all(line["reference_name"] == "LRU of this run" for line in lines)
