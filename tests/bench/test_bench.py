"""Each benchmark in its tiny form: what it prints is what other programs read, and it leaves nothing behind.

No time is asserted here: `--quick` measures nothing worth knowing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CASES = {
    "control": {
        *(f"{op}/{tokens}/1k" for op in ("lookup", "store_commit", "retrieve_confirm") for tokens in (2048, 131072)),
        "lookup_evicting/131072/1k",
    },
    "data": {f"{op}/1MiB/{clients}" for op in ("store", "retrieve") for clients in (1, 2)},
    "restart": {"cold/64MiB", "warm/1k"},
    "serde": {f"zstd/{dtype}/{what}" for dtype in ("bfloat16", "float16") for what in ("size", "encode", "decode")},
    "l2": {
        *(
            f"{adapter}/{what}/1MiB"
            for adapter in ("fs", "raw_block", "fs_sync", "raw_block_nosync", "fs+zstd", "raw_block+zstd")
            for what in ("store", "load")
        ),
        *(f"{adapter}/client_{what}/1MiB" for adapter in ("fs", "raw_block") for what in ("store", "load")),
    },
    "footprint": {"rss_mb", "bytes_per_entry", "idle_cpu_percent", "start_seconds"},
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: a socket's path has room for 107 bytes, and pytest's own folders use up most of them."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as folder:
        yield Path(folder)


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """`kvkeep bench …` whose temporary files go to ``tmp_path``."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvkeep.daemon.cli", "bench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )


def leftovers(tmp_path: Path, pid: int) -> list[str]:
    """Segments, folders and processes of this benchmark that are still there."""
    found = [str(p) for p in Path("/dev/shm").glob(f"kvkeep-bench-{pid}-*")]
    found += [str(p) for p in tmp_path.glob("kvkeep-bench-*")]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(f"bench-{pid}-".encode()) for word in words):
            found.append(str(command))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_prints_one_json_object_a_case_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    process = start(tmp_path, name, "--quick", "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert {line["case"] for line in lines} >= CASES[name]
    for line in lines:
        assert {"case", "value", "unit", "reference", "reference_name", "ratio", "seed"} <= set(line)
        assert isinstance(line["value"], int | float)
        assert isinstance(line["unit"], str)
        if line["reference"]:
            assert line["reference_name"]
            assert line["ratio"] == pytest.approx(line["value"] / line["reference"], rel=1e-3)
        else:
            assert line["ratio"] is None
    assert leftovers(tmp_path, process.pid) == []


def test_every_entry_is_kept_over_the_kill_that_the_restart_benchmark_makes(tmp_path: Path) -> None:
    process = start(tmp_path, "restart", "--quick", "--json", "--only", "warm")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    (line,) = map(json.loads, out.splitlines())
    assert (line["kept"], line["entries"]) == (1.0, 1000)


def test_without_json_a_benchmark_prints_a_table(tmp_path: Path) -> None:
    process = start(tmp_path, "control", "--quick", "--only", "lookup/2048")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "case " in out
    assert "lookup/2048/1k" in out
    assert "store_commit" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_cleans_up(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, "footprint", "--json", "--only", "bytes")
    try:
        until = time.monotonic() + 60
        while not list(Path("/dev/shm").glob(f"kvkeep-bench-{process.pid}-*-data")):
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert leftovers(tmp_path, process.pid) == []
    finally:
        process.kill()
        process.wait()


def test_a_peer_that_is_not_installed_is_one_sentence(tmp_path: Path) -> None:
    if importlib.util.find_spec("lmcache"):
        pytest.skip("it is installed")
    process = start(tmp_path, "l2", "--quick", "--peer", "lmcache")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert err.startswith("kvkeep bench l2: --peer lmcache cannot be imported here")
    assert leftovers(tmp_path, process.pid) == []
