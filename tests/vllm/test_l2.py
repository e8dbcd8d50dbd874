"""What an engine stored outlives L1: the daemon comes back with an empty arena, L2 serves it, and the answers stay.

The long form (soak) does it with more than 2 GB of KV.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvkeep.ipc.client import Client
from tests.conftest import Daemon, unique_name
from tests.vllm import tiny_model
from tests.vllm.engines import Engine
from tests.vllm.helpers import assert_nothing_held, assert_same_outputs
from tests.vllm.tiny_model import prompt

CHUNK = 64
PATIENCE_S = 120.0  # a bound for a loaded machine, not a target

MEDIA = {
    "fs": [{"type": "fs"}],
    "raw_block": [{"type": "raw_block"}],
    "encoded": [{"type": "fs", "serde": ["zstd", {"type": "aesgcm", "key_file": "keys"}]}],
    "cascade": [{"type": "fs", "capacity_gb": 0.004}, {"type": "raw_block"}],  # the second has what the first evicted
}


def adapters(media: list[dict[str, Any]], folder: Path, gigabytes: float) -> list[str]:
    flags = []
    for number, medium in enumerate(media):
        place = folder / f"medium-{number}"
        place.mkdir()
        keys = place / "keys"
        keys.write_text(f"test:{'5a' * 32}\n")
        keys.chmod(0o600)
        config: dict[str, Any] = (
            {"base_path": str(place), "capacity_gb": gigabytes, "fsync": "none"}
            if medium["type"] == "fs"
            else {"path": str(place / "raw"), "size_gb": gigabytes, "durability": "none"}
        )
        text = json.dumps(config | medium).replace('"keys"', json.dumps(str(keys)))
        flags.append(f"--l2-adapter={text}")
    return flags


def until(what: str, happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE_S:g} s"
        time.sleep(0.05)


def rows(daemon: Daemon) -> list[dict[str, Any]]:
    with Client.attach(daemon.run_dir, arena=False) as client:
        found: list[dict[str, Any]] = client.stats()["l2"]
        return found


def wait_serving(daemon: Daemon) -> None:
    until("every adapter serving", lambda: all(row["phase"] == "serving" for row in rows(daemon)))


def wait_stored(daemon: Daemon, chunks: int) -> None:
    until("L2 having everything", lambda: all(row["chunks_stored"] >= chunks for row in rows(daemon)))


def start_with_empty_l1(daemon: Daemon, engine: Engine, *flags: str) -> None:
    daemon.stop(60)
    daemon.flags = [*flags] or daemon.flags
    daemon.start("--forget")
    wait_serving(daemon)
    until("the engine attaching again", lambda: engine.ask("report")["on"])


def tokens_from_l2(engine: Engine) -> int:
    """As the connector counts them, and vLLM by their source."""
    ours = engine.ask("report")["counters"].get("hit_tokens_l2", 0)
    name = "vllm:prompt_tokens_cached_by_source_total"
    theirs = sum(value for of, labels, value in engine.ask("series") if of == name and labels["source"] == "disk")
    assert ours == theirs
    return int(ours)


class Attached(NamedTuple):
    daemon: Daemon
    engine: Engine


@pytest.fixture(scope="module")
def attached(folder: Path, make_engine: Callable[..., Engine]) -> Iterator[Attached]:
    """One engine for all media: each test starts the daemon anew with the medium it is about."""
    daemon = Daemon(folder / "l2", unique_name("l2"), l1_mib=256)
    engine = make_engine(daemon=daemon.start(), options={"kvkeep.l2_wait_ms": 20_000})
    yield Attached(daemon, engine.ready())
    daemon.remove()


@pytest.mark.parametrize("medium", list(MEDIA))
def test_an_engine_is_served_from_l2_and_says_the_same(
    medium: str, attached: Attached, reference: Engine, tmp_path: Path
) -> None:
    daemon, engine = attached
    start_with_empty_l1(daemon, engine, "--l1-size-gb=0.25", *adapters(MEDIA[medium], tmp_path, 0.5))
    assert engine.ask("forget_local")
    prompts = [prompt(9000 + n, CHUNK * (2 + n % 7) + 5) for n in range(16)]
    chunks = sum(len(p) // CHUNK for p in prompts)
    wanted = reference.generate(prompts)
    assert_same_outputs(engine.generate(prompts), wanted)
    engine.ask("settle")
    wait_stored(daemon, chunks)

    start_with_empty_l1(daemon, engine)
    assert engine.ask("forget_local")
    before, came = engine.external_hits(), tokens_from_l2(engine)
    assert_same_outputs(engine.generate(prompts), wanted)
    assert engine.external_hits() - before == tokens_from_l2(engine) - came == chunks * CHUNK
    assert sum(row["chunks_loaded"] for row in rows(daemon)) == chunks
    assert_nothing_held(engine.ask("settle"))


@pytest.mark.soak
@pytest.mark.parametrize("medium", ["fs", "raw_block", "encoded"])
def test_two_gigabytes_of_an_engines_kv_come_back(
    medium: str, make_engine: Callable[..., Engine], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny_model.build(tmp_path_factory.mktemp("wide"), wide=True)
    per_token = tiny_model.WIDE_BYTES_PER_TOKEN
    count = -(-(2 << 30) // (per_token * 1024))
    prompts = [prompt(7000 + n, 1024 + 7) for n in range(count)]
    name = unique_name("l2-large")
    place = folder / name
    place.mkdir()
    daemon = Daemon(place / "run", name, *adapters(MEDIA[medium], place, 3.0), l1_mib=3072)
    try:
        daemon.start()
        wait_serving(daemon)
        engine = make_engine(
            daemon=daemon,
            path=path,
            options={"kvkeep.l2_wait_ms": 60_000, "kvkeep.chunk_tokens": CHUNK},
            environment={"VLLM_CPU_KVCACHE_SPACE": "4"},
        ).ready()
        wanted = engine.ask("generate", prompts=prompts, max_tokens=4, wait_s=600)["answers"]
        engine.ask("settle")
        wait_stored(daemon, count * 1024 // CHUNK)
        stored = min(row["bytes_stored"] for row in rows(daemon))

        start_with_empty_l1(daemon, engine)
        assert engine.ask("forget_local")
        before = engine.external_hits()
        answers = engine.ask("generate", prompts=prompts, max_tokens=4, wait_s=600)["answers"]
        assert_same_outputs(answers, wanted)
        hits = engine.external_hits() - before
        print(f"{medium}: {stored / 1e9:.2f} GB stored, {hits} of {count * 1024} tokens served from L2")
        assert stored >= 2e9
        assert hits == count * 1024
    finally:
        daemon.remove()
